"""The hooks inside attention layers: masks, the sizes of merged tokens, and keys and values that merge alone."""

import math
from functools import lru_cache
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from .config import KV
from .errors import ToMePassError
from .hooks import BlockHook, CallHook, hidden_states
from .matching import cast
from .models import attends_to_first_frame, is_fused, is_joint

SIZE_CHANNELS = 8  # added to each head by `SizeChannelHook`: fused kernels need a multiple of 8


class KeyValueHook(BlockHook):
    """Pre-hook of a projection of keys or values: merge its input."""

    def __call__(self, projection: nn.Layer, inputs: tuple) -> tuple:
        return self._call_hook.merge_for_keys(hidden_states(projection, inputs)), *inputs[1:]


class CheckHook(BlockHook):
    """Post-hook of a self-attention: see `CallHook.check_attention`."""

    def __call__(self, attention: nn.Layer, inputs: tuple, outputs: Any) -> None:
        self._call_hook.check_attention(attention, inputs[0] if inputs else None)


class AttentionHook(BlockHook):
    """Base class of the hooks that need the attention layer.

    Args:
        call_hook: that of the layer's block.
        attention: the layer.
    """

    def __init__(self, call_hook: CallHook, attention: nn.Layer) -> None:
        super().__init__(call_hook)
        self._attention = attention


class MaskHook(AttentionHook):
    """Wraps `prepare_attention_mask` of an attention layer: weights merged tokens, raises on a mask over them.

    Masks are keyword arguments, which Paddle's hooks do not receive, but every attention processor passes them to
    this method and adds the result to the scores.

    Args:
        call_hook: that of the layer's block.
        attention: the layer.
        is_self: whether the layer is a self-attention, whose keys are the merged tokens.
    """

    def __init__(self, call_hook: CallHook, attention: nn.Layer, is_self: bool) -> None:
        super().__init__(call_hook, attention)
        self._is_self = is_self

    def __call__(
        self,
        attention_mask: paddle.Tensor | None,
        target_length: int,
        batch_size: int,
        out_dim: int = 4,
        **kwargs: Any,
    ) -> Any:
        plan, config = self._call_hook.plan(), self._call_hook.config
        keys = target_length
        if plan is not None and self._is_self and config.merge_attn == KV:
            keys = plan.kept
        if plan is not None and attention_mask is not None and attention_mask.shape[-1] != keys:
            raise ToMePassError(
                f"attention_mask has shape {list(attention_mask.shape)} but attention sees {keys} of "
                f"{plan.tokens} tokens because the others are merged, and a mean of masked and unmasked tokens "
                "has no mask: call without attention_mask, or remove_tome() first."
            )
        attention = self._attention
        mask = type(attention).prepare_attention_mask(attention, attention_mask, keys, batch_size, out_dim, **kwargs)
        if plan is None or not self._is_self or not config.proportional or has_size_channels(attention):
            return mask
        self._call_hook.note_sizes()
        sizes = cast(plan.log_sizes(), attention.dtype)  # [B, keys]
        if attends_to_first_frame(attention):
            frames = sizes.reshape([attention.processor.batch_size, -1, sizes.shape[1]])
            sizes = frames[:, :1].expand_as(frames).reshape(sizes.shape)
        if out_dim == 3:  # attention slicing: [B·heads, 1, keys]
            sizes = sizes.repeat_interleave(attention.heads, axis=0).unsqueeze(1)
        else:  # [B, 1, 1, keys]
            sizes = sizes.unsqueeze([1, 2])
        return sizes if mask is None else mask + sizes


