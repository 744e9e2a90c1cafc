"""Attention over merged tokens.

Where it is known how a processor computes, the attention is computed here, by the kernel that the processor calls;
any other processor gets a view of the layer that merges what it passes to the projections of keys and values.
"""

from types import MethodType
from typing import Any

import paddle
from paddle import nn

from ..errors import ToMePassError
from ..families.kernels import Kernel, SoftmaxKernel, kernel_of
from ..families.table import Attention, Projections
from ..methods.plan import MergePlan
from ..tensors import cast
from .attention_view import AttentionView
from .forward import is_outermost
from .gpu_projections import has_plain_projections, wide_attention
from .passes import InnerWrap, is_for_gpu
from .placement import Placement
from .rotary import rotary_of_merged, rotary_table, rotate

MASKED = -1e4  # added to the scores of masked keys: their weight is 0, and no kernel multiplies 0 by infinity


class AttentionWrap(InnerWrap):
    """Wrap of an attention layer: run it on merged tokens.

    In self-attention, keys and values may merge more than queries, or only they merge. Text that attends with the
    image does not merge.

    Args:
        placement: what merges in the block.
        is_self: whether it is self-attention, whose keys are among the tokens that merge.
    """

    def __init__(self, placement: Placement, is_self: bool) -> None:
        super().__init__(placement)
        self._is_self = is_self

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        plan, placement = self.plan(), self.placement
        if plan is None:
            return self.forward(layer, hidden_states, *args, **kwargs)
        is_rotary = placement.family.only_processor is not None
        if self._is_self and is_rotary:
            return self._compute(layer, plan, hidden_states, *args, **kwargs)
        _check_mask(plan, self._is_self, *args, **kwargs)
        keys_differ = not placement.merges_queries or plan.keys_plan is not None
        if not self._is_self or not (keys_differ or placement.config.proportional):
            output = self.forward(layer, plan.merge(hidden_states), *args, **kwargs)
        elif self._can_compute(layer, *args, **kwargs):
            return self._compute(layer, plan, hidden_states, *args, **kwargs)
        else:
            tokens = plan.merge(hidden_states) if placement.merges_queries else hidden_states
            view = AttentionView(layer, placement, plan, tokens, hidden_states if keys_differ else None)
            output = self._forward_of(layer)(view, tokens, *args, **kwargs)
            view.check()
            if not placement.merges_queries:
                return output
        if isinstance(output, tuple):  # joint attention: image and text
            return plan.unmerge(output[0]), *output[1:]
        return plan.unmerge(output)

    def _forward_of(self, layer: nn.Layer) -> Any:
        """The function below this wrap, to which a view is passed as `self`."""
        wrapped = self.wrapped_forward
        if wrapped is None:
            return type(layer).forward
        if isinstance(wrapped, MethodType) and wrapped.__self__ is layer:
            return wrapped.__func__
        return lambda _view, *args, **kwargs: wrapped(*args, **kwargs)

    def _is_replaced(self, layer: nn.Layer) -> bool:
        """Whether another library had replaced the layer's `forward` when this wrap was installed."""
        wrapped = self.wrapped_forward
        return wrapped is not None and getattr(wrapped, "__func__", None) is not type(layer).forward

    def _can_compute(
        self,
        layer: nn.Layer,
        /,
        encoder_hidden_states: paddle.Tensor | None = None,
        attention_mask: paddle.Tensor | None = None,
        *_args: Any,
        **_kwargs: Any,
    ) -> bool:
        """Whether it is known how a layer computes its attention over these arguments."""
        is_known = encoder_hidden_states is None or self.placement.facts.text is not None
        is_known = is_known and attention_mask is None and not self._is_replaced(layer)
        return is_known and kernel_of(layer, self.placement.family) is not None

    def _compute(
        self,
        layer: nn.Layer,
        plan: MergePlan,
        hidden_states: paddle.Tensor,  # [B, N, C] of the image, or [B, T + N, C] of text and image
        /,
        encoder_hidden_states: paddle.Tensor | None = None,  # [B, T, C] of the text
        attention_mask: paddle.Tensor | None = None,  # [B, 1, 1, N + T], only in HunyuanVideo
        **others: Any,
    ) -> Any:
        """Compute what the layer's `forward` returns for these arguments, over merged image tokens.

        Text and image come back as they were passed: as a pair of image and text, as one sequence, or as the image
        alone. Here text comes first; the order of keys makes no difference.
        """
        placement, family = self.placement, self.placement.family
        names, facts = family.attention, placement.facts
        kernel = kernel_of(layer, family)
        rows = None if family.positions is None else others.pop(family.positions, None)
        if family.only_processor is not None:
            self._check(layer, kernel, attention_mask, others)
        assert kernel is not None
        text, image = encoder_hidden_states, hidden_states
        count = plan.kept if placement.merges_block else plan.tokens
        if text is None and image.shape[1] > count:
            text, image = image[:, :-count], image[:, -count:]
        queries, keys = self._merged(image, plan)
        length = 0 if text is None else text.shape[1]
        sizes = self._sizes(plan.keys, text)
        if attention_mask is not None:
            sizes = _with_mask(attention_mask, sizes, plan.keys, length)
        if sizes is not None and self._widens_weights(layer, kernel, text):
            image = wide_attention(layer, names, queries, keys, sizes)
            return plan.unmerge(image) if placement.merges_queries else image

        has_own_projections = encoder_hidden_states is not None and facts.text == "own projections"
        arguments = kernel.arguments(others)

        def heads(part: str, tokens: paddle.Tensor) -> paddle.Tensor:  # [B, T + N, heads, d]
            if text is not None and not has_own_projections:
                tokens = paddle.concat([text, tokens], axis=1)
            of_image = _project(layer, names, names.image, part, tokens, arguments)
            if not has_own_projections:
                return of_image
            return paddle.concat([_project(layer, names, names.text, part, text, arguments), of_image], axis=1)

        query, key, value = heads("q", queries), heads("k", keys), heads("v", keys)
        if rows is not None:
            table = rotary_table(rows, plan.tokens, length)
            query = rotate(query, rotary_of_merged(table, plan) if placement.merges_queries else table)
            key = rotate(key, rotary_of_merged(table, plan.keys))
        output = kernel(layer, query, key, value, getattr(layer, names.scale), sizes)
        output = output.reshape([0, 0, output.shape[2] * output.shape[3]])  # [B, T + N - r, heads·d]
        of_text, image = (None, output) if text is None else (output[:, :length], output[:, length:])
        out = () if facts.single_stream is not None else getattr(layer, names.image.out)
        image = _run_all(out, image, arguments)
        if placement.merges_queries and not placement.merges_block:
            image = plan.unmerge(image)
        if of_text is None:
            return image
        if encoder_hidden_states is None:
            return paddle.concat([of_text, image], axis=1)
        if has_own_projections:
            out = getattr(layer, names.text.out, None) or ()  # None in the last block, whose text output is unused
        return image, _run_all(out, of_text, arguments)

    def _merged(self, image: paddle.Tensor, plan: MergePlan) -> tuple[paddle.Tensor, paddle.Tensor]:
        """The image tokens of queries, and those of keys and values."""
        if self.placement.merges_block:  # merged before the layer
            return image, image
        keys = plan.keys.merge(image)
        if not self.placement.merges_queries:
            return image, keys
        return keys if plan.keys_plan is None else plan.merge(image), keys

    def _sizes(self, plan: MergePlan, text: paddle.Tensor | None) -> paddle.Tensor | None:  # [B, T + N - r]
        """What is added to the scores of keys: the logarithm of their sizes, which for text is 0; None: nothing."""
        needs_no_sizes = plan.has_equal_sizes and text is None
        if not self.placement.config.proportional or needs_no_sizes:
            return None
        if text is None:
            return plan.log_sizes
        return paddle.concat([paddle.zeros_like(text[:, :, 0], dtype="float32"), plan.log_sizes], axis=1)

    def _widens_weights(self, layer: nn.Layer, kernel: Kernel, text: paddle.Tensor | None) -> bool:
        """Whether sizes reach the scores by wider weights: in programs for GPUs, where nothing else is projected."""
        is_plain = text is None and type(kernel) is SoftmaxKernel
        return is_for_gpu() and is_plain and has_plain_projections(layer, self.placement.family.attention)

    def _check(self, layer: nn.Layer, kernel: Kernel | None, mask: Any, others: dict[str, Any]) -> None:
        """Raise ToMePassError unless the attention of a family with one processor is what this wrap computes."""
        family = self.placement.family
        unknown = [key for key, value in others.items() if value is not None]
        if mask is not None:
            is_of_text = mask.dtype == paddle.bool and mask.ndim == 4 and mask.shape[1:3] == [1, 1]
            unknown += [] if family.has_mask and is_of_text else ["attention_mask"]
        if kernel is None or unknown:
            name = type(layer.processor).__name__
            what = f"by {name}" if kernel is None else f"with the argument {unknown[0]}"
            raise ToMePassError(
                f"attention {what} cannot merge, only that of {family.only_processor} with its own arguments: set "
                "another attention processor, leave the argument out, or remove_tome() first."
            )
        if self._is_replaced(layer):
            raise ToMePassError(
                "another library has replaced the forward of an attention before apply_tome(), as enable_cache() "
                "does, and merging would leave that out: undo it, call apply_tome(), then repeat it."
            )
        if self.placement.merges_block and not is_outermost(layer):
            raise ToMePassError(
                "another library has replaced the forward of an attention, as enable_cache() does, and in this "
                "single-stream block it would see merged tokens, whose order changes from pass to pass: pass "
                'method="interlace" to apply_tome(), or undo it.'
            )


