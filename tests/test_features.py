"""All that users do with a pipeline beside merging, with merging applied before and after it."""

import copy
import tempfile
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import cuda_attention
import numpy as np
import paddle
import ppdiffusers
import pytest
from conftest import groups, inputs
from paddle import nn
from ppdiffusers.models.attention_processor import XFormersAttnProcessor
from ppdiffusers.utils import paddle_utils
from zoo import ZOO, parts, picture
from zoo.noise import noise

from ppdiffusers_tome import ToMeConfigError, hooks
from ppdiffusers_tome.models import find_blocks

pytestmark = [
    # Pipelines of ppdiffusers announce the end of arguments and classes of their own, and log as one no longer should.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning"),
]

FAMILIES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
FOX, BEAR, CRAB = "a 3d render of fox", "a flat drawing of bear", "a photo of crab"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """A tiny pipeline for all tests of this module, which leave it as it was, and its latents plain and merged."""
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
    """What a pipeline draws, before its VAE; in one step on 8×8 latents if the call does not say otherwise."""
    return picture(tiny, **{"num_inference_steps": 1, "output_type": "latent", "height": 16, "width": 16, **call})


# What each feature does to a pipeline: a context that turns it on and off, and yields what to add to the call.

FEATURES = {}
INVISIBLE = {  # the picture is the plain one
    "attention slicing",
    "attention slicing to the most",
    "feed-forward in chunks",
    "feed-forward in chunks of the batch",
    "LoRA fused and unfused",
    "xformers",
}


def feature(name, *arguments):
    def register(context):
        FEATURES[name] = lambda pipe: contextmanager(context)(pipe, *arguments)
        return context

    return register


def called(name, **call):
    """A feature that is nothing but arguments of the call."""
    FEATURES[name] = lambda pipe: nullcontext(call)


called("no guidance", guidance_scale=1.0)
called("weak guidance", guidance_scale=2.0)
called("guidance rescale", guidance_rescale=0.7)
called("negative prompt", negative_prompt="a photo of bear")
called("eta", eta=0.8, num_inference_steps=2)  # draws noise from the global generator in every step
called("clip skip", clip_skip=1)
called("latents", latents=noise(1, 4, 8, 8, seed=7))
called("two prompts, three pictures each", prompt=[FOX, CRAB], num_images_per_prompt=3)
called("a wide picture", width=40)


def save_lora(unet, folder):
    """Random LoRA weights of rank 4 for all attention projections, in the layout that ppdiffusers writes."""
    rng, state = np.random.RandomState(0), {}
    for path, layer in unet.named_sublayers():
        if path.endswith((".to_q", ".to_k", ".to_v", ".to_out.0")):
            rows, columns = layer.weight.shape
            down, up = rng.standard_normal((rows, 4)) * 0.3, rng.standard_normal((4, columns)) * 0.3
            state[f"unet.{path}.lora.down.weight"] = paddle.to_tensor(down.astype("float32"))
            state[f"unet.{path}.lora.up.weight"] = paddle.to_tensor(up.astype("float32"))
    paddle.save(state, str(Path(folder) / "paddle_lora_weights.pdparams"))


@feature("LoRA")
@feature("LoRA at half its strength", {"cross_attention_kwargs": {"scale": 0.5}})
def lora(pipe, call=None):
    with tempfile.TemporaryDirectory() as folder:
        save_lora(pipe.unet, folder)
        pipe.load_lora_weights(folder)
    try:
        yield call or {}
    finally:
        with pytest.raises(ValueError, match="should be removed"):  # ppdiffusers 0.29 trips over a guard of its own
            pipe.unload_lora_weights()


