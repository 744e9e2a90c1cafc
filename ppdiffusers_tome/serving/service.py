"""What the HTTP side asks of whoever draws: this process (queue.py) or a cluster."""

from collections.abc import Sequence
from typing import Literal, Protocol

from PIL.Image import Image

from .jobs import Job, Limits

State = Literal["loading", "ready", "draining", "failed"]


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

    async def submit(self, jobs: Sequence[Job]) -> list[Image]:
        """Draw all jobs or none. Cancelling the call abandons them, so that they take no place and no time any more.

        Returns:
            RGB pictures, in the order of the jobs.

        Raises:
            QueueFullError, NotReadyError, DrainingError: not now; the jobs were not accepted.
            DrawingError: the pipeline failed on one of the jobs.
        """
