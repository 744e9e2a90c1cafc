"""The wraps around layers that run on merged tokens, and how the sizes of merged tokens reach attention scores."""

import math
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from .config import ASYMMETRIC, KV, ToMeConfig
from .errors import ToMePassError
from .merging import merge, unmerge
from .models import LAST, is_fused, is_joint, splits_heads
from .plans import MergePlan, cast
from .wraps import Cache, InnerWrap, is_for_gpu

FUSED_CHANNELS = 8  # added to each head for sizes: fused kernels need a multiple of 8


class MergeWrap(InnerWrap):
    """Wrap of a layer that treats tokens alike, such as the feed-forward layer: run it on merged tokens.

    Args:
        config: the settings of the denoiser.
        before: whether tokens merge before the layer; otherwise it gets them as they are, or merged already.
        after: whether they merge after it; otherwise they are unmerged. Of several results it is the first.
        text: where text may be, which does not merge: FIRST or LAST in one sequence with the image; None: nowhere.
    """

    config: ToMeConfig

    def __init__(
        self, config: ToMeConfig, *, before: bool = True, after: bool = False, text: str | None = None
    ) -> None:
        super().__init__(config)
        self._before, self._after, self._text = before, after, text

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan()
        if plan is None:
            return self.forward(layer, hidden_states, *args, **kwargs)
        tokens = self._move(hidden_states, plan, True) if self._before else hidden_states
        output = self.forward(layer, tokens, *args, **kwargs)
        if isinstance(output, tuple):
            return self._move(output[0], plan, self._after), *output[1:]
        return self._move(output, plan, self._after)

    def _move(self, tokens: paddle.Tensor, plan: MergePlan, merges: bool) -> paddle.Tensor:
        def move(image: paddle.Tensor) -> paddle.Tensor:
            return merge(image, plan) if merges else unmerge(image, plan)

        count = plan.tokens if merges else plan.kept
        if self._text is None or tokens.shape[1] == count:
            return move(tokens)  # raises for another number of tokens
        if self._text == LAST:
            return paddle.concat([move(tokens[:, :count]), tokens[:, count:]], axis=1)
        return paddle.concat([tokens[:, :-count], move(tokens[:, -count:])], axis=1)


class AttentionWrap(InnerWrap):
    """Wrap of an attention layer: run it on merged tokens.

    In self-attention, keys and values may merge further than queries, or only they merge.

    Args:
        config: the settings of the denoiser.
        is_self: whether the keys are the merged tokens; not so in cross-attention.
    """

    config: ToMeConfig

    def __init__(self, config: ToMeConfig, is_self: bool) -> None:
        super().__init__(config)
        self._is_self = is_self
        self._ignored_scales = Cache()

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        plan, config = self.plan(), self.config
        if plan is None:
            return self.forward(layer, hidden_states, *args, **kwargs)
        _check_mask(plan, self._is_self, *args, **kwargs)
        keys_only = self._is_self and config.merge_attn == KV
        tokens = hidden_states if keys_only else merge(hidden_states, plan)
        keys_differ = keys_only or plan.keys_plan is not None
        if self._is_self and (keys_differ or config.proportional):
            unmerged = (tokens, hidden_states) if keys_differ else None
            view = AttentionView(layer, plan.keys, config, unmerged, self._ignored_scales)
            output = self._forward_of(layer)(view, tokens, *args, **kwargs)
            view.check(tokens)
        else:
            output = self.forward(layer, tokens, *args, **kwargs)
        if keys_only:
            return output
        if isinstance(output, tuple):  # joint attention: image and text
            return unmerge(output[0], plan), *output[1:]
        return unmerge(output, plan)

    def _forward_of(self, layer: nn.Layer) -> Any:
        """The function below this wrap, to which a view is passed as `self`."""
        if isinstance(self.below, MethodType) and self.below.__self__ is layer:
            return self.below.__func__
        return type(layer).forward if self.below is None else lambda view, *args, **kwargs: self.below(*args, **kwargs)


