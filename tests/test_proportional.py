"""Proportional attention: a merged token counts as often as the tokens that it replaces."""

import copy

import numpy as np
import paddle
import pytest
from conftest import inputs, make_unet, run, traces
from ppdiffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_5,
    SlicedAttnProcessor,
    XFormersAttnProcessor,
)
from zoo.noise import noise
from zoo.transformers import HIDDEN, dit, sd3

from ppdiffusers_tome import ToMePassError, hooks
from ppdiffusers_tome.models import find_blocks
from ppdiffusers_tome.positions import Grid

PROCESSORS = {
    "plain": AttnProcessor,
    "2.5": AttnProcessor2_5,
    "xformers": XFormersAttnProcessor,
    "sliced": lambda: SlicedAttnProcessor(1),
}

TOLERANCE = 5e-6  # float32 sums of up to 256 terms in another order, outputs of size 3


@pytest.fixture
def plans(monkeypatch):
    """The plans of all passes."""
    recorded, match_tokens = [], hooks.match_tokens
    monkeypatch.setattr(hooks, "match_tokens", lambda *args: recorded.append(match_tokens(*args)) or recorded[-1])
    return recorded


def record(model, attention, make_pass, **settings):
    """What an attention layer gets and returns on merged tokens: between merging and unmerging."""
    seen = {}
    handles = [attention.register_forward_post_hook(lambda layer, args, out: seen.update(out=out))]
    model.apply_tome(proportional=True, **settings)
    first = attention.to_q  # called by position in every processor
    handles.append(first.register_forward_pre_hook(lambda layer, args: seen.update(tokens=args[0])))
    with paddle.no_grad():
        make_pass()
    for handle in handles:
        handle.remove()
    model.remove_tome()
    return seen["tokens"], seen["out"]


def sizes_of(plan):
    """[B, N-r]: how many tokens each merged token is the mean of, counted from where each token takes its result."""
    rows = plan.source_rows.numpy().reshape(-1, plan.tokens)
    return np.stack([np.bincount(row - image * plan.kept, minlength=plan.kept) for image, row in enumerate(rows)])


def repeat(tokens, sizes):
    """[B, N-r, C] → [B, N, C]: each merged token as often as it counts."""
    return paddle.to_tensor(np.stack([np.repeat(x, n, axis=0) for x, n in zip(tokens.numpy(), sizes, strict=True)]))


def test_log_sizes_are_those_of_the_groups(plans):
    unet = make_unet().apply_tome(ratio=0.6, proportional=True)
    run(unet)
    for plan in plans:
        assert np.allclose(np.exp(plan.log_sizes().numpy()), sizes_of(plan), rtol=1e-6)
        assert (sizes_of(plan).sum(axis=1) == plan.tokens).all() and sizes_of(plan).max() > 2


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("window", [None, 4])
def test_attention_is_that_over_repeated_keys(name, window, plans):
    unet = make_unet()
    unet.set_attn_processor(PROCESSORS[name]())
    attention = find_blocks(unet)[0].block.attn1
    tokens, out = record(unet, attention, lambda: run(unet), ratio=0.5, window=window)
    with paddle.no_grad():
        expected = AttnProcessor()(attention, tokens, encoder_hidden_states=repeat(tokens, sizes_of(plans[0])))
        without = AttnProcessor()(attention, tokens)
    assert float((out - expected).abs().max()) < TOLERANCE
    assert float((out - without).abs().max()) > 10 * TOLERANCE


@pytest.mark.parametrize("text_continues", [True, False])
def test_joint_attention_is_that_over_repeated_image_tokens(text_continues, plans):
    """Text tokens count once. In the last block, whose text goes nowhere, too."""
    model = sd3()
    index = 0 if text_continues else -1
    attention = find_blocks(model)[index].block.attn
    assert attention.context_pre_only is not text_continues
    text = {}
    attention.add_q_proj.register_forward_pre_hook(lambda layer, args: text.update(tokens=args[0]))
    given = {
        "encoder_hidden_states": noise(2, 5, 2 * HIDDEN, seed=1),
        "pooled_projections": noise(2, 2 * HIDDEN, seed=2),
        "timestep": paddle.to_tensor([10, 10]),
    }
    tokens, out = record(model, attention, lambda: model(noise(2, 4, 16, 16), **given), ratio=0.5)
    sizes = sizes_of(plans[index])
    with paddle.no_grad():
        image, context = attention(repeat(tokens, sizes), encoder_hidden_states=text["tokens"])
    firsts = np.cumsum(sizes, axis=1) - sizes
    expected = np.take_along_axis(image.numpy(), firsts[..., None], axis=1)
    assert np.abs(out[0].numpy() - expected).max() < TOLERANCE
    if text_continues:
        assert np.abs((out[1] - context).numpy()).max() < TOLERANCE


@pytest.mark.parametrize("make", [make_unet, dit, sd3])
def test_it_comes_off_without_a_trace(make):
    model = make()
    before = traces(model)
    model.apply_tome(ratio=0.5, proportional=True)
    assert traces(copy.deepcopy(model).remove_tome())[0].keys() == before[0].keys()
    assert traces(model.remove_tome()) == before


def test_nothing_changes_where_nothing_merges():
    unet = make_unet()
    plain = run(unet)
    assert np.array_equal(run(unet.apply_tome(ratio=0, proportional=True)), plain)


def test_gradients_reach_the_tokens():
    unet = make_unet().apply_tome(ratio=0.5, proportional=True)
    given = inputs()
    given["sample"].stop_gradient = False
    unet(given["sample"], 10, given["encoder_hidden_states"]).sample.square().mean().backward()
    assert float(given["sample"].grad.abs().min()) > 0


class Deaf(AttnProcessor):
    """A processor that takes no mask."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            attn.head_to_batch_dim(x) for x in (attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        )
        return attn.to_out[0](attn.batch_to_head_dim(paddle.matmul(attn.get_attention_scores(query, key), value)))


def test_a_processor_that_cannot_weight_keys_is_an_error():
    unet = make_unet()
    unet.set_attn_processor(Deaf())
    run(unet.apply_tome(ratio=0.5, proportional=False))
    with pytest.raises(ToMePassError, match="proportional=True: Deaf"):
        run(unet.apply_tome(ratio=0.5, proportional=True))


def test_a_mask_over_the_text_stays_with_merged_cross_attention():
    """Around cross-attention the queries merge and the keys are text: nothing is weighted there."""
    unet = make_unet()
    attention = find_blocks(unet)[0].block.attn2
    given = inputs()
    mask = paddle.to_tensor([[1] * given["encoder_hidden_states"].shape[1]] * 2)

    def make_pass():
        unet(given["sample"], 10, given["encoder_hidden_states"], encoder_attention_mask=mask)

    tokens, out = record(unet, attention, make_pass, ratio=0.5, merge_crossattn=True)
    with paddle.no_grad():
        expected = AttnProcessor()(attention, tokens, encoder_hidden_states=given["encoder_hidden_states"])
    assert float((out - expected).abs().max()) < TOLERANCE


def test_summary_counts_the_pairs_within_windows():
    unet = make_unet()
    saved = {
        window: unet.apply_tome(window=window, proportional=False).tome_summary(16, 16).saved for window in (None, 4)
    }
    width = find_blocks(unet)[0].block.attn1.to_q.weight.shape[0]
    blocks = len(unet.tome_summary(16, 16).blocks)
    assert saved[4] - saved[None] == blocks * width * (192 * 64 - 16 * 12 * 4)
    assert unet.tome_summary(16, 16).blocks[0].grid == Grid(16, 16)
