"""Interlace: keys and values are those of a part of the tokens, and of another part in each step.

Attention over the same part of the keys makes the same error in every step, and over an image it adds up. With
another part in each step the errors cancel. A gather moves the tokens, and no tokens are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import paddle

from ..errors import ParameterError
from ..grid import Grid, constant, count_dst
from ..tensors import count_rows, gather
from .method import Kept, Method, Settings
from .plan import MergePlan, UnweightedPlan, count_batch
from .turns import FIRST_TURN, TURNS, Turn

SIDE = 4  # tokens along each side of a cell
PARTS = SIDE * SIDE  # of the tokens, one position of each cell each; a block keeps a number of them
LAST_SHARE = 2  # parts that the last block of a UNet keeps, as a multiple of the average


@dataclass(frozen=True, eq=False)
class Interlace(Method):
    """Keep the keys and values of some of the `PARTS` positions of each cell, in turns."""

    def defaults(self, sx: int, sy: int) -> Mapping[str, Any]:
        return {"ratio": 0.75}

    def largest_ratio(self, sx: int, sy: int) -> float:
        return 1 - 1 / PARTS

    def takes_turns(self, settings: Settings) -> bool:
        return True

    def ratio_of_blocks(self, settings: Settings, count: int, last: int | None) -> Sequence[float]:
        """The share of keys that each block loses: whole parts, which are `settings.ratio` on average.

        Nearly all of the damage is done by the last block of a UNet, whose output no other block corrects. It keeps
        `LAST_SHARE` times the average, at most all, and the others share the rest. Each block keeps a part at least.

        Raises:
            ParameterError: the ratio is above 0, and rounds to nothing in every block.
        """
        average = PARTS * (1 - settings.ratio)
        parts = [_whole_parts(average)] * count
        if last is not None and count > 1:
            of_last = _whole_parts(LAST_SHARE * average)
            parts = [_whole_parts((count * average - of_last) / (count - 1))] * count
            parts[last] = of_last
        if settings.ratio and min(parts, default=0) == PARTS:
            rule = f"every block would keep all of its keys, because each keeps whole {PARTS}ths"
            raise ParameterError("ratio", settings.ratio, f"{rule}. The nearest ratios are 0 and {1 / PARTS:g}.")
        return [1 - number / PARTS for number in parts]

    def kept(self, grid: Grid, settings: Settings, ratios: tuple[float, float]) -> Kept:
        cells = count_dst(grid, SIDE, SIDE)
        return Kept(grid.tokens, grid.tokens, grid.tokens - cells * (PARTS - _parts(ratios[1])))

    def constants(self, grid: Grid, settings: Settings, kept: Kept, block: int) -> "InterlaceConstants":
        cells = count_dst(grid, SIDE, SIDE)
        return interlace_constants(grid, PARTS - (kept.tokens - kept.keys) // cells, block)

    def plan(
        self, metric: paddle.Tensor, constants: "InterlaceConstants", kept: Kept, turn: Turn = FIRST_TURN
    ) -> MergePlan:
        with paddle.no_grad():
            return InterlacePlan(constants=constants, batch=count_batch(metric), turn=turn)


def _whole_parts(parts: float) -> int:
    return max(1, min(round(parts), PARTS))


def _parts(ratio: float) -> int:
    """The parts that a block keeps at its ratio."""
    return round((1 - ratio) * PARTS)


INTERLACE = Interlace(
    "interlace",
    "keys and values are those of a part of the tokens, and of another part in each step",
    fixed={
        "sx": 2,
        "sy": 2,
        "use_rand": False,
        "seed": 0,
        "window": None,
        "proportional": False,
        "merge_attn": True,
        "merge_crossattn": False,
        "merge_mlp": False,
    },
    merges_queries=False,
)


class InterlaceConstants(NamedTuple):
    """The tokens that remain of a grid in each turn."""

    grid: Grid
    remaining: np.ndarray  # [TURNS, K] int64, ascending in each turn
    positions: paddle.Tensor  # the same

    @property
    def tokens(self) -> int:
        """N."""
        return self.grid.tokens

    @property
    def kept(self) -> int:
        """K."""
        return self.remaining.shape[1]

    @property
    def source(self) -> paddle.Tensor:  # [TURNS, N] int64
        """The index in `positions` of the nearest token that remains: for merge maps, as attention needs none."""
        return nearest_constants(self.grid, self.remaining)


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


@paddle.jit.not_to_static  # constants, which Paddle would compute in the program
def interlace_constants(grid: Grid, parts: int, block: int) -> InterlaceConstants:
    """The tokens that remain in each turn if a block keeps `parts` of each whole cell, and all tokens outside of them.

    In turn p these are the tokens of rank parts·p, … parts·p + parts - 1, modulo `PARTS`. A block is `offset_of` turns
    ahead, so that blocks do not lose the same tokens in the same step.
    """
    rank = ranks(grid).reshape(-1)
    turns = np.arange(TURNS)[:, None] + offset_of(block)
    remains = ((rank - parts * turns) % PARTS < parts) | (rank < 0)  # [TURNS, N]
    positions = np.stack([np.flatnonzero(one) for one in remains])
    return InterlaceConstants(grid, positions, constant(positions))


def offset_of(block: int) -> int:
    """The turns by which a block is ahead of the first."""
    return 5 * block % TURNS


@paddle.jit.not_to_static  # a constant, which Paddle would compute in the program
def nearest_constants(grid: Grid, positions: np.ndarray) -> paddle.Tensor:  # [TURNS, K] → [TURNS, N] int64
    """For each token and turn the index of the nearest token that remains."""
    return constant(np.stack([_nearest(grid, one) for one in positions]))


def _nearest(grid: Grid, positions: np.ndarray) -> np.ndarray:  # [K] → [N]
    """For each token the index of the nearest of these positions in its cell; a token outside of cells is its own."""
    remains = np.zeros(grid.tokens, dtype=bool)
    remains[positions] = True
    first = np.argwhere(remains.reshape(grid)[:SIDE, :SIDE])  # row and column in a cell, [parts, 2]
    inside = np.stack(np.divmod(np.arange(PARTS), SIDE), axis=1)
    distances = ((inside[:, None] - first) ** 2).sum(axis=-1)
    row, column = first[distances.argmin(axis=1)].T.reshape(2, SIDE, SIDE)
    y, x = np.divmod(np.arange(grid.tokens), grid.w)
    in_cell = (y < grid.h // SIDE * SIDE) & (x < grid.w // SIDE * SIDE)
    cell = y % SIDE, x % SIDE
    near = (y - cell[0] + row[cell]) * grid.w + x - cell[1] + column[cell]
    return np.searchsorted(positions, np.where(in_cell, near, np.arange(grid.tokens)))


@dataclass(frozen=True, eq=False, kw_only=True)
class InterlacePlan(UnweightedPlan):
    """Keeps the tokens whose turn it is: one index for the whole batch, or one for each frame of a video."""

    constants: InterlaceConstants
    batch: paddle.Tensor  # [B, 1] int64: 0, 1, … B - 1
    turn: Turn

    @property
    def tokens(self) -> int:
        return self.frames * self.constants.tokens

    @property
    def kept(self) -> int:
        return self.frames * self.constants.kept

    @property
    def _frames(self) -> int:
        """F: frames of one video, in one sequence or as rows of the batch; both are F·N tokens one after the other."""
        return max(self.frames, self.turn.frames)

    @cached_property
    def _positions(self) -> paddle.Tensor:  # [F·K] int64: among the F·N tokens of a video
        return self._in_turn(self.constants.positions, self.constants.tokens)

    @cached_property
    def kept_rows(self) -> paddle.Tensor:
        return self._of_batch(self._positions, self.constants.tokens).reshape([-1, self.kept])

    @cached_property
    def source_rows(self) -> paddle.Tensor:
        source = self._in_turn(self.constants.source, self.constants.kept)
        return self._of_batch(source, self.constants.kept).reshape([-1])

    def _in_turn(self, table: paddle.Tensor, length: int) -> paddle.Tensor:  # [TURNS, L] → [F·L] int64
        """The index in a table whose turn it is in each frame, where frames are `length` long."""
        rows = self.turn.choose(table, self._frames)
        if self._frames > 1:
            rows = rows + count_rows(rows[:, :1]) * length
        return rows.reshape([-1])

    def _of_batch(self, index: paddle.Tensor, length: int) -> paddle.Tensor:  # [F·L] → [videos, F·L] int64
        """An index in each video, whose frames are `length` long, as rows of all tokens of the batch."""
        return index + self.batch.reshape([-1, self._frames])[:, :1] * length

    def _merge(self, x: paddle.Tensor) -> paddle.Tensor:
        if self._frames == 1:
            return gather(x, self._positions, axis=1)
        channels = x.shape[2]
        videos = x.reshape([-1, self._frames * self.constants.tokens, channels])
        return gather(videos, self._positions, axis=1).reshape([-1, self.kept, channels])
