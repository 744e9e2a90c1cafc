"""Plans: which tokens of a pass merge, and how they are merged and copied back.

Each kind of plan has its way to move tokens: rows of the batch by gathers (`PairPlan`), the same tokens in all images
(`CellPlan`), and matrix products within windows, for GPUs (`WindowPlan`).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import paddle
import paddle.nn.functional as F

from .positions import Cells, EqualWindows, Positions

_HALF = (paddle.float16, paddle.bfloat16)


def cast(x: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """`x.cast(dtype)` without the copy that Paddle makes even if the dtype is the same."""
    return x if x.dtype == dtype else x.cast(dtype)


def gather(x: paddle.Tensor, index: paddle.Tensor, axis: int = 0) -> paddle.Tensor:
    """`paddle.gather`; float16 goes through float32 on the CPU, where Paddle has no float16 gather."""
    if x.dtype == paddle.float16 and paddle.get_device() == "cpu":
        return paddle.gather(x.cast("float32"), index, axis=axis).cast("float16")
    return paddle.gather(x, index, axis=axis)


def count_rows(rows: paddle.Tensor) -> paddle.Tensor:
    """0, 1, … n - 1 for rows [n, …], in int64; a program may not know n."""
    return paddle.cumsum(paddle.ones_like(rows, dtype="int64"), axis=0) - 1


def full_precision() -> AbstractContextManager:
    """Turn mixed precision off so that a matmul stays in its dtype; Paddle cannot do so in a static program."""
    return paddle.amp.auto_cast(enable=False) if paddle.in_dynamic_mode() else nullcontext()


@dataclass(frozen=True, eq=False, kw_only=True)
class MergePlan:
    """How the tokens [B, N, C] of a pass merge, and where each token takes its result from.

    Of an image's N tokens, r merge away: N - r merged tokens remain. Where the frames of a video are one sequence, N
    and r are those of all frames, and a merged sequence has frame after frame. Rows count the tokens of the whole
    batch: token n of image b is row b·N + n, merged token m is row b·(N - r) + m.

    Tensors are computed when they are first read, because many passes do not need all of them.
    """

    frames: int = 1  # F: equal parts of a sequence in which tokens merge separately
    keys_plan: "MergePlan | None" = None  # the plan of keys and values if they merge further; of the same tokens

    @property
    def tokens(self) -> int:
        """N: tokens per image before merging."""
        raise NotImplementedError

    @property
    def kept(self) -> int:
        """N - r: tokens per image after merging."""
        raise NotImplementedError

    @property
    def removed(self) -> int:
        """r: tokens per image that merge away."""
        return self.tokens - self.kept

    @property
    def keys(self) -> "MergePlan":
        """The plan of keys and values."""
        return self.keys_plan or self

    @property
    def kept_rows(self) -> paddle.Tensor:  # [B, N-r] int64
        """The row of the token at whose place each merged token is: its dst, or the token itself."""
        raise NotImplementedError

    @property
    def source_rows(self) -> paddle.Tensor:  # [B·N] int64
        """The row of the merged token that each token takes its result from."""
        raise NotImplementedError

    @property
    def has_equal_sizes(self) -> bool:
        """Whether all merged tokens stand for as many tokens, which changes no attention weight among them."""
        return False

    @property
    def log_sizes(self) -> paddle.Tensor:  # [B, N-r] float32
        """Logarithm of the size of each merged token: the number of tokens that it stands for."""
        raise NotImplementedError

    def move(self, x: paddle.Tensor) -> paddle.Tensor:
        """The merged tokens [B, N-r, C] of tokens [B, N, C]."""
        raise NotImplementedError

    def move_back(self, y: paddle.Tensor) -> paddle.Tensor:
        """The row of merged tokens [B, N-r, C] that each token takes: [B, N, C]."""
        raise NotImplementedError


def join_frames(plan: MergePlan, frames: int) -> MergePlan:
    """The plan of sequences [B, F·N, C] from that of their F frames [B·F, N, C]; the rows are the same."""
    if frames == 1:
        return plan
    keys_plan = None if plan.keys_plan is None else join_frames(plan.keys_plan, frames)
    return replace(plan, frames=frames, keys_plan=keys_plan)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlainPlan(MergePlan):
    """The plan by which no token merges: that of queries, where only keys and values merge."""

    count: int  # tokens of a frame
    batch: paddle.Tensor  # [B, 1] int64: 0, 1, … B - 1

    @property
    def tokens(self) -> int:
        return self.frames * self.count

    @property
    def kept(self) -> int:
        return self.tokens

    @cached_property
    def kept_rows(self) -> paddle.Tensor:
        ones = paddle.ones([1, self.count], dtype="int64") + paddle.zeros_like(self.batch)
        return count_rows(ones.reshape([-1])).reshape([-1, self.tokens])

    @property
    def source_rows(self) -> paddle.Tensor:
        return self.kept_rows.reshape([-1])

    @property
    def has_equal_sizes(self) -> bool:
        return True

    @cached_property
    def log_sizes(self) -> paddle.Tensor:
        return paddle.zeros_like(self.kept_rows, dtype="float32")

    def move(self, x: paddle.Tensor) -> paddle.Tensor:
        return x

    def move_back(self, y: paddle.Tensor) -> paddle.Tensor:
        return y


class Pairs:
    """Each src of a batch with its dst, in the order in which they merge.

    Args:
        positions: the constants of the grid.
        batch: [B, 1] int64: 0, 1, … B - 1.
        best: [B, S] int64: the dst of each src, as an index into `positions.dst`.
        order: [B, S] int64: indices of src, those that merge first; None if all merge.
    """

    def __init__(
        self, positions: Positions, batch: paddle.Tensor, best: paddle.Tensor, order: paddle.Tensor | None
    ) -> None:
        self.positions, self.batch, self.best, self._order = positions, batch, best, order

    @cached_property
    def rank(self) -> paddle.Tensor:  # [B, S] int64
        """The place of each src in the order."""
        return paddle.argsort(self._order, axis=1)

    @cached_property
    def first_rows(self) -> paddle.Tensor:  # [B, 1] int64
        """The row of each image's first token."""
        return self.batch * (self.positions.d + self.positions.s)

    @cached_property
    def dst_rows(self) -> paddle.Tensor:  # [B, D] int64
        """The rows of the dst tokens."""
        return self.positions.dst + self.first_rows

    @cached_property
    def src_rows(self) -> paddle.Tensor:  # [B, S] int64
        """The rows of the src tokens, in order."""
        src = self.positions.src
        if self._order is not None:
            src = paddle.gather(src, self._order.reshape([-1])).reshape([-1, self.positions.s])
        return src + self.first_rows

    @cached_property
    def targets(self) -> paddle.Tensor:  # [B, S] int64
        """The dst of each src, in order, as a row of the [B·D] dst of the batch."""
        best = self.best if self._order is None else paddle.take_along_axis(self.best, self._order, axis=1)
        return best + self.batch * self.positions.d


