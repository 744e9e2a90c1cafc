"""MACs computed from layer shapes equal those of a real forward pass, counted layer by layer."""

from functools import partial

import paddle
import pytest
from conftest import TEXT, THREE_LEVELS, inputs, make_unet, run
from paddle import nn
from ppdiffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor, XFormersAttnProcessor
from test_rotary import CONTROLNETS, FAMILIES, OF_FLUX, OF_WAN, OTHERS
from test_transformers import TEXT as TEXT_OF_SD3
from test_transformers import real_sd35, sd3_inputs
from zoo import rotary as zoo
from zoo.noise import noise
from zoo.transformers import sd3, sd3_controlnet

from ppdiffusers_tome import (
    Grid,
    NoMergeableLayerError,
    ToMeConfig,
    ToMeConfigError,
    apply_tome,
    remove_tome,
    tome_summary,
)
from ppdiffusers_tome.attach.placement import placements
from ppdiffusers_tome.macs import count_macs, matching_macs, saved_macs
from ppdiffusers_tome.methods import METHODS

TOMESD = {"method": "tomesd"}


def measured(model, call, monkeypatch):
    """MACs of one call for one image: of layers by what they get, and of attention by the scores of each softmax."""
    counted, width = [0], [0]  # width: of the heads of the attention that runs

    def count(layer, inputs, out):
        # Of the output, because the wrap of a projection leaves out tokens of its input.
        channels = out.shape[-1 if isinstance(layer, nn.Linear) else 1]
        counted[0] += out.size // channels * layer.weight.size

    def see_width(attention, projection, inputs, out):
        width[0] = out.shape[-1] // attention.heads

    def softmax(scores, *args, **kwargs):
        counted[0] += 2 * scores.size * width[0]
        return plain_softmax(scores, *args, **kwargs)

    layers, plain_softmax = model.sublayers(), nn.functional.softmax
    kinds = (nn.Linear, nn.Conv2D, nn.Conv3D)
    hooks = [layer.register_forward_post_hook(count) for layer in layers if isinstance(layer, kinds)]
    attentions = [layer for layer in layers if hasattr(layer, "to_q")]
    hooks += [layer.to_q.register_forward_post_hook(partial(see_width, layer)) for layer in attentions]
    with monkeypatch.context() as context, paddle.no_grad():
        context.setattr(nn.functional, "softmax", softmax)
        call()
    for hook in hooks:
        hook.remove()
    return counted[0]


@pytest.mark.parametrize(
    "changes", [{}, THREE_LEVELS, {"use_linear_projection": True}, {"only_cross_attention": (True, False)}]
)
@pytest.mark.parametrize(("h", "w"), [(16, 16), (17, 20)])
def test_unet_is_counted_as_measured(changes, h, w, monkeypatch):
    unet = make_unet(**changes)
    assert count_macs(unet, Grid(h, w), TEXT) == measured(unet, lambda: run(unet, batch=1, h=h, w=w), monkeypatch)


def test_controlnet_is_counted_as_measured(controlnet, monkeypatch):
    arguments = inputs(batch=1)

    def call():
        condition = paddle.randn([1, 3, 32, 32])  # its embedding halves once
        controlnet(arguments["sample"], arguments["timestep"], arguments["encoder_hidden_states"], condition)

    assert count_macs(controlnet, Grid(16, 16), TEXT) == measured(controlnet, call, monkeypatch)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ratio": 0.5},
        {"max_downsample": 2},
        {"method": "todo"},
        {"method": "todo", "ratio": 0.5, "max_downsample": 2},
        TOMESD,
        {**TOMESD, "ratio": 0.75, "use_rand": False},
        {**TOMESD, "ratio": 0.4, "merge_crossattn": True, "merge_mlp": True},
        {**TOMESD, "ratio": 0.3, "merge_attn": False, "merge_crossattn": True, "max_downsample": 2, "sx": 4},
    ],
    ids=str,
)
def test_saved_macs_are_those_that_a_merged_pass_skips(settings, monkeypatch):
    unet, config, grid = make_unet(), ToMeConfig(**settings), Grid(16, 16)
    placed = placements(unet, config)
    saved = sum(saved_macs(mergeable, placement, grid, TEXT) for mergeable, placement in placed)
    matching = 0
    for mergeable, placement in placed if config.method == "tomesd" else ():
        tokens, channels = (256, 32) if mergeable.level == 1 else (64, 64)
        dst = tokens // (config.sx * config.sy)
        assert matching_macs(mergeable, placement, mergeable.grid(grid)) == (tokens - dst) * dst * channels
        matching += (tokens - dst) * dst * channels
    plain = measured(unet, lambda: run(unet, batch=1), monkeypatch)
    unet.apply_tome(**settings)
    merged = measured(unet, lambda: run(unet, batch=1), monkeypatch)
    assert merged < plain
    assert plain - merged == saved + matching
    if "crossattn" not in config.layers:  # a summary counts the text of a pipeline
        assert unet.tome_summary(16, 16).saved == saved


