"""A grid of tokens: its cells, and the dst of each cell."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Grid(NamedTuple):
    """Height and width of a feature map in tokens; token n is in row n // w, column n % w."""

    h: int
    w: int

    @property
    def tokens(self) -> int:
        """N = h·w."""
        return self.h * self.w


def count_dst(grid: Grid, sx: int, sy: int) -> int:
    """Number of dst tokens of a grid: one per complete sx×sy cell, none in a remainder at the right or bottom."""
    return (grid.h // sy) * (grid.w // sx)


def choose_dst(
    grid: Grid,
    sx: int = 2,
    sy: int = 2,
    random_key: Sequence[int] | None = None,
) -> np.ndarray:  # [D] int64, ascending
    """Choose one dst token in each sx×sy cell of the grid.

    Args:
        grid: tokens along each axis.
        sx, sy: width and height of a cell, in tokens.
        random_key: integers >= 0 that seed a random choice: the same key and grid give the same choice on every
            machine. None chooses the first (top left) token of each cell.

    Returns:
        The positions of the dst tokens, D = (h // sy)·(w // sx). No global random state is read or advanced.

    Source: tomesd draws from the same distribution, but from a generator whose state depends on earlier calls.

    Example:
        >>> choose_dst(Grid(4, 6)).tolist()
        [0, 2, 4, 12, 14, 16]
    """
    rows, columns = grid.h // sy, grid.w // sx
    if random_key is None:
        offset = np.zeros((rows, columns), dtype=np.int64)
    else:
        entropy = np.random.SeedSequence([*random_key, grid.h, grid.w])
        # RandomState: NumPy promises never to change its streams (NEP 19).
        stream = np.random.RandomState(np.random.MT19937(entropy))
        offset = stream.randint(sx * sy, size=(rows, columns), dtype=np.int64)
    y = np.arange(rows)[:, None] * sy + offset // sx
    x = np.arange(columns)[None, :] * sx + offset % sx
    return np.sort((y * grid.w + x).reshape(-1))
