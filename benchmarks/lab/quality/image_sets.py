"""What an evaluation generates: its arms, its prompts, and the jobs that follow from both."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from ppdiffusers_tome.config import ToMeConfig
from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.serving.jobs import MAX_SEED, Job, seed_after
from ppdiffusers_tome.serving.prompt_file import Prompt, model_prompts, read_texts

from ..arm import Arm

RATIOS = (0.1, 0.25, 0.5, 0.75)
PHOTOGRAPHS = ("astronaut", "brick", "chelsea", "coffee", "grass", "gravel", "motorcycle_left", "rocket")
MIN_SIZE = 21  # px: ST-LPIPS reflects borders, and in smaller images the third is wider than the feature map


PLAIN_IMAGES = Arm()
# Plain images of the same prompts from other noise: how far apart two samples of one model are.
OTHER_SEEDS = Arm(other_seed=True)


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
        job = Job("", self.size, self.size, arm.ratio, 0, "", steps, self.guidance_scale)
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


def list_arms(ratios: Sequence[float], methods: Sequence[Mapping[str, Any]] = ()) -> list[Arm]:
    """The arms of an evaluation: the method "default" at each ratio, then the methods.

    Args:
        ratios: numbers above 0.
        methods: other ways to merge, as arguments of `ToMeConfig`. Each runs at every ratio, or at its own. One that
            equals the first is not generated again.

    Raises:
        ToMeConfigError: a ratio is 0, too large or repeated, or a method is not allowed or repeated.
    """
    if repeated := [ratio for ratio in ratios if list(ratios).count(ratio) > 1]:
        raise ToMeConfigError(f"ratio {repeated[0]:g} is repeated: list each ratio once.")

    def config_at(at: float, **options: Any) -> ToMeConfig:
        config = ToMeConfig(**{**options, "ratio": at})
        if config.ratio == 0:
            raise ToMeConfigError(f"ratio={at!r} is not allowed: it must be above 0, plain is always generated.")
        return config

    configs, of_methods = [config_at(ratio, method="default") for ratio in ratios], list[ToMeConfig]()
    for method in methods:
        for ratio in [method["ratio"]] if "ratio" in method else ratios:
            config = config_at(ratio, **method)
            if config in of_methods:
                raise ToMeConfigError(f"{config.describe()} is repeated: list each way to merge once.")
            of_methods.append(config)
    return [Arm(config) for config in dict.fromkeys([*configs, *of_methods])]


def prompts_of(model: str, file: Path | None = None) -> list[str]:
    """The prompts in a file (`serving.prompt_file.read_texts`); without one, those of `model_prompts`.

    Raises:
        ToMeConfigError: as `read_texts`.
    """
    return model_prompts(model, "--prompts") if file is None else read_texts(file)


def with_seeds(texts: Sequence[str], count: int, seed: int) -> tuple[tuple[str, int], ...]:
    """(text, seed) of `count` images: the texts in turn, repeated as often as needed, each image with the next seed.

    Raises:
        ToMeConfigError: count or seed is out of range.
    """
    if count < 2:
        raise ToMeConfigError(f"count={count!r} is not allowed: it must be 2 or more, because KID compares sets.")
    if not 0 <= seed <= MAX_SEED - count:
        raise ToMeConfigError(f"seed={seed!r} is not allowed: it must be 0 to {MAX_SEED - count}.")
    return tuple((texts[n % len(texts)], seed + n) for n in range(count))
