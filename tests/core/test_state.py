"""A pass has one snapshot of what merges: whatever is applied meanwhile, and when gradients are computed later."""

import gc
import threading
from functools import cache, partial

import numpy as np
import paddle
import pytest
from conftest import inputs, make_unet, run, traces
from ppdiffusers.models import transformer_2d, unet_2d_blocks
from zoo.noise import noise
from zoo.transformers import dit

from ppdiffusers_tome.attach.attach import attached_placements

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

OTHERS = [{"ratio": 0.5}, {"method": "todo"}, {"method": "tomesd"}, {"method": "tomesd", "seed": 1}]


def test_a_pass_has_the_settings_from_before_or_after_a_change_in_another_thread(unet):
    expected = [run(unet.apply_tome(**settings)) for settings in OTHERS]
    results, done = [], threading.Event()

    def passes():
        try:
            results.extend(run(unet) for _ in range(8))
        finally:
            done.set()

    thread = threading.Thread(target=passes)
    thread.start()
    number = 0
    while not done.wait(0.002):
        unet.apply_tome(**OTHERS[number % len(OTHERS)])
        number += 1
    thread.join()
    assert len(results) == 8 and number
    for result in results:
        assert any(np.array_equal(result, one) for one in expected)


def test_settings_that_change_within_a_pass_are_those_of_the_next(unet):
    """The change comes from a hook after the first block, so it is the same on each machine."""
    before, after = (run(unet.apply_tome(**settings)) for settings in ({}, {"method": "todo"}))
    unet.apply_tome()
    (first, _), *_ = attached_placements(unet)
    hook = first.layer.register_forward_post_hook(lambda *_: unet.apply_tome(method="todo") and None)
    np.testing.assert_array_equal(run(unet), before)
    hook.remove()
    np.testing.assert_array_equal(run(unet), after)


def test_a_failed_pass_leaves_nothing_to_the_next(unet):
    expected = run(unet.apply_tome(method="todo"))
    (first, _), *_ = attached_placements(unet.apply_tome())
    hook = first.layer.attn1.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(unet)
    hook.remove()
    np.testing.assert_array_equal(run(unet.apply_tome(method="todo")), expected)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_tensor_that_enters_a_block_in_two_passes_has_the_grid_of_each(is_training):
    model = dit().apply_tome(method="todo")
    model.train() if is_training else model.eval()

    def of_grid(h, w, tokens):
        with paddle.no_grad():
            model.pos_embed(noise(1, 4, 2 * h, 2 * w))
            block = model.transformer_blocks[0]
            return block(tokens, timestep=paddle.to_tensor([5]), class_labels=paddle.to_tensor([1])).numpy()

    x = noise(1, 32, 32)
    wide, high = of_grid(4, 8, x.clone()), of_grid(8, 4, x.clone())
    assert not np.array_equal(wide, high)
    np.testing.assert_array_equal(of_grid(4, 8, x), wide)
    np.testing.assert_array_equal(of_grid(8, 4, x), high)


# Gradient checkpointing


def loss_of(unet, **changes):
    given = inputs(**changes)
    out = unet(given["sample"], given["timestep"], given["encoder_hidden_states"]).sample
    return (out * out).mean()


def gradients_of(unet):
    return {name: one.grad.numpy().copy() for name, one in unet.named_parameters() if one.grad is not None}


def without_random_state(monkeypatch):
    """Gradient checkpointing as on a GPU: Paddle cannot preserve its random state on the CPU."""
    for module in (transformer_2d, unet_2d_blocks):
        monkeypatch.setattr(module, "recompute", partial(module.recompute, preserve_rng_state=False))


@pytest.fixture(params=[None, "FLAG_RECOMPUTE_USE_REENTRANT", "FLAG_USE_OLD_RECOMPUTE"])
def checkpointed(unet, request, monkeypatch):
    """A UNet in training with gradient checkpointing: of blocks, in two ways, and of whole transformers."""
    without_random_state(monkeypatch)
    if request.param is not None:
        monkeypatch.setenv(request.param, "True")
    unet.train()
    unet.enable_gradient_checkpointing()
    return unet


