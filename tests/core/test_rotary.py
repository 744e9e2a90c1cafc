"""FLUX, CogVideoX, Wan and HunyuanVideo: rotary positions, text in the same sequence, videos frame by frame."""

import copy
from functools import partial
from types import MethodType

import cuda_attention
import numpy as np
import paddle
import pytest
from conftest import program_of, traces, widths
from forward_cache import check_with_caches
from kept_keys import calls_of_attention, check_calls
from ppdiffusers import DiffusionPipeline
from ppdiffusers_source import newer_class, runnable
from zoo import rotary as zoo
from zoo.noise import noise
from zoo.rotary import CHANNELS, FRAMES, HEADS, LATENTS, STATES, TEXT, WIDTH

from ppdiffusers_tome import Grid, ToMePassError, apply_tome, remove_tome, tome_summary
from ppdiffusers_tome.attach import outer
from ppdiffusers_tome.attach.attach import attached_placements
from ppdiffusers_tome.attach.forward import wrap_of
from ppdiffusers_tome.export.tracing import forget_traces
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.families.grids import grid_of_ids
from ppdiffusers_tome.families.stream import Text
from ppdiffusers_tome.families.table import FAMILIES as TABLE

H, W = 6, 8


class Family:
    """How a model is built, as a double with these options or of ppdiffusers' own class, and a pass."""

    def __init__(self, name, double, config, **options):
        self.name, self._double, self._config, self._options = name, double, config, options
        self.is_cog, self.is_hunyuan, self.is_flux = map(name.startswith, ("CogVideoX", "Hunyuan", "FLUX"))
        self.is_controlnet = double in (zoo.VCtrlModel, zoo.FluxControlNetModel)
        self.is_union = "num_mode" in options
        self.takes_rows = double is zoo.VCtrlModel or "use_rotary_positional_embeddings" in options
        self.frames, self.patch = (1, 1) if self.is_flux else (FRAMES, 2)

    def double(self):
        paddle.seed(0)
        model = self._double(**self._options)
        model.eval()
        return model

    def real(self):
        paddle.seed(0)
        with cuda_attention.available():  # HunyuanVideo's text refiner has no other attention that takes its mask
            model = newer_class(self._double.__name__)(**self._config)
        for path, weight in model.named_parameters():
            if ".norm_" in path:
                weight.set_value(0.5 + paddle.rand(weight.shape))
            elif path.startswith("controlnet_"):  # 0 until they are trained
                weight.set_value(paddle.rand(weight.shape) - 0.5)
        model.eval()
        return runnable(model)

    def inputs(self, h=H, w=W, batch=2, text=TEXT, timestep=10):
        """Arguments of one pass over h×w tokens, in a video of each frame."""
        if self.name == "CogVideoX-2b":  # whose text has one length
            text = TEXT
        shape = (FRAMES, LATENTS) if self.is_cog else (LATENTS, FRAMES)
        latents = noise(batch, h * w, LATENTS) if self.is_flux else noise(batch, *shape, 2 * h, 2 * w)
        arguments = {"hidden_states": latents, "timestep": paddle.full([batch], timestep)}
        if self._double is zoo.VCtrlModel:
            arguments["sample"] = arguments.pop("hidden_states")
            arguments["v_cond"] = noise(batch, FRAMES, LATENTS + 1, 2 * h, 2 * w, seed=1)
        else:
            arguments["encoder_hidden_states"] = noise(batch, text, STATES, seed=1)
        if self.takes_rows:
            arguments["image_rotary_emb"] = zoo.rotary_rows(FRAMES, h, w)
        if "has_image" in self._options:
            arguments["encoder_hidden_states_image"] = noise(batch, zoo.IMAGE, STATES, seed=7)
        if self.is_hunyuan:
            mask = [[1] * text] + [[1] * (text - 2) + [0] * 2] * (batch - 1)
            arguments |= {"encoder_attention_mask": paddle.to_tensor(mask), "guidance": paddle.full([batch], 1000.0)}
        if self.is_hunyuan or self.is_flux:
            arguments["pooled_projections"] = noise(batch, STATES, seed=2)
        if self.is_flux:
            ids = np.stack([np.zeros(h * w), *np.divmod(np.arange(h * w), w)], axis=1).astype("float32")
            arguments |= {"timestep": paddle.full([batch], timestep / 1000), "img_ids": paddle.to_tensor(ids)}
            arguments["txt_ids"] = paddle.zeros([text, 3])
            if self.is_controlnet:
                arguments["controlnet_cond"] = noise(batch, h * w, LATENTS, seed=5)
            if self.is_union:
                arguments["controlnet_mode"] = paddle.to_tensor([[1], [2]][:batch])
        return arguments


