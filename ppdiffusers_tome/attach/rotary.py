"""Rotary positions of merged tokens, in FLUX, CogVideoX, Wan and HunyuanVideo.

A merged token has the position of its dst: interpolated positions break attention (arXiv:2511.19778).
"""

from typing import Any

import paddle

from ..methods.plan import MergePlan
from ..tensors import cast, gather

CosSin = tuple[paddle.Tensor, paddle.Tensor]  # cosines and sines, [T + N, d] each: text before image


def rotary_table(rows: Any, image: int, text: int) -> CosSin:
    """The rotary rows of text and image, from what a processor gets.

    Args:
        rows: cosines and sines of text and image, or of the image alone, each number twice; or complex numbers
            [1, 1, N, d / 2] of the image, as in Wan.
        image, text: number of tokens. Text without rows does not rotate.
    """
    if isinstance(rows, paddle.Tensor):
        parts = (cast(part.flatten(0, 2), paddle.float32) for part in (rows.real(), rows.imag()))
        rows = tuple(part.repeat_interleave(2, axis=-1) for part in parts)
    cos, sin = rows
    if text and cos.shape[0] == image:
        no_rotation = paddle.zeros_like(sin[:1]).expand([text, -1])
        cos, sin = paddle.concat([no_rotation + 1, cos]), paddle.concat([no_rotation, sin])
    return cos, sin


def rotary_of_merged(rows: CosSin, plan: MergePlan) -> CosSin:  # [B, T + N - r, d] each
    """The rotary rows of the tokens that `merge` returns: those of their dst, after those of the text."""
    positions = plan.kept_rows % plan.tokens  # [B, N - r]
    moved = []
    for table in rows:
        image = gather(table[-plan.tokens :], positions.flatten()).reshape([*positions.shape, -1])
        if table.shape[0] > plan.tokens:
            text = table[: -plan.tokens].unsqueeze(0).expand([positions.shape[0], -1, -1])
            image = paddle.concat([text, image], axis=1)
        moved.append(image)
    return moved[0], moved[1]


def rotate(
    x: paddle.Tensor,  # [B, S, heads, d]
    rows: CosSin,  # [S, d] or [B, S, d] each
) -> paddle.Tensor:
    """Rotate pairs of neighbouring channels by the angles of each token, in float32."""
    cos, sin = (table.unsqueeze(-2) for table in rows)  # over heads
    wide = cast(x, paddle.float32)
    pairs = wide.reshape([*x.shape[:-1], -1, 2])
    rotated = paddle.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).flatten(-2)
    return cast(wide * cos + rotated * sin, x.dtype)
