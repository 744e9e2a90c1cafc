"""ToDo: keys and values are those of one or two tokens of each cell, the same in each step.

With the first token of each 2×2 cell they are those of every second row and column, with two tokens of each 2×2 cell
those of a checkerboard. No tokens are compared.

Source: Smith et al. 2024, ToDo, arXiv:2402.13573.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..grid import Grid, choose_dst, count_dst
from .cells import CellConfig
from .config import ratios_in_words


@dataclass(frozen=True)
class Todo(CellConfig):
    """Keep the keys and values of one or two tokens of each cell; every token keeps its own query and output.

    Args:
        ratio: 1 - 1/(sx·sy), its own (0.75 with 2×2 cells), or, if sx and sy are even, 1 - 2/(sx·sy) (0.5 with 2×2
            cells: every second token, on a checkerboard), or 0.
        sx: width of a cell, in tokens, >= 1. Each cell keeps one token, or two at ratio 1 - 2/(sx·sy).
        sy: height of a cell, in tokens, >= 1.
        max_downsample, min_tokens: as in `ToMeConfig`, which also has the errors.

    Source: ToDo (Smith et al. 2024, arXiv:2402.13573).

    Example:
        >>> Todo(sx=4).effective_ratio, Todo(ratio=0.5).effective_ratio
        (0.875, 0.5)
    """

    method: Literal["todo"] = "todo"

    @property
    def default_ratio(self) -> float:
        return self.largest_ratio

    @property
    def allowed_ratios(self) -> tuple[float, ...]:
        per_cell = (1,) if self.sx % 2 or self.sy % 2 else (2, 1)
        return tuple(1 - kept / (self.sx * self.sy) for kept in per_cell)

    @property
    def ratio_rule(self) -> str:
        own, usual = self.allowed_ratios, Todo().allowed_ratios
        remedy = "other cells allow other ratios" if own == usual else f"{ratios_in_words(usual)} with 2×2 cells"
        return f"method='todo' allows {ratios_in_words(own)} with sx={self.sx}, sy={self.sy}; {remedy}"

    def count_kept(self, grid: Grid, share: float) -> int:
        return self._per_cell * count_dst(grid, self.sx, self.sy) or grid.tokens

    def constants(self, grid: Grid, kept: int, block: int) -> np.ndarray:
        return remaining(grid, self.sx, self.sy, self._per_cell)

    @property
    def _per_cell(self) -> int:
        """The tokens that each cell keeps."""
        return round((1 - self.effective_ratio) * self.sx * self.sy)


def remaining(grid: Grid, sx: int, sy: int, per_cell: int) -> np.ndarray:  # [1, K] int64, ascending
    """The first token of each sx×sy cell; if it keeps two, also the token half a cell away along both axes."""
    positions = choose_dst(grid, sx, sy)
    if per_cell == 2:
        positions = np.sort(np.concatenate([positions, positions + sy // 2 * grid.w + sx // 2]))
    return positions[None]