COMMON = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH, "in_channels": LATENTS}
VIDEO = {**COMMON, "out_channels": LATENTS}
COGVIDEOX = {
    **VIDEO,
    "time_embed_dim": 8,
    "text_embed_dim": STATES,
    "num_layers": 2,
    "sample_width": 2 * W,
    "sample_height": 2 * H,
    "sample_frames": 4 * FRAMES,  # not those of `inputs`, so that the model computes positions in each pass
    "max_text_seq_length": TEXT,
}
ROTARY = {"use_rotary_positional_embeddings": True}
WAN = {**VIDEO, "text_dim": STATES, "freq_dim": 8, "ffn_dim": 48, "num_layers": 2}
HUNYUAN = {
    **VIDEO,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": STATES,
    "pooled_projection_dim": STATES,
    "rope_axes_dim": zoo.AXES,
}
FLUX = {
    **COMMON,
    "num_layers": 2,
    "num_single_layers": 2,
    "axes_dims_rope": zoo.AXES,
    "joint_attention_dim": STATES,
    "pooled_projection_dim": STATES,
}
VIDEOS = [
    Family("CogVideoX-2b", zoo.CogVideoXTransformer3DModel, COGVIDEOX),
    Family("CogVideoX-5b", zoo.CogVideoXTransformer3DModel, {**COGVIDEOX, **ROTARY}, **ROTARY),
    Family("Wan", zoo.WanTransformer3DModel, WAN),
    Family("HunyuanVideo", zoo.HunyuanVideoTransformer3DModel, HUNYUAN),
]
COG_2B, COG_5B, OF_WAN, OF_HUNYUAN = VIDEOS
OF_FLUX = Family("FLUX", zoo.FluxTransformer2DModel, FLUX)
FAMILIES = [*VIDEOS, OF_FLUX]
VCTRL = Family("CogVideoX's VCtrl", zoo.VCtrlModel, {**COMMON, "time_embed_dim": 8, "num_layers": 2})
CONTROLNETS = [
    VCTRL,
    Family("FLUX's ControlNet", zoo.FluxControlNetModel, FLUX),
    Family("FLUX's ControlNet, several kinds", zoo.FluxControlNetModel, {**FLUX, "num_mode": 3}, num_mode=3),
]
OTHERS = [
    Family("CogVideoX with VCtrl", zoo.CogVideoXTransformer3DVCtrlModel, {**COGVIDEOX, **ROTARY}, **ROTARY),
    Family(
        "Wan with an image",
        zoo.WanTransformer3DModel,
        {**WAN, "image_dim": STATES, "added_kv_proj_dim": CHANNELS},
        has_image=True,
    ),
]


def named(family):
    return family.name


@pytest.fixture(params=FAMILIES, ids=named)
def family(request):
    return request.param


@pytest.fixture(params=["double", "real"])
def model(request, family):
    return getattr(family, request.param)()


@paddle.no_grad()
def run(model, inputs):
    """The output of a pass; of a ControlNet all of them, [outputs, …]."""
    out = model(**inputs)
    if hasattr(out, "sample"):
        return out.sample.numpy()
    names = ("vctrl_block_samples", "controlnet_block_samples", "controlnet_single_block_samples")
    return np.stack([x.numpy() for name in names for x in getattr(out, name, ())])


