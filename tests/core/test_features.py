"""Other features of pipelines, combined with merging that is applied before and after them."""

import copy
import tempfile
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partialmethod
from pathlib import Path
from unittest.mock import patch

import cuda_attention
import numpy as np
import paddle
import ppdiffusers
import pytest
from conftest import inputs
from paddle import nn
from ppdiffusers.models.attention_processor import XFormersAttnProcessor
from ppdiffusers.utils import paddle_utils
from zoo import ZOO, generate, parts
from zoo.noise import noise

from ppdiffusers_tome import MergePlan, ToMeConfigError
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.methods import METHODS

pytestmark = [
    # ppdiffusers' pipelines warn about their deprecated arguments and classes, and use a deprecated log function.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning"),
]

FAMILIES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
FOX, BEAR, CRAB = "a 3d render of fox", "a flat drawing of bear", "a photo of crab"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """A tiny pipeline for all tests of this module, which restore it, and its latents plain and merged."""
    tiny = ZOO[request.param]()
    plain = latents(tiny)
    tiny.pipe.apply_tome(ratio=0.5)
    merged = latents(tiny)
    assert np.abs(merged - plain).max() > 1e-3
    return tiny, plain, merged


@pytest.fixture
def tiny(family):
    family[0].pipe.remove_tome()
    yield family[0]
    family[0].pipe.remove_tome()


def latents(tiny, **call):
    """A pipeline's output before its VAE; by default after one step on 8×8 latents."""
    return generate(tiny, **{"num_inference_steps": 1, "output_type": "latent", "height": 16, "width": 16, **call})


# Each feature is a context that turns it on and off, and yields further arguments of the call.

FEATURES = {}
WITHOUT_EFFECT = ("attention slicing", "feed-forward chunking", "xformers")  # the image is that without the feature


def feature(name, *arguments):
    def register(context):
        FEATURES[name] = lambda pipe: contextmanager(context)(pipe, *arguments)
        return context

    return register


def call_feature(name, **call):
    """Register a feature that only consists of arguments of the call."""
    FEATURES[name] = lambda pipe: nullcontext(call)


call_feature("no guidance", guidance_scale=1.0)
call_feature("eta", eta=0.8, num_inference_steps=2)  # uses noise from the global generator in every step
call_feature("two prompts, three images each", prompt=[FOX, CRAB], num_images_per_prompt=3)
call_feature("wide image", width=40)


def save_lora(unet, folder):
    """Random LoRA weights of rank 4 for all attention projections, in ppdiffusers' format."""
    rng, state = np.random.RandomState(0), {}
    for path, layer in unet.named_sublayers():
        if path.endswith((".to_q", ".to_k", ".to_v", ".to_out.0")):
            rows, columns = layer.weight.shape
            down, up = rng.standard_normal((rows, 4)) * 0.3, rng.standard_normal((4, columns)) * 0.3
            state[f"unet.{path}.lora.down.weight"] = paddle.to_tensor(down.astype("float32"))
            state[f"unet.{path}.lora.up.weight"] = paddle.to_tensor(up.astype("float32"))
    paddle.save(state, str(Path(folder) / "paddle_lora_weights.pdparams"))


def _fault():
    """The error that ppdiffusers 0.29.0 raises for LoRA, and 0.29.1 does not."""
    is_faulty = ppdiffusers.__version__ == "0.29.0"
    return pytest.raises(ValueError, match="should be removed") if is_faulty else nullcontext()


@feature("LoRA")
@feature("LoRA at scale 0.5", {"cross_attention_kwargs": {"scale": 0.5}})
def lora(pipe, call=None):
    with tempfile.TemporaryDirectory() as folder:
        save_lora(pipe.unet, folder)
        pipe.load_lora_weights(folder)
    try:
        yield call or {}
    finally:
        with _fault():  # raised after it has worked
            pipe.unload_lora_weights()


@feature("LoRA fused")
def fused_lora(pipe):
    weights = {name: weight.numpy() for name, weight in pipe.unet.state_dict().items()}
    try:
        with contextmanager(lora)(pipe) as call:
            with _fault():  # also raised, after the UNet is fused
                pipe.fuse_lora(lora_scale=0.7)
            yield call
            pipe.unet.unfuse_lora()
    finally:
        pipe.unet.set_state_dict(weights)  # unfusing in ppdiffusers changes the last bits


