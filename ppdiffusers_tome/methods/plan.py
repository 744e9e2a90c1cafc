"""`MergePlan`: which tokens of a pass merge; `merge` and `unmerge` move tokens by it."""

from dataclasses import dataclass, replace
from functools import cached_property

import paddle

from ..errors import ToMeConfigError, ToMePassError
from ..grid import Grid
from ..tensors import count_rows, gather


@dataclass(frozen=True, eq=False, kw_only=True)
class MergePlan:
    """Which tokens [B, N, C] of a pass merge, and where each token takes its result from.

    Of an image's N tokens, r merge away: N - r merged tokens remain. Where the frames of a video are one sequence, N
    and r are those of all frames, and a merged sequence has frame after frame. Rows count the tokens of the whole
    batch: token n of image b is row b·N + n, merged token m is row b·(N - r) + m.

    A method has its own class of plan. It defines `tokens`, `kept`, `kept_rows`, `source_rows` and `log_sizes`. Here
    merging takes the rows `kept_rows` as they are, and unmerging copies the rows `source_rows`; a class whose tokens
    become means, or that has a faster way, overrides `_merge` and `_unmerge`. Tensors are computed when they are
    first read, because many passes do not need all of them.
    """

    frames: int = 1  # F: equal parts of a sequence in which tokens merge separately
    keys_plan: "MergePlan | None" = None  # the plan of keys and values if they merge more; of the same tokens

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
        """Whether all merged tokens stand for the same number of tokens: then sizes change no attention weight."""
        return False

    @property
    def log_sizes(self) -> paddle.Tensor:  # [B, N-r] float32
        """Logarithm of the size of each merged token: the number of tokens that it stands for."""
        raise NotImplementedError

    def merge(self, x: paddle.Tensor) -> paddle.Tensor:
        """The merged tokens [B, N-r, C] of tokens [B, N, C]; see the function `merge`."""
        self._check("merge", x, self.tokens)
        return self._merge(x)

    def unmerge(self, y: paddle.Tensor) -> paddle.Tensor:
        """The row of merged tokens [B, N-r, C] that each token takes: [B, N, C]; see the function `unmerge`."""
        self._check("unmerge", y, self.kept)
        return self._unmerge(y)

    def _merge(self, x: paddle.Tensor) -> paddle.Tensor:
        channels = x.shape[2]
        return gather(x.reshape([-1, channels]), self.kept_rows.reshape([-1])).reshape([-1, self.kept, channels])

    def _unmerge(self, y: paddle.Tensor) -> paddle.Tensor:
        channels = y.shape[2]
        return gather(y.reshape([-1, channels]), self.source_rows).reshape([-1, self.tokens, channels])

    @staticmethod
    def _check(operation: str, x: paddle.Tensor, tokens: int) -> None:
        if x.ndim != 3 or x.shape[1] not in (tokens, -1):
            raise ToMePassError(
                f"{operation} expects tokens of shape [B, {tokens}, C] but got {list(x.shape)}: "
                "was the plan made for another size?"
            )


def merge(
    x: paddle.Tensor,  # [B, N, C] floating point
    plan: MergePlan,
) -> paddle.Tensor:  # [B, N-r, C]
    """Merge tokens. Differentiable; `x` is not modified.

    A plan of `match_tokens` replaces tokens that merge by their average, and the others pass unchanged; one of
    `match_cells` keeps the dst of each cell.

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
        >>> list(merge(x, match_tokens(x, Grid(4, 6), removed=12)).shape)
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
        >>> plan = match_tokens(x := paddle.randn([2, 24, 8]), Grid(4, 6), removed=12)
        >>> list(unmerge(merge(x, plan), plan).shape)
        [2, 24, 8]
    """
    return plan.unmerge(y)


def join_frames(plan: MergePlan, frames: int) -> MergePlan:
    """The plan of sequences [B, F·N, C] from that of their F frames [B·F, N, C]; the rows are the same."""
    if frames == 1:
        return plan
    keys_plan = None if plan.keys_plan is None else join_frames(plan.keys_plan, frames)
    return replace(plan, frames=frames, keys_plan=keys_plan)


def count_batch(metric: paddle.Tensor) -> paddle.Tensor:  # [B, N, C] → [B, 1] int64
    """0, 1, … B - 1: the numbers of the images of a batch."""
    return count_rows(metric[:, :1, 0])


def check_metric(metric: paddle.Tensor, grid: Grid, removed: int, dst: int) -> None:
    """Raise ToMeConfigError unless a metric is [B, N, C] for the grid and `removed` of N tokens can merge away."""
    if metric.ndim != 3 or not paddle.is_floating_point(metric):
        raise ToMeConfigError(
            f"metric is {metric.dtype} of shape {list(metric.shape)}: it must be floating point of shape [B, N, C]."
        )
    if metric.shape[1] not in (grid.tokens, -1):
        raise ToMeConfigError(
            f"grid={grid.h}×{grid.w} has {grid.tokens} tokens but metric has shape {list(metric.shape)}: "
            f"h·w must be {metric.shape[1]}."
        )
    largest = grid.tokens - dst if dst else 0
    if not 0 <= removed <= largest:
        raise ToMeConfigError(
            f"removed={removed} is not allowed on a grid of {grid.h}×{grid.w} tokens with {dst} dst tokens: "
            f"it must be from 0 to {largest}."
        )


class UnweightedPlan(MergePlan):
    """A plan in which each token that remains counts as one."""

    @property
    def has_equal_sizes(self) -> bool:
        return True

    @cached_property
    def log_sizes(self) -> paddle.Tensor:
        return paddle.zeros_like(self.kept_rows, dtype="float32")


@dataclass(frozen=True, eq=False, kw_only=True)
class PlainPlan(UnweightedPlan):
    """No token merges: the plan of queries where only keys and values merge."""

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

    def _merge(self, x: paddle.Tensor) -> paddle.Tensor:
        return x

    def _unmerge(self, y: paddle.Tensor) -> paddle.Tensor:
        return y
