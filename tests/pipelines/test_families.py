"""Every family: plain, merged (the image differs), removed (bit-equal, nothing left); and models that do not merge."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import ppdiffusers
import pytest
from conftest import Recorder, traces
from ppdiffusers import (
    AutoPipelineForImage2Image,
    AutoPipelineForInpainting,
    AutoPipelineForText2Image,
    DDIMScheduler,
    DiffusionPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
)
from zoo import ZOO, Tiny, generate
from zoo.controlnets import ONE
from zoo.images import IMAGE, INPAINT, TEXT, UNET, ip_adapter, prior
from zoo.parts import HIDDEN, controlnet, image, unet

from ppdiffusers_tome import NoMergeableLayerError
from ppdiffusers_tome.families.pipelines import denoisers, layer_components

# ppdiffusers' pipelines warn about deprecated arguments and classes, and Paddle 3 about their code.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:'audioop' is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Couldn't find ffmpeg:RuntimeWarning"),
]


TOMESD = {"method": "tomesd"}


def all_traces(pipe):
    return {name: traces(model) for name, model in layer_components(pipe).items()}


def merging(pipe):
    """The models that merge, as tome_summary names them."""
    return {block.denoiser for block in pipe.tome_summary().blocks}


def all_differ(*images):
    return all(np.abs(image - other).max() > 1e-4 for i, image in enumerate(images) for other in images[:i])


PAGE = (Path(__file__).parents[2] / "docs" / "development" / "families.md").read_text(encoding="utf-8")
# The models that merge by default, by pipeline class, as the page lists them.
ROWS = re.findall(r"^\| ([a-z_, ]+) \| (`.+`) \|$", PAGE.partition("## Added after")[0], re.MULTILINE)
LISTED = {name: models for models, names in ROWS for name in re.findall(r"`(\w+)`", names)}
WITHOUT_BUILDER = {
    "BlipDiffusionControlNetPipeline",
    "BlipDiffusionPipeline",
    "StableDiffusionParadigmsPipeline",
    "StableDiffusionPix2PixZeroPipeline",
    "VersatileDiffusionPipeline",
}


def test_page_lists_the_families():
    assert {*LISTED} == {name.partition("_")[0] for name in ZOO} | WITHOUT_BUILDER


@pytest.mark.parametrize("name", sorted(ZOO))
def test_family(name):
    if (name, ppdiffusers.__version__) == ("StableDiffusion3Img2ImgPipeline", "0.29.1"):
        pytest.skip(
            "without merging, ppdiffusers 0.29.1 gives the transformer texts of another batch than its latents"
        )
    tiny = ZOO[name]()
    plain, before = generate(tiny), all_traces(tiny.pipe)
    assert np.isfinite(plain).all()
    models = ", ".join(dict.fromkeys(model.split(".")[0] for model in tiny.merges))
    assert LISTED[name.partition("_")[0]] == models  # a builder's name is its class, or class_variant
    assert tiny.pipe.apply_tome(ratio=0.5) is tiny.pipe
    assert merging(tiny.pipe) == set(tiny.merges)
    merged = generate(tiny)
    assert merged.shape == plain.shape and np.isfinite(merged).all()
    assert np.abs(merged - plain).max() > 1e-5
    assert tiny.pipe.remove_tome() is tiny.pipe
    np.testing.assert_array_equal(generate(tiny), plain)
    assert all_traces(tiny.pipe) == before


def simple_unet():
    """A UNet of DeepFloyd IF, UnCLIP and Kandinsky, whose attention takes pixels and text together."""
    return unet(
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        resnet_time_scale_shift="scale_shift",
    )


def uvit():
    """U-ViT, in which image, text and time are one sequence."""
    heads = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": HIDDEN // 2}
    return ppdiffusers.UViTT2IModel(sample_size=8, in_channels=4, clip_dim=HIDDEN, num_text_tokens=24, **heads)


@pytest.mark.parametrize("make", [simple_unet, uvit, prior])
def test_model_in_which_nothing_merges(make):
    """`prior` has the blocks that merge elsewhere, but its tokens are embeddings."""
    model = make()
    pipe = OtherNames(model, DDIMScheduler())
    before = traces(model)
    for target in (model, pipe):
        sentence = f"nothing merges in {type(target).__name__}: it has no transformer blocks over the pixels"
        with pytest.raises(NoMergeableLayerError, match=f"{sentence} .*Stable Diffusion 3, FLUX"):
            target.apply_tome(ratio=0.5)
        for size in {}, {"height": 64, "width": 64}:
            summary = target.tome_summary(**size)
            first, *latents = str(summary).splitlines()
            assert first.startswith(sentence) and len(latents) == (len(size) == 2)
            assert (summary.blocks, summary.macs, summary.saved, summary.saved_share) == ((), None, None, None)
    assert traces(model) == before


@pytest.mark.parametrize(
    ("name", "settings", "expected"),  # self-attention in one pass: queries and keys of its kernel, and how often
    [
        ("StableDiffusionPipeline", TOMESD, {"unet": {(128, 128): 3, (64, 64): 4}}),
        ("StableDiffusionXLPipeline", TOMESD, {"unet": {(32, 32): 3, (16, 16): 8}}),
        ("StableDiffusionControlNetPipeline_two", TOMESD, {
            "unet": {(128, 128): 3, (64, 64): 4},
            "controlnet.nets.0": {(128, 128): 1, (64, 64): 2},
            "controlnet.nets.1": {(128, 128): 1, (64, 64): 2},
        }),
        # The last block of a UNet keeps more keys than the others.
        ("StableDiffusionPipeline", {}, {"unet": {(256, 32): 2, (256, 128): 1, (64, 64): 4}}),
        ("StableDiffusionPipeline_v2", {}, {"unet": {(256, 32): 2, (256, 128): 1, (64, 64): 4}}),
        ("StableDiffusionInpaintPipeline", {}, {"unet": {(256, 32): 2, (256, 128): 1, (64, 64): 4}}),
        ("StableDiffusionXLPipeline", {}, {"unet": {(64, 8): 2, (64, 32): 1, (16, 16): 8}}),
        ("StableDiffusionUpscalePipeline", {}, {"unet": {(16, 3): 3, (16, 8): 1}}),
        ("StableDiffusionControlNetPipeline_two", {}, {
            "unet": {(256, 32): 2, (256, 128): 1, (64, 64): 4},
            "controlnet.nets.0": {(256, 64): 1, (64, 64): 2},
            "controlnet.nets.1": {(256, 64): 1, (64, 64): 2},
        }),
        ("StableDiffusionXLControlNetPipeline", {}, {
            "unet": {(64, 8): 2, (64, 32): 1, (16, 16): 8}, "controlnet": {(64, 16): 1, (16, 16): 4},
        }),
    ],
)  # fmt: skip
def test_attention_sees_the_merged_tokens(name, settings, expected):
    tiny = ZOO[name]()
    tiny.pipe.apply_tome(**settings)
    models = denoisers(tiny.pipe)
    recorders = {name: Recorder() for name in expected}
    for model, recorder in recorders.items():
        models[model].set_attn_processor(recorder)
    generate(tiny, num_inference_steps=1, **({"strength": 1.0} if "strength" in tiny.call else {}))
    for model, recorder in recorders.items():
        assert Counter(recorder.of_self) == expected[model]
        assert recorder.all_contiguous


@pytest.mark.parametrize(
    "name",
    [
        "StableDiffusionGLIGENPipeline",
        "StableDiffusionPipeline_IP_Adapter",
        "StableDiffusionUpscalePipeline",
        "StableDiffusionXLControlNetPipeline_two",
    ],
)
def test_every_layer_at_every_level(name):
    tiny = ZOO[name]()
    plain = generate(tiny)
    with tiny.pipe.tome(0.75, **TOMESD, max_downsample=8, merge_crossattn=True, merge_mlp=True):
        assert merging(tiny.pipe) == set(tiny.merges) and all_differ(plain, generate(tiny))
    np.testing.assert_array_equal(generate(tiny), plain)


def test_ip_adapter_loaded_before_and_after():
    tiny = ZOO["StableDiffusionPipeline_IP_Adapter"]()
    weights = ip_adapter(tiny.pipe.unet)
    tiny.pipe.load_ip_adapter(weights)
    tiny.pipe.apply_tome(ratio=0.5)
    merged = generate(tiny)
    tiny.pipe.load_ip_adapter(weights)
    np.testing.assert_array_equal(generate(tiny), merged)


# Pipelines, models and functions


class Custom(StableDiffusionPipeline):
    """A user's pipeline, which generates two images."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, num_images_per_prompt=2, **kwargs)


