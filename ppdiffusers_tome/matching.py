"""Choose: from tokens on a grid to a `MergePlan` that says which tokens merge into which."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import paddle

from .config import ToMeConfig
from .errors import ToMeConfigError

# Similarities that agree to within 2**-24, the resolution of float32 just below 1, are ties.
_TIE = 2**24


class Grid(NamedTuple):
    """Height and width of a picture, counted in tokens; token n lies in row n // w, column n % w."""

    h: int
    w: int

    @property
    def tokens(self) -> int:
        """N = h·w."""
        return self.h * self.w


@dataclass(frozen=True, eq=False)
class MergePlan:
    """Which rows of a flattened [B·N, C] batch of tokens merge, and where each token finds its result again.

    Of an image's N tokens D are dst and S = N - D are src, of which r merge away. A merged sequence has the dst
    tokens first, in the order of their positions, then the src tokens that stay, the one most like its dst first.
    Indices count rows of the flattened batch, so that one gather serves every image. With r = 0 the index tensors are
    empty.
    """

    tokens: int  # N: tokens per image before merging
    removed: int  # r: tokens per image that merge away
    dst: int  # D: dst tokens per image
    dst_rows: paddle.Tensor  # [B·D] int64: the input rows of the dst tokens
    stay_rows: paddle.Tensor  # [B·(S-r)] int64: the input rows of the src tokens that stay
    merged_rows: paddle.Tensor  # [B·r] int64: the input rows that merge away ...
    target_rows: paddle.Tensor  # [B·r, 1] int64: ... and which row of dst_rows each is added to
    weights: paddle.Tensor  # [B·D, 1] float32: 1 / how many tokens each dst token becomes the mean of
    source_rows: paddle.Tensor  # [B·N] int64: the merged row that each input token takes its result from

    @property
    def kept(self) -> int:
        """N - r: tokens per image after merging."""
        return self.tokens - self.removed


