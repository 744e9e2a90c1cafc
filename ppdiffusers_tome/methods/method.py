"""What a method of merging is: its settings, how many tokens it leaves, and how it makes a plan."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import paddle

from ..grid import Grid, count_dst
from .plan import MergePlan
from .turns import FIRST_TURN, Turn

_ROUNDING = 1e-9  # tolerance: larger than the rounding error of N·ratio, for millions of tokens


class Settings(Protocol):
    """The settings that a method reads; `ToMeConfig` has them."""

    @property
    def ratio(self) -> float: ...
    @property
    def sx(self) -> int: ...
    @property
    def sy(self) -> int: ...
    @property
    def window(self) -> int | None: ...
    @property
    def proportional(self) -> bool: ...
    @property
    def use_rand(self) -> bool: ...
    @property
    def seed(self) -> int: ...


def random_key(settings: Settings, block: int) -> tuple[int, ...] | None:
    """The key of a block's random dst, as `choose_dst` takes it; None if dst are not random."""
    return (settings.seed, block) if settings.use_rand else None


class Kept(NamedTuple):
    """How many tokens of a grid, or of each frame of a video, remain in a block."""

    tokens: int  # N: before merging
    queries: int  # after merging: of queries, if they merge, and of the other layers that run on merged tokens
    keys: int  # after merging: of keys and values of self-attention; at most as many as `queries`


class Form(ABC):
    """A way to compute a method's plans: the method itself, or one that suits a GPU."""

    def rounded(self, kept: Kept, grid: Grid, settings: Settings) -> Kept:
        """The numbers of tokens that remain in this form, given those that the method asks for."""
        return kept

    @abstractmethod
    def constants(self, grid: Grid, settings: Settings, kept: Kept, block: int) -> Any:
        """What plans of a grid have in common, as constants of a program.

        Args:
            grid: tokens along each axis.
            settings: the config.
            kept: fewer keys than tokens.
            block: number of the block in its denoiser; blocks may make other choices.
        """

    @abstractmethod
    def plan(
        self,
        metric: paddle.Tensor,  # [B, N, C] floating point
        constants: Any,
        kept: Kept,  # fewer keys than tokens
        turn: Turn = FIRST_TURN,
    ) -> MergePlan:
        """Choose which tokens merge. No gradient flows through the choice."""

    def pairs_compared(self, grid: Grid, settings: Settings) -> int:
        """Number of pairs of tokens whose similarity is computed; 0 if none is."""
        return 0


@dataclass(frozen=True, eq=False)
class Method(Form):
    """A way to choose tokens and to move them, as `apply_tome(method=…)` names it.

    Args:
        name: one word.
        description: what merges, in one line.
        fixed: the settings that this method does not have, each with the value that it has in a config.
        merges_queries: whether queries merge too; otherwise each token keeps its query and its output, and only keys
            and values merge.
    """

    name: str
    description: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    merges_queries: bool = True

    def defaults(self, sx: int, sy: int) -> Mapping[str, Any]:
        """The settings whose defaults are not those of `ToMeConfig`, for cells of this size."""
        return {}

    def allowed_ratios(self, sx: int, sy: int) -> tuple[float, ...] | None:
        """The ratios, ascending, that are allowed beside 0 with these cells; None if all up to 1 - 1/(sx·sy) are."""
        return None

    def largest_ratio(self, sx: int, sy: int) -> float:
        """The largest ratio that is allowed with these cells."""
        return 1 - 1 / (sx * sy)

    def takes_turns(self, settings: Settings) -> bool:
        """Whether other timesteps choose other tokens."""
        return False

    def ratio_of_blocks(self, settings: Settings, count: int, last: int | None) -> Sequence[float]:
        """The ratio of each block that merges in a denoiser.

        Args:
            settings: the config.
            count: number of blocks that merge.
            last: the one of them that runs last among the up blocks of a UNet; None in other models, and if none is.
        """
        return [settings.ratio] * count

    def ratios(self, settings: Settings, ratio: float) -> tuple[float, float]:
        """The ratio of queries, and that of keys and values, in a block of this ratio whose attention merges."""
        return ratio, ratio

    def kept(self, grid: Grid, settings: Settings, ratios: tuple[float, float]) -> Kept:
        """How many tokens of a grid the method asks to keep, at ratios of queries and of keys and values."""
        most = grid.tokens - count_dst(grid, settings.sx, settings.sy)  # that can merge away
        # 100 * 0.29 is 28.999… in floating point: this counts 29 tokens, tomesd 28.
        removed = (min(int(grid.tokens * ratio + _ROUNDING), most) for ratio in ratios)
        kept = Kept(grid.tokens, *(grid.tokens - count for count in removed))
        return kept if most < grid.tokens else Kept(*[grid.tokens] * 3)  # without a cell there is no dst

    def for_gpu(self, grid: Grid, settings: Settings) -> Form:
        """The form that suits a GPU on this grid: the method itself if it has no other."""
        return self

    def differs_on_gpu(self, settings: Settings) -> bool:
        """Whether a program for GPUs has other operations than one for CPUs, on grids of whole cells."""
        return False