@feature("LoRA fused")
@feature("LoRA fused and unfused", True)
def fused_lora(pipe, unfused=False):
    weights = {name: each.numpy() for name, each in pipe.unet.state_dict().items()}
    try:
        with contextmanager(lora)(pipe) as call:
            with pytest.raises(ValueError, match="should be removed"):  # the same guard, after the UNet is fused
                pipe.fuse_lora(lora_scale=0.7)
            if unfused:
                with pytest.raises(ValueError, match="should be removed"):
                    pipe.unfuse_lora()
            yield call
            if not unfused:
                pipe.unet.unfuse_lora()
    finally:
        pipe.unet.set_state_dict(weights)  # what ppdiffusers takes off again is off by some last bits


@feature("textual inversion")
def textual_inversion(pipe):
    names = [name for name in ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2") if hasattr(pipe, name)]
    before = {name: getattr(pipe, name) for name in names}
    try:
        for name, part in before.items():
            setattr(pipe, name, parts.tokenizer() if name.startswith("tokenizer") else copy.deepcopy(part))
        with tempfile.TemporaryDirectory() as folder:
            paddle.save({"<owl>": noise(32, seed=3)}, str(Path(folder) / "learned_embeds.pdparams"))
            for tokenizer, encoder in zip(names[::2], names[1::2], strict=True):
                both = {"tokenizer": getattr(pipe, tokenizer), "text_encoder": getattr(pipe, encoder)}
                pipe.load_textual_inversion(folder, **both)
        yield {"prompt": "a photo of <owl>"}
    finally:
        for name, part in before.items():
            setattr(pipe, name, part)


def fourier_filter(x, threshold, scale):
    """FreeU's filter, for ppdiffusers 0.29's own raises on every Paddle."""
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


@feature("attention slicing", "auto")
@feature("attention slicing to the most", "max")
def attention_slicing(pipe, slices):
    pipe.enable_attention_slicing(slices)
    try:
        yield {}
    finally:
        pipe.disable_attention_slicing()


@contextmanager
def attention_calls():
    """What reaches ppdiffusers' attention for GPUs: lengths of queries, keys and values, and how often."""
    attend, lengths = nn.functional.scaled_dot_product_attention_, Counter()

    def note(*heads, **settings):  # queries, keys and values, each [B, N, heads, C/heads]
        assert all(each.is_contiguous() for each in heads)
        lengths[tuple(each.shape[1] for each in heads)] += 1
        return attend(*heads, **settings)

    with patch.object(nn.functional, "scaled_dot_product_attention_", note):
        yield lengths


@feature("xformers")
def xformers(pipe):
    with cuda_attention.found():
        pipe.enable_xformers_memory_efficient_attention()
    assert {type(each) for each in pipe.unet.attn_processors.values()} == {XFormersAttnProcessor}
    try:
        with attention_calls() as lengths:
            yield {}
            assert lengths
    finally:
        pipe.disable_xformers_memory_efficient_attention()


@feature("VAE slicing")
def vae_slicing(pipe):
    pipe.enable_vae_slicing()
    try:
        yield {"output_type": "np", "num_images_per_prompt": 2}
    finally:
        pipe.disable_vae_slicing()


@feature("VAE tiling")
def vae_tiling(pipe):
    pipe.enable_vae_tiling()
    try:
        yield {"output_type": "np", "height": 48, "width": 48}  # tiles are 32 pixels wide
    finally:
        pipe.disable_vae_tiling()


@feature("feed-forward in chunks", 2, 1)
@feature("feed-forward in chunks of the batch", 1, 0)
def chunks(pipe, size, dim):
    """What `enable_forward_chunking` does in the models that have it."""
    for found in find_blocks(pipe.unet):
        found.block.set_chunk_feed_forward(size, dim=dim)
    try:
        yield {}
    finally:
        for found in find_blocks(pipe.unet):
            found.block.set_chunk_feed_forward(None)


@feature("weighted prompts")
def weighted_prompts(pipe):
    """Embeddings mixed by hand, as tools for prompt weighting do."""

    def encoded(prompt):
        settings = {"num_images_per_prompt": 1, "do_classifier_free_guidance": True}
        return pipe.encode_prompt(prompt, negative_prompt=BEAR, **settings)

    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    with paddle.no_grad():
        mixed = [0.7 * one + 0.3 * other for one, other in zip(encoded(FOX), encoded(CRAB), strict=True)]
    yield {"prompt": None, **dict(zip(names, mixed, strict=False))}


SCHEDULERS = (
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "LCMScheduler",
)


def swapped_scheduler(pipe, name):
    scheduler = pipe.scheduler
    pipe.scheduler = getattr(ppdiffusers, name).from_config(scheduler.config)
    try:
        yield {"num_inference_steps": 2}
    finally:
        pipe.scheduler = scheduler


for _name in SCHEDULERS:
    feature(_name, _name)(swapped_scheduler)


def next_random():
    return paddle.randn([1]).item()


@pytest.mark.parametrize("name", FEATURES)
def test_merging_before_and_after_a_feature(family, tiny, name):
    _, plain, merged = family
    pipe, on = tiny.pipe, FEATURES[name]
    with on(pipe) as call:
        alone, dice = latents(tiny, **call), next_random()
        pipe.apply_tome(ratio=0.5)
        both = latents(tiny, **call)
        assert next_random() == dice  # merging draws nothing from the generator of a pipeline's noise
        pipe.remove_tome()
        np.testing.assert_array_equal(latents(tiny, **call), alone)
    assert np.isfinite(both).all() and both.shape == alone.shape
    assert np.abs(both - alone).max() > 1e-3
    if alone.shape == plain.shape:
        assert (np.abs(alone - plain).max() > 1e-4) == (name not in INVISIBLE)
    pipe.apply_tome(ratio=0.5)
    with on(pipe) as call:
        np.testing.assert_array_equal(latents(tiny, **call), both)
        pipe.remove_tome()
        np.testing.assert_array_equal(latents(tiny, **call), alone)
        pipe.apply_tome(ratio=0.5)
    np.testing.assert_array_equal(latents(tiny), merged)


# What ppdiffusers cannot do


def enable_xformers(tiny):
    with cuda_attention.found(False):
        tiny.pipe.enable_xformers_memory_efficient_attention()


def draw_with_free_u(tiny):
    tiny.pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
    try:
        latents(tiny)
    finally:
        tiny.pipe.disable_freeu()


@pytest.mark.parametrize(("fails", "error"), [(enable_xformers, NotImplementedError), (draw_with_free_u, ValueError)])
def test_errors_of_ppdiffusers_come_through_and_merging_stays(family, tiny, fails, error):
    _, plain, merged = family
    with pytest.raises(error) as before:
        fails(tiny)
    np.testing.assert_array_equal(latents(tiny), plain)
    tiny.pipe.apply_tome(ratio=0.5)
    with pytest.raises(error) as after:
        fails(tiny)
    assert type(after.value) is type(before.value) and str(after.value) == str(before.value)
    np.testing.assert_array_equal(latents(tiny), merged)
    tiny.pipe.disable_xformers_memory_efficient_attention()
    np.testing.assert_array_equal(latents(tiny), merged)


# What reaches the attention


TEXT = 24  # text tokens of a prompt, the tokenizer's maximum


@pytest.mark.parametrize(
    ("settings", "expected"),  # lengths of queries, keys and values, and how many layers see them
    [
        (None, {(64, 64, 64): 3, (16, 16, 16): 4, (64, TEXT, TEXT): 3, (16, TEXT, TEXT): 4}),
        ({}, {(32, 32, 32): 3, (16, 16, 16): 4, (64, TEXT, TEXT): 3, (16, TEXT, TEXT): 4}),
        ({"ratio": 0.3}, {(45, 45, 45): 3, (16, 16, 16): 4, (64, TEXT, TEXT): 3, (16, TEXT, TEXT): 4}),
        ({"max_downsample": 2}, {(32, 32, 32): 3, (8, 8, 8): 4, (64, TEXT, TEXT): 3, (16, TEXT, TEXT): 4}),
        ({"merge_crossattn": True}, {(32, 32, 32): 3, (16, 16, 16): 4, (32, TEXT, TEXT): 3, (16, TEXT, TEXT): 4}),
    ],
)
def test_queries_keys_and_values_are_merged_and_contiguous(settings, expected):
    tiny, leaving = ZOO["StableDiffusionPipeline"](), []

    class Processor(XFormersAttnProcessor):
        def __call__(self, attn, hidden_states, *args, **kwargs):
            assert hidden_states.is_contiguous()
            return super().__call__(attn, hidden_states, *args, **kwargs)

    with attention_calls() as lengths:
        tiny.pipe.unet.set_attn_processor(Processor())
        if settings is not None:
            tiny.pipe.apply_tome(**settings)
        for found in find_blocks(tiny.pipe.unet):
            found.block.attn1.register_forward_post_hook(lambda layer, given, out: leaving.append(out))
        latents(tiny)
    assert lengths == expected
    assert all(out.is_contiguous() for out in leaving)
    assert Counter(out.shape[1] for out in leaving) == {64: 3, 16: 4}


# Batches


@pytest.mark.parametrize("guidance", [1.0, 7.5])
@pytest.mark.parametrize(("prompts", "each"), [(1, 2), (1, 3), (2, 1), (3, 1), (2, 2)])
def test_a_picture_of_a_batch_is_the_picture_alone(tiny, prompts, each, guidance):
    texts, start = [FOX, BEAR, CRAB][:prompts], noise(prompts * each, 4, 8, 8)
    plain = latents(tiny, prompt=texts, num_images_per_prompt=each, guidance_scale=guidance, latents=start)
    tiny.pipe.apply_tome(ratio=0.5)
    plans, match_tokens = [], hooks.match_tokens
    with patch.object(hooks, "match_tokens", lambda *args: plans.append(match_tokens(*args)) or plans[-1]):
        together = latents(tiny, prompt=texts, num_images_per_prompt=each, guidance_scale=guidance, latents=start)
    assert together.shape == plain.shape and (np.abs(together - plain).max(axis=(1, 2, 3)) > 1e-3).all()
    for i, drawn in enumerate(together):
        alone = latents(tiny, prompt=texts[i // each], guidance_scale=guidance, latents=start[i : i + 1])
        np.testing.assert_allclose(drawn, alone[0], atol=1e-4)
    batch = prompts * each * (1 if guidance == 1.0 else 2)
    assert plans
    for plan in plans:  # one dst pattern for all, pairs for each
        dst = plan.dst_rows.numpy().reshape(batch, -1) - plan.tokens * np.arange(batch)[:, None]
        assert (dst == dst[0]).all()
        pairs = groups(plan, batch)
        assert any((pairs[i] != pairs[0]).any() for i in range(1, batch))


# Callbacks


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.75), (0.5, None), (None, 0.5)])
def test_a_callback_may_change_the_ratio_or_turn_merging_off(tiny, first, second):
    """As if the first step had been drawn by itself and the second from there."""

    def merge(pipe, ratio):
        pipe.remove_tome() if ratio is None else pipe.apply_tome(ratio=ratio)

    def drawn(ratio, callback):
        merge(tiny.pipe, ratio)
        return latents(tiny, num_inference_steps=3, callback_on_step_end=callback)

    def step(pipe, i, t, given):
        steps.append(given["latents"])
        return {}

    def change(pipe, i, t, given):
        if i == 0:
            np.testing.assert_array_equal(given["latents"], steps[0])
            merge(pipe, second)
        return {}

    def from_first(pipe, i, t, given):
        return {"latents": steps[0]} if i == 0 else {}

    steps = []
    throughout = drawn(first, step)
    changed = drawn(first, change)
    assert np.abs(changed - throughout).max() > 1e-3
    np.testing.assert_array_equal(changed, drawn(second, from_first))
    merge(tiny.pipe, first)
    older = {"callback": lambda i, t, now: merge(tiny.pipe, second), "callback_steps": 5}  # after step 0 alone
    np.testing.assert_array_equal(latents(tiny, num_inference_steps=3, **older), changed)


