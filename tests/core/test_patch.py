"""Attaching and detaching: plain, applied (must differ), removed (bit-equal, and nothing left behind)."""

import copy
import pickle
import subprocess
import sys
import types
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import pytest
from conftest import THREE_LEVELS, in_threads, inputs, make_controlnet, make_unet, record_plans, run, traces
from forward_cache import ForwardCache, check_with_caches
from ppdiffusers.models import transformer_2d, unet_2d_blocks
from ppdiffusers.models.attention_processor import AttnProcessor
from ppdiffusers.patches import tomesd_patch_utils as builtin
from test_transformers import double_of_sd35, draw, draw_control, pixart_of_1024_px, real_sd35
from test_videos import FAMILIES as VIDEOS
from test_videos import draw as draw_video
from zoo.noise import noise
from zoo.transformers import dit, sd3, sd3_controlnet

import ppdiffusers_tome
from ppdiffusers_tome import Grid, NoMergeableLayerError, ToMeConfig, ToMeConfigError, ToMePassError, match_tokens
from ppdiffusers_tome.attach import attach, forward
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.methods import METHODS
from ppdiffusers_tome.methods.turns import turn_table

TOMESD = {"method": "tomesd"}
EVERYWHERE = {**TOMESD, "max_downsample": 8, "merge_crossattn": True, "merge_mlp": True}


@pytest.fixture
def live_plans(monkeypatch):
    """The plans that exist."""
    alive = weakref.WeakSet()
    record_plans(monkeypatch, alive.add)
    return alive


@pytest.mark.parametrize(
    ("settings", "batch", "h", "w"),
    [
        ({}, 3, 17, 19),
        ({"ratio": 0.9375}, 3, 17, 19),
        ({"ratio": 0.25, "max_downsample": 2}, 3, 17, 19),
        ({"method": "todo"}, 1, 16, 24),
        (EVERYWHERE, 3, 17, 19),
        ({**TOMESD, "merge_attn": False, "merge_crossattn": True}, 3, 17, 19),
        ({**TOMESD, "merge_attn": False, "merge_mlp": True}, 3, 17, 19),
        ({**TOMESD, "ratio": 0.6, "sx": 3, "sy": 2, "use_rand": False}, 3, 17, 19),
    ],
    ids=str,
)
def test_plain_applied_removed(unet, settings, batch, h, w, live_plans):
    before, plain = traces(unet), run(unet, batch=batch, h=h, w=w)
    assert unet.apply_tome(**settings) is unet
    applied = run(unet, batch=batch, h=h, w=w)
    assert applied.shape == plain.shape and np.isfinite(applied).all()
    assert np.abs(applied - plain).max() > 1e-4
    assert unet.remove_tome() is unet
    np.testing.assert_array_equal(run(unet, batch=batch, h=h, w=w), plain)
    assert traces(unet) == before == traces(unet.remove_tome())
    assert not live_plans


def run_controlnet(model):
    given = inputs()
    condition = noise(2, 3, 32, 32)
    with paddle.no_grad():
        return model(given["sample"], 10, given["encoder_hidden_states"], condition)[0][-1].numpy()


# Models that the pipelines of tests/pipelines do not have.
OF_NO_PIPELINE = {
    "pixart_of_1024_px": (pixart_of_1024_px, partial(draw, pixart_of_1024_px)),
    **{make.__name__: (make, partial(draw, sd3)) for make in (double_of_sd35, real_sd35)},
    "sd3_controlnet": (sd3_controlnet, draw_control),
    "Hotshot-XL": (VIDEOS["Hotshot-XL"], draw_video),
}


