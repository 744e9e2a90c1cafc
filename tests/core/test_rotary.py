"""FLUX, CogVideoX, Wan and HunyuanVideo: rotary positions, text in the same sequence, videos frame by frame."""

import copy
from dataclasses import replace
from functools import partial

import cuda_attention
import numpy as np
import paddle
import pytest
from conftest import program_of, sizes_of, traces, widths
from forward_cache import check_with_caches
from ppdiffusers import DiffusionPipeline
from ppdiffusers_source import newer_class, runnable
from zoo import rotary as zoo
from zoo.noise import noise
from zoo.rotary import CHANNELS, FRAMES, HEADS, LATENTS, STATES, TEXT, WIDTH

from ppdiffusers_tome import (
    Grid,
    NoMergeableLayerError,
    ToMeConfig,
    ToMePassError,
    apply_tome,
    match_tokens,
    remove_tome,
    tome_summary,
)
from ppdiffusers_tome.attach import passes
from ppdiffusers_tome.attach.attention import AttentionWrap
from ppdiffusers_tome.attach.forward import install, remove, wrap_of
from ppdiffusers_tome.attach.placement import placements, tokens_kept
from ppdiffusers_tome.families.models import find_blocks
from ppdiffusers_tome.families.table import FAMILIES as TABLE
from ppdiffusers_tome.methods.plan import join_frames

H, W = 6, 8
DEFAULT = {"method": "default"}
SETTINGS = [
    {},
    DEFAULT,
    {"method": "kv"},
    {"method": "symmetric"},
    {**DEFAULT, "proportional": False},
    {**DEFAULT, "merge_mlp": True, "merge_crossattn": True},
    {"method": "todo", "use_rand": True},
    {"method": "todo", "ratio": 0.5},
    {**DEFAULT, "merge_attn": False, "merge_mlp": True, "window": 4},
    {**DEFAULT, "ratio": 0.05},  # a few keys merge, and no query
    {**DEFAULT, "ratio": 0.05, "merge_mlp": True, "merge_crossattn": True, "proportional": False},
]


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

    def inputs(self, h=H, w=W, batch=2, text=TEXT):
        """Arguments of one pass over h×w tokens, in a video of each frame."""
        if self.name == "CogVideoX-2b":  # whose text has one length
            text = TEXT
        shape = (FRAMES, LATENTS) if self.is_cog else (LATENTS, FRAMES)
        latents = noise(batch, h * w, LATENTS) if self.is_flux else noise(batch, *shape, 2 * h, 2 * w)
        arguments = {"hidden_states": latents, "timestep": paddle.full([batch], 10)}
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
            arguments |= {"timestep": paddle.full([batch], 0.5), "img_ids": paddle.to_tensor(ids)}
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


@pytest.mark.parametrize("family", [*FAMILIES, *CONTROLNETS, *OTHERS], ids=named)
@pytest.mark.parametrize(("h", "w", "text"), [(6, 8, TEXT), (7, 5, 9)])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_three_ways(family, model, settings, h, w, text):
    inputs = family.inputs(h, w, text=text)
    plain, before = run(model, inputs), traces(model)
    np.testing.assert_array_equal(run(apply_tome(model, 0), inputs), plain)
    merged = run(apply_tome(model, **settings), inputs)
    assert all(not np.allclose(x, y, atol=1e-4) for x, y in zip(merged, plain, strict=True))
    summary = tome_summary(model, family.patch * h, family.patch * w, frames=FRAMES)
    of_joint, of_single = (
        {tokens_kept(ToMeConfig(**settings), Grid(h, w), merges_block=is_whole).queries} for is_whole in (False, True)
    )
    assert {block.kept for block in summary.blocks} == (
        of_joint | of_single if family.is_flux or family.is_hunyuan else of_joint
    )
    assert (summary.macs is None) == family.is_union
    copied = copy.deepcopy(model)
    np.testing.assert_array_equal(run(copied, inputs), merged)
    np.testing.assert_array_equal(run(remove_tome(copied), inputs), plain)
    np.testing.assert_array_equal(run(model, inputs), merged)
    np.testing.assert_array_equal(run(remove_tome(model), inputs), plain)
    assert traces(model) == before


