"""What a method chooses in a pass (`Choice`), by whose turn it is (`Turn`), and what moves tokens (`MergePlan`)."""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import paddle

from ..errors import ToMePassError
from ..tensors import HALF, cast, constants, count_rows, first_number, gather
from .steps import is_level
from .turns import LAST_TIMESTEP, TURNS, place_of_level


class Merging(NamedTuple):
    """What becomes of the r tokens of each image that do not remain: each is added to a token that does."""

    positions: paddle.Tensor  # [B, r] int64: the tokens
    targets: paddle.Tensor  # [B, r] int64: the index of the target of each, among the tokens that remain
    sources: paddle.Tensor  # [B, N] int64: the index of the token whose result each takes, among those that remain


class Choice(NamedTuple):
    """The K tokens that remain of N.

    They are the same in all images, or different in each of the F frames of a video, or different in each image. Only
    the last comes with a `Merging`; otherwise the tokens that do not remain are left out.
    """

    positions: paddle.Tensor  # int64: [1, K] or [F, K], or [B, K] with `merging`
    merging: Merging | None = None

    def or_all(self, is_all: paddle.Tensor, tokens: int) -> "Choice":  # is_all: [1] bool
        """This choice, or all of the N tokens where only the run of a program decides it: K is unknown in it."""
        rows, kept = self.positions.shape
        padding = paddle.zeros([rows, tokens - kept], dtype="int64")
        some = paddle.concat([self.positions, padding], axis=1).reshape([1, -1])
        every, counts = _all_positions(rows, tokens, kept)
        number = cast(is_all, paddle.int64)  # 0 or 1
        positions = paddle.gather(paddle.concat([some, every]), number).reshape([rows, tokens])
        return Choice(paddle.slice(positions, axes=[1], starts=[0], ends=paddle.gather(counts, number)))


@paddle.jit.not_to_static  # not to be computed in the program
def _all_positions(rows: int, tokens: int, kept: int) -> tuple[paddle.Tensor, paddle.Tensor]:  # [1, rows·N], [2]
    """All N tokens in each of a number of rows, and how many remain by a choice and without."""
    return constants(np.tile(np.arange(tokens), rows)[None]), constants(np.array([kept, tokens]))


class Turn(NamedTuple):
    """Which of the choices of a method a pass has."""

    number: paddle.Tensor | None = None  # [1] int64 from 0 to TURNS - 1; None: always 0
    frames: int = 1  # of a video; each is a turn after the previous frame

    def rows_of(self, table: paddle.Tensor) -> paddle.Tensor:  # [TURNS, L] → [frames, L]; [1, L] stays
        """The rows of a table whose turn it is in successive frames; the table itself if it has a single row."""
        if table.shape[0] == 1:
            return table
        number = paddle.zeros([1], dtype="int64") if self.number is None else self.number
        if self.frames > 1:
            number = (number + count_rows(paddle.ones([self.frames]))) % TURNS
        return paddle.gather(table, number)


def turn_at(
    timestep: paddle.Tensor,  # [B] or a single number, of any dtype
    table: paddle.Tensor,  # of `turn_table`
    is_flow: bool = False,
) -> paddle.Tensor:  # [1] int64
    """The number of the turn at a timestep: for the whole batch that of its first row, as a place of the table.

    Args:
        is_flow: whether timesteps are those of a flow, among which there are no noise levels (`steps.is_level`).
    """
    place = first_number(timestep)
    if not is_flow:
        place = paddle.where(is_level(place), place_of_level(place), place)
    whole = paddle.clip(paddle.floor(place + 0.5), 0, LAST_TIMESTEP)
    return paddle.gather(table, cast(whole, paddle.int64))