@dataclass(frozen=True, eq=False, kw_only=True)
class PairPlan(MergePlan):
    """The plan that merges the first r pairs of src and dst; others may not. It moves rows of the batch.

    A merged sequence has the dst tokens first, by position, then the src tokens that remain, those that would merge
    next first.
    """

    pairs: Pairs
    merged: int  # pairs of a frame that merge, at least 1

    @property
    def tokens(self) -> int:
        return self.frames * (self.pairs.positions.d + self.pairs.positions.s)

    @property
    def kept(self) -> int:
        return self.tokens - self.frames * self.merged

    @property
    def dst_rows(self) -> paddle.Tensor:  # [B·D] int64
        """The rows of the dst tokens."""
        return self.pairs.dst_rows.reshape([-1])

    @cached_property
    def stay_rows(self) -> paddle.Tensor | None:  # [B·(N-r-D)] int64
        """The rows of the src tokens that remain; None if none do."""
        if self.merged == self.pairs.positions.s:
            return None
        return self.pairs.src_rows[:, self.merged :].reshape([-1])

    @cached_property
    def merged_rows(self) -> paddle.Tensor:  # [B·r] int64
        """The rows that merge away."""
        return self.pairs.src_rows[:, : self.merged].reshape([-1])

    @cached_property
    def target_rows(self) -> paddle.Tensor:  # [B·r, 1] int64
        """For each of `merged_rows` the row of `dst_rows` that it is added to."""
        return self.pairs.targets[:, : self.merged].reshape([-1, 1])

    @cached_property
    def weights(self) -> paddle.Tensor:  # [B·D, 1] float32
        """1 / the number of tokens averaged in each dst token."""
        with paddle.no_grad():
            alone = paddle.ones_like(self.dst_rows.reshape([-1, 1]), dtype="float32")
            members = paddle.scatter_nd_add(
                alone, self.target_rows, paddle.ones_like(self.target_rows, dtype="float32")
            )
            return paddle.reciprocal(members)

    @property
    def kept_rows(self) -> paddle.Tensor:
        return self._in_order(self.dst_rows, self.stay_rows)

    @cached_property
    def source_rows(self) -> paddle.Tensor:
        pairs, positions = self.pairs, self.pairs.positions
        source = pairs.best
        if self.merged < positions.s:
            stays = pairs.rank + (positions.d - self.merged)
            source = paddle.where(pairs.rank < self.merged, source, stays)
        dst = positions.count_d + paddle.zeros_like(pairs.batch)
        rows = paddle.concat([dst, source], axis=1) + pairs.batch * (positions.d + positions.s - self.merged)
        return paddle.gather(rows, positions.slot, axis=1).reshape([-1])

    @cached_property
    def log_sizes(self) -> paddle.Tensor:
        # like: a program may not know the batch size
        alone = None if self.stay_rows is None else paddle.zeros_like(self.stay_rows, dtype="float32")
        return self._in_order(-paddle.log(self.weights).reshape([-1]), alone)

    def move(self, x: paddle.Tensor) -> paddle.Tensor:
        rows = x.reshape([-1, x.shape[2]])
        wide = paddle.float32 if x.dtype in _HALF else x.dtype  # sums are rounded once
        # Intermediates have no names so that they are freed at once and their memory is reused: measured 20 % faster.
        means = paddle.scatter_nd_add(
            cast(gather(rows, self.dst_rows), wide),
            self.target_rows,
            cast(gather(rows, self.merged_rows), wide),
        ) * cast(self.weights, wide)
        stay = None if self.stay_rows is None else gather(rows, self.stay_rows)
        return self._in_order(cast(means, x.dtype), stay)

    def move_back(self, y: paddle.Tensor) -> paddle.Tensor:
        channels = y.shape[2]
        return gather(y.reshape([-1, channels]), self.source_rows).reshape([-1, self.tokens, channels])

    def _in_order(
        self,
        of_dst: paddle.Tensor,  # [B·D, …]
        of_stay: paddle.Tensor | None,  # [B·(N-r-D), …]; None if none
    ) -> paddle.Tensor:  # [B, N-r, …]
        """Concatenate rows of dst tokens and of the remaining src tokens in the order of a merged sequence."""
        shape, positions = of_dst.shape[1:], self.pairs.positions
        rows = of_dst.reshape([-1, positions.d, *shape])
        if of_stay is not None:
            rows = paddle.concat([rows, of_stay.reshape([-1, positions.s - self.merged, *shape])], axis=1)
        return rows if self.frames == 1 else rows.reshape([-1, self.kept, *shape])


