"""Proportional attention: a merged token counts as often as the tokens that it replaces."""

from functools import partial

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from conftest import inputs, keys_of, make_unet, repeat, run, sizes_of
from ppdiffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_5,
    SlicedAttnProcessor,
    XFormersAttnProcessor,
)
from ppdiffusers.pipelines.text_to_video_synthesis.pipeline_text_to_video_zero import CrossFrameAttnProcessor2_5
from zoo.noise import noise
from zoo.transformers import HIDDEN, sd3
from zoo.videos import CrossFrameAttention

from ppdiffusers_tome import ToMePassError, match_cells, match_tokens, unmerge
from ppdiffusers_tome import attention as attention_module
from ppdiffusers_tome.models import find_blocks
from ppdiffusers_tome.positions import Grid

PROCESSORS = {
    "plain": AttnProcessor,
    "2.5": AttnProcessor2_5,
    "xformers": XFormersAttnProcessor,
    "sliced": lambda: SlicedAttnProcessor(1),
}

TOLERANCE = 5e-6  # float32 sums of up to 256 terms in another order, outputs of size 3


def record(model, attention, make_pass, **settings):
    """What an attention layer computes queries from and keys from, on merged tokens, and what it returns."""
    seen = {}
    handles = [attention.register_forward_post_hook(lambda layer, args, out: seen.update(out=out))]
    model.apply_tome(proportional=True, **settings)
    for name in ("to_q", "to_k"):  # called by position in every processor
        layer = getattr(attention, name)
        handles.append(layer.register_forward_pre_hook(lambda layer, args, name=name: seen.update({name: args[0]})))
    with paddle.no_grad():
        make_pass()
    for handle in handles:
        handle.remove()
    model.remove_tome()
    return seen["to_q"], seen["to_k"], seen["out"]


def test_log_sizes_are_those_of_the_groups(plans):
    unet = make_unet().apply_tome(ratio=0.6, proportional=True)
    run(unet)
    for plan in (plan for of_block in plans for plan in (of_block, of_block.keys)):
        assert np.allclose(np.exp(plan.log_sizes().numpy()), sizes_of(plan), rtol=1e-6)
        assert (sizes_of(plan).sum(axis=1) == plan.tokens).all() and sizes_of(plan).max() > 2


@pytest.mark.parametrize("match", [partial(match_tokens, removed=0), match_cells])
def test_log_sizes_are_0_where_nothing_merges(match):
    plan = match(paddle.randn([3, 4, 5]), Grid(1, 4))
    assert plan.log_sizes().numpy().tolist() == [[0] * 4] * 3


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("merge_attn", ["asymmetric", True])
def test_attention_is_that_over_repeated_keys(name, window, merge_attn, plans):
    unet = make_unet()
    unet.set_attn_processor(PROCESSORS[name]())
    attention = find_blocks(unet)[0].block.attn1
    settings = {"ratio": 0.5, "window": window, "merge_attn": merge_attn}
    queries, keys, out = record(unet, attention, lambda: run(unet), **settings)
    assert (queries.shape[1], keys.shape[1]) == ((128, 128) if merge_attn is True else (204, 81))
    with paddle.no_grad():
        repeated = repeat(keys, sizes_of(plans[0].keys))
        expected = AttnProcessor()(attention, queries, encoder_hidden_states=repeated)
        without = AttnProcessor()(attention, queries, encoder_hidden_states=keys)
        expected, without = (unmerge(x, plans[0]) for x in (expected, without))
    assert float((out - expected).abs().max()) < TOLERANCE
    assert float((out - without).abs().max()) > 10 * TOLERANCE


@pytest.mark.parametrize("text_continues", [True, False])
@pytest.mark.parametrize("merge_attn", ["asymmetric", True])
def test_joint_attention_is_that_over_repeated_image_tokens(text_continues, merge_attn, plans):
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
    settings = {"ratio": 0.5, "merge_attn": merge_attn}
    queries, keys, out = record(model, attention, lambda: model(noise(2, 4, 16, 16), **given), **settings)
    assert (queries.shape[1], keys.shape[1]) == ((32, 32) if merge_attn is True else (51, 21))
    with paddle.no_grad(), keys_of(attention, repeat(keys, sizes_of(plans[index].keys))):
        expected, context = attention(queries, encoder_hidden_states=text["tokens"])
    assert np.abs((out[0] - unmerge(expected, plans[index])).numpy()).max() < TOLERANCE
    if text_continues:
        assert np.abs((out[1] - context).numpy()).max() < TOLERANCE


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


