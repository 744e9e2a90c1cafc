"""Waiting and running jobs, the pipeline calls that they share, their progress, and why a queue refuses others."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from typing import Literal

from PIL import Image

from ..errors import ToMeError
from .jobs import GenerationError, Job, JobError

State = Literal["loading", "ready", "draining", "failed"]  # of a pool of engines. "failed" is permanent


@dataclass(frozen=True)
class Progress:
    """The progress of the queue with its accepted jobs.

    Args:
        running, waiting: images in the pipeline, and images in the queue.
        step, steps: of the current pipeline call, of the oldest if there are several; 0 of 0 if none runs.
        seconds: elapsed since that call began.
    """

    running: int = 0
    waiting: int = 0
    step: int = 0
    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, calls: "Sequence[Call]", waiting: int) -> "Progress":
        """The progress of the running calls (oldest first) and of the waiting images."""
        if not calls:
            return cls(waiting=waiting)
        running, oldest = sum(len(call.tickets) for call in calls), calls[0]
        return cls(running, waiting, oldest.step, oldest.steps, oldest.seconds)


@dataclass(eq=False)
class RequestProgress:
    """The progress of one request. The queue updates it from any thread; the request's handler polls it.

    Args:
        position: place of its last image in the queue, 1 for the next one; 0 if none of its images waits; None until
            they are accepted.
        step, steps: the mean over its images, which may be in several pipeline calls; 0 of 0 before the first one.
        images, generated: number of images in the request, and of those whose pipeline call has ended.
        seconds: duration of the pipeline calls that have generated its images; waiting does not count.
        batch: images in the last of these calls. They may be of several requests.
        step_seconds: duration of each step of the last of these calls; empty if its engine does not report every step.
    """

    position: int | None = None
    step: int = 0
    steps: int = 0
    images: int = 1
    generated: int = 0
    seconds: float = 0.0
    batch: int = 0
    step_seconds: list[float] = field(default_factory=list)

    def count(self, step: int, steps: int, images: int) -> None:
        """Record that a pipeline call with `images` of the request's images has finished `step` of `steps`."""
        finished = (self.generated * steps + images * step) // self.images
        self.step, self.steps = max(self.step, finished), steps  # a batch that failed is repeated image by image


class UnavailableError(ToMeError, RuntimeError):
    """No job is accepted at the moment."""


class QueueFullError(UnavailableError):
    """The queue holds as many images as it may."""


@dataclass(eq=False)
class Ticket:
    """A job in the queue or in the pipeline. Its future is cancelled when no client waits for the image any more."""

    job: Job
    progress: RequestProgress  # of its request
    arrived: float  # by time.monotonic()
    future: "Future[Image.Image]" = field(default_factory=Future)
    runs_alone: bool = False  # because a call that it shared has failed
    lost_engines: int = 0

    def fail(self, error: BaseException) -> None:
        """Raise an error where the image is awaited.

        It is a generic one unless it is ours: messages of other errors may leak paths.
        """
        if not isinstance(error, (GenerationError, JobError)):
            error = GenerationError("the pipeline failed; the server's log has the reason")
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(eq=False)
class Call:
    """A pipeline call that is running."""

    tickets: list[Ticket]
    steps: int
    since: float  # by time.monotonic()
    step: int = 0  # the number of finished steps
    step_times: list[float] | None = field(default_factory=list)  # the end of each step; None: not all were reported

    @property
    def jobs(self) -> list[Job]:
        return [ticket.job for ticket in self.tickets]

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return monotonic() - self.since

    @property
    def requests(self) -> Counter[RequestProgress]:
        """The progress of the requests of its jobs, each with the number of its images."""
        return Counter(ticket.progress for ticket in self.tickets)

    @property
    def step_seconds(self) -> list[float]:
        """Duration of each step; empty if the engine does not report every step."""
        return [end - start for start, end in pairwise([self.since, *(self.step_times or ())])]

    def advance(self, step: int, steps: int) -> bool:
        """Record the progress; returns whether no client waits for any of the images."""
        if self.step_times is not None and (step or self.step_times):  # step 0 comes before the first one
            self.step_times = [*self.step_times, monotonic()] if step == len(self.step_times) + 1 else None
        self.step, self.steps = step, steps
        for progress, images in self.requests.items():
            progress.count(step, steps, images)
        return all(ticket.future.cancelled() for ticket in self.tickets)

    def deliver(self, images: Sequence[Image.Image], seconds: float) -> None:
        """Hand over the images of a call that took `seconds`."""
        for progress, count in self.requests.items():
            progress.seconds, progress.batch = progress.seconds + seconds, len(images)
            progress.step_seconds = self.step_seconds
            progress.generated += count
        for ticket, image in zip(self.tickets, images, strict=True):
            if ticket.future.set_running_or_notify_cancel():
                ticket.future.set_result(image)


def next_batch(waiting: Sequence[Ticket], max_batch: int) -> tuple[list[Ticket], bool]:
    """The oldest job and those that share its call, and whether more could."""
    oldest = waiting[0]
    key = oldest.job.batch_key
    if key is None or oldest.runs_alone:
        return [oldest], False
    compatible = [ticket for ticket in waiting if ticket.job.batch_key == key]
    return compatible[:max_batch], len(compatible) < max_batch
