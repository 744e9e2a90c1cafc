"""The interface between the HTTP application and what generates images: this process (queue.py) or a cluster."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from PIL.Image import Image

from ..generation.jobs import Job, Limits
from ..generation.png import Source

State = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class Progress:
    """How far a service is with its accepted jobs.

    Args:
        running, waiting: images in the pipeline, and images in the queue.
        step, steps: of the current pipeline call; 0 of 0 if none runs, or if its steps are not known here.
        seconds: since that call began.
    """

    running: int = 0
    waiting: int = 0
    step: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass
class RequestProgress:
    """How far the images of one request are. The service writes it, from any thread; the request's handler polls it.

    Args:
        position: place of its last image in the queue, 1 for the next one; 0 if none of its images waits; None until
            the service has accepted them.
        step, steps: the mean over its images, which may be in several pipeline calls; 0 of 0 before the first one, or
            if its steps are not known here.
        images, generated: of the request, and those whose pipeline call has ended.
        seconds: duration of the pipeline calls that have generated its images; waiting does not count.
        batch: images in the last of these calls. They may be of several requests.
    """

    position: int | None = None
    step: int = 0
    steps: int = 0
    images: int = 1
    generated: int = 0
    seconds: float = 0.0
    batch: int = 0

    def count(self, step: int, steps: int, images: int) -> None:
        """Note that a pipeline call with this many of the images has finished `step` of `steps`."""
        finished = (self.generated * steps + images * step) // self.images
        self.step, self.steps = max(self.step, finished), steps  # a batch that failed is repeated image by image


class Service(Source, Protocol):
    """Generates the images of jobs, and describes how."""

    @property
    def limits(self) -> Limits:
        """The jobs that are accepted."""

    @property
    def state(self) -> State:
        """Jobs are accepted only while "ready"; "failed" is permanent."""

    @property
    def trouble(self) -> str | None:
        """The reason to replace the process; None while it works."""

    def progress(self) -> Progress:
        """The current progress."""

    async def submit(
        self,
        jobs: Sequence[Job],
        load_image: Callable[[], Image] | None = None,
        progress: RequestProgress | None = None,
    ) -> list[Image]:
        """Generate the images of all jobs or of none. Cancelling the call abandons the jobs and frees their places.

        Args:
            jobs: of one request; without their image if `load_image` is given.
            load_image: decodes the image that all jobs start from. It is called once, in a thread, after the jobs
                have their places and before the pipeline runs.
            progress: a new one, which the service keeps up to date.

        Returns:
            RGB images, in the order of the jobs.

        Raises:
            QueueFullError, NotReadyError, DrainingError: the jobs are not accepted now.
            JobError: from `load_image`, or the model's scheduler has no schedule of so many steps.
            GenerationError: the pipeline failed on one of the jobs; a JobFailedError if the job is the cause.
        """


async def with_image(jobs: Sequence[Job], load_image: Callable[[], Image] | None) -> Sequence[Job]:
    """The jobs with the image that they start from, decoded in a thread; unchanged if `load_image` is None."""
    if load_image is None:
        return jobs
    image = await asyncio.to_thread(load_image)
    return [replace(job, image=image) for job in jobs]
