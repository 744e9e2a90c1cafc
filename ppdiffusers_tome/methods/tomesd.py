"""tomesd: the most similar pairs of tokens merge into their mean, in queries, keys and values.

Each src looks for its most similar dst, and the best pairs merge. The results are those of tomesd 0.1.3 (Bolya &
Hoffman 2023, arXiv:2303.17604, section 4); random dst are others in each step, as tomesd's are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..grid import Grid, choose_dst, count_dst
from .method import Method, Settings
from .turns import TURNS

if TYPE_CHECKING:
    import paddle

    from .plan import Choice, Turn

_ROUNDING = 1e-9  # tolerance: larger than the rounding error of N·share, for millions of tokens


@dataclass(frozen=True, eq=False)
class Tomesd(Method):
    """Merge the most similar pairs of src and dst."""

    def default_ratio(self, sx: int, sy: int) -> float:
        return min(0.5, self.largest_ratio(sx, sy))

    def takes_turns(self, settings: Settings) -> bool:
        return settings.use_rand

    def count_kept(self, grid: Grid, settings: Settings, share: float) -> int:
        # At ratio 0.29 tomesd keeps 72 of 100 tokens, because 100 * 0.29 is 28.99… in floating point; this keeps 71.
        dst = count_dst(grid, settings.sx, settings.sy)
        return max(math.ceil(grid.tokens * share - _ROUNDING), dst) if dst else grid.tokens

    def constants(self, grid: Grid, settings: Settings, kept: int, block: int) -> "PairConstants":
        key = (settings.seed, block) if settings.use_rand else None
        return pair_constants(grid, settings.sx, settings.sy, key, turns=TURNS if settings.use_rand else None)

    def choose(self, metric: "paddle.Tensor", constants: "PairConstants", kept: int, turn: "Turn") -> "Choice":
        from .matching import choose_pairs  # here, because methods are read without Paddle

        return choose_pairs(metric, constants.in_turn(turn), kept)

    def pairs_compared(self, grid: Grid, settings: Settings) -> int:
        dst = count_dst(grid, settings.sx, settings.sy)
        return dst * (grid.tokens - dst)


TOMESD = Tomesd(
    "tomesd",
    settings=frozenset({"sx", "sy", "use_rand", "seed", "merge_attn", "merge_crossattn", "merge_mlp"}),
    merges_queries=True,
)


class PairConstants(NamedTuple):
    """Which positions of a grid are dst and which src, and the index of each in the sequence dst | src.

    Where dst take turns, each has one more axis, of length `TURNS`, before the others. They are NumPy arrays, and
    tensors in a pass.
    """

    dst: Any  # [D] int64, ascending
    src: Any  # [S] int64, ascending
    inverse_order: Any  # [N] int64: the index of each position in dst | src

    def in_turn(self, turn: "Turn") -> "PairConstants":
        """The constants whose turn it is, the same in all frames of a video."""
        if self.dst.ndim == 1:
            return self
        return PairConstants(*(turn._replace(frames=1).rows(table).reshape([-1]) for table in self))


def pair_constants(
    grid: Grid, sx: int, sy: int, random_key: Sequence[int] | None, turns: int | None = None
) -> PairConstants:
    """The positions on a grid, with dst from `choose_dst`, in NumPy.

    Args:
        grid, sx, sy, random_key: as in `choose_dst`.
        turns: how many choices to make, whose number continues the key; None: a single one.
    """
    keys = [random_key] if turns is None or random_key is None else [(*random_key, turn) for turn in range(turns)]
    dst = np.stack([choose_dst(grid, sx, sy, key) for key in keys])
    src = np.stack([np.setdiff1d(np.arange(grid.tokens), one, assume_unique=True) for one in dst])
    tables = (dst, src, np.argsort(np.concatenate([dst, src], axis=1), axis=1))
    return PairConstants(*(table[0] if turns is None else table for table in tables))
