"""Attention over merged tokens: which keys and values merge, and how often each counts, whatever computes it."""

from functools import partial
from types import MethodType

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from conftest import Recorder, inputs, keys_of, make_unet, repeat, run, sizes_of
from paddle import nn
from ppdiffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_5,
    FusedJointAttnProcessor2_5,
    SlicedAttnProcessor,
    XFormersAttnProcessor,
)
from ppdiffusers.models.lora import LoRALinearLayer
from ppdiffusers.pipelines.text_to_video_synthesis.pipeline_text_to_video_zero import CrossFrameAttnProcessor2_5
from test_transformers import draw
from zoo import ZOO, generate
from zoo.noise import noise
from zoo.transformers import sd3
from zoo.videos import CrossFrameAttention

from ppdiffusers_tome import Grid, ToMeConfig, ToMePassError, match_cells, match_tokens, merge, unmerge
from ppdiffusers_tome.attach import passes
from ppdiffusers_tome.families.models import find_blocks
from ppdiffusers_tome.methods import METHODS

PROCESSORS = {
    "plain": AttnProcessor,
    "2.5": AttnProcessor2_5,
    "xformers": XFormersAttnProcessor,
    "sliced": lambda: SlicedAttnProcessor(1),
}
TOMESD = {"proportional": False, "window": None, "method": "symmetric"}
KV = {**TOMESD, "method": "kv"}
ASYMMETRIC = {**TOMESD, "method": "default"}
CELLS = {**KV, "method": "todo", "use_rand": True}
TODO = {**CELLS, "use_rand": False}
CHECKERBOARD = {**TODO, "ratio": 0.5}
DEFAULT, INTERLACE = {"method": "default"}, {"method": "interlace"}  # with all of their own defaults
TOLERANCE = 5e-6  # float32 sums of up to 256 terms in another order, outputs of size 3


def of_both_weights(*settings):
    """These settings with keys that count as often as the tokens that they replace, and with keys that count once."""
    return [{**one, "proportional": value} for one in settings for value in (False, True)]


def record(model, attention, make_pass, **settings):
    """The first input and the output of an attention layer in a merged pass."""
    seen = {}
    handle = attention.register_forward_post_hook(lambda layer, args, out: seen.update(tokens=args[0], out=out))
    model.apply_tome(**settings)
    with paddle.no_grad():
        make_pass()
    handle.remove()
    model.remove_tome()
    return seen["tokens"], seen["out"]


def merged_parts(tokens, plan, settings):
    """Queries and keys of attention over merged tokens: as many copies of each key as it counts."""
    config = ToMeConfig(**settings)
    keys = merge(tokens, plan.keys)
    keys = repeat(keys, sizes_of(plan.keys)) if config.proportional else keys
    return merge(tokens, plan) if METHODS[config.method].merges_queries else tokens, keys


def expected_of(attention, tokens, plan, settings, rows=slice(None)):
    """What attention over merged tokens must return; `rows` of the batch have the keys."""
    queries, keys = merged_parts(tokens, plan, settings)
    with paddle.no_grad():
        out = AttnProcessor()(attention, queries, encoder_hidden_states=keys[rows])
    return unmerge(out, plan) if METHODS[ToMeConfig(**settings).method].merges_queries else out


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(
    ("settings", "queries", "keys"),
    [
        (settings, queries, keys)
        for one, queries, keys in (
            ({**KV, "ratio": 0.5}, 128, 128),
            ({**KV, "ratio": 0.7, "window": 4}, 77, 77),
            (CELLS, 64, 64),
            (TODO, 64, 64),
            (CHECKERBOARD, 128, 128),
            (ASYMMETRIC, 204, 81),
            ({**ASYMMETRIC, "ratio": 0.1, "window": 4}, 248, 215),
            ({**ASYMMETRIC, "ratio": 0.01}, 256, 252),  # the same tokens as queries
            (TOMESD, 128, 128),
            ({**TOMESD, "window": 4}, 128, 128),
        )
        for settings in of_both_weights(one)
    ]
    + [(INTERLACE, 32, 32), ({**INTERLACE, "ratio": 0.5}, 64, 64)],  # of the first block, which keeps less than others
    ids=str,
)
def test_attention_is_that_over_merged_tokens(processor, settings, queries, keys, plans):
    unet = make_unet()
    unet.set_attn_processor(PROCESSORS[processor]())
    attention = find_blocks(unet)[0].block.attn1
    tokens, out = record(unet, attention, lambda: run(unet), **settings)
    plan = plans[0]
    assert tokens.shape == out.shape == [2, 256, 32] and (plan.kept, plan.keys.kept) == (queries, keys)
    assert float((out - expected_of(attention, tokens, plan, settings)).abs().max()) < TOLERANCE
    if settings["method"] not in ("todo", "interlace"):  # whose keys all count alike
        other = expected_of(attention, tokens, plan, {**settings, "proportional": not settings["proportional"]})
        assert float((out - other).abs().max()) > 10 * TOLERANCE
    with paddle.no_grad():
        assert float((out - AttnProcessor()(attention, tokens)).abs().max()) > 10 * TOLERANCE