def sd3_pass(h, w):
    return sd3(), {"hidden_states": noise(1, 4, 2 * h, 2 * w), **{n: x[:1] for n, x in sd3_inputs().items()}}


def sd35_pass(h, w):
    return real_sd35(), sd3_pass(h, w)[1]


def sd3_controlnet_pass(h, w):
    return sd3_controlnet(), {**sd3_pass(h, w)[1], "controlnet_cond": noise(1, 4, 2 * h, 2 * w, seed=3)}


# A model, the arguments of a pass over one image or video of h×w tokens, text tokens, frames.
PASSES = {
    "SD3": lambda h, w: (*sd3_pass(h, w), TEXT_OF_SD3, 1),
    "SD3.5": lambda h, w: (*sd35_pass(h, w), TEXT_OF_SD3, 1),
    "SD3's ControlNet": lambda h, w: (*sd3_controlnet_pass(h, w), TEXT_OF_SD3, 1),
}
for kind in ("double", "real"):
    for family in (family for family in (*FAMILIES, *CONTROLNETS, *OTHERS) if not family.is_union):
        PASSES[f"{family.name}, {kind}"] = lambda h, w, family=family, kind=kind: (
            getattr(family, kind)(), family.inputs(h, w, batch=1), zoo.TEXT, family.frames,
        )  # fmt: skip


@pytest.mark.parametrize(("name", "h", "w"), [("SD3", 6, 8), *((name, 7, 5) for name in PASSES)])
def test_transformer_is_counted_as_measured(name, h, w, monkeypatch):
    model, arguments, text, frames = PASSES[name](h, w)
    latent = Grid(h, w) if name.startswith("FLUX") else Grid(2 * h, 2 * w)
    plain = measured(model, lambda: model(**arguments), monkeypatch)
    assert count_macs(model, latent, text, frames) == plain
    for settings in ({}, {"method": "todo", "ratio": 0.5}):
        config = ToMeConfig(**settings)
        placed = placements(model, config)
        saved = sum(saved_macs(block, placement, latent, text, frames) for block, placement in placed)
        apply_tome(model, config=config)
        assert plain - measured(model, lambda: model(**arguments), monkeypatch) == saved > 0
        summary = tome_summary(model, latent.h, latent.w, frames=frames)
        assert all(block.merges for block in summary.blocks)
        remove_tome(model)


def test_summary_of_a_video_needs_its_frames():
    model = OF_WAN.double()
    apply_tome(model)
    without = tome_summary(model, 12, 16)
    assert without.macs is None and "pass frames, the number of its latent frames" in str(without)
    few, many = (tome_summary(model, 12, 16, frames=frames) for frames in (2, 20))
    assert few.macs < many.macs and 0 < few.saved_share < many.saved_share
    assert {(block.kept_queries, block.kept_keys) for block in many.blocks} == {(48, 24)}  # in each frame
    blocks = tome_summary(apply_tome(model, method="todo"), 12, 16, frames=20).blocks
    assert {(block.kept_queries, block.kept_keys) for block in blocks} == {(48, 12)}
    with pytest.raises(ToMeConfigError, match="frames=0"):
        tome_summary(model, 12, 16, frames=0)


def test_a_model_whose_blocks_are_unknown_is_not_counted():
    model = OF_FLUX.double()
    model.transformer_blocks, model.single_transformer_blocks = nn.LayerList(), nn.LayerList([nn.Linear(2, 2)])
    assert tome_summary(model, 16, 16).macs is None
    with pytest.raises(NoMergeableLayerError, match="FluxTransformer2DModel"):
        apply_tome(model)


def test_summary_of_a_single_stream_block():
    model = OF_FLUX.double()
    for method in (method for method in METHODS if not METHODS[method].merges_queries):
        summary = tome_summary(apply_tome(model, method=method), 16, 16)
        assert [block.merges for block in summary.blocks][2:] == [("kv",)] * 2
        assert summary.macs == count_macs(model, Grid(16, 16), 512)  # the text tokens that its pipeline passes


