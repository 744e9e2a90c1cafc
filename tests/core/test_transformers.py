"""Transformers without a UNet: one grid of patches, at level 1; in SD3 only image tokens merge."""

import cuda_attention
import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from conftest import program_of, widths
from kept_keys import calls_of_attention, check_calls
from paddle import nn
from ppdiffusers.models.attention import JointTransformerBlock
from ppdiffusers.models.attention_processor import Attention, JointAttnProcessor2_5
from ppdiffusers_source import newer_class, runnable
from test_jit import OfSD3
from zoo import ZOO, parts
from zoo.noise import noise
from zoo.transformers import HIDDEN, dit, pixart, sd3, sd3_controlnet

from ppdiffusers_tome import Grid, NoMergeableLayerError, ToMeConfigError, ToMePassError

BATCH, TEXT = 2, 5
TIMESTEP = paddle.to_tensor([10] * BATCH)
MASK = paddle.to_tensor([[1] * TEXT, [1] * (TEXT - 2) + [0] * 2])  # the second text is shorter


def dit_inputs():
    return {"timestep": TIMESTEP, "class_labels": paddle.to_tensor([1, 2])}


def pixart_inputs():
    text = {"encoder_hidden_states": noise(BATCH, TEXT, HIDDEN, seed=1), "encoder_attention_mask": MASK}
    size = {"resolution": noise(BATCH, 2, seed=2), "aspect_ratio": noise(BATCH, 1, seed=3)}
    return {**text, "timestep": TIMESTEP, "added_cond_kwargs": size}


def sd3_inputs():
    text = {"encoder_hidden_states": noise(BATCH, TEXT, 2 * HIDDEN, seed=1)}
    return {**text, "pooled_projections": noise(BATCH, 2 * HIDDEN, seed=2), "timestep": TIMESTEP}


def pixart_of_1024_px():
    """PixArt-α at 1024 px, which is also conditioned on the image size."""
    return pixart(sample_size=128, num_attention_heads=3)  # a width that three embeddings can share


FAMILIES = {dit: dit_inputs, pixart: pixart_inputs, pixart_of_1024_px: pixart_inputs, sd3: sd3_inputs}


@paddle.no_grad()
def draw(make, model, h=16, w=16, keyword=False):
    """One forward pass; 16×16 latents are 64 tokens."""
    latents = noise(BATCH, 4, h, w)
    arguments = {"hidden_states": latents} if keyword else {}
    return model(*([] if keyword else [latents]), **arguments, **FAMILIES[make]()).sample.numpy()


@pytest.fixture(params=FAMILIES, ids=lambda make: make.__name__)
def make(request):
    return request.param


def counts(seen, *endings):
    """The distinct numbers of tokens of layers whose path ends so."""
    return {tokens for path, tokens in seen.items() if path.endswith(endings)}


METHODS_AND_KEYS = pytest.mark.parametrize(("method", "keys"), [("interlace", 16), ("todo", 16)])


@METHODS_AND_KEYS
def test_self_attention_has_the_keys_that_remain(make, method, keys):
    """Of 64 image tokens, and all of the text."""
    model = make().apply_tome(method=method)
    seen = widths(model)
    with calls_of_attention() as calls:
        draw(make, model)
    check_calls(model, calls, Grid(8, 8))
    assert counts(seen, "attn.to_q", "attn1.to_q", "attn2.to_q") == {64}
    assert counts(seen, "attn.to_k", "attn1.to_k", "attn.to_v", "attn1.to_v") == {keys}
    assert counts(seen, "attn2.to_k", "attn.add_q_proj") <= {TEXT}
    assert len([path for path in seen if path.endswith(("attn.to_q", "attn1.to_q"))]) == len(model.transformer_blocks)


def test_tomesd_is_refused_outside_of_unets(make):
    model = make()
    plain = draw(make, model)
    with pytest.raises(ToMeConfigError, match=r"'tomesd' .*UNets.*method=.interlace"):
        model.apply_tome(method="tomesd")
    np.testing.assert_array_equal(draw(make, model), plain)


@pytest.mark.parametrize("make", [dit, pixart], ids=lambda make: make.__name__)
def test_xformers_before_and_after(make):
    """PixArt's text mask reaches the attention. SD3 is left out because it always uses the function below xformers."""
    model = make().apply_tome()
    expected = draw(make, model)
    with cuda_attention.available():
        model.enable_xformers_memory_efficient_attention()
    merged = draw(make, model)
    plain = draw(make, model.remove_tome())
    np.testing.assert_allclose(merged, expected, atol=1e-5)
    assert not np.allclose(merged, plain, atol=1e-3)
    assert np.array_equal(draw(make, model.apply_tome()), merged)
    assert np.array_equal(draw(make, model.remove_tome()), plain)