class ProjectionView:
    """A projection of an attention layer whose call goes through a function; all else is the layer's."""

    def __init__(self, layer: nn.Layer, call: Callable[..., paddle.Tensor]) -> None:
        self._layer = layer
        self._call = call

    def __call__(self, *args: Any) -> paddle.Tensor:
        return self._call(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


PROJECTIONS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")  # of image, and of text
# Norms over the channels of each head, as in Stable Diffusion 3.5.
NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class AttentionView:
    """A self-attention as its processor sees it for one pass. It merges keys and values, and weights keys by size.

    The logarithm of a merged token's size is added to the scores of its key, in one of two ways:

    - Channels, where it is known how scores are computed: each head of queries and keys has one more, in which queries
      hold a constant and keys the logarithm, so that the product of both contains the sum. It costs no pass over the
      scores. Fused kernels, which would leave their fastest path for a mask, get 8 channels in queries, keys and
      values, all 0 but the first; `to_out` gets the output without them.
    - A mask, which any other processor asks for.

    Args:
        layer: the attention layer, which has all other attributes.
        plan: of the pass, for keys.
        config: the settings of the denoiser.
        unmerged: the tokens that the attention is given, and those from which its keys and values are to be merged;
            None if the tokens that it is given have all merged.
        ignored_scales: of the wrap: whether `scale` is ignored, by the arguments of `ignores_scale`.
    """

    def __init__(
        self,
        layer: nn.Layer,
        plan: MergePlan,
        config: ToMeConfig,
        unmerged: tuple[paddle.Tensor, paddle.Tensor] | None,
        ignored_scales: Cache,
    ) -> None:
        self._layer = layer
        self._ignored_scales = ignored_scales
        self._unmerged = unmerged
        self._plan = plan
        self._config = config
        self._is_fused = is_joint(layer) or is_fused(layer)
        channels = FUSED_CHANNELS if self._is_fused else int(splits_heads(layer))
        self._widens_weights = is_for_gpu() and splits_heads(layer) and _has_plain_projections(layer)
        if self._widens_weights:
            channels = FUSED_CHANNELS
        is_alike = plan.has_equal_sizes and not is_joint(layer)  # beside tokens of text, which do not merge
        self._needs_sizes = config.proportional and not is_alike
        self._channels = channels if self._needs_sizes else 0
        self._factor = 1.0  # of queries, for kernels that divide by the root of the width of heads, channels included
        self._has_sizes = False
        self._inputs: dict[str, paddle.Tensor] = {}  # of the projections
        self._merged: tuple[paddle.Tensor, paddle.Tensor] | None = None  # an input of `to_k` or `to_v`, and merged
        self._merged_projections = 0

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._layer, name)
        if part is None:
            return None
        if name in PROJECTIONS:
            return ProjectionView(part, partial(self._project, name, part))
        if name in NORMS and self._channels:
            return partial(self._normalize, name, part)
        return self._narrowed(part) if name == "to_add_out" else part

    @property
    def to_out(self) -> list[Any]:
        first, *others = self._layer.to_out
        if self._widens_weights and self._channels:
            return [ProjectionView(first, partial(self._project_wide, "to_out", first)), *others]
        return [self._narrowed(first), *others]

    def _project(self, name: str, layer: nn.Layer, tokens: paddle.Tensor, *args: Any) -> paddle.Tensor:
        """Output of a projection; `to_k` and `to_v` get merged tokens."""
        self._inputs[name] = tokens
        tokens = self._merge(tokens) if name in ("to_k", "to_v") else tokens
        if self._widens_weights and self._channels:
            return self._project_wide(name, layer, tokens)
        output = layer(tokens, *args)
        return self._with_channels(name, output) if self._channels else output

    def _project_wide(self, name: str, layer: nn.Linear, tokens: paddle.Tensor, *_args: Any) -> paddle.Tensor:
        """Output of a projection whose weights are widened, which a runtime does once, when it loads a program.

        It takes two operations in place of the ten by which a GPU would widen outputs.
        """
        heads, channels = self._layer.heads, self._channels
        weight, bias = layer.weight, layer.bias
        if name == "to_out":
            weight = _padded(weight.reshape([heads, -1, weight.shape[1]]), 1, channels).flatten(0, 1)
            return F.linear(tokens, weight, bias)
        weight = _padded(weight.reshape([weight.shape[0], heads, -1]), 2, channels)
        width = weight.shape[2]
        bias = None if bias is None else _padded(bias.reshape([heads, -1]), 1, channels).flatten()
        output = F.linear(tokens, weight.reshape([-1, heads * width]), bias)
        if name == "to_v":
            return output
        added = np.zeros([heads, width], dtype="float32")
        added[:, width - channels] = 1 if name == "to_k" else 1 / self._layer.scale
        channel = paddle.to_tensor(added.reshape(-1))
        if name == "to_q":
            return output + channel
        self._has_sizes = True
        return output + self._plan.log_sizes.unsqueeze(-1) * channel

    def _with_channels(self, name: str, output: paddle.Tensor) -> paddle.Tensor:
        """The output of a projection with the added channels; text has size 1."""
        if name in ("to_q", "add_q_proj"):
            return self._widen_queries(output, "norm_q" if name == "to_q" else "norm_added_q")
        if name == "to_k":
            self._has_sizes = self._is_fused  # of others the scores show it
            return self._widen(output, cast(self._plan.log_sizes, output.dtype).unsqueeze([2, 3]))
        return self._widen(output, 0.0) if self._is_fused else output

    def _normalize(self, name: str, norm: Any, heads: paddle.Tensor, *args: Any, **kwargs: Any) -> paddle.Tensor:
        """Output of a norm of heads, without a change of the added channels."""
        own, added = heads[..., : -self._channels], heads[..., -self._channels :]
        factor = self._factor if name in ("norm_q", "norm_added_q") else 1.0
        return paddle.concat([norm(own, *args, **kwargs) * factor, added], axis=-1)

    def head_to_batch_dim(self, tensor: paddle.Tensor, out_dim: int = 4, transpose: bool = True) -> paddle.Tensor:
        """Same as the method of the layer, for heads of any width."""
        heads = split_heads(tensor, self._layer.heads)
        heads = heads.transpose([0, 2, 1, 3]) if transpose or out_dim == 3 else heads
        return heads.flatten(0, 1) if out_dim == 3 else heads

    def get_attention_scores(
        self,
        query: paddle.Tensor,  # [..., N, d]
        key: paddle.Tensor,  # [..., M, d]
        attention_mask: paddle.Tensor | None = None,
    ) -> paddle.Tensor:  # [..., N, M]
        """Same as the method of the layer. Where possible, it scales queries, which are fewer than scores."""
        layer = self._layer
        self._has_sizes = self._has_sizes or bool(self._channels)
        if attention_mask is not None or layer.upcast_attention or layer.upcast_softmax or not self._channels:
            return layer.get_attention_scores(query, key, attention_mask)
        return F.softmax(paddle.matmul(query * layer.scale, key, transpose_y=True), axis=-1)

    def prepare_attention_mask(
        self,
        attention_mask: paddle.Tensor | None,
        target_length: int,
        batch_size: int,
        out_dim: int = 4,
        **kwargs: Any,
    ) -> Any:
        """Same as the method of the layer, for merged keys; it adds their sizes where no channel contains them."""
        mask = self._layer.prepare_attention_mask(attention_mask, self._plan.kept, batch_size, out_dim, **kwargs)
        if self._channels or not self._needs_sizes:
            return mask
        self._has_sizes = True
        sizes = cast(self._plan.log_sizes, self._layer.dtype)  # [B, keys]
        if out_dim == 3:  # attention slicing: [B·heads, 1, keys]
            sizes = sizes.repeat_interleave(self._layer.heads, axis=0).unsqueeze(1)
        else:  # [B, 1, 1, keys]
            sizes = sizes.unsqueeze([1, 2])
        return sizes if mask is None else mask + sizes

    def check(self, tokens: paddle.Tensor | None = None) -> None:
        """Raise ToMePassError if the processor has computed without the merged keys, or without their sizes.

        Args:
            tokens: what the attention was given.
        """
        name, remedy = type(self._layer.processor).__name__, "set another attention processor, or use"
        if self._unmerged is not None and self._merged_projections != 2:
            raise ToMePassError(
                f"merge_attn={self._config.merge_attn!r}: {name} has not called to_k and to_v of the layer that it "
                f"was given: do not fuse projections, {remedy} merge_attn=True."
            )
        if self._needs_sizes and not self._has_sizes:
            raise ToMePassError(
                f"proportional=True: {name} has neither called prepare_attention_mask() nor computed scores from to_q "
                "and to_k of the layer that it was given, so merged tokens cannot be weighted by their size: do not "
                f"fuse projections, {remedy} proportional=False."
            )
        keys = self._inputs.get("to_k")
        is_own = keys is None or keys is tokens or keys is self._inputs.get("to_q")
        if self._needs_sizes and not is_own:
            raise ToMePassError(
                f"proportional=True: {name} attends to other tokens than its own, whose sizes are not known: "
                f"{remedy} proportional=False."
            )

    def _merge(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """The merged input of `to_k` or `to_v`, usually the same for both."""
        if self._unmerged is None:
            return tokens
        self._merged_projections += 1
        if self._merged is None or self._merged[0] is not tokens:
            given, unmerged = self._unmerged
            if tokens is not given and given is not unmerged:
                raise ToMePassError(
                    f"merge_attn={ASYMMETRIC!r}: {type(self._layer.processor).__name__} computes keys or values from "
                    "other tokens than those it was given: set another attention processor, or use merge_attn=True."
                )
            self._merged = tokens, merge(unmerged if tokens is given else tokens, self._plan)
        return self._merged[1]

    def _widen_queries(self, output: paddle.Tensor, norm: str) -> paddle.Tensor:
        layer, width = self._layer, output.shape[-1] // self._layer.heads
        wide = width + self._channels
        # A joint attention, and flash attention in ppdiffusers, divide by the root of the new width.
        if is_joint(layer) or (self._is_fused and self._ignores_scale(output.dtype, wide)):
            self._factor = math.sqrt(wide / width)
            has_norm = getattr(layer, norm, None) is not None  # which comes later, and would undo it
            return self._widen(output if has_norm else output * self._factor, math.sqrt(wide))
        return self._widen(output, 1 / layer.scale)

    def _ignores_scale(self, dtype: paddle.dtype, width: int) -> bool:
        """Whether the kernel of a pass ignores `scale`; in float32, as in all exports, there is no flash attention."""
        if dtype == paddle.float32 or not paddle.in_dynamic_mode():
            return False
        attention_op = self._layer.processor.attention_op
        key = paddle.get_device(), attention_op, dtype, width
        return self._ignored_scales.get(key, lambda: ignores_scale(attention_op, dtype, width))

    def _widen(self, output: paddle.Tensor, first: Any) -> paddle.Tensor:
        """Add the channels, the first of which is a number or [B, N, 1, 1], to each head of [B, N, heads·d]."""
        wide = widen(split_heads(output, self._layer.heads), first, self._channels)
        return wide.reshape([0, 0, wide.shape[2] * wide.shape[3]])

    def _narrowed(self, layer: nn.Layer) -> ProjectionView:
        """The layer for the output of a fused kernel, which it gets without the channels."""
        return ProjectionView(layer, lambda tokens, *args: layer(self._narrow(tokens), *args))

    def _narrow(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """The output of a fused kernel [B, N, heads·d] without the channels."""
        if not (self._channels and self._is_fused):
            return tokens
        if tokens.shape[-1] != self._layer.inner_dim + self._channels * self._layer.heads:
            self._has_sizes = False
            self.check()
        heads = split_heads(tokens, self._layer.heads)[..., : -self._channels]
        return heads.reshape([0, 0, heads.shape[2] * heads.shape[3]])


def _has_plain_projections(layer: nn.Layer) -> bool:
    """Whether the projections of an attention are matrix products, without LoRA, hooks and norms of heads."""
    projections = (layer.to_q, layer.to_k, layer.to_v, layer.to_out[0])
    is_plain = all(
        isinstance(part, nn.Linear)
        and getattr(part, "lora_layer", None) is None
        and not (part._forward_pre_hooks or part._forward_post_hooks)
        for part in projections
    )
    return is_plain and all(getattr(layer, name, None) is None for name in NORMS)


def _padded(weight: paddle.Tensor, axis: int, channels: int) -> paddle.Tensor:
    """A weight with zeros at the end of an axis."""
    shape = [*weight.shape]
    shape[axis] = channels
    return paddle.concat([weight, paddle.zeros(shape, dtype=weight.dtype)], axis=axis)


def split_heads(output: paddle.Tensor, heads: int) -> paddle.Tensor:
    """The output of a projection [B, N, heads·d] as [B, N, heads, d]."""
    return output.reshape([0, 0, heads, output.shape[-1] // heads])


def widen(heads: paddle.Tensor, first: Any, channels: int) -> paddle.Tensor:
    """Heads [B, N, heads, d] with more channels: the first is a number or [B, N, 1, 1], the others are 0."""
    zeros = [paddle.zeros_like(heads[..., :1])] * (channels - 1)
    return paddle.concat([heads, paddle.zeros_like(heads[..., :1]) + first, *zeros], axis=-1)


def _check_mask(
    plan: MergePlan,
    is_self: bool,
    /,
    encoder_hidden_states: paddle.Tensor | None = None,
    attention_mask: paddle.Tensor | None = None,
    *_args: Any,
    **_kwargs: Any,
) -> None:
    """Raise ToMePassError for a mask over merged tokens, among the arguments of an attention layer."""
    if attention_mask is None:
        return
    keys = plan.keys.kept if is_self or encoder_hidden_states is None else encoder_hidden_states.shape[1]
    if attention_mask.shape[-1] != keys:
        raise ToMePassError(
            f"attention_mask has shape {list(attention_mask.shape)} but attention sees {keys} of {plan.tokens} tokens "
            "because the others are merged, and a mean of masked and unmasked tokens has no mask: call without "
            "attention_mask, or remove_tome() first."
        )


def ignores_scale(attention_op: str | None, dtype: paddle.dtype, width: int) -> bool:
    """Whether ppdiffusers' fused attention ignores its argument `scale`, as it does when it chooses flash attention.

    One attention is computed with a scale of nearly 0, which makes all scores equal unless the scale is ignored.

    Args:
        attention_op: of the attention processor.
        dtype: of queries and keys.
        width: channels of a head.
    """
    with paddle.no_grad(), paddle.amp.auto_cast(enable=False):
        query = paddle.ones([1, 8, 1, width]).cast(dtype)
        key = paddle.concat([query[:, :1], paddle.zeros_like(query[:, 1:])], axis=1)
        settings = {"scale": 1e-4, "dropout_p": 0.0, "training": False, "attention_op": attention_op}
        weight = F.scaled_dot_product_attention_(query, key, key, **settings)[0, 0, 0, 0]
    return float(weight) > 0.25  # 1/8 if all scores are equal