@pytest.mark.parametrize("name", OF_NO_PIPELINE)
@pytest.mark.parametrize("method", ["interlace", "todo"])
def test_models_of_no_pipeline_plain_applied_removed(name, method):
    make, output = OF_NO_PIPELINE[name]
    model = make()
    before, plain = traces(model), output(model)
    np.testing.assert_array_equal(output(model.apply_tome(0, method=method)), plain)
    merged = output(model.apply_tome(method=method))
    assert np.abs(merged - plain).max() > 1e-5 and np.isfinite(merged).all()
    np.testing.assert_array_equal(output(copy.deepcopy(model)), merged)
    with model.tome(ratio=0.25):
        assert not np.array_equal(output(model), merged)
    np.testing.assert_array_equal(output(model), merged)
    np.testing.assert_array_equal(output(model.remove_tome()), plain)
    assert traces(model) == before


def test_applying_again_replaces(unet):
    unet.apply_tome(ratio=0.25)
    quarter = run(unet)
    unet.apply_tome(ratio=0.75, max_downsample=2)
    unet.apply_tome(ratio=0.25)
    np.testing.assert_array_equal(run(unet), quarter)
    assert [config.ratio for _, config in attach.attached_configs(unet)] == [0.25]
    before = traces(make_unet())[0]
    assert before == traces(unet.remove_tome())[0]


def test_ratio_that_removes_no_token_gives_the_plain_result(unet):
    plain = run(unet)
    np.testing.assert_array_equal(run(unet.apply_tome(ratio=0)), plain)
    np.testing.assert_array_equal(run(unet.apply_tome(ratio=0.003, method="tomesd")), plain)  # ⌊256 · 0.003⌋ = 0


def test_at_ratio_0_nothing_is_checked_and_nothing_changes(unet):
    """Even what merging rejects: chunks, blocks without a feature map, keyword calls, later hooks."""
    chunk(unet, 16)
    mergeable = find_blocks(unet)[0]
    x, tokens, text = paddle.randn([2, 32, 16, 16]), paddle.randn([2, 240, 32]), paddle.randn([2, 7, 24])

    @paddle.no_grad()
    def passes():
        outputs = [mergeable.transformer(hidden_states=x, encoder_hidden_states=text).sample]
        outputs.append(mergeable.layer(tokens, encoder_hidden_states=text))
        return [run(unet), *(output.numpy() for output in outputs)]

    plain = passes()
    unet.apply_tome(ratio=0, **EVERYWHERE)
    assert attach.config_of(unet) == ToMeConfig(ratio=0, **EVERYWHERE)
    helper = mergeable.layer.register_forward_pre_hook(lambda block, arguments: (arguments[0] * 1, *arguments[1:]))
    np.testing.assert_equal(passes(), plain)
    helper.remove()
    assert not any(layer._forward_post_hooks for layer in unet.sublayers())


def test_same_seed_same_result_in_every_pass_and_batch(unet):
    unet.apply_tome(**TOMESD, seed=3)
    first, second = run(unet), run(unet)
    np.testing.assert_array_equal(first, second)
    arguments = inputs()
    with paddle.no_grad():
        one = unet(arguments["sample"][:1], 10, arguments["encoder_hidden_states"][:1]).sample.numpy()
    np.testing.assert_allclose(one, first[:1], atol=1e-5)  # odd batches merge like even ones
    assert np.abs(run(unet.apply_tome(**TOMESD, seed=4)) - first).max() > 1e-4
    assert np.abs(run(unet.apply_tome(**TOMESD, use_rand=False)) - first).max() > 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_leave_keys_out_add_no_tokens(unet, method, monkeypatch):
    """A GPU adds in no fixed order: see docs/api.md."""
    added, add = [], paddle.scatter_nd_add
    monkeypatch.setattr(paddle, "scatter_nd_add", lambda *args: added.append(args[2]) or add(*args))
    run(unet.apply_tome(method=method))
    assert bool(added) == METHODS[method].merges_queries