def test_every_block_of_the_table_has_a_double():
    models = [family.double() for family in (*FAMILIES, *CONTROLNETS, *OTHERS)]
    blocks = {type(block.block).__name__ for model in models for block in find_blocks(model)}
    assert blocks == {name for entry in TABLE for name in entry.blocks if isinstance(name, str)}
    transformers = {name for entry in TABLE for name in entry.transformers if isinstance(name, str)}
    assert {type(model).__name__ for model in models} == transformers - {"SD3ControlNetModel"}


@pytest.mark.parametrize("family", CONTROLNETS, ids=named)
def test_controlnets_alone_are_not_left_plain(model):
    with pytest.raises(NoMergeableLayerError, match=r"only has ControlNets\. Pass controlnet=True"):
        apply_tome(model, controlnet=False)


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
    pipe.apply_tome(0.5, method="symmetric", controlnet=0.25)
    kept = {block.denoiser: block.kept for block in pipe.tome_summary(16 * H, 16 * W).blocks}
    assert kept == {"transformer": 24, "controlnet.nets.0": 36, "controlnet.nets.1": 36}
    blocks = pipe.apply_tome(0.5, controlnet=False).tome_summary(96, 128).blocks
    assert {block.denoiser for block in blocks} == {"transformer"}


def cells(frames, h, w):
    """[F·h·w]: for each token the first token of its cell of 2×2 in its frame."""
    first = np.arange(h)[:, None] // 2 * 2 * w + np.arange(w) // 2 * 2
    return paddle.to_tensor((np.arange(frames)[:, None] * h * w + first.reshape(-1)).reshape(-1))


def even_positions(model, inputs, first):
    """Give all tokens of a cell the same position: the rows that are passed, computed, or added to the tokens."""

    def even(rows):
        if isinstance(rows, tuple):
            return tuple(table.index_select(first, axis=0) for table in rows)
        return paddle.complex(*(part.index_select(first, axis=2) for part in (rows.real(), rows.imag())))

    def replace(layer, change):
        base = type(layer)
        forward = {"forward": lambda self, x: change(partial(base.forward, self), x)}
        layer.__class__ = type(base.__name__, (base,), forward)

    if hasattr(model, "pos_embed"):
        replace(model.pos_embed, lambda embed, ids: embed(ids - ids % 2))
    elif hasattr(model, "rope"):
        replace(model.rope, lambda embed, latents: even(embed(latents)))
    elif "image_rotary_emb" in inputs:
        inputs["image_rotary_emb"] = even(inputs["image_rotary_emb"])
    else:
        embed, name = model.patch_embed, "_get_positional_embeddings"
        positions = getattr(embed, name)

        def forward(*size):
            table = positions(*size)
            image = table[:, -len(first) :].index_select(first, axis=1)
            return paddle.concat([table[:, : -len(first)], image], axis=1)

        setattr(embed, name, forward)


