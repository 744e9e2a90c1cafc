"""Merge maps: which tokens merge into which, recorded while a pipeline runs and drawn over its image.

As in Bolya et al. 2022, arXiv:2210.09461: each group of merged tokens is filled with its mean colour and outlined in a
colour of its own. A token finds its dst anywhere in the image, so a group can have several parts.
"""

import colorsys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from paddle import nn
from PIL import Image

from ...errors import ToMeConfigError
from ...hooks import CallHook
from ...matching import MergePlan
from ...models import MergeableBlock, denoisers, find_blocks, token_grid
from ...positions import Grid
from .sheets import make_sheet, save_png

LEGEND = (
    "Tokens with one outline colour merge: they are filled with their mean colour, and the dot marks their dst. "
    "Tokens without an outline do not merge. Drawn over the finished image."
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

    @property
    def batch(self) -> int:
        """Images in the pass: with guidance two for each image that is drawn, the unconditional ones first."""
        return self.plan.source_rows.shape[0] // self.grid.tokens

    def groups(self, image: int = -1) -> np.ndarray:
        """The group of each token: [h, w] int64 from 0 to N-r-1, equal where tokens merge.

        Args:
            image: which image of the batch. The last is, with guidance, the conditional pass of the last drawn image.
        """
        image = range(self.batch)[image]
        rows = self.plan.source_rows.numpy().reshape(self.batch, *self.grid)[image]
        return rows - image * int(self.plan.kept)

    def dst(self, image: int = -1) -> np.ndarray:
        """Which tokens are dst, those that others merge into: [h, w] bool."""
        mask = np.zeros(self.grid.tokens, bool)
        mask[self.plan.dst_rows.numpy().reshape(self.batch, -1)[image] % self.grid.tokens] = True
        return mask.reshape(self.grid)


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
    merging = [
        (name, block, hook)
        for name, denoiser in denoisers(target).items()
        for block in find_blocks(denoiser)
        for hook in block.block._forward_pre_hooks.values()
        if isinstance(hook, CallHook)
    ]
    if not merging:
        raise ToMeConfigError(f"{type(target).__name__} merges nothing: apply_tome(ratio=...) before record_plans.")
    handles: list[Any] = []
    try:
        for name, block, hook in merging:
            handles += _record(name, block, hook, recorded)
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _record(name: str, block: MergeableBlock, hook: CallHook, recorded: list[RecordedPlan]) -> list[Any]:
    """Hooks beside those that merge: one reads the grid, one the plan as soon as the block has it."""
    grid: Grid
    steps = 0

    def read_grid(layer: nn.Layer, inputs: tuple) -> None:
        nonlocal grid
        grid = token_grid(layer, inputs[0])

    def read_plan(layer: nn.Layer, inputs: tuple) -> None:
        nonlocal steps
        if (plan := hook.plan()) is not None:
            recorded.append(RecordedPlan(name, block.path, block.level, steps, grid, plan))
        steps += 1

    planned = block.block.norm1 if block.is_joint else block.block
    return [block.grid_layer.register_forward_pre_hook(read_grid), planned.register_forward_pre_hook(read_plan)]


def draw_merge_map(
    image: np.ndarray,  # [H, W, 3] uint8
    groups: np.ndarray,  # [h, w] int: the group of each token, from 0
    dst: np.ndarray,  # [h, w] bool: the tokens that others merge into
    size: int = 512,
) -> np.ndarray:  # [h·cell, w·cell, 3] uint8
    """Draw groups of merged tokens over the image that they were merged in.

    A group of several tokens is filled with the mean colour of its pixels and outlined in a colour of its own; a dot
    marks its dst. A token in a group of one shows the image.

    Args:
        image: any size; it is scaled to the map's.
        groups, dst: from `RecordedPlan.groups` and `RecordedPlan.dst`.
        size: px, about the longer side: each token has size / tokens px, rounded, and at least 6.
    """
    cell = max(6, round(size / max(groups.shape)))
    height, width = (cell * side for side in groups.shape)
    drawn = np.array(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
    members = np.bincount(groups.reshape(-1))
    at = np.kron(groups, np.ones((cell, cell), groups.dtype))  # [height, width]: the group of each pixel
    sums = [np.bincount(at.reshape(-1), drawn[..., channel].reshape(-1)) for channel in range(3)]
    means = np.stack(sums, -1) / np.maximum(members * cell * cell, 1)[:, None]
    merged = members[at] > 1
    drawn[merged] = np.rint(means[at[merged]])
    outline = merged & _outline(at, max(1, cell // 8))
    colours = _colours(len(members))
    drawn[outline] = colours[at[outline]]
    across = np.abs(np.arange(cell) - (cell - 1) / 2)
    radius = np.hypot(across[:, None], across)
    for disc, colour in ((radius < cell / 5 + 1, np.full_like(colours, 255)), (radius < cell / 5, colours // 2)):
        dots = np.kron(dst, disc) & merged
        drawn[dots] = colour[at[dots]]
    return drawn


def _outline(at: np.ndarray, width: int) -> np.ndarray:
    """[H, W] bool: pixels with another group, or the edge of the image, within so many px.

    A token is wider than the box around a pixel, so the corners of that box show all groups in it.
    """
    padded = np.pad(at, width, constant_values=-1)
    height, across = at.shape
    corners = [padded[y : y + height, x : x + across] for y in (0, 2 * width) for x in (0, 2 * width)]
    return np.any([corner != at for corner in corners], axis=0)


def _colours(count: int) -> np.ndarray:
    """[count, 3] uint8: hues by the golden ratio, so that neighbouring groups are far apart, in three lightnesses."""
    colours = [colorsys.hls_to_rgb(0.618034 * n % 1, (0.45, 0.6, 0.75)[n % 3], 0.95) for n in range(count)]
    return np.rint(255 * np.array(colours)).astype(np.uint8)


def write_merge_maps(
    target: Any, draw: Callable[[], np.ndarray], output: Path, size: int = 512, **fields: Any
) -> list[Path]:
    """Draw one image while its plans are recorded, and write its merge maps.

    Args:
        target: the pipeline or model that merges while `draw` runs.
        draw: returns one image, uint8 [H, W, 3].
        output: folder for `merge_map.png` (the image beside the map of the first block, halfway through the steps) and
            `merge_map_steps.png` (every block that merges, in the first, the middle and the last step).
        size: px, about the side of the map in the first; half of it in the second.
        fields: text for the PNGs, e.g. prompt and seed.

    Raises:
        ToMeConfigError: merging is off, or nothing merged.
    """
    with record_plans(target) as recorded:
        image = draw()
    if not recorded:
        raise ToMeConfigError("no block merged anything: draw a larger image, or merge at a higher ratio.")
    last = recorded[-1].step
    steps = sorted({0, last // 2, last})
    blocks: dict[tuple[str, str], list[RecordedPlan]] = {}
    for entry in recorded:
        if entry.step in steps:
            blocks.setdefault((entry.denoiser, entry.path), []).append(entry)
    legend = LEGEND + (GUIDED if recorded[0].batch > 1 else "")
    middle = next(entry for entry in recorded if entry.step == last // 2)
    drawn = draw_merge_map(image, middle.groups(), middle.dst(), size)
    height, width = drawn.shape[:2]
    beside = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
    title = f"step {middle.step + 1} of {last + 1}: {middle.plan.tokens} tokens, {middle.plan.kept} after merging"
    pair = make_sheet([("", "", [beside, drawn])], ["the image drawn with merging", title], max(height, width), legend)
    rows = []
    for (_, path), entries in blocks.items():
        words, first = path.split("."), entries[0]
        name = f"{words[0].split('_')[0]} {'.'.join(word for word in words[:-1] if word.isdigit())}"  # "down 0.1"
        caption = f"level {first.level}\n{first.grid.h} x {first.grid.w} tokens\n{first.plan.kept} stay"
        maps = [draw_merge_map(image, entry.groups(), entry.dst(), size // 2) for entry in entries]
        rows.append((name, caption, maps))
    side = max(max(part.shape) for _, _, maps in rows for part in maps)
    strip = make_sheet(rows, [f"step {step + 1} of {last + 1}" for step in steps], side, legend)
    return [
        save_png(pair, output / "merge_map.png", **fields),
        save_png(strip, output / "merge_map_steps.png", **fields),
    ]
