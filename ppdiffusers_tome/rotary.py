"""FLUX: attention whose tokens have rotary positions, and blocks in which attention and MLP are one (single-stream).

A merged token has the position of its dst: interpolated positions break attention (arXiv:2511.19778). The attention is
computed here and not by its processor, which rotates all images of a batch by the same rows.
"""

import math
from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from .attention import FUSED_CHANNELS, split_heads, widen
from .config import KV, ToMeConfig
from .errors import ToMePassError
from .matching import MergePlan, cast
from .merging import gather_rows, merge, unmerge
from .wraps import BlockWrap, Wrap, current_plan

Rows = tuple[paddle.Tensor, paddle.Tensor]  # cosines and sines, [T + N, d] each: text before image


class SingleStreamWrap(BlockWrap):
    """Of a block whose tokens are text and image in one sequence [B, T + N, C]: the plan is that of the image."""

    def build_plan(self, metric: paddle.Tensor) -> MergePlan | None:
        """See `BlockWrap.build_plan`."""
        return super().build_plan(metric[:, -self.grid.grid().tokens :])


class ImagePartWrap(Wrap):
    """Of a layer in a single-stream block that the image tokens enter or leave: merge, or unmerge, them after it.

    Args:
        config: the settings of the denoiser.
        merges: whether they merge; otherwise they are unmerged.
        index: of the tokens in the layer's output; None if it returns them alone.
    """

    config: ToMeConfig

    def __init__(self, config: ToMeConfig, merges: bool, index: int | None) -> None:
        super().__init__(config)
        self._merges, self._index = merges, index

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        plan, output = current_plan(), self.forward(layer, *args, **kwargs)
        if plan is None:
            return output
        if self._index is None:
            return self._moved(output, plan)
        parts = list(output)
        parts[self._index] = self._moved(parts[self._index], plan)
        return tuple(parts)

    def _moved(self, tokens: paddle.Tensor, plan: MergePlan) -> paddle.Tensor:
        if self._merges:
            return image_part(tokens, plan.tokens, lambda image: merge(image, plan, self.config.blend))
        return image_part(tokens, plan.kept, lambda image: unmerge(image, plan))


class RotaryAttentionWrap(Wrap):
    """Of an attention of FLUX: compute it on merged image tokens, or with `merge_attn="kv"` with merged keys.

    Args:
        config: the settings of the denoiser.
        is_merged: whether the image tokens that it gets are merged already, and stay so.
    """

    config: ToMeConfig

    def __init__(self, config: ToMeConfig, is_merged: bool = False) -> None:
        super().__init__(config)
        self._is_merged = is_merged

    def __call__(
        self,
        layer: nn.Layer,
        hidden_states: paddle.Tensor,
        encoder_hidden_states: paddle.Tensor | None = None,
        attention_mask: paddle.Tensor | None = None,
        image_rotary_emb: Rows | None = None,
        **others: Any,
    ) -> Any:
        plan = current_plan()
        if plan is None:
            named = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb, **others}
            return self.forward(layer, hidden_states, encoder_hidden_states, **named)
        _check(layer, attention_mask, image_rotary_emb, others)
        assert image_rotary_emb is not None
        config, text = self.config, encoder_hidden_states
        keys_only = config.merge_attn == KV
        image = hidden_states
        if text is None:  # one sequence
            count = plan.kept if self._is_merged else plan.tokens
            text, image = hidden_states[:, :-count], hidden_states[:, -count:]
        merged = image if self._is_merged else merge(image, plan, config.blend)
        merged_rows = rotary_rows(image_rotary_emb, plan)
        queries, query_rows = (image, image_rotary_emb) if keys_only else (merged, merged_rows)

        is_joint = encoder_hidden_states is not None  # then text has projections of its own

        def heads(name: str, image: paddle.Tensor) -> paddle.Tensor:  # [B, T + N, heads, d]
            own = _heads(layer, f"to_{name}", f"norm_{name}", image if is_joint else paddle.concat([text, image], 1))
            if not is_joint:
                return own
            return paddle.concat([_heads(layer, f"add_{name}_proj", f"norm_added_{name}", text), own], axis=1)

        query, key = rotate(heads("q", queries), query_rows), rotate(heads("k", merged), merged_rows)
        value = heads("v", merged)
        sizes = plan.log_sizes() if config.proportional else None
        output = attend(query, key, value, layer.scale, sizes).flatten(2)  # [B, T + N - r, heads·d]
        text, image = output[:, : text.shape[1]], output[:, text.shape[1] :]
        if is_joint:
            for part in layer.to_out:
                image = part(image)
            text = layer.to_add_out(text)
        if not keys_only and not self._is_merged:
            image = unmerge(image, plan)
        return (image, text) if is_joint else paddle.concat([text, image], axis=1)