def test_summary_of_the_bundled_pipeline(pipe):
    pipe.apply_tome(method="todo")
    small, large = pipe.tome_summary(), pipe.tome_summary(height=256, width=192)
    assert (small.latent, large.latent) == (Grid(32, 32), Grid(64, 48))
    of_small = {(b.level, b.grid, b.kept_queries, b.kept_keys, b.merges) for b in small.blocks}
    assert of_small == {(1, Grid(32, 32), 1024, 256, ("kv",))}
    assert {(b.kept_queries, b.kept_keys) for b in large.blocks} == {(3072, 768)}
    assert 0 < small.saved_share < large.saved_share < 1
    text = str(large)
    assert "unet: ratio=0.75, method='todo'" in text and "latents 64x48" in text and text.isascii()
    assert " keys and values 768 of 3072  kv" in text
    assert f"{large.saved_share:.1%} of" in text
    equal = pipe.apply_tome(method="tomesd", merge_mlp=True).tome_summary(height=256, width=192)
    assert {(b.kept_queries, b.kept_keys) for b in equal.blocks} == {(1536, 1536)}
    assert " 1536 of 3072  attn, mlp" in str(equal) and "keys and values" not in str(equal)


def test_summary_of_keys_and_values(pipe):
    """All blocks of interlace together keep as many as its ratio says; the last one keeps more."""
    plain = pipe.apply_tome(0).tome_summary()
    cells = pipe.apply_tome(method="todo").tome_summary()
    turns = pipe.apply_tome().tome_summary()
    assert {b.kept_keys for b in cells.blocks} == {256} and {b.merges for b in turns.blocks} == {("kv",)}
    assert max(turns.blocks, key=lambda block: block.kept_keys) == turns.blocks[-1]
    assert cells.saved > plain.saved == 0 and plain.macs == cells.macs == turns.macs
    checkerboard = pipe.apply_tome(ratio=0.5, method="todo").tome_summary()
    assert {(b.kept_keys, b.merges) for b in checkerboard.blocks} == {(512, ("kv",))}
    assert 3 * checkerboard.saved == 2 * cells.saved and "ratio=0.5, method='todo'" in str(checkerboard)


@pytest.mark.parametrize(
    ("processor", "fusion"),
    [
        (AttnProcessor, "not fused"),
        (partial(SlicedAttnProcessor, 2), "not fused"),
        (XFormersAttnProcessor, "fused"),
        (type("Own", (AttnProcessor,), {"__call__": lambda self, attn, *args: None}), "not known whether fused"),
    ],
)
def test_summary_names_the_attention_processors(unet, processor, fusion):
    unet.set_attn_processor(processor())
    expected = f"{type(processor()).__name__} ({fusion})"
    summary = unet.apply_tome().tome_summary()
    assert summary.attention == (expected,)
    assert f"\nattention: {expected}\n" in str(summary)
    unet.remove_tome()
    assert "attention:" not in str(unet.tome_summary())  # of no block


def test_summary_names_each_of_several_attention_processors(unet):
    first = unet.apply_tome().tome_summary().blocks[0].path
    processors = {name: AttnProcessor() for name in unet.attn_processors}
    unet.set_attn_processor({**processors, f"{first}.attn1.processor": XFormersAttnProcessor()})
    assert unet.tome_summary().attention == ("AttnProcessor (not fused)", "XFormersAttnProcessor (fused)")
    assert tome_summary(apply_tome(OF_FLUX.double()), 16, 16).attention == (
        "FluxAttnProcessor2_0 (fused on a GPU in half precision)",
    )


@pytest.mark.parametrize(
    ("method", "smallest", "merges"),
    [
        ("tomesd", 8, ("attn",)),
        ("todo", 8, ("kv",)),
        ("interlace", 16, ("kv",)),
    ],  # px: the first level has a cell, the second has none
)
def test_summary_at_ratio_0_and_of_grids_too_small_to_merge(pipe, method, smallest, merges):
    for ratio, size in ((0, 128), (0.5, smallest)):
        summary = pipe.apply_tome(ratio, method=method, max_downsample=2).tome_summary(height=size, width=size)
        nothing = {b.merges for b in summary.blocks if b.kept_keys == b.grid.tokens}
        assert nothing == {()} and str(summary).count("  plain\n") == sum(not b.merges for b in summary.blocks)
        assert all(b.merges == merges for b in summary.blocks if b.kept_keys < b.grid.tokens)
        assert any(b.merges for b in summary.blocks) == (ratio > 0)


def test_summary_with_merging_off(pipe):
    summary = pipe.tome_summary()
    assert (summary.blocks, summary.saved, summary.settings) == ((), 0, {"unet": "off"})


def test_saved_macs_can_be_negative(unet):
    assert unet.apply_tome(0.01, method="tomesd").tome_summary().saved < 0
    assert unet.apply_tome(1 / 16).tome_summary().saved > 0, "without a matching"


def test_size_is_required_without_sample_size():
    unet = make_unet(sample_size=None).apply_tome()
    with pytest.raises(ToMeConfigError, match="no sample_size"):
        unet.tome_summary()
    assert unet.tome_summary(16, 24).latent == Grid(16, 24)
