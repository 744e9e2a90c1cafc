"""Shares of a block's time: with known times on a test clock, and in real passes."""

import overhead
import paddle
import pytest
from conftest import run
from overhead import measure_overhead
from zoo.noise import noise
from zoo.transformers import HIDDEN, sd3

from ppdiffusers_tome import attention, wraps
from ppdiffusers_tome.errors import ToMeConfigError

WHOLE = {"window": None, "proportional": False}
TOMESD = {**WHOLE, "merge_attn": True}


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in functions that a test names: `clock.takes(owner, name, seconds)`."""

    class Clock:
        now = 0.0

        def takes(self, owner, name, seconds):
            function = getattr(owner, name)

            def slow(*args, **kwargs):
                self.now += seconds
                return function(*args, **kwargs)

            monkeypatch.setattr(owner, name, slow)

    clock = Clock()
    monkeypatch.setattr(overhead, "now", lambda: clock.now)
    return clock


def blocks(unet):
    return [layer for layer in unet.sublayers() if type(layer).__name__ == "BasicTransformerBlock"]


@pytest.mark.parametrize(
    ("settings", "shares"),
    [  # in each block: 4 s of matching, 1 s of cells, 2 s of merging, 1 s of unmerging, 5 s of sizes, 3 s of the rest
        ({"window": 8}, (4, 4, 1, 0)),  # of queries, and of keys and values
        ({"merge_mlp": True}, (4, 6, 2, 0)),  # merges before attention and before the feed-forward layers
        ({"proportional": True}, (4, 4, 1, 5)),
        ({"merge_attn": True, "window": 8}, (4, 2, 1, 0)),
        ({"merge_attn": True, "merge_mlp": True}, (4, 4, 2, 0)),
        ({"merge_attn": True, "proportional": True}, (4, 2, 1, 5)),
        ({"merge_attn": "kv", "match": "grid", "ratio": 0.75}, (1, 2, 0, 0)),  # keys and values share one merge
        ({"merge_attn": "kv", "proportional": True}, (4, 2, 0, 5)),
    ],
)
def test_every_method_has_its_shares(unet, clock, settings, shares):
    unet.apply_tome(**{"ratio": 0.5, **WHOLE, **settings})
    clock.takes(wraps, "plan_pairs", 4.0)
    clock.takes(wraps, "plan_cells", 1.0)
    clock.takes(attention, "merge", 2.0)
    clock.takes(attention, "unmerge", 1.0)
    clock.takes(paddle, "log", 3.0)  # of sizes
    clock.takes(attention.AttentionView, "_widen", 1.0)  # queries and keys
    for block in blocks(unet):
        clock.takes(block.norm2, "forward", 3.0)
    clock.takes(unet.conv_out, "forward", 100.0)  # outside of the blocks
    total = sum(shares) + 3
    parts = ("matching", "merge", "unmerge", "sizes")
    expected = {part: share / total for part, share in zip(parts, shares, strict=True)}
    assert measure_overhead(lambda: run(unet)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        (WHOLE, (4 / 12, 4 / 12, 1 / 12, 0.0)),
        ({"proportional": True, "window": None}, (4 / 18, 4 / 18, 1 / 18, 6 / 18)),
        (TOMESD, (0.4, 0.2, 0.1, 0.0)),
        ({**TOMESD, "proportional": True}, (0.25, 0.125, 0.0625, 0.375)),
    ],
)
def test_joint_attention_is_timed_where_its_norm_merges(clock, settings, shares):
    """Its processors have no mask, so sizes are channels."""
    model = sd3().apply_tome(ratio=0.5, **settings)
    clock.takes(wraps, "plan_pairs", 4.0)
    clock.takes(attention, "merge", 2.0)
    clock.takes(attention, "unmerge", 1.0)
    clock.takes(paddle, "log", 6.0)  # of sizes
    for block in model.transformer_blocks:
        clock.takes(block.attn, "forward", 3.0)
    text = {"encoder_hidden_states": noise(2, 5, 2 * HIDDEN), "pooled_projections": noise(2, 2 * HIDDEN)}
    measured = measure_overhead(lambda: model(noise(2, 4, 16, 16), timestep=paddle.to_tensor([10, 10]), **text))
    assert measured == dict(zip(("matching", "merge", "unmerge", "sizes"), shares, strict=True))


def patched():
    return [getattr(owner, name) for _, owner, name in overhead.TIMED]


def test_pass_is_the_same_and_leaves_no_trace_also_by_an_error(unet):
    unet.apply_tome(ratio=0.5)
    before, merged, measured = patched(), run(unet), []
    measure_overhead(lambda: measured.append(run(unet)))
    assert (measured[0] == merged).all() and patched() == before
    with pytest.raises(ZeroDivisionError):
        measure_overhead(lambda: 1 / 0)
    assert patched() == before


@pytest.mark.parametrize("ratio", [None, 0, 1e-9])
def test_where_nothing_merges_there_are_no_shares(unet, ratio):
    if ratio is not None:
        unet.apply_tome(ratio=ratio)
    with pytest.raises(ToMeConfigError, match=r"no block merged tokens in the pass: call apply_tome\(\)"):
        measure_overhead(lambda: run(unet))