# Chunked feed-forward layers


CHUNKED = {
    "UNetMotionModel": "AnimateDiffPipeline",
    "UNet3DConditionModel": "TextToVideoSDPipeline",
    "UNetSpatioTemporalConditionModel": "StableVideoDiffusionPipeline",
    "SD3Transformer2DModel": "StableDiffusion3Pipeline",
}


@contextmanager
def concat_with_dim():
    """ppdiffusers calls `paddle.concat(dim=…)` in some chunked layers, which Paddle 3 takes and Paddle 2 refuses."""
    concat = paddle.concat

    def either(x, axis=0, dim=None):
        return concat(x, axis=axis if dim is None else dim)

    with patch.object(paddle, "concat", either):
        yield


@pytest.mark.parametrize("model", CHUNKED)
def test_feed_forward_chunks_of_models_that_have_them(model):
    tiny = ZOO[CHUNKED[model]]()
    denoiser = tiny.pipe.components[tiny.merges[0]]

    def drawn():
        with concat_with_dim():
            return picture(tiny, num_inference_steps=1, output_type="latent")

    plain = drawn()
    tiny.pipe.apply_tome(ratio=0.5)
    merged = drawn()
    assert np.abs(merged - plain).max() > 1e-4
    denoiser.enable_forward_chunking(1, dim=0)
    assert all(found.block._chunk_size == 1 for found in find_blocks(denoiser))
    chunked = drawn()
    tiny.pipe.remove_tome()
    chunked_alone = drawn()
    assert np.abs(chunked - chunked_alone).max() > 1e-4
    if model != "UNetSpatioTemporalConditionModel":  # where chunks go through another layer, a slip of ppdiffusers
        np.testing.assert_allclose(chunked, merged, atol=1e-4)
        np.testing.assert_allclose(chunked_alone, plain, atol=1e-4)
    with pytest.raises(ToMeConfigError, match=r"merge_mlp=True .* turn chunking off"):
        tiny.pipe.apply_tome(ratio=0.5, merge_mlp=True)
    np.testing.assert_array_equal((tiny.pipe.apply_tome(ratio=0.5), drawn())[1], chunked)
    for layer in denoiser.sublayers():  # two of the four have no disable_forward_chunking()
        if hasattr(layer, "set_chunk_feed_forward"):
            layer.set_chunk_feed_forward(None)
    np.testing.assert_array_equal(drawn(), merged)
    tiny.pipe.apply_tome(ratio=0.5, merge_mlp=True)
    assert np.abs(drawn() - merged).max() > 1e-4
    for dim in (0, 1):
        denoiser.enable_forward_chunking(1, dim=dim)
        with pytest.raises(ToMeConfigError, match=r"merge_mlp=True .* turn chunking off"):
            drawn()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_feed_forward_chunks_refuse_merge_mlp(tiny, size, dim):
    tiny.pipe.apply_tome(ratio=0.5, merge_mlp=True)
    expected = latents(tiny)
    with contextmanager(chunks)(tiny.pipe, size, dim), pytest.raises(ToMeConfigError, match="merge_mlp=True"):
        latents(tiny)
    np.testing.assert_array_equal(latents(tiny), expected)


