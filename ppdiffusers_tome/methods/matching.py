"""The pairs of src and dst of `tomesd`: each src looks for its most similar dst, and the best pairs merge."""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import paddle

from ..errors import ToMeConfigError
from ..grid import Grid, choose_dst, count_dst
from ..tensors import LARGEST, cast, constants, count_rows, finite_or_zero, full_precision
from .plan import Choice, MergePlan, Merging, Turn

_STABLE = {"stable": True} if "stable" in inspect.signature(paddle.argsort).parameters else {}  # from Paddle 3 on


def match_tokens(
    metric: paddle.Tensor,  # [B, N, C] floating point
    grid: Grid,  # h·w == N
    kept: int,  # D <= kept <= N
    sx: int = 2,
    sy: int = 2,
    random_key: Sequence[int] | None = None,
) -> MergePlan:
    """Pair each src token with its most similar dst token, and merge the best pairs until `kept` tokens remain.

    All images of the batch share one pattern of dst; each image has its own pairs.

    Args:
        metric: tokens whose cosine similarity is compared, in float32 whatever their dtype. A token that contains NaN
            or infinity, or whose norm is 0 or overflows, has similarity 0 to every token. No gradient flows through
            the choice.
        grid: tokens along each axis.
        kept: tokens per image that remain. A grid has D = (h // sy)·(w // sx) dst, which always remain.
        sx, sy, random_key: as in `choose_dst`.

    Returns:
        The plan. Of pairs that are equally similar, those with the lowest index merge first (in Paddle 2.6 any of
        them).

    Raises:
        ToMeConfigError: metric is not a floating-point [B, N, C], h·w is not N, or kept is out of range.

    Source: Bolya & Hoffman 2023, arXiv:2303.17604, section 4. The result is that of tomesd 0.1.3 with use_rand=False,
    which does not define ties and NaN.

    Example:
        >>> match_tokens(paddle.randn([2, 24, 8]), Grid(4, 6), kept=12).kept
        12
    """
    if metric.ndim != 3 or not paddle.is_floating_point(metric):
        raise ToMeConfigError(
            f"metric is {metric.dtype} of shape {list(metric.shape)}: it must be floating point of shape [B, N, C]."
        )
    if metric.shape[1] not in (grid.tokens, -1):
        raise ToMeConfigError(
            f"grid={grid.h}×{grid.w} has {grid.tokens} tokens but metric has shape {list(metric.shape)}: "
            f"h·w must be {metric.shape[1]}."
        )
    fewest = count_dst(grid, sx, sy) or grid.tokens
    if not fewest <= kept <= grid.tokens:
        raise ToMeConfigError(
            f"kept={kept} is not allowed on a grid of {grid.h}×{grid.w} tokens with cells of {sx}×{sy}: "
            f"it must be from {fewest} to {grid.tokens}."
        )
    if kept == grid.tokens:
        return MergePlan(Choice(constants(np.arange(kept)[None])), kept)
    pairs = constants(pair_constants(grid, sx, sy, random_key))
    return MergePlan(choose_pairs(metric, pairs, kept), grid.tokens)


class PairConstants(NamedTuple):
    """Which positions of a grid are dst and which src, and the index of each in the sequence dst | src.

    Where dst take turns, each array has a further axis in front, of length `TURNS`. `pair_constants` makes them as
    NumPy arrays.
    """

    dst: paddle.Tensor  # [D] int64, ascending
    src: paddle.Tensor  # [S] int64, ascending
    inverse_order: paddle.Tensor  # [N] int64: the index of each position in dst | src

    def in_turn(self, turn: Turn) -> "PairConstants":
        """The constants whose turn it is, the same in all frames of a video."""
        if self.dst.ndim == 1:
            return self
        return PairConstants(*(turn._replace(frames=1).rows_of(table).reshape([-1]) for table in self))


