"""The oracle of attention with fewer keys: all queries, and keys and values of the tokens that remain, in float64.

Which tokens remain follows from `reference`, and text is left alone. Projections are those of the layer itself.
"""

from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from reference import dst_positions, interlaced

from ppdiffusers_tome.attach.attach import attached_placements
from ppdiffusers_tome.attach.attention import AttentionWrap
from ppdiffusers_tome.attach.computed import ComputedAttentionWrap
from ppdiffusers_tome.families.stream import Text
from ppdiffusers_tome.methods.interlace import PARTS, offset_of
from ppdiffusers_tome.methods.turns import turn_table


class Call(NamedTuple):
    """A call of a self-attention in a pass that merges."""

    layer: Any
    tokens: paddle.Tensor
    arguments: dict[str, Any]
    output: Any


@contextmanager
def calls_of_attention():
    """A list that gets each `Call` of a self-attention around which keys can be left out."""
    calls = []

    def recording(call):
        def record(wrap, layer, hidden_states, *args, **kwargs):
            output = call(wrap, layer, hidden_states, *args, **kwargs)
            arguments = {**dict(zip(("encoder_hidden_states", "attention_mask"), args, strict=False)), **kwargs}
            calls.append(Call(layer, hidden_states, arguments, output))
            return output

        return record

    with pytest.MonkeyPatch.context() as patch:
        for wrap in (AttentionWrap, ComputedAttentionWrap):
            patch.setattr(wrap, "__call__", recording(wrap.__call__))
        yield calls


def kept_tokens(block, placement, grid, timestep, frame=0):
    """The tokens of one frame that remain in a block; of todo at 0.75, with cells of 2×2."""
    if placement.config.method == "todo":
        return dst_positions(*grid, 2, 2)
    turn = 0 if timestep is None else int(turn_table()[timestep])
    return interlaced(*grid, round(PARTS * placement.share), turn + offset_of(block.index) + frame)


def check_calls(model, calls, grid, timestep=10, frames=1, keys_of=None, tolerance=5e-6):
    """Compare each call with the oracle, and check that all blocks that merge have made one.

    Args:
        model: the denoiser, which merges.
        calls: of one pass.
        grid: the token grid of its blocks.
        timestep: of the pass; None: it cannot be read.
        frames: frames of each video, whether they are one sequence or rows of the batch.
        keys_of: for each row of the batch that whose keys it attends to; None: each its own.
    """
    placed = attached_placements(model)
    layers = {id(layer): (block, placement) for block, placement in placed for layer in block.sublayers["attn"]}
    assert sorted(id(call.layer) for call in calls) == sorted(layers)
    for call in calls:
        block, placement = layers[id(call.layer)]
        tokens = frames * grid.tokens if block.family.has_frames else grid.tokens
        image, text = _split(call, block.spec.text, tokens)
        out, out_text = _split_output(call.output, block.spec.text, tokens)
        of_frames = [kept_tokens(block, placement, grid, timestep, frame) for frame in range(frames)]
        mask = call.arguments.get("attention_mask")
        for row in range(len(image)):
            kept = np.array(of_frames[row % frames])
            if block.family.has_frames:
                kept = np.concatenate([frame * grid.tokens + np.array(of) for frame, of in enumerate(of_frames)])
            expect = partial(
                attention,
                call.layer,
                image[row],
                None if text is None else text[row],
                image[row if keys_of is None else keys_of[row]],
                table=_table(call.arguments.get(block.family.positions)),
                mask=None if mask is None else mask[row, 0, 0, tokens:].numpy(),
            )
            (expected, expected_text), (plain, _) = expect(kept), expect(np.arange(tokens))
            np.testing.assert_allclose(out[row].numpy(), expected, atol=tolerance, err_msg=block.path)
            assert np.abs(out[row].numpy() - plain).max() > 10 * tolerance
            if out_text is not None:
                np.testing.assert_allclose(out_text[row].numpy(), expected_text, atol=tolerance, err_msg=block.path)
            assert (text is None) == (expected_text is None)


