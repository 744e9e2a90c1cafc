"""Cells: each cell keeps one token or two, its dst, without a comparison. One gather moves them.

With the first token of each 2×2 cell this is ToDo (Smith et al. 2024, arXiv:2402.13573): keys and values are those of
every second row and column. With two tokens of each 2×2 cell they are those of a checkerboard.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import paddle

from ..errors import ToMeConfigError
from ..grid import Grid, choose_dst, constant, count_dst
from ..tensors import gather
from .method import Kept, Method, Settings, random_key
from .plan import MergePlan, PlainPlan, check_metric, count_batch
from .turns import FIRST_TURN, Turn


@dataclass(frozen=True, eq=False)
class Cells(Method):
    """Keep the dst of each cell; the cells and the ratio, 1 - 1/(sx·sy) or 1 - 2/(sx·sy), decide how many it has."""

    def defaults(self, sx: int, sy: int) -> Mapping[str, Any]:
        return {"ratio": 1 - 1 / (sx * sy), "use_rand": False}

    def allowed_ratios(self, sx: int, sy: int) -> tuple[float, ...]:
        return tuple(1 - per_cell / (sx * sy) for per_cell in ((1,) if sx % 2 or sy % 2 else (2, 1)))

    def kept(self, grid: Grid, settings: Settings, ratios: tuple[float, float]) -> Kept:
        cells = count_dst(grid, settings.sx, settings.sy)
        tokens = (cells * _per_cell(ratio, settings) if ratio else 0 for ratio in ratios)
        return Kept(grid.tokens, *(count or grid.tokens for count in tokens))

    def constants(self, grid: Grid, settings: Settings, kept: Kept, block: int) -> "CellConstants":
        key = random_key(settings, block)
        return cell_constants(grid, settings.sx, settings.sy, key, _per_cell(settings.ratio, settings))

    def plan(
        self, metric: paddle.Tensor, constants: "CellConstants", kept: Kept, turn: Turn = FIRST_TURN
    ) -> MergePlan:
        with paddle.no_grad():
            return CellPlan(constants=constants, batch=count_batch(metric))


def _per_cell(ratio: float, settings: Settings) -> int:
    """The tokens that each cell keeps at a ratio above 0."""
    return round((1 - ratio) * settings.sx * settings.sy)


TODO = Cells(
    "todo",
    "keys and values are those of one token of each cell, or at ratio 0.5 of a checkerboard",
    fixed={"window": None},
    merges_queries=False,
)


def match_cells(
    metric: paddle.Tensor,  # [B, N, C]; only B and N are used
    grid: Grid,  # h·w == N
    sx: int = 2,
    sy: int = 2,
    random_key: Sequence[int] | None = None,
    per_cell: int = 1,
) -> MergePlan:
    """Keep the dst of each sx×sy cell, without comparing tokens; a remainder joins the cell beside it.

    Args:
        metric, grid, sx, sy, random_key: as in `match_tokens`.
        per_cell: dst of each cell, 1 or 2. Two need an even sx and sy; they are half a cell apart along both axes, so
            those of 2×2 cells are on a diagonal.

    Returns:
        The plan, the same for all images: D = per_cell·(h // sy)·(w // sx) tokens remain, or all of a grid without a
        cell.

    Raises:
        ToMeConfigError: metric is not a floating-point [B, N, C], h·w is not N, or per_cell is not allowed.

    Source: Smith et al. 2024, ToDo, arXiv:2402.13573, which keeps the first token of each cell.

    Example:
        >>> match_cells(paddle.randn([2, 24, 8]), Grid(4, 6)).kept
        6
        >>> match_cells(paddle.randn([2, 24, 8]), Grid(4, 6), per_cell=2).kept_rows[0].tolist()
        [0, 2, 4, 7, 9, 11, 12, 14, 16, 19, 21, 23]
    """
    n, d = grid.tokens, per_cell * count_dst(grid, sx, sy)
    check_metric(metric, grid, 0, d)
    if per_cell != 1 and (per_cell != 2 or sx % 2 or sy % 2):
        rule = "it must be 1, or 2 with an even sx and sy"
        raise ToMeConfigError(f"per_cell={per_cell!r} is not allowed with sx={sx}, sy={sy}: {rule}.")
    with paddle.no_grad():
        batch = count_batch(metric)
        if d in (0, n):
            return PlainPlan(count=n, batch=batch)
        return CellPlan(constants=cell_constants(grid, sx, sy, random_key, per_cell), batch=batch)


class CellConstants(NamedTuple):
    """The cells of a grid with their dst. A remainder at the right or bottom belongs to the cell beside it.

    The upper half of a cell of two dst takes one of them, and the lower half the other.
    """

    dst: paddle.Tensor  # [D] int64: positions, ascending
    cell: paddle.Tensor  # [N] int64: the index in `dst` of the dst that each position takes
    log_sizes: paddle.Tensor  # [D] float32: logarithm of the number of tokens that take each dst
    has_equal_sizes: bool


@paddle.jit.not_to_static  # constants, which Paddle would compute in the program
def cell_constants(grid: Grid, sx: int, sy: int, random_key: Sequence[int] | None, per_cell: int) -> CellConstants:
    """The cells of a grid that has one at least, with dst from `choose_dst`, as constants of a program.

    The second of two dst is half a cell from the first along both axes, and those that would leave the cell begin
    again at its other side. So one of them is in the upper half of the cell, and one in the lower.
    """
    dst = choose_dst(grid, sx, sy, random_key)
    if per_cell == 2:
        y, x = np.divmod(dst, grid.w)
        second = (y - y % sy + (y + sy // 2) % sy) * grid.w + x - x % sx + (x + sx // 2) % sx
        dst = np.sort(np.concatenate([dst, second]))
    rows = np.minimum(np.arange(grid.h) // (sy // per_cell), grid.h // sy * per_cell - 1)
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
