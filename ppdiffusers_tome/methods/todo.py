"""ToDo: keys and values are those of one token of each cell, or of two, the same in each step.

With the first token of each 2×2 cell they are those of every second row and column, with two tokens of each 2×2 cell
those of a checkerboard. No tokens are compared.

Source: Smith et al. 2024, ToDo, arXiv:2402.13573.
"""

from dataclasses import dataclass

import numpy as np

from ..grid import Grid, choose_dst, count_dst
from .method import Method, Settings


@dataclass(frozen=True, eq=False)
class Todo(Method):
    """Keep one token of each cell, or two; the cells and the ratio, 1 - 1/(sx·sy) or 1 - 2/(sx·sy), decide which."""

    def default_ratio(self, sx: int, sy: int) -> float:
        return self.largest_ratio(sx, sy)

    def allowed_ratios(self, sx: int, sy: int) -> tuple[float, ...]:
        return tuple(1 - per_cell / (sx * sy) for per_cell in ((1,) if sx % 2 or sy % 2 else (2, 1)))

    def count_kept(self, grid: Grid, settings: Settings, share: float) -> int:
        return _per_cell(settings) * count_dst(grid, settings.sx, settings.sy) or grid.tokens

    def constants(self, grid: Grid, settings: Settings, kept: int, block: int) -> np.ndarray:
        return remaining(grid, settings.sx, settings.sy, _per_cell(settings))


def _per_cell(settings: Settings) -> int:
    """The tokens that each cell keeps."""
    return round((1 - settings.effective_ratio) * settings.sx * settings.sy)


TODO = Todo("todo", settings=frozenset({"sx", "sy"}))


def remaining(grid: Grid, sx: int, sy: int, per_cell: int) -> np.ndarray:  # [1, K] int64, ascending
    """The first token of each sx×sy cell, and of two the one half a cell away along both axes."""
    positions = choose_dst(grid, sx, sy)
    if per_cell == 2:
        positions = np.sort(np.concatenate([positions, positions + sy // 2 * grid.w + sx // 2]))
    return positions[None]
