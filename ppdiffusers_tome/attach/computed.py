"""Attention with fewer keys that is computed here, as the processor of the family computes it.

Processors of FLUX, CogVideoX, Wan and HunyuanVideo rotate keys after their projection, by one table for queries and
keys: here by the rows of the table of those keys that remain.

Where text and image share a softmax, as in Stable Diffusion 3 too, the image keys that remain stand for those that are
left out: log(N / K) is added to their scores. Otherwise each text key would weigh N / K times as much as it should, in
the same direction in every step.
"""

import inspect
import math
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from ..errors import ToMePassError
from ..families.blocks import MergeableBlock
from ..families.stream import Stream, Text, join, split
from ..families.table import Attention, Projections
from ..methods.plan import MergePlan
from ..tensors import cast
from .block import InnerWrap

CHANNELS = 8  # that heads get in addition: kernels of attention want a multiple of it
MASKED = -1e4  # added to the scores of masked keys: their weight is 0, and no kernel multiplies 0 by infinity
CosSin = tuple[paddle.Tensor, paddle.Tensor]  # cosines and sines, [T + N, d] each: text before image


class ComputedAttentionWrap(InnerWrap):
    """Wrap of a self-attention of one image, or of text and image: compute it with the keys that remain.

    Args:
        block: the block.
        name: of `LAYERS`.
    """

    def __init__(self, block: MergeableBlock, name: str) -> None:
        super().__init__(block.layer, name)
        self._family, self._spec = block.family, block.spec

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan()
        if plan is None:
            return self.forward(layer, *args, **kwargs)
        return self._compute(layer, plan, *args, **kwargs)

    def _compute(
        self,
        layer: nn.Layer,
        plan: MergePlan,
        /,
        hidden_states: paddle.Tensor,  # [B, N, C] of the image, or of text and image
        encoder_hidden_states: paddle.Tensor | None = None,  # [B, T, C] of the text
        attention_mask: paddle.Tensor | None = None,  # [B, 1, 1, N + T], only in HunyuanVideo: false for unused text
        **further: Any,
    ) -> Any:
        """What the layer's `forward` returns for these arguments, with fewer keys."""
        rows = further.pop(self._family.positions or "", None)
        self._check(layer, attention_mask, further)
        names, layout = self._family.attention, self._spec.text
        stream = split(layout, hidden_states, plan.tokens, encoder_hidden_states)
        keys = Stream(plan.merge(stream.image), stream.text)
        query, key, value = (
            _heads(layer, names, layout, part, tokens) for part, tokens in (("q", stream), ("k", keys), ("v", keys))
        )
        if rows is not None:
            table = rotary_table(rows, plan.tokens, stream.length)
            query, key = rotate(query, table), rotate(key, rotary_of_keys(table, plan, stream.length))
        # The kernel divides by the root of the width, whatever the scale of the layer is.
        if not math.isclose(factor := getattr(layer, names.scale) * math.sqrt(query.shape[-1]), 1):
            query = query * factor
        output = _attend(query, key, value, _scores_of_keys(attention_mask, plan, stream), attention_mask is not None)
        output = output.reshape([0, 0, output.shape[2] * output.shape[3]])
        of_text, of_image = output[:, : stream.length], output[:, stream.length :]
        return join(layout, self._outputs(layer, names, Stream(of_image, of_text if stream.length else None)))

    def _outputs(self, layer: nn.Layer, names: Attention, stream: Stream) -> Stream:
        """Image and text after the projections of the output."""
        out = getattr(layer, names.image.out, None) or ()  # None where the block projects it
        of_text = out
        if self._spec.text is Text.OWN_PROJECTIONS:
            of_text = getattr(layer, names.text.out, None) or ()  # None in the last block, whose text is not used
        text = None if stream.text is None else _run_all(of_text, stream.text)
        return Stream(_run_all(out, stream.image), text)

    def _check(self, layer: nn.Layer, mask: Any, further: dict[str, Any]) -> None:
        """Raise ToMePassError unless the attention is what this wrap computes."""
        family = self._family
        unknown = [key for key, value in further.items() if value is not None]
        if mask is not None:
            is_of_text = mask.dtype == paddle.bool and mask.ndim == 4 and mask.shape[1:3] == [1, 1]
            unknown += [] if family.has_mask and is_of_text else ["attention_mask"]
        processor = type(family.attention.computed_by(layer)).__name__
        if processor != family.only_processor or unknown:
            what = f"with the argument {unknown[0]}" if processor == family.only_processor else f"by {processor}"
            raise ToMePassError(
                f"attention {what} cannot merge, only that of {family.only_processor} with its own arguments: set "
                "that processor, do not fuse projections, leave the argument out, or remove_tome() first."
            )
        wrapped = self.wrapped_forward
        if wrapped is not None and getattr(wrapped, "__func__", None) is not type(layer).forward:
            raise ToMePassError(
                "another library has replaced the forward of an attention before apply_tome(), as enable_cache() "
                "does, and merging would leave that out: undo it, call apply_tome(), then repeat it."
            )


