"""What the methods have in common whose grids have cells of any size, each of which keeps a token."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from .config import ToMeConfig
from .rules import TOKENS


@dataclass(frozen=True)
class CellConfig(ToMeConfig):
    """A config with cells of `sx`×`sy` tokens.

    Args:
        sx: width of a cell, in tokens, >= 1. Each cell keeps one token (with tomesd's words a dst).
        sy: height of a cell, in tokens, >= 1.
    """

    _: KW_ONLY
    sx: Annotated[int, TOKENS] = 2
    sy: Annotated[int, TOKENS] = 2

    @property
    def largest_ratio(self) -> float:
        """The largest ratio that is allowed: one token of each cell remains."""
        return 1 - 1 / (self.sx * self.sy)

    @property
    def ratio_rule(self) -> str:
        bound = f"1 - 1/(sx·sy) = {self.largest_ratio:g} for sx={self.sx}, sy={self.sy}"
        return f"it must be a number from 0 to {bound}; larger sx or sy raise the maximum"
