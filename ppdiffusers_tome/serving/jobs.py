"""A job is one image to generate; limits are the jobs that a server accepts. Nothing here depends on HTTP or Paddle.

The errors survive pickling, because Ray sends them between processes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from PIL.Image import Image, Resampling

from ..errors import ParameterError, ToMeConfigError, ToMeError
from ..run.manifest import Size, find_ratio

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
    """The process of an engine has ended or does not end a pipeline call; another engine can repeat its jobs."""


def seed_after(first: int, count: int) -> int:
    """The seed of the image `count` places after the one with seed `first`: their sum, modulo 2**32."""
    return (first + count) % (MAX_SEED + 1)


@dataclass(frozen=True)
class SecondPass:
    """Image-to-image at a larger size, from the enlarged image of a first pass ("hires fix").

    Args:
        height, width: pixels, one of the exported sizes.
        ratio: as in `Job`; the first pass has its own.
        steps: number of steps that run, whatever the strength.
        strength: share of denoising that the steps cover, 0 < strength <= 1.
    """

    height: int
    width: int
    ratio: float
    steps: int
    strength: float

    @property
    def size(self) -> Size:
        """Height and width."""
        return Size(self.height, self.width)

    @property
    def scheduled_steps(self) -> int:
        """Number of steps for which the scheduler must be set so that `strength` leaves `steps` of them."""
        count = int(self.steps / self.strength)
        while int(count * self.strength) < self.steps:  # as pipelines round
            count += 1
        return count


@dataclass(frozen=True)
class Job:
    """One image to generate, from noise or from another image.

    Args:
        prompt, negative_prompt: texts. ppdiffusers cuts off what does not fit the model's tokenizer.
        height, width: pixels, one of the exported sizes.
        ratio: share of the tokens to merge away, one of the exported ratios.
        seed: 0 to 2**32 - 1. Equal jobs give equal images, whatever else is in their batch.
        steps: denoising steps.
        guidance_scale: weight of classifier-free guidance; up to 1 there is none, and negative_prompt has no effect.
        image: RGB, the image to start from; None for noise. It may be added later, see `ImageQueue.submit`.
        strength: share of the steps that run on the image, 0 < strength <= 1; None without an image.
        second_pass: a second pass that follows; only without an image.
    """

    prompt: str
    height: int
    width: int
    ratio: float
    seed: int
    negative_prompt: str = ""
    steps: int = 20
    guidance_scale: float = 7.5
    image: Image | None = field(default=None, repr=False, hash=False)  # images have no hash
    strength: float | None = None
    second_pass: SecondPass | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", self.ratio + 0.0)  # -0.0 is 0.0: equal jobs have equal settings

    @property
    def size(self) -> Size:
        """Height and width."""
        return Size(self.height, self.width)

    @property
    def is_from_noise(self) -> bool:
        """Whether text-to-image alone generates it."""
        return self.image is None and self.second_pass is None

    @property
    def steps_to_run(self) -> int:
        """Denoising steps of both passes."""
        first = self.steps if self.strength is None else int(self.steps * self.strength)
        return first + (self.second_pass.steps if self.second_pass else 0)

    def second_job(self, image: Image) -> "Job":
        """The second pass as a job of its own, from the image of the first, enlarged."""
        second = self.second_pass
        assert second is not None
        job = replace(self, height=second.height, width=second.width, ratio=second.ratio, second_pass=None)
        image = image.resize((second.width, second.height), Resampling.LANCZOS)
        return replace(job, image=image, strength=second.strength, steps=second.scheduled_steps)

    @property
    def batch_key(self) -> tuple[float, ...] | None:
        """Settings that all jobs of one pipeline call share; None for image-to-image, which runs job by job.

        Its pipelines sample noise for the whole batch at once, so an image would depend on the rest of its batch.
        """
        if not self.is_from_noise:
            return None
        return self.height, self.width, self.steps, self.guidance_scale, self.ratio

    def shares_call_with(self, others: "Sequence[Job]") -> bool:
        """Whether jobs have the settings of this one, so that one pipeline call can run them all."""
        return self.batch_key is not None and all(job.batch_key == self.batch_key for job in others)

    def settings(self) -> dict[str, Any]:
        """All fields but the image, ready for JSON; `strength` and `second_pass` only where they are set."""
        texts = {"prompt": self.prompt, "negative_prompt": self.negative_prompt}
        numbers = {"seed": self.seed, "steps": self.steps, "guidance_scale": self.guidance_scale}
        size = {"width": self.width, "height": self.height, "tome_ratio": self.ratio}
        strength = {} if self.strength is None else {"strength": self.strength}
        second_pass = {} if self.second_pass is None else {"second_pass": asdict(self.second_pass)}
        return {**texts, **numbers, **size, **strength, **second_pass}


@dataclass(frozen=True)
class Limits:
    """The jobs that a server accepts.

    Args:
        sizes: the exported ones, in pixels; the first is the default.
        ratios: the exported ratios; the first is the default.
        image_to_image: whether jobs may start from an image.
        prompt_characters: length of the longest prompt or negative prompt.
        images: largest number of images in one request.
        steps: largest number of denoising steps.
        guidance_scale: largest guidance scale.
        image_pixels, image_side, image_aspect: limits of an image that a client sends: width times height, the longer
            side, and the ratio of the longer to the shorter side.

    Raises:
        ToMeConfigError: a limit is not positive, or there is no size or no ratio.
    """

    sizes: tuple[Size, ...]
    ratios: tuple[float, ...]
    image_to_image: bool = False
    prompt_characters: int = 2000
    images: int = 4
    steps: int = 100
    guidance_scale: float = 30.0
    image_pixels: int = 2**22
    image_side: int = 8192
    image_aspect: float = 16.0

    def __post_init__(self) -> None:
        if not self.sizes or not self.ratios:
            raise ToMeConfigError(f"sizes={self.sizes!r}, ratios={self.ratios!r}: at least one of each is required")
        for name in ("prompt_characters", "images", "steps", "guidance_scale", "image_pixels", "image_side"):
            if not getattr(self, name) > 0:
                raise ParameterError(name, getattr(self, name), "it must be positive")

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest value of a job's numbers, and of the number of images in one request."""
        return {
            "images": (1, self.images),
            "seed": (0, MAX_SEED),
            "steps": (1, self.steps),
            "guidance_scale": (0, self.guidance_scale),
        }

    def check(self, job: Job, images: int = 1) -> Job:
        """The job, with the exported ratios that are the same in six digits, of its second pass too.

        Raises:
            JobError: it is not allowed, or too many images are; with the field and its allowed values.
        """
        self.check_range("images", images)
        self.check_text("prompt", job.prompt)
        self.check_text("negative_prompt", job.negative_prompt)
        for name in ("seed", "steps", "guidance_scale"):
            self.check_range(name, getattr(job, name))
        self._check_size(job.size)
        job = replace(job, ratio=self.exported_ratio(job.ratio))
        if job.strength is not None:
            self._check_strength(job.strength)
            if int(job.steps * job.strength) < 1:
                message = f"{job.strength} of {job.steps} steps is less than one step: raise one of them"
                raise JobError("strength", message)
        if job.second_pass is not None:
            job = replace(job, second_pass=self._checked_second_pass(job.second_pass))
        return job

    def check_range(self, name: str, value: float) -> None:
        """Raise JobError unless a value is within its range, one of `ranges`.

        The message does not name the field, which has other names for clients and on the command line.
        """
        low, high = self.ranges[name]
        if not low <= value <= high:
            raise JobError(name, f"{value!s:.60} is not allowed: it must be {low} to {high}")

    def check_text(self, name: str, text: str) -> None:
        """Raise JobError unless a prompt can be encoded and is short enough."""
        if len(text) > self.prompt_characters:
            raise JobError(name, f"{len(text)} characters are too many: the limit is {self.prompt_characters}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise JobError(name, "it contains an unpaired surrogate, which is not a character")

    def exported_ratio(self, ratio: float) -> float:
        """The exported ratio that is the same in six digits; JobError if there is none."""
        try:
            return find_ratio(ratio, self.ratios)
        except ToMeConfigError:
            ratios = ", ".join(map(str, self.ratios))
            raise JobError("ratio", f"ratio {ratio} was not exported: it must be one of {ratios}") from None

    def _checked_second_pass(self, second: SecondPass) -> SecondPass:
        try:
            self.check_range("steps", second.steps)
            self._check_size(second.size)
            second = replace(second, ratio=self.exported_ratio(second.ratio))
            self._check_strength(second.strength)
            if second.steps > second.strength * MAX_STEPS:
                message = f"{second.strength} leaves less than {second.steps} of {MAX_STEPS} steps"
                raise JobError("strength", message)
        except JobError as error:
            raise JobError(f"second_pass.{error.field}", str(error)) from None
        return second

    def _check_size(self, size: Size) -> None:
        if size not in self.sizes:
            sizes = ", ".join(map(str, self.sizes))
            raise JobError("size", f"{size} was not exported: width x height must be one of {sizes}")

    def _check_strength(self, strength: float) -> None:
        if not self.image_to_image:
            raise JobError("image", "image-to-image was not exported: export the model with --img2img")
        if not 0 < strength <= 1:
            raise JobError("strength", f"{strength} is not allowed: it must be above 0 and at most 1")
