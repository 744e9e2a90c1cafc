"""CogVideoX, Wan and HunyuanVideo: tokens of all frames in one sequence, merged within each frame."""

import copy
from functools import partial

import cuda_attention
import numpy as np
import paddle
import pytest
from conftest import program_of, sizes_of, traces
from ppdiffusers_source import newer_class
from zoo import video_transformers as zoo
from zoo.noise import noise
from zoo.video_transformers import CHANNELS, FRAMES, HEADS, LATENTS, STATES, TEXT, WIDTH

from ppdiffusers_tome import (
    Grid,
    NoMergeableLayerError,
    ToMeConfig,
    ToMeConfigError,
    ToMePassError,
    apply_tome,
    match_tokens,
    remove_tome,
    tome_summary,
    wraps,
)
from ppdiffusers_tome.matching import join_frames
from ppdiffusers_tome.rotary import RotaryAttentionWrap
from ppdiffusers_tome.wraps import install, remove

H, W = 6, 8
SETTINGS = [
    {},
    {"merge_attn": "kv"},
    {"merge_attn": True},
    {"proportional": False},
    {"merge_mlp": True, "merge_crossattn": True},
    {"match": "grid", "ratio": 0.75},
    {"merge_attn": False, "merge_mlp": True, "window": 4},
]
COMMON = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH, "in_channels": LATENTS, "out_channels": LATENTS}


class Family:
    """How a model is built, as a double or of ppdiffusers' own class, and the arguments of a pass."""

    def __init__(self, name, double, is_rotary=False, **config):
        self.name, self._double, self._config = name, double, config
        self.is_cog = name.startswith("CogVideoX")
        self.takes_rows = is_rotary and self.is_cog
        self.is_hunyuan = name.startswith("Hunyuan")
        self.has_image = "image_dim" in config

    def double(self):
        paddle.seed(0)
        options = {"use_rotary_positional_embeddings": self.takes_rows, "has_image": self.has_image}
        model = self._double(**{name: value for name, value in options.items() if value})
        model.eval()
        return model

    def real(self):
        paddle.seed(0)
        with cuda_attention.available():  # HunyuanVideo's text refiner has no other attention that takes its mask
            model = newer_class(self._double.__name__)(**COMMON, **self._config)
        for path, weight in model.named_parameters():
            if ".norm_" in path:
                weight.set_value(0.5 + paddle.rand(weight.shape))
        model.eval()
        return model

    def inputs(self, h=H, w=W, batch=2, text=TEXT):
        """Arguments of one pass over h×w tokens in each frame."""
        shape = (FRAMES, LATENTS) if self.is_cog else (LATENTS, FRAMES)
        arguments = {
            "hidden_states": noise(batch, *shape, 2 * h, 2 * w),
            "timestep": paddle.full([batch], 10),
            "encoder_hidden_states": noise(batch, text, STATES, seed=1),
        }
        if self.takes_rows:
            arguments["image_rotary_emb"] = zoo.rotary_rows(FRAMES, h, w)
        if self.has_image:
            arguments["encoder_hidden_states_image"] = noise(batch, zoo.IMAGE, STATES, seed=7)
        if self.is_hunyuan:
            mask = [[1] * text] + [[1] * (text - 2) + [0] * 2] * (batch - 1)
            arguments |= {"encoder_attention_mask": paddle.to_tensor(mask), "guidance": paddle.full([batch], 1000.0)}
            arguments["pooled_projections"] = noise(batch, STATES, seed=2)
        return arguments


COGVIDEOX = {
    "time_embed_dim": 8,
    "text_embed_dim": STATES,
    "num_layers": 2,
    "sample_width": 2 * W,
    "sample_height": 2 * H,
    "sample_frames": 4 * FRAMES,  # not those of `inputs`, so that the model computes positions in each pass
    "max_text_seq_length": TEXT,
}
WAN = {"text_dim": STATES, "freq_dim": 8, "ffn_dim": 48, "num_layers": 2}
FAMILIES = [
    Family("CogVideoX-2b", zoo.CogVideoXTransformer3DModel, **COGVIDEOX),
    Family(
        "CogVideoX-5b",
        zoo.CogVideoXTransformer3DModel,
        is_rotary=True,
        use_rotary_positional_embeddings=True,
        **COGVIDEOX,
    ),
    Family("Wan", zoo.WanTransformer3DModel, **WAN),
    Family(
        "HunyuanVideo",
        zoo.HunyuanVideoTransformer3DModel,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=STATES,
        pooled_projection_dim=STATES,
        rope_axes_dim=zoo.AXES,
    ),
]

