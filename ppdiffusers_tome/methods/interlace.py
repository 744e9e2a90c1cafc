"""Interlace: keys and values are those of a part of the tokens, and of a different part in each step.

Attention over the same part of the keys makes the same error in every step, and over an image it adds up. With a
different part in each step the errors cancel, and the steps in which they do not keep all tokens. A gather moves the
tokens, and no tokens are compared.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

import numpy as np

from ..errors import ParameterError
from ..grid import Grid, count_dst
from .config import ToMeConfig
from .rules import Rule
from .turns import TURNS

SIDE = 4  # tokens along each side of a cell
PARTS = SIDE * SIDE  # of the tokens: each is a position in all cells; a block keeps a number of parts
LAST_SHARE = 2  # parts that the last block of a UNet keeps, as a multiple of the average


MERGE_STEPS = ("middle", "all")
STEPS = Rule(
    lambda value: isinstance(value, str) and value in MERGE_STEPS,
    'one of "middle", which keeps all tokens in the first and last steps of an image, and "all"',
)


@dataclass(frozen=True)
class Interlace(ToMeConfig):
    """Keep the keys and values of a part of the tokens, and of a different part in each step.

    Every token keeps its own query and output. No tokens are compared. It suits CPUs and GPUs, and was found for this
    package.

    Args:
        ratio: share of the keys and values that attention leaves out, on average over the blocks that merge, from 0
            to 15/16. 0.75, its own, is a good start; 0.5 is nearly the plain image.
        merge_steps: the steps of an image in which tokens merge. "middle" keeps all tokens in the first steps, which
            decide what is in the image, and in the last steps, whose errors nothing corrects: three of ten steps
            (`methods.steps` has the noise levels). "all" merges in every step: faster, in less memory, and with
            guidance above 3 much further from the plain image.
        max_downsample, min_tokens: as in `ToMeConfig`, which also has the errors.

    Example:
        >>> Interlace(ratio=0.5) == ToMeConfig(0.5), Interlace(merge_steps="all").has_plain_steps
        (True, False)
    """

    method: Literal["interlace"] = "interlace"
    _: KW_ONLY
    merge_steps: Annotated[str, STEPS] = "middle"

    default_ratio = 0.75
    largest_ratio = 1 - 1 / PARTS
    takes_turns = True

    @property
    def has_plain_steps(self) -> bool:
        return self.merge_steps == "middle"

    def kept_shares(self, count: int, last: int | None) -> Sequence[float]:
        """The share of keys that each block keeps: whole parts, which are 1 - ratio on average.

        Nearly all of the damage is done by the last block of a UNet, whose output no later block corrects. It keeps
        `LAST_SHARE` times the average, at most all, and all blocks before it share the rest. Each block keeps at
        least one part.

        Raises:
            ParameterError: the ratio is above 0, and every block would keep all parts.
        """
        ratio = self.effective_ratio
        average = PARTS * (1 - ratio)
        parts = [_whole_parts(average)] * count
        if last is not None and count > 1:
            of_last = _whole_parts(LAST_SHARE * average)
            parts = [_whole_parts((count * average - of_last) / (count - 1))] * count
            parts[last] = of_last
        if ratio and min(parts, default=0) == PARTS:
            # Blocks begin to leave out a part when half a part is left out; the last block may keep all of its own.
            most = (count - (last is not None and count > 1)) / (2 * PARTS * count)
            rule = f"every block would keep all of its keys, because each keeps whole {PARTS}ths"
            raise ParameterError("ratio", ratio, f"{rule}. Pass 0, or a ratio above {most:g}.")
        return [number / PARTS for number in parts]

    def count_kept(self, grid: Grid, share: float) -> int:
        return grid.tokens - count_dst(grid, SIDE, SIDE) * (PARTS - round(share * PARTS))

    def constants(self, grid: Grid, kept: int, block: int) -> np.ndarray:
        cells = count_dst(grid, SIDE, SIDE)
        return remaining(grid, PARTS - (grid.tokens - kept) // cells, block)


def _whole_parts(parts: float) -> int:
    return max(1, min(round(parts), PARTS))


def ranks(grid: Grid) -> np.ndarray:  # [h, w] int64
    """The rank of each token in its cell, from 0 to `PARTS` - 1, by the Bayer matrix; -1 outside of whole cells.

    Tokens of neighbouring ranks are far from each other, so that any number of successive ranks is spread evenly: 8
    are a checkerboard, 4 every second row and column.

    Source: Bayer 1973, An optimum method for two-level rendition of continuous-tone pictures.
    """
    bayer = np.zeros([1, 1], dtype=np.int64)
    while len(bayer) < SIDE:
        bayer = np.block([[4 * bayer, 4 * bayer + 2], [4 * bayer + 3, 4 * bayer + 1]])
    rows, columns = grid.h // SIDE, grid.w // SIDE
    table = np.full([grid.h, grid.w], -1, dtype=np.int64)
    table[: rows * SIDE, : columns * SIDE] = np.tile(bayer, [rows, columns])
    return table


def remaining(grid: Grid, parts: int, block: int) -> np.ndarray:  # [TURNS, K] int64, ascending in each turn
    """The tokens that remain in each turn if a block keeps `parts` of each whole cell, and all tokens outside of them.

    In turn p these are the tokens of rank parts·p, … parts·p + parts - 1, modulo `PARTS`. A block is `offset_of` turns
    ahead, so that blocks do not lose the same tokens in the same step.
    """
    rank = ranks(grid).reshape(-1)
    turns = np.arange(TURNS)[:, None] + offset_of(block)
    remains = ((rank - parts * turns) % PARTS < parts) | (rank < 0)  # [TURNS, N]
    return np.stack([np.flatnonzero(in_turn) for in_turn in remains])


def offset_of(block: int) -> int:
    """The turns by which a block is ahead of the first."""
    return 5 * block % TURNS