# Half precision


HALF = (paddle.float16, paddle.bfloat16)
OPERATORS = ("__add__", "__radd__", "__mul__", "__rmul__", "__sub__", "__truediv__", "__matmul__", "matmul")
NORMS = ("layer_norm", "group_norm", "softmax")
KERNELS = ("add", "concat", "conv2d", "gelu", "linear", "matmul", "nearest_interp", "shape", "silu", *NORMS)
AUTOCAST = ("linear", "conv2d", "matmul", "__matmul__")  # what runs in half precision at level O1


def is_half(x):
    return isinstance(x, paddle.Tensor) and x.dtype in HALF


def nested(x):
    """The tensors in lists of lists."""
    if isinstance(x, (list, tuple)):
        return [tensor for each in x for tensor in nested(each)]
    return [x] if isinstance(x, paddle.Tensor) else []


@contextmanager
def kernels_for_half():
    """The kernels for half precision that Paddle lacks on the CPU, and `auto_cast` at O1: in float32, then rounded.

    A result is in half precision where all tensors that went in are: what mixes the two is wide, as in Paddle.
    """
    autocast = [None]

    @contextmanager
    def auto_cast(enable=True, dtype="float16"):
        autocast.append(dtype if enable else None)
        yield
        autocast.pop()

    def widened(x):
        if isinstance(x, (list, tuple)):
            return type(x)(map(widened, x))
        return x.cast("float32") if is_half(x) else x

    def make(kernel, name):
        def run(*args, **kwargs):
            tensors = [x for x in nested((args, list(kwargs.values()))) if x.is_floating_point()]
            halves = [x.dtype for x in tensors if is_half(x)]
            out = kernel(*widened(args), **{key: widened(x) for key, x in kwargs.items()})
            if autocast[-1] and name in AUTOCAST:
                return out.cast(autocast[-1])
            narrow = halves and len(halves) == len(tensors) and out.is_floating_point()
            return out.cast(halves[0]) if narrow else out

        return run

    found = [(owner, name) for owner in (paddle._C_ops, paddle, nn.functional) for name in KERNELS]
    found += [(paddle.Tensor, name) for name in OPERATORS]
    with ExitStack() as stack:
        stack.enter_context(patch.object(paddle.amp, "auto_cast", auto_cast))
        for owner, name in found:
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, make(getattr(owner, name), name)))
        yield


