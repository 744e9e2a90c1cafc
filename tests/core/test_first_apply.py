"""`apply_tome` while a pass runs, on a model that has no wraps yet: that pass stays plain, and the next one merges."""

import threading

import numpy as np
import paddle
import pytest
from conftest import inputs, make_unet, run
from test_rotary import COG_2B, OF_FLUX
from test_transformers import dit, draw, sd3

from ppdiffusers_tome import apply_tome, remove_tome
from ppdiffusers_tome.families.blocks import find_blocks

# ppdiffusers' pipelines warn about their deprecated arguments and classes.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def of_unet(**changes):
    model = make_unet(**changes)
    return model, lambda: run(model)


def of_labels():
    """A UNet whose timestep is not read: its transformers are the first layers with wraps."""
    model = make_unet(class_embed_type="timestep")
    random = paddle.randn([2, 4, 16, 16]), paddle.randn([2, 7, 24])
    labels = paddle.to_tensor([1, 2])

    @paddle.no_grad()
    def once():
        return model(random[0], 10, random[1], class_labels=labels).sample.numpy()

    return model, once


def of_transformer(make):
    model = make()
    return model, lambda: draw(make, model)


def of_rotary(family):
    model = family.double()

    @paddle.no_grad()
    def once():
        return model(**family.inputs()).sample.numpy()

    return model, once


MODELS = {
    "UNet": of_unet,
    "UNet with labels": of_labels,
    "DiT": lambda: of_transformer(dit),
    "Stable Diffusion 3": lambda: of_transformer(sd3),
    "FLUX": lambda: of_rotary(OF_FLUX),
    "CogVideoX": lambda: of_rotary(COG_2B),
}


@pytest.fixture(params=MODELS)
def model_and_pass(request):
    """A model, and a function that runs a pass of it."""
    return MODELS[request.param]()


@pytest.mark.parametrize("place", [0, -1])
def test_a_pass_that_runs_stays_plain(model_and_pass, place):
    """A hook of the first block, or of the last, applies merging."""
    model, once = model_and_pass
    plain = once()
    merged = (apply_tome(model), once())[1]
    assert np.abs(merged - plain).max() > 1e-6
    remove_tome(model)
    hook = find_blocks(model)[place].block.register_forward_pre_hook(lambda *_: apply_tome(model) and None)
    np.testing.assert_array_equal(once(), plain)
    hook.remove()
    np.testing.assert_array_equal(once(), merged)
    np.testing.assert_array_equal((remove_tome(model), once())[1], plain)


def test_another_thread_applies_it_first(model_and_pass):
    model, once = model_and_pass
    plain = once()
    merged = (apply_tome(model), once())[1]
    remove_tome(model)
    inside, applied, outputs = threading.Event(), threading.Event(), []

    def wait(*_):
        inside.set()
        assert applied.wait(60)

    hook = find_blocks(model)[0].block.register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: outputs.append(once()))
    thread.start()
    assert inside.wait(60)
    apply_tome(model)
    applied.set()
    thread.join()
    hook.remove()
    np.testing.assert_array_equal(outputs[0], plain)
    np.testing.assert_array_equal(once(), merged)


@pytest.mark.parametrize(
    ("path", "settings"), [("attn2", {"method": "tomesd", "merge_mlp": True}), ("attn1.to_q", {})], ids=str
)
def test_a_block_inside_a_block_leaves_the_plan_and_the_keys_of_the_outer_one(unet, path, settings):
    """As a ControlNet that a hook of a UNet's block calls: after it, the rest of the block merges."""
    expected = run(unet.apply_tome(**settings))
    other = make_unet()
    other.apply_tome()
    layer = dict(find_blocks(unet)[0].block.named_sublayers())[path]

    def call_other(*_):
        other(**inputs())  # not `run`, whose no_grad cannot be entered twice

    hook = layer.register_forward_pre_hook(call_other)
    np.testing.assert_array_equal(run(unet), expected)
    hook.remove()
