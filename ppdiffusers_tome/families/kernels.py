"""What is known of attention processors: which kernel computes the attention, and with which arguments.

A kernel gets queries, keys and values of all heads, and numbers to add to the scores of each key. It adds them by more
channels in each head: in the first of these, queries hold a constant and keys the number, so that the product of
queries and keys contains the sum. This needs no pass over the scores and no mask, with which fused kernels would leave
their fastest path.
"""

import math
from collections.abc import Mapping
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn
from ppdiffusers.models.attention_processor import (
    AttnProcessor,
    JointAttnProcessor2_5,
    SlicedAttnProcessor,
    XFormersAttnProcessor,
)
from ppdiffusers.pipelines.text_to_video_synthesis.pipeline_text_to_video_zero import CrossFrameAttnProcessor
from ppdiffusers.utils import USE_PEFT_BACKEND

from .table import Family

FUSED_CHANNELS = 8  # added to each head: fused kernels need a multiple of 8
# Attributes of ppdiffusers' `Attention` that add operations around its kernel, each with the value that adds none.
_MORE = {"group_norm": None, "spatial_norm": None, "residual_connection": False, "rescale_output_factor": 1.0}


class Kernel:
    """The computation of an attention after its projections, with `F.scaled_dot_product_attention`."""

    channels = FUSED_CHANNELS
    fusion = "fused on a GPU in half precision"

    def __call__(
        self,
        layer: nn.Layer,
        query: paddle.Tensor,  # [B, S, heads, d]
        key: paddle.Tensor,  # [B, K, heads, d]
        value: paddle.Tensor,  # [B, K, heads, d]
        scale: float,
        added: paddle.Tensor | None,  # [B, K]: what is added to the scores of each key
    ) -> paddle.Tensor:  # [B, S, heads, d]
        width = query.shape[-1]
        wide = width if added is None else width + self.channels
        # A kernel divides by the root of the width that it sees; those of ppdiffusers ignore other scales at times.
        if not math.isclose(factor := scale * math.sqrt(wide), 1):
            query = query * factor
        if added is not None:
            query = widen(query, math.sqrt(wide), self.channels)
            key = widen(key, added.cast(key.dtype).unsqueeze([2, 3]), self.channels)
            value = widen(value, 0.0, self.channels)
        return self.attend(layer, query, key, value)[..., :width].cast(query.dtype)

    def attend(self, layer: nn.Layer, query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor) -> paddle.Tensor:
        """Attention of these heads with the scale 1/√d."""
        return F.scaled_dot_product_attention(query, key, value)

    def arguments(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the processor passes to projections after the tokens, from the arguments of the attention."""
        return ()


class JointKernel(Kernel):
    """The kernel of Stable Diffusion 3's processor."""

    fusion = "fused"

    def attend(self, layer: nn.Layer, query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor) -> paddle.Tensor:
        return F.scaled_dot_product_attention_(query, key, value, dropout_p=0.0, is_causal=False)


class UNetKernel(Kernel):
    """Kernels of processors that pass LoRA's scale to the projections."""

    def arguments(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        return () if USE_PEFT_BACKEND else (given.get("scale", 1.0),)


class XFormersKernel(UNetKernel):
    """Memory-efficient attention."""

    fusion = "fused"

    def attend(self, layer: nn.Layer, query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor) -> paddle.Tensor:
        return F.scaled_dot_product_attention_(
            query,
            key,
            value,
            attn_mask=None,
            scale=query.shape[-1] ** -0.5,
            dropout_p=0.0,
            training=layer.training,
            attention_op=layer.processor.attention_op,
        )


class SoftmaxKernel(UNetKernel):
    """Attention step by step, which needs one more channel only, and none in values."""

    channels = 1
    fusion = "not fused"

    def __call__(
        self,
        layer: nn.Layer,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        scale: float,
        added: paddle.Tensor | None,
    ) -> paddle.Tensor:
        if added is not None:
            query = _split_again(widen(query, 1 / scale, self.channels))
            key = _split_again(widen(key, added.cast(key.dtype).unsqueeze([2, 3]), self.channels))
        return softmax_attention(layer, query, key, value, None if added is None else scale)


class FirstFrameKernel(SoftmaxKernel):
    """The kernel of Text2Video-Zero's processors: all frames attend to the keys of the first one."""

    def __call__(
        self,
        layer: nn.Layer,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        scale: float,
        added: paddle.Tensor | None,
    ) -> paddle.Tensor:
        frames = key.shape[0] // layer.processor.batch_size
        first = paddle.to_tensor([i // frames * frames for i in range(key.shape[0])])
        key, value, added = (x if x is None else paddle.gather(x, first) for x in (key, value, added))
        return super().__call__(layer, query, key, value, scale, added)

    def arguments(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        return ()


def softmax_attention(
    layer: nn.Layer,
    query: paddle.Tensor,  # [B, S, heads, d]
    key: paddle.Tensor,  # [B, K, heads, d]
    value: paddle.Tensor,  # [B, K, heads, d]
    scale: float | None,  # of queries, which are fewer than scores; None: scale scores, as ppdiffusers does
) -> paddle.Tensor:  # [B, S, heads, d]
    """Attention step by step, as ppdiffusers' `AttnProcessor` computes it."""
    query, key, value = (x.transpose([0, 2, 1, 3]) for x in (query, key, value))
    if scale is None or layer.upcast_attention or layer.upcast_softmax:
        weights = layer.get_attention_scores(query, key, None)
    else:
        weights = F.softmax(paddle.matmul(query * scale, key, transpose_y=True), axis=-1)
    return paddle.matmul(weights, value).transpose([0, 2, 1, 3])


def _split_again(heads: paddle.Tensor) -> paddle.Tensor:
    """The same heads, split from [B, N, heads·d], by which `onnx_attention.fuse_attention` finds an attention."""
    count, width = heads.shape[2:]
    return heads.reshape([0, 0, count * width]).reshape([0, 0, count, width])


def widen(heads: paddle.Tensor, first: Any, channels: int) -> paddle.Tensor:
    """Heads [B, N, heads, d] with more channels: the first is a number or [B, N, 1, 1], the others are 0."""
    zeros = [paddle.zeros_like(heads[..., :1])] * (channels - 1)
    return paddle.concat([heads, paddle.zeros_like(heads[..., :1]) + first, *zeros], axis=-1)


KERNELS: dict[type, Kernel] = {  # by the class of the processor that defines `__call__`
    AttnProcessor: SoftmaxKernel(),
    XFormersAttnProcessor: XFormersKernel(),
    JointAttnProcessor2_5: JointKernel(),
}


def kernel_of(layer: nn.Layer, family: Family) -> Kernel | None:
    """The kernel of an attention layer; None if it is unknown how its processor computes."""
    if family.attention.processor is None:
        return Kernel()
    processor = getattr(layer, family.attention.processor)
    if family.only_processor is not None:
        return Kernel() if type(processor).__name__ == family.only_processor else None
    if any(getattr(layer, name, usual) != usual for name, usual in _MORE.items()):
        return None
    if isinstance(processor, CrossFrameAttnProcessor):  # of subclasses too, as their keys are also of the first frame
        return FirstFrameKernel()
    # A subclass with a `__call__` of its own may compute in another way.
    computing = next(cls for cls in type(processor).__mro__ if "__call__" in vars(cls))
    return KERNELS.get(computing)


def attention_label(layer: nn.Layer, family: Family) -> str:
    """The processor of an attention, and whether its kernel is fused, as in "AttnProcessor (not fused)"."""
    name = family.attention.processor
    processor = layer if name is None else getattr(layer, name)
    if (kernel := kernel_of(layer, family)) is not None:
        fusion = kernel.fusion
    else:
        is_sliced = isinstance(processor, SlicedAttnProcessor)
        fusion = "not fused" if is_sliced else "not known whether fused"
    return f"{type(processor).__name__} ({fusion})"


def use_ordinary_attention(model: nn.Layer) -> None:
    """Replace ppdiffusers' default attention on a machine with a GPU, whose kernel a CPU lacks, by that on a CPU."""
    for layer in model.sublayers():
        if type(getattr(layer, "processor", None)) is XFormersAttnProcessor:
            layer.set_processor(AttnProcessor())
