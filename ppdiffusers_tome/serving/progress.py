"""How far the queue and the images of one request are."""

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class Progress:
    """How far the queue is with its accepted jobs.

    Args:
        running, waiting: images in the pipeline, and images in the queue.
        step, steps: of the current pipeline call, of the oldest if there are several; 0 of 0 if none runs.
        seconds: since that call began.
    """

    running: int = 0
    waiting: int = 0
    step: int = 0
    steps: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class RequestProgress:
    """How far the images of one request are. The queue writes it, from any thread; the request's handler polls it.

    Args:
        position: place of its last image in the queue, 1 for the next one; 0 if none of its images waits; None until
            they are accepted.
        step, steps: the mean over its images, which may be in several pipeline calls; 0 of 0 before the first one.
        images, generated: of the request, and those whose pipeline call has ended.
        seconds: duration of the pipeline calls that have generated its images; waiting does not count.
        batch: images in the last of these calls. They may be of several requests.
        step_seconds: duration of each step of the last of these calls; empty if its engine does not report every step.
        merge_maps: the group of each token of each image, [h, w] int, or None; set when the images are there.
    """

    position: int | None = None
    step: int = 0
    steps: int = 0
    images: int = 1
    generated: int = 0
    seconds: float = 0.0
    batch: int = 0
    step_seconds: list[float] = field(default_factory=list)
    merge_maps: list[Any] = field(default_factory=list)

    def count(self, step: int, steps: int, images: int) -> None:
        """Note that a pipeline call with this many of the images has finished `step` of `steps`."""
        finished = (self.generated * steps + images * step) // self.images
        self.step, self.steps = max(self.step, finished), steps  # a batch that failed is repeated image by image
