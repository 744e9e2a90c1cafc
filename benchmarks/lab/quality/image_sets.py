"""What an evaluation generates: its image sets, its prompts, and the jobs that follow from both."""

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

RATIOS = (0.1, 0.25, 0.5, 0.75)
PHOTOGRAPHS = ("astronaut", "brick", "chelsea", "coffee", "grass", "gravel", "motorcycle_left", "rocket")
MIN_SIZE = 21  # px: ST-LPIPS reflects borders, and in smaller images the third is wider than the feature map


@dataclass(frozen=True)
class ImageSet:
    """One way to generate the images of all prompts."""

    name: str  # unique; also the name of the images' folder
    group: str  # its section in the report: "ratio", "method" or "tomesd"
    config: ToMeConfig  # how tokens merge; with ratio 0 they do not
    framework: str = "Paddle"  # or "PyTorch", of benchmarks/tomesd_quality.py


PLAIN_IMAGES = ImageSet("plain", "plain", ToMeConfig(ratio=0))
# Plain images of the same prompts from other noise: how far apart two samples of one model are.
OTHER_SEEDS = ImageSet("other-seeds", "plain", ToMeConfig(ratio=0))


@dataclass(frozen=True)
class Evaluation:
    """What is generated, apart from the image sets. Raises ToMeConfigError if a number is out of range."""

    model: str  # folder of a ppdiffusers pipeline, or hub name
    prompts: tuple[tuple[str, int], ...]  # (text, seed) of each image of an image set, at least two
    size: int  # px, height and width
    steps: int
    guidance_scale: float
    backend: str  # one of PROGRAMS
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

    def jobs(self, image_set: ImageSet) -> list[Prompt]:
        """The images of an image set."""
        job = Job("", self.size, self.size, image_set.config.ratio, 0, "", self.steps, self.guidance_scale)
        offset = 2**31 if image_set == OTHER_SEEDS else 0
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


def list_image_sets(ratios: Sequence[float], methods: Sequence[Mapping[str, Any]] = ()) -> list[ImageSet]:
    """The image sets of an evaluation: the defaults at each ratio, then the methods.

    Args:
        ratios: numbers above 0.
        methods: other ways to merge, as arguments of `ToMeConfig`. Each runs at every ratio, or at its own. One that
            equals the defaults is not generated again.

    Raises:
        ToMeConfigError: a ratio is 0, too large or repeated, or a method is not allowed or repeated.
    """
    if repeated := [ratio for ratio in ratios if list(ratios).count(ratio) > 1]:
        raise ToMeConfigError(f"ratio {repeated[0]:g} is repeated: list each ratio once.")

    def image_set(at: float, suffix: str, group: str, **options: Any) -> ImageSet:
        config = ToMeConfig(**{**options, "ratio": at})
        if config.ratio == 0:
            raise ToMeConfigError(f"ratio={at!r} is not allowed: it must be above 0, plain is always generated.")
        return ImageSet(f"{at:g}{suffix}", group, config)

    by_ratio = [image_set(ratio, "", "ratio") for ratio in ratios]
    of_method: dict[ToMeConfig, ImageSet] = {}
    for method in methods:
        differing = "_".join(f"{name}={value}" for name, value in method.items() if name != "ratio")
        suffix = f"-{differing}" if differing else ""
        for ratio in [method["ratio"]] if "ratio" in method else ratios:
            other = image_set(ratio, suffix, "method", **method)
            if other.config in of_method:
                raise ToMeConfigError(f"{other.config.describe()} is repeated: list each way to merge once.")
            of_method[other.config] = other
    defaults = {one.config for one in by_ratio}
    return by_ratio + [other for config, other in of_method.items() if config not in defaults]


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