@dataclass(frozen=True, eq=False, kw_only=True)
class CellPlan(MergePlan):
    """The plan by which each cell keeps its dst, whose result all its tokens take. One gather moves them."""

    cells: Cells
    batch: paddle.Tensor  # [B, 1] int64: 0, 1, … B - 1

    @property
    def tokens(self) -> int:
        return self.frames * self.cells.cell.shape[0]

    @property
    def kept(self) -> int:
        return self.frames * self.cells.dst.shape[0]

    @cached_property
    def kept_rows(self) -> paddle.Tensor:
        return (self.cells.dst + self.batch * self.cells.cell.shape[0]).reshape([-1, self.kept])

    @cached_property
    def source_rows(self) -> paddle.Tensor:
        return (self.cells.cell + self.batch * self.cells.dst.shape[0]).reshape([-1])

    @property
    def has_equal_sizes(self) -> bool:
        return self.cells.has_equal_sizes

    @cached_property
    def log_sizes(self) -> paddle.Tensor:
        sizes = self.cells.log_sizes + paddle.zeros_like(self.batch, dtype="float32")
        return sizes.reshape([-1, self.kept])

    def move(self, x: paddle.Tensor) -> paddle.Tensor:
        return self._of_frames(x, self.cells.dst)

    def move_back(self, y: paddle.Tensor) -> paddle.Tensor:
        return self._of_frames(y, self.cells.cell)

    def _of_frames(self, x: paddle.Tensor, index: paddle.Tensor) -> paddle.Tensor:
        if self.frames == 1:
            return gather(x, index, axis=1)
        channels = x.shape[2]
        frames = x.reshape([-1, x.shape[1] // self.frames, channels])
        return gather(frames, index, axis=1).reshape([-1, self.frames * index.shape[0], channels])


@dataclass(frozen=True, eq=False, kw_only=True)
class WindowPlan(MergePlan):
    """The plan that merges as many tokens in each window as in the others. Matrix products move tokens.

    A GPU runs few large operations faster than many small ones: measured on an H100, moving and choosing take a third
    of the time of a `PairPlan`'s. A CPU takes longer. Sums have one order, so results are the same in each run.
    A merged sequence has window after window, each with its dst tokens first.
    """

    windows: EqualWindows
    rows: paddle.Tensor  # [B·T, P] int64: the merged token of each token in the order of its window
    of_window: int  # K: tokens that remain of a window's P

    @property
    def tokens(self) -> int:
        return self.frames * self.windows.count_w * self.windows.p

    @property
    def kept(self) -> int:
        return self.frames * self.windows.count_w * self.of_window

    @cached_property
    def _members(self) -> paddle.Tensor:  # [B·T, P, K] float32: 1 where a token is in a merged token
        with paddle.no_grad():
            return F.one_hot(self.rows, self.of_window)

    @cached_property
    def _sizes(self) -> paddle.Tensor:  # [B·T, 1, K] float32
        return self._members.sum(axis=1, keepdim=True)

    @cached_property
    def kept_rows(self) -> paddle.Tensor:
        windows = self.windows
        first = paddle.argmax(self._members, axis=1).reshape([-1, windows.count_w, self.of_window])
        slots = first + windows.begin  # [B, T, K]: of the first token of each merged token
        positions = paddle.gather(windows.order, slots.reshape([-1])).reshape([-1, windows.count_w * self.of_window])
        image = count_rows(positions[:, :1])
        return (positions + image * (windows.count_w * windows.p)).reshape([-1, self.kept])

    @cached_property
    def source_rows(self) -> paddle.Tensor:
        windows = self.windows
        window = count_rows(self.rows[:, :1])
        rows = (self.rows + window * self.of_window).reshape([-1, windows.count_w * windows.p])
        return paddle.gather(rows, windows.slot, axis=1).reshape([-1])

    @cached_property
    def log_sizes(self) -> paddle.Tensor:
        return paddle.log(self._sizes).reshape([-1, self.kept])

    def move(self, x: paddle.Tensor) -> paddle.Tensor:
        windows, channels = self.windows, x.shape[2]
        tokens = gather(x.reshape([-1, windows.count_w * windows.p, channels]), windows.order, axis=1)
        means = cast(self._members / self._sizes, x.dtype)
        with full_precision():
            merged = paddle.matmul(means, tokens.reshape([-1, windows.p, channels]), transpose_x=True)
        return merged.reshape([-1, self.kept, channels])

    def move_back(self, y: paddle.Tensor) -> paddle.Tensor:
        windows, channels = self.windows, y.shape[2]
        merged = y.reshape([-1, self.of_window, channels])
        with full_precision():
            tokens = paddle.matmul(cast(self._members, y.dtype), merged)
        tokens = tokens.reshape([-1, windows.count_w * windows.p, channels])
        return gather(tokens, windows.slot, axis=1).reshape([-1, self.tokens, channels])