@pytest.mark.parametrize(
    "settings",
    [
        {**DEFAULT, "ratio": 0.75},
        {"method": "kv"},
        {"method": "symmetric"},
        {**DEFAULT, "ratio": 0.75, "merge_mlp": True},
        {"method": "todo"},
        {"method": "todo", "ratio": 0.5},
        {**DEFAULT, "ratio": 0.05},  # a few keys merge, and no query
    ],
    ids=str,
)
def test_equal_tokens_at_equal_positions_merge_without_a_difference(family, model, settings):
    """The oracle is the plain model: in each cell of 2×2 all tokens and positions are equal in all of its layers."""
    inputs, first = family.inputs(), cells(family.frames, H, W)
    even_positions(model, inputs, first)
    latents = inputs["hidden_states"]
    if family.is_flux:
        latents = latents[:, first]
    else:  # patches of 2×2, cells of 2×2 patches
        for axis, length in ((latents.ndim - 2, 2 * H), (latents.ndim - 1, 2 * W)):
            pixels = np.arange(length)
            latents = latents.index_select(paddle.to_tensor(pixels // 4 * 4 + pixels % 2), axis=axis)
    inputs["hidden_states"] = latents
    plain = run(model, inputs)
    merged = run(apply_tome(model, **settings), inputs)
    np.testing.assert_allclose(merged, plain, atol=2e-5 * np.abs(plain).max())
    without = run(apply_tome(model, proportional=False, **settings), inputs)
    all_count_alike = family is OF_WAN and (settings.get("method") == "todo" or settings.get("ratio") == 0.75)
    assert (np.abs(without - plain).max() > 2e-4 * np.abs(plain).max()) != all_count_alike


@pytest.mark.parametrize("method", ["interlace", "default", "symmetric", "kv"])
def test_each_sample_of_a_batch_is_what_it_is_alone(family, model, method):
    """The batch of guidance: the same latents with two texts."""
    apply_tome(model, method=method)
    inputs = family.inputs()
    inputs["hidden_states"] = paddle.concat([inputs["hidden_states"][:1]] * 2)
    both = run(model, inputs)
    assert not np.allclose(both[0], both[1], atol=1e-4)
    for i in range(2):
        alone = {n: x if isinstance(x, tuple) or n.endswith("ids") else x[i : i + 1] for n, x in inputs.items()}
        np.testing.assert_allclose(run(model, alone)[0], both[i], atol=2e-5)


@pytest.mark.parametrize("family", VIDEOS, ids=named)
def test_tokens_merge_in_each_frame_with_the_same_dst(family, model, plans):
    inputs = family.inputs()
    run(apply_tome(model, ratio=0.4, **DEFAULT, window=4), inputs)
    assert len(plans) == 2
    of_blocks = [(7, 27), (19, 19) if family.is_hunyuan else (7, 27)]  # HunyuanVideo's second block merges as a whole
    parts = [part for plan in plans for part in (plan, plan.keys)]
    for plan, removed in zip(parts, sum(of_blocks, ()), strict=True):
        assert (plan.frames, plan.tokens, plan.removed) == (FRAMES, FRAMES * H * W, FRAMES * removed)
        dst, merged = (rows.numpy().reshape(2 * FRAMES, -1) for rows in (plan.dst_rows, plan.merged_rows))
        offsets = H * W * np.arange(2 * FRAMES)[:, None]
        assert (dst - offsets == dst[0]).all()
        assert ((merged >= offsets) & (merged < offsets + H * W)).all()
        assert not (np.sort(merged - offsets) == np.sort(merged[0])).all()
    blocks = tome_summary(model, 2 * H, 2 * W).blocks
    assert {block.grid for block in blocks} == {(H, W)}
    assert [(H * W - block.kept, H * W - block.kept_keys) for block in blocks] == of_blocks


@pytest.mark.parametrize("family", VIDEOS, ids=named)
def test_which_layers_get_merged_tokens(family, model):
    seen = widths(apply_tome(model, **DEFAULT, merge_mlp=True, merge_crossattn=True))
    run(model, family.inputs())
    tokens, keys, text = FRAMES * 39, FRAMES * 16, TEXT

    def of_first(*names, blocks="blocks" if family is OF_WAN else "transformer_blocks"):
        return [seen[f"{blocks}.0.{name}"] for name in names]

    mlp = {count for path, count in seen.items() if ".0.ff" in path and "context" not in path}
    if family.is_cog:
        assert of_first("attn1.to_q", "attn1.to_k", "attn1.to_v") == [tokens + text, *[keys + text] * 2]
        assert tokens + text in mlp
    elif family.is_hunyuan:
        assert of_first("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj") == [tokens, keys, keys, text]
        whole = of_first("attn.to_q", "attn.to_k", "proj_mlp", "proj_out", blocks="single_transformer_blocks")
        assert whole == [FRAMES * H * W // 2 + text] * 4
    else:
        assert of_first("attn1.to_q", "attn1.to_k", "attn1.to_v") == [tokens, keys, keys]
        assert of_first("attn2.to_q", "attn2.to_k") == [tokens, text]
        assert tokens in mlp


@pytest.mark.parametrize("family", [OF_FLUX], ids=named)
@pytest.mark.parametrize(
    ("settings", "queries", "mlp"),
    [
        ({"method": "interlace"}, 48, 48),
        (DEFAULT, 24, 24),
        ({"method": "symmetric"}, 24, 24),
        ({"method": "kv"}, 48, 48),
    ],
    ids=str,
)
def test_a_single_stream_block_merges_as_a_whole_unless_keys_alone_merge(family, model, settings, queries, mlp):
    seen = widths(apply_tome(model, **settings))
    run(model, family.inputs())
    of_single = [seen[f"single_transformer_blocks.0.{name}"] for name in ("attn.to_q", "attn.to_k", "proj_mlp")]
    assert of_single == [TEXT + queries, TEXT + 24, TEXT + mlp]
    blocks = tome_summary(model, H, W).blocks
    joint = {"default": (39, 16), "interlace": (48, 24)}.get(settings["method"], (24, 24))
    single = (48, 24) if settings["method"] == "interlace" else (24, 24)
    assert [(block.kept, block.kept_keys) for block in blocks] == [joint] * 2 + [single] * 2
    assert {block.grid for block in blocks} == {(H, W)}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("family", [OF_FLUX], ids=named)
def test_positions_of_any_type(family, model, dtype):
    """FLUX's pipelines pass them in the type of the text embeddings, and NumPy has no bfloat16."""
    inputs = family.inputs()
    expected = run(apply_tome(model), inputs)
    ids = {name: x.cast(dtype) for name, x in inputs.items() if name.endswith("ids")}
    np.testing.assert_array_equal(run(model, {**inputs, **ids}), expected)


def test_masked_text_is_left_out():
    """HunyuanVideo's mask, over merged tokens: a padded text gives what the shorter one gives."""
    model = OF_HUNYUAN.double()
    pairs = [{"method": method, "proportional": p} for method in ("default", "symmetric", "kv") for p in (True, False)]
    for settings in ({}, *pairs):
        apply_tome(model, **settings)
        inputs = OF_HUNYUAN.inputs()
        second = {name: x[1:] for name, x in inputs.items()}
        short = {name: x[:, : TEXT - 2] if name.startswith("encoder") else x for name, x in second.items()}
        expected = run(model, short)
        np.testing.assert_allclose(run(model, second), expected, atol=1e-5)
        np.testing.assert_allclose(run(model, inputs)[1:], expected, atol=1e-5)


def linear(layer, x):
    return x @ layer.weight.numpy().astype("float64") + layer.bias.numpy().astype("float64")


def normalized(layer, x):
    """The norm of a layer over the last axis, in float64."""
    if isinstance(layer, paddle.nn.LayerNorm):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + layer._epsilon)
        return x * layer.weight.numpy() + layer.bias.numpy()
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * layer.weight.numpy()


def heads(layer, projection, norm, x, rows=None):
    """[S, heads, d] of one sequence: projected, normalized and rotated."""
    x = linear(getattr(layer, projection), x)
    norm = getattr(layer, norm, None)
    is_across = norm is not None and len(norm.weight) == x.shape[1]
    x = (normalized(norm, x) if is_across else x).reshape(len(x), layer.heads, -1)
    x = normalized(norm, x) if norm is not None and not is_across else x
    if rows is not None:
        turn = (rows[0] + 1j * rows[1])[:, None, ::2]
        turned = (x[..., ::2] + 1j * x[..., 1::2]) * turn
        x = np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
    return x


def oracle(layer, image, text, plan, rows, keys_only, mask):
    """Attention of one sequence in float64: tokens are means, and count as often as tokens they are the mean of."""

    def merged_by(plan):
        source = plan.source_rows.numpy()
        merged = np.stack([image[source == row].mean(0) for row in range(plan.kept)])
        positions = plan.kept_rows.numpy().reshape(-1)
        np.testing.assert_array_equal(source[positions], np.arange(plan.kept))
        return source, merged, None if rows is None else [table[positions] for table in rows]

    source, queries, query_rows = merged_by(plan)
    of_keys, merged, merged_rows = merged_by(plan.keys)
    sizes = np.bincount(of_keys, minlength=plan.keys.kept)
    queries, query_rows = (image, rows) if keys_only else (queries, query_rows)
    query = heads(layer, "to_q", "norm_q", queries, query_rows)
    key, value = heads(layer, "to_k", "norm_k", merged, merged_rows), heads(layer, "to_v", "", merged)
    has_own = getattr(layer, "add_q_proj", None) is not None
    if text is not None:
        names = [(f"add_{n}_proj", f"norm_added_{n}") if has_own else (f"to_{n}", f"norm_{n}") for n in "qkv"]
        added = [heads(layer, *name, text) for name in names]
        query, key, value = (np.concatenate(pair) for pair in zip(added, (query, key, value), strict=True))
        count = np.ones(len(text)) if mask is None else mask
        sizes = np.concatenate([count, sizes])
    weights = np.exp(np.einsum("qhd,khd->hqk", query, key) / np.sqrt(query.shape[2])) * sizes
    out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value)
    out = out.reshape(len(query), -1)
    length = 0 if text is None else len(text)
    out, out_text = out[length:], out[:length]
    if getattr(layer, "to_out", None) is not None:
        out = linear(layer.to_out[0], out)
        out_text = out_text if has_own else linear(layer.to_out[0], out_text)
    if has_own:
        out_text = linear(layer.to_add_out, out_text)
    return out if keys_only else out[source], out_text


@paddle.no_grad()
@pytest.mark.parametrize(
    ("method", "removed", "removed_keys"),
    [("symmetric", 20, None), ("default", 20, 30), ("default", 0, 30), ("kv", 20, None)],
)
def test_merged_attention_is_that_of_float64(family, model, method, removed, removed_keys, monkeypatch):
    match = partial(
        match_tokens, grid=Grid(H, W), removed=removed, random_key=(1,), window=4, removed_keys=removed_keys
    )
    for block, placement in placements(model, ToMeConfig(method=method)):
        layer = block.sublayers["attn"][0]
        # Single-stream blocks would get merged tokens, were it not for merge_attn=False.
        placement = replace(placement, config=ToMeConfig(method=method, merge_attn=False, merge_mlp=True))
        image, text = noise(2, family.frames * H * W, CHANNELS, seed=3), noise(2, TEXT, CHANNELS, seed=4)
        frames = image.reshape([-1, H * W, CHANNELS])
        plan = join_frames(match(frames), family.frames)
        text = None if family is OF_WAN else text
        rows = None if family is COG_2B else zoo.rotary_rows(family.frames, H, W)
        is_sequence = family.is_flux and getattr(layer, "add_q_proj", None) is None
        arguments = {} if text is None or is_sequence else {"encoder_hidden_states": text}
        mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
        if family.is_hunyuan:
            whole = np.concatenate([np.ones([2, FRAMES * H * W]), mask], axis=1) > 0
            arguments["attention_mask"] = paddle.to_tensor(whole[:, None, None])
        if family is OF_WAN:
            arguments["rotary_emb"] = zoo.complex_rows(rows).reshape([1, 1, -1, WIDTH // 2]).cast("complex128")
        elif family.is_flux:  # its text is at position 0, which does not rotate
            arguments["image_rotary_emb"] = tuple(paddle.concat([x[:1].expand([TEXT, -1]), x]) for x in rows)
        elif rows is not None:
            arguments["image_rotary_emb"] = rows
        with monkeypatch.context() as context:
            context.setattr(passes._current, "plan", plan)
            install(layer, AttentionWrap(placement, is_self=True))
            actual = layer(paddle.concat([text, image], axis=1) if is_sequence else image, **arguments)
            remove(layer)
        if is_sequence:
            actual = actual[:, TEXT:], actual[:, :TEXT]
        actual, actual_text = actual if isinstance(actual, tuple) else (actual, None)
        assert sizes_of(plan.keys).max() > 2
        for i in range(2):
            alone = match(frames[i * family.frames : (i + 1) * family.frames])
            expected, expected_text = oracle(
                layer,
                image[i].numpy().astype("float64"),
                None if text is None else text[i].numpy().astype("float64"),
                join_frames(alone, family.frames),
                None if rows is None else [table.numpy().astype("float64") for table in rows],
                method == "kv",
                mask[i] if family.is_hunyuan else None,
            )
            np.testing.assert_allclose(actual[i].numpy(), expected, atol=5e-6)
            if actual_text is not None:
                np.testing.assert_allclose(actual_text[i].numpy(), expected_text, atol=5e-6)


@pytest.mark.parametrize("settings", [{}, {**DEFAULT, "merge_mlp": True}], ids=str)
def test_gradients_of_checkpointing_are_those_without(settings):
    """VCtrl is the only model of ppdiffusers whose checkpointing by `recompute` works without merging."""
    model = apply_tome(VCTRL.real(), **settings)
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
@pytest.mark.parametrize(  # at 0.05 a few keys merge, and no query
    "settings", [{}, DEFAULT, {**DEFAULT, "ratio": 0.05}], ids=str
)
@pytest.mark.parametrize("family", [COG_2B, COG_5B], ids=named)
def test_program_of_cogvideox_equals_eager(family, settings, kind):
    """ppdiffusers' own classes of Wan and HunyuanVideo cannot be traced, plain or merged."""
    model, inputs = getattr(family, kind)(), family.inputs()
    eager = run(apply_tome(model, **settings), inputs)
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
@pytest.mark.parametrize("settings", [{}, DEFAULT, {**DEFAULT, "ratio": 0.05}, {"method": "kv"}], ids=str)
@pytest.mark.parametrize("family", [OF_FLUX], ids=named)
def test_program_of_flux_equals_eager_and_fails_on_another_grid(family, model, settings):
    apply_tome(model, **settings)
    inputs, names = family.inputs(), ("hidden_states", "encoder_hidden_states", "pooled_projections")
    inputs = {name: inputs[name] for name in (*names, "timestep", "img_ids", "txt_ids")}
    tensors = list(inputs.values())
    program = program_of(SampleOfFlux(model), tensors)
    with paddle.no_grad():
        with pytest.raises(ToMePassError, match="run the model once at the size that it is for"):
            program(*tensors)
        eager = run(model, inputs)
        program = program_of(SampleOfFlux(model), tensors)
        np.testing.assert_array_equal(program(*tensors).numpy(), eager)
        with pytest.raises(ValueError, match="assert"):
            program(*{**inputs, "img_ids": family.inputs(W, H)["img_ids"]}.values())


@pytest.mark.parametrize("method", ["interlace", "symmetric", "kv"])
@pytest.mark.parametrize("family", [COG_5B, OF_HUNYUAN], ids=named)
def test_attention_that_is_cached(family, method):
    """Pyramid Attention Broadcast, of ppdiffusers itself: after merging is applied, and not of merged tokens."""
    config = newer_class("PyramidAttentionBroadcastConfig")(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(100, 800),
        current_timestep_callback=lambda: 500,
    )
    model, inputs = family.real(), family.inputs()
    other = {**inputs, "hidden_states": noise(*inputs["hidden_states"].shape, seed=8)}
    plain = run(model, inputs)
    model.enable_cache(config)
    with pytest.raises(ToMePassError, match=r"before apply_tome\(\), as enable_cache\(\) does"):
        run(model.apply_tome(method=method), inputs)
    model.remove_tome().disable_cache()
    merged, merged_other = (run(model.apply_tome(method=method), x) for x in (inputs, other))
    model.enable_cache(config)
    if family.is_hunyuan and method == "symmetric":
        with pytest.raises(ToMePassError, match='whose order changes from pass to pass: pass method="interlace"'):
            run(model, inputs)
    else:
        np.testing.assert_array_equal(run(model, inputs), merged)
        assert not np.allclose(run(model, other), merged_other, atol=1e-3)  # the second pass takes what was cached
    model.disable_cache()
    np.testing.assert_array_equal(run(model, other), merged_other)
    np.testing.assert_array_equal(run(model.remove_tome(), inputs), plain)


@pytest.mark.parametrize("family", [*FAMILIES, *CONTROLNETS, *OTHERS], ids=named)
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
    with pytest.raises(ToMePassError, match=f"a block got {tokens} tokens but the feature map was 6×8"):
        block(paddle.randn([1, tokens, CHANNELS]))
    attention = find_blocks(model)[-1].sublayers["attn"][0]
    processor, attention.processor = attention.processor, OtherProcessor()
    with pytest.raises(
        ToMePassError, match=r"by OtherProcessor cannot merge, only.*another.*or remove_tome\(\) first"
    ):
        run(model, inputs)
    attention.processor = processor
    run(model, inputs)


@pytest.mark.parametrize("family", [OF_FLUX], ids=named)
def test_positions_that_are_no_grid_are_an_error(family, model):
    inputs = family.inputs()
    with pytest.raises(ToMePassError, match=r"not text and then one grid of 6×8.*remove_tome\(\)"):
        run(apply_tome(model), {**inputs, "img_ids": inputs["img_ids"].flip(0)})


@pytest.mark.parametrize("name", ["mask", "other"])
def test_an_argument_that_would_be_ignored_is_an_error(name, monkeypatch):
    model = OF_WAN.double()
    layer = model.blocks[0].attn1
    image = noise(1, H * W, CHANNELS)
    monkeypatch.setattr(passes._current, "plan", match_tokens(image, Grid(H, W), removed=20))
    install(layer, AttentionWrap(placements(model, ToMeConfig())[0][1], is_self=True))
    arguments = {"attention_mask": paddle.ones([1, 1, 1, H * W])} if name == "mask" else {"scale": 2.0}
    with pytest.raises(ToMePassError, match=f"attention with the argument {next(iter(arguments))} cannot merge"):
        layer(hidden_states=image, **arguments)


def test_positional_arguments_are_those_of_the_layer(monkeypatch):
    """None is dropped: the layer's own are used, and more of them are an error, as without merging."""
    model = OF_FLUX.double()
    layer = model.transformer_blocks[0].attn
    image, text = noise(1, H * W, CHANNELS), noise(1, TEXT, CHANNELS, seed=1)
    calls = [
        ((image, text, None, 2.0), {}, "takes from .* positional arguments but .* were given"),
        ((image, text), {"encoder_hidden_states": text}, "multiple values for argument 'encoder_hidden_states'"),
    ]

    def check():
        for arguments, named, message in calls:
            with pytest.raises(TypeError, match=message):
                layer(*arguments, **named)
        return [x.numpy() for x in layer(image, text)]

    check()
    monkeypatch.setattr(passes._current, "plan", match_tokens(image, Grid(H, W), removed=20))
    install(layer, AttentionWrap(placements(model, ToMeConfig())[0][1], is_self=True))
    np.testing.assert_equal(check(), [x.numpy() for x in layer(image, encoder_hidden_states=text)])
    with pytest.raises(ToMePassError, match="attention with the argument attention_mask cannot merge"):
        layer(image, text, paddle.ones([1, 1, 1, H * W + TEXT]))


def test_what_replaces_the_forward_of_an_attention_is_left_out_nowhere():
    """ppdiffusers' enable_cache() replaces it, and returns what a pass before has computed."""
    model, inputs = OF_FLUX.double(), OF_FLUX.inputs()

    def replace(layer):
        layer.forward = partial(type(layer).forward if wrap_of(layer) is None else layer.forward.__func__, layer)

    plain = run(model, inputs)
    replace(model.single_transformer_blocks[0].attn)
    with pytest.raises(ToMePassError, match=r"before apply_tome\(\), as enable_cache\(\) does"):
        run(apply_tome(model), inputs)
    del remove_tome(model).single_transformer_blocks[0].attn.forward
    for method, is_whole in (("symmetric", True), ("kv", False)):
        expected = run(apply_tome(model, method=method), inputs)
        replace(model.single_transformer_blocks[0].attn)
        if is_whole:
            with pytest.raises(ToMePassError, match=r'single-stream block.*pass method="interlace"'):
                run(model, inputs)
        else:
            np.testing.assert_array_equal(run(model, inputs), expected)
        np.testing.assert_array_equal(run(remove_tome(model), inputs), plain)
        del model.single_transformer_blocks[0].attn.forward
