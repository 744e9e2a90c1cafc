"""What a comparison of images generates: its prompts, and the jobs of an arm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from PIL import Image, ImageOps

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.run.sizes import Size
from ppdiffusers_tome.serving.jobs import MAX_SEED, Job, seed_after
from ppdiffusers_tome.serving.prompt_file import Prompt

from ..arm import Arm

PHOTOGRAPHS = ("astronaut", "brick", "chelsea", "coffee", "grass", "gravel", "motorcycle_left", "rocket")
MIN_SIZE = 21  # px: ST-LPIPS reflects borders, and in smaller images the third is wider than the feature map


@dataclass(frozen=True)
class Evaluation:
    """What is generated, apart from the arms. Raises ToMeConfigError if a number is out of range."""

    model: str  # folder of a ppdiffusers pipeline, or hub name
    prompts: tuple[tuple[str, int], ...]  # (text, seed) of each image of an arm, at least two
    size: int  # px, height and width
    steps: int
    guidance_scale: float
    threads: int
    strength: float | None = None  # for image-to-image from PHOTOGRAPHS in turn; None: from noise

    def __post_init__(self) -> None:
        for name, minimum, maximum in (("size", MIN_SIZE, 2**15), ("steps", 1, 10**4), ("threads", 1, 1024)):
            if not minimum <= (value := getattr(self, name)) <= maximum:
                raise ToMeConfigError(f"{name}={value!r} is not allowed: it must be from {minimum} to {maximum:,}.")
        if not math.isfinite(self.guidance_scale):
            raise ToMeConfigError(f"guidance_scale={self.guidance_scale!r} is not allowed: it must be finite.")
        if self.strength is not None and not (0 < self.strength <= 1 and int(self.steps * self.strength) >= 1):
            raise ToMeConfigError(
                f"strength={self.strength!r} is not allowed: it must be above 0 and at most 1, and at least one of "
                f"{self.steps} steps."
            )

    def jobs(self, arm: Arm) -> list[Prompt]:
        """The images of an arm. `strength` of its steps run, so an arm with steps of its own has more."""
        steps = self.steps if arm.steps is None else round(arm.steps / (self.strength or 1))
        job = Job("", Size(self.size, self.size), arm.ratio, 0, "", steps, self.guidance_scale)
        offset = 2**31 if arm.other_seed else 0
        prompts = []
        for n, (text, seed) in enumerate(self.prompts):
            name = "" if self.strength is None else PHOTOGRAPHS[n % len(PHOTOGRAPHS)]
            image = photograph(name, self.size) if name else None
            own = replace(job, prompt=text, seed=seed_after(seed, offset), image=image, strength=self.strength)
            prompts.append(Prompt(n, own, name))
        return prompts


@cache
def photograph(name: str, size: int) -> Image.Image:
    """The middle of one of scikit-image's photographs, as a square RGB image of `size` px."""
    import skimage.data  # here, because only the images of `--strength` need it

    path = next(Path(skimage.data.__file__).parent.glob(f"{name}.*"))
    return ImageOps.fit(Image.open(path).convert("RGB"), (size, size), Image.Resampling.LANCZOS)


def with_seeds(texts: Sequence[str], count: int, seed: int) -> tuple[tuple[str, int], ...]:
    """(text, seed) of `count` images: the texts in turn, repeated as often as needed, each image with the next seed.

    Raises:
        ToMeConfigError: count or seed is out of range.
    """
    if count < 2:
        raise ToMeConfigError(f"count={count!r} is not allowed: it must be 2 or more.")
    if not 0 <= seed <= MAX_SEED - count:
        raise ToMeConfigError(f"seed={seed!r} is not allowed: it must be 0 to {MAX_SEED - count}.")
    return tuple((texts[n % len(texts)], seed + n) for n in range(count))