def _project(
    layer: nn.Layer,
    names: Attention,
    projections: Projections,  # those of `names` for image or text
    part: str,  # "q", "k" or "v"
    tokens: paddle.Tensor,  # [B, S, C]
    arguments: tuple[Any, ...],
) -> paddle.Tensor:  # [B, S, heads, d]
    """The heads of queries, keys or values, after their norm."""
    x = getattr(layer, getattr(projections, part))(tokens, *arguments)
    count = getattr(layer, names.heads)
    heads = [0, 0, count, x.shape[-1] // count]
    norm = None if part == "v" else getattr(layer, getattr(projections, f"norm_{part}"), None)
    if norm is None:
        return x.reshape(heads)
    if norm.weight is not None and norm.weight.shape[0] == x.shape[-1]:  # across heads, as in Wan
        return norm(x).reshape(heads)
    return norm(x.reshape(heads), **names.norm_arguments)


def _run_all(layers: Any, tokens: paddle.Tensor, arguments: tuple[Any, ...]) -> paddle.Tensor:
    """The output of a layer, or of several that run one after the other, of which the first gets the arguments."""
    if isinstance(layers, nn.Layer) and not isinstance(layers, (nn.LayerList, nn.Sequential)):
        return layers(tokens, *arguments)
    for layer in layers:
        tokens, arguments = layer(tokens, *arguments), ()
    return tokens


def _with_mask(
    mask: paddle.Tensor,  # [B, 1, 1, N + T]: true for keys that count; all image tokens do, which come first
    sizes: paddle.Tensor | None,  # [B, T + N - r]
    plan: MergePlan,
    text: int,
) -> paddle.Tensor:  # [B, T + N - r]: what is added to the scores
    """HunyuanVideo's mask of the text, beside the sizes of the merged image tokens."""
    of_text = (1 - cast(mask[:, 0, 0, -text:], paddle.float32)) * MASKED
    of_image = paddle.zeros_like(plan.log_sizes) if sizes is None else sizes[:, text:]
    return paddle.concat([of_text, of_image], axis=1)


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
