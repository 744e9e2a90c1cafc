"""A job is one image to generate. Nothing here depends on HTTP or Paddle.

The errors survive pickling, because Ray sends them between processes.
"""

from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from ..errors import ToMeConfigError, ToMeError
from ..run.sizes import Size

MAX_SEED = 2**32 - 1
MAX_STEPS = 1000  # as many as models are trained with
MAX_LOST_ENGINES = 3  # that may be lost with one job before the job counts as the cause


class JobError(ToMeConfigError):
    """A job is not allowed. `field` is the name of the job's field; the message says which values are allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple:
        return type(self), (self.field, str(self))


class AbandonedError(ToMeError, RuntimeError):
    """No client waits for these images any more, so the pipeline call was stopped between two steps."""


class GenerationError(ToMeError, RuntimeError):
    """The pipeline failed; the server's log has the reason."""


class EngineLostError(ToMeError, RuntimeError):
    """The process of an engine has ended or does not end a pipeline call; a different engine can repeat its jobs."""


def seed_after(first: int, count: int) -> int:
    """The seed of the image `count` places after the image with seed `first`: their sum, modulo 2**32."""
    return (first + count) % (MAX_SEED + 1)


@dataclass(frozen=True)
class SecondPass:
    """Image-to-image at a larger size, from the enlarged image of a first pass ("hires fix").

    Args:
        size: one of the exported sizes.
        ratio: as in `Job`; the first pass has its own.
        steps: number of steps that run, whatever the strength.
        strength: share of denoising that the steps cover, 0 < strength <= 1.

    Raises:
        JobError: the strength leaves fewer than `steps` of the steps that a model is trained with.
    """

    size: Size
    ratio: float
    steps: int
    strength: float

    def __post_init__(self) -> None:
        if self.steps > self.strength * MAX_STEPS:
            raise JobError("strength", f"{self.strength} leaves less than {self.steps} of {MAX_STEPS} steps")

    @property
    def scheduled_steps(self) -> int:
        """Number of steps for which the scheduler must be set so that `strength` leaves `steps` of them."""
        count = int(self.steps / self.strength)
        while int(count * self.strength) < self.steps:  # as pipelines round
            count += 1
        return count


@dataclass(frozen=True)
class Job:
    """One image to generate, from noise or from an image.

    What a field allows depends on the export, and is checked where the values come from: see `limits.Limits`. What
    two fields allow together is checked here.

    Args:
        prompt, negative_prompt: texts; an empty negative prompt is none. ppdiffusers cuts off what does not fit the
            model's tokenizer.
        size: one of the exported sizes.
        ratio: share of the tokens to merge away, one of the exported ratios.
        seed: 0 to 2**32 - 1. Equal jobs give equal images, whatever else is in their batch.
        steps: denoising steps.
        guidance_scale: weight of classifier-free guidance; up to 1 there is none, and negative_prompt has no effect.
        image: RGB, of the job's size: the image to start from; None for noise. It may be added later, see
            `JobQueue.submit`.
        strength: share of the steps that run on the image, 0 < strength <= 1; None without an image.
        second_pass: a second pass that follows; only without an image.

    Raises:
        JobError: the strength leaves less than one step, or the image is not RGB or not of the job's size.
    """

    prompt: str
    size: Size
    ratio: float
    seed: int
    negative_prompt: str = ""
    steps: int = 20
    guidance_scale: float = 7.5
    image: Image.Image | None = field(default=None, repr=False, hash=False)  # images have no hash
    strength: float | None = None
    second_pass: SecondPass | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.ratio + 0.0)  # -0.0 is 0.0: equal jobs have equal settings
        if self.strength is not None and int(self.steps * self.strength) < 1:
            message = f"{self.strength} of {self.steps} steps is less than one step: raise one of them"
            raise JobError("strength", message)
        image = self.image
        if image is not None and (image.mode != "RGB" or image.size != (self.size.width, self.size.height)):
            given = f"{image.mode} image of {Size(image.height, image.width)}"
            raise JobError("image", f"a {given} is not allowed: it must be RGB, {self.size}")

    @property
    def steps_to_run(self) -> int:
        """Denoising steps of both passes."""
        first = self.steps if self.strength is None else int(self.steps * self.strength)
        return first + (self.second_pass.steps if self.second_pass else 0)

    @property
    def batch_key(self) -> tuple[Any, ...] | None:
        """Settings that all jobs of one pipeline call share; None for image-to-image, which runs job by job.

        Its pipelines sample noise for the whole batch at once, so an image would depend on the rest of its batch.
        """
        if self.image is not None or self.second_pass is not None:
            return None
        return self.size, self.steps, self.guidance_scale, self.ratio, bool(self.negative_prompt)

    def settings(self) -> dict[str, Any]:
        """All fields but the image, ready for JSON; `strength` and `second_pass` only where they are set."""
        texts = {"prompt": self.prompt, "negative_prompt": self.negative_prompt}
        numbers = {"seed": self.seed, "steps": self.steps, "guidance_scale": self.guidance_scale}
        size = {"width": self.size.width, "height": self.size.height, "tome_ratio": self.ratio}
        strength = {} if self.strength is None else {"strength": self.strength}
        second = {}
        if self.second_pass is not None:
            passed = {name: value for name, value in vars(self.second_pass).items() if name != "size"}
            second = {"second_pass": {**self.second_pass.size._asdict(), **passed}}
        return {**texts, **numbers, **size, **strength, **second}
