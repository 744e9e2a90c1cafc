"""Merge maps: which tokens merge into which, recorded while a pipeline runs and drawn over its image.

As in Bolya et al. 2022, arXiv:2210.09461: each group of merged tokens is filled with its mean colour and outlined in a
colour of its own. A token finds its dst anywhere in the image, so a group can have several parts.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from paddle import nn
from PIL import Image
from skimage.color import label2rgb
from skimage.morphology import dilation, erosion

from ...errors import ToMeConfigError
from ...matching import MergePlan
from ...models import MergeableBlock, denoisers, find_blocks
from ...positions import Grid
from ...wraps import BlockWrap, current_plan, wrap_of
from .sheets import make_sheet, save_png

CAPTION = (
    "Which tokens merge into which, in the first block that merges, halfway through the steps. Tokens with one "
    "outline colour merge: they are filled with their mean colour, and the dot marks their dst."
)
GUIDED = " Of the two passes with guidance, this is the conditional one."


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
    blocks = [(name, block) for name, denoiser in denoisers(target).items() for block in find_blocks(denoiser)]
    merging = [(name, block) for name, block in blocks if isinstance(wrap_of(block.block), BlockWrap)]
    if not merging:
        raise ToMeConfigError(f"{type(target).__name__} merges nothing: apply_tome(ratio=...) before record_plans.")
    handles: list[Any] = []
    try:
        for name, block in merging:
            # It runs inside the block, before attention.
            handles.append(block.block.norm1.register_forward_pre_hook(_plan_reader(name, block, recorded)))
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _plan_reader(name: str, block: MergeableBlock, recorded: list[RecordedPlan]) -> Callable[[nn.Layer, tuple], None]:
    """A hook that records the block's plan while the block runs."""
    wrap, steps = wrap_of(block.block), itertools.count()
    assert isinstance(wrap, BlockWrap)

    def read_plan(layer: nn.Layer, inputs: tuple) -> None:
        step, plan = next(steps), current_plan()
        if plan is not None:
            recorded.append(RecordedPlan(name, block.path, block.level, step, wrap.grid.grid(plan.tokens), plan))

    return read_plan


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
    drawn = np.where(merged[..., None], means, scaled)
    return np.where((merged & (outline | dots))[..., None], colours[at], drawn)


def write_merge_maps(
    target: Any, draw: Callable[[], np.ndarray], output: Path, size: int = 512, **fields: Any
) -> list[tuple[Path, str]]:
    """Draw one image while its plans are recorded, and write its merge maps.

    Args:
        target: the pipeline or model that merges while `draw` runs.
        draw: returns one image, uint8 [H, W, 3].
        output: folder for `merge_map.png` (the image beside the map of the first block, halfway through the steps) and
            `merge_map_steps.png` (every block that merges, in the first, the middle and the last step).
        size: px, about the side of the map in the first; half of it in the second.
        fields: text for the PNGs, e.g. prompt and seed.

    Returns:
        Each file with its caption.

    Raises:
        ToMeConfigError: merging is off, or nothing merged.
    """
    with record_plans(target) as recorded:
        image = draw()
    if not recorded:
        raise ToMeConfigError("no block merged anything: draw a larger image, or merge at a higher ratio.")

    def map_of(entry: RecordedPlan, size: int) -> Image.Image:
        return Image.fromarray(draw_merge_map(image, entry.groups()[-1], entry.dst()[-1], size))

    last = recorded[-1].step
    steps = sorted({0, last // 2, last})
    blocks: dict[tuple[str, str], list[RecordedPlan]] = {}
    for entry in recorded:
        if entry.step in steps:
            blocks.setdefault((entry.denoiser, entry.path), []).append(entry)
    rows = []
    for (_, path), entries in blocks.items():
        kind, *words = path.split(".")
        name = f"{kind.split('_')[0]} {'.'.join(word for word in words[:-1] if word.isdigit())}"  # "down 0.1"
        first, plan = entries[0], entries[0].plan
        label = f"{name}\nlevel {first.level}\n{first.grid.h} x {first.grid.w} tokens\n{plan.kept} stay"
        rows.append((label, [map_of(entry, size // 2) for entry in entries]))
    side = max(max(part.size) for _, maps in rows for part in maps)
    strip = make_sheet(rows, [f"step {step + 1} of {last + 1}" for step in steps], side)
    middle = next(entry for entry in recorded if entry.step == last // 2)
    merge_map = map_of(middle, size)
    beside = Image.fromarray(image).resize(merge_map.size, Image.Resampling.BICUBIC)
    title = f"step {middle.step + 1} of {last + 1}: {middle.plan.tokens} tokens, {middle.plan.kept} after merging"
    pair = make_sheet([("", [beside, merge_map])], ["the image drawn with merging", title], max(merge_map.size))
    captions = (
        CAPTION + (GUIDED if len(middle.groups()) > 1 else ""),
        "The same in every block that merges, at the first step, halfway and at the last step.",
    )
    files = (
        save_png(pair, output / "merge_map.png", **fields),
        save_png(strip, output / "merge_map_steps.png", **fields),
    )
    return list(zip(files, captions, strict=True))