ALL = pytest.mark.parametrize("family", [*FAMILIES, *CONTROLNETS, *OTHERS], ids=named)


@ALL
@pytest.mark.parametrize(("method", "h", "w", "text"), [("interlace", 7, 5, 9), ("todo", 6, 8, TEXT)])
def test_three_ways(family, model, method, h, w, text):
    inputs = family.inputs(h, w, text=text)
    plain, before = run(model, inputs), traces(model)
    np.testing.assert_array_equal(run(apply_tome(model, 0), inputs), plain)
    merged = run(apply_tome(model, method=method), inputs)
    assert all(not np.allclose(x, y, atol=1e-4) for x, y in zip(merged, plain, strict=True))
    summary = tome_summary(model, family.patch * h, family.patch * w, frames=FRAMES)
    kept = {placement.count_kept(Grid(h, w)) for _, placement in attached_placements(model)}
    assert {block.kept_queries for block in summary.blocks} == {h * w} and max(kept) < h * w
    assert {block.kept_keys for block in summary.blocks} == kept
    assert {block.merges for block in summary.blocks} == {("kv",)}
    assert (summary.macs is None) == family.is_union
    copied = copy.deepcopy(model)
    np.testing.assert_array_equal(run(copied, inputs), merged)
    np.testing.assert_array_equal(run(remove_tome(copied), inputs), plain)
    np.testing.assert_array_equal(run(model, inputs), merged)
    np.testing.assert_array_equal(run(remove_tome(model), inputs), plain)
    assert traces(model) == before


@ALL
@pytest.mark.parametrize(("method", "timestep"), [("interlace", 480), ("todo", 10)])
def test_attention_is_that_over_the_keys_that_remain(family, model, method, timestep):
    """Text is left alone, and each key that remains has the position of its token."""
    apply_tome(model, method=method)
    with calls_of_attention() as calls:
        run(model, family.inputs(timestep=timestep))
    check_calls(model, calls, Grid(H, W), timestep, family.frames)


def test_every_block_of_the_table_has_a_double():
    models = [family.double() for family in (*FAMILIES, *CONTROLNETS, *OTHERS)]
    blocks = {type(block.layer).__name__ for model in models for block in find_blocks(model)}
    assert blocks == {name for entry in TABLE for name in entry.blocks if isinstance(name, str)}
    transformers = {name for entry in TABLE for name in entry.transformers if isinstance(name, str)}
    assert {type(model).__name__ for model in models} == transformers - {"SD3ControlNetModel"}


class Several(DiffusionPipeline):
    """A pipeline with FLUX's transformer and two ControlNets, as `FluxMultiControlNetModel` has them."""

    def __init__(self, transformer, controlnet):
        super().__init__()
        self.register_modules(transformer=transformer, controlnet=controlnet)


def test_controlnets_of_a_pipeline_have_their_own_setting():
    nets = paddle.nn.Layer()
    nets.nets = paddle.nn.LayerList([CONTROLNETS[1].double() for _ in range(2)])
    pipe = Several(OF_FLUX.double(), nets).apply_tome(0.5, controlnet=0.25)
    kept = {block.denoiser: block.kept_keys for block in pipe.tome_summary(16 * H, 16 * W).blocks}
    assert kept == {"transformer": 32, "controlnet.nets.0": 40, "controlnet.nets.1": 40}
    blocks = pipe.apply_tome(0.5, controlnet=False).tome_summary(96, 128).blocks
    assert {block.denoiser for block in blocks} == {"transformer"}


