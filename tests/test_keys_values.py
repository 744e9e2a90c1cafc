"""merge_attn="kv" and "asymmetric": keys and values merge, queries and output do not, or less; by pairs and cells."""

import copy

import numpy as np
import paddle
import pytest
from conftest import Recorder, inputs, make_controlnet, make_unet, repeat, run, sizes_of, traces
from paddle import nn
from ppdiffusers.models.attention_processor import (
    AttnProcessor,
    FusedJointAttnProcessor2_5,
    SlicedAttnProcessor,
    XFormersAttnProcessor,
)
from ppdiffusers.models.lora import LoRALinearLayer
from zoo import ZOO, generate
from zoo.noise import noise
from zoo.transformers import HIDDEN, dit, sd3
from zoo.videos import FRAMES, unet_3d

from ppdiffusers_tome import ToMePassError, choose_dst, merge, unmerge
from ppdiffusers_tome.models import find_blocks
from ppdiffusers_tome.positions import Grid

PROCESSORS = {
    "plain": AttnProcessor,
    "xformers": XFormersAttnProcessor,
    "sliced": lambda: SlicedAttnProcessor(1),
}
TOMESD = {"proportional": False, "window": None, "merge_attn": True}
KV = {**TOMESD, "merge_attn": "kv"}
ASYMMETRIC = {**TOMESD, "merge_attn": "asymmetric"}
CELLS = {**KV, "ratio": 0.75, "match": "grid"}
TODO = {**CELLS, "use_rand": False, "blend": 0}
TOLERANCE = 5e-6  # float32 sums of up to 256 terms in another order, outputs of size 3


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