class HeadNorm(nn.Layer):
    """A norm over the channels of a head, called as ppdiffusers calls that of Stable Diffusion 3.5."""

    def __init__(self, width):
        super().__init__()
        self.weight = self.create_parameter([width], default_initializer=nn.initializer.Uniform(0.5, 1.5))

    def forward(self, heads, begin_norm_axis):
        assert begin_norm_axis == 3 and heads.shape[-1] == self.weight.shape[0]
        return heads / heads.square().mean(-1, keepdim=True).sqrt() * self.weight


class OfSD35(JointAttnProcessor2_5):
    """Stable Diffusion 3.5's attention, which normalizes heads, over image and text or image alone."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        def heads(tokens):
            return tokens.reshape([tokens.shape[0], -1, attn.heads, tokens.shape[-1] // attn.heads])

        image, text = hidden_states, encoder_hidden_states
        query, key, value = (heads(project(image)) for project in (attn.to_q, attn.to_k, attn.to_v))
        query, key = attn.norm_q(query, begin_norm_axis=3), attn.norm_k(key, begin_norm_axis=3)
        if text is not None:
            added = (heads(project(text)) for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
            text_query, text_key, text_value = added
            query = paddle.concat([query, attn.norm_added_q(text_query, begin_norm_axis=3)], 1)
            key = paddle.concat([key, attn.norm_added_k(text_key, begin_norm_axis=3)], 1)
            value = paddle.concat([value, text_value], 1)
        out = F.scaled_dot_product_attention_(query, key, value, dropout_p=0.0, is_causal=False).flatten(2)
        image_out = attn.to_out[1](attn.to_out[0](out[:, : image.shape[1]]))
        if text is None:
            return image_out
        return image_out, None if attn.context_pre_only else attn.to_add_out(out[:, image.shape[1] :])


OfSD35.__name__ = "JointAttnProcessor2_5"  # of a ppdiffusers after 0.29


class DualBlock(JointTransformerBlock):
    """A block that calls its second attention, over the image tokens alone, as Stable Diffusion 3.5's."""

    def forward(self, hidden_states, encoder_hidden_states, temb):
        second = self.attn2(hidden_states=hidden_states)
        text, image = super().forward(
            hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, temb=temb
        )
        return text, image + second


