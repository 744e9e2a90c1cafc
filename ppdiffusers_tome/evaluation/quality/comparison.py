"""Plain and merged images from the same noise, and the time of a step of each: what `compare` generates and shows."""

import inspect
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import paddle
import pandas as pd
from PIL import Image
from ppdiffusers import DiffusionPipeline

from ...config import ToMeConfig
from ...errors import ToMeConfigError
from ...generation.jobs import seed_after
from ...summary import ToMeSummary
from ..clock import order_of_round, ratio_within_rounds, seconds_of
from ..markdown import NOT_MEASURED, number
from .metrics import psnr
from .sheets import make_sheet

ROUNDS = 5  # timed steps of each arm


@dataclass(frozen=True)
class Images:
    """What each arm generates: an image for each prompt.

    Args:
        prompts: texts, one image each.
        size: px, height and width.
        steps: denoising steps of an image.
        guidance_scale: weight of classifier-free guidance.
        seed: of the first image's noise; each further one adds 1.
        condition: the ControlNet's input, RGB of this size; None for a pipeline without a ControlNet.
    """

    prompts: tuple[str, ...]
    size: int
    steps: int
    guidance_scale: float
    seed: int
    condition: Image.Image | None = None

    def generate(self, pipe: DiffusionPipeline, nth: int, **changes: Any) -> Any:
        """The image of the nth prompt, or what the pipeline returns with these changes of its arguments."""
        settings: dict[str, Any] = {"height": self.size, "width": self.size, "num_inference_steps": self.steps}
        settings |= {"guidance_scale": self.guidance_scale}
        settings |= {} if self.condition is None else {"image": self.condition}
        paddle.seed(seed_after(self.seed, nth))
        return pipe(prompt=self.prompts[nth], **{**settings, **changes}).images[0]


@dataclass
class Arm:
    """One row of the table: images generated plain or merged, and the seconds of a step in each round."""

    config: ToMeConfig | None  # None: plain
    summary: ToMeSummary | None = None  # of a merged arm
    images: list[Image.Image] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """ "plain", or the ratio."""
        return "plain" if self.config is None else f"{self.config.ratio:g}"

    def attached(self, pipe: DiffusionPipeline) -> AbstractContextManager[Any]:
        """A context in which the pipeline merges as the arm does."""
        return nullcontext(pipe) if self.config is None else pipe.tome(**asdict(self.config))


def check_pipeline(pipe: DiffusionPipeline, model: str, configs: Sequence[ToMeConfig]) -> None:
    """Check that a pipeline generates images from prompts, and that each config merges something in it.

    Raises:
        ToMeConfigError: it generates something else, such as videos, or from something else, such as classes.
        NoMergeableLayerError: a config merges nothing. The pipeline is unchanged.
    """
    parameters = inspect.signature(type(pipe).__call__).parameters
    if not {"prompt", "height", "width"} <= set(parameters) or not hasattr(pipe, "image_processor"):
        raise ToMeConfigError(
            f"{model} is a {type(pipe).__name__}, which does not generate images from prompts: compare it in Python, "
            "with pipe.tome(ratio=0.5)."
        )
    for config in configs:
        with pipe.tome(**asdict(config)):
            pass


def compare(pipe: DiffusionPipeline, images: Images, configs: Sequence[ToMeConfig]) -> list[Arm]:
    """Generate the images plain and by each config, from the same noise, then time single steps, which take turns.

    Args:
        pipe: a text-to-image pipeline that `check_pipeline` accepts. Merging is off before and after.
        images: what to generate.
        configs: the ways to merge.

    Returns:
        The arms: plain, then one for each config.
    """
    arms = [Arm(config) for config in (None, *configs)]
    show = partial(pipe.set_progress_bar_config, leave=False, disable=None)
    for nth in range(len(images.prompts)):
        for arm in arms:
            show(desc=f"{images.size} px, image {nth + 1} of {len(images.prompts)}, {arm.label}")
            with arm.attached(pipe):
                arm.images.append(images.generate(pipe, nth))
                if arm.config is not None:
                    arm.summary = pipe.tome_summary(images.size, images.size)
    step = partial(images.generate, pipe, 0, num_inference_steps=1, output_type="latent")
    for index in range(ROUNDS):
        for arm in order_of_round(arms, index):
            show(desc=f"{images.size} px, step {index + 1} of {ROUNDS}, {arm.label}")
            with arm.attached(pipe):
                if arm.config is not None:
                    step()  # not timed: the first pass makes constants, such as the positions of dst
                arm.seconds.append(seconds_of(step))
    return arms


def figures_of(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """The figures of each arm, ready for JSON; those that compare with plain are None for plain itself.

    "tokens" and "kept" are of queries at the first block that merges, "macs_saved" is a share, "seconds" is the median
    of a step, "speed_up" the median of the ratios within rounds, and "psnr" the median over the images in dB.
    """
    plain = arms[0]
    figures = []
    for arm in arms:
        row: dict[str, Any] = {"arm": arm.label, "tokens": None, "kept": None, "macs_saved": None}
        row |= {"seconds": statistics.median(arm.seconds), "rounds": arm.seconds, "speed_up": None, "psnr": None}
        if arm.summary is not None:
            block = arm.summary.blocks[0]
            row |= {"tokens": int(block.grid.tokens), "kept": block.kept, "macs_saved": arm.summary.saved_share}
            row["speed_up"] = ratio_within_rounds(plain.seconds, arm.seconds).median
            pairs = zip(plain.images, arm.images, strict=True)
            row["psnr"] = statistics.median(psnr(np.asarray(a), np.asarray(b)) for a, b in pairs)
        figures.append(row)
    return figures


def table_of(figures: Sequence[dict[str, Any]]) -> str:
    """The figures as a table of text."""

    def cell(value: float | None, form: str) -> str:
        return NOT_MEASURED if value is None else form.format(value)

    rows = [
        {
            "ratio": row["arm"],
            "tokens": NOT_MEASURED if row["tokens"] is None else f"{row['tokens']:,} → {row['kept']:,}",
            "MACs saved": cell(row["macs_saved"], "{:.1%}"),
            "s/step": number(row["seconds"]),
            "speed-up": cell(row["speed_up"], "{:.2f}×"),
            "PSNR, dB": cell(row["psnr"], "{:.1f}"),
        }
        for row in figures
    ]
    return pd.DataFrame(rows).to_string(index=False)


def sheet_of(arms: Sequence[Arm], images: Images) -> Image.Image:
    """A sheet with a row for each arm and a column for each prompt; the condition, if there is one, is above."""
    rows = [] if images.condition is None else [("condition", [images.condition] * len(images.prompts))]
    for arm in arms:
        rows.append((f"{arm.label}\n{number(statistics.median(arm.seconds))} s/step", arm.images))
    return make_sheet(rows, images.prompts, images.size)
