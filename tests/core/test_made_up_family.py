"""A new family is one entry of the table: a made-up U-ViT with names of its own, text and image in one sequence."""

from types import SimpleNamespace

import kept_keys
import numpy as np
import paddle
import pytest
from conftest import traces
from kept_keys import calls_of_attention, check_calls
from paddle import nn
from zoo.noise import noise

from ppdiffusers_tome import (
    Grid,
    NoMergeableLayerError,
    ToMeConfigError,
    apply_tome,
    remove_tome,
    tome_summary,
)
from ppdiffusers_tome.families.stream import Text
from ppdiffusers_tome.families.table import FAMILIES, Attention, BlockSpec, Family, Projections
from ppdiffusers_tome.methods import METHODS

WIDTH, HEADS, TEXT = 32, 2, 7
GRID = Grid(8, 12)


class OwnAttention(nn.Layer):
    """Attention without a processor, of projections that are apart or fused; no part has a name of ppdiffusers."""

    def __init__(self, is_fused):
        super().__init__()
        self.count, self.factor, self.is_fused = HEADS, (WIDTH // HEADS) ** -0.5, is_fused
        for name in ("all_three",) if is_fused else ("ask", "offer", "content"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH * (3 if is_fused else 1)))
        self.collect = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states):
        x = hidden_states
        parts = self.all_three(x).chunk(3, axis=-1) if self.is_fused else (self.ask(x), self.offer(x), self.content(x))
        query, key, value = (y.reshape([0, -1, HEADS, WIDTH // HEADS]).transpose([0, 2, 1, 3]) for y in parts)
        weights = nn.functional.softmax(query @ key.transpose([0, 1, 3, 2]) * self.factor, axis=-1)
        return self.collect((weights @ value).transpose([0, 2, 1, 3]).flatten(2))


class UBlock(nn.Layer):
    """A block; those of the second half get the output of one of the first half too."""

    def __init__(self, is_fused, has_skip):
        super().__init__()
        self.calm, self.mixer = nn.LayerNorm(WIDTH), OwnAttention(is_fused)
        self.skip = nn.Linear(2 * WIDTH, WIDTH) if has_skip else None

    def forward(self, x, skip=None):
        x = x if skip is None else self.skip(paddle.concat([x, skip], axis=-1))
        return x + self.mixer(self.calm(x))


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


@pytest.fixture
def make():
    """Makes a model and its entry in the table, with other facts if some are given."""
    added = []

    def add(layout=Text.LAST, is_fused=False, block=None, **facts):
        paddle.seed(0)
        model = UViT(layout, is_fused)
        model.eval()
        with pytest.raises(NoMergeableLayerError, match=r"UViT.*no transformer blocks"):
            apply_tome(model)
        described = {
            "attn": ("mixer",),
            "crossattn": (),
            "mlp": (),
            "tokens": "x",
            "text": layout,
            "gets_text": layout,
        }
        entry = {
            "name": "U-ViT",
            "transformers": ("UViT",),
            "blocks": {"UBlock": BlockSpec(**{**described, **(block or {})})},
            "grid_layers": ("patches",),
            "block_lists": ("in_blocks", "mid_block", "out_blocks"),
            "attention": Attention(
                image=Projections(q="ask", k="offer", v="content", out="collect"),
                heads="count",
                scale="factor",
                processor=None,
            ),
            "only_processor": "OwnAttention",
            **facts,
        }
        added.append(Family(**entry))
        FAMILIES.append(added[0])
        return model

    yield add
    for entry in added:
        FAMILIES.remove(entry)


@pytest.fixture
def names_of_ppdiffusers(monkeypatch):
    """The oracle of attention reads the layers of `OwnAttention` by the names that it knows."""
    attention = kept_keys.attention

    def renamed(layer, *args, **named):
        parts = {"to_q": layer.ask, "to_k": layer.offer, "to_v": layer.content, "to_out": [layer.collect]}
        return attention(SimpleNamespace(**parts, heads=layer.count), *args, **named)

    monkeypatch.setattr(kept_keys, "attention", renamed)


@paddle.no_grad()
def run(model, seed=0):
    latents = noise(2, 4, 2 * GRID.h, 2 * GRID.w, seed=seed)
    return model(latents, noise(2, TEXT, 6, seed=seed + 1)).sample.numpy()


@pytest.mark.parametrize("layout", [Text.FIRST, Text.LAST])
@pytest.mark.parametrize("method", [name for name in METHODS if not METHODS[name].merges_queries])
@pytest.mark.usefixtures("names_of_ppdiffusers")
def test_an_entry_is_enough(layout, method, make):
    """Plain, merged and removed; each attention is that over the keys that remain, and the text is left alone."""
    model = make(layout)
    plain, before = run(model), traces(model)
    apply_tome(model, method=method)
    blocks = tome_summary(model, 2 * GRID.h, 2 * GRID.w).blocks
    paths = ["in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1"]
    assert [(block.path, block.grid) for block in blocks] == [(path, GRID) for path in paths]
    with calls_of_attention() as calls:
        merged = run(model)
    check_calls(model, calls, GRID, timestep=None)
    assert np.abs(merged - plain).max() > 1e-4
    np.testing.assert_array_equal(run(remove_tome(model)), plain)
    assert traces(model) == before


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].merges_queries])
def test_methods_that_merge_queries_are_refused(method, make):
    model = make()
    before = traces(model)
    with pytest.raises(ToMeConfigError, match=f"method='{method}' .*UViT.*UNets"):
        apply_tome(model, method=method)
    assert traces(model) == before


def test_messages_list_the_entry(make):
    make()
    with pytest.raises(NoMergeableLayerError, match=r"FLUX.*, U-ViT\."):
        apply_tome(nn.Linear(2, 2))


def test_fused_projections_are_refused_when_merging_is_applied(make):
    model = make(is_fused=True)
    plain, before = run(model), traces(model)
    with pytest.raises(ToMeConfigError, match=r"OwnAttention .*in_blocks\.0 .*offer.*content"):
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
def test_an_entry_that_no_wrap_knows_is_an_error_when_merging_is_applied(facts, message, make):
    model = make(**facts)
    plain, before = run(model), traces(model)
    with pytest.raises(ToMeConfigError, match=rf"{message}.*'U-ViT'"):
        apply_tome(model)
    np.testing.assert_array_equal(run(remove_tome(model)), plain)
    assert traces(model) == before