@cache
def expected_gradients(timestep=10, **settings):
    unet = make_unet()
    unet.train()
    loss_of(unet.apply_tome(**settings), timestep=timestep).backward()
    return gradients_of(unet)


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(actual[name], gradient, atol=1e-6, err_msg=name)


def run_in_evaluation(unet):
    unet.eval()
    run(unet, h=24, timestep=700)
    unet.train()


MEANWHILE = {
    "the same settings again": lambda unet: unet.apply_tome(),
    "another method": lambda unet: unet.apply_tome(method="tomesd"),
    "removed": lambda unet: unet.remove_tome(),
    "a pass of a teacher": lambda unet: run_in_evaluation(unet.apply_tome(method="todo")),
    "a plain pass": lambda unet: run(unet.remove_tome(), timestep=700),
}


@pytest.mark.parametrize("checkpointed", [None], indirect=True)
@pytest.mark.parametrize("what", MEANWHILE)
def test_gradients_are_those_of_the_pass_whatever_comes_before_them(checkpointed, what):
    loss = loss_of(checkpointed.apply_tome())
    MEANWHILE[what](checkpointed)
    loss.backward()
    assert_close(gradients_of(checkpointed), expected_gradients())


def test_merging_around_the_forward_pass_alone_is_enough(checkpointed):
    before = traces(checkpointed)
    with checkpointed.tome(method="tomesd", seed=3):
        loss = loss_of(checkpointed)
    loss.backward()
    assert_close(gradients_of(checkpointed), expected_gradients(method="tomesd", seed=3))
    del loss
    gc.collect()
    checkpointed.remove_tome()
    assert traces(checkpointed) == before


def test_two_passes_of_other_settings_before_one_backward_pass(checkpointed):
    settings = ({}, {"method": "todo"})
    both = [loss_of(checkpointed.apply_tome(**one), timestep=t) for one, t in zip(settings, (999, 10), strict=True)]
    (both[0] + both[1]).backward()
    first, second = (expected_gradients(t, **one) for one, t in zip(settings, (999, 10), strict=True))
    assert_close(gradients_of(checkpointed), {name: first[name] + second[name] for name in first})


def test_gradients_of_a_unet_whose_transformers_begin_its_passes(monkeypatch):
    """A transformer that is computed again as a whole belongs to its pass, and so does its grid layer."""
    without_random_state(monkeypatch)
    monkeypatch.setenv("FLAG_USE_OLD_RECOMPUTE", "True")

    def gradients(is_checkpointed):
        unet = make_unet(class_embed_type="timestep")
        unet.train()
        unet.apply_tome()
        if is_checkpointed:
            unet.enable_gradient_checkpointing()
        labels = {"class_labels": paddle.to_tensor([1, 2])}
        losses = [(unet(**inputs(h=h), **labels).sample ** 2).mean() for h in (16, 24)]
        unet.apply_tome(method="todo")
        (losses[0] + losses[1]).backward()
        return gradients_of(unet)

    assert_close(gradients(True), gradients(False))


def test_after_removal_and_the_gradients_passes_are_plain(checkpointed):
    checkpointed.eval()
    plain = run(checkpointed)
    checkpointed.train()
    loss = loss_of(checkpointed.apply_tome())
    checkpointed.remove_tome()
    checkpointed.eval()
    np.testing.assert_array_equal(run(checkpointed), plain)
    assert checkpointed.tome_summary(16, 16).blocks == ()
    loss.backward()


def test_inputs_of_passes_are_not_kept(unet):
    run(unet.apply_tome())
    unet.train()
    loss_of(unet).backward()
    gc.collect()
    records = [layer._tome.records for layer in unet.sublayers() if hasattr(getattr(layer, "_tome", None), "records")]
    assert records and not any(map(len, records))


def test_applying_again_makes_no_new_wraps(unet):
    unet.apply_tome(method="tomesd", merge_mlp=True)
    wraps = {path: layer._tome for path, layer in unet.named_sublayers() if hasattr(layer, "_tome")}
    unet.apply_tome(method="tomesd", ratio=0.25, merge_mlp=True)
    assert {path: layer._tome for path, layer in unet.named_sublayers() if hasattr(layer, "_tome")} == wraps
