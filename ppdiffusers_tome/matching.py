"""Choose: build a `MergePlan`, which tokens merge into which, from tokens on a grid."""

import inspect
from collections.abc import Sequence
from dataclasses import replace

import paddle

from .errors import ToMeConfigError
from .plans import CellPlan, MergePlan, PairPlan, Pairs, PlainPlan, WindowPlan, cast, count_rows, full_precision
from .positions import Cells, EqualWindows, Grid, Positions, constant_cells, constant_positions, count_dst

_LARGEST = 3.4028234663852886e38  # in float32
ROW_MULTIPLE = 8  # of the tokens that remain of a window: matrix products are slower for other numbers on a GPU
_STABLE = {"stable": True} if "stable" in inspect.signature(paddle.argsort).parameters else {}  # from Paddle 3 on


def match_tokens(
    metric: paddle.Tensor,  # [B, N, C] floating point
    grid: Grid,  # h·w == N
    removed: int,  # r, 0 <= r <= N - D
    sx: int = 2,
    sy: int = 2,
    random_key: Sequence[int] | None = None,
    window: int | None = None,
    removed_keys: int | None = None,  # removed <= removed_keys <= N - D
) -> MergePlan:
    """Pair each src token with its most similar dst token and keep the r best pairs.

    All images of the batch share one pattern of dst; each image has its own pairs.

    Args:
        metric: tokens whose cosine similarity is compared, in float32 whatever their dtype. A token that contains NaN
            or infinity, or whose norm is 0 or overflows, has similarity 0 to all others. No gradient flows through
            the choice.
        grid: tokens along each axis.
        removed: tokens per image to merge away, r.
        sx, sy, random_key: as in `choose_dst`.
        window: side of the windows in which each src token looks for its dst; None for the whole grid. The r best
            pairs are chosen from the whole grid in both cases.
        removed_keys: tokens per image to merge away from keys and values, if these are more: the best pairs of the
            same matching, so all that merge in queries merge there too.

    Returns:
        The plan. Of pairs that are equally similar, those with the lowest index merge first (in Paddle 2.6 any of
        them).

    Raises:
        ToMeConfigError: metric is not a floating-point [B, N, C], h·w is not N, or r is out of range.

    Source: Bolya & Hoffman 2023, arXiv:2303.17604, section 4. The result is that of tomesd 0.1.3 with use_rand=False,
    which does not define ties and NaN.

    Example:
        >>> match_tokens(paddle.randn([2, 24, 8]), Grid(4, 6), removed=12).kept
        12
    """
    n, r = grid.tokens, removed
    of_keys = r if removed_keys is None else removed_keys
    for number in (r, of_keys):
        _check(metric, grid, number, count_dst(grid, sx, sy))
    if of_keys < r:
        raise ToMeConfigError(f"removed_keys={removed_keys} is not allowed: it must be at least removed={r}.")
    if of_keys == 0:
        return PlainPlan(count=n, batch=_count_batch(metric))
    return plan_pairs(metric, constant_positions(grid, sx, sy, random_key, window), r, of_keys)


def plan_pairs(
    metric: paddle.Tensor,  # [B, N, C] floating point
    positions: Positions,
    removed: int,  # r, 0 <= r <= S
    removed_keys: int,  # removed <= removed_keys <= S, at least 1
) -> MergePlan:
    """The plan of `match_tokens`, given the constants of its grid."""
    with paddle.no_grad(), full_precision():
        batch = _count_batch(metric)
        best, similarity = _most_similar(metric, positions)  # [B, S] each
        merges_all = removed_keys == positions.s and removed in (0, positions.s)
        pairs = Pairs(positions, batch, best, None if merges_all else _descending(similarity))
    keys = PairPlan(pairs=pairs, merged=removed_keys)
    if removed == removed_keys:
        return keys
    if removed == 0:
        return PlainPlan(count=positions.d + positions.s, batch=batch, keys_plan=keys)
    return PairPlan(pairs=pairs, merged=removed, keys_plan=keys)


def _descending(similarity: paddle.Tensor) -> paddle.Tensor:  # [B, S] → [B, S] int64
    """The order of pairs, the most similar first. Of equal ones it is the lowest index, except in Paddle 2.6."""
    return paddle.argsort(similarity, axis=1, descending=True, **_STABLE)


