"""A family that is not ppdiffusers': a U-ViT with text and image in one sequence, described by an entry alone."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import traces
from kept_keys import calls_of_attention, check_calls
from paddle import nn
from zoo.noise import noise

from ppdiffusers_tome import Grid, ToMeConfigError, apply_tome, remove_tome
from ppdiffusers_tome.families import blocks
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.families.stream import Text
from ppdiffusers_tome.families.table import Attention, BlockSpec, Family

WIDTH, HEADS, TEXT = 32, 2, 7
GRID = Grid(8, 12)


class OwnAttention(nn.Layer):
    """Attention without a processor, of projections that are apart or fused."""

    def __init__(self, is_fused):
        super().__init__()
        self.heads, self.scale, self.is_fused = HEADS, (WIDTH // HEADS) ** -0.5, is_fused
        for name in ("qkv",) if is_fused else ("to_q", "to_k", "to_v"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH * (3 if is_fused else 1)))
        self.to_out = nn.LayerList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, hidden_states):
        x = hidden_states
        parts = self.qkv(x).chunk(3, axis=-1) if self.is_fused else (self.to_q(x), self.to_k(x), self.to_v(x))
        query, key, value = (y.reshape([0, -1, HEADS, WIDTH // HEADS]).transpose([0, 2, 1, 3]) for y in parts)
        weights = nn.functional.softmax(query @ key.transpose([0, 1, 3, 2]) * self.scale, axis=-1)
        return self.to_out[0]((weights @ value).transpose([0, 2, 1, 3]).flatten(2))


class UBlock(nn.Layer):
    """A block; those of the second half get the output of one of the first half too."""

    def __init__(self, is_fused, has_skip):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), OwnAttention(is_fused)
        self.skip = nn.Linear(2 * WIDTH, WIDTH) if has_skip else None

    def forward(self, x, skip=None):
        x = x if skip is None else self.skip(paddle.concat([x, skip], axis=-1))
        return x + self.attn(self.norm(x))


class UViT(nn.Layer):
    def __init__(self, layout, is_fused=False):
        super().__init__()
        self.is_first = layout is Text.FIRST
        self.patches, self.text = nn.Conv2D(4, WIDTH, 2, stride=2), nn.Linear(6, WIDTH)
        self.in_blocks = nn.LayerList([UBlock(is_fused, False) for _ in range(2)])
        self.mid_block = UBlock(is_fused, False)
        self.out_blocks = nn.LayerList([UBlock(is_fused, True) for _ in range(2)])

    def forward(self, latents, text):
        image, text = self.patches(latents).flatten(2).transpose([0, 2, 1]), self.text(text)
        x, skips = paddle.concat([text, image] if self.is_first else [image, text], axis=1), []
        for block in self.in_blocks:
            skips.append(x := block(x))
        x = self.mid_block(x)
        for block in self.out_blocks:
            x = block(x, skips.pop())
        return SimpleNamespace(sample=x[:, TEXT:] if self.is_first else x[:, :-TEXT])


def make(monkeypatch, layout=Text.LAST, is_fused=False, block=None, **facts):
    """A model and its entry in the table, with other facts if some are given."""
    paddle.seed(0)
    model = UViT(layout, is_fused)
    model.eval()
    described = {"attn": ("attn",), "crossattn": (), "mlp": (), "tokens": "x", "text": layout, "gets_text": layout}
    entry = {
        "name": "U-ViT",
        "transformers": (UViT,),
        "blocks": {UBlock: BlockSpec(**{**described, **(block or {})})},
        "grid_layers": ("patches",),
        "block_lists": ("in_blocks", "mid_block", "out_blocks"),
        "attention": Attention(processor=None),
        "only_processor": "OwnAttention",
        **facts,
    }
    monkeypatch.setattr(blocks, "FAMILIES", [*blocks.FAMILIES, Family(**entry)])
    return model


@paddle.no_grad()
def run(model, seed=0):
    latents = noise(2, 4, 2 * GRID.h, 2 * GRID.w, seed=seed)
    return model(latents, noise(2, TEXT, 6, seed=seed + 1)).sample.numpy()


@pytest.mark.parametrize("layout", [Text.FIRST, Text.LAST])
@pytest.mark.parametrize("method", ["interlace", "todo"])
def test_an_entry_is_enough(layout, method, monkeypatch):
    """Plain, merged and removed; each attention is that over the keys that remain, and the text is left alone."""
    model = make(monkeypatch, layout)
    plain, before = run(model), traces(model)
    assert [block.path for block in find_blocks(model)] == [
        "in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1"
    ]  # fmt: skip
    apply_tome(model, method=method)
    with calls_of_attention() as calls:
        merged = run(model)
    check_calls(model, calls, GRID, timestep=None)
    assert np.abs(merged - plain).max() > 1e-4
    np.testing.assert_array_equal(run(remove_tome(model)), plain)
    assert traces(model) == before


def test_fused_projections_are_refused_when_merging_is_applied(monkeypatch):
    model = make(monkeypatch, is_fused=True)
    plain, before = run(model), traces(model)
    with pytest.raises(ToMeConfigError, match=r"OwnAttention .*in_blocks\.0 .*to_k.*to_v"):
        apply_tome(model)
    np.testing.assert_array_equal(run(remove_tome(model)), plain)
    assert traces(model) == before


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"block": {"text": Text.SHARED_PROJECTIONS, "gets_text": None}}, "rotary"),
        ({"only_processor": None}, r"shares a softmax .*only_processor"),
        ({"has_frames": True}, "FIRST or LAST, and of images"),
        ({"block": {"gets_text": Text.OWN_PROJECTIONS}}, "FIRST or LAST"),
        ({"grid_layers": ("patch_embed",)}, r"UViT .*patch_embed.*grid_layers"),
    ],
    ids=str,
)
def test_an_entry_that_no_wrap_knows_is_an_error_when_merging_is_applied(facts, message, monkeypatch):
    model = make(monkeypatch, **facts)
    plain, before = run(model), traces(model)
    with pytest.raises(ToMeConfigError, match=rf"{message}.*'U-ViT'"):
        apply_tome(model)
    np.testing.assert_array_equal(run(remove_tome(model)), plain)
    assert traces(model) == before