def image_part(tokens: paddle.Tensor, count: int, move: Callable[[paddle.Tensor], paddle.Tensor]) -> paddle.Tensor:
    """Apply a function to the last `count` tokens of a sequence [B, T + count, C], the image's."""
    return paddle.concat([tokens[:, :-count], move(tokens[:, -count:])], axis=1)


def rotary_rows(rows: Rows, plan: MergePlan) -> Rows:  # [B, T + N - r, d] each
    """The rotary rows of the tokens that `merge` returns: those of their dst, after those of the text."""
    positions = paddle.reshape(plan.dst_rows % plan.tokens, [-1, plan.dst])
    if plan.stay_rows is not None:
        stay = paddle.reshape(plan.stay_rows % plan.tokens, [-1, plan.kept - plan.dst])
        positions = paddle.concat([positions, stay], axis=1)
    batch = positions.shape[0]
    moved = []
    for table in rows:
        text = table[: -plan.tokens].unsqueeze(0).expand([batch, -1, -1])
        image = gather_rows(table[-plan.tokens :], positions.flatten()).reshape([batch, plan.kept, -1])
        moved.append(paddle.concat([text, image], axis=1))
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
    sizes: paddle.Tensor | None,  # [B, M]: logarithms that are added to the scores of the last M keys
) -> paddle.Tensor:  # [B, S, heads, d]
    """Attention. Sizes are 8 more channels in each head, so that a fused kernel stays on its fastest path."""
    width = query.shape[-1]
    if sizes is not None:
        wide = width + FUSED_CHANNELS
        channel = paddle.concat([paddle.zeros_like(key[:, : -sizes.shape[1], 0, 0]), cast(sizes, key.dtype)], axis=1)
        query = widen(query * (scale * math.sqrt(wide)), math.sqrt(wide), FUSED_CHANNELS)
        key = widen(key, channel.unsqueeze([2, 3]), FUSED_CHANNELS)
        value = widen(value, 0.0, FUSED_CHANNELS)
    else:
        query = query * (scale * math.sqrt(width))
    return F.scaled_dot_product_attention(query, key, value)[..., :width]


def _heads(layer: nn.Layer, projection: str, norm: str, tokens: paddle.Tensor) -> paddle.Tensor:  # [B, S, heads, d]
    x = split_heads(getattr(layer, projection)(tokens), layer.heads)
    normalize = getattr(layer, norm, None)
    return x if normalize is None else normalize(x)


def _check(layer: nn.Layer, mask: Any, rows: Any, others: dict[str, Any]) -> None:
    """Raise ToMePassError unless the attention is what `RotaryAttentionWrap` computes."""
    name = type(layer.processor).__name__
    unknown = [key for key, value in {"attention_mask": mask, **others}.items() if value is not None]
    if name != "FluxAttnProcessor2_0" or rows is None or unknown:
        what = f"with the argument {unknown[0]}" if unknown else f"by {name}"
        raise ToMePassError(
            f"an attention of FLUX {what} cannot merge, only that of FluxAttnProcessor2_0 with image_rotary_emb: "
            "leave it out, or remove_tome() first."
        )
