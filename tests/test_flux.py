"""FLUX: merging with rotary positions, in joint blocks and in single-stream blocks."""

from functools import partial

import numpy as np
import paddle
import pytest
from conftest import program_of, traces
from ppdiffusers import DiffusionPipeline
from ppdiffusers_source import newer_class
from test_video_transformers import oracle
from zoo import flux
from zoo.noise import noise

from ppdiffusers_tome import (
    Grid,
    NoMergeableLayerError,
    ToMeConfig,
    ToMePassError,
    apply_tome,
    match_tokens,
    remove_tome,
    rotary,
    tome_summary,
    wraps,
)
from ppdiffusers_tome.wraps import install, remove, wrap_of

H, W = 6, 8
SETTINGS = [
    {},
    {"merge_attn": "kv"},
    {"merge_attn": True},
    {"merge_attn": "alone"},
    {"proportional": False},
    {"merge_mlp": True},
]
SETTINGS += [{"match": "grid", "ratio": 0.75}]


def real(name="FluxTransformer2DModel", **changes):
    """ppdiffusers' own, with norms whose weights are not 1, and outputs of a ControlNet that are not 0."""
    config = {"in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": flux.WIDTH}
    config |= {"num_attention_heads": flux.HEADS, "axes_dims_rope": flux.AXES, "joint_attention_dim": 6}
    paddle.seed(0)
    model = newer_class(name)(**config, pooled_projection_dim=6, **changes)
    for path, weight in model.named_parameters():
        if ".norm_" in path:
            weight.set_value(0.5 + paddle.rand(weight.shape))
        elif path.startswith("controlnet_"):
            weight.set_value(paddle.rand(weight.shape) - 0.5)
    model.eval()
    return model


@pytest.fixture(params=[flux.double, real], ids=["double", "real"])
def model(request):
    return request.param()


@paddle.no_grad()
def run(model, h=H, w=W, **changes):
    return model(**{**flux.inputs(h, w), **changes}).sample.numpy()


@pytest.mark.parametrize("text", [5, 9])
@pytest.mark.parametrize(("h", "w"), [(6, 8), (7, 5)])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_three_ways(model, settings, h, w, text):
    inputs = flux.inputs(h, w, text=text)
    plain, before = run(model, **inputs), traces(model)
    np.testing.assert_array_equal(run(apply_tome(model, 0), **inputs), plain)
    assert not np.allclose(run(apply_tome(model, **settings), **inputs), plain, atol=1e-3)
    np.testing.assert_array_equal(run(remove_tome(model), **inputs), plain)
    assert traces(model) == before


@pytest.mark.parametrize("settings", [{}, {"merge_attn": "kv"}, {"merge_attn": "alone"}, {"merge_mlp": True}], ids=str)
def test_equal_tokens_at_equal_positions_merge_without_a_difference(model, settings):
    """The oracle is the plain model: in each cell of 2×2 all tokens and positions are equal in all of its layers."""
    embed = model.pos_embed
    base = type(embed)
    even = type("FluxPosEmbed", (base,), {"forward": lambda self, ids: base.forward(self, ids - ids % 2)})
    embed.__class__ = even
    cells = np.arange(H)[:, None] // 2 * W + np.arange(W) // 2 * 2
    inputs = flux.inputs(H, W)
    inputs["hidden_states"] = inputs["hidden_states"][:, paddle.to_tensor(cells.reshape(-1))]
    plain = run(model, **inputs)
    merged = run(apply_tome(model, 0.75, match="grid", **settings), **inputs)
    np.testing.assert_allclose(merged, plain, atol=2e-5 * np.abs(plain).max())
    without = run(apply_tome(model, 0.75, match="grid", proportional=False, **settings), **inputs)
    assert np.abs(without - plain).max() > 1e-3 * np.abs(plain).max()


@pytest.mark.parametrize("merge_attn", ["asymmetric", True, "kv"])
def test_each_image_of_a_batch_is_what_it_is_alone(model, merge_attn):
    apply_tome(model, merge_attn=merge_attn)
    inputs = flux.inputs()
    both = run(model)
    for i in range(2):
        alone = {name: x if name.endswith("ids") else x[i : i + 1] for name, x in inputs.items()}
        np.testing.assert_allclose(run(model, **alone)[0], both[i], atol=2e-5)


@pytest.mark.parametrize(
    ("settings", "queries", "mlp"),
    [
        ({}, 24, 24),
        ({"merge_attn": True}, 24, 24),
        ({"merge_attn": "kv"}, 48, 48),
        ({"merge_attn": "alone"}, 24, 48),
        ({"merge_attn": "alone", "merge_mlp": True}, 24, 24),
    ],
    ids=str,
)
def test_a_single_stream_block_merges_as_a_whole_unless_attention_alone(model, settings, queries, mlp):
    apply_tome(model, **settings)
    seen = {}
    for name in ("attn.to_q", "attn.to_k", "proj_mlp"):
        layer = dict(model.single_transformer_blocks[0].named_sublayers())[name]
        layer.register_forward_pre_hook(lambda layer, inputs, name=name: seen.__setitem__(name, inputs[0].shape[1]))
    run(model)
    text = flux.TEXT
    assert seen == {"attn.to_q": text + queries, "attn.to_k": text + 24, "proj_mlp": text + mlp}
    blocks = tome_summary(model, H, W).blocks
    joint = (24, 24) if "merge_attn" in settings else (39, 16)
    assert [(block.kept, block.kept_keys) for block in blocks] == [joint] * 2 + [(24, 24)] * 2
    assert {block.grid for block in blocks} == {(H, W)}