WAN_WITH_IMAGE = Family(
    "Wan with an image", zoo.WanTransformer3DModel, **WAN, image_dim=STATES, added_kv_proj_dim=CHANNELS
)
CONTROLLED = Family(
    "CogVideoX-VCtrl",
    zoo.CogVideoXTransformer3DVCtrlModel,
    is_rotary=True,
    use_rotary_positional_embeddings=True,
    **COGVIDEOX,
)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request):
    return request.param


@pytest.fixture(params=["double", "real"])
def model(request, family):
    return getattr(family, request.param)()


@paddle.no_grad()
def run(model, inputs):
    return model(**inputs).sample.numpy()


@pytest.mark.parametrize(("h", "w", "text"), [(6, 8, TEXT), (7, 5, 9)])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_three_ways(family, model, settings, h, w, text):
    inputs = family.inputs(h, w, text=TEXT if family.name == "CogVideoX-2b" else text)  # whose text has one length
    plain, before = run(model, inputs), traces(model)
    np.testing.assert_array_equal(run(model.apply_tome(0), inputs), plain)
    assert not np.allclose(run(model.apply_tome(**settings), inputs), plain, atol=1e-4)
    np.testing.assert_array_equal(run(model.remove_tome(), inputs), plain)
    assert traces(model) == before


def cells(h, w):
    """[F·h·w]: for each token the first token of its cell of 2×2 in its frame."""
    first = np.arange(h)[:, None] // 2 * 2 * w + np.arange(w) // 2 * 2
    return paddle.to_tensor((np.arange(FRAMES)[:, None] * h * w + first.reshape(-1)).reshape(-1))


def even_positions(model, inputs, h, w):
    """Give all tokens of a cell the same position: the rows that are passed, computed, or added to the tokens."""
    first = cells(h, w)

    def even(rows):
        if isinstance(rows, tuple):
            return tuple(table.index_select(first, axis=0) for table in rows)
        return paddle.complex(*(part.index_select(first, axis=2) for part in (rows.real(), rows.imag())))

    if hasattr(model, "rope"):
        base = type(model.rope)
        forward = {"forward": lambda self, hidden_states: even(base.forward(self, hidden_states))}
        model.rope.__class__ = type(base.__name__, (base,), forward)
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