def test_each_block_merges_by_its_own_input_and_seed(unet, plans):
    metrics, blocks = [], find_blocks(unet)
    for block in blocks:
        block.layer.register_forward_pre_hook(lambda layer, arguments: metrics.append(arguments[0]))
    run(unet.apply_tome(**TOMESD, max_downsample=2, seed=3), h=17, w=12)
    grids = [Grid(17, 12), *[Grid(9, 6)] * 4, *[Grid(17, 12)] * 2]  # in the order of a pass: down, middle, up
    indices = [block.index for stage in ("down", "mid", "up") for block in blocks if block.path.startswith(stage)]
    for plan, metric, grid, index in zip(plans, metrics, grids, indices, strict=True):
        key = (3, index, int(turn_table()[10]))
        expected = match_tokens(metric, grid, grid.tokens // 2, random_key=key).choice
        np.testing.assert_array_equal(plan.choice.positions, expected.positions)
        np.testing.assert_array_equal(plan.choice.merging.sources, expected.merging.sources)


# Errors leave the model unchanged


@pytest.mark.parametrize(
    "invalid", [{"ratio": 2}, {"max_downsample": 3}, {"seed": "x"}, {"seed": None}, {"merge_mlp": 1}]
)
def test_invalid_settings_leave_the_model_unchanged(unet, invalid):
    unet.apply_tome(ratio=0.25)
    expected, before = run(unet), traces(unet)
    with pytest.raises(ToMeConfigError, match=next(iter(invalid))):
        unet.apply_tome(**invalid)
    assert traces(unet) == before
    np.testing.assert_array_equal(run(unet), expected)


def test_error_during_installation_restores_the_model(unet, monkeypatch):
    unet.apply_tome(ratio=0.25)
    expected, real, calls = run(unet), attach.AttentionWrap, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("out of memory")
        return real(*args)

    monkeypatch.setattr(attach, "AttentionWrap", failing)
    with pytest.raises(MemoryError):
        unet.apply_tome(ratio=0.75)
    np.testing.assert_array_equal(run(unet), expected)
    assert [config.ratio for _, config in attach.attached_configs(unet)] == [0.25]


def test_error_without_blocks_at_the_level_has_a_remedy():
    unet = make_unet(**THREE_LEVELS)
    with pytest.raises(NoMergeableLayerError, match=r"max_downsample=1.*level 2 \(3\), level 4 \(4\).*pass 2\."):
        unet.apply_tome(max_downsample=1)
    assert not any(map(forward.wrap_of, unet.sublayers(include_self=True)))
    plain = run(unet)
    assert np.abs(run(unet.apply_tome(max_downsample=2)) - plain).max() > 1e-4


def test_other_objects_are_rejected():
    with pytest.raises(ToMeConfigError, match=r"'int'.* pipe\.unet"):
        ppdiffusers_tome.apply_tome(3)
    with pytest.raises(ToMeConfigError, match="'NoneType'"):
        ppdiffusers_tome.remove_tome(None)


# Plans end with their pass


def test_only_one_plan_is_alive_in_a_pass(unet, live_plans):
    alive = []
    for block in find_blocks(unet):
        block.layer.attn1.register_forward_pre_hook(lambda *_: alive.append(len(live_plans)))
    run(unet.apply_tome(max_downsample=2))
    assert alive == [1] * 7 and not live_plans


def test_threads_on_one_model_each_have_the_plan_and_the_timestep_of_their_pass(unet, device_is_restored):
    unet.apply_tome(ratio=0.5)
    sizes = [(2, 16, 16), (1, 12, 20), (3, 8, 32), (2, 17, 15)]  # two of them with 256 tokens, one with 255
    timesteps = [999, 1, 480, 999]
    passes = [
        partial(run, unet, batch=b, h=h, w=w, seed=i, timestep=timesteps[i]) for i, (b, h, w) in enumerate(sizes)
    ]
    expected = [make_pass() for make_pass in passes]
    for results, output in zip(in_threads(passes), expected, strict=True):
        assert len(results) == 4
        for result in results:
            np.testing.assert_allclose(result, output, atol=1e-6)


def test_no_plan_outlives_a_pass_that_fails(unet, live_plans):
    class Failing(AttnProcessor):
        def __call__(self, *args, **kwargs):
            raise ZeroDivisionError

    unet.apply_tome()
    expected = run(unet)
    processors = unet.attn_processors
    unet.set_attn_processor(Failing())
    with pytest.raises(ZeroDivisionError):
        run(unet)
    assert not live_plans
    unet.set_attn_processor(processors)
    np.testing.assert_array_equal(run(unet), expected)


def test_layers_called_directly_do_not_merge(unet):
    """Before a pass, after one, and after one that failed."""
    block, tokens = find_blocks(unet)[0].layer, paddle.randn([2, 10, 32])
    plain = block.attn1(tokens).numpy()
    unet.apply_tome()
    np.testing.assert_array_equal(block.attn1(tokens).numpy(), plain)
    run(unet)
    np.testing.assert_array_equal(block.attn1(tokens).numpy(), plain)
    block.norm1.register_forward_pre_hook(lambda layer, inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(unet)
    np.testing.assert_array_equal(block.attn1(tokens).numpy(), plain)


def test_layer_that_gets_more_tokens_than_its_block_is_rejected(unet):
    """Only where text and image are one sequence is the rest text, which is left alone."""
    for name, settings in (("attn1", {}), ("ff", {**TOMESD, "merge_mlp": True})):
        layer = getattr(find_blocks(unet.apply_tome(**settings))[0].layer, name)
        below = layer.forward
        layer.forward = lambda tokens, below=below, **named: below(
            paddle.concat([tokens, tokens[:, :7]], axis=1), **named
        )
        with pytest.raises(ToMePassError, match=r"\[B, 256, C\].*\[2, 263, "):
            run(unet)
        layer.forward = below


def test_block_called_without_its_model(unet):
    """Before the first pass it is plain, as in a pass that began before merging was applied."""
    block = find_blocks(unet)[0].layer
    tokens, text = paddle.randn([2, 256, 32]), paddle.randn([2, 7, 24])
    plain = block(tokens, encoder_hidden_states=text)
    unet.apply_tome()
    np.testing.assert_array_equal(block(tokens, encoder_hidden_states=text).numpy(), plain.numpy())
    run(unet)
    with pytest.raises(ToMePassError, match=r"255 tokens .*16×16"):
        block(paddle.randn([2, 255, 32]), encoder_hidden_states=paddle.randn([2, 7, 24]))


def test_keyword_call_of_an_inner_layer(unet):
    transformer = find_blocks(unet.apply_tome())[0].transformer
    run(unet)
    x, text = paddle.randn([2, 32, 16, 16]), paddle.randn([2, 7, 24])
    expected = transformer(x, encoder_hidden_states=text).sample.numpy()
    np.testing.assert_array_equal(transformer(encoder_hidden_states=text, hidden_states=x).sample.numpy(), expected)


@pytest.mark.parametrize("is_later", [True, False])
def test_hooks_that_replace_arguments(unet, is_later):
    expected = run(unet.apply_tome())
    if not is_later:
        unet.remove_tome()
    find_blocks(unet)[0].layer.register_forward_pre_hook(lambda block, arguments: (arguments[0] * 1, *arguments[1:]))
    np.testing.assert_array_equal(run(unet if is_later else unet.apply_tome()), expected)


# Other wraps of `forward`


def wrap_forward(layer, factor):
    """What other libraries do: run around a layer's `forward`, whatever it is at that time."""
    forward = layer.forward

    def scaled(*args, **kwargs):
        return factor * forward(*args, **kwargs)

    layer.forward = scaled


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("", {}),
        ("attn1.to_k", {}),
        *((path, EVERYWHERE) for path in ("attn1", "ff")),
    ],
    ids=str,
)
def test_wraps_of_others_below_and_above(unet, path, settings):
    """Ours comes off from between them; both stay. Applied again, it merges as before."""
    block = find_blocks(unet)[0].layer
    layer = dict(block.named_sublayers(include_self=True))[path]
    wrap_forward(layer, 0.5)
    wrap_forward(layer, 3.0)
    plain = run(unet)
    merged = run(unet.apply_tome(**settings))
    unet.remove_tome()
    np.testing.assert_array_equal(run(unet), plain)
    del layer.forward
    wrap_forward(layer, 0.5)
    unet.apply_tome(**settings)
    wrap_forward(layer, 3.0)
    np.testing.assert_array_equal(run(unet), merged)
    for _ in range(2):
        np.testing.assert_array_equal(run(unet.remove_tome()), plain)
        assert [config for _, config in attach.attached_configs(unet)] == [None]
        np.testing.assert_array_equal(run(unet.apply_tome(**settings)), merged)