SETTINGS = {
    "pairs": {**KV, "ratio": 0.5},
    "pairs in windows": {**KV, "ratio": 0.7, "window": 4},
    "cells": CELLS,
    "cells, blend 0.1": {**CELLS, "blend": 0.1},
    "ToDo": TODO,
}


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("proportional", [False, True])
def test_attention_is_that_over_merged_keys_and_values(processor, name, proportional, plans):
    """With proportional attention over as many copies of each as it counts."""
    unet, settings = make_unet(), {**SETTINGS[name], "proportional": proportional}
    unet.set_attn_processor(PROCESSORS[processor]())
    attention = find_blocks(unet)[0].block.attn1
    tokens, out = record(unet, attention, lambda: run(unet), **settings)
    assert tokens.shape == out.shape == [2, 256, 32]
    merged = merge(tokens, plans[0], settings.get("blend", 1.0))
    assert merged.shape[1] == 256 - int(256 * settings["ratio"])
    keys = repeat(merged, sizes_of(plans[0])) if proportional else merged
    with paddle.no_grad():
        expected = AttnProcessor()(attention, tokens, encoder_hidden_states=keys)
        plain = AttnProcessor()(attention, tokens)
    assert float((out - expected).abs().max()) < TOLERANCE
    assert float((out - plain).abs().max()) > 10 * TOLERANCE


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("ratio", [0.5, 0.1])
@pytest.mark.parametrize("proportional", [False, True])
def test_asymmetric_attention_is_that_of_merged_queries_over_keys_merged_further(
    processor, ratio, proportional, plans
):
    unet, settings = make_unet(), {**ASYMMETRIC, "ratio": ratio, "window": 4, "proportional": proportional}
    unet.set_attn_processor(PROCESSORS[processor]())
    attention = find_blocks(unet)[0].block.attn1
    tokens, out = record(unet, attention, lambda: run(unet), **settings)
    plan = plans[0]
    assert (plan.kept, plan.keys.kept) == {0.5: (204, 81), 0.1: (248, 215)}[ratio]
    keys = merge(tokens, plan.keys)
    keys = repeat(keys, sizes_of(plan.keys)) if proportional else keys
    with paddle.no_grad():
        expected = unmerge(AttnProcessor()(attention, merge(tokens, plan), encoder_hidden_states=keys), plan)
    assert float((out - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("settings", [{}, {"match": "grid"}, {"merge_mlp": True, "proportional": True}], ids=str)
def test_asymmetric_at_the_largest_ratio_is_symmetric(settings):
    """Cells let no key merge further than all tokens do."""
    unet = make_unet()
    symmetric = run(unet.apply_tome(0.75, **{**TOMESD, **settings}))
    np.testing.assert_array_equal(run(unet.apply_tome(0.75, **{**ASYMMETRIC, **settings})), symmetric)


def test_asymmetric_needs_a_processor_that_computes_keys_of_what_it_is_given():
    class Scaled(AttnProcessor):
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return super().__call__(attn, hidden_states * 2, *args, **kwargs)

    unet = make_unet()
    unet.set_attn_processor(Scaled())
    run(unet.apply_tome(merge_attn=True))
    with pytest.raises(
        ToMePassError, match="merge_attn='asymmetric': Scaled computes keys or values from other tokens"
    ):
        run(unet.apply_tome(merge_attn="asymmetric"))


def test_todo_takes_every_second_row_and_column_as_keys_and_values():
    unet = make_unet()
    attention = find_blocks(unet)[0].block.attn1
    tokens, out = record(unet, attention, lambda: run(unet), **TODO)
    with paddle.no_grad():
        image = tokens.reshape([2, 16, 16, 32])
        expected = AttnProcessor()(attention, tokens, encoder_hidden_states=image[:, ::2, ::2].reshape([2, 64, 32]))
    assert float((out - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize(("h", "w"), [(9, 11), (3, 2), (1, 7)])
@pytest.mark.parametrize("settings", [CELLS, TODO, {**KV, "ratio": 0.6}], ids=str)
def test_grids_with_remainders(settings, h, w):
    """One key of each complete cell remains; a grid of one row has none and stays plain."""
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
    expected = max(cells, h * w - int(h * w * settings["ratio"])) if "match" not in settings else cells
    assert kept == [expected if cells else h * w]
    assert np.array_equal(merged, plain) == (cells == 0)
    assert np.array_equal(run(unet.remove_tome(), h=h, w=w), plain)


@pytest.mark.parametrize("settings", [{**KV, "ratio": 0.5}, CELLS, ASYMMETRIC], ids=["pairs", "cells", "asymmetric"])
@pytest.mark.parametrize("proportional", [False, True])
def test_joint_attention_merges_keys_and_values_of_the_image_only(settings, proportional, plans):
    model = sd3()
    attention = find_blocks(model)[0].block.attn
    given = {
        "encoder_hidden_states": noise(2, 5, 2 * HIDDEN, seed=1),
        "pooled_projections": noise(2, 2 * HIDDEN, seed=2),
        "timestep": paddle.to_tensor([10, 10]),
    }
    seen, out = {}, {}
    handles = [
        attention.to_q.register_forward_pre_hook(lambda layer, args: seen.update(image=args[0])),
        attention.add_q_proj.register_forward_pre_hook(lambda layer, args: seen.update(text=args[0])),
        attention.register_forward_post_hook(
            lambda layer, args, pair: out.update(zip(("image", "text"), pair, strict=True))
        ),
    ]
    with paddle.no_grad():
        model(noise(2, 4, 16, 16), **given)
        for handle in handles[:2]:
            handle.remove()
        model.apply_tome(**{**settings, "proportional": proportional})
        model(noise(2, 4, 16, 16), **given)
    handles[2].remove()
    model.remove_tome()
    plan = plans[0]
    is_kv = settings["merge_attn"] == "kv"
    keys = merge(seen["image"], plan.keys)
    keys = repeat(keys, sizes_of(plan.keys)) if proportional else keys
    for projection in (attention.to_k, attention.to_v):
        projection.register_forward_pre_hook(lambda layer, args: keys)
    with paddle.no_grad():
        queries = seen["image"] if is_kv else merge(seen["image"], plan)
        image, text = attention(queries, encoder_hidden_states=seen["text"])
    image = image if is_kv else unmerge(image, plan)
    assert image.shape[1] == out["image"].shape[1] == plan.tokens
    assert float((out["image"] - image).abs().max()) < TOLERANCE
    assert float((out["text"] - text).abs().max()) < TOLERANCE


def sample_of_dit(model):
    labels = paddle.to_tensor([1, 2])
    return model(noise(2, 4, 16, 16), timestep=paddle.to_tensor([10, 10]), class_labels=labels, return_dict=False)[0]


def sample_of_sd3(model):
    given = {"encoder_hidden_states": noise(2, 5, 2 * HIDDEN, seed=1), "pooled_projections": noise(2, 2 * HIDDEN)}
    return model(noise(2, 4, 16, 16), timestep=paddle.to_tensor([10, 10]), return_dict=False, **given)[0]


def sample_of_video(model):
    return model(noise(2, 4, FRAMES, 8, 8), paddle.to_tensor([10]), noise(2, 5, HIDDEN)).sample


def sample_of_controlnet(model):
    given = inputs()
    return model(given["sample"], 10, given["encoder_hidden_states"], noise(2, 3, 32, 32))[0][-1]


def controlnet_with_outputs():
    model = make_controlnet()
    for convolution in model.controlnet_down_blocks:  # zero at first
        convolution.weight.set_value(paddle.randn(convolution.weight.shape))
    return model


MODELS = {
    "unet": (make_unet, lambda unet: unet(**inputs()).sample),
    "dit": (dit, sample_of_dit),
    "sd3": (sd3, sample_of_sd3),
    "video": (unet_3d, sample_of_video),
    "controlnet": (controlnet_with_outputs, sample_of_controlnet),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "settings",
    [{**KV, "proportional": True}, CELLS, {**CELLS, "merge_attn": True}, {**ASYMMETRIC, "proportional": True}],
    ids=str,
)
@paddle.no_grad()
def test_plain_applied_removed(name, settings):
    make, sample = MODELS[name]
    model = make()
    before, plain = traces(model), sample(model).numpy()
    model.apply_tome(**settings)
    merged = sample(model).numpy()
    assert np.abs(merged - plain).max() > 1e-5 and np.isfinite(merged).all()
    np.testing.assert_array_equal(sample(copy.deepcopy(model)).numpy(), merged)
    with model.tome(ratio=0.25, **TOMESD):
        assert not np.array_equal(sample(model).numpy(), merged)
    np.testing.assert_array_equal(sample(model).numpy(), merged)
    np.testing.assert_array_equal(sample(model.remove_tome()).numpy(), plain)
    assert traces(model) == before


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
    for settings in (KV, ASYMMETRIC):
        tiny.pipe.apply_tome(ratio=0.5, **{**settings, "proportional": True})
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


@pytest.mark.parametrize("settings", [{}, {**KV, "proportional": True}, CELLS, ASYMMETRIC], ids=str)
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


def adapt(unet, names):
    for mergeable in find_blocks(unet):
        for name in names:
            attention = mergeable.block.attn1
            setattr(attention, name, Adapted(getattr(attention, name)))


@pytest.mark.parametrize("processor", ["plain", "xformers"])
@pytest.mark.parametrize("settings", [KV, CELLS, ASYMMETRIC, TOMESD], ids=str)
def test_adapters_around_projections(processor, settings, plans):
    """Merging is the same, applied before or after them."""
    unet, settings = make_unet(), {**settings, "proportional": True}
    unet.set_attn_processor(PROCESSORS[processor]())
    adapt(unet, ["to_k", "to_v", "to_q"])
    attention = find_blocks(unet)[0].block.attn1
    tokens, out = record(unet, attention, lambda: run(unet), **settings)
    plan, keeps_queries = plans[0], settings["merge_attn"] == "kv"
    keys = repeat(merge(tokens, plan.keys), sizes_of(plan.keys))
    with paddle.no_grad():
        queries = tokens if keeps_queries else merge(tokens, plan)
        expected = AttnProcessor()(attention, queries, encoder_hidden_states=keys)
        expected = expected if keeps_queries else unmerge(expected, plan)
    assert float((out - expected).abs().max()) < TOLERANCE
    assert unet.apply_tome(**settings).tome_summary(16, 16).saved > 0

    fresh = make_unet()
    fresh.set_attn_processor(PROCESSORS[processor]())
    fresh.apply_tome(**settings)
    adapt(fresh, ["to_k", "to_v", "to_q"])
    np.testing.assert_array_equal(run(fresh), run(unet))


@pytest.mark.parametrize("processor", PROCESSORS)
def test_lora_of_ppdiffusers_sees_merged_tokens(processor):
    """`set_lora_layer` before and after merging is applied; the adapter's keys are those of the merged tokens."""
    unet = make_unet()
    unet.set_attn_processor(PROCESSORS[processor]())
    outputs, lengths = [], []
    settings = {**KV, "proportional": True}
    for is_first in (True, False):
        if is_first:
            unet.apply_tome(**settings)
        paddle.seed(3)
        for mergeable in find_blocks(unet):
            for name in ("to_q", "to_k", "to_v"):
                projection = getattr(mergeable.block.attn1, name)
                lora = LoRALinearLayer(*projection.weight.shape, rank=2)
                lora.up.weight.set_value(paddle.randn(lora.up.weight.shape))
                projection.set_lora_layer(lora)
        if not is_first:
            plain = run(unet)
            unet.apply_tome(**settings)
        lengths.clear()
        attention = find_blocks(unet)[0].block.attn1
        for name in ("to_k", "to_v"):
            lora = getattr(attention, name).lora_layer
            lora.register_forward_pre_hook(lambda layer, args: lengths.append(args[0].shape[1]))
        outputs.append(run(unet))
        assert lengths == [128, 128]
        unet.remove_tome()
        for mergeable in find_blocks(unet):
            for name in ("to_q", "to_k", "to_v"):
                getattr(mergeable.block.attn1, name).set_lora_layer(None)
    np.testing.assert_array_equal(*outputs)
    assert np.abs(outputs[0] - plain).max() > 1e-4


@pytest.mark.parametrize("settings", [KV, ASYMMETRIC, {**TOMESD, "proportional": True}], ids=str)
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
        expected = sample_of_sd3(model.apply_tome(**TOMESD))
        model.set_attn_processor(FusedJointAttnProcessor2_5())
        assert float((sample_of_sd3(model) - expected).abs().max()) < 1e-4  # merging around the attention works
        model.apply_tome(**settings)
        with pytest.raises(ToMePassError, match=r"FusedJointAttnProcessor2_5 has n(ot|either)"):
            sample_of_sd3(model)


# Host work


CALLS = {
    "paddle": ("to_tensor", "assign", "arange"),
    "numpy": ("argsort", "setdiff1d", "bincount"),
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 8},
        {"window": 4, "proportional": True},
        {**KV, "proportional": True},
        {**ASYMMETRIC, "window": 4, "proportional": True},
        CELLS,
        {"use_rand": False},
    ],
    ids=str,
)
def test_a_steady_pass_does_no_host_work_and_copies_nothing_to_the_device(settings, monkeypatch):
    from ppdiffusers_tome import positions

    unet, counts = make_unet(), {}

    def count(owner, name):
        function = getattr(owner, name)

        def counting(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    arguments = inputs()
    run(unet)
    for name in CALLS["paddle"]:
        count(paddle, name)
    for name in CALLS["numpy"]:
        count(np, name)
    count(np.random, "RandomState")
    count(positions, "choose_dst")
    for cached in (positions.constant_positions, positions.constant_cells):
        cached.cache_clear()

    def counted():
        counts.clear()
        with paddle.no_grad():
            unet(**arguments)
        return dict(counts)

    plain = counted()
    unet.apply_tome(**{**TOMESD, **settings})
    first, second = counted(), counted()
    assert first["choose_dst"] > 0 and first["to_tensor"] > plain.get("to_tensor", 0)
    assert second == plain  # what ppdiffusers itself does
    unet.apply_tome(**{**TOMESD, "merge_mlp": True, **settings})
    assert counted() == plain  # the same positions in another method


def test_kept_positions_are_bounded():
    from ppdiffusers_tome import positions

    for side in range(4, 4 + positions.KEPT + 8):
        positions.constant_positions(Grid(4, side), 2, 2, (0, 0))
        positions.constant_cells(Grid(4, side), 2, 2, (0, 0))
    for cached in (positions.constant_positions, positions.constant_cells):
        assert cached.cache_info().currsize == cached.cache_info().maxsize == positions.KEPT
        cached.cache_clear()


def test_kept_positions_are_those_of_their_key():
    from ppdiffusers_tome import positions

    for key in ((0, 0), (1, 0), (0, 1), None):
        for h, w, sx in ((8, 6, 2), (6, 8, 2), (8, 6, 3)):
            for _ in range(2):
                kept = positions.constant_positions(Grid(h, w), sx, 2, key)
                assert kept.dst.tolist() == choose_dst(Grid(h, w), sx, 2, key).tolist()


def test_without_a_seed_nothing_is_kept(plans):
    """Each pass draws its own dst, which no other pass uses."""
    from ppdiffusers_tome import positions

    before = positions.constant_positions.cache_info().currsize
    unet = make_unet().apply_tome(seed=None, **TOMESD)
    run(unet), run(unet)
    half = len(plans) // 2
    assert not np.array_equal(plans[0].dst_rows.numpy(), plans[half].dst_rows.numpy())
    assert positions.constant_positions.cache_info().currsize == before