@pytest.mark.parametrize("settings", [{}, {"merge_mlp": True, "proportional": True}], ids=str)
def test_asymmetric_at_the_largest_ratio_is_symmetric(settings):
    """Cells let no key merge further than all tokens do."""
    unet = make_unet()
    symmetric = run(unet.apply_tome(0.75, **{**TOMESD, **settings}))
    np.testing.assert_array_equal(run(unet.apply_tome(0.75, **{**ASYMMETRIC, **settings})), symmetric)


def test_todo_takes_every_second_row_and_column_as_keys_and_values():
    unet = make_unet()
    attention = find_blocks(unet)[0].block.attn1
    tokens, out = record(unet, attention, lambda: run(unet), **TODO)
    with paddle.no_grad():
        image = tokens.reshape([2, 16, 16, 32])
        expected = AttnProcessor()(attention, tokens, encoder_hidden_states=image[:, ::2, ::2].reshape([2, 64, 32]))
    assert float((out - expected).abs().max()) < TOLERANCE


def test_todo_at_half_takes_a_checkerboard_as_keys_and_values():
    unet = make_unet()
    attention = find_blocks(unet)[0].block.attn1
    tokens, out = record(unet, attention, lambda: run(unet), **CHECKERBOARD)
    rows, columns = np.divmod(np.arange(256), 16)
    with paddle.no_grad():
        keys = tokens.index_select(paddle.to_tensor(np.flatnonzero((rows + columns) % 2 == 0)), axis=1)
        expected = AttnProcessor()(attention, tokens, encoder_hidden_states=keys)
    assert float((out - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize(("h", "w"), [(9, 11), (3, 2), (1, 7)])
@pytest.mark.parametrize("settings", [CELLS, TODO, CHECKERBOARD, {**KV, "ratio": 0.6}], ids=str)
def test_grids_with_remainders(settings, h, w):
    """One or two keys of each complete cell remain; a grid of one row has none and stays plain."""
    unet = make_unet(
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), block_out_channels=(32,)
    )
    kept = []
    attention = find_blocks(unet)[0].block.attn1
    plain = run(unet, h=h, w=w)
    unet.apply_tome(**settings)
    handle = attention.to_k.register_forward_post_hook(lambda layer, args, out: kept.append(out.shape[1]))
    merged = run(unet, h=h, w=w)
    handle.remove()
    cells = (h // 2) * (w // 2)
    expected = round(4 * (1 - ToMeConfig(**settings).ratio)) * cells
    if settings["method"] != "todo":
        expected = max(cells, h * w - int(h * w * settings["ratio"]))
    assert kept == [expected if cells else h * w]
    assert np.array_equal(merged, plain) == (cells == 0)
    assert np.array_equal(run(unet.remove_tome(), h=h, w=w), plain)


def test_log_sizes_are_those_of_the_groups(plans):
    unet = make_unet().apply_tome(ratio=0.6, method="default")
    run(unet)
    for plan in (plan for of_block in plans for plan in (of_block, of_block.keys)):
        assert np.allclose(np.exp(plan.log_sizes.numpy()), sizes_of(plan), rtol=1e-6)
        assert (sizes_of(plan).sum(axis=1) == plan.tokens).all() and sizes_of(plan).max() > 2


@pytest.mark.parametrize("match", [partial(match_tokens, removed=0), match_cells])
def test_log_sizes_are_0_where_nothing_merges(match):
    plan = match(paddle.randn([3, 4, 5]), Grid(1, 4))
    assert plan.has_equal_sizes and plan.log_sizes.numpy().tolist() == [[0] * 4] * 3


@pytest.mark.parametrize("index", [0, -1], ids=["first block", "last block, whose text goes nowhere"])
@pytest.mark.parametrize("settings", [*of_both_weights(KV, CELLS, ASYMMETRIC, TOMESD), INTERLACE], ids=str)
def test_joint_attention_merges_the_image_only(index, settings, plans):
    """Text tokens count once."""
    model, seen = sd3(), {}
    block = find_blocks(model)[index].block
    attention = block.attn
    assert attention.context_pre_only is (index == -1)
    handles = [
        block.norm1.register_forward_post_hook(lambda layer, args, out: seen.update(image=out[0])),
        attention.add_q_proj.register_forward_pre_hook(lambda layer, args: seen.update(text=args[0])),
    ]
    handles.append(attention.register_forward_post_hook(lambda layer, args, out: seen.update(out=out)))
    with paddle.no_grad():
        draw(sd3, model.apply_tome(**settings))
    for handle in handles:
        handle.remove()
    model.remove_tome()
    plan = plans[index]
    queries, keys = merged_parts(seen["image"], plan, settings)
    with paddle.no_grad(), keys_of(attention, keys):
        image, text = attention(queries, encoder_hidden_states=seen["text"])
    image = unmerge(image, plan) if METHODS[settings["method"]].merges_queries else image
    assert image.shape[1] == plan.tokens
    assert float((seen["out"][0] - image).abs().max()) < TOLERANCE
    if index == 0:
        assert float((seen["out"][1] - text).abs().max()) < TOLERANCE


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "name",
    [
        "StableDiffusionPipeline_IP_Adapter",
        "StableDiffusionXLPipeline_IP_Adapter",
        "StableDiffusionGLIGENPipeline",
        "TextToVideoZeroPipeline",
    ],
)
def test_pipelines_whose_attention_has_more_parts(name):
    tiny = ZOO[name]()
    plain = generate(tiny)
    for settings in ({**KV, "proportional": True}, {**ASYMMETRIC, "proportional": True}, INTERLACE):
        tiny.pipe.apply_tome(ratio=0.5, **settings)
        assert np.abs(generate(tiny) - plain).max() > 1e-4
    tiny.pipe.remove_tome()
    np.testing.assert_array_equal(generate(tiny), plain)


@pytest.mark.parametrize(
    ("settings", "lengths"), [(KV, [(256, None), (128, 7)]), (ASYMMETRIC, [(204, None), (204, 7)])]
)
def test_other_layers_still_merge_around(settings, lengths):
    unet, recorder = make_unet(), Recorder()
    unet.set_attn_processor(recorder)
    run(unet.apply_tome(ratio=0.5, **settings, merge_crossattn=True, merge_mlp=True))
    assert recorder.lengths[:2] == lengths


@pytest.mark.parametrize("settings", [{}, DEFAULT, {**KV, "proportional": True}, CELLS, ASYMMETRIC], ids=str)
def test_gradients_reach_every_token(settings):
    unet, given = make_unet().apply_tome(**settings), inputs()
    given["sample"].stop_gradient = False
    unet(**given).sample.square().mean().backward()
    assert float(given["sample"].grad.abs().min()) > 0


# Layers that are replaced, added or fused


class Adapted(nn.Layer):
    """A projection with an adapter around it, as PEFT makes them: another layer in its place, without a weight."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.weight.shape[0], 2), nn.Linear(2, base.weight.shape[1])

    def forward(self, x, *args):
        return self.base_layer(x, *args) + self.up(self.down(x))


def with_lora(projection):
    """Add LoRA as ppdiffusers does: as a part of the same layer."""
    lora = LoRALinearLayer(*projection.weight.shape, rank=2)
    lora.up.weight.set_value(0.1 * paddle.randn(lora.up.weight.shape))
    projection.set_lora_layer(lora)
    return projection


def adapt(unet, adapter):
    paddle.seed(3)
    for mergeable in find_blocks(unet):
        for name in ("to_q", "to_k", "to_v"):
            attention = mergeable.block.attn1
            setattr(attention, name, adapter(getattr(attention, name)))


@pytest.mark.parametrize("adapter", [Adapted, with_lora])
@pytest.mark.parametrize("processor", ["plain", "xformers", "sliced"])
@pytest.mark.parametrize(
    "settings", [*({**one, "proportional": True} for one in (KV, CELLS, ASYMMETRIC, TOMESD)), INTERLACE], ids=str
)
def test_adapters_of_projections(adapter, processor, settings, plans):
    """Merging is the same, applied before or after them."""
    unet = make_unet()
    unet.set_attn_processor(PROCESSORS[processor]())
    without = run(unet.apply_tome(**settings))
    adapt(unet.remove_tome(), adapter)
    attention = find_blocks(unet)[0].block.attn1
    plans.clear()
    tokens, out = record(unet, attention, lambda: run(unet), **settings)
    assert float((out - expected_of(attention, tokens, plans[0], settings)).abs().max()) < TOLERANCE
    assert unet.apply_tome(**settings).tome_summary(16, 16).saved > 0

    fresh = make_unet()
    fresh.set_attn_processor(PROCESSORS[processor]())
    adapt(fresh.apply_tome(**settings), adapter)
    np.testing.assert_array_equal(run(fresh), run(unet))
    assert np.abs(run(fresh) - without).max() > 1e-4


@pytest.mark.parametrize("settings", [KV, ASYMMETRIC, {**TOMESD, "proportional": True}, INTERLACE], ids=str)
def test_fused_projections_are_refused(settings):
    """ppdiffusers 0.29 has the processor of SD3's fused projections, but its `fuse_qkv_projections()` raises."""
    model = sd3()
    with pytest.raises(AttributeError, match=r"modules|fuse_projections"):
        model.fuse_qkv_projections()
    for mergeable in find_blocks(model):
        attention = mergeable.block.attn
        for name, parts in {"to_qkv": "to_{}", "to_added_qkv": "add_{}_proj"}.items():
            fused = nn.Linear(attention.to_q.weight.shape[0], 3 * attention.inner_dim)
            layers = [getattr(attention, parts.format(part)) for part in "qkv"]
            fused.weight.set_value(paddle.concat([layer.weight for layer in layers], axis=1))
            fused.bias.set_value(paddle.concat([layer.bias for layer in layers]))
            setattr(attention, name, fused)
    with paddle.no_grad():
        expected = draw(sd3, model.apply_tome(**TOMESD))
        model.set_attn_processor(FusedJointAttnProcessor2_5())
        np.testing.assert_allclose(draw(sd3, model), expected, atol=1e-4)  # merging around the attention works
        model.apply_tome(**settings)
        with pytest.raises(ToMePassError, match=r"FusedJointAttnProcessor2_5 has n(ot|either)"):
            draw(sd3, model)


# Processors that compute in another way


class Deaf(AttnProcessor):
    """A processor that takes no mask."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            attn.head_to_batch_dim(x) for x in (attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        )
        return attn.to_out[0](attn.batch_to_head_dim(paddle.matmul(attn.get_attention_scores(query, key), value)))


class Mixing(AttnProcessor):
    """A processor whose keys are those of another frame, which it does not say."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        context = hidden_states.flip(0) if encoder_hidden_states is None else encoder_hidden_states
        return super().__call__(attn, hidden_states, context, **kwargs)


class Scaled(AttnProcessor):
    """A processor that computes queries and keys of tokens that it was not given."""

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return super().__call__(attn, hidden_states * 2, *args, **kwargs)


@pytest.mark.parametrize(
    ("processor", "works", "fails", "message"),
    [
        (Deaf, INTERLACE, DEFAULT, "proportional=True: Deaf"),
        (Deaf, {**DEFAULT, "proportional": False}, DEFAULT, "proportional=True: Deaf"),
        (Mixing, TOMESD, {"method": "symmetric"}, "proportional=True: Mixing attends to other tokens than its own"),
        (Mixing, TOMESD, ASYMMETRIC, "method='default': Mixing computes keys or values from other tokens"),
        (Scaled, {"method": "symmetric"}, DEFAULT, "method='default': Scaled computes keys or values from other"),
        # Each frame keeps the same positions, so keys may be those of other tokens.
        (Mixing, INTERLACE, ASYMMETRIC, "method='default': Mixing computes keys or values from other tokens"),
        (Scaled, INTERLACE, DEFAULT, "method='default': Scaled computes keys or values from other"),
        # It asks for no mask, and divides the channels among the heads itself.
        (
            CrossFrameAttnProcessor2_5,
            {**DEFAULT, "proportional": False},
            DEFAULT,
            "proportional=True: CrossFrameAttnProcessor2_5 has",
        ),
    ],
)
def test_processors_that_cannot_be_used_are_an_error(processor, works, fails, message):
    unet = make_unet()
    unet.set_attn_processor(processor())
    run(unet.apply_tome(**works))
    with pytest.raises(ToMePassError, match=message):
        run(unet.apply_tome(**fails))


class PerturbedGuidance:
    """As diffusers' perturbed-attention guidance: in the second half of the batch each token attends to itself."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        if encoder_hidden_states is not None:
            return AttnProcessor()(attn, hidden_states, encoder_hidden_states, **kwargs)
        plain, perturbed = hidden_states.chunk(2)
        out = AttnProcessor()(attn, plain, **kwargs)
        return paddle.concat([out, attn.to_out[0](attn.to_v(perturbed))])


class OneByOne(AttnProcessor):
    """A processor that computes one image after another."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        context = [None] * len(hidden_states) if encoder_hidden_states is None else encoder_hidden_states.split(2)
        images = zip(hidden_states.split(2), context, strict=True)
        return paddle.concat([super(OneByOne, self).__call__(attn, *image, **kwargs) for image in images])


class FusedOneByOne(OneByOne, XFormersAttnProcessor):
    """The same by a fused kernel."""


class SideBySide(AttnProcessor):
    """A processor in which all images attend to the tokens of all."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        if encoder_hidden_states is None:
            hidden_states = hidden_states.reshape([1, -1, hidden_states.shape[2]])
        out = super().__call__(attn, hidden_states, encoder_hidden_states, **kwargs)
        return out if encoder_hidden_states is not None else out.reshape([2, -1, out.shape[2]])


@pytest.mark.parametrize("processor", [PerturbedGuidance, OneByOne, FusedOneByOne, SideBySide])
@pytest.mark.parametrize("settings", [{}, DEFAULT, KV, CELLS, ASYMMETRIC, {"method": "symmetric"}], ids=str)
def test_processors_that_project_part_of_the_batch_are_an_error_with_a_remedy(processor, settings):
    unet = make_unet()
    unet.set_attn_processor(processor())
    with pytest.raises(ToMePassError, match=r'use method="tomesd"'):
        run(unet.apply_tome(**settings))
    assert run(unet.apply_tome(method="tomesd")).shape == run(unet.remove_tome()).shape


def test_keys_of_the_first_frame_have_its_sizes(plans):
    """In both halves of the batch, which have two frames each; also by a subclass of ppdiffusers' processor."""
    unet = make_unet()
    unet.set_attn_processor(CrossFrameAttention())
    attention = find_blocks(unet)[0].block.attn1
    for settings in ({**DEFAULT, "window": None}, {"method": "symmetric"}, {"method": "kv", "ratio": 0.6}, INTERLACE):
        plans.clear()
        tokens, out = record(unet, attention, lambda: run(unet, batch=4), **settings)
        expected = expected_of(attention, tokens, plans[0], settings, paddle.to_tensor([0, 0, 2, 2]))
        assert float((out - expected).abs().max()) < TOLERANCE
        if settings is not INTERLACE:  # whose frames keep the same positions
            sizes = sizes_of(plans[0].keys)
            assert (sizes[0] != sizes[1]).any()


# Channels instead of masks


@pytest.mark.parametrize("processor", [XFormersAttnProcessor, type("Own", (XFormersAttnProcessor,), {})])
@pytest.mark.parametrize("settings", [DEFAULT, {"method": "kv"}], ids=str)
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


def test_attention_whose_kernel_ignores_the_scale_is_that_over_repeated_keys(plans, monkeypatch):
    """ppdiffusers does not pass `scale` to flash attention, which divides by the root of the width that it sees."""
    attend, unet = F.scaled_dot_product_attention_, make_unet()
    monkeypatch.setattr(F, "scaled_dot_product_attention_", lambda *heads, scale, **given: attend(*heads, **given))
    unet.set_attn_processor(XFormersAttnProcessor())
    attention = find_blocks(unet)[0].block.attn1
    tokens, out = record(unet, attention, lambda: run(unet), **DEFAULT)
    assert float((out - expected_of(attention, tokens, plans[0], DEFAULT)).abs().max()) < TOLERANCE


@pytest.mark.parametrize("upcast", [{}, {"upcast_attention": True}, {"upcast_softmax": True}], ids=str)
@pytest.mark.parametrize("sliced", [False, True])
def test_scores_with_a_channel_are_those_with_a_mask(upcast, sliced, monkeypatch):
    unet = make_unet()
    attention = find_blocks(unet)[0].block.attn1
    for name, value in upcast.items():
        setattr(attention, name, value)
    unet.set_attn_processor(SlicedAttnProcessor(2) if sliced else AttnProcessor())
    _, by_channel = record(unet, attention, lambda: run(unet), **DEFAULT)
    own = type(
        "Own", (type(attention.processor),), {"__call__": lambda self, *args, **given: call(self, *args, **given)}
    )
    call = type(attention.processor).__call__
    unet.set_attn_processor(own(2) if sliced else own())  # a subclass that may compute scores in another way
    masks, scores = [], type(attention).get_attention_scores
    monkeypatch.setattr(
        type(attention), "get_attention_scores", lambda *args: (masks.append(args[3] is not None), scores(*args))[1]
    )
    _, by_mask = record(unet, attention, lambda: run(unet), **DEFAULT)
    assert any(masks) and float((by_channel - by_mask).abs().max()) < TOLERANCE


def test_a_mask_over_the_text_stays_with_merged_cross_attention(plans):
    """Around cross-attention the queries merge and the keys are text: nothing is weighted there."""
    unet = make_unet()
    attention = find_blocks(unet)[0].block.attn2
    given = inputs()
    mask = paddle.to_tensor([[1] * given["encoder_hidden_states"].shape[1]] * 2)

    def make_pass():
        unet(given["sample"], 10, given["encoder_hidden_states"], encoder_attention_mask=mask)

    tokens, out = record(unet, attention, make_pass, **DEFAULT, merge_crossattn=True)
    with paddle.no_grad():
        text = given["encoder_hidden_states"]
        expected = AttnProcessor()(attention, merge(tokens, plans[0]), encoder_hidden_states=text)
    assert float((out - unmerge(expected, plans[0])).abs().max()) < TOLERANCE


@pytest.mark.parametrize("settings", [{}, TOMESD, KV, ASYMMETRIC, {**DEFAULT, "merge_crossattn": True}], ids=str)
def test_positional_arguments_are_those_of_the_layer(settings, monkeypatch):
    """None is dropped: more than the layer takes are an error, as without merging, and so is one that comes twice."""
    unet, tokens, text = make_unet(), noise(2, 256, 32), noise(2, 7, 24)
    block = find_blocks(unet)[0].block
    calls = [
        (block.attn1, (tokens, None, None, 2.0), {}, "takes from .* positional arguments but .* were given"),
        (block.attn2, (tokens, text, None, 2.0), {}, "takes from .* positional arguments but .* were given"),
        (block.attn2, (tokens, text), {"encoder_hidden_states": text}, "multiple values for .*encoder_hidden_states"),
    ]

    def check():
        for layer, arguments, named, message in calls:
            with pytest.raises(TypeError, match=message):
                layer(*arguments, **named)

    check()
    unet.apply_tome(**settings)
    monkeypatch.setattr(passes._current, "plan", match_tokens(tokens, Grid(16, 16), removed=100, removed_keys=150))
    check()
    with paddle.no_grad():
        named = block.attn2(tokens, encoder_hidden_states=text, attention_mask=None).numpy()
        np.testing.assert_array_equal(block.attn2(tokens, text, None).numpy(), named)


def test_positional_arguments_reach_a_method_below(monkeypatch):
    """Also one that the layer's own `forward` does not have."""
    unet, tokens = make_unet(), noise(2, 256, 32)
    attention = find_blocks(unet)[0].block.attn1

    def scaled(self, hidden_states, encoder_hidden_states=None, attention_mask=None, factor=1.0):
        return factor * type(attention).forward(self, hidden_states)

    attention.forward = MethodType(scaled, attention)
    unet.apply_tome(**DEFAULT)
    monkeypatch.setattr(passes._current, "plan", match_tokens(tokens, Grid(16, 16), removed=100, removed_keys=150))
    with paddle.no_grad():
        np.testing.assert_array_equal((2 * attention(tokens)).numpy(), attention(tokens, None, None, 2.0).numpy())