def test_an_idle_wrap_does_not_hide_the_config(unet):
    """Another library still calls the wrap of the first block, which does not merge any more; the others do."""
    config = ToMeConfig(ratio=0.5, max_downsample=2)
    merged = run(unet.apply_tome(config=config))
    first, second = (mergeable.layer for mergeable in find_blocks(unet)[:2])
    wrap_forward(first, 1.0)
    first.remove_tome()
    assert type(forward.wrap_of(first)) is forward.Wrap and forward.wrap_of(second).attachment.applied.config == config
    assert attach.config_of(unet) == config
    with unet.tome(ratio=0.25):
        assert np.abs(run(unet) - merged).max() > 1e-4
    np.testing.assert_array_equal(run(unet), merged)


CACHED = {
    "unet": (make_unet, run),
    "controlnet": (make_controlnet, run_controlnet),
    **{make.__name__: (make, partial(draw, make)) for make in (dit, sd3)},
    "AnimateDiff": (VIDEOS["AnimateDiff"], draw_video),
}


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_in_place_of_the_forward_of_a_model(name):
    """Caches like those of ppdiffusers after 0.29.0, around merging or inside it."""
    make, output = CACHED[name]
    model = make()
    check_with_caches(model, [model], [lambda: output(model)])


def test_a_cache_in_place_of_the_forward_of_a_transformer(unet):
    """Its grid is read inside it: grids with as many tokens and other sides follow each other."""
    of_sizes = [partial(run, unet, h=h, w=w) for h, w in ((12, 20), (20, 12))]
    check_with_caches(unet, [block.transformer for block in find_blocks(unet)], of_sizes)
    video = VIDEOS["Stable Video Diffusion"]()
    transformers = {id(block.transformer): block.transformer for block in find_blocks(video)}
    check_with_caches(video, [*transformers.values()], [lambda: draw_video(video)])