class Mixing(AttnProcessor):
    """A processor whose keys are those of another frame, which it does not say."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        context = hidden_states.flip(0) if encoder_hidden_states is None else encoder_hidden_states
        return super().__call__(attn, hidden_states, context, **kwargs)


def test_keys_of_unknown_tokens_are_an_error():
    unet = make_unet()
    unet.set_attn_processor(Mixing())
    run(unet.apply_tome(ratio=0.5, merge_attn=True, proportional=False))
    with pytest.raises(ToMePassError, match="proportional=True: Mixing attends to other tokens than its own"):
        run(unet.apply_tome(ratio=0.5, merge_attn=True, proportional=True))
    with pytest.raises(ToMePassError, match="merge_attn='asymmetric': Mixing computes keys or values from other"):
        run(unet.apply_tome(ratio=0.5, proportional=False))


# Text2Video-Zero, whose frames attend to the first one


def test_keys_of_the_first_frame_have_its_sizes(plans):
    """In both halves of the batch, which have two frames each; also by a subclass of ppdiffusers' processor."""
    unet = make_unet()
    unet.set_attn_processor(CrossFrameAttention())
    attention = find_blocks(unet)[0].block.attn1
    for settings in ({"window": None}, {"merge_attn": True}, {"merge_attn": "kv", "ratio": 0.6}):
        plans.clear()
        queries, keys, out = record(unet, attention, lambda: run(unet, batch=4), **{"ratio": 0.5, **settings})
        sizes = sizes_of(plans[0].keys)
        keys = repeat(keys, sizes)
        first = paddle.stack([keys[0], keys[0], keys[2], keys[2]])
        with paddle.no_grad():
            expected = AttnProcessor()(attention, queries, encoder_hidden_states=first)
        expected = expected if settings.get("merge_attn") == "kv" else unmerge(expected, plans[0])
        assert float((out - expected).abs().max()) < TOLERANCE
        assert (sizes[0] != sizes[1]).any()


def test_frames_in_fused_attention_are_an_error():
    """It asks for no mask, and divides the channels among the heads itself."""
    unet = make_unet()
    unet.set_attn_processor(CrossFrameAttnProcessor2_5())
    run(unet.apply_tome(ratio=0.5, proportional=False))
    with pytest.raises(ToMePassError, match="proportional=True: CrossFrameAttnProcessor2_5 has neither"):
        run(unet.apply_tome(ratio=0.5, proportional=True))


# Channels instead of masks


@pytest.mark.parametrize("processor", [XFormersAttnProcessor, type("Own", (XFormersAttnProcessor,), {})])
@pytest.mark.parametrize("settings", [{}, {"merge_attn": "kv"}], ids=str)
def test_fused_attention_gets_no_mask_and_its_output_no_channels(processor, settings, monkeypatch):
    unet, calls, widths = make_unet(), [], []
    unet.set_attn_processor(processor(attention_op="math"))
    attend = F.scaled_dot_product_attention_

    def fused(query, key, value, attn_mask=None, **given):
        calls.append((query.shape[1], attn_mask, query.shape[-1] - attention.head_dim))
        return attend(query, key, value, attn_mask=attn_mask, **given)

    monkeypatch.setattr(F, "scaled_dot_product_attention_", fused)
    blocks = [mergeable.block for mergeable in find_blocks(unet) if mergeable.level == 1]
    attention = blocks[0].attn1
    for block in blocks:
        block.attn1.to_out[0].register_forward_post_hook(lambda layer, args, out: widths.append(args[0].shape[-1]))
    run(unet.apply_tome(ratio=0.5, proportional=True, **settings))
    merged = [(mask, channels) for tokens, mask, channels in calls if channels == 8]
    assert len(merged) == len(blocks) and all(mask is None for mask, _ in merged)
    assert all(mask is None for _, mask, _ in calls)
    assert set(widths) == {attention.inner_dim}
    calls.clear()
    run(unet.remove_tome())
    assert {channels for tokens, _, channels in calls if tokens == 256} == {0}


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_scale_that_flash_attention_ignores(half, monkeypatch):
    """ppdiffusers does not pass `scale` to flash attention, which then divides by the root of the width."""
    attend, dtype = F.scaled_dot_product_attention_, getattr(paddle, half)

    def flash(query, key, value, scale=None, **given):
        wide = [x.cast("float32") for x in (query, key, value)]
        return attend(*wide, **{**given, "attention_op": "math"}).cast(query.dtype)

    def honest(query, key, value, **given):
        wide = [x.cast("float32") for x in (query, key, value)]
        return attend(*wide, **{**given, "attention_op": "math"}).cast(query.dtype)

    for kernel, expected in ((flash, True), (honest, False)):
        attention_module._ignores_scale.cache_clear()
        monkeypatch.setattr(F, "scaled_dot_product_attention_", kernel)
        assert attention_module.ignores_scale(None, dtype, 40 + 8) is expected
        assert attention_module.ignores_scale(None, paddle.float32, 40 + 8) is False
    attention_module._ignores_scale.cache_clear()


