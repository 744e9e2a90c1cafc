"""What a method of merging is: its settings, how many tokens it keeps, and how it chooses them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..grid import Grid

if TYPE_CHECKING:  # a method is read, and its constants are computed, without Paddle
    import paddle

    from .plan import Choice, Turn

IN_ALL_METHODS = frozenset({"ratio", "method", "max_downsample", "min_tokens"})  # settings


class Settings(Protocol):
    """The settings that a method reads; `ToMeConfig` has them."""

    @property
    def effective_ratio(self) -> float: ...
    @property
    def sx(self) -> int: ...
    @property
    def sy(self) -> int: ...
    @property
    def use_rand(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    @property
    def merge_steps(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Method(ABC):
    """A way to choose the tokens that remain, as `apply_tome(method=…)` names it.

    From here on everything counts the tokens that remain ("kept"): users pass the share that goes (`ratio`).

    Args:
        name: one word, with a description in `method_names.py`.
        settings: the settings that this method has beside those that all methods have.
        merges_queries: whether layers run on the tokens that remain, and give their results to those that merged into
            them; otherwise every token keeps its query and its output, and only keys and values are fewer.
    """

    name: str
    settings: frozenset[str] = frozenset()
    merges_queries: bool = False

    def has(self, setting: str) -> bool:
        """Whether the method has a setting: one of all methods, or of its own."""
        return setting in IN_ALL_METHODS or setting in self.settings

    @abstractmethod
    def default_ratio(self, sx: int, sy: int) -> float:
        """The ratio if none is passed, for cells of this size."""

    def largest_ratio(self, sx: int, sy: int) -> float:
        """The largest ratio that is allowed: one token of each cell remains."""
        return 1 - 1 / (sx * sy)

    def allowed_ratios(self, sx: int, sy: int) -> tuple[float, ...] | None:
        """The ratios, ascending, that are allowed beside 0 with these cells; None if all up to the largest are."""
        return None

    def takes_turns(self, settings: Settings) -> bool:
        """Whether other timesteps choose other tokens."""
        return False

    def has_plain_steps(self, settings: Settings) -> bool:
        """Whether the steps of `methods.steps` keep all tokens."""
        return False

    def kept_shares(self, settings: Settings, count: int, last: int | None) -> Sequence[float]:
        """The share of the tokens that each block keeps which merges in a denoiser.

        Args:
            settings: the config.
            count: number of blocks that merge.
            last: the one of them that runs last among the up blocks of a UNet; None in other models, and if none is.
        """
        return [1 - settings.effective_ratio] * count

    @abstractmethod
    def count_kept(self, grid: Grid, settings: Settings, share: float) -> int:
        """How many tokens of a grid, or of each frame of a video, remain in a block that keeps this share below 1."""

    @abstractmethod
    def constants(self, grid: Grid, settings: Settings, kept: int, block: int) -> Any:
        """What the choices on a grid have in common, in NumPy's int64: constants of a program.

        Of a method that leaves tokens out it is the table of those that remain in each turn, [T, K] with T = `TURNS`
        or 1, ascending. One that merges queries returns a NamedTuple of arrays.

        Args:
            grid: tokens along each axis.
            settings: the config.
            kept: number of tokens that remain, fewer than those of the grid.
            block: number of the block in its denoiser; blocks may make other choices.
        """

    def choose(
        self,
        metric: "paddle.Tensor",  # [B, N, C] floating point; the frames of a video are rows
        constants: Any,  # as tensors
        kept: int,
        turn: "Turn",
    ) -> "Choice":
        """Choose the tokens that remain, by default those of the table. No gradient flows through the choice."""
        return turn.choose(constants)

    def pairs_compared(self, grid: Grid, settings: Settings) -> int:
        """Number of pairs of tokens whose similarity is computed; 0 if none is."""
        return 0
