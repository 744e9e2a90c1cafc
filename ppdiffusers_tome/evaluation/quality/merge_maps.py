"""Merge maps: which tokens were merged into which, drawn over the picture. The figure that explains the method.

As in Bolya et al. 2022, arXiv:2210.09461: each group of merged tokens is filled with its mean colour and outlined in a
colour of its own. A token finds its dst anywhere in the picture, so a group can be in several pieces; they share the
outline's colour.
"""

import colorsys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...errors import ToMeConfigError
from .recording import RecordedPlan, conditional_index, dst_tokens, groups, record_plans
from .sheets import make_sheet, save_png

LEGEND = (
    "One outline colour: one group of merged tokens, filled with its mean colour; the dot is its dst. Without an "
    "outline: tokens that stay alone. Drawn over the finished picture."
)
GUIDED = " With guidance there are two passes: this is the conditional one."


def draw_merge_map(
    picture: np.ndarray,  # [H, W, 3] uint8
    labels: np.ndarray,  # [h, w] int: the group of each token
    dst: np.ndarray | None = None,  # [h, w] bool
    size: int = 512,
) -> np.ndarray:  # [h·cell, w·cell, 3] uint8
    """Draw groups of tokens over the picture that they were merged in.

    A group of several tokens is filled with the mean colour of its pixels and outlined in a colour of its own; a token
    that stays alone shows the picture. A dot marks the dst of each such group.

    Args:
        picture: any size; it is scaled to the map's.
        labels: from `groups`.
        dst: from `dst_tokens`; None marks none.
        size: px, about the longer side; a token has size / tokens px, rounded, at least 6, so that groups can be seen.

    Raises:
        ToMeConfigError: labels is no [h, w], or dst has another shape.
    """
    if labels.ndim != 2 or (dst is not None and dst.shape != labels.shape):
        shape = None if dst is None else list(dst.shape)
        raise ToMeConfigError(f"labels of shape {list(labels.shape)} and dst of {shape}: both must be [h, w].")
    cell = max(6, round(size / max(labels.shape)))
    height, width = (cell * side for side in labels.shape)
    drawn = np.array(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))
    _, group = np.unique(labels, return_inverse=True)
    group = group.reshape(labels.shape)
    members = np.bincount(group.reshape(-1))
    at = np.kron(group, np.ones((cell, cell), group.dtype))  # [height, width]: the group of each pixel
    sums = [np.bincount(at.reshape(-1), drawn[..., channel].reshape(-1)) for channel in range(3)]
    means = np.stack(sums, -1) / (members * cell * cell)[:, None]
    merged = members[at] > 1
    drawn[merged] = np.rint(means[at[merged]])
    line = merged & _outline(at, max(1, cell // 8))
    colours = _colours(len(members))
    drawn[line] = colours[at[line]]
    if dst is not None:
        across = np.abs(np.arange(cell) - (cell - 1) / 2)
        dot = np.hypot(across[:, None], across) < cell / 5
        ring = np.hypot(across[:, None], across) < cell / 5 + 1
        for mask, colour in ((ring, np.full_like(colours, 255)), (dot, colours // 2)):
            marked = np.kron(dst, mask) & merged
            drawn[marked] = colour[at[marked]]
    return drawn


def _outline(at: np.ndarray, width: int) -> np.ndarray:
    """[H, W] bool: pixels with another group, or the picture's edge, within so many px up, down, left or right."""
    padded = np.pad(at, width, constant_values=-1)
    height, across = at.shape
    found = np.zeros(at.shape, bool)
    for y in range(-width, width + 1):
        for x in range(-width, width + 1):
            found |= padded[width + y : width + y + height, width + x : width + x + across] != at
    return found


def _colours(count: int) -> np.ndarray:
    """[count, 3] uint8: hues by the golden ratio, so that neighbouring labels are far apart, in three lightnesses."""
    found = [colorsys.hls_to_rgb(0.618034 * n % 1, (0.45, 0.6, 0.75)[n % 3], 0.95) for n in range(count)]
    return np.rint(255 * np.array(found).reshape(-1, 3)).astype(np.uint8)


def merge_map(picture: np.ndarray, recorded: RecordedPlan, image_index: int, size: int = 512) -> np.ndarray:
    """`draw_merge_map` of one image of a recorded plan."""
    plan, grid = recorded.plan, recorded.grid
    return draw_merge_map(picture, groups(plan, grid, image_index), dst_tokens(plan, grid, image_index), size)


def merge_map_strip(
    picture: np.ndarray,  # [H, W, 3] uint8
    recorded: Sequence[RecordedPlan],
    steps: Sequence[int] | None = None,
    pictures: int = 1,
    index: int = 0,
    size: int = 256,
) -> Image.Image:
    """Merge maps over steps: one row for each block that merged, one column for each step.

    Args:
        picture: the finished picture, which every map is drawn over.
        recorded: from `record_plans`.
        steps: from 0; default: the first, the middle and the last.
        pictures, index: how many pictures the batch draws and which of them it is, as for `conditional_index`.
        size: px, about the side of a map.

    Raises:
        ToMeConfigError: nothing was recorded, or not in all those steps; or as `conditional_index`.
    """
    last = max((each.step for each in recorded), default=-1)
    chosen = sorted({0, last // 2, last}) if steps is None else list(steps)
    blocks: dict[tuple[str, str], dict[int, RecordedPlan]] = {}
    for each in recorded:
        blocks.setdefault((each.denoiser, each.path), {})[each.step] = each
    if missing := [step for step in chosen if not blocks or any(step not in found for found in blocks.values())]:
        raise ToMeConfigError(f"steps={missing} were not recorded in every block: there are {last + 1} steps.")
    rows = []
    several = len({denoiser for denoiser, _ in blocks}) > 1
    for (denoiser, path), found in blocks.items():
        plans, first = [found[step] for step in chosen], found[chosen[0]]
        maps = [merge_map(picture, each, conditional_index(each.plan, pictures, index), size) for each in plans]
        caption = f"level {first.level}\n{first.grid.h} x {first.grid.w} tokens\n{first.plan.kept} stay"
        rows.append((_short(path), f"{denoiser}\n{caption}" if several else caption, maps))
    side = max(max(image.shape[:2]) for _, _, maps in rows for image in maps)
    return make_sheet(
        rows, [f"step {step + 1} of {last + 1}" for step in chosen], side, _legend(recorded[0], pictures)
    )


def _legend(recorded: RecordedPlan, pictures: int = 1) -> str:
    is_guided = conditional_index(recorded.plan, pictures) > 0
    return LEGEND + (GUIDED if is_guided else "")


def _short(path: str) -> str:
    """A block's path in a UNet as the levels' places tell it: "down_blocks.0.attentions.1.…" is "down 0.1"."""
    words = path.split(".")
    numbers = ".".join(word for word in words[:-2] if word.isdigit()) or ".".join(filter(str.isdigit, words))
    return f"{words[0].split('_')[0]} {numbers}"


def write_merge_maps(
    target: Any, draw: Callable[[], np.ndarray], output: Path, size: int = 512, **fields: Any
) -> list[Path]:
    """Draw one picture while its plans are recorded; write its map and the strip over blocks and steps.

    Args:
        target: the pipeline or model that merges while `draw` runs.
        draw: makes one picture, uint8 [H, W, 3].
        output: folder for `merge_map.png` (the picture, and beside it the first block's map in the middle step) and
            `merge_map_steps.png`.
        size: px, about the side of the first; the strip's maps have half of it.
        fields: text for the PNGs, e.g. prompt and seed.

    Raises:
        ToMeConfigError: as `record_plans` and `merge_map_strip`.
    """
    with record_plans(target) as recorded:
        picture = draw()
    strip = merge_map_strip(picture, recorded, size=size // 2)
    first = (recorded[0].denoiser, recorded[0].path)
    of_first = [each for each in recorded if (each.denoiser, each.path) == first]
    middle = of_first[(len(of_first) - 1) // 2]
    drawn = merge_map(picture, middle, conditional_index(middle.plan), size)
    height, width = drawn.shape[:2]
    beside = Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC)
    title = f"step {middle.step + 1} of {len(of_first)}: {middle.plan.tokens} tokens, {middle.plan.kept} after merging"
    pair = make_sheet([("", "", [beside, drawn])], ["the merged picture", title], max(height, width), _legend(middle))
    return [
        save_png(pair, output / "merge_map.png", **fields),
        save_png(strip, output / "merge_map_steps.png", **fields),
    ]