def controlnet(kind, **config):
    return real("FluxControlNetModel", **config) if kind == "real" else flux.double(flux.FluxControlNetModel, **config)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kinds", [None, 3])
@pytest.mark.parametrize("kind", ["double", "real"])
def test_controlnet(kind, kinds, settings):
    """With several kinds of images, the kind is a token before those of the text."""
    model = controlnet(kind, num_mode=kinds)
    inputs = {**flux.inputs(7, 5), "controlnet_cond": noise(2, 35, 4, seed=5)}
    if kinds:
        inputs["controlnet_mode"] = paddle.to_tensor([[1], [2]])

    @paddle.no_grad()
    def control():
        out = model(**inputs)
        return np.stack([x.numpy() for x in (*out.controlnet_block_samples, *out.controlnet_single_block_samples)])

    plain, before = control(), traces(model)
    merged = apply_tome(model, **settings) and control()
    assert all(not np.allclose(x, y, atol=1e-3) for x, y in zip(merged, plain, strict=True))
    summary = tome_summary(model, 7, 5)
    joint = 6 if "match" in settings else 18 if "merge_attn" in settings else 28
    assert {block.kept for block in summary.blocks} == {joint, min(joint, 18)}
    assert (summary.macs is None) == bool(kinds)
    remove_tome(model)
    np.testing.assert_array_equal(control(), plain)
    assert traces(model) == before
    with pytest.raises(NoMergeableLayerError, match=r"only has ControlNets\. Pass controlnet=True"):
        apply_tome(model, controlnet=False)


class Several(DiffusionPipeline):
    """A pipeline with FLUX's transformer and two ControlNets, as `FluxMultiControlNetModel` has them."""

    def __init__(self, transformer, controlnet):
        super().__init__()
        self.register_modules(transformer=transformer, controlnet=controlnet)