class MergePlan:
    """Moves the tokens of a pass: `merge` keeps those that remain, `unmerge` gives each token its result back.

    Args:
        choice: of a method.
        tokens: N, of an image or a frame.
        frames: F: equal parts of a sequence [B, F·N, C] in which tokens are chosen separately.
    """

    def __init__(self, choice: Choice, tokens: int, frames: int = 1) -> None:
        self.choice = choice
        self._frame = tokens
        self._frames = frames
        positions = choice.positions
        if frames > 1 and positions.shape[0] == 1:
            positions = positions.expand([frames, -1])
        self._group = positions.shape[0]  # frames among whose tokens `_index` counts
        is_one = choice.merging is None and self._group == 1
        self._index = positions.reshape([-1]) if is_one else self._of_batch(positions, tokens)  # int64

    @property
    def tokens(self) -> int:
        """N, or F·N: tokens of a sequence before merging."""
        return self._frames * self._frame

    @property
    def kept(self) -> int:
        """K, or F·K: tokens of a sequence that remain."""
        return self._frames * self.choice.positions.shape[1]

    @property
    def merges(self) -> bool:
        """Whether tokens merge into those that remain; otherwise they are left out, and `unmerge` has no meaning."""
        return self.choice.merging is not None

    def rows(self, table: paddle.Tensor) -> paddle.Tensor:  # [F·N, C] → [F·K, C]
        """The rows of the tokens that remain, in a table with a row for each token of a sequence."""
        if table.shape[0] != self.tokens or self._group != self._frames:
            raise ToMePassError(f"a table of {table.shape[0]} rows is not for the {self.tokens} tokens of a pass.")
        return gather(table, self._index)

    def merge(self, x: paddle.Tensor) -> paddle.Tensor:
        """The tokens [B, N - r, C] that remain of tokens [B, N, C]; see the function `merge`."""
        self._check("merge", x, self.tokens)
        channels, merging = x.shape[2], self.choice.merging
        if merging is None:
            if self._group == 1:
                return gather(x, self._index, axis=1)
            groups = x.reshape([-1, self._group * self._frame, channels])
            kept = gather(groups, self._index, axis=1)
            # The number of tokens that remain may be unknown in a program, which then knows that of the rows.
            return kept if self._group == self._frames else kept.reshape([x.shape[0], -1, channels])
        rows = x.reshape([-1, channels])
        wide = paddle.float32 if x.dtype in HALF else x.dtype  # sums are rounded once
        # Intermediates have no names so that they are freed at once and their memory is reused: measured 20 % faster.
        means = paddle.scatter_nd_add(
            cast(gather(rows, self._index), wide),
            self._targets,
            cast(gather(rows, self._of_batch(merging.positions, self.tokens)), wide),
        ) * cast(self._weights, wide)
        return cast(means, x.dtype).reshape([-1, self.kept, channels])

    def unmerge(self, y: paddle.Tensor) -> paddle.Tensor:
        """The result [B, N, C] of each token, from the N - r that remain; see the function `unmerge`."""
        self._check("unmerge", y, self.kept)
        if self.kept == self.tokens:
            return y
        merging = self.choice.merging
        if merging is None:
            raise ToMePassError("unmerge needs the plan of a method that merges tokens; this one leaves them out.")
        channels = y.shape[2]
        sources = self._of_batch(merging.sources, self.kept)
        return gather(y.reshape([-1, channels]), sources).reshape([-1, self.tokens, channels])

    @cached_property
    def _targets(self) -> paddle.Tensor:  # [B·r, 1] int64
        """For each token that merges the row of its target among the tokens of the batch that remain."""
        assert self.choice.merging is not None
        return self._of_batch(self.choice.merging.targets, self.kept).reshape([-1, 1])

    @cached_property
    def _weights(self) -> paddle.Tensor:  # [B·(N - r), 1] float32
        """1 / the number of tokens averaged in each token that remains."""
        with paddle.no_grad():
            alone = paddle.ones_like(self._index.reshape([-1, 1]), dtype="float32")
            ones = paddle.ones_like(self._targets, dtype="float32")
            return paddle.reciprocal(paddle.scatter_nd_add(alone, self._targets, ones))

    @staticmethod
    def _of_batch(index: paddle.Tensor, length: int) -> paddle.Tensor:  # [B, L] → [B·L] int64
        """Indices in each row, of an image or frame, as indices in all of them, of `length` tokens each."""
        number = count_rows(index[:, :1])  # a program may not know how many rows there are
        return (index + number * length).reshape([-1])

    @staticmethod
    def _check(operation: str, x: paddle.Tensor, tokens: int) -> None:
        if x.ndim != 3 or x.shape[1] not in (tokens, -1):
            raise ToMePassError(
                f"{operation} expects tokens of shape [B, {tokens}, C] but got {list(x.shape)}: "
                "was the plan made for a different size?"
            )


def merge(
    x: paddle.Tensor,  # [B, N, C] floating point
    plan: MergePlan,
) -> paddle.Tensor:  # [B, N-r, C]
    """Merge tokens. Differentiable; `x` is not modified.

    Tokens that merge are replaced by their average, and all the rest pass unchanged.

    Args:
        x: tokens, in float32, float16 or bfloat16; half precision is summed in float32 and rounded once.
        plan: built for the same B and N; C may differ from that of the plan's metric.

    Returns:
        The merged tokens in x's dtype: dst first, then the remaining src tokens.

    Raises:
        ToMePassError: x is not a [B, N, C] with the plan's N; the message gives both.

    Source: `merge` of tomesd in mode "mean", except for the order of the rows within an image.

    Example:
        >>> x = paddle.randn([2, 24, 8])
        >>> list(merge(x, match_tokens(x, Grid(4, 6), kept=12)).shape)
        [2, 12, 8]
    """
    return plan.merge(x)


def unmerge(
    y: paddle.Tensor,  # [B, N-r, C]
    plan: MergePlan,
) -> paddle.Tensor:  # [B, N, C]
    """Give every token the row that it was merged into. Differentiable; `y` is not modified.

    Args:
        y: the output of a layer that ran on merged tokens; any C and dtype.
        plan: the plan by which they were merged.

    Returns:
        One row per original token, in the original order.

    Raises:
        ToMePassError: y is not a [B, N-r, C] with the plan's N - r; the message gives both.

    Source: `unmerge` of tomesd, which uses three scatters instead of one gather.

    Example:
        >>> plan = match_tokens(x := paddle.randn([2, 24, 8]), Grid(4, 6), kept=12)
        >>> list(unmerge(merge(x, plan), plan).shape)
        [2, 24, 8]
    """
    return plan.unmerge(y)
