"""When a pass begins: in each model with the layer of the table in `attach.outer`, whenever merging is applied.

`apply_tome` while a pass runs, on a model that has no wraps yet, leaves that pass plain, and the next one merges.
"""

import re
import threading

import numpy as np
import paddle
import pytest
from conftest import inputs, make_controlnet, make_unet, run
from test_patch import run_controlnet
from test_rotary import COG_2B, OF_FLUX, OF_HUNYUAN, OF_WAN, VCTRL
from test_rotary import run as run_rotary
from test_transformers import dit, draw, pixart, sd3
from zoo import ZOO
from zoo.noise import noise

from ppdiffusers_tome import apply_tome, remove_tome
from ppdiffusers_tome.attach import outer
from ppdiffusers_tome.attach.forward import wrap_of
from ppdiffusers_tome.families.blocks import find_blocks

# ppdiffusers' pipelines warn about their deprecated arguments and classes.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def of_unet():
    model = make_unet()
    return model, lambda: run(model)


def of_controlnet():
    model = make_controlnet()
    return model, lambda: run_controlnet(model)


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


def of_codes():
    model = ZOO["VQDiffusionPipeline"]().pipe.transformer
    codes, text = paddle.to_tensor([list(range(16)) * 4]), noise(1, 7, 32)

    @paddle.no_grad()
    def once():
        return model(codes, encoder_hidden_states=text, timestep=paddle.to_tensor(10)).sample.numpy()

    return model, once


def of_rotary(family):
    model = family.double()
    return model, lambda: run_rotary(model, family.inputs())


MODELS = {
    "UNets": of_unet,
    "their ControlNets": of_controlnet,
    "UNets whose timestep is not read": of_labels,
    "DiT": lambda: of_transformer(dit),
    "PixArt": lambda: of_transformer(pixart),
    "VQ-Diffusion": of_codes,
    "Stable Diffusion 3": lambda: of_transformer(sd3),
    "FLUX": lambda: of_rotary(OF_FLUX),
    "CogVideoX": lambda: of_rotary(COG_2B),
    "VCtrl": lambda: of_rotary(VCTRL),
    "Wan": lambda: of_rotary(OF_WAN),
    "HunyuanVideo": lambda: of_rotary(OF_HUNYUAN),
}


def rows_of_table():
    """The table in `attach.outer`: by wrap when it begins a pass, and the models in which it comes first."""
    lines = outer.__doc__.splitlines()
    (rule,) = (number for number, line in enumerate(lines) if line.startswith("---"))
    spans, rows = [match.span() for match in re.finditer("-+", lines[rule])], {}
    for line in lines[rule + 1 : lines.index("", rule)]:
        layer, *cells = (line[start : end + 1].strip() for start, end in spans)
        if layer:
            name, *cells = cells
            rows[name] = cells
        else:  # the row before goes on
            rows[name] = [" ".join(pair) for pair in zip(rows[name], cells[1:], strict=True)]
    return {name: (when.strip(), models.strip().split(", ")) for name, (when, models) in rows.items()}


def test_the_table_has_every_model_once():
    assert sorted(name for _, models in rows_of_table().values() for name in models) == sorted([*MODELS, "none"])


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_begins_with_the_layer_of_the_table(name, monkeypatch):
    """Also the first one of a thread."""
    model, once = MODELS[name]()
    apply_tome(model)
    first = [wrap for wrap, (_, models) in rows_of_table().items() if name in models]
    began, enter = [], outer.PassWrap.enter

    def recording(wrap, *args):
        before = wrap.attachment.current
        current = enter(wrap, *args)
        if current is not before:
            began.append(type(wrap).__name__)
        return current

    monkeypatch.setattr(outer.PassWrap, "enter", recording)
    for passes in (1, 2, 3):
        once()
        assert began == first * passes
    thread = threading.Thread(target=once)
    thread.start()
    thread.join()
    assert began == first * 4


@pytest.mark.parametrize(
    ("name", "may_begin"),
    [
        ("UNets", {"TimestepWrap"}),
        ("UNets whose timestep is not read", {"TransformerWrap"}),
        ("PixArt", {"TimestepWrap", "GridWrap"}),
    ],
)
@pytest.mark.parametrize("layer", ["timestep_layer", "transformer", "grid_layer", "layer"])
def test_layers_that_may_begin_a_pass_do_so_when_they_run_again(name, may_begin, layer):
    model, once = MODELS[name]()
    apply_tome(model)
    once()
    layer = getattr(find_blocks(model)[0], layer)
    if layer in (None, model):
        return  # a layer without a wrap
    wrap = wrap_of(layer)
    before = wrap.attachment.current
    assert (wrap.enter(layer, noise(1)) is not before) == (type(wrap).__name__ in may_begin)


@paddle.no_grad()
def test_a_transformer_that_is_called_alone_does_not_leave_later_passes_without_their_timestep(unet):
    merged = run(unet.apply_tome())
    find_blocks(unet)[0].transformer(noise(2, 32, 16, 16), encoder_hidden_states=noise(2, 7, 24))
    np.testing.assert_array_equal(run(unet), merged)


@pytest.mark.parametrize("layer", ["timestep_layer", "transformer", "grid_layer", "layer"])
def test_a_wrap_that_another_library_has_removed_is_installed_again(layer):
    """By restoring the `forward` from before: whatever ran before, passes have the settings and grids of their own."""
    unet = make_unet()
    run(unet.apply_tome(0.5, merge_steps="all"), h=32)
    del getattr(find_blocks(unet)[0], layer).forward
    unet.apply_tome(merge_steps="all")
    expected = make_unet().apply_tome(merge_steps="all")
    for changes in ({}, {"h": 8, "w": 32, "timestep": 500}):
        np.testing.assert_array_equal(run(unet, **changes), run(expected, **changes))


@pytest.fixture(params=MODELS)
def model_and_pass(request):
    """A model, and a function that runs a pass of it."""
    return MODELS[request.param]()


@pytest.mark.parametrize("place", ["after the first embedding", "in the first block", "in the last block"])
def test_a_pass_that_runs_stays_plain(model_and_pass, place):
    """A hook applies merging."""
    model, once = model_and_pass
    blocks, order = find_blocks(model), []
    embeddings = [layer for layer in (blocks[0].timestep_layer, blocks[0].grid_layer) if layer is not None]
    hooks = [layer.register_forward_post_hook(lambda layer, *_: order.append(layer)) for layer in embeddings]
    plain = once()
    for hook in hooks:
        hook.remove()
    merged = (apply_tome(model), once())[1]
    assert np.abs(merged - plain).max() > 1e-6
    remove_tome(model)
    if place == "after the first embedding":
        hook = order[0].register_forward_post_hook(lambda *_: apply_tome(model) and None)
    else:
        block = blocks[0 if place == "in the first block" else -1].layer
        hook = block.register_forward_pre_hook(lambda *_: apply_tome(model) and None)
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

    hook = find_blocks(model)[0].layer.register_forward_pre_hook(wait)
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
    layer = dict(find_blocks(unet)[0].layer.named_sublayers())[path]

    def call_other(*_):
        other(**inputs())  # not `run`, whose no_grad cannot be entered twice

    hook = layer.register_forward_pre_hook(call_other)
    np.testing.assert_array_equal(run(unet), expected)
    hook.remove()