class OtherNames(DiffusionPipeline):
    """A pipeline whose denoiser has another name."""

    def __init__(self, painter, noise):
        super().__init__()
        self.register_modules(painter=painter, noise=noise)


def test_subclass():
    pipe = Custom(**ZOO["StableDiffusionPipeline"]().pipe.components, requires_safety_checker=False)
    tiny = Tiny(pipe, TEXT, UNET)
    plain = generate(tiny)
    assert plain.shape[0] == 2
    with pipe.tome(ratio=0.5):
        assert merging(pipe) == {"unet"} and all_differ(plain, generate(tiny))
    np.testing.assert_array_equal(generate(tiny), plain)


def test_pipeline_with_other_names():
    tiny = ZOO["StableDiffusionPipeline"]()
    pipe = OtherNames(tiny.pipe.unet, tiny.pipe.scheduler).apply_tome(ratio=0.5)
    assert merging(pipe) == {"painter"} and merging(tiny.pipe) == {"unet"}
    pipe.remove_tome()
    assert merging(tiny.pipe) == set()


AUTO = {
    "text": AutoPipelineForText2Image,
    "image": AutoPipelineForImage2Image,
    "inpaint": AutoPipelineForInpainting,
}
CALLS = {"text": TEXT, "image": IMAGE, "inpaint": INPAINT}


