"""What an evaluation generates: its image sets, its prompts, and the jobs that follow from both."""

import csv
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from ...config import ToMeConfig
from ...errors import ToMeConfigError
from ...generation import prompt_file
from ...generation.jobs import MAX_SEED, Job, seed_after
from ...generation.prompt_file import Prompt, model_prompts
from ..speed.cases import IN_FP32

RATIOS = (0.1, 0.25, 0.5, 0.75)
PHOTOGRAPHS = ("astronaut", "brick", "chelsea", "coffee", "grass", "gravel", "motorcycle_left", "rocket")
ABLATIONS = ("use_rand", "max_downsample", "layers")
LAYERS = (("crossattn",), ("mlp",), ("crossattn", "mlp"))  # that merge beside self-attention
MIN_SIZE = 21  # px: ST-LPIPS reflects borders, and in smaller images the third is wider than the feature map
COLUMN = "Prompt"  # the column of PartiPrompts' table


@dataclass(frozen=True)
class ImageSet:
    """One way to generate the images of all prompts."""

    name: str  # unique; also the name of the images' folder
    group: str  # its section in the report: "ratio", "method", one of ABLATIONS, "tomesd", or "precision"
    config: ToMeConfig  # how tokens merge; with ratio 0 they do not
    framework: str = "Paddle"  # or "PyTorch", of benchmarks/tomesd_quality.py


PLAIN_IMAGES = ImageSet("plain", "plain", ToMeConfig(ratio=0))
# Plain images of the same prompts from other noise: how far apart two samples of one model are.
OTHER_SEEDS = ImageSet("other-seeds", "plain", ToMeConfig(ratio=0))
# Plain images in a backend of IN_FP32, whose other images are compared with plain ones in fp32.
PLAIN_BF16 = ImageSet("plain-bf16", "precision", ToMeConfig(ratio=0))


@dataclass(frozen=True)
class Evaluation:
    """What is generated, apart from the image sets. Raises ToMeConfigError if a number is out of range."""

    model: str  # folder of a ppdiffusers pipeline, or hub name
    prompts: tuple[tuple[str, int], ...]  # (text, seed) of each image of an image set, at least two
    size: int  # px, height and width
    steps: int
    guidance_scale: float
    backend: str  # one of PROGRAMS for exported programs, "eager" for the pipeline itself
    threads: int  # in each process that generates images
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

    def backend_of(self, image_set: ImageSet) -> str:
        """The backend for an image set's images: plain ones are the reference, so they are always in fp32."""
        return IN_FP32.get(self.backend, self.backend) if image_set.group == PLAIN_IMAGES.group else self.backend

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


def list_image_sets(
    ratios: Sequence[float],
    ablations: Collection[str] = ABLATIONS,
    ablation_ratio: float = 0.5,
    levels: Sequence[int] = (1,),
    methods: Sequence[Mapping[str, Any]] = (),
) -> list[ImageSet]:
    """The image sets of an evaluation; except for methods, each differs in one thing from the defaults at its ratio.

    Args:
        ratios: numbers above 0. Each has an image set with the defaults.
        ablations: some of ABLATIONS: "use_rand" (every ratio with fixed dst), "max_downsample" (every deeper level)
            and "layers" (cross-attention, the feed-forward layer, and both beside self-attention).
        ablation_ratio: the ratio of "max_downsample" and "layers".
        levels: the levels at which the model has self-attention, the shallowest first.
        methods: other ways to merge, as arguments of `ToMeConfig`. Each runs at every ratio, or at its own. One that
            equals the defaults is not generated again.

    Raises:
        ToMeConfigError: a ratio is 0, too large or repeated, an ablation is unknown, or a method is not allowed or
            repeated.

    Source: the design choices that Bolya & Hoffman 2023, arXiv:2303.17604, vary in their section 4.
    """
    if unknown := set(ablations) - set(ABLATIONS):
        raise ToMeConfigError(f"ablation {min(unknown)!r} is not allowed: it must be one of {', '.join(ABLATIONS)}.")
    if repeated := [ratio for ratio in ratios if list(ratios).count(ratio) > 1]:
        raise ToMeConfigError(f"ratio {repeated[0]:g} is repeated: list each ratio once.")

    def image_set(at: float, suffix: str, group: str, **options: Any) -> ImageSet:
        config = ToMeConfig(**{**options, "ratio": at})
        if config.ratio == 0:
            raise ToMeConfigError(f"ratio={at!r} is not allowed: it must be above 0, plain is always generated.")
        return ImageSet(f"{at:g}{suffix}", group, config)

    image_set(at := ablation_ratio, "", "")  # raises even if no ablation uses it
    image_sets = [image_set(ratio, "", "ratio") for ratio in ratios]
    if "max_downsample" in ablations:
        image_sets += [image_set(at, f"-down{level}", "max_downsample", max_downsample=level) for level in levels[1:]]
    if "layers" in ablations:
        options = {"-" + "-".join(layers): {f"merge_{layer}": True for layer in layers} for layers in LAYERS}
        image_sets += [image_set(at, suffix, "layers", **merged) for suffix, merged in options.items()]
    if "use_rand" in ablations:
        image_sets += [image_set(ratio, "-fixed", "use_rand", use_rand=False) for ratio in ratios]
    of_method: set[ToMeConfig] = set()
    for method in methods:
        differing = "_".join(f"{name}={value}" for name, value in method.items() if name != "ratio")
        suffix = f"-{differing}" if differing else ""
        for ratio in [method["ratio"]] if "ratio" in method else ratios:
            other = image_set(ratio, suffix, "method", **method)
            if other.config in of_method:
                raise ToMeConfigError(f"{other.config.describe()} is repeated: list each way to merge once.")
            of_method.add(other.config)
            if other.config not in [one.config for one in image_sets if one.group == "ratio"]:
                image_sets.append(other)
    return image_sets


def read_texts(path: Path) -> list[str]:
    """The prompts in a file: `.txt`, one on each line; `.jsonl`, an object with "prompt" on each line; or `.tsv`.

    That is a table with a column "Prompt", as PartiPrompts (Yu et al. 2022, arXiv:2206.10789) are published.

    Raises:
        ToMeConfigError: the file cannot be read, or holds no prompt or one that is not allowed.
    """
    if path.suffix != ".tsv":
        return prompt_file.read_texts(path)
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            texts = [text for row in table if (text := (row.get(COLUMN) or "").strip())]
    except (OSError, UnicodeDecodeError) as error:
        raise ToMeConfigError(f"{path} cannot be read: {error}") from error
    if not texts:
        raise ToMeConfigError(f"{path} has no prompt: its first line must name a column {COLUMN!r}.")
    return texts


def prompts_of(model: str, file: Path | None = None) -> list[str]:
    """The prompts in a file; without one, those of `model_prompts`.

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