def double_of_sd35():
    """Stable Diffusion 3 with norms over the channels of a head and, in the first block, a second attention."""
    model = sd3()
    blocks = model.transformer_blocks
    blocks[0].attn2 = Attention(HIDDEN, heads=2, dim_head=HIDDEN // 2, bias=True)
    blocks[0].__class__ = DualBlock
    for attention in (*(block.attn for block in blocks), blocks[0].attn2):
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            setattr(attention, name, HeadNorm(HIDDEN // 2))
        attention.set_processor(OfSD35())
    return parts.ready(model)


def real_sd35():
    """ppdiffusers' Stable Diffusion 3.5, with norms whose weights are not 1."""
    newer_class("SD3ControlNetModel")  # came with the arguments below
    model = sd3(qk_norm="rms_norm", dual_attention_layers=(0, 1))
    for path, weight in model.named_parameters():
        if ".norm_" in path:
            weight.set_value(0.5 + paddle.rand(weight.shape))
    return runnable(model)


@pytest.fixture(params=[double_of_sd35, real_sd35], ids=["double", "real"])
def sd35(request):
    return request.param()


@METHODS_AND_KEYS
def test_second_attention_merges_by_the_plan_of_its_block(sd35, method, keys):
    """The heads of both are normalized, those of the image and of the text each by their own norm."""
    sd35.apply_tome(method=method)
    seen = widths(sd35)
    with calls_of_attention() as calls:
        draw(sd3, sd35)
    check_calls(sd35, calls, Grid(8, 8))
    for name in ("attn", "attn2"):
        assert counts(seen, f"{name}.to_q") == {64} and counts(seen, f"{name}.to_k") == {keys}
    assert sd35.tome_summary(16, 16).blocks[0].merges == ("kv",)


@paddle.no_grad()
def test_each_half_of_a_batch_is_what_it_is_alone(sd35):
    """The batch of guidance: the same latents with two texts."""
    sd35.apply_tome()
    latents = paddle.concat([noise(1, 4, 12, 20)] * 2)
    arguments = sd3_inputs()
    both = sd35(latents, **arguments).sample.numpy()
    for i in range(2):
        half = {name: value[i : i + 1] for name, value in arguments.items()}
        np.testing.assert_allclose(sd35(latents[i : i + 1], **half).sample.numpy()[0], both[i], atol=2e-5)
    assert not np.allclose(both[0], both[1], atol=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of Paddle, which traces
@paddle.no_grad()
def test_program_of_heads_that_are_normalized_equals_eager(sd35):
    merged = draw(sd3, sd35.apply_tome())
    text, pooled, timestep = sd3_inputs().values()
    arguments = [noise(BATCH, 4, 16, 16), timestep, text, pooled]
    program = program_of(OfSD3(sd35), arguments)
    np.testing.assert_allclose(program(*arguments).numpy(), merged, atol=1e-6)


def draw_control(model, h=16, w=16):
    """The outputs of Stable Diffusion 3's ControlNet."""
    arguments = {"controlnet_cond": noise(BATCH, 4, h, w, seed=3), **sd3_inputs()}
    with paddle.no_grad():
        return np.stack([x.numpy() for x in model(noise(BATCH, 4, h, w), **arguments).controlnet_block_samples])


@pytest.mark.parametrize(("h", "w", "kept"), [(16, 16, 16), (12, 20, 36)])  # of 64 and 60, of which 32 are in cells
def test_controlnet_of_sd3(h, w, kept):
    controlnet = sd3_controlnet()
    plain = draw_control(controlnet, h, w)
    controlnet.apply_tome()
    assert [block.kept_keys for block in controlnet.tome_summary(h, w).blocks] == [kept] * 2
    assert not np.allclose(draw_control(controlnet, h, w), plain, atol=1e-3)
    with pytest.raises(NoMergeableLayerError, match="ControlNets"):
        controlnet.apply_tome(controlnet=False)


def test_max_downsample_makes_no_difference(make):
    model = make()
    outputs = [draw(make, model.apply_tome(ratio=0.5, max_downsample=level)) for level in (None, 1, 2, 4, 8)]
    assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


def test_latents_by_keyword(make):
    model = make().apply_tome(ratio=0.5)
    assert np.array_equal(draw(make, model, keyword=True), draw(make, model))


@pytest.mark.parametrize(
    ("make", "h", "w", "keys"), [(pixart, 12, 20, 36), (pixart_of_1024_px, 20, 12, 36), (sd3, 10, 14, 23)]
)
def test_latents_that_are_not_square(make, h, w, keys):
    """A grid of 5×7 patches has one whole cell of 4×4, of which 4 tokens remain, and all 19 outside of it."""
    model = make()
    plain = draw(make, model, h=h, w=w)
    model.apply_tome()
    seen = widths(model)
    with calls_of_attention() as calls:
        assert draw(make, model, h=h, w=w).shape == plain.shape
    check_calls(model, calls, Grid(h // 2, w // 2))
    assert counts(seen, "attn.to_q", "attn1.to_q") == {h * w // 4}
    assert counts(seen, "attn.to_k", "attn1.to_k") == {keys}
    assert np.array_equal(draw(make, model.remove_tome(), h=h, w=w), plain)


def test_fewer_codes_than_the_grid_has():
    """VQ-Diffusion's transformer also accepts fewer codes than the 64 of its grid."""
    model = ZOO["VQDiffusionPipeline"]().pipe.transformer
    text, timestep = noise(BATCH, TEXT, HIDDEN, seed=1), TIMESTEP[0]

    @paddle.no_grad()
    def denoise(codes):
        tokens = paddle.to_tensor(np.arange(BATCH * codes).reshape(BATCH, codes) % 16)
        return model(tokens, encoder_hidden_states=text, timestep=timestep).sample.numpy()

    plain = [denoise(codes) for codes in (64, 20)]
    model.apply_tome(ratio=0)
    np.testing.assert_equal([denoise(codes) for codes in (64, 20)], plain)
    model.apply_tome(ratio=0.5)
    assert not np.array_equal(denoise(64), plain[0])
    with pytest.raises(ToMePassError, match=r"20 .*8×8 .*64"):
        denoise(20)


@pytest.mark.parametrize("make", [dit, sd3], ids=lambda make: make.__name__)
def test_models_with_fused_blocks_are_rejected(make, monkeypatch):
    monkeypatch.setenv("INFERENCE_OPTIMIZE", "True")
    model = make()
    assert model.inference_optimize
    with pytest.raises(NoMergeableLayerError, match="INFERENCE_OPTIMIZE"):
        model.apply_tome()