@pytest.mark.parametrize(
    ("name", "loaders"),
    [
        ("StableDiffusionXLPipeline", [DiffusionPipeline, AutoPipelineForImage2Image]),
        ("StableDiffusionControlNetPipeline", [StableDiffusionControlNetPipeline]),
    ],
)
def test_saved_and_loaded(name, loaders, tmp_path):
    tiny = ZOO[name]()
    plain = generate(tiny)
    tiny.pipe.apply_tome(ratio=0.5)
    merged = generate(tiny)
    tiny.pipe.save_pretrained(str(tmp_path))  # while merging is on: the saved model is the plain one
    for loader in loaders:
        task = next((task for task, cls in AUTO.items() if cls is loader), "text")
        loaded = Tiny(loader.from_pretrained(str(tmp_path)), tiny.call if task == "text" else CALLS[task], tiny.merges)
        assert merging(loaded.pipe) == set()
        images = [generate(loaded)]
        loaded.pipe.apply_tome(ratio=0.5)
        images.append(generate(loaded))
        assert merging(loaded.pipe) == set(tiny.merges) and all_differ(*images)
        if task == "text":
            np.testing.assert_array_equal(images, (plain, merged))
        loaded.pipe.remove_tome()
        np.testing.assert_array_equal(generate(loaded), images[0])


def test_auto_pipelines_over_the_same_models_share_merging():
    tiny = ZOO["StableDiffusionPipeline"]()
    for task, cls in AUTO.items():
        pipe = cls.from_pipe(tiny.pipe)
        other = Tiny(pipe, CALLS[task], UNET)
        plain = generate(other)
        tiny.pipe.apply_tome(ratio=0.5)
        assert merging(pipe) == {"unet"} and all_differ(plain, generate(other))
        pipe.remove_tome()
        assert merging(tiny.pipe) == set()
        np.testing.assert_array_equal(generate(other), plain)


# ControlNets


@pytest.mark.parametrize(
    "name",
    ["StableDiffusionControlNetPipeline_two", "StableDiffusionXLControlNetPipeline"],
)
def test_controlnet_setting(name):
    tiny = ZOO[name]()
    plain, before = generate(tiny), all_traces(tiny.pipe)
    nets = set(tiny.merges) - {"unet"}

    def output(**settings):
        tiny.pipe.apply_tome(ratio=0.5, **settings)
        return generate(tiny)

    both = output()
    assert merging(tiny.pipe) == {"unet"} | nets
    np.testing.assert_array_equal(output(controlnet=True), both)
    np.testing.assert_array_equal(output(controlnet=0.5), both)
    unet_only = output(controlnet=False)
    assert merging(tiny.pipe) == {"unet"}
    np.testing.assert_array_equal(output(controlnet=0.0), unet_only)
    less = output(controlnet=0.25)
    blocks = [block for block in tiny.pipe.tome_summary().blocks if block.denoiser in nets]
    kept = {256: (256, 192), 64: (64, 48)}  # queries, and keys and values, at ratio 0.25
    assert blocks and all((block.kept_queries, block.kept_keys) == kept[block.grid.tokens] for block in blocks)
    tiny.pipe.remove_tome()
    for net in nets:
        denoisers(tiny.pipe)[net].apply_tome(ratio=0.5)
    nets_only = generate(tiny)
    assert merging(tiny.pipe) == nets
    assert all_differ(plain, both, unet_only, less, nets_only)
    tiny.pipe.remove_tome()
    np.testing.assert_array_equal(generate(tiny), plain)
    assert all_traces(tiny.pipe) == before


def test_one_of_two_controlnets():
    tiny = ZOO["StableDiffusionControlNetPipeline_two"]()
    tiny.pipe.controlnet.nets[1].apply_tome(ratio=0.5)
    assert merging(tiny.pipe) == {"controlnet.nets.1"}
    one = generate(tiny)
    tiny.pipe.controlnet.apply_tome(ratio=0.5)  # the MultiControlNetModel: both
    assert merging(tiny.pipe) == {"controlnet.nets.0", "controlnet.nets.1"}
    both = generate(tiny)
    assert all_differ(generate(Tiny(tiny.pipe.remove_tome(), tiny.call, tiny.merges)), one, both)


@pytest.mark.parametrize("task", sorted(AUTO))
def test_controlnet_added_to_a_merging_pipeline_is_plain_until_applied(task):
    pipe = ZOO["StableDiffusionPipeline"]().pipe.apply_tome(ratio=0.5)
    argument = "image" if task == "text" else "control_image"
    joined = Tiny(AUTO[task].from_pipe(pipe, controlnet=controlnet()), {**CALLS[task], argument: image(seed=1)}, ONE)
    assert merging(joined.pipe) == {"unet"}
    unet_only = generate(joined)
    joined.pipe.apply_tome(ratio=0.5)
    assert merging(joined.pipe) == set(ONE) and all_differ(unet_only, generate(joined))


def test_plain_controlnet_alone_has_nothing_to_merge():
    pipe = ZOO["StableDiffusionControlNetPipeline"]().pipe
    with pytest.raises(NoMergeableLayerError, match="controlnet=False"):
        pipe.controlnet.apply_tome(ratio=0.5, controlnet=False)