def test_attention_whose_kernel_ignores_the_scale_is_that_over_repeated_keys(plans, monkeypatch):
    """The whole hook, in float32: as if the kernel were flash attention."""
    attend, unet = F.scaled_dot_product_attention_, make_unet()
    monkeypatch.setattr(attention_module, "ignores_scale", lambda *args: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention_", lambda *heads, scale, **given: attend(*heads, **given))
    unet.set_attn_processor(XFormersAttnProcessor())
    attention = find_blocks(unet)[0].block.attn1
    queries, keys, out = record(unet, attention, lambda: run(unet), ratio=0.5)
    with paddle.no_grad():
        repeated = repeat(keys, sizes_of(plans[0].keys))
        expected = AttnProcessor()(attention, queries, encoder_hidden_states=repeated)
    assert float((out - unmerge(expected, plans[0])).abs().max()) < TOLERANCE


@pytest.mark.parametrize("upcast", [{}, {"upcast_attention": True}, {"upcast_softmax": True}], ids=str)
@pytest.mark.parametrize("sliced", [False, True])
def test_scores_with_a_channel_are_those_with_a_mask(upcast, sliced, monkeypatch):
    unet = make_unet()
    attention = find_blocks(unet)[0].block.attn1
    for name, value in upcast.items():
        setattr(attention, name, value)
    unet.set_attn_processor(SlicedAttnProcessor(2) if sliced else AttnProcessor())
    *_, by_channel = record(unet, attention, lambda: run(unet), ratio=0.5)
    own = type(
        "Own", (type(attention.processor),), {"__call__": lambda self, *args, **given: call(self, *args, **given)}
    )
    call = type(attention.processor).__call__
    unet.set_attn_processor(own(2) if sliced else own())  # a subclass that may compute scores in another way
    masks, scores = [], type(attention).get_attention_scores
    monkeypatch.setattr(
        type(attention), "get_attention_scores", lambda *args: (masks.append(args[3] is not None), scores(*args))[1]
    )
    *_, by_mask = record(unet, attention, lambda: run(unet), ratio=0.5)
    assert any(masks) and float((by_channel - by_mask).abs().max()) < TOLERANCE


def test_a_mask_over_the_text_stays_with_merged_cross_attention(plans):
    """Around cross-attention the queries merge and the keys are text: nothing is weighted there."""
    unet = make_unet()
    attention = find_blocks(unet)[0].block.attn2
    given = inputs()
    mask = paddle.to_tensor([[1] * given["encoder_hidden_states"].shape[1]] * 2)

    def make_pass():
        unet(given["sample"], 10, given["encoder_hidden_states"], encoder_attention_mask=mask)

    tokens, _, out = record(unet, attention, make_pass, ratio=0.5, merge_crossattn=True)
    with paddle.no_grad():
        expected = AttnProcessor()(attention, tokens, encoder_hidden_states=given["encoder_hidden_states"])
    assert float((out - unmerge(expected, plans[0])).abs().max()) < TOLERANCE


def test_summary_counts_the_pairs_within_windows():
    unet = make_unet()
    saved = {
        window: unet.apply_tome(window=window, proportional=False).tome_summary(16, 16).saved for window in (None, 4)
    }
    width = find_blocks(unet)[0].block.attn1.to_q.weight.shape[0]
    blocks = len(unet.tome_summary(16, 16).blocks)
    assert saved[4] - saved[None] == blocks * width * (192 * 64 - 16 * 12 * 4)
    assert unet.tome_summary(16, 16).blocks[0].grid == Grid(16, 16)
