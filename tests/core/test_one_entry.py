"""A new family is one entry of the table: a made-up transformer with other names for everything merges by it."""

import numpy as np
import paddle
import pytest
from conftest import traces
from paddle import nn

from ppdiffusers_tome import (
    Grid,
    NoMergeableLayerError,
    ToMeConfigError,
    apply_tome,
    remove_tome,
    tome_summary,
)
from ppdiffusers_tome.families import table
from ppdiffusers_tome.families.table import Attention, BlockSpec, Family, Projections
from ppdiffusers_tome.methods import METHODS

CHANNELS, COUNT = 16, 2


class Mixer(nn.Layer):
    """Attention whose parts have no name of ppdiffusers, and no processor."""

    def __init__(self):
        super().__init__()
        self.ask, self.offer, self.content = (nn.Linear(CHANNELS, CHANNELS) for _ in range(3))
        self.collect = nn.Linear(CHANNELS, CHANNELS)
        self.count, self.factor = COUNT, (CHANNELS // COUNT) ** -0.5

    def forward(self, x):
        query, key, value = (
            part(x).reshape([0, 0, COUNT, -1]).transpose([0, 2, 1, 3]) for part in (self.ask, self.offer, self.content)
        )
        weights = nn.functional.softmax(paddle.matmul(query, key, transpose_y=True) * self.factor, axis=-1)
        return self.collect(paddle.matmul(weights, value).transpose([0, 2, 1, 3]).flatten(2))


class Floor(nn.Layer):
    """A transformer block."""

    def __init__(self):
        super().__init__()
        self.mixer, self.calm = Mixer(), nn.LayerNorm(CHANNELS)
        self.press = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.GELU(), nn.Linear(CHANNELS, CHANNELS))

    def forward(self, x):
        x = x + self.mixer(self.calm(x))
        return x + self.press(self.calm(x))


class Tower(nn.Layer):
    """A transformer over the patches of an image."""

    def __init__(self):
        super().__init__()
        self.entry = nn.Conv2D(4, CHANNELS, 2, 2)
        self.floors = nn.LayerList([Floor() for _ in range(2)])

    def forward(self, image):
        x = self.entry(image)
        tokens = x.flatten(2).transpose([0, 2, 1])
        for floor in self.floors:
            tokens = floor(tokens)
        return tokens


ENTRY = Family(
    name="Tower",
    transformers=("Tower",),
    blocks={"Floor": BlockSpec(attn=("mixer",), crossattn=(), mlp=("press",))},
    grid_layers=("entry",),
    block_lists=("floors",),
    attention=Attention(
        image=Projections(q="ask", k="offer", v="content", out="collect"),
        heads="count",
        scale="factor",
        processor=None,
    ),
    text_tokens=0,
)


@pytest.fixture
def tower():
    paddle.seed(0)
    model = Tower()
    model.eval()
    with pytest.raises(NoMergeableLayerError, match=r"Tower.*no transformer blocks"):
        apply_tome(model)
    table.FAMILIES.append(ENTRY)
    yield model
    table.FAMILIES.remove(ENTRY)


@paddle.no_grad()
def run(model, h=12, w=20):
    return model(paddle.to_tensor(np.random.RandomState(0).standard_normal((2, 4, h, w)).astype("float32"))).numpy()


@pytest.mark.parametrize("method", [name for name in METHODS if not METHODS[name].merges_queries])
def test_plain_applied_removed(tower, method):
    before, plain = traces(tower), run(tower)
    merged = run(apply_tome(tower, method=method))
    assert merged.shape == plain.shape and np.abs(merged - plain).max() > 1e-4
    summary = tome_summary(tower, 12, 20)
    assert [(block.path, block.grid) for block in summary.blocks] == [(f"floors.{i}", Grid(6, 10)) for i in range(2)]
    np.testing.assert_array_equal(run(remove_tome(tower)), plain)
    assert traces(tower) == before


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].merges_queries])
def test_methods_that_merge_queries_are_refused(tower, method):
    before = traces(tower)
    with pytest.raises(ToMeConfigError, match=f"method='{method}' .*Tower.*UNets"):
        apply_tome(tower, method=method)
    assert traces(tower) == before


@paddle.no_grad()
def test_keys_and_values_are_those_of_the_tokens_that_remain(tower):
    """The model's own attention is the oracle: with todo, of every second row and column."""
    seen, mixer = {}, tower.floors[0].mixer
    handle = mixer.register_forward_post_hook(lambda layer, args, out: seen.update(tokens=args[0], out=out))
    run(apply_tome(tower, method="todo"))
    handle.remove()
    remove_tome(tower)
    tokens = seen["tokens"]
    remaining = tokens.reshape([2, 6, 10, CHANNELS])[:, ::2, ::2].flatten(1, 2)
    query, key, value = (
        part(x).reshape([0, 0, COUNT, -1]).transpose([0, 2, 1, 3])
        for part, x in ((mixer.ask, tokens), (mixer.offer, remaining), (mixer.content, remaining))
    )
    weights = nn.functional.softmax(paddle.matmul(query, key, transpose_y=True) * mixer.factor, axis=-1)
    expected = mixer.collect(paddle.matmul(weights, value).transpose([0, 2, 1, 3]).flatten(2))
    np.testing.assert_allclose(seen["out"].numpy(), expected.numpy(), atol=5e-6)


def test_messages_list_the_entries(tower):
    with pytest.raises(NoMergeableLayerError, match=r"FLUX.*, Tower\."):
        apply_tome(nn.Linear(2, 2))
