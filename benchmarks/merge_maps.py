"""Merge maps: which tokens merge into which, recorded while a pipeline runs and drawn over its image.

    python benchmarks/merge_maps.py benchmarks/results/quality.json --output benchmarks

As in Bolya et al. 2022, arXiv:2210.09461: each group of merged tokens is filled with its mean colour and outlined in a
colour of its own. A token finds its dst anywhere in the image, so a group can have several parts.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from paddle import nn
from PIL import Image
from skimage.color import label2rgb
from skimage.morphology import dilation, erosion

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.evaluation.quality.image_generation import from_image, load_model
from ppdiffusers_tome.evaluation.quality.image_sets import Evaluation, ImageSet
from ppdiffusers_tome.evaluation.quality.quality_report import default_setting, read_frame
from ppdiffusers_tome.evaluation.quality.sheets import make_sheet, save_png
from ppdiffusers_tome.evaluation.results import check_result, read_json
from ppdiffusers_tome.generation.engine import Engine
from ppdiffusers_tome.matching import MergePlan
from ppdiffusers_tome.models import MergeableBlock, denoisers, find_blocks
from ppdiffusers_tome.positions import Grid
from ppdiffusers_tome.wraps import BlockWrap, current_plan, wrap_of


@dataclass(frozen=True, eq=False)
class RecordedPlan:
    """What one block merged in one step."""

    denoiser: str  # its model's name in the pipeline, e.g. "unet"; the class of a model on its own
    path: str  # of the block in that model
    level: int  # downsample factor
    step: int  # 0, 1, ...: how often the block had run since the recording began
    grid: Grid  # tokens along each axis
    plan: MergePlan

    def groups(self) -> np.ndarray:
        """The group of each token: [B, h, w] int64 from 0 to N-r-1, equal where tokens of one image merge.

        With guidance, the unconditional passes come first: the last is the conditional one of the last image.
        """
        rows = self.plan.source_rows.numpy().reshape(-1, *self.grid)
        return rows - int(self.plan.kept) * np.arange(len(rows))[:, None, None]

    def dst(self) -> np.ndarray:
        """Which tokens are dst, those that others merge into: [B, h, w] bool."""
        mask = np.zeros(self.plan.source_rows.shape, bool)
        mask[self.plan.dst_rows.numpy()] = True
        return mask.reshape(-1, *self.grid)


@contextmanager
def record_plans(target: Any) -> Iterator[list[RecordedPlan]]:
    """Record the plan of every block and step while a pipeline or model runs. What it computes does not change.

    Args:
        target: a ppdiffusers pipeline or model with merging on.

    Yields:
        A list that grows in the order of the calls. A block that merges nothing (ratio 0, a grid without a full cell)
        adds no entry. When the `with` block ends, also with an exception, the recording hooks are removed.

    Raises:
        ToMeConfigError: target is no pipeline or model, or merging is off.

    Example:
        >>> with pipe.tome(ratio=0.5), record_plans(pipe) as recorded:
        ...     image = pipe("a 3d render of fox").images[0]
    """
    recorded: list[RecordedPlan] = []
    handles: list[Any] = []
    try:
        for name, denoiser in denoisers(target).items():
            for block in find_blocks(denoiser):
                if isinstance(wrap_of(block.block), BlockWrap):
                    hook = partial(_record, recorded, itertools.count(), name, block)
                    # It runs inside the block, before attention.
                    handles.append(block.block.norm1.register_forward_pre_hook(hook))
        if not handles:
            raise ToMeConfigError(
                f"{type(target).__name__} merges nothing: apply_tome(ratio=...) before record_plans."
            )
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _record(
    recorded: list[RecordedPlan],
    steps: Iterator[int],
    name: str,
    block: MergeableBlock,
    layer: nn.Layer,
    inputs: tuple,
) -> None:
    step, plan, wrap = next(steps), current_plan(), wrap_of(block.block)
    if plan is not None and isinstance(wrap, BlockWrap):
        recorded.append(RecordedPlan(name, block.path, block.level, step, wrap.grid.grid(plan.tokens), plan))


def draw_merge_map(
    image: np.ndarray,  # [H, W, 3] uint8
    groups: np.ndarray,  # [h, w] int: the group of each token, from 0
    dst: np.ndarray,  # [h, w] bool: the tokens that others merge into
    size: int = 512,
) -> np.ndarray:  # [h·cell, w·cell, 3] uint8
    """Draw groups of merged tokens over the image that they were merged in.

    A group of several tokens is filled with the mean colour of its pixels and outlined in a colour of its own; a dot
    of that colour marks its dst. A token in a group of one shows the image.

    Args:
        image: any size; it is scaled to the map's.
        groups, dst: from `RecordedPlan.groups` and `RecordedPlan.dst`.
        size: px, about the longer side: each token has size / tokens px, rounded, and at least 6.
    """
    cell = max(6, round(size / max(groups.shape)))
    at = np.kron(groups, np.ones((cell, cell), groups.dtype))  # the group of each pixel
    height, width = at.shape
    merged = (np.bincount(groups.ravel()) > 1)[at]
    scaled = np.array(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
    means = label2rgb(np.where(merged, at, -1), scaled, kind="avg", bg_label=-1)
    line = max(1, cell // 8)
    padded, box = np.pad(at, line, constant_values=-1), np.ones((2 * line + 1, 2 * line + 1))
    outline = (dilation(padded, box) != erosion(padded, box))[line:-line, line:-line]
    across = np.arange(cell) - (cell - 1) / 2
    dots = np.kron(dst, np.hypot.outer(across, across) < cell / 5)
    # Hues by the golden ratio, so that those of neighbouring groups are far apart.
    colours = colormaps["turbo"](0.618034 * np.arange(groups.max() + 1) % 1, bytes=True)[:, :3]
    filled = np.where(merged[..., None], means, scaled)
    return np.where((merged & (outline | dots))[..., None], colours[at], filled)


def write_merge_map(
    target: Any, generate: Callable[[], np.ndarray], path: Path, size: int = 256, **fields: Any
) -> tuple[Path, str]:
    """Generate one image while its plans are recorded, and write the merge maps of every block that merges.

    Args:
        target: the pipeline or model that merges while `generate` runs.
        generate: returns one image, uint8 [H, W, 3].
        path: of the PNG: a row for each block, with the image and its maps in the first, the middle and the last step.
        size: px, about the side of each map.
        fields: text for the PNG, e.g. prompt and seed.

    Returns:
        The path, and a caption.

    Raises:
        ToMeConfigError: merging is off, or nothing merged.
    """
    with record_plans(target) as recorded:
        image = generate()
    if not recorded:
        raise ToMeConfigError("no block merged anything: generate a larger image, or merge at a higher ratio.")
    last = recorded[-1].step
    steps = sorted({0, last // 2, last})
    blocks: dict[tuple[str, str], list[RecordedPlan]] = {}
    for entry in recorded:
        if entry.step in steps:
            blocks.setdefault((entry.denoiser, entry.path), []).append(entry)
    rows = []
    for (_, block), entries in blocks.items():
        kind, *words = block.split(".")
        name = f"{kind.split('_')[0]} {'.'.join(word for word in words[:-1] if word.isdigit())}"  # "down 0.1"
        grid, plan = entries[0].grid, entries[0].plan
        label = f"{name}\nlevel {entries[0].level}\n{grid.h} x {grid.w} tokens\n{plan.kept} stay"
        maps = [Image.fromarray(draw_merge_map(image, entry.groups()[-1], entry.dst()[-1], size)) for entry in entries]
        rows.append((label, [Image.fromarray(image).resize(maps[0].size, Image.Resampling.BICUBIC), *maps]))
    side = max(max(part.size) for _, parts in rows for part in parts)
    titles = ["the image", *(f"step {step + 1} of {last + 1}" for step in steps)]
    caption = (
        "Which tokens merge into which, in each block that merges. Tokens with one outline colour merge: they are "
        "filled with their mean colour, and the dot marks their dst."
    )
    if len(recorded[-1].groups()) > 1:
        caption += " Of the two passes with guidance, this is the conditional one."
    return save_png(make_sheet(rows, titles, side), path, **fields), caption


def generate_merge_map(result: dict[str, Any], path: Path) -> tuple[Path, str]:
    """Generate a result's first image by its default setting in eager mode; a PNG of what merges, and its caption.

    Raises:
        ToMeExportError: the model cannot be loaded.
    """
    pipe, first = load_model(result["model"]), result["prompts"][0]
    fields = ("model", "size", "steps", "guidance_scale", "backend", "threads", "strength")
    prompts = ((first["prompt"], first["seed"]),)
    evaluation = Evaluation(**{name: result[name] for name in fields}, prompts=prompts)
    name = default_setting(read_frame(result))
    config = ToMeConfig(**next(setting["config"] for setting in result["settings"] if setting["name"] == name))
    (prompt,) = evaluation.jobs(ImageSet("default", "ratio", config))
    engine = Engine(pipe, from_image(pipe))
    about = {**first, "photograph": prompt.name, "ratio": config.ratio, "steps": result["steps"]}
    about["model"] = result["model"]
    with pipe.tome(**asdict(config)):
        return write_merge_map(pipe, lambda: np.asarray(engine.generate([prompt.job])[0]), path, **about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="quality.json of an evaluation")
    parser.add_argument("--output", type=Path, default=Path("benchmarks"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    result = read_json(options.file)
    check_result(result, "quality", options.file)
    path, caption = generate_merge_map(result, options.output / "merge_map.png")
    print(f"{caption}\nwritten to {path}")


if __name__ == "__main__":
    main()