def dtypes(unet, dtype):
    """What goes into and comes out of every layer of a UNet, and the UNet's output."""
    seen, handles = [], []
    for path, layer in unet.named_sublayers():

        def note(layer, given, out, path=path):
            seen.append((path, *(x.dtype for x in (*given, out) if isinstance(x, paddle.Tensor))))

        handles.append(layer.register_forward_post_hook(note))
    given = inputs(h=8, w=8)
    sample, text = given["sample"].cast(dtype), given["encoder_hidden_states"].cast(dtype)
    with paddle.no_grad():
        out = unet(sample, given["timestep"], text).sample
    for handle in handles:
        handle.remove()
    assert out.dtype == sample.dtype
    return seen, out.cast("float32").numpy()


@pytest.mark.filterwarnings("ignore:the CPU has UNet2DConditionModel in:UserWarning")
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("autocast", [False, True])
def test_models_in_half_precision_stay_in_it(unet, half, autocast, monkeypatch):
    dtype = "float32" if autocast else half
    wide, _ = dtypes(unet, "float32")
    unet.to(dtype=dtype)
    moved = []

    def noted(move, x, plan):
        out = move(x, plan)
        moved.append((x.dtype, out.dtype))
        return out

    for name in ("merge", "unmerge"):
        monkeypatch.setattr(hooks, name, partial(noted, getattr(hooks, name)))
    with kernels_for_half(), paddle.amp.auto_cast(enable=autocast, dtype=half):
        plain, before = dtypes(unet, dtype)
        settings = {"merge_crossattn": True, "merge_mlp": True, "max_downsample": 2}
        merged, after = dtypes(unet.apply_tome(ratio=0.5, **settings), dtype)
        np.testing.assert_array_equal(dtypes(unet.remove_tome(), dtype)[1], before)
    assert merged == plain != wide
    assert len(moved) == 2 * 3 * 7 and all(given == out for given, out in moved)
    assert {str(given).split(".")[-1] for given, _ in moved} == ({half, "float32"} if autocast else {half})
    assert np.abs(after - before).max() > 1e-3
