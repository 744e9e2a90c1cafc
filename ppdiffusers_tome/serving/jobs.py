"""A job is one picture to draw. Limits say which jobs a server takes. Neither knows HTTP or Paddle."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from PIL.Image import Image

from ..errors import ToMeConfigError
from .errors import JobError

LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Job:
    """One picture to draw, from noise or from a picture.

    Args:
        prompt, negative_prompt: texts. What does not fit the model's tokenizer is cut off by ppdiffusers.
        height, width: pixels, one of the exported sizes.
        ratio: share of the tokens to merge away, one of the exported ratios.
        seed: 0 to 2**32 - 1; the same job draws the same picture, whatever it is drawn together with.
        steps: denoising steps.
        guidance_scale: weight of classifier-free guidance; up to 1 there is none, and negative_prompt does nothing.
        image: RGB, start from it instead of from noise; it may come later than the rest, see `Service.submit`.
        strength: share of the steps that are done on the image, 0 < strength <= 1; None where there is no image.
    """

    prompt: str
    height: int
    width: int
    ratio: float
    seed: int
    negative_prompt: str = ""
    steps: int = 20
    guidance_scale: float = 7.5
    image: Image | None = field(default=None, repr=False)
    strength: float | None = None

    def settings(self) -> dict[str, Any]:
        """What made the picture, ready for JSON: all fields but the image, and no strength where there is none."""
        texts = {"prompt": self.prompt, "negative_prompt": self.negative_prompt}
        numbers = {"seed": self.seed, "steps": self.steps, "guidance_scale": self.guidance_scale}
        size = {"width": self.width, "height": self.height, "tome_ratio": self.ratio}
        return {**texts, **numbers, **size, **({} if self.strength is None else {"strength": self.strength})}


@dataclass(frozen=True)
class Limits:
    """Which jobs a server takes.

    Args:
        sizes: the exported (height, width), in pixels; the first is the default.
        ratios: the exported ratios; the first is the default.
        image_to_image: whether jobs may start from a picture.
        prompt_characters: longest prompt and longest negative prompt.
        images: most pictures of one request.
        steps: most denoising steps.
        guidance_scale: largest weight of the guidance.
        image_pixels, image_side, image_aspect: of an image that a client sends, the most pixels (width times height),
            the longest side, and how many times the shorter side it may be.

    Raises:
        ToMeConfigError: a limit is not positive, or there is no size or no ratio.
    """

    sizes: tuple[tuple[int, int], ...]
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
            raise ToMeConfigError(f"sizes={self.sizes!r}, ratios={self.ratios!r}: a server needs one of each at least")
        for name in ("prompt_characters", "images", "steps", "guidance_scale", "image_pixels", "image_side"):
            if not getattr(self, name) > 0:
                raise ToMeConfigError(f"{name}={getattr(self, name)!r} is not allowed: it must be positive")

    def check_count(self, images: int) -> None:
        """Raise JobError, whose field is `images`, unless so many pictures may be asked for at once."""
        if not 1 <= images <= self.images:
            raise JobError("images", f"{images} images are not allowed: it must be 1 to {self.images} in one request")

    def check(self, job: Job) -> None:
        """Raise JobError, which names the field and what is allowed, unless the job may be drawn."""
        self._check_texts(job)
        if not 0 <= job.seed <= LARGEST_SEED:
            raise JobError("seed", f"seed={job.seed} is not allowed: it must be 0 to {LARGEST_SEED}")
        if not 1 <= job.steps <= self.steps:
            raise JobError("steps", f"steps={job.steps} is not allowed: it must be 1 to {self.steps}")
        if not (isfinite(job.guidance_scale) and 0 <= job.guidance_scale <= self.guidance_scale):
            raise JobError(
                "guidance_scale", f"{job.guidance_scale} is not allowed: it must be 0 to {self.guidance_scale}"
            )
        if (job.height, job.width) not in self.sizes:
            listed = ", ".join(f"{width}x{height}" for height, width in self.sizes)
            raise JobError(
                "size", f"{job.width}x{job.height} was not exported: width x height must be one of {listed}"
            )
        if job.ratio not in self.ratios:
            listed = ", ".join(str(ratio) for ratio in self.ratios)
            raise JobError("ratio", f"ratio {job.ratio} was not exported: it must be one of {listed}")
        self._check_image(job)

    def _check_texts(self, job: Job) -> None:
        for name in ("prompt", "negative_prompt"):
            text = getattr(job, name)
            if len(text) > self.prompt_characters:
                most = f"at most {self.prompt_characters} are allowed"
                raise JobError(name, f"{len(text)} characters are too many: {most}")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise JobError(name, "it holds half a surrogate pair, which is no character")

    def _check_image(self, job: Job) -> None:
        if job.strength is None:
            return
        if not self.image_to_image:
            raise JobError("image", "image to image was not exported: export the model with --img2img")
        if not 0 < job.strength <= 1:
            raise JobError("strength", f"{job.strength} is not allowed: it must be above 0 and at most 1")
        if int(job.steps * job.strength) < 1:
            message = f"{job.strength} of {job.steps} steps is less than one step, so nothing would be drawn"
            raise JobError("strength", message)