def plan_windows(
    metric: paddle.Tensor,  # [B, N, C] floating point
    windows: EqualWindows,
    removed: int,  # r, 0 <= r <= S
    removed_keys: int,  # removed <= removed_keys <= S
) -> MergePlan:
    """The plan of the best pairs of each window, as many in each, by operations that suit a GPU.

    The number of tokens that remain of a window is rounded to a multiple of `ROW_MULTIPLE`.
    """
    p, q = windows.p, windows.q
    of_window, of_window_keys = (remaining(windows, number) for number in (removed, removed_keys))
    with paddle.no_grad(), full_precision():
        metric = cast(metric.detach(), paddle.float32)
        tokens = paddle.gather(metric, windows.order, axis=1).reshape([-1, p, metric.shape[2]])  # [B·T, P, C]
        inverse = paddle.rsqrt((tokens * tokens).sum(axis=-1, keepdim=True))
        unit = tokens[:, :q] * inverse[:, :q]
        scores = _or_zero(paddle.matmul(tokens, unit, transpose_y=True))  # [B·T, P, Q]
        best = paddle.argmax(scores, axis=-1) * windows.is_src + windows.own
        rank = None
        if not {of_window, of_window_keys} <= {q, p}:
            similarity = _or_zero(paddle.max(scores, axis=-1) * inverse.squeeze(-1))
            dst_first = similarity * windows.of_src + windows.of_dst  # a similarity is at most 1
            rank = paddle.argsort(paddle.argsort(dst_first, axis=1, descending=True), axis=1)

        def keep(count: int) -> MergePlan:
            if count == p:
                return PlainPlan(count=windows.count_w * p, batch=_count_batch(metric))
            rows = best
            if count > q:
                assert rank is not None
                rows = paddle.where(rank < p - count + q, best, rank - (p - count))
            return WindowPlan(windows=windows, rows=rows, of_window=count)

        plan = keep(of_window)
        return plan if of_window == of_window_keys else replace(plan, keys_plan=keep(of_window_keys))


def remaining(windows: EqualWindows, removed: int) -> int:
    """The tokens that remain of a window of a grid of which r merge away."""
    if removed == windows.count_w * (windows.p - windows.q):
        return windows.q
    exact = windows.p - removed / windows.count_w
    rounded = ROW_MULTIPLE * round(exact / ROW_MULTIPLE)
    return min(max(rounded, windows.q), windows.p)


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
    if d in (0, n):
        return match_tokens(metric, grid, 0, sx, sy)
    _check(metric, grid, n - d, d)
    return plan_cells(metric, constant_cells(grid, sx, sy, random_key))


def plan_cells(
    metric: paddle.Tensor,  # [B, N, C]
    cells: Cells,
) -> MergePlan:
    """The plan of `match_cells`, given the constants of its grid."""
    with paddle.no_grad():
        return CellPlan(cells=cells, batch=_count_batch(metric))


def _count_batch(metric: paddle.Tensor) -> paddle.Tensor:  # [B, 1] int64
    """0, 1, … B - 1."""
    return count_rows(metric[:, :1, 0])


def _most_similar(
    metric: paddle.Tensor,  # [B, N, C]
    positions: Positions,
) -> tuple[paddle.Tensor, paddle.Tensor]:  # [B, S] int64, [B, S] float32
    """For each src token its most similar dst token, as an index into `dst`, and their cosine similarity."""
    metric = cast(metric.detach(), paddle.float32)
    inverse = paddle.rsqrt((metric * metric).sum(axis=-1))  # [B, N]: 1 / norm; infinite where that is 0
    windows = positions.windows
    dst, src = (positions.dst, positions.src) if windows is None else (windows.dst, windows.src)
    unit = paddle.gather(metric, dst, axis=1) * paddle.gather(inverse, dst, axis=1).unsqueeze(-1)
    tokens, src_inverse = paddle.gather(metric, src, axis=1), paddle.gather(inverse, src, axis=1)
    if windows is None:
        unit = _or_zero(unit)
    else:  # the batch becomes B·T windows
        tokens, unit = (x.reshape([-1, x.shape[1] // windows.count_w, x.shape[2]]) for x in (tokens, unit))
        src_inverse = src_inverse.reshape([-1, tokens.shape[1]])
    scores = paddle.matmul(tokens, unit, transpose_y=True)  # [B, S, D]: cosine · norm of src
    if windows is not None:  # which has fewer scores than numbers in tokens
        scores = _or_zero(scores)
    # Measured in eager and oneDNN, not faster: argmax in two stages, src in chunks, max pooling with indices.
    best, similarity = paddle.argmax(scores, axis=-1), paddle.max(scores, axis=-1) * src_inverse
    is_valid = paddle.abs(similarity) <= _LARGEST
    similarity = paddle.where(is_valid, similarity, paddle.zeros_like(similarity))
    if windows is None:
        return best * is_valid.cast("int64"), similarity
    begin = (positions.count_d[: windows.count_w] * unit.shape[1]).unsqueeze(-1)  # [T, 1]: first dst of each window
    best = (best.reshape([-1, windows.count_w, tokens.shape[1]]) + begin).reshape([-1])
    return tuple(
        paddle.gather(x.reshape([-1, windows.src.shape[0]]), windows.src_slot, axis=1)
        for x in (paddle.gather(windows.dst_index, best), similarity)
    )


def _or_zero(x: paddle.Tensor) -> paddle.Tensor:
    """`x` in float32, with 0 in place of NaN and infinity; ONNX converters do not know `isfinite`."""
    return paddle.where(paddle.abs(x) <= _LARGEST, x, paddle.zeros_like(x))


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
    largest = grid.tokens - dst if dst else 0
    if not 0 <= removed <= largest:
        raise ToMeConfigError(
            f"removed={removed} is not allowed on a grid of {grid.h}×{grid.w} tokens with {dst} dst tokens: "
            f"it must be from 0 to {largest}."
        )