def _heads(layer: nn.Layer, names: Attention, layout: Text | None, part: str, stream: Stream) -> paddle.Tensor:
    """Queries, keys or values [B, T + N, heads, d] of text and image, text first."""
    if stream.text is None:
        return _project(layer, names, names.image, part, stream.image)
    if layout is Text.OWN_PROJECTIONS:
        of_text = _project(layer, names, names.text, part, stream.text)
        return paddle.concat([of_text, _project(layer, names, names.image, part, stream.image)], axis=1)
    return _project(layer, names, names.image, part, paddle.concat([stream.text, stream.image], axis=1))


def _project(
    layer: nn.Layer,
    names: Attention,
    projections: Projections,  # those of `names` for image or text
    part: str,  # "q", "k" or "v"
    tokens: paddle.Tensor,  # [B, S, C]
) -> paddle.Tensor:  # [B, S, heads, d]
    """The heads of queries, keys or values, after their norm."""
    x = getattr(layer, getattr(projections, part))(tokens)
    count = getattr(layer, names.heads)
    heads = [0, 0, count, x.shape[-1] // count]
    norm = None if part == "v" else getattr(layer, getattr(projections, f"norm_{part}"), None)
    if norm is None:
        return x.reshape(heads)
    if norm.weight is not None and norm.weight.shape[0] == x.shape[-1]:  # across heads, as in Wan
        return norm(x).reshape(heads)
    # Norms of ppdiffusers after 0.29 have an argument for the first axis that they normalize.
    has_axis = "begin_norm_axis" in inspect.signature(norm.forward).parameters
    return norm(x.reshape(heads), **({"begin_norm_axis": 3} if has_axis else {}))


def _run_all(layers: Any, tokens: paddle.Tensor) -> paddle.Tensor:
    """The output of a layer, or of several that run one after the other."""
    if isinstance(layers, nn.Layer) and not isinstance(layers, (nn.LayerList, nn.Sequential)):
        return layers(tokens)
    for layer in layers:
        tokens = layer(tokens)
    return tokens


def _scores_of_keys(
    mask: paddle.Tensor | None,  # [B, 1, 1, N + T]: true for keys that count; all image tokens do, which come first
    plan: MergePlan,
    stream: Stream,
) -> paddle.Tensor | None:  # [B or 1, 1, 1, T + K]
    """What is added to the scores of text and image; None where there is no text."""
    if stream.text is None:
        return None
    ones = plan.rows(paddle.ones([plan.tokens, 1])).reshape([1, 1, 1, -1])  # a program may not know K
    of_image = ones * (math.log(plan.tokens) - paddle.log(ones.sum()))
    if mask is None:
        of_text = paddle.zeros([1, 1, 1, stream.length])
    else:
        of_text = (1 - cast(mask[..., -stream.length :], paddle.float32)) * MASKED
        of_image = of_image.expand([mask.shape[0], -1, -1, -1])
    return paddle.concat([of_text, of_image], axis=-1)


def _attend(
    query: paddle.Tensor,  # [B, T + N, heads, d]
    key: paddle.Tensor,  # [B, T + K, heads, d]
    value: paddle.Tensor,
    scores: paddle.Tensor | None,  # of `_scores_of_keys`
    is_masked: bool,
) -> paddle.Tensor:  # [B, T + N, heads, d]
    """Attention with numbers that are added to the scores of keys.

    Where these are no mask, further channels of queries and keys carry them: on a CPU a mask takes 1.9 times as long,
    and the channels an eighth more (benchmarks/joint_attention.py), and kernels without masks run them too.
    """
    width = query.shape[-1]
    if scores is None:
        output = F.scaled_dot_product_attention(query, key, value)
    elif is_masked:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=cast(scores, query.dtype))
    else:
        wide = width + CHANNELS
        of_keys = cast(scores * math.sqrt(wide), key.dtype).reshape([1, -1, 1, 1]) * paddle.ones_like(key[..., :1])
        rest = CHANNELS - 1
        key = paddle.concat([key, of_keys, paddle.zeros_like(key[..., :rest])], axis=-1)
        ones, zeros = paddle.ones_like(query[..., :1]), paddle.zeros_like(query[..., :rest])
        query = paddle.concat([query * math.sqrt(wide / width), ones, zeros], axis=-1)
        value = paddle.concat([value, paddle.zeros_like(value[..., :CHANNELS])], axis=-1)  # kernels want equal widths
        output = F.scaled_dot_product_attention(query, key, value)[..., :width]
    return cast(output, query.dtype)


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


def rotary_of_keys(table: CosSin, plan: MergePlan, text: int) -> CosSin:  # [T + K, d] each
    """The rotary rows of the text and of the image tokens that remain, which keep their positions."""
    moved = []
    for rows in table:
        image = plan.rows(rows[text:])
        moved.append(paddle.concat([rows[:text], image]) if text else image)
    return moved[0], moved[1]


def rotate(
    x: paddle.Tensor,  # [B, S, heads, d]
    rows: CosSin,  # [S, d] each
) -> paddle.Tensor:
    """Rotate pairs of neighbouring channels by the angles of each token, in float32."""
    cos, sin = (table.unsqueeze(-2) for table in rows)  # over heads
    wide = cast(x, paddle.float32)
    pairs = wide.reshape([0, 0, 0, x.shape[-1] // 2, 2])  # S may be unknown in a program
    rotated = paddle.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).flatten(-2)
    return cast(wide * cos + rotated * sin, x.dtype)