def count_dst(grid: Grid, sx: int, sy: int) -> int:
    """How many dst tokens a grid has: one per whole sx×sy cell, none in a remainder at the right or bottom edge."""
    return (grid.h // sy) * (grid.w // sx)


def count_removed(grid: Grid, config: ToMeConfig) -> int:
    """r: how many of a grid's tokens merge away under a config."""
    return config.removed(grid.tokens, count_dst(grid, config.sx, config.sy))


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
        random_key: whole numbers >= 0 that decide a random choice: the same key and grid give the same choice on every
            machine. None chooses the first (top left) token of each cell.

    Returns:
        The positions of the dst tokens, D = (h // sy)·(w // sx). No global random state is read or advanced.

    Source: tomesd draws the same distribution, from a generator that depends on what ran before.

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


def match_tokens(
    metric: paddle.Tensor,  # [B, N, C] floating point
    grid: Grid,  # h·w == N
    removed: int,  # r, 0 <= r <= N - D
    sx: int = 2,
    sy: int = 2,
    random_key: Sequence[int] | None = None,
) -> MergePlan:
    """Pair each src token with its most similar dst token and keep the r best pairs.

    The choice of dst is one pattern for the whole batch; the pairs are each image's own.

    Args:
        metric: what similarity is computed from: the cosine of the angle between two tokens, in float32 whatever the
            dtype is. A token that holds NaN or infinity, or whose norm is 0 or overflows, has similarity 0 to every
            other. Nothing is differentiated through the choice.
        grid: tokens along each axis.
        removed: tokens per image to merge away, r.
        sx, sy, random_key: as in `choose_dst`.

    Returns:
        The plan. Ties, to within 2**-24 among pairs, go to the lowest index.

    Raises:
        ToMeConfigError: metric is no [B, N, C] of floating point numbers, h·w is not N, or r is out of range.

    Source: Bolya & Hoffman 2023, arXiv:2303.17604, section 4. The result is that of tomesd 0.1.3 with use_rand=False,
    which leaves ties and NaN to chance.

    Example:
        >>> match_tokens(paddle.randn([2, 24, 8]), Grid(4, 6), removed=12).kept
        12
    """
    n, d, r = grid.tokens, count_dst(grid, sx, sy), removed
    s = n - d
    _check(metric, grid, r, d)
    if r == 0:
        none = paddle.zeros([0], dtype="int64")
        return MergePlan(n, r, d, none, none, none, none, none.cast("float32"), none)
    dst = choose_dst(grid, sx, sy, random_key)
    src = np.setdiff1d(np.arange(n), dst, assume_unique=True)
    slot = np.argsort(np.concatenate([dst, src]))  # where each position stands in dst | src
    # Constants, also where arange would do: Paddle 2.6's arange switches a device that all threads share.
    constants = (dst, src, slot, np.arange(d), np.arange(s))
    dst_tokens, src_tokens, slot, count_d, count_s = (paddle.to_tensor(each, dtype="int64") for each in constants)

    with paddle.no_grad(), _full_precision():
        best, similarity = _most_similar(metric, dst_tokens, src_tokens)  # [B, S] each
        # No two keys are equal, so the order does not depend on whether a platform's sort is stable.
        key = paddle.round(similarity.cast("float64") * _TIE).cast("int64") * s - count_s
        order = paddle.argsort(key, axis=1, descending=True)  # [B, S]: src, best pair first
        rank = paddle.argsort(order, axis=1)  # [B, S]: the place of each src in that order

        batch = paddle.cumsum(paddle.ones_like(best[:, :1]), axis=0) - 1  # [B, 1]: 0, 1, ... B - 1
        by_rank = paddle.gather(src_tokens, order.reshape([-1])).reshape([-1, s]) + batch * n
        target_rows = (paddle.take_along_axis(best, order[:, :r], axis=1) + batch * d).reshape([-1, 1])
        alone = paddle.ones_like((count_d + batch).reshape([-1, 1]), dtype="float32")
        members = paddle.scatter_nd_add(alone, target_rows, paddle.ones_like(target_rows, dtype="float32"))
        from_src = paddle.where(rank < r, best, rank + (d - r))
        source = paddle.concat([count_d + paddle.zeros_like(batch), from_src], axis=1) + batch * (n - r)
        return MergePlan(
            tokens=n,
            removed=r,
            dst=d,
            dst_rows=(dst_tokens + batch * n).reshape([-1]),
            stay_rows=by_rank[:, r:].reshape([-1]),
            merged_rows=by_rank[:, :r].reshape([-1]),
            target_rows=target_rows,
            weights=1.0 / members,
            source_rows=paddle.gather(source, slot, axis=1).reshape([-1]),
        )


def _most_similar(
    metric: paddle.Tensor,  # [B, N, C]
    dst: paddle.Tensor,  # [D] int64
    src: paddle.Tensor,  # [S] int64
) -> tuple[paddle.Tensor, paddle.Tensor]:  # [B, S] int64, [B, S] float32
    """For each src token the dst token it resembles most, as an index into `dst`, and the cosine between the two."""
    metric = cast(metric.detach(), paddle.float32)
    square = (metric * metric).sum(axis=-1)
    usable = paddle.logical_and(paddle.isfinite(square), square > 0)
    inverse = paddle.where(usable, paddle.rsqrt(square), paddle.zeros_like(square))  # [B, N]: 1 / norm, or 0

    to = paddle.gather(metric, dst, axis=1)
    to = paddle.where(paddle.isfinite(to), to, paddle.zeros_like(to)) * paddle.gather(inverse, dst, axis=1).unsqueeze(
        -1
    )
    scores = paddle.matmul(paddle.gather(metric, src, axis=1), to, transpose_y=True)  # [B, S, D]: cosine · norm of src
    best = paddle.argmax(scores, axis=-1)
    similarity = paddle.take_along_axis(scores, best.unsqueeze(-1), axis=-1).squeeze(-1)
    from_inverse = paddle.gather(inverse, src, axis=1)
    resembles = from_inverse > 0  # NaN in a src token is in its own row of scores alone
    return (
        paddle.where(resembles, best, paddle.zeros_like(best)),
        paddle.where(resembles, similarity * from_inverse, paddle.zeros_like(similarity)),
    )


def cast(x: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """`x.cast(dtype)`, but Paddle's copies even where there is nothing to cast."""
    return x if x.dtype == dtype else x.cast(dtype)


def _full_precision() -> AbstractContextManager:
    """Mixed precision off, so that the matmul keeps float32; inside a static program Paddle has no such switch."""
    return paddle.amp.auto_cast(enable=False) if paddle.in_dynamic_mode() else nullcontext()


def _check(metric: paddle.Tensor, grid: Grid, removed: int, dst: int) -> None:
    if metric.ndim != 3 or not paddle.is_floating_point(metric):
        raise ToMeConfigError(
            f"metric is {metric.dtype} of shape {list(metric.shape)}: it must be floating point of shape [B, N, C]."
        )
    if metric.shape[1] not in (grid.tokens, -1):
        raise ToMeConfigError(
            f"grid={grid.h}×{grid.w} has {grid.tokens} tokens but metric has shape {list(metric.shape)}: "
            f"h·w must be {metric.shape[1]}."
        )
    most = grid.tokens - dst if dst else 0
    if not 0 <= removed <= most:
        raise ToMeConfigError(
            f"removed={removed} is not allowed on a grid of {grid.h}×{grid.w} tokens with {dst} dst tokens: "
            f"it must be from 0 to {most}."
        )
