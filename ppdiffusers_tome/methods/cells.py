"""Cells: each cell keeps one token, its dst, without a comparison. One gather moves them.

With the first token of each 2×2 cell this is ToDo (Smith et al. 2024, arXiv:2402.13573): keys and values are those of
every second row and column.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import paddle

from ..grid import Grid, choose_dst, constant, count_dst
from ..tensors import gather
from .method import Kept, Method, Settings
from .plan import MergePlan, PlainPlan, check_metric, count_batch


@dataclass(frozen=True, eq=False)
class Cells(Method):
    """Keep the dst of each cell; the ratio follows from the cells."""

    def defaults(self, sx: int, sy: int) -> Mapping[str, Any]:
        return {"ratio": 1 - 1 / (sx * sy), "use_rand": False}

    def ratio_error(self, ratio: float, largest: float) -> str | None:
        if ratio in (0, largest):
            return None
        return f"method={self.name!r} keeps one token of each cell, so it must be 1 - 1/(sx·sy) = {largest:g}, or 0"

    def kept(self, grid: Grid, settings: Settings, ratios: tuple[float, float]) -> Kept:
        cells = count_dst(grid, settings.sx, settings.sy) or grid.tokens
        return Kept(grid.tokens, *(cells if ratio else grid.tokens for ratio in ratios))

    def constants(self, grid: Grid, settings: Settings, random_key: Sequence[int] | None) -> "CellConstants":
        return cell_constants(grid, settings.sx, settings.sy, random_key)

    def plan(self, metric: paddle.Tensor, constants: "CellConstants", kept: Kept) -> MergePlan:
        with paddle.no_grad():
            return CellPlan(constants=constants, batch=count_batch(metric))


TODO = Cells(
    "todo",
    "keys and values are those of one token of each cell, by default the first",
    fixed={"window": None},
    merges_queries=False,
)


def match_cells(
    metric: paddle.Tensor,  # [B, N, C]; only B and N are used
    grid: Grid,  # h·w == N
    sx: int = 2,
    sy: int = 2,
    random_key: Sequence[int] | None = None,
) -> MergePlan:
    """Keep the dst of each sx×sy cell, without comparing tokens; a remainder joins the cell beside it.

    Args:
        metric, grid, sx, sy, random_key: as in `match_tokens`.

    Returns:
        The plan, the same for all images: D = (h // sy)·(w // sx) tokens remain, or all of a grid without a cell.

    Raises:
        ToMeConfigError: metric is not a floating-point [B, N, C], or h·w is not N.

    Source: Smith et al. 2024, ToDo, arXiv:2402.13573, which keeps the first token of each cell.

    Example:
        >>> match_cells(paddle.randn([2, 24, 8]), Grid(4, 6)).kept
        6
    """
    n, d = grid.tokens, count_dst(grid, sx, sy)
    check_metric(metric, grid, 0, d)
    with paddle.no_grad():
        batch = count_batch(metric)
        if d in (0, n):
            return PlainPlan(count=n, batch=batch)
        return CellPlan(constants=cell_constants(grid, sx, sy, random_key), batch=batch)


class CellConstants(NamedTuple):
    """The cells of a grid, each with one dst. A remainder at the right or bottom belongs to the cell beside it."""

    dst: paddle.Tensor  # [D] int64: positions, ascending
    cell: paddle.Tensor  # [N] int64: the index in `dst` of the dst of each position's cell
    log_sizes: paddle.Tensor  # [D] float32: logarithm of the number of tokens of each cell
    has_equal_sizes: bool


@paddle.jit.not_to_static  # constants, which Paddle would compute in the program
def cell_constants(grid: Grid, sx: int, sy: int, random_key: Sequence[int] | None) -> CellConstants:
    """The cells of a grid that has one at least, with dst from `choose_dst`, as constants of a program."""
    dst = choose_dst(grid, sx, sy, random_key)
    rows = np.minimum(np.arange(grid.h) // sy, grid.h // sy - 1)
    columns = np.minimum(np.arange(grid.w) // sx, grid.w // sx - 1)
    number = (rows[:, None] * (grid.w // sx) + columns).reshape(-1)
    cell = np.argsort(number[dst])[number]  # dst is sorted by position, not by cell
    sizes = np.bincount(cell)
    return CellConstants(
        dst=constant(dst),
        cell=constant(cell),
        log_sizes=constant(np.log(sizes), "float32"),
        has_equal_sizes=bool((sizes == sizes[0]).all()),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class CellPlan(MergePlan):
    """Each cell keeps its dst, whose result all its tokens take: one index for the whole batch."""

    constants: CellConstants
    batch: paddle.Tensor  # [B, 1] int64: 0, 1, … B - 1

    @property
    def tokens(self) -> int:
        return self.frames * self.constants.cell.shape[0]

    @property
    def kept(self) -> int:
        return self.frames * self.constants.dst.shape[0]

    @cached_property
    def kept_rows(self) -> paddle.Tensor:
        return (self.constants.dst + self.batch * self.constants.cell.shape[0]).reshape([-1, self.kept])

    @cached_property
    def source_rows(self) -> paddle.Tensor:
        return (self.constants.cell + self.batch * self.constants.dst.shape[0]).reshape([-1])

    @property
    def has_equal_sizes(self) -> bool:
        return self.constants.has_equal_sizes

    @cached_property
    def log_sizes(self) -> paddle.Tensor:
        sizes = self.constants.log_sizes + paddle.zeros_like(self.batch, dtype="float32")
        return sizes.reshape([-1, self.kept])

    def _merge(self, x: paddle.Tensor) -> paddle.Tensor:
        return self._gather(x, self.constants.dst)

    def _unmerge(self, y: paddle.Tensor) -> paddle.Tensor:
        return self._gather(y, self.constants.cell)

    def _gather(self, x: paddle.Tensor, index: paddle.Tensor) -> paddle.Tensor:
        if self.frames == 1:
            return gather(x, index, axis=1)
        channels = x.shape[2]
        frames = x.reshape([-1, x.shape[1] // self.frames, channels])
        return gather(frames, index, axis=1).reshape([-1, self.frames * index.shape[0], channels])
