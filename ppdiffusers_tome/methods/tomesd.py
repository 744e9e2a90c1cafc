"""tomesd: the most similar pairs of tokens merge into their mean, in queries, keys and values.

Each src looks for its most similar dst, and the best pairs merge. The results are those of tomesd 0.1.3 (Bolya &
Hoffman 2023, arXiv:2303.17604, section 4); random dst are others in each step, as tomesd's are.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..grid import Grid, count_dst
from .method import Method, Settings
from .turns import TURNS

if TYPE_CHECKING:
    import paddle

    from .matching import PairConstants
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
        from .matching import pair_constants  # here, because methods are read without Paddle

        key = (settings.seed, block) if settings.use_rand else None
        return pair_constants(grid, settings.sx, settings.sy, key, turns=TURNS if settings.use_rand else None)

    def choose(self, metric: "paddle.Tensor", constants: "PairConstants", kept: int, turn: "Turn") -> "Choice":
        from .matching import choose_pairs

        return choose_pairs(metric, constants.in_turn(turn), kept)

    def pairs_compared(self, grid: Grid, settings: Settings) -> int:
        dst = count_dst(grid, settings.sx, settings.sy)
        return dst * (grid.tokens - dst)


TOMESD = Tomesd(
    "tomesd",
    settings=frozenset({"sx", "sy", "use_rand", "seed", "merge_attn", "merge_crossattn", "merge_mlp"}),
    merges_queries=True,
)