def test_controlnets_of_a_pipeline_have_their_own_setting():
    nets = paddle.nn.Layer()
    nets.nets = paddle.nn.LayerList([flux.double(flux.FluxControlNetModel) for _ in range(2)])
    pipe = Several(flux.double(), nets).apply_tome(0.5, controlnet=0.25)
    kept = {block.denoiser: block.kept for block in pipe.tome_summary(16 * H, 16 * W).blocks}
    assert kept == {"transformer": 24, "controlnet.nets.0": 36, "controlnet.nets.1": 36}
    assert {block.denoiser for block in pipe.apply_tome(0.5, controlnet=False).tome_summary(96, 128).blocks} == {
        "transformer"
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_positions_of_any_type(model, dtype):
    """FLUX's pipelines pass them in the type of the text embeddings, and NumPy has no bfloat16."""
    expected = run(apply_tome(model))
    ids = {name: x.cast(dtype) for name, x in flux.inputs().items() if name.endswith("ids")}
    np.testing.assert_array_equal(run(model, **ids), expected)


class Sample(paddle.nn.Layer):
    """FLUX with its output as a tensor, which a program needs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, image, text, pooled, timestep, img_ids, txt_ids):
        return self.model(image, text, pooled, timestep, img_ids, txt_ids).sample


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of Paddle, which traces
@pytest.mark.parametrize("settings", [{}, {"merge_attn": "kv"}], ids=str)
def test_program_equals_eager_and_fails_on_another_grid(model, settings):
    apply_tome(model, **settings)
    inputs = flux.inputs()
    tensors = list(inputs.values())
    program = program_of(Sample(model), tensors)
    with paddle.no_grad():
        with pytest.raises(ToMePassError, match="run the model once at the size that it is for"):
            program(*tensors)
        eager = run(model)
        program = program_of(Sample(model), tensors)
        np.testing.assert_array_equal(program(*tensors).numpy(), eager)
        with pytest.raises(ValueError, match="assert"):
            program(*{**inputs, "img_ids": flux.inputs(W, H)["img_ids"]}.values())


def test_merged_tokens_have_the_positions_of_their_dst():
    plan = match_tokens(paddle.randn([2, H * W, 8]), Grid(H, W), removed=20)
    table = paddle.arange(3 + H * W, dtype="float32").unsqueeze(1)
    rows, _ = (x.squeeze(-1).numpy() for x in rotary.rotary_rows((table, table), plan))
    dst = plan.dst_rows.numpy().reshape([2, -1]) % (H * W)
    stay = plan.stay_rows.numpy().reshape([2, -1]) % (H * W)
    np.testing.assert_array_equal(rows, np.concatenate([[[0, 1, 2]] * 2, 3 + dst, 3 + stay], axis=1))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sizes_count_keys_as_often(dtype):
    paddle.seed(0)
    query, key, value = (paddle.randn([2, 7, 3, 8]).cast(dtype) for _ in range(3))
    sizes = np.array([[1, 4, 2], [3, 1, 1]])
    actual = rotary.attend(query, key, value, 0.3, paddle.to_tensor(np.log(sizes)))
    for i in range(2):
        times = np.concatenate([np.ones(4, int), sizes[i]])
        q, k, v = (x[i].numpy().astype("float64") for x in (query, key, value))
        k, v = np.repeat(k, times, axis=0), np.repeat(v, times, axis=0)
        weights = np.exp(0.3 * np.einsum("qhd,khd->hqk", q, k))
        expected = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        np.testing.assert_allclose(actual[i].numpy(), expected, atol=1e-12 if dtype == "float64" else 1e-5)


@paddle.no_grad()
@pytest.mark.parametrize("merge_attn", [True, "asymmetric", "kv"])
def test_merged_attention_is_that_of_float64(model, merge_attn, monkeypatch):
    inputs, channels = flux.inputs(), flux.HEADS * flux.WIDTH
    rows = model.pos_embed(paddle.concat([inputs["txt_ids"], inputs["img_ids"]]))
    image, text = noise(2, H * W, channels, seed=3), noise(2, flux.TEXT, channels, seed=4)
    settings = {"grid": Grid(H, W), "removed": 20, "random_key": (1,), "window": 4}
    settings |= {"removed_keys": 30} if merge_attn == "asymmetric" else {}
    plan = match_tokens(image, **settings)
    for layer in (model.transformer_blocks[0].attn, model.single_transformer_blocks[0].attn):
        is_joint = getattr(layer, "add_q_proj", None) is not None
        arguments = {"hidden_states": image, "encoder_hidden_states": text}
        if not is_joint:
            arguments = {"hidden_states": paddle.concat([text, image], axis=1)}
        with monkeypatch.context() as context:
            context.setattr(wraps._current, "plan", plan)
            install(layer, rotary.RotaryAttentionWrap(ToMeConfig(merge_attn=merge_attn)))
            actual = layer(**arguments, image_rotary_emb=rows)
            remove(layer)
        actual = paddle.concat([actual[1], actual[0]], axis=1) if is_joint else actual
        for i in range(2):
            expected, expected_text = oracle(
                layer,
                image[i].numpy().astype("float64"),
                text[i].numpy().astype("float64"),
                match_tokens(image[i : i + 1], **settings),
                [table[-H * W :].numpy().astype("float64") for table in rows],  # text is at position 0: no rotation
                merge_attn == "kv",
                None,
            )
            np.testing.assert_allclose(actual[i].numpy(), np.concatenate([expected_text, expected]), atol=5e-6)


class OtherProcessor(flux.FluxAttnProcessor2_0):
    pass


def test_what_cannot_merge_is_an_error(model):
    apply_tome(model)
    ids = flux.inputs()["img_ids"]
    with pytest.raises(ToMePassError, match=r"not text and then one grid of 6×8.*remove_tome\(\)"):
        run(model, img_ids=ids.flip(0))
    model.single_transformer_blocks[1].attn.processor = OtherProcessor()
    with pytest.raises(ToMePassError, match="by OtherProcessor cannot merge, only that of FluxAttnProcessor2_0"):
        run(model)
    block = model.transformer_blocks[0]
    model.pos_embed(paddle.concat([flux.inputs()["txt_ids"], ids]))
    with pytest.raises(ToMePassError, match="a block got 47 tokens but the feature map was 6×8"):
        block(hidden_states=paddle.randn([1, 47, 16]), encoder_hidden_states=paddle.randn([1, 5, 16]), temb=None)


def test_what_replaces_the_forward_of_an_attention_is_left_out_nowhere():
    """ppdiffusers' enable_cache() replaces it, and returns what a pass before has computed."""
    model = flux.double()

    def replace(layer):
        layer.forward = partial(type(layer).forward if wrap_of(layer) is None else layer.forward.__func__, layer)

    plain = run(model)
    replace(model.single_transformer_blocks[0].attn)
    with pytest.raises(ToMePassError, match=r"before apply_tome\(\), as enable_cache\(\) does"):
        run(apply_tome(model))
    del remove_tome(model).single_transformer_blocks[0].attn.forward
    for merge_attn, is_whole in ((True, True), ("alone", False), ("kv", False)):
        expected = run(apply_tome(model, merge_attn=merge_attn))
        replace(model.single_transformer_blocks[0].attn)
        if is_whole:
            with pytest.raises(ToMePassError, match=r'single-stream block.*pass merge_attn="alone" or "kv"'):
                run(model)
        else:
            np.testing.assert_array_equal(run(model), expected)
        np.testing.assert_array_equal(run(remove_tome(model)), plain)
        del model.single_transformer_blocks[0].attn.forward