class ScoresHook(AttentionHook):
    """Wraps `get_attention_scores` of a self-attention: a mask over the keys alone becomes one more channel.

    Queries hold 1 in it and keys their mask, so the product of both is the score with the mask: it costs no pass
    over the scores. The scale goes into the queries for the same reason.
    """

    def __call__(
        self,
        query: paddle.Tensor,  # [..., N, d]
        key: paddle.Tensor,  # [..., M, d]
        attention_mask: paddle.Tensor | None = None,  # [..., 1, M]
    ) -> paddle.Tensor:  # [..., N, M]
        attention = self._attention
        is_upcast = attention.upcast_attention or attention.upcast_softmax
        if is_upcast or attention_mask is None or attention_mask.shape[-2] != 1 or self._call_hook.plan() is None:
            return type(attention).get_attention_scores(attention, query, key, attention_mask)
        query, key = self.add_channel(query * attention.scale, key, attention_mask)
        return F.softmax(paddle.matmul(query, key, transpose_y=True), axis=-1)

    def add_channel(
        self, query: paddle.Tensor, key: paddle.Tensor, attention_mask: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Queries and keys with one more channel; a method of its own because `bench` times it."""
        mask = paddle.zeros_like(key[..., :1]) + cast(attention_mask, key.dtype).squeeze(-2).unsqueeze(-1)
        return paddle.concat([query, paddle.ones_like(query[..., :1])], -1), paddle.concat([key, mask], -1)


class SizeChannelHook(AttentionHook):
    """Post-hook of a projection: add channels to each head that weight merged tokens, for fused attention.

    A mask would keep xformers' processor from its fastest kernels, and a joint attention has none. In the first of the
    added channels, queries hold a constant and the keys of merged image tokens the logarithm of their size;
    everything else is 0. The product of query and key is then the score plus this logarithm. `DropChannelHook`
    removes the channels from the output.

    Args:
        call_hook: that of the attention's block.
        attention: the layer.
        role: "query", "key" (of image tokens), or "other" (values, and the keys of text tokens, whose size is 1).
    """

    def __init__(self, call_hook: CallHook, attention: nn.Layer, role: str) -> None:
        super().__init__(call_hook, attention)
        self._role = role

    def __call__(self, projection: nn.Layer, inputs: tuple, output: paddle.Tensor) -> paddle.Tensor | None:
        plan, attention = self._call_hook.plan(), self._attention
        if plan is None:
            return None
        if self._role != "other" and not is_joint(attention):
            self._call_hook.note_input(self._role, hidden_states(projection, inputs))
        if not has_size_channels(attention):
            return None
        heads = output.reshape([0, 0, attention.heads, -1])  # [B, N, heads, C]
        width = heads.shape[-1] + SIZE_CHANNELS
        extra = paddle.zeros_like(heads[..., :1])
        if self._role == "query":
            # A joint attention, and flash attention in ppdiffusers, divide by the root of the new width.
            if is_joint(attention) or ignores_scale(attention.processor.attention_op, output.dtype, width):
                heads = heads * math.sqrt(width / heads.shape[-1])
                extra = extra + math.sqrt(width)
            else:
                extra = extra + 1 / attention.scale
        elif self._role == "key":
            self._call_hook.note_sizes()
            extra = extra + cast(plan.log_sizes(), output.dtype).unsqueeze([2, 3])
        zeros = paddle.zeros_like(heads[..., : SIZE_CHANNELS - 1])
        return paddle.concat([heads, extra, zeros], axis=-1).reshape([0, 0, attention.heads * width])


class HeadsHook(AttentionHook):
    """Wraps `head_to_batch_dim` of a self-attention, which expects heads without the channels of `SizeChannelHook`."""

    def __call__(self, tensor: paddle.Tensor, out_dim: int = 4, transpose: bool = True) -> paddle.Tensor:
        attention = self._attention
        if self._call_hook.plan() is None or not has_size_channels(attention):
            return type(attention).head_to_batch_dim(attention, tensor, out_dim, transpose)
        _check_channels(attention, tensor)
        return tensor.reshape([0, 0, attention.heads, -1])  # [B, N, heads, C], as these processors ask for it


class DropChannelHook(AttentionHook):
    """Pre-hook of an output projection: remove the channels of `SizeChannelHook`."""

    def __call__(self, projection: nn.Layer, inputs: tuple) -> tuple | None:
        if self._call_hook.plan() is None or not has_size_channels(self._attention):
            return None
        tokens = hidden_states(projection, inputs)
        _check_channels(self._attention, tokens)
        heads = tokens.reshape([0, 0, self._attention.heads, -1])[..., :-SIZE_CHANNELS]
        return heads.reshape([0, 0, -1]), *inputs[1:]


WRAPPERS = {"prepare_attention_mask": MaskHook, "get_attention_scores": ScoresHook, "head_to_batch_dim": HeadsHook}


def _check_channels(attention: nn.Layer, tokens: paddle.Tensor) -> None:
    """Raise ToMePassError unless `tokens` [B, N, C] have the channels of `SizeChannelHook`."""
    if tokens.shape[-1] != attention.inner_dim + SIZE_CHANNELS * attention.heads:
        raise ToMePassError(
            f"proportional=True: {type(attention.processor).__name__} has not called the projections that "
            "apply_tome() found: call apply_tome() again if you have replaced layers, do not fuse projections, or use "
            "proportional=False."
        )


def has_size_channels(attention: nn.Layer) -> bool:
    """Whether an attention layer gets the sizes of merged tokens in channels, and not as a mask."""
    return is_joint(attention) or is_fused(attention)


def ignores_scale(attention_op: str | None, dtype: paddle.dtype, width: int) -> bool:
    """Whether ppdiffusers' fused attention ignores its argument `scale`, as it does when it chooses flash attention.

    Args:
        attention_op: of the attention processor.
        dtype: of queries and keys. In float32, as in all exports, there is no flash attention.
        width: channels of a head.
    """
    if dtype == paddle.float32 or not paddle.in_dynamic_mode():
        return False
    return _ignores_scale(paddle.get_device(), attention_op, dtype, width)


@lru_cache(maxsize=64)
def _ignores_scale(device: str, attention_op: str | None, dtype: paddle.dtype, width: int) -> bool:
    """Try it once, with a scale of nearly 0, which makes all scores equal."""
    with paddle.no_grad(), paddle.amp.auto_cast(enable=False):
        query = paddle.ones([1, 8, 1, width]).cast(dtype)
        key = paddle.concat([query[:, :1], paddle.zeros_like(query[:, 1:])], axis=1)
        settings = {"scale": 1e-4, "dropout_p": 0.0, "training": False, "attention_op": attention_op}
        weight = F.scaled_dot_product_attention_(query, key, key, **settings)[0, 0, 0, 0]
    return float(weight) > 0.25  # 1/8 if all scores are equal


def install_attention(attention: nn.Layer, call_hook: CallHook) -> None:
    """Attach to a self-attention all hooks that its block's config asks for, except those around the layer."""
    config = call_hook.config
    attention.register_forward_post_hook(CheckHook(call_hook))
    if config.merge_attn == KV:
        for projection in (attention.to_k, attention.to_v):
            projection.register_forward_pre_hook(KeyValueHook(call_hook))
    attention.prepare_attention_mask = MaskHook(call_hook, attention, is_self=True)
    if not config.proportional:
        return
    roles = {"to_q": "query", "to_k": "key", "to_v": "other"}
    if is_joint(attention):
        roles |= {"add_q_proj": "query", "add_k_proj": "other", "add_v_proj": "other"}
    else:
        attention.get_attention_scores = ScoresHook(call_hook, attention)
        attention.head_to_batch_dim = HeadsHook(call_hook, attention)
    for name, role in roles.items():
        getattr(attention, name).register_forward_post_hook(SizeChannelHook(call_hook, attention, role))
    attention.to_out[0].register_forward_pre_hook(DropChannelHook(call_hook, attention))
    if is_joint(attention) and not attention.context_pre_only:
        attention.to_add_out.register_forward_pre_hook(DropChannelHook(call_hook, attention))


def remove_wrappers(layer: nn.Layer) -> None:
    """Restore the methods that this package's hooks wrap."""
    for name, kind in WRAPPERS.items():
        if isinstance(layer.__dict__.get(name), kind):
            delattr(layer, name)