@pytest.mark.parametrize("settings", [{}, {**TOMESD, "merge_attn": False, "merge_mlp": True}], ids=str)
def test_a_block_whose_wrap_is_left_out_is_an_error(unet, settings):
    """Another library replaces its `forward` after apply_tome(), or puts back what it has replaced before."""
    block, plain = find_blocks(unet)[0].layer, run(unet)
    merged = run(unet.apply_tome(**settings))
    message = r"BasicTransformerBlock .*apply_tome\(\)"
    for is_cached_first in (True, False):
        unet.remove_tome()
        if not is_cached_first:
            unet.apply_tome(**settings)
        cache = ForwardCache(block)
        if is_cached_first:
            np.testing.assert_array_equal(run(unet.apply_tome(**settings)), merged)
            cache.remove()
        with pytest.raises(ToMePassError, match=message):
            run(unet)
        if not is_cached_first:
            cache.remove()
        np.testing.assert_array_equal(run(unet.apply_tome(**settings)), merged)
    np.testing.assert_array_equal(run(unet.remove_tome()), plain)
    assert block.forward == types.MethodType(type(block).forward, block) and not hasattr(block, forward.ATTRIBUTE)


def test_a_wrap_that_is_put_back_after_it_was_removed_does_nothing(unet):
    """By a library that came after apply_tome(), when one from before it has gone first."""
    block, plain = find_blocks(unet)[0].layer, run(unet)
    before = ForwardCache(block)
    unet.apply_tome()
    after = ForwardCache(block)
    before.remove()
    unet.remove_tome()
    after.remove()
    np.testing.assert_array_equal(run(unet), plain)
    np.testing.assert_array_equal(run(unet.apply_tome().remove_tome()), plain)


