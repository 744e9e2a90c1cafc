"""Pairs by similarity in a form that suits a GPU: the same number of tokens merges in every window.

A GPU runs few large operations faster than many small ones: measured on an H100, choosing and moving take a third of
the time of a `PairPlan`'s. A CPU takes longer. Sums have one order, so results are the same in each run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F

from ..grid import Grid, choose_dst, constant, window_of
from ..tensors import cast, count_rows, finite_or_zero, full_precision, gather
from .method import Form, Kept, Settings, random_key
from .plan import MergePlan, PlainPlan, count_batch
from .turns import FIRST_TURN, Turn

# Tokens of a window: in smaller ones half a token is more than MAX_ROUNDING; matrix products grow with the square.
MIN_WINDOW, MAX_WINDOW = 32, 512
ROW_MULTIPLE = 8  # of the tokens that remain of a window: matrix products are slower for other numbers on a GPU
MAX_ROUNDING = 1 / 64  # largest share of a window's tokens by which rounding changes how many remain
_DST_FIRST = 2.0  # more than the difference of any similarity of src and the similarity of a dst, which is 0 or 1


class EqualWindows(NamedTuple):
    """T windows of P tokens each, of which Q are dst."""

    number: int  # T
    p: int  # P
    q: int  # Q


class WindowConstants(NamedTuple):
    """Equal windows as constants of a program."""

    windows: EqualWindows
    order: paddle.Tensor  # [N] int64: positions, window by window, each with its dst first
    inverse_order: paddle.Tensor  # [N] int64: the index of each position in `order`
    begin: paddle.Tensor  # [T, 1] int64: the index in `order` of each window's first token
    is_src: paddle.Tensor  # [P] int64: 1 for the src of a window, 0 for its dst
    dst_index: paddle.Tensor  # [P] int64: the index of each dst among those of its window, 0 for src
    dst_first: paddle.Tensor  # [P] float32: added to similarities, so that dst come before src


@lru_cache(maxsize=64)
def equal_windows(grid: Grid, sx: int, sy: int, window: int | None) -> EqualWindows | None:
    """The windows of a grid; None unless all have the same number of tokens and of dst, from 32 to 512 tokens."""
    of_token, dst = window_of(grid, sx, sy, window), choose_dst(grid, sx, sy)
    count = int(of_token.max()) + 1
    tokens, dst_tokens = np.bincount(of_token), np.bincount(of_token[dst], minlength=count)
    p, q = int(tokens[0]), int(dst_tokens[0])
    is_equal = (tokens == p).all() and (dst_tokens == q).all()
    return EqualWindows(count, p, q) if is_equal and q and MIN_WINDOW <= p <= MAX_WINDOW else None


def remaining(windows: EqualWindows, kept: int) -> int:
    """The tokens that remain of each window, if `kept` tokens of the grid are to remain.

    They are rounded to a multiple of `ROW_MULTIPLE`, or to a whole number of tokens where that would change more than
    the share `MAX_ROUNDING` of a window. What merges in the grid merges in each window: at least one token.
    """
    exact = kept / windows.number
    rounded = ROW_MULTIPLE * round(exact / ROW_MULTIPLE)
    if abs(rounded - exact) > MAX_ROUNDING * windows.p or not windows.q <= rounded < windows.p:
        rounded = min(round(exact), windows.p - 1)
    return windows.p if exact == windows.p else max(rounded, windows.q)


def _windows(grid: Grid, sx: int, sy: int, window: int | None) -> EqualWindows:
    windows = equal_windows(grid, sx, sy, window)
    assert windows is not None  # otherwise `Pairs.for_gpu` returns another form
    return windows


@paddle.jit.not_to_static  # constants, which Paddle would compute in the program
def window_constants(
    grid: Grid, sx: int, sy: int, random_key: Sequence[int] | None, window: int | None
) -> WindowConstants:
    """The windows of a grid of equal windows, with dst from `choose_dst`, as constants of a program."""
    windows = _windows(grid, sx, sy, window)
    is_src = np.ones(grid.tokens, dtype=np.int64)
    is_src[choose_dst(grid, sx, sy, random_key)] = 0
    order = np.lexsort((is_src, window_of(grid, sx, sy, window)))
    is_dst = np.arange(windows.p) < windows.q
    return WindowConstants(
        windows=windows,
        order=constant(order),
        inverse_order=constant(np.argsort(order)),
        begin=constant(np.arange(windows.number)[:, None] * windows.p),
        is_src=constant((~is_dst).astype(np.int64)),
        dst_index=constant(np.where(is_dst, np.arange(windows.p), 0)),
        dst_first=constant(_DST_FIRST * is_dst, "float32"),
    )


class WindowForm(Form):
    """The form of `Pairs` for grids of equal windows."""

    def rounded(self, kept: Kept, grid: Grid, settings: Settings) -> Kept:
        windows = _windows(grid, settings.sx, settings.sy, settings.window)
        queries, keys = (windows.number * remaining(windows, count) for count in (kept.queries, kept.keys))
        return Kept(grid.tokens, queries, keys)

    def pairs_compared(self, grid: Grid, settings: Settings) -> int:
        windows = _windows(grid, settings.sx, settings.sy, settings.window)
        return windows.number * windows.p * windows.q

    def constants(self, grid: Grid, settings: Settings, kept: Kept, block: int) -> WindowConstants:
        key = random_key(settings, block)
        return window_constants(grid, settings.sx, settings.sy, key, settings.window)

    def plan(
        self, metric: paddle.Tensor, constants: WindowConstants, kept: Kept, turn: Turn = FIRST_TURN
    ) -> MergePlan:
        """The plan of the best pairs of each window, the same number in every window."""
        count, p, q = constants.windows
        queries, keys = kept.queries // count, kept.keys // count
        with paddle.no_grad(), full_precision():
            metric = cast(metric.detach(), paddle.float32)
            tokens = paddle.gather(metric, constants.order, axis=1).reshape([-1, p, metric.shape[2]])  # [B·T, P, C]
            inverse = paddle.rsqrt((tokens * tokens).sum(axis=-1, keepdim=True))
            unit = tokens[:, :q] * inverse[:, :q]
            scores = finite_or_zero(paddle.matmul(tokens, unit, transpose_y=True))  # [B·T, P, Q]
            dst_of_token = paddle.argmax(scores, axis=-1) * constants.is_src + constants.dst_index
            rank = None  # [B·T, P]: the place of each token in the order in which they stay, dst before src
            if not {queries, keys} <= {q, p}:
                similarity = finite_or_zero(paddle.max(scores, axis=-1) * inverse.squeeze(-1))
                rank = paddle.argsort(
                    paddle.argsort(similarity + constants.dst_first, axis=1, descending=True), axis=1
                )

            def keep(number: int) -> MergePlan:
                if number == p:
                    return PlainPlan(count=count * p, batch=count_batch(metric))
                rows = dst_of_token
                if number > q:
                    assert rank is not None
                    rows = paddle.where(rank < p - number + q, dst_of_token, rank - (p - number))
                return WindowPlan(constants=constants, rows=rows, of_window=number)

            plan = keep(queries)
            return plan if queries == keys else replace(plan, keys_plan=keep(keys))


@dataclass(frozen=True, eq=False, kw_only=True)
class WindowPlan(MergePlan):
    """Merges the same number of tokens in every window. Matrix products move tokens.

    A merged sequence has window after window, each with its dst tokens first.
    """

    constants: WindowConstants
    rows: paddle.Tensor  # [B·T, P] int64: the merged token of each token in the order of its window
    of_window: int  # K: tokens that remain of a window's P

    @property
    def tokens(self) -> int:
        return self.frames * self.constants.windows.number * self.constants.windows.p

    @property
    def kept(self) -> int:
        return self.frames * self.constants.windows.number * self.of_window

    @cached_property
    def _members(self) -> paddle.Tensor:  # [B·T, P, K] float32: 1 where a token is in a merged token
        with paddle.no_grad():
            return F.one_hot(self.rows, self.of_window)

    @cached_property
    def _sizes(self) -> paddle.Tensor:  # [B·T, 1, K] float32
        return self._members.sum(axis=1, keepdim=True)

    @cached_property
    def kept_rows(self) -> paddle.Tensor:
        count, p, _ = self.constants.windows
        first = paddle.argmax(self._members, axis=1).reshape([-1, count, self.of_window])
        slots = first + self.constants.begin  # [B, T, K]: of the first token of each merged token
        positions = paddle.gather(self.constants.order, slots.reshape([-1])).reshape([-1, count * self.of_window])
        image = count_rows(positions[:, :1])
        return (positions + image * (count * p)).reshape([-1, self.kept])

    @cached_property
    def source_rows(self) -> paddle.Tensor:
        count, p, _ = self.constants.windows
        window = count_rows(self.rows[:, :1])
        rows = (self.rows + window * self.of_window).reshape([-1, count * p])
        return paddle.gather(rows, self.constants.inverse_order, axis=1).reshape([-1])

    @cached_property
    def log_sizes(self) -> paddle.Tensor:
        return paddle.log(self._sizes).reshape([-1, self.kept])

    def _merge(self, x: paddle.Tensor) -> paddle.Tensor:
        (count, p, _), channels = self.constants.windows, x.shape[2]
        tokens = gather(x.reshape([-1, count * p, channels]), self.constants.order, axis=1)
        means = cast(self._members / self._sizes, x.dtype)
        with full_precision():
            merged = paddle.matmul(means, tokens.reshape([-1, p, channels]), transpose_x=True)
        return merged.reshape([-1, self.kept, channels])

    def _unmerge(self, y: paddle.Tensor) -> paddle.Tensor:
        (count, p, _), channels = self.constants.windows, y.shape[2]
        with full_precision():
            tokens = paddle.matmul(cast(self._members, y.dtype), y.reshape([-1, self.of_window, channels]))
        tokens = tokens.reshape([-1, count * p, channels])
        return gather(tokens, self.constants.inverse_order, axis=1).reshape([-1, self.tokens, channels])