@feature("textual inversion")
def textual_inversion(pipe):
    names = [name for name in ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2") if hasattr(pipe, name)]
    before = {name: getattr(pipe, name) for name in names}
    try:
        for name, component in before.items():
            is_tokenizer = name.startswith("tokenizer")
            setattr(pipe, name, parts.tokenizer() if is_tokenizer else copy.deepcopy(component))
        with tempfile.TemporaryDirectory() as folder:
            paddle.save({"<owl>": noise(32, seed=3)}, str(Path(folder) / "learned_embeds.pdparams"))
            for tokenizer, encoder in zip(names[::2], names[1::2], strict=True):
                both = {"tokenizer": getattr(pipe, tokenizer), "text_encoder": getattr(pipe, encoder)}
                pipe.load_textual_inversion(folder, **both)
        yield {"prompt": "a photo of <owl>"}
    finally:
        for name, component in before.items():
            setattr(pipe, name, component)


def fourier_filter(x, threshold, scale):
    """FreeU's filter, because that of ppdiffusers 0.29 raises with every Paddle."""
    axes, middle = (-2, -1), tuple(slice(side // 2 - threshold, side // 2 + threshold) for side in x.shape[-2:])
    frequencies = np.fft.fftshift(np.fft.fftn(x.numpy(), axes=axes), axes=axes)
    frequencies[(..., *middle)] *= scale
    return paddle.to_tensor(np.fft.ifftn(np.fft.ifftshift(frequencies, axes=axes), axes=axes).real.astype("float32"))


@feature("FreeU")
def free_u(pipe):
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
    try:
        with patch.object(paddle_utils, "fourier_filter", fourier_filter):
            yield {}
    finally:
        pipe.disable_freeu()


@feature("attention slicing")
def attention_slicing(pipe):
    pipe.enable_attention_slicing()
    try:
        yield {}
    finally:
        pipe.disable_attention_slicing()


@contextmanager
def attention_calls():
    """Count the calls of ppdiffusers' attention for GPUs by the lengths of queries, keys and values."""
    attend, lengths = nn.functional.scaled_dot_product_attention_, Counter()

    def record(*heads, **settings):  # queries, keys and values, each [B, N, heads, C/heads]
        assert all(head.is_contiguous() for head in heads)
        lengths[tuple(head.shape[1] for head in heads)] += 1
        return attend(*heads, **settings)

    with patch.object(nn.functional, "scaled_dot_product_attention_", record):
        yield lengths


@feature("xformers")
def xformers(pipe):
    with cuda_attention.available():
        pipe.enable_xformers_memory_efficient_attention()
    assert {type(processor) for processor in pipe.unet.attn_processors.values()} == {XFormersAttnProcessor}
    try:
        with attention_calls() as lengths:
            yield {}
            assert lengths
    finally:
        pipe.disable_xformers_memory_efficient_attention()


@feature("feed-forward chunking")
def chunks(pipe):
    """Do what `enable_forward_chunking` does in models that have it."""
    for mergeable in find_blocks(pipe.unet):
        mergeable.layer.set_chunk_feed_forward(2, dim=1)
    try:
        yield {}
    finally:
        for mergeable in find_blocks(pipe.unet):
            mergeable.layer.set_chunk_feed_forward(None)


@feature("another scheduler")
def another_scheduler(pipe):
    scheduler = pipe.scheduler
    pipe.scheduler = ppdiffusers.EulerAncestralDiscreteScheduler.from_config(scheduler.config)
    try:
        yield {"num_inference_steps": 2}
    finally:
        pipe.scheduler = scheduler


def next_random():
    return paddle.randn([1]).item()


OF_BOTH = ("two prompts, three images each", "LoRA", "textual inversion")  # as text differs


@pytest.mark.parametrize(
    ("family", "name"),
    [*((FAMILIES[0], name) for name in FEATURES), *((FAMILIES[1], name) for name in OF_BOTH)],
    indirect=["family"],
)
def test_merging_before_and_after_a_feature(family, tiny, name):
    _, plain, merged = family
    pipe, feature_on = tiny.pipe, FEATURES[name]
    with feature_on(pipe) as call:
        unmerged, expected_random = latents(tiny, **call), next_random()
        pipe.apply_tome(ratio=0.5)
        both = latents(tiny, **call)
        assert next_random() == expected_random  # merging does not use the generator of the pipeline's noise
        pipe.remove_tome()
        np.testing.assert_array_equal(latents(tiny, **call), unmerged)
    assert np.isfinite(both).all() and both.shape == unmerged.shape
    assert np.abs(both - unmerged).max() > 1e-3
    if unmerged.shape == plain.shape:
        assert (np.abs(unmerged - plain).max() > 1e-4) == (name not in WITHOUT_EFFECT)
    pipe.apply_tome(ratio=0.5)
    with feature_on(pipe) as call:
        np.testing.assert_array_equal(latents(tiny, **call), both)
        pipe.remove_tome()
        np.testing.assert_array_equal(latents(tiny, **call), unmerged)
        pipe.apply_tome(ratio=0.5)
    np.testing.assert_array_equal(latents(tiny), merged)


# Batches


@pytest.mark.parametrize("family", FAMILIES[:1], indirect=True)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("prompts", "images", "guidance"), [(1, 3, 1.0), (2, 2, 7.5)])
def test_images_of_a_batch_equal_single_images(tiny, prompts, images, guidance, method, plans):
    texts, start = [FOX, BEAR, CRAB][:prompts], noise(prompts * images, 4, 8, 8)
    plain = latents(tiny, prompt=texts, num_images_per_prompt=images, guidance_scale=guidance, latents=start)
    tiny.pipe.apply_tome(method=method)
    together = latents(tiny, prompt=texts, num_images_per_prompt=images, guidance_scale=guidance, latents=start)
    of_batch = [*plans]
    assert together.shape == plain.shape and (np.abs(together - plain).max(axis=(1, 2, 3)) > 1e-3).all()
    for i, latent in enumerate(together):
        single = latents(tiny, prompt=texts[i // images], guidance_scale=guidance, latents=start[i : i + 1])
        np.testing.assert_allclose(latent, single[0], atol=1e-4)
    batch = prompts * images * (1 if guidance == 1.0 else 2)
    assert of_batch
    for plan in of_batch:
        positions, merging = plan.choice.positions.numpy(), plan.choice.merging
        assert len(positions) == (1 if merging is None else batch)
        if merging is not None:  # one dst pattern for all images, but different pairs
            assert (np.sort(positions[:, :4]) == np.sort(positions[:1, :4])).all()
            assert any((sources != merging.sources.numpy()[0]).any() for sources in merging.sources.numpy()[1:])


# Callbacks


@pytest.mark.parametrize("family", FAMILIES[:1], indirect=True)
@pytest.mark.parametrize(("first", "second"), [(0.5, 0.75), (0.5, None), (None, 0.5)])
def test_callback_changes_the_ratio_or_turns_merging_off(tiny, first, second):
    """The result equals a run with the second ratio that starts from the latents after the first step."""

    def merge(pipe, ratio):
        pipe.remove_tome() if ratio is None else pipe.apply_tome(ratio=ratio)

    def output(ratio, callback):
        merge(tiny.pipe, ratio)
        return latents(tiny, num_inference_steps=3, callback_on_step_end=callback)

    def step(pipe, i, t, arguments):
        steps.append(arguments["latents"])
        return {}

    def change(pipe, i, t, arguments):
        if i == 0:
            np.testing.assert_array_equal(arguments["latents"], steps[0])
            merge(pipe, second)
        return {}

    def from_first(pipe, i, t, arguments):
        return {"latents": steps[0]} if i == 0 else {}

    steps = []
    throughout = output(first, step)
    changed = output(first, change)
    assert np.abs(changed - throughout).max() > 1e-3
    np.testing.assert_array_equal(changed, output(second, from_first))
    merge(tiny.pipe, first)
    legacy = {"callback": lambda i, t, now: merge(tiny.pipe, second), "callback_steps": 5}  # only after step 0
    np.testing.assert_array_equal(latents(tiny, num_inference_steps=3, **legacy), changed)


# Chunked feed-forward layers


CHUNKABLE = {
    "UNetMotionModel": "AnimateDiffPipeline",
    "UNet3DConditionModel": "TextToVideoSDPipeline",
    "UNetSpatioTemporalConditionModel": "StableVideoDiffusionPipeline",
    "SD3Transformer2DModel": "StableDiffusion3Pipeline",
}


@contextmanager
def concat_with_dim():
    """Accept `paddle.concat(dim=…)`, which ppdiffusers uses in some chunked layers, but Paddle 2 does not support."""
    concat = paddle.concat

    def concat_with_either(x, axis=0, dim=None):
        return concat(x, axis=axis if dim is None else dim)

    with patch.object(paddle, "concat", concat_with_either):
        yield


@pytest.mark.parametrize("model", CHUNKABLE)
def test_feed_forward_chunks_of_models_that_have_them(model):
    tiny = ZOO[CHUNKABLE[model]]()
    denoiser = tiny.pipe.components[tiny.merges[0]]

    def output():
        with concat_with_dim():
            return generate(tiny, num_inference_steps=1, output_type="latent")

    plain = output()
    settings = {"method": "tomesd"} if find_blocks(denoiser)[0].merges_queries else {"merge_steps": "all"}
    tiny.pipe.apply_tome(**settings)
    merged = output()
    assert np.abs(merged - plain).max() > 1e-4
    denoiser.enable_forward_chunking(1, dim=0)
    assert all(mergeable.layer._chunk_size == 1 for mergeable in find_blocks(denoiser))
    chunked = output()
    tiny.pipe.remove_tome()
    chunked_plain = output()
    assert np.abs(chunked - chunked_plain).max() > 1e-4
    if model != "UNetSpatioTemporalConditionModel":  # whose chunks go through another layer, a bug in ppdiffusers
        np.testing.assert_allclose(chunked, merged, atol=1e-4)
        np.testing.assert_allclose(chunked_plain, plain, atol=1e-4)
    if "method" in settings:
        with pytest.raises(ToMeConfigError, match=r"merge_mlp=True .*chunking"):
            tiny.pipe.apply_tome(**settings, merge_mlp=True)
    np.testing.assert_array_equal((tiny.pipe.apply_tome(**settings), output())[1], chunked)
    for layer in denoiser.sublayers():  # two of the four have no disable_forward_chunking()
        if hasattr(layer, "set_chunk_feed_forward"):
            layer.set_chunk_feed_forward(None)
    np.testing.assert_array_equal(output(), merged)
    if "method" in settings:
        tiny.pipe.apply_tome(**settings, merge_mlp=True)
        assert np.abs(output() - merged).max() > 1e-4
        for dim in (0, 1):
            denoiser.enable_forward_chunking(1, dim=dim)
            with pytest.raises(ToMeConfigError, match=r"merge_mlp=True .*chunking"):
                output()


# Half precision


HALF = (paddle.float16, paddle.bfloat16)
OPERATORS = ("__add__", "__radd__", "__mul__", "__rmul__", "__sub__", "__truediv__", "__matmul__", "matmul")
NORMS = ("layer_norm", "group_norm", "softmax")
KERNELS = ("add", "concat", "conv2d", "gelu", "linear", "matmul", "nearest_interp", "shape", "silu", *NORMS)
ALL_LAYERS = {"merge_crossattn": True, "merge_mlp": True}
AUTOCAST = ("linear", "conv2d", "matmul", "__matmul__")  # what runs in half precision at level O1


def is_half(x):
    return isinstance(x, paddle.Tensor) and x.dtype in HALF


def nested(x):
    """The tensors in lists of lists."""
    if isinstance(x, (list, tuple)):
        return [tensor for item in x for tensor in nested(item)]
    return [x] if isinstance(x, paddle.Tensor) else []


@contextmanager
def kernels_for_half():
    """Emulate half-precision kernels, which Paddle lacks on the CPU, and `auto_cast` at O1: in float32, then rounded.

    The result is in half precision if all inputs are; mixed inputs give float32, as in Paddle.
    """
    autocast = [None]

    @contextmanager
    def auto_cast(enable=True, dtype="float16"):
        autocast.append(dtype if enable else None)
        yield
        autocast.pop()

    def to_float32(x):
        if isinstance(x, (list, tuple)):
            return type(x)(map(to_float32, x))
        return x.cast("float32") if is_half(x) else x

    def make(kernel, name):
        def run(*args, **kwargs):
            tensors = [x for x in nested((args, list(kwargs.values()))) if x.is_floating_point()]
            halves = [x.dtype for x in tensors if is_half(x)]
            out = kernel(*to_float32(args), **{key: to_float32(x) for key, x in kwargs.items()})
            if autocast[-1] and name in AUTOCAST:
                return out.cast(autocast[-1])
            is_rounded = halves and len(halves) == len(tensors) and out.is_floating_point()
            return out.cast(halves[0]) if is_rounded else out

        return run

    targets = [(owner, name) for owner in (paddle._C_ops, paddle, nn.functional) for name in KERNELS]
    targets += [(paddle.Tensor, name) for name in OPERATORS]
    with ExitStack() as stack:
        stack.enter_context(patch.object(paddle.amp, "auto_cast", auto_cast))
        for owner, name in targets:
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, make(getattr(owner, name), name)))
        yield


def dtypes(unet, dtype):
    """The dtypes of inputs and outputs of every layer of a UNet, and the UNet's output."""
    seen, handles = [], []
    for path, layer in unet.named_sublayers():

        def record(layer, arguments, out, path=path):
            seen.append((path, *(x.dtype for x in (*arguments, out) if isinstance(x, paddle.Tensor))))

        handles.append(layer.register_forward_post_hook(record))
    arguments = inputs(h=8, w=8)
    sample, text = arguments["sample"].cast(dtype), arguments["encoder_hidden_states"].cast(dtype)
    with paddle.no_grad():
        out = unet(sample, arguments["timestep"], text).sample
    for handle in handles:
        handle.remove()
    assert out.dtype == sample.dtype
    return seen, out.cast("float32").numpy()


@pytest.mark.filterwarnings("ignore:weights on the CPU. UNet2DConditionModel in:UserWarning")
@pytest.mark.parametrize(
    ("half", "autocast", "method", "moves"),  # of attention, cross-attention and feed-forward: merge and unmerge
    [
        ("float16", False, {"method": "tomesd", **ALL_LAYERS}, 6),
        ("bfloat16", True, {"method": "tomesd", **ALL_LAYERS}, 6),
        ("bfloat16", False, {"method": "interlace"}, 1),
        ("float16", True, {"method": "interlace"}, 1),
    ],
)
def test_models_in_half_precision_stay_in_it(unet, half, autocast, method, moves, monkeypatch):
    dtype = "float32" if autocast else half
    full, _ = dtypes(unet, "float32")
    unet.to(dtype=dtype)
    moved = []

    def recorded(plan, move, x):
        out = move(plan, x)
        moved.append((x.dtype, out.dtype))
        return out

    for name in ("merge", "unmerge"):
        monkeypatch.setattr(MergePlan, name, partialmethod(recorded, getattr(MergePlan, name)))
    with kernels_for_half(), paddle.amp.auto_cast(enable=autocast, dtype=half):
        plain, before = dtypes(unet, dtype)
        merged, after = dtypes(unet.apply_tome(max_downsample=2, **method), dtype)
        np.testing.assert_array_equal(dtypes(unet.remove_tome(), dtype)[1], before)
    assert merged == plain != full
    assert len(moved) == moves * 7 and all(dtype_in == dtype_out for dtype_in, dtype_out in moved)
    expected = {half, "float32"} if autocast else {half}
    if autocast and method["method"] != "tomesd":
        expected = {"float32"}  # only the output of a norm moves, to keys and values
    assert {str(dtype_in).split(".")[-1] for dtype_in, _ in moved} == expected
    assert np.abs(after - before).max() > 1e-3