@pytest.mark.parametrize("settings", [{}, {"merge_attn": "kv"}, {"merge_mlp": True}], ids=str)
def test_equal_tokens_at_equal_positions_merge_without_a_difference(family, model, settings):
    """The oracle is the plain model: in each cell of 2×2 all tokens and positions are equal in all of its layers."""
    inputs = family.inputs()
    even_positions(model, inputs, H, W)
    latents = inputs["hidden_states"]
    for axis, length in ((latents.ndim - 2, 2 * H), (latents.ndim - 1, 2 * W)):  # patches of 2×2, cells of 2×2 patches
        pixels = np.arange(length)
        latents = latents.index_select(paddle.to_tensor(pixels // 4 * 4 + pixels % 2), axis=axis)
    inputs["hidden_states"] = latents
    plain = run(model, inputs)
    merged = run(model.apply_tome(0.75, match="grid", **settings), inputs)
    np.testing.assert_allclose(merged, plain, atol=2e-5 * np.abs(plain).max())
    without = run(model.apply_tome(0.75, match="grid", proportional=False, **settings), inputs)
    assert (np.abs(without - plain).max() > 1e-3 * np.abs(plain).max()) == (family.name != "Wan")


@pytest.mark.parametrize("merge_attn", ["asymmetric", True, "kv"])
def test_each_video_of_a_batch_is_what_it_is_alone(family, model, merge_attn):
    """As under guidance: the same latents with two texts."""
    model.apply_tome(merge_attn=merge_attn)
    inputs = family.inputs()
    inputs["hidden_states"] = paddle.concat([inputs["hidden_states"][:1]] * 2)
    both = run(model, inputs)
    assert not np.allclose(both[0], both[1], atol=1e-4)
    for i in range(2):
        alone = {name: x if isinstance(x, tuple) else x[i : i + 1] for name, x in inputs.items()}
        np.testing.assert_allclose(run(model, alone)[0], both[i], atol=2e-5)


def test_tokens_merge_in_each_frame_with_the_same_dst(family, model, plans):
    inputs = family.inputs()
    run(model.apply_tome(ratio=0.4, window=4), inputs)
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


def widths(model, inputs):
    """Tokens that each linear layer gets, by path within its block."""
    seen = {}
    for path, layer in model.named_sublayers():
        if isinstance(layer, paddle.nn.Linear) and "blocks.0." in path and "refiner" not in path:
            name = f"single.{path}" if path.startswith("single") else path
            name = name.replace("single_transformer_blocks.0.", "").replace("transformer_blocks.0.", "")
            layer.register_forward_pre_hook(
                lambda layer, inputs, name=name: seen.__setitem__(name, inputs[0].shape[1])
            )
    run(model, inputs)
    return seen


def test_which_layers_get_merged_tokens(family, model):
    settings = {"merge_mlp": True, "merge_crossattn": True}
    seen = widths(model.apply_tome(**settings), family.inputs())
    tokens, keys, text = FRAMES * 39, FRAMES * 16, TEXT
    mlp = {tokens_in for path, tokens_in in seen.items() if path.split(".")[-3:-2] == ["net"] or ".ff" in f".{path}"}
    if family.is_cog:
        assert (seen["attn1.to_q"], seen["attn1.to_k"], seen["attn1.to_v"]) == (tokens + text, *[keys + text] * 2)
        assert tokens + text in mlp
    elif family.is_hunyuan:
        assert (seen["attn.to_q"], seen["attn.to_k"], seen["attn.to_v"]) == (tokens, keys, keys)
        assert seen["attn.add_q_proj"] == text
        whole = [seen[f"single.{name}"] for name in ("attn.to_q", "attn.to_k", "proj_mlp", "proj_out")]
        assert whole == [FRAMES * H * W // 2 + text] * 4
    else:
        assert seen["blocks.0.attn1.to_q"] == seen["blocks.0.attn2.to_q"] == tokens
        assert (
            seen["blocks.0.attn1.to_k"] == seen["blocks.0.attn1.to_v"] == keys and seen["blocks.0.attn2.to_k"] == text
        )
        assert tokens in {seen[path] for path in seen if ".ffn." in path}


def test_masked_text_is_left_out():
    """HunyuanVideo's mask, over merged tokens: a padded text gives what the shorter one gives."""
    family = FAMILIES[-1]
    model = family.double()
    for merge_attn in ("asymmetric", True, "kv"):
        for proportional in (True, False):
            model.apply_tome(merge_attn=merge_attn, proportional=proportional)
            inputs = family.inputs()
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
        per_frame = [rows_of.numpy().reshape(plan.frames, -1) for rows_of in (plan.dst_rows, plan.stay_rows)]
        positions = np.concatenate(per_frame, axis=1).reshape(-1)
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
@pytest.mark.parametrize("merge_attn", [True, "asymmetric", "kv"])
def test_merged_attention_is_that_of_float64(family, model, merge_attn, monkeypatch):
    match = partial(
        match_tokens,
        grid=Grid(H, W),
        removed=20,
        random_key=(1,),
        window=4,
        removed_keys=30 if merge_attn == "asymmetric" else None,
    )
    blocks = [*getattr(model, "transformer_blocks", ()), *getattr(model, "single_transformer_blocks", ())]
    for block in blocks or model.blocks:
        layer = block.attn if family.is_hunyuan else block.attn1
        image = noise(2, FRAMES * H * W, CHANNELS, seed=3)
        frames = image.reshape([-1, H * W, CHANNELS])
        plan = join_frames(match(frames), FRAMES)
        text = None if family.name == "Wan" else noise(2, TEXT, CHANNELS, seed=4)
        rows = None if family.name == "CogVideoX-2b" else zoo.rotary_rows(FRAMES, H, W)
        arguments = {} if text is None else {"encoder_hidden_states": text}
        mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
        if family.is_hunyuan:
            whole = np.concatenate([np.ones([2, FRAMES * H * W]), mask], axis=1) > 0
            arguments["attention_mask"] = paddle.to_tensor(whole[:, None, None])
        if family.name == "Wan":
            arguments["rotary_emb"] = zoo.complex_rows(rows).reshape([1, 1, -1, WIDTH // 2]).cast("complex128")
        elif rows is not None:
            arguments["image_rotary_emb"] = rows
        with monkeypatch.context() as context:
            context.setattr(wraps._current, "plan", plan)
            install(layer, RotaryAttentionWrap(ToMeConfig(merge_attn=merge_attn)))
            actual = layer(hidden_states=image, **arguments)
            remove(layer)
        actual, actual_text = actual if isinstance(actual, tuple) else (actual, None)
        assert sizes_of(plan).max() > 2
        for i in range(2):
            alone = match(frames[i * FRAMES : (i + 1) * FRAMES])
            expected, expected_text = oracle(
                layer,
                image[i].numpy().astype("float64"),
                None if text is None else text[i].numpy().astype("float64"),
                join_frames(alone, FRAMES),
                None if rows is None else [table.numpy().astype("float64") for table in rows],
                merge_attn == "kv",
                mask[i] if family.is_hunyuan else None,
            )
            np.testing.assert_allclose(actual[i].numpy(), expected, atol=5e-6)
            if actual_text is not None:
                np.testing.assert_allclose(actual_text[i].numpy(), expected_text, atol=5e-6)


def vctrl(kind):
    """CogVideoX's VCtrl, a ControlNet: the double, or ppdiffusers' own."""
    paddle.seed(0)
    if kind == "double":
        model = zoo.VCtrlModel()
    else:
        config = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH, "in_channels": LATENTS}
        model = newer_class("VCtrlModel")(**config, time_embed_dim=8, num_layers=2)
    model.eval()
    return model


def vctrl_inputs(h=H, w=W, batch=2):
    return {
        "sample": noise(batch, FRAMES, LATENTS, 2 * h, 2 * w),
        "timestep": paddle.full([batch], 10),
        "v_cond": noise(batch, FRAMES, LATENTS + 1, 2 * h, 2 * w, seed=1),
        "image_rotary_emb": zoo.rotary_rows(FRAMES, h, w),
    }


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["double", "real"])
def test_controlnet_of_cogvideox(kind, settings):
    model, inputs = vctrl(kind), vctrl_inputs()

    @paddle.no_grad()
    def control():
        return np.stack([x.numpy() for x in model(**inputs).vctrl_block_samples])

    plain, before = control(), traces(model)
    apply_tome(model, **settings)
    assert not np.allclose(control(), plain, atol=1e-4)
    removed = ToMeConfig(**settings).removed(H * W, H * W // 4)
    assert [block.kept for block in tome_summary(model, 2 * H, 2 * W).blocks] == [H * W - removed] * 2
    remove_tome(model)
    np.testing.assert_array_equal(control(), plain)
    assert traces(model) == before
    with pytest.raises(NoMergeableLayerError, match="it only has ControlNets"):
        apply_tome(model, controlnet=False)


def test_gradients_of_checkpointing_are_those_without():
    """Of ppdiffusers' own models whose blocks `recompute` runs again, VCtrl's alone works without merging too."""
    model = apply_tome(vctrl("real"), merge_mlp=True)
    model.train()

    def gradients(is_checkpointing):
        model.gradient_checkpointing = is_checkpointing
        model.clear_gradients()
        sum(x.square().mean() for x in model(**vctrl_inputs()).vctrl_block_samples).backward()
        return {name: weight.grad.numpy() for name, weight in model.named_parameters() if weight.grad is not None}

    expected, actual = gradients(False), gradients(True)
    assert len(expected) == len(actual) > 20
    for name, gradient in expected.items():
        np.testing.assert_allclose(actual[name], gradient, atol=1e-6, err_msg=name)


def test_a_deep_copy_has_its_own_merging(family, model):
    inputs = family.inputs()
    plain = run(model, inputs)
    merged = run(model.apply_tome(), inputs)
    copied = copy.deepcopy(model)
    np.testing.assert_array_equal(run(copied, inputs), merged)
    np.testing.assert_array_equal(run(copied.remove_tome(), inputs), plain)
    np.testing.assert_array_equal(run(model, inputs), merged)


@pytest.mark.parametrize("kind", ["double", "real"])
def test_cogvideox_that_vctrl_controls(kind):
    model, inputs = getattr(CONTROLLED, kind)(), CONTROLLED.inputs()
    plain = run(model, inputs)
    assert not np.allclose(run(apply_tome(model), inputs), plain, atol=1e-4)
    np.testing.assert_array_equal(run(remove_tome(model), inputs), plain)


@pytest.mark.parametrize("family", [FAMILIES[1], FAMILIES[2]], ids=lambda family: family.name)
def test_schedule_of_a_real_model(family):
    """It reads the timesteps of `Timesteps`, which the doubles do not have."""
    model, inputs = family.real(), family.inputs()
    early, late = ({**inputs, "timestep": paddle.full([2], step)} for step in (900, 100))
    expected = run(apply_tome(model, 0.5), early), run(remove_tome(model), late)
    apply_tome(model, {1.0: 0.5, 0.5: 0.0})
    for inputs, output in zip((early, late), expected, strict=True):
        np.testing.assert_array_equal(run(model, inputs), output)


def test_no_schedule_in_hunyuanvideo():
    """Its layer for timesteps also gets the guidance."""
    with pytest.raises(ToMeConfigError, match="its ratio cannot follow a schedule: pass a constant ratio"):
        FAMILIES[-1].real().apply_tome({1.0: 0.5, 0.5: 0.0})


class Sample(paddle.nn.Layer):
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
@pytest.mark.parametrize("family", FAMILIES[:2], ids=lambda family: family.name)
def test_program_of_cogvideox_equals_eager(family, kind):
    """ppdiffusers' own classes of Wan and HunyuanVideo cannot be traced, plain or merged."""
    model, inputs = getattr(family, kind)(), family.inputs()
    eager = run(apply_tome(model), inputs)
    arguments = [*list(inputs.values())[:3], *inputs.get("image_rotary_emb", ())]
    program = program_of(Sample(model), arguments)
    with paddle.no_grad():
        np.testing.assert_array_equal(program(*arguments).numpy(), eager)


@pytest.mark.parametrize("merge_attn", [True, "alone"])
@pytest.mark.parametrize("family", [FAMILIES[1], FAMILIES[3]], ids=lambda family: family.name)
def test_attention_that_is_cached(family, merge_attn):
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
        run(model.apply_tome(merge_attn=merge_attn), inputs)
    model.remove_tome().disable_cache()
    merged, merged_other = (run(model.apply_tome(merge_attn=merge_attn), x) for x in (inputs, other))
    model.enable_cache(config)
    if family.is_hunyuan and merge_attn is True:
        with pytest.raises(ToMePassError, match='whose order changes from pass to pass: pass merge_attn="alone"'):
            run(model, inputs)
    else:
        np.testing.assert_array_equal(run(model, inputs), merged)
        assert not np.allclose(run(model, other), merged_other, atol=1e-3)  # the second pass takes what was cached
    model.disable_cache()
    np.testing.assert_array_equal(run(model, other), merged_other)
    np.testing.assert_array_equal(run(model.remove_tome(), inputs), plain)


@pytest.mark.parametrize("merge_attn", ["asymmetric", True, "kv"])
@pytest.mark.parametrize("kind", ["double", "real"])
def test_wan_with_an_image(kind, merge_attn):
    """Image to video: cross-attention also gets the tokens of an image."""
    model, inputs = getattr(WAN_WITH_IMAGE, kind)(), WAN_WITH_IMAGE.inputs()
    plain = run(model, inputs)
    merged = run(model.apply_tome(merge_attn=merge_attn, merge_crossattn=True), inputs)
    assert not np.allclose(merged, plain, atol=1e-4)
    np.testing.assert_array_equal(run(model.remove_tome(), inputs), plain)


class OtherProcessor(zoo.WanAttnProcessor2_0):
    pass


def test_what_cannot_merge_is_an_error(family, model):
    inputs = family.inputs()
    run(model.apply_tome(), inputs)
    block = (model.blocks if family.name == "Wan" else model.transformer_blocks)[0]
    tokens = paddle.randn([1, FRAMES * H * W + 1, CHANNELS])
    with pytest.raises(ToMePassError, match=f"a block got {FRAMES * H * W + 1} tokens but the feature map was 6×8"):
        block(tokens, paddle.randn([1, TEXT, CHANNELS]), paddle.randn([1, CHANNELS]), None)
    attention = block.attn if family.is_hunyuan else block.attn1
    processor, attention.processor = attention.processor, OtherProcessor()
    with pytest.raises(ToMePassError, match=r"by OtherProcessor cannot merge.*set another.*or remove_tome\(\) first"):
        run(model, inputs)
    attention.processor = processor
    run(model, inputs)


@pytest.mark.parametrize("name", ["mask", "other"])
def test_an_argument_that_would_be_ignored_is_an_error(name, monkeypatch):
    layer = FAMILIES[2].double().blocks[0].attn1
    image = noise(1, H * W, CHANNELS)
    monkeypatch.setattr(wraps._current, "plan", match_tokens(image, Grid(H, W), removed=20))
    install(layer, RotaryAttentionWrap(ToMeConfig()))
    arguments = {"attention_mask": paddle.ones([1, 1, 1, H * W])} if name == "mask" else {"scale": 2.0}
    with pytest.raises(ToMePassError, match=f"attention with the argument {next(iter(arguments))} cannot merge"):
        layer(hidden_states=image, **arguments)
