"""tomesd: the most similar pairs of tokens merge into their mean, in queries, keys and values.

Each src looks for its most similar dst, and the best pairs merge. The results are those of tomesd 0.1.3 (Bolya &
Hoffman 2023, arXiv:2303.17604, section 4); random dst differ in each step, as tomesd's are.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ..errors import ToMeConfigError
from ..grid import Grid, count_dst
from .cells import CellConfig
from .rules import FLAG, Rule, is_integer
from .turns import TURNS

if TYPE_CHECKING:
    import paddle

    from .matching import PairConstants
    from .plan import Choice, Turn

_ROUNDING = 1e-9  # tolerance: larger than the rounding error of N·share, for millions of tokens


SEED = Rule(
    lambda value: is_integer(value, 0, 2**64),
    "an int from 0 to 2**64 - 1; with each, tomesd chooses different dst in each step",
)


@dataclass(frozen=True)
class Tomesd(CellConfig):
    """Merge the most similar pairs of src and dst into their mean, in queries, keys and values.

    It merges in UNets and their ControlNets only.

    Args:
        ratio: share of the tokens to merge away, from 0 to 1 - 1/(sx·sy), and 0.5 by default.
        sx: width of a cell, in tokens, >= 1. Each cell has one dst.
        sy: height of a cell, in tokens, >= 1.
        use_rand: choose the dst token of each cell at random, a different one in each step, as a function of the
            timestep; otherwise it is the cell's first (top left) token.
        seed: seed of the random choice of dst, 0 <= seed < 2**64. The global random states of Paddle, NumPy and
            Python are neither read nor advanced.
        merge_attn: merge around self-attention (`attn1`).
        merge_crossattn: merge around cross-attention (`attn2`); rarely worth it.
        merge_mlp: merge around the feed-forward layer; costs the most quality. It cannot be combined with
            `enable_forward_chunking()`.
        max_downsample, min_tokens: as in `ToMeConfig`, which also has the errors.

    Raises:
        ToMeConfigError: also if all three `merge_…` are False.

    Source: Bolya & Hoffman 2023, arXiv:2303.17604; `seed` is new.

    Example:
        >>> Tomesd(seed=3).effective_ratio, Tomesd(merge_mlp=True).layers
        (0.5, ('attn', 'mlp'))
    """

    method: Literal["tomesd"] = "tomesd"
    _: KW_ONLY
    use_rand: Annotated[bool, FLAG] = True
    seed: Annotated[int, SEED] = 0
    merge_attn: Annotated[bool, FLAG] = True
    merge_crossattn: Annotated[bool, FLAG] = False
    merge_mlp: Annotated[bool, FLAG] = False

    merges_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers:
            raise ToMeConfigError(
                "merge_attn, merge_crossattn and merge_mlp are all False, so nothing would merge: set one of them to "
                "True, or use remove_tome() to turn merging off."
            )

    @property
    def default_ratio(self) -> float:
        return min(0.5, self.largest_ratio)

    @property
    def layers(self) -> tuple[str, ...]:
        merging = {"attn": self.merge_attn, "crossattn": self.merge_crossattn, "mlp": self.merge_mlp}
        return tuple(name for name, merges in merging.items() if merges)

    @property
    def takes_turns(self) -> bool:
        return self.use_rand

    def count_kept(self, grid: Grid, share: float) -> int:
        # At ratio 0.29 tomesd keeps 72 of 100 tokens, because 100 * 0.29 is 28.99… in floating point; this keeps 71.
        dst = count_dst(grid, self.sx, self.sy)
        return max(math.ceil(grid.tokens * share - _ROUNDING), dst) if dst else grid.tokens

    def constants(self, grid: Grid, kept: int, block: int) -> "PairConstants":
        from .matching import pair_constants  # here, because settings are read without Paddle

        key = (self.seed, block) if self.use_rand else None
        return pair_constants(grid, self.sx, self.sy, key, turns=TURNS if self.use_rand else None)

    def choose(self, metric: "paddle.Tensor", constants: "PairConstants", kept: int, turn: "Turn") -> "Choice":
        from .matching import choose_pairs

        return choose_pairs(metric, constants.in_turn(turn), kept)

    def pairs_compared(self, grid: Grid) -> int:
        dst = count_dst(grid, self.sx, self.sy)
        return dst * (grid.tokens - dst)
