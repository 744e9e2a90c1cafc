"""FLUX, CogVideoX, Wan and HunyuanVideo: attention over one sequence of text and image, with rotary positions.

A merged token has the position of its dst: interpolated positions break attention (arXiv:2511.19778). The attention is
computed here and not by its processor, which rotates all images of a batch by the same rows. In a video the image is
all frames. Internally text always comes first; the order of keys makes no difference.
"""

import math
from collections.abc import Iterable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from .attention import FUSED_CHANNELS, split_heads, widen
from .config import KV, ToMeConfig
from .errors import ToMePassError
from .merging import merge, unmerge
from .models import BlockFacts
from .plans import MergePlan, cast, gather
from .wraps import InnerWrap, is_outermost

Rows = tuple[paddle.Tensor, paddle.Tensor]  # cosines and sines, [T + N, d] each: text before image
MASKED = -1e4  # added to the scores of masked keys: their weight is 0, and no kernel multiplies 0 by infinity


class RotaryAttentionWrap(InnerWrap):
    """Wrap of an attention over an image, or text and an image: compute it on merged image tokens.

    With merge_attn="asymmetric" or "kv", keys and values have their own plan. The text is an argument, with or without
    its own projections, or the first part of the sequence (in FLUX's single-stream blocks), or absent (in Wan).

    Args:
        config: the settings of the denoiser.
        facts: the facts of the block around the attention.
        is_merged: whether the image tokens that it gets are merged already, and stay so.
    """

    config: ToMeConfig

    def __init__(self, config: ToMeConfig, facts: BlockFacts, is_merged: bool = False) -> None:
        super().__init__(config)
        self._facts = facts
        self._is_merged = is_merged

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan()
        if plan is None:
            return self.forward(layer, hidden_states, *args, **kwargs)
        return self._attend_merged(layer, plan, hidden_states, *args, **kwargs)

    def _attend_merged(
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
        alone. Arguments that the attention does not know raise ToMePassError, or TypeError as in any call.
        """
        config, text, image = self.config, encoder_hidden_states, hidden_states
        rows = others.pop("rotary_emb" if "rotary_emb" in others else "image_rotary_emb", None)
        self._check(layer, attention_mask, others)
        keys_only = config.merge_attn == KV
        returns_text = text is not None
        count = plan.kept if self._is_merged else plan.tokens
        if text is None and hidden_states.shape[1] > count:
            text, image = hidden_states[:, :-count], hidden_states[:, -count:]
        length = 0 if text is None else text.shape[1]
        keys = image if self._is_merged else merge(image, plan.keys)
        is_same = self._is_merged or plan.keys_plan is None
        queries = image if keys_only else keys if is_same else merge(image, plan)
        has_own = returns_text and self._facts.is_joint  # projections of the text

        def heads(name: str, image: paddle.Tensor) -> paddle.Tensor:  # [B, T + N, heads, d]
            if text is None:
                return _heads(layer, f"to_{name}", f"norm_{name}", image)
            if not has_own:
                return _heads(layer, f"to_{name}", f"norm_{name}", paddle.concat([text, image], axis=1))
            own = _heads(layer, f"add_{name}_proj", f"norm_added_{name}", text)
            return paddle.concat([own, _heads(layer, f"to_{name}", f"norm_{name}", image)], axis=1)

        query, key, value = heads("q", queries), heads("k", keys), heads("v", keys)
        if rows is not None:
            table = rotary_table(rows, plan.tokens, length)
            of_keys = rotary_rows(table, plan.keys)
            query = rotate(query, table if keys_only else of_keys if is_same else rotary_rows(table, plan))
            key = rotate(key, of_keys)
        is_alike = text is None and plan.keys.has_equal_sizes
        added = plan.keys.log_sizes if config.proportional and not is_alike else None
        if attention_mask is not None:
            added = _masked(attention_mask, added, plan.keys, length)
        output = attend(query, key, value, layer.scale, added).flatten(2)  # [B, T + N - r, heads·d]
        image = output
        if text is not None:
            text, image = output[:, :length], output[:, length:]
        out = () if self._facts.is_single_stream else layer.to_out
        image = _in_turn(out, image)
        if not keys_only and not self._is_merged:
            image = unmerge(image, plan)
        if text is None:
            return image
        if not returns_text:
            return paddle.concat([text, image], axis=1)
        if has_own:
            to_add_out = getattr(layer, "to_add_out", None)  # None in a last block, whose text goes nowhere
            return image, text if to_add_out is None else to_add_out(text)
        return image, _in_turn(out, text)

    def _check(self, layer: nn.Layer, mask: Any, others: dict[str, Any]) -> None:
        """Raise ToMePassError unless the attention is what this wrap computes."""
        name, expected = type(layer.processor).__name__, self._facts.rotary_processor
        unknown = [key for key, value in others.items() if value is not None]
        if mask is not None:
            is_of_text = mask.dtype == paddle.bool and mask.ndim == 4 and mask.shape[1:3] == [1, 1]
            unknown += [] if self._facts.has_mask and is_of_text else ["attention_mask"]
        if name != expected or unknown:
            what = f"with the argument {unknown[0]}" if name == expected else f"by {name}"
            raise ToMePassError(
                f"attention {what} cannot merge, only that of {expected} with its own arguments: set "
                "another attention processor, leave the argument out, or remove_tome() first."
            )
        if self.below is not None and getattr(self.below, "__func__", None) is not type(layer).forward:
            raise ToMePassError(
                "another library has replaced the forward of an attention before apply_tome(), as enable_cache() "
                "does, and merging would leave that out: undo it, call apply_tome(), then repeat it."
            )
        if self._is_merged and not is_outermost(layer):
            raise ToMePassError(
                "another library has replaced the forward of an attention, as enable_cache() does, and in this "
                "single-stream block it would see merged tokens, whose order changes from pass to pass: pass "
                'merge_attn="kv" to apply_tome(), or undo it.'
            )


def rotary_table(rows: Any, image: int, text: int) -> Rows:
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
        still = paddle.zeros_like(sin[:1]).expand([text, -1])
        cos, sin = paddle.concat([still + 1, cos]), paddle.concat([still, sin])
    return cos, sin


def rotary_rows(rows: Rows, plan: MergePlan) -> Rows:  # [B, T + N - r, d] each
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
    rows: Rows,  # [S, d] or [B, S, d] each
) -> paddle.Tensor:
    """Rotate pairs of neighbouring channels by the angles of each token, in float32."""
    cos, sin = (table.unsqueeze(-2) for table in rows)  # over heads
    wide = cast(x, paddle.float32)
    pairs = wide.reshape([*x.shape[:-1], -1, 2])
    turned = paddle.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).flatten(-2)
    return cast(wide * cos + turned * sin, x.dtype)


def attend(
    query: paddle.Tensor,  # [B, S, heads, d]
    key: paddle.Tensor,  # [B, K, heads, d]
    value: paddle.Tensor,  # [B, K, heads, d]
    scale: float,
    added: paddle.Tensor | None,  # [B, M]: what is added to the scores of the last M keys
) -> paddle.Tensor:  # [B, S, heads, d]
    """Attention. What is added is 8 more channels in each head, so that a fused kernel stays on its fastest path."""
    width = query.shape[-1]
    if added is not None:
        wide = width + FUSED_CHANNELS
        channel = cast(added, key.dtype)
        if added.shape[1] < key.shape[1]:
            channel = paddle.concat([paddle.zeros_like(key[:, : -added.shape[1], 0, 0]), channel], axis=1)
        query = widen(query * (scale * math.sqrt(wide)), math.sqrt(wide), FUSED_CHANNELS)
        key = widen(key, channel.unsqueeze([2, 3]), FUSED_CHANNELS)
        value = widen(value, 0.0, FUSED_CHANNELS)
    else:
        query = query * (scale * math.sqrt(width))
    return F.scaled_dot_product_attention(query, key, value)[..., :width]


def _heads(layer: nn.Layer, projection: str, norm: str, tokens: paddle.Tensor) -> paddle.Tensor:  # [B, S, heads, d]
    x, normalize = getattr(layer, projection)(tokens), getattr(layer, norm, None)
    if normalize is None:
        return split_heads(x, layer.heads)
    if normalize.weight is not None and normalize.weight.shape[0] == x.shape[-1]:  # across heads, as in Wan
        return split_heads(normalize(x), layer.heads)
    return normalize(split_heads(x, layer.heads))


def _in_turn(layers: Iterable[nn.Layer], tokens: paddle.Tensor) -> paddle.Tensor:
    """Run the layers one after the other, each on the output of the one before."""
    for layer in layers:
        tokens = layer(tokens)
    return tokens


def _masked(
    mask: paddle.Tensor,  # [B, 1, 1, N + T]: true for keys that count; all image tokens do, which come first
    sizes: paddle.Tensor | None,  # [B, N - r]
    plan: MergePlan,
    text: int,
) -> paddle.Tensor:  # [B, T + N - r]: what is added to the scores
    """HunyuanVideo's mask of the text, beside the sizes of the merged image tokens."""
    of_text = (1 - cast(mask[:, 0, 0, -text:], paddle.float32)) * MASKED
    if sizes is None:
        sizes = paddle.zeros_like(plan.log_sizes)
    return paddle.concat([of_text, sizes], axis=1)