def _split(call, layout, tokens):
    """The image tokens and the text tokens that a call got."""
    given = call.tokens
    if layout is Text.FIRST:
        return given[:, -tokens:], given[:, :-tokens]
    if layout is Text.LAST:
        return given[:, :tokens], given[:, tokens:]
    return given, None if layout is None else call.arguments.get("encoder_hidden_states")


def _split_output(output, layout, tokens):
    if isinstance(output, tuple):
        return output
    if layout is Text.FIRST:
        return output[:, -tokens:], output[:, :-tokens]
    if layout is Text.LAST:
        return output[:, :tokens], output[:, tokens:]
    return output, None


def _table(rows):
    """The angles of rotary positions, as complex numbers [S, d / 2]."""
    if rows is None:
        return None
    if isinstance(rows, paddle.Tensor):
        return rows.numpy().reshape(-1, rows.shape[-1])
    cos, sin = (part.numpy().astype("float64") for part in rows)
    return cos[:, ::2] + 1j * sin[:, ::2]


@paddle.no_grad()
def attention(layer, image, text, keys_of, kept, table, mask):
    """Image and text [S, C] after an attention of one sequence.

    Args:
        layer: the attention.
        image, text: tokens [S, C]; text may be None.
        keys_of: the image [N, C] whose keys and values the image and the text attend to.
        kept: the tokens of it that remain.
        table: complex numbers by which queries and keys rotate, of the image or of text and image; or None.
        mask: [T], whether each text token counts; None: all do.
    """
    length = 0 if text is None else len(text)
    has_own = getattr(layer, "add_q_proj", None) is not None and text is not None
    of_image = table if table is None or len(table) == len(image) else table[length:]
    of_text = None if table is None or len(table) == len(image) else table[:length]
    query = _heads(layer, "to_q", "norm_q", image, of_image)
    key, value = _heads(layer, "to_k", "norm_k", keys_of, of_image)[kept], _heads(layer, "to_v", "", keys_of)[kept]
    # Beside text each key that remains stands for as many image keys as there were for each of them.
    counts = np.full(len(kept), 1.0 if text is None else len(keys_of) / len(kept))
    if text is not None:
        names = [(f"add_{n}_proj", f"norm_added_{n}") if has_own else (f"to_{n}", f"norm_{n}") for n in "qkv"]
        rows = (of_text, of_text, None)
        added = [_heads(layer, *name, text, table) for name, table in zip(names, rows, strict=True)]
        query, key, value = (np.concatenate(pair) for pair in zip(added, (query, key, value), strict=True))
        counts = np.concatenate([np.ones(length) if mask is None else mask, counts])
    weights = np.exp(np.einsum("qhd,khd->hqk", query, key) / np.sqrt(query.shape[2])) * counts
    out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value).reshape(len(query), -1)
    out_image, out_text = out[length:], out[:length] if length else None
    if getattr(layer, "to_out", None) is not None:
        out_image = _project(layer.to_out[0], out_image)
        if text is not None and not has_own:
            out_text = _project(layer.to_out[0], out_text)
    if has_own and getattr(layer, "to_add_out", None) is not None:
        out_text = _project(layer.to_add_out, out_text)
    return out_image, out_text


def _project(layer, x):
    x = x if isinstance(x, paddle.Tensor) else paddle.to_tensor(x.astype("float32"))
    return layer(x.unsqueeze(0))[0].numpy().astype("float64")


def _normalized(layer, x):
    """The norm of a layer over the last axis."""
    if isinstance(layer, paddle.nn.LayerNorm):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + layer._epsilon)
        return x * layer.weight.numpy() + layer.bias.numpy()
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * layer.weight.numpy()


def _heads(layer, projection, norm, x, table=None):
    """[S, heads, d] of one sequence: projected, normalized and rotated."""
    x = _project(getattr(layer, projection), x)
    norm = getattr(layer, norm, None)
    is_across = norm is not None and len(norm.weight) == x.shape[1]
    x = (_normalized(norm, x) if is_across else x).reshape(len(x), layer.heads, -1)
    x = _normalized(norm, x) if norm is not None and not is_across else x
    if table is not None:
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * table[:, None]
        x = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    return x