def test_each_sample_of_a_batch_is_what_it_is_alone(family, model):
    """The batch of guidance: the same latents with two texts."""
    apply_tome(model)
    inputs = family.inputs()
    inputs["hidden_states"] = paddle.concat([inputs["hidden_states"][:1]] * 2)
    both = run(model, inputs)
    assert not np.allclose(both[0], both[1], atol=1e-4)
    for i in range(2):
        alone = {n: x if isinstance(x, tuple) or n.endswith("ids") else x[i : i + 1] for n, x in inputs.items()}
        np.testing.assert_allclose(run(model, alone)[0], both[i], atol=2e-5)


def test_which_layers_get_fewer_tokens(family, model):
    """Keys and values of the image alone. FLUX's second blocks and CogVideoX project text by the same layers."""
    seen = widths(apply_tome(model, method="todo"))
    run(model, family.inputs())
    tokens, keys = family.frames * H * W, family.frames * H * W // 4
    for block in find_blocks(model):
        name = "attn" if family.is_flux or family.is_hunyuan else "attn1"
        found = {path.removeprefix(f"{block.path}."): count for path, count in seen.items()}
        text = TEXT if block.spec.text not in (None, Text.OWN_PROJECTIONS) else 0
        assert [found[f"{name}.to_{part}"] - text for part in "qkv"] == [tokens, keys, keys]
        others = {count for path, count in found.items() if path.startswith(("ff.", "ffn.", "attn2.to_q", "proj_"))}
        assert others and others <= {tokens, tokens + TEXT}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("family", [OF_FLUX], ids=named)
def test_positions_of_any_type(family, model, dtype):
    """FLUX's pipelines pass them in the type of the text embeddings, and NumPy has no bfloat16."""
    inputs = family.inputs()
    expected = run(apply_tome(model), inputs)
    ids = {name: x.cast(dtype) for name, x in inputs.items() if name.endswith("ids")}
    np.testing.assert_array_equal(run(model, {**inputs, **ids}), expected)


def test_masked_text_is_left_out():
    """HunyuanVideo's mask, over fewer keys: a padded text gives what the shorter one gives."""
    model = OF_HUNYUAN.double()
    for method in ("interlace", "todo"):
        apply_tome(model, method=method)
        inputs = OF_HUNYUAN.inputs()
        second = {name: x[1:] for name, x in inputs.items()}
        short = {name: x[:, : TEXT - 2] if name.startswith("encoder") else x for name, x in second.items()}
        expected = run(model, short)
        np.testing.assert_allclose(run(model, second), expected, atol=1e-5)
        np.testing.assert_allclose(run(model, inputs)[1:], expected, atol=1e-5)


def test_gradients_of_checkpointing_are_those_without():
    """VCtrl is the only model of ppdiffusers whose checkpointing by `recompute` works without merging."""
    model = apply_tome(VCTRL.real())
    model.train()

    def gradients(is_checkpointing):
        model.gradient_checkpointing = is_checkpointing
        model.clear_gradients()
        sum(x.square().mean() for x in model(**VCTRL.inputs()).vctrl_block_samples).backward()
        return {name: weight.grad.numpy() for name, weight in model.named_parameters() if weight.grad is not None}

    expected, actual = gradients(False), gradients(True)
    assert len(expected) == len(actual) > 20
    for name, gradient in expected.items():
        np.testing.assert_allclose(actual[name], gradient, atol=1e-6, err_msg=name)


class SampleOfVideo(paddle.nn.Layer):
    """CogVideoX with its output as a tensor, which a program needs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, latents, timestep, text, cos=None, sin=None):
        rows = None if cos is None else (cos, sin)
        return self.model(
            hidden_states=latents, encoder_hidden_states=text, timestep=timestep, image_rotary_emb=rows
        ).sample


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of Paddle, which traces
@pytest.mark.parametrize("kind", ["double", "real"])
@pytest.mark.parametrize("family", [COG_2B, COG_5B], ids=named)
def test_program_of_cogvideox_equals_eager(family, kind):
    """ppdiffusers' own classes of Wan and HunyuanVideo cannot be traced, plain or merged."""
    model, inputs = getattr(family, kind)(), family.inputs()
    eager = run(apply_tome(model), inputs)
    first = [inputs[name] for name in ("hidden_states", "timestep", "encoder_hidden_states")]
    arguments = [*first, *inputs.get("image_rotary_emb", ())]
    program = program_of(SampleOfVideo(model), arguments)
    with paddle.no_grad():
        np.testing.assert_array_equal(program(*arguments).numpy(), eager)