def pair_constants(
    grid: Grid, sx: int, sy: int, random_key: Sequence[int] | None, turns: int | None = None
) -> PairConstants:
    """The positions on a grid, with dst from `choose_dst`, in NumPy.

    Args:
        grid, sx, sy, random_key: as in `choose_dst`.
        turns: how many choices to make, whose number continues the key; None: a single one.
    """
    keys = [random_key] if turns is None or random_key is None else [(*random_key, turn) for turn in range(turns)]
    dst = np.stack([choose_dst(grid, sx, sy, key) for key in keys])
    src = np.stack([np.setdiff1d(np.arange(grid.tokens), positions, assume_unique=True) for positions in dst])
    tables = (dst, src, np.argsort(np.concatenate([dst, src], axis=1), axis=1))
    return PairConstants(*(table[0] if turns is None else table for table in tables))


def choose_pairs(
    metric: paddle.Tensor,  # [B, N, C] floating point
    pairs: PairConstants,
    kept: int,  # K: from D to N - 1
) -> Choice:
    """The choice of `match_tokens`, given the constants of its grid.

    The tokens that remain are the dst, by position, and then the src that remain, those that would merge next first.
    """
    with paddle.no_grad(), full_precision():
        d, s = pairs.dst.shape[0], pairs.src.shape[0]
        dst_of_src, similarity = _most_similar(metric, pairs)  # [B, S] each
        image = count_rows(similarity[:, :1])  # [B, 1]
        dst = pairs.dst + paddle.zeros_like(image)
        if kept == d:
            rows = pairs.src + paddle.zeros_like(image)
            return Choice(dst, _merging(pairs, rows, dst_of_src, dst_of_src))
        order = _descending(similarity)  # of src: those that merge first
        src = paddle.gather(pairs.src, order.reshape([-1])).reshape([-1, s])
        rank = paddle.argsort(order, axis=1)  # of each src in that order
        count = d + s - kept
        of_src = paddle.where(rank < count, dst_of_src, rank + (d - count))
        targets = paddle.take_along_axis(dst_of_src, order, axis=1)
        positions = paddle.concat([dst, src[:, count:]], axis=1)
        return Choice(positions, _merging(pairs, src[:, :count], targets[:, :count], of_src))


def _merging(
    pairs: PairConstants,
    positions: paddle.Tensor,  # [B, r]
    targets: paddle.Tensor,  # [B, r]
    of_src: paddle.Tensor,  # [B, S]: the token among those that remain whose result each src takes
) -> Merging:
    of_dst = count_rows(pairs.dst) + paddle.zeros_like(of_src[:, :1])
    sources = paddle.gather(paddle.concat([of_dst, of_src], axis=1), pairs.inverse_order, axis=1)
    return Merging(positions, targets, sources)


def _descending(similarity: paddle.Tensor) -> paddle.Tensor:  # [B, S] → [B, S] int64
    """The order of pairs, the most similar first; of equal pairs the lowest index, except in Paddle 2.6."""
    return paddle.argsort(similarity, axis=1, descending=True, **_STABLE)


def _most_similar(
    metric: paddle.Tensor,  # [B, N, C]
    pairs: PairConstants,
) -> tuple[paddle.Tensor, paddle.Tensor]:  # [B, S] int64, [B, S] float32
    """For each src token its most similar dst token, as an index into `dst`, and their cosine similarity."""
    metric = cast(metric.detach(), paddle.float32)
    inverse = paddle.rsqrt((metric * metric).sum(axis=-1))  # [B, N]: 1 / norm; infinite where that is 0
    dst, src = pairs.dst, pairs.src
    unit = finite_or_zero(paddle.gather(metric, dst, axis=1) * paddle.gather(inverse, dst, axis=1).unsqueeze(-1))
    scores = paddle.matmul(paddle.gather(metric, src, axis=1), unit, transpose_y=True)  # [B, S, D]: cosine · norm
    # Measured in eager and oneDNN, not faster: argmax in two stages, src in chunks, max pooling with indices.
    similarity = paddle.max(scores, axis=-1) * paddle.gather(inverse, src, axis=1)
    is_valid = paddle.abs(similarity) <= LARGEST
    similarity = paddle.where(is_valid, similarity, paddle.zeros_like(similarity))
    return paddle.argmax(scores, axis=-1) * is_valid.cast("int64"), similarity