# Copies, files, other features of ppdiffusers


def test_deep_copy_merges_independently(unet):
    plain, merged = run(unet), run(unet.apply_tome())
    twin = copy.deepcopy(unet)
    np.testing.assert_array_equal(run(twin), merged)
    np.testing.assert_array_equal(run(twin.remove_tome()), plain)
    np.testing.assert_array_equal(run(unet), merged)
    twin.apply_tome(ratio=0.25)
    unet.remove_tome()
    assert np.abs(run(twin) - plain).max() > 1e-4


of_paddle_3 = pytest.mark.skipif(paddle.__version__.startswith("2."), reason="Paddle 2.6 cannot pickle parameters")


@of_paddle_3
@pytest.mark.parametrize("settings", [{}, EVERYWHERE])
def test_pickle_merges_as_before(settings):
    unet = make_unet()
    plain, before = run(unet), traces(unet)
    merged = run(unet.apply_tome(**settings))
    twin = pickle.loads(pickle.dumps(unet))
    assert str(twin.tome_summary(16, 16)) == str(unet.tome_summary(16, 16))
    np.testing.assert_array_equal(run(twin), merged)
    np.testing.assert_array_equal(run(twin.remove_tome()), plain)
    left = traces(twin)
    assert {path: kinds[:2] for path, kinds in left[0].items()} == {
        path: kinds[:2] for path, kinds in before[0].items()
    }
    np.testing.assert_array_equal(run(twin.apply_tome(0.25)), run(unet.apply_tome(0.25)))
    np.testing.assert_array_equal(run(unet.remove_tome()), plain)


READ_PICKLE = """
import sys, pickle, numpy
with open(sys.argv[1], "rb") as file:
    unet, arguments = pickle.load(file)
numpy.save(sys.argv[2], unet(**arguments).sample.numpy())
"""


@of_paddle_3
def test_pickle_in_a_process_that_did_not_import_this_package(unet, tmp_path):
    """As a process that multiprocessing spawns, or joblib."""
    arguments = inputs()
    with paddle.no_grad():
        expected = unet.apply_tome()(**arguments).sample.numpy()
    (tmp_path / "unet.pickle").write_bytes(pickle.dumps((unet, arguments)))
    command = [sys.executable, "-W", "ignore", "-c", READ_PICKLE, tmp_path / "unet.pickle", tmp_path / "out.npy"]
    subprocess.run(command, check=True, cwd=Path(ppdiffusers_tome.__file__).parents[1])
    # Two processes may round differently, by 2e-6 in CI; merging changes far more.
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, rtol=1e-5, atol=1e-5)
    with paddle.no_grad():
        plain = unet.remove_tome()(**arguments).sample.numpy()
    assert np.abs(plain - expected).max() > 1e-3


def chunk(unet, size):
    """Do what `enable_forward_chunking` does in models that have it."""
    for mergeable in find_blocks(unet):
        mergeable.layer.set_chunk_feed_forward(size, dim=1)


# Training


def gradients(unet, *passes):
    """Of one backward pass after these forward passes; by default one."""
    unet.clear_gradients()
    loss = 0
    for changes in passes or [{}]:
        arguments = inputs(**changes)
        out = unet(arguments["sample"], arguments["timestep"], arguments["encoder_hidden_states"]).sample
        loss = loss + (out * out).mean()
    loss.backward()
    return {name: p.grad.numpy().copy() for name, p in unet.named_parameters() if p.grad is not None}


