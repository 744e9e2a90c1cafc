"""What the HTTP side asks of whoever draws: this process (queue.py) or a cluster."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from PIL.Image import Image

from .jobs import Job, Limits

State = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class Progress:
    """How far a service is with what it has accepted.

    Args:
        running, waiting: images in the pipeline, and images that wait for it.
        step, steps: of the pipeline call that runs; 0 of 0 where nothing runs, or where its steps are not known here.
        seconds: since that call began.
    """

    running: int = 0
    waiting: int = 0
    step: int = 0
    steps: int = 0
    seconds: float = 0.0


class Service(Protocol):
    """Draws jobs."""

    @property
    def name(self) -> str:
        """What clients call the model."""

    @property
    def sampler(self) -> str:
        """What draws, "DDIM" for instance, in the words of Stable Diffusion's user interfaces."""

    @property
    def limits(self) -> Limits:
        """Which jobs are taken."""

    @property
    def state(self) -> State:
        """Only "ready" takes jobs; "failed" is for good."""

    @property
    def trouble(self) -> str | None:
        """Why the process should be replaced, in words; None while it works."""

    def progress(self) -> Progress:
        """How far it is."""

    async def submit(self, jobs: Sequence[Job], load_image: Callable[[], Image] | None = None) -> list[Image]:
        """Draw all jobs or none. Cancelling the call abandons them, so that they take no place and no time any more.

        Args:
            jobs: of one request; without their image where `load_image` is given.
            load_image: decodes the image that all jobs start from. It is called once, in a thread of its own, after
                the jobs have got their places and before they are drawn.

        Returns:
            RGB pictures, in the order of the jobs.

        Raises:
            QueueFullError, NotReadyError, DrainingError: not now; the jobs were not accepted.
            JobError: from `load_image`.
            DrawingError: the pipeline failed on one of the jobs.
        """


async def with_image(jobs: Sequence[Job], load_image: Callable[[], Image] | None) -> Sequence[Job]:
    """The jobs with the image that they start from, decoded in a thread; as they are where there is none."""
    if load_image is None:
        return jobs
    image = await asyncio.to_thread(load_image)
    return [replace(job, image=image) for job in jobs]