class SampleOfFlux(paddle.nn.Layer):
    """FLUX with its output as a tensor, which a program needs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, image, text, pooled, timestep, img_ids, txt_ids):
        return self.model(image, text, pooled, timestep, img_ids, txt_ids).sample


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of Paddle, which traces
@pytest.mark.parametrize("family", [OF_FLUX], ids=named)
def test_program_of_flux_equals_eager_and_fails_on_another_grid(family, model):
    apply_tome(model)
    inputs, names = family.inputs(), ("hidden_states", "encoder_hidden_states", "pooled_projections")
    inputs = {name: inputs[name] for name in (*names, "timestep", "img_ids", "txt_ids")}
    tensors = list(inputs.values())
    program = program_of(SampleOfFlux(model), tensors)
    with paddle.no_grad():
        with pytest.raises(ToMePassError, match="run the model once"):
            program(*tensors)
        forget_traces()  # or Paddle crashes if the next program is at the same address
        eager = run(model, inputs)
        program = program_of(SampleOfFlux(model), tensors)
        np.testing.assert_allclose(program(*tensors).numpy(), eager, atol=1e-6)
        with pytest.raises(ValueError, match="assert"):
            program(*{**inputs, "img_ids": family.inputs(W, H)["img_ids"]}.values())


@pytest.mark.parametrize("family", [COG_5B, OF_HUNYUAN], ids=named)
def test_attention_that_is_cached(family):
    """Pyramid Attention Broadcast, of ppdiffusers itself: after merging is applied, not before."""
    config = newer_class("PyramidAttentionBroadcastConfig")(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 800),
        current_timestep_callback=lambda: 500,
    )
    model, inputs = family.real(), family.inputs()
    other = {**inputs, "hidden_states": noise(*inputs["hidden_states"].shape, seed=8)}
    plain = run(model, inputs)
    model.enable_cache(config)
    with pytest.raises(ToMePassError, match=r"before apply_tome\(\)"):
        run(model.apply_tome(), inputs)
    model.remove_tome().disable_cache()
    merged, merged_other = (run(model.apply_tome(), x) for x in (inputs, other))
    model.enable_cache(config)
    np.testing.assert_array_equal(run(model, inputs), merged)
    assert not np.allclose(run(model, other), merged_other, atol=1e-3)  # the second pass takes what was cached
    model.disable_cache()
    np.testing.assert_array_equal(run(model, other), merged_other)
    np.testing.assert_array_equal(run(model.remove_tome(), inputs), plain)


@ALL
def test_a_cache_in_place_of_the_forward_of_a_model(family, model):
    """Caches like SortBlock and TeaBlockCacheTaylor, on grids with equal numbers of tokens and other sides."""
    check_with_caches(model, [model], [partial(run, model, family.inputs(h, w)) for h, w in ((6, 8), (8, 6), (6, 8))])


class OtherProcessor(zoo.WanAttnProcessor2_0):
    pass


def test_what_cannot_merge_is_an_error(family, model):
    inputs = family.inputs()
    run(apply_tome(model), inputs)
    tokens = family.frames * H * W + 1
    block = (model.blocks if family is OF_WAN else model.transformer_blocks)[0]
    with pytest.raises(ToMePassError, match=f"{tokens} tokens .*6×8"):
        block(paddle.randn([1, tokens, CHANNELS]))
    attention = find_blocks(model)[-1].sublayers["attn"][0]
    processor, attention.processor = attention.processor, OtherProcessor()
    with pytest.raises(ToMePassError, match=r"OtherProcessor .*remove_tome\(\)"):
        run(model, inputs)
    attention.processor = processor
    run(model, inputs)


@pytest.mark.parametrize("family", [OF_FLUX], ids=named)
def test_positions_that_are_no_grid_are_an_error(family, model):
    inputs = family.inputs()
    with pytest.raises(ToMePassError, match=r"6×8.*remove_tome\(\)"):
        run(apply_tome(model), {**inputs, "img_ids": inputs["img_ids"].flip(0)})


@pytest.mark.parametrize("family", [OF_FLUX], ids=named)
def test_positions_are_read_once_for_an_image(family, model, monkeypatch):
    """To read them waits for a GPU. A library above that replaces the forward of the model keeps merging right."""
    read = []
    monkeypatch.setattr(outer, "grid_of_ids", lambda ids: read.append(ids) or grid_of_ids(ids))
    inputs, copied = family.inputs(), {**family.inputs(), "img_ids": family.inputs()["img_ids"].clone()}
    expected = run(apply_tome(model), inputs)
    for _ in range(2):
        np.testing.assert_array_equal(run(model, inputs), expected)
    assert len(read) == 1
    np.testing.assert_array_equal(run(model, copied), expected)
    assert len(read) == 2
    copied["img_ids"].add_(paddle.ones([1]))
    with pytest.raises(ToMePassError, match=r"remove_tome\(\)"):
        run(model, copied)
    assert len(read) == 3
    model.forward = MethodType(type(model).forward, model)
    np.testing.assert_array_equal(run(model, inputs), expected)
    assert len(read) == 3
    del model.forward
    run(remove_tome(model), copied)


@pytest.mark.parametrize("argument", ["attention_mask", "scale"])
def test_an_argument_that_would_be_ignored_is_an_error(argument):
    model = OF_WAN.double()
    run(apply_tome(model), OF_WAN.inputs())
    layer, value = model.blocks[0].attn1, paddle.ones([1, 1, 1, FRAMES * H * W])
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs, **{argument: value})
    with pytest.raises(ToMePassError, match=f"the argument {argument} "):
        run(model, OF_WAN.inputs())


def test_positional_arguments_are_those_of_the_layer():
    """More than it has are an error, as without merging; its text and its mask are known in their places."""
    model = apply_tome(OF_FLUX.double())
    layer, extra, expected = model.transformer_blocks[0].attn, [], run(model, OF_FLUX.inputs())
    forward = layer.forward
    layer.forward = lambda hidden_states, encoder_hidden_states, attention_mask, **rows: forward(
        hidden_states, encoder_hidden_states, *extra, **rows
    )
    for extra[:] in ([], [None]):
        np.testing.assert_array_equal(run(model, OF_FLUX.inputs()), expected)
    extra[:] = [None, 2.0]
    with pytest.raises(TypeError, match="positional arguments"):
        run(model, OF_FLUX.inputs())
    extra[:] = [paddle.ones([1, 1, 1, H * W + TEXT])]
    with pytest.raises(ToMePassError, match="the argument attention_mask "):
        run(model, OF_FLUX.inputs())


def test_what_replaces_the_forward_of_an_attention_is_left_out_nowhere():
    """ppdiffusers' enable_cache() replaces it, and returns what a pass before has computed."""
    model, inputs = OF_FLUX.double(), OF_FLUX.inputs()

    def replace(layer):
        layer.forward = partial(type(layer).forward if wrap_of(layer) is None else layer.forward.__func__, layer)

    plain = run(model, inputs)
    replace(model.single_transformer_blocks[0].attn)
    with pytest.raises(ToMePassError, match=r"before apply_tome\(\)"):
        run(apply_tome(model), inputs)
    del remove_tome(model).single_transformer_blocks[0].attn.forward
    expected = run(apply_tome(model), inputs)
    replace(model.single_transformer_blocks[0].attn)
    np.testing.assert_array_equal(run(model, inputs), expected)
    np.testing.assert_array_equal(run(remove_tome(model), inputs), plain)