def without_random_state(monkeypatch):
    """Gradient checkpointing as on a GPU: Paddle cannot preserve its random state on the CPU."""
    for module in (transformer_2d, unet_2d_blocks):
        monkeypatch.setattr(module, "recompute", partial(module.recompute, preserve_rng_state=False))


def test_gradients_flow_to_every_parameter(unet):
    unet.train()
    plain = gradients(unet)
    merged = gradients(unet.apply_tome())
    assert set(merged) == set(plain)
    assert all(np.isfinite(g).all() for g in merged.values())
    key = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight"
    assert np.abs(merged[key]).max() > 0 and np.abs(merged[key] - plain[key]).max() > 0


@pytest.mark.parametrize("method", ["interlace", "tomesd"])
def test_gradient_equals_central_differences(unet, method):
    """Along a random direction, with a fixed choice of tokens."""
    unet.apply_tome(method=method, max_downsample=2)
    # after the last plan, so that no choice of tokens depends on it
    name = "up_blocks.1.attentions.1.transformer_blocks.0.attn1.to_v.weight"
    parameter = dict(unet.named_parameters())[name]
    slope = gradients(unet)[name]
    direction = np.random.RandomState(0).standard_normal(parameter.shape).astype("float32")
    start, losses = parameter.numpy().copy(), []
    for step in (1e-2, -1e-2):
        parameter.set_value(start + step * direction)
        losses.append(float((run(unet).astype("float64") ** 2).mean()))
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(float((slope * direction).sum()), rel=1e-2)


def test_gradient_checkpointing_with_passes_in_between(unet, monkeypatch):
    """Passes of other grids and timesteps before one backward pass: each block runs again as in its own pass.

    test_state.py has the other ways to recompute.
    """
    without_random_state(monkeypatch)
    changes = [
        {"h": h, "w": w, "seed": number, "timestep": timestep}
        for number, (h, w, timestep) in enumerate([(16, 24, 999), (24, 16, 10), (16, 24, 480)])
    ]
    unet.train()
    unet.apply_tome()
    expected = gradients(unet, *changes)
    unet.enable_gradient_checkpointing()
    actual = gradients(unet, *changes)
    for name, gradient in expected.items():
        np.testing.assert_allclose(actual[name], gradient, atol=1e-6, err_msg=name)


# The built-in merging of ppdiffusers


def apply_builtin(model, ratio):
    """Do what ppdiffusers' built-in apply_tome does."""
    model._tome_info = {
        "size": None,
        "hooks": [],
        "args": {
            "ratio": ratio, "max_downsample": 1, "sx": 2, "sy": 2, "use_rand": False,
            "merge_attn": True, "merge_crossattn": False, "merge_mlp": False,
        },
    }  # fmt: skip
    for mergeable in find_blocks(model):
        mergeable.layer.__class__ = builtin.make_tome_block(type(mergeable.layer))
        mergeable.layer._tome_info = model._tome_info
    builtin.hook_tome_model(model)


@pytest.mark.parametrize("action", ["apply", "remove"])
def test_built_in_merging_is_removed_first(unet, action):
    before, plain = traces(unet), run(unet)
    settings = {"method": "tomesd", "use_rand": False}  # ppdiffusers' method is tomesd's
    expected = run(unet.apply_tome(0.5, **settings))
    unet.remove_tome()
    apply_builtin(unet, 0.5)
    np.testing.assert_allclose(run(unet), expected, atol=2e-5)
    if action == "apply":
        np.testing.assert_array_equal(run(unet.apply_tome(0.5, **settings)), expected)
    unet.remove_tome()
    np.testing.assert_array_equal(run(unet), plain)
    assert traces(unet) == before
