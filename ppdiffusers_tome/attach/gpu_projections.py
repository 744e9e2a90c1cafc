"""Attention with widened weights, for programs that run on a GPU.

The sizes of merged tokens need more channels in each head. Where an attention has plain projections, a program has
wider weights in place of operations that widen the outputs: a runtime computes them once, when it loads the program,
and two operations add the sizes in place of ten.
"""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from ..families.kernels import FUSED_CHANNELS, softmax_attention
from ..families.table import Attention


def has_plain_projections(layer: nn.Layer, names: Attention) -> bool:
    """Whether the projections of an attention are matrix products, without LoRA, hooks and norms of heads."""
    image = names.image
    out, *_ = getattr(layer, image.out)
    is_plain = all(
        isinstance(part, nn.Linear)
        and getattr(part, "lora_layer", None) is None
        and not (part._forward_pre_hooks or part._forward_post_hooks)
        for part in (*(getattr(layer, name) for name in (image.q, image.k, image.v)), out)
    )
    return is_plain and getattr(layer, image.norm_q, None) is None and getattr(layer, image.norm_k, None) is None


def wide_attention(
    layer: nn.Layer,
    names: Attention,
    queries: paddle.Tensor,  # [B, S, C]
    keys: paddle.Tensor,  # [B, K, C]
    log_sizes: paddle.Tensor,  # [B, K]
) -> paddle.Tensor:  # [B, S, C]
    """The attention of a layer with plain projections, with sizes added to the scores of keys."""
    heads, scale = getattr(layer, names.heads), getattr(layer, names.scale)
    image = names.image

    def project(name: str, tokens: paddle.Tensor, constant: float) -> paddle.Tensor:
        """[B, S, heads, d + channels], of which the first channel is the constant, times the sizes for keys."""
        projection = getattr(layer, name)
        weight = _padded(projection.weight.reshape([projection.weight.shape[0], heads, -1]), 2)
        width = weight.shape[2]
        bias = projection.bias
        bias = None if bias is None else _padded(bias.reshape([heads, -1]), 1).flatten()
        output = F.linear(tokens, weight.reshape([-1, heads * width]), bias)
        if constant:
            added = np.zeros([heads, width], dtype="float32")
            added[:, width - FUSED_CHANNELS] = constant
            channel = paddle.to_tensor(added.reshape(-1))
            output = output + (log_sizes.unsqueeze(-1) * channel if name == image.k else channel)
        return output.reshape([0, 0, heads, width])

    query, key, value = project(image.q, queries, 1 / scale), project(image.k, keys, 1), project(image.v, keys, 0)
    output = softmax_attention(layer, query, key, value, scale)
    output = output.reshape([0, 0, output.shape[2] * output.shape[3]])
    first, *others = getattr(layer, image.out)
    weight = _padded(first.weight.reshape([heads, -1, first.weight.shape[1]]), 1).flatten(0, 1)
    output = F.linear(output, weight, first.bias)
    for other in others:
        output = other(output)
    return output


def _padded(weight: paddle.Tensor, axis: int) -> paddle.Tensor:
    """A weight with zeros for the channels at the end of an axis."""
    shape = [*weight.shape]
    shape[axis] = FUSED_CHANNELS
    return paddle.concat([weight, paddle.zeros(shape, dtype=weight.dtype)], axis=axis)
