"""Choose: build a `MergePlan`, which tokens merge into which, from tokens on a grid."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import paddle

from .errors import ToMeConfigError
from .positions import Cells, Grid, Positions, constant_cells, constant_positions, count_dst

_LARGEST = 3.4028234663852886e38  # in float32


@dataclass(frozen=True, eq=False)
class MergePlan:
    """Which rows of a flattened [B·N, C] batch of tokens merge, and which row each token takes its result from.

    Of an image's N tokens, D are dst and S = N - D are src, of which r merge away. A merged sequence has the dst
    tokens first, then the remaining src tokens, both in the order of their positions. Where the frames of a video are
    one sequence, N, D and r are those of all frames, and a merged sequence has frame after frame.
    Indices count rows of the flattened batch, so one gather serves all images. With r = 0 every token is a dst that
    nothing merges into; this also holds for queries whose keys merge further.
    """

    tokens: int  # N: tokens per image before merging
    removed: int  # r: tokens per image that merge away
    dst: int  # D: dst tokens per image
    dst_rows: paddle.Tensor  # [B·D] int64: the input rows of the dst tokens
    stay_rows: paddle.Tensor | None  # [B·(N-r-D)] int64: the input rows of the remaining src tokens; None if none
    merged_rows: paddle.Tensor  # [B·r] int64: the input rows that merge away ...
    target_rows: paddle.Tensor  # [B·r, 1] int64: ... and which row of dst_rows each is added to
    weights: paddle.Tensor  # [B·D, 1] float32: 1 / the number of tokens averaged in each dst token
    source_rows: paddle.Tensor  # [B·N] int64: the merged row that each input token takes its result from
    frames: int = 1  # F: equal parts of a sequence in which tokens merge separately
    keys_plan: "MergePlan | None" = None  # the plan of keys and values if they merge further; the same tokens and dst

    @property
    def keys(self) -> "MergePlan":
        """The plan of keys and values."""
        return self.keys_plan or self

    @property
    def kept(self) -> int:
        """N - r: tokens per image after merging."""
        return self.tokens - self.removed

    def in_order(
        self,
        of_dst: paddle.Tensor,  # [B·D, …]
        of_stay: paddle.Tensor | None,  # [B·(N-r-D), …]; None if none
    ) -> paddle.Tensor:  # [B, N-r, …]
        """Concatenate rows of dst tokens and of the remaining src tokens in the order of a merged sequence."""
        shape = of_dst.shape[1:]
        rows = of_dst.reshape([-1, self.dst // self.frames, *shape])
        if of_stay is not None:
            stay = of_stay.reshape([-1, (self.kept - self.dst) // self.frames, *shape])
            rows = paddle.concat([rows, stay], axis=1)
        return rows if self.frames == 1 else rows.reshape([-1, self.kept, *shape])

    def log_sizes(self) -> paddle.Tensor:  # [B, N-r] float32
        """Logarithm of the size of each merged token: the number of tokens that it averages."""
        # like: a program may not know the batch size
        alone = None if self.stay_rows is None else paddle.zeros_like(self.stay_rows, dtype="float32")
        return self.in_order(-paddle.log(self.weights).reshape([-1]), alone)


def join_frames(plan: MergePlan, frames: int) -> MergePlan:
    """The plan of sequences [B, F·N, C] from that of their F frames [B·F, N, C]; the rows are the same."""
    if frames == 1:
        return plan
    counts = {name: frames * getattr(plan, name) for name in ("tokens", "removed", "dst")}
    keys_plan = None if plan.keys_plan is None else join_frames(plan.keys_plan, frames)
    return replace(plan, frames=frames, keys_plan=keys_plan, **counts)


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
        The plan. Of pairs that are equally similar, those with the lowest index merge first.

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
        return _identity_plan(metric, n)
    return plan_pairs(metric, constant_positions(grid, sx, sy, random_key, window), r, of_keys)


def plan_pairs(
    metric: paddle.Tensor,  # [B, N, C] floating point
    positions: Positions,
    removed: int,  # r, 0 <= r <= S
    removed_keys: int,  # removed <= removed_keys <= S, at least 1
) -> MergePlan:
    """The plan of `match_tokens`, given the constants of its grid."""
    with paddle.no_grad(), _full_precision():
        batch = _count_batch(metric)
        best, similarity = _most_similar(metric, positions)  # [B, S] each
        chooses = 0 < removed < positions.s or removed_keys < positions.s  # otherwise all pairs merge, or none
        sorted_ = paddle.sort(similarity, axis=1, descending=True) if chooses else None

        def merge_best(pairs: int) -> MergePlan:
            if pairs == positions.s:
                return _merge_all(positions, batch, best)
            return _merge_pairs(positions, batch, best, _best_pairs(similarity, sorted_, pairs), pairs)

        plan = merge_best(removed) if removed else _identity_plan(metric, positions.d + positions.s)
        return plan if removed_keys == removed else replace(plan, keys_plan=merge_best(removed_keys))


def _identity_plan(metric: paddle.Tensor, tokens: int) -> MergePlan:
    """The plan of a batch in which every token stays in its place."""
    ones = paddle.ones_like(metric[..., 0], dtype="int64").reshape([-1])
    rows = paddle.cumsum(ones, axis=0) - 1  # 0, 1, … B·N - 1
    none = paddle.zeros([0], dtype="int64")
    return MergePlan(
        tokens=tokens,
        removed=0,
        dst=tokens,
        dst_rows=rows,
        stay_rows=None,
        merged_rows=none,
        target_rows=none.reshape([0, 1]),
        weights=ones.cast("float32").reshape([-1, 1]),
        source_rows=rows,
    )


def _merge_all(
    positions: Positions,
    batch: paddle.Tensor,  # [B, 1] int64: 0, 1, … B - 1
    best: paddle.Tensor,  # [B, S] int64: each src's dst
) -> MergePlan:
    """The plan that merges every src into its dst."""
    return _plan(positions, batch, positions.src.unsqueeze(0), best, best)


def _merge_pairs(
    positions: Positions,
    batch: paddle.Tensor,  # [B, 1] int64: 0, 1, … B - 1
    best: paddle.Tensor,  # [B, S] int64: each src's dst
    merges: paddle.Tensor,  # [B, S] bool, of which r are true
    removed: int,  # 1 <= r < S
) -> MergePlan:
    """The plan that merges these src into their dst."""
    stays = paddle.logical_not(merges).cast("int64")
    # No two keys are equal, so that the order does not depend on whether a platform's sort is stable; and they fit
    # into 32 bits, in which OpenVINO computes integers.
    order = paddle.argsort(positions.count_s + stays * positions.s, axis=1)  # [B, S]: merged src, then the others
    ordered = paddle.gather(positions.src, order.reshape([-1])).reshape([-1, positions.s])
    from_src = paddle.where(merges, best, paddle.cumsum(stays, axis=1) + (positions.d - 1))
    targets = paddle.take_along_axis(best, order[:, :removed], axis=1)
    return _plan(positions, batch, ordered[:, :removed], targets, from_src, stay=ordered[:, removed:])


def _plan(
    positions: Positions,
    batch: paddle.Tensor,  # [B, 1] int64: 0, 1, … B - 1
    merged: paddle.Tensor,  # [B or 1, r] int64: the tokens that merge away ...
    targets: paddle.Tensor,  # [B, r] int64: ... and the dst that each is added to
    from_src: paddle.Tensor,  # [B, S] int64: the merged token that each src takes its result from
    stay: paddle.Tensor | None = None,  # [B, S-r] int64: the other src; None if all merge
) -> MergePlan:
    """The plan of these tokens, in rows of the whole batch."""
    n, r = positions.d + positions.s, merged.shape[1]
    dst_rows = positions.dst + batch * n
    target_rows = (targets + batch * positions.d).reshape([-1, 1])
    alone = paddle.ones_like(dst_rows.reshape([-1, 1]), dtype="float32")
    members = paddle.scatter_nd_add(alone, target_rows, paddle.ones_like(target_rows, dtype="float32"))
    source = paddle.concat([positions.count_d + paddle.zeros_like(batch), from_src], axis=1) + batch * (n - r)
    return MergePlan(
        tokens=n,
        removed=r,
        dst=positions.d,
        dst_rows=dst_rows.reshape([-1]),
        stay_rows=None if stay is None else (stay + batch * n).reshape([-1]),
        merged_rows=(merged + batch * n).reshape([-1]),
        target_rows=target_rows,
        weights=paddle.reciprocal(members),
        source_rows=paddle.gather(source, positions.slot, axis=1).reshape([-1]),
    )


def match_cells(
    metric: paddle.Tensor,  # [B, N, C]; only B and N are used
    grid: Grid,  # h·w == N
    sx: int = 2,
    sy: int = 2,
    random_key: Sequence[int] | None = None,
) -> MergePlan:
    """Merge each sx×sy cell into its dst, without comparing tokens; a remainder joins the cell beside it.

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
    n, d = cells.cell.shape[0], cells.dst.shape[0]
    with paddle.no_grad():
        batch = _count_batch(metric)
        return MergePlan(
            tokens=n,
            removed=n - d,
            dst=d,
            dst_rows=(cells.dst + batch * n).reshape([-1]),
            stay_rows=None,
            merged_rows=(cells.src + batch * n).reshape([-1]),
            target_rows=(cells.src_cell + batch * d).reshape([-1, 1]),
            weights=(cells.weights + paddle.zeros_like(batch, dtype="float32")).reshape([-1, 1]),
            source_rows=(cells.cell + batch * d).reshape([-1]),
        )


