"""Waiting and running jobs, the pipeline calls that they share, their progress, and the errors of a refusal."""

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


@dataclass(eq=False)
class Progress:
    """The progress of a pipeline call. The thread of its engine records it, and any thread reads it.

    Args:
        images: number of images in the call, which may be of several requests.
        steps: denoising steps of the call.
        since: when it began, by time.monotonic().
        step: the number of finished steps.
        step_times: when each of them ended; None if the engine does not report every step.
        until: when the call ended; None while it runs, or if it failed.
    """

    images: int
    steps: int
    since: float
    step: int = 0
    step_times: list[float] | None = field(default_factory=list)
    until: float | None = None

    @property
    def seconds(self) -> float:
        """The duration of the call so far."""
        return (monotonic() if self.until is None else self.until) - self.since

    @property
    def step_seconds(self) -> list[float]:
        """Duration of each step; empty if the engine does not report every step."""
        return [end - start for start, end in pairwise([self.since, *(self.step_times or ())])]

    def advance(self, step: int, steps: int) -> None:
        """Record that `step` of `steps` steps are finished."""
        if self.step_times is not None and (step or self.step_times):  # step 0 comes before the first step
            self.step_times = [*self.step_times, monotonic()] if step == len(self.step_times) + 1 else None
        self.step, self.steps = step, steps

    def end(self) -> None:
        """Record that the images of the call are there."""
        self.step, self.until = self.steps, monotonic()


class UnavailableError(ToMeError, RuntimeError):
    """No job is accepted at the moment."""


class QueueFullError(UnavailableError):
    """The queue holds as many images as it may."""


@dataclass(eq=False)
class Ticket:
    """A job in the queue or in the pipeline. Its future is cancelled when no client waits for the image any more."""

    job: Job
    arrived: float  # by time.monotonic()
    future: "Future[Image.Image]" = field(default_factory=Future)
    place: int = 0  # in the queue, 1 for the next ticket; 0 if it does not wait
    progress: Progress | None = None  # of the last call that it shared; None before the first call
    runs_alone: bool = False  # because a call that it shared has failed
    lost_engines: int = 0

    def fail(self, error: BaseException) -> None:
        """Raise an error where the image is awaited.

        It is a generic message unless the error is ours: messages of all other errors may leak paths.
        """
        if not isinstance(error, (GenerationError, JobError)):
            error = GenerationError("the pipeline failed; the server's log has the reason")
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(eq=False)
class Call:
    """A pipeline call that is running."""

    tickets: list[Ticket]
    progress: Progress

    @property
    def jobs(self) -> list[Job]:
        return [ticket.job for ticket in self.tickets]

    def advance(self, step: int, steps: int) -> bool:
        """Record the progress; returns whether no client waits for any of the images."""
        self.progress.advance(step, steps)
        return all(ticket.future.cancelled() for ticket in self.tickets)


def next_batch(waiting: Sequence[Ticket], max_batch: int) -> tuple[list[Ticket], bool]:
    """The oldest job and those that share its call, and whether more could."""
    oldest = waiting[0]
    key = oldest.job.batch_key
    if key is None or oldest.runs_alone:
        return [oldest], False
    compatible = [ticket for ticket in waiting if ticket.job.batch_key == key]
    return compatible[:max_batch], len(compatible) < max_batch
