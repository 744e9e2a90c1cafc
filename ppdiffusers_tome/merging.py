"""Move: merge tokens by a `MergePlan`, and copy the results back to the place of every token."""

import paddle

from .errors import ToMePassError
from .plans import MergePlan


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
    _check("merge", x, plan.tokens)
    return plan.move(x)


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
    _check("unmerge", y, plan.kept)
    return plan.move_back(y)


def _check(operation: str, x: paddle.Tensor, tokens: int) -> None:
    if x.ndim != 3 or x.shape[1] not in (tokens, -1):
        raise ToMePassError(
            f"{operation} expects tokens of shape [B, {tokens}, C] but got {list(x.shape)}: "
            "was the plan made for another size?"
        )