def _best_pairs(
    similarity: paddle.Tensor,  # [B, S] float32
    sorted_: paddle.Tensor,  # [B, S]: the same, descending
    removed: int,  # 1 <= r < S
) -> paddle.Tensor:  # [B, S] bool
    """Mask of the r most similar pairs; ties go to the lowest index.

    Sorting values, and not pairs, makes the choice independent of whether a platform's sort is stable.
    """
    least = sorted_[:, removed - 1 : removed]
    is_more, is_tie = similarity > least, similarity == least
    ties = removed - is_more.cast("int64").sum(axis=1, keepdim=True)
    is_first = paddle.cumsum(is_tie.cast("int64"), axis=1) <= ties
    return paddle.logical_or(is_more, paddle.logical_and(is_tie, is_first))


def _count_batch(metric: paddle.Tensor) -> paddle.Tensor:  # [B, 1] int64
    """0, 1, … B - 1."""
    return paddle.cumsum(paddle.ones_like(metric[:, :1, 0], dtype="int64"), axis=0) - 1


def _most_similar(
    metric: paddle.Tensor,  # [B, N, C]
    positions: Positions,
) -> tuple[paddle.Tensor, paddle.Tensor]:  # [B, S] int64, [B, S] float32
    """For each src token its most similar dst token, as an index into `dst`, and their cosine similarity."""
    metric = cast(metric.detach(), paddle.float32)
    inverse = paddle.rsqrt((metric * metric).sum(axis=-1))  # [B, N]: 1 / norm; infinite where that is 0
    inverse = _or_zero(inverse)

    windows = positions.windows
    dst, src = (positions.dst, positions.src) if windows is None else (windows.dst, windows.src)
    normed = _or_zero(paddle.gather(metric, dst, axis=1)) * paddle.gather(inverse, dst, axis=1).unsqueeze(-1)
    tokens, src_inverse = paddle.gather(metric, src, axis=1), paddle.gather(inverse, src, axis=1)
    if windows is not None:  # the batch becomes B·T windows
        tokens, normed = (x.reshape([-1, x.shape[1] // windows.count_w, x.shape[2]]) for x in (tokens, normed))
        src_inverse = src_inverse.reshape([-1, tokens.shape[1]])
    scores = paddle.matmul(tokens, normed, transpose_y=True)  # [B, S, D]: cosine · norm of src
    # Measured in eager and oneDNN, not faster: argmax in two stages, src in chunks, max pooling with indices.
    best, similarity = paddle.argmax(scores, axis=-1), paddle.max(scores, axis=-1)
    is_valid = src_inverse != 0  # NaN in a src token only affects its own row of scores
    best = paddle.where(is_valid, best, paddle.zeros_like(best))
    similarity = paddle.where(is_valid, similarity * src_inverse, paddle.zeros_like(similarity))
    if windows is None:
        return best, similarity
    begin = (positions.count_d[: windows.count_w] * normed.shape[1]).unsqueeze(-1)  # [T, 1]: first dst of each window
    best = (best.reshape([-1, windows.count_w, tokens.shape[1]]) + begin).reshape([-1])
    return tuple(
        paddle.gather(x.reshape([-1, windows.src.shape[0]]), windows.src_slot, axis=1)
        for x in (paddle.gather(windows.dst_index, best), similarity)
    )


def _or_zero(x: paddle.Tensor) -> paddle.Tensor:
    """`x` in float32, with 0 in place of NaN and infinity; ONNX converters do not know `isfinite`."""
    return paddle.where(paddle.abs(x) <= _LARGEST, x, paddle.zeros_like(x))


def cast(x: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """`x.cast(dtype)` without the copy that Paddle makes even if the dtype is the same."""
    return x if x.dtype == dtype else x.cast(dtype)


def _full_precision() -> AbstractContextManager:
    """Turn mixed precision off so that the matmul stays in float32; Paddle cannot do so in a static program."""
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
    largest = grid.tokens - dst if dst else 0
    if not 0 <= removed <= largest:
        raise ToMeConfigError(
            f"removed={removed} is not allowed on a grid of {grid.h}×{grid.w} tokens with {dst} dst tokens: "
            f"it must be from 0 to {largest}."
        )
