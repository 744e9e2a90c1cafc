"""Attention with fewer keys, or over merged tokens, whatever computes it: any processor, adapters, LoRA."""

from functools import partial
from types import MethodType

import cuda_attention
import numpy as np
import paddle
import pytest
from conftest import Recorder, inputs, make_unet, run
from kept_keys import calls_of_attention, check_calls
from paddle import nn
from ppdiffusers.models.attention_processor import (
    AttnProcessor,
    CustomDiffusionAttnProcessor,
    FusedJointAttnProcessor2_5,
    SlicedAttnProcessor,
    XFormersAttnProcessor,
)
from test_transformers import draw
from zoo.adapters import Adapted, adapt, with_lora
from zoo.parts import ONE_LEVEL
from zoo.transformers import dit, sd3
from zoo.videos import CrossFrameAttention

from ppdiffusers_tome import Grid, ToMeConfigError, ToMePassError, merge, unmerge
from ppdiffusers_tome.families.blocks import find_blocks

TOLERANCE = 5e-6  # float32 sums of up to 256 terms in another order, outputs of size 3
METHODS = pytest.mark.parametrize("method", ["interlace", "tomesd"])


class Own(AttnProcessor):
    """A user's processor, which computes scores in its own way."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            attn.head_to_batch_dim(x) for x in (attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        )
        return attn.to_out[0](attn.batch_to_head_dim(paddle.matmul(attn.get_attention_scores(query, key), value)))


def set_custom_diffusion(unet):
    """Custom diffusion, which trains keys and values of cross-attention alone."""
    processors, layers = {}, dict(unet.named_sublayers())
    for path in unet.attn_processors:
        width, is_cross = layers[path.removesuffix(".processor")].to_q.weight.shape[0], "attn2" in path
        processors[path] = CustomDiffusionAttnProcessor(is_cross, False, width, 24 if is_cross else None)
    unet.set_attn_processor(processors)


def set_by(make):
    return lambda unet: unet.set_attn_processor(make())


PROCESSORS = {
    "default": set_by(AttnProcessor),
    "xformers": set_by(XFormersAttnProcessor),
    "sliced": set_by(partial(SlicedAttnProcessor, 1)),
    "custom diffusion": set_custom_diffusion,
    "a user's": set_by(Own),
}


# Keys and values


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(("method", "timestep"), [("interlace", 480), ("todo", 10)])
def test_attention_is_that_over_the_keys_that_remain(processor, method, timestep):
    unet = make_unet()
    PROCESSORS[processor](unet)
    unet.apply_tome(method=method)
    with calls_of_attention() as calls:
        run(unet, timestep=timestep)
    check_calls(unet, calls, Grid(16, 16), timestep)


def test_xformers_that_is_turned_on_later_has_the_same_keys():
    unet = make_unet().apply_tome()
    with cuda_attention.available():
        unet.enable_xformers_memory_efficient_attention()
    with calls_of_attention() as calls:
        run(unet)
    check_calls(unet, calls, Grid(16, 16))


def test_todo_at_half_takes_a_checkerboard_as_keys_and_values():
    unet = make_unet().apply_tome(0.5, method="todo")
    with calls_of_attention() as calls:
        run(unet)
    call = calls[0]
    rows, columns = np.divmod(np.arange(256), 16)
    with paddle.no_grad():
        keys = call.tokens.index_select(paddle.to_tensor(np.flatnonzero((rows + columns) % 2 == 0)), axis=1)
        unet.remove_tome()
        expected = AttnProcessor()(call.layer, call.tokens, encoder_hidden_states=keys)
    assert float((call.output - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize(("h", "w"), [(9, 11), (3, 6), (1, 7)])
@pytest.mark.parametrize(
    ("settings", "side", "of_cell"),
    [({}, 4, 2), ({"method": "todo"}, 2, 1), ({"method": "todo", "ratio": 0.5}, 2, 2)],
    ids=str,
)
def test_grids_with_remainders(settings, side, of_cell, h, w):
    """todo keeps one or two keys of each whole cell, interlace also the tokens outside; without one, all remain."""
    unet, kept = make_unet(**ONE_LEVEL), []
    attention = find_blocks(unet)[0].layer.attn1
    plain = run(unet, h=h, w=w)
    unet.apply_tome(**settings)
    if not settings:
        assert unet.tome_summary(16, 16).blocks[0].kept_keys == 256 * 3 // 16
        of_cell = 3
    handle = attention.to_k.register_forward_post_hook(lambda layer, args, out: kept.append(out.shape[1]))
    merged = run(unet, h=h, w=w)
    handle.remove()
    cells = (h // side) * (w // side)
    outside = 0 if settings else h * w - cells * side**2
    assert kept == [cells * of_cell + outside if cells else h * w]
    assert np.array_equal(merged, plain) == (cells == 0)
    assert np.array_equal(run(unet.remove_tome(), h=h, w=w), plain)


def test_keys_of_the_first_frame():
    """In both halves of the batch, which have two frames each: all frames attend to the first one's keys."""
    unet = make_unet()
    unet.set_attn_processor(CrossFrameAttention())
    unet.apply_tome()
    with calls_of_attention() as calls:
        run(unet, batch=4)
    check_calls(unet, calls, Grid(16, 16), keys_of=[0, 0, 2, 2])


# Merged tokens


def test_tomesd_runs_layers_on_merged_tokens(plans):
    """Around cross-attention the keys are text, whose mask stays; the feed-forward layer has merged tokens too."""
    unet, given, seen = make_unet(), inputs(), {}
    text, mask = given["encoder_hidden_states"], paddle.to_tensor([[1] * 7, [1] * 4 + [0] * 3])
    block = find_blocks(unet)[0].layer
    for name in ("attn1", "attn2", "ff"):
        layer = getattr(block, name)
        layer.register_forward_post_hook(lambda layer, args, out, name=name: seen.update({name: (args[0], out)}))
    with paddle.no_grad():
        unet.apply_tome(method="tomesd", merge_crossattn=True, merge_mlp=True)
        unet(given["sample"], 10, text, encoder_attention_mask=mask)
        unet.remove_tome()
        plan, arguments = plans[0], {"attn1": {}, "ff": {}}
        arguments["attn2"] = {"encoder_hidden_states": text, "attention_mask": (mask.unsqueeze(1) - 1.0) * 1e4}
        assert plan.kept == 128
        for name, (tokens, out) in dict(seen).items():
            expected = unmerge(getattr(block, name)(merge(tokens, plan), **arguments[name]), plan)
            assert float((out - expected).abs().max()) < TOLERANCE
            assert float((out - getattr(block, name)(tokens, **arguments[name])).abs().max()) > 10 * TOLERANCE


def test_the_kernel_of_tomesd_gets_merged_tokens():
    unet, recorder = make_unet(), Recorder()
    unet.set_attn_processor(recorder)
    run(unet.apply_tome(ratio=0.5, method="tomesd", merge_crossattn=True))
    assert recorder.lengths[:2] == [(128, None), (128, 7)] and recorder.all_contiguous


@METHODS
def test_gradients_reach_every_token(method):
    unet, given = make_unet().apply_tome(method=method), inputs()
    given["sample"].stop_gradient = False
    unet(**given).sample.square().mean().backward()
    assert float(given["sample"].grad.abs().min()) > 0


# Layers that are replaced, added or fused


@pytest.mark.parametrize("adapter", [Adapted, with_lora])
def test_adapters_of_projections(adapter):
    """Merging is the same, applied before or after them; after it, new layers need apply_tome() again."""
    unet = make_unet()
    without = run(unet.apply_tome())
    adapt(unet.remove_tome(), adapter)
    plain = run(unet)
    unet.apply_tome()
    with calls_of_attention() as calls:
        merged = run(unet)
    check_calls(unet, calls, Grid(16, 16))
    assert unet.tome_summary(16, 16).saved > 0

    fresh = make_unet()
    adapt(fresh.apply_tome(), adapter)
    if adapter is Adapted:
        with pytest.raises(ToMePassError, match=r"to_k and to_v .*apply_tome\(\)"):
            run(fresh)
        fresh.apply_tome()
    np.testing.assert_array_equal(run(fresh), merged)
    np.testing.assert_array_equal(run(fresh.remove_tome()), plain)
    assert np.abs(merged - without).max() > 1e-4
    assert not any("_tome" in vars(layer) for layer in fresh.sublayers())


def fuse(attention):
    """Add fused projections, as `fuse_qkv_projections()` does, which raises in ppdiffusers 0.29."""
    for name, parts in {"to_qkv": "to_{}", "to_added_qkv": "add_{}_proj"}.items():
        fused = nn.Linear(attention.to_q.weight.shape[0], 3 * attention.inner_dim)
        layers = [getattr(attention, parts.format(part)) for part in "qkv"]
        fused.weight.set_value(paddle.concat([layer.weight for layer in layers], axis=1))
        fused.bias.set_value(paddle.concat([layer.bias for layer in layers]))
        setattr(attention, name, fused)


def test_fused_projections_are_refused():
    model = sd3()
    with pytest.raises(AttributeError, match=r"modules|fuse_projections"):
        model.fuse_qkv_projections()
    plain, processors = draw(sd3, model), model.attn_processors
    for mergeable in find_blocks(model):
        fuse(mergeable.layer.attn)
    expected = draw(sd3, model.apply_tome())
    model.set_attn_processor(FusedJointAttnProcessor2_5())
    with pytest.raises(ToMePassError, match=r"FusedJointAttnProcessor2_5 .*fuse"):
        draw(sd3, model)
    model.set_attn_processor(processors)
    np.testing.assert_array_equal(draw(sd3, model), expected)
    np.testing.assert_array_equal(draw(sd3, model.remove_tome()), plain)


def test_an_attention_without_projections_of_keys_is_refused_when_merging_is_applied():
    model = sd3()
    plain, attention = draw(sd3, model), find_blocks(model)[1].layer.attn
    key, attention.to_k = attention.to_k, None
    with pytest.raises(ToMeConfigError, match=r"transformer_blocks\.1 .*to_k.*fusion"):
        model.apply_tome()
    assert not any("_tome" in vars(layer) for layer in model.sublayers())
    attention.to_k = key
    np.testing.assert_array_equal(draw(sd3, model.remove_tome()), plain)


# Processors that compute in another way


class Mixing(AttnProcessor):
    """A processor whose keys are those of another image, which it does not say; they remain at the same positions."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        context = hidden_states.flip(0) if encoder_hidden_states is None else encoder_hidden_states
        return super().__call__(attn, hidden_states, context, **kwargs)


def test_keys_of_another_image():
    unet = make_unet()
    unet.set_attn_processor(Mixing())
    unet.apply_tome()
    with calls_of_attention() as calls:
        run(unet)
    check_calls(unet, calls, Grid(16, 16), keys_of=[1, 0])


class PerturbedGuidance:
    """As diffusers' perturbed-attention guidance: in the second half of the batch each token attends to itself."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        if encoder_hidden_states is not None:
            return AttnProcessor()(attn, hidden_states, encoder_hidden_states, **kwargs)
        plain, perturbed = hidden_states.chunk(2)
        out = AttnProcessor()(attn, plain, **kwargs)
        return paddle.concat([out, attn.to_out[0](attn.to_v(perturbed))])


class OneByOne(AttnProcessor):
    """A processor that computes one image after another."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        context = [None] * len(hidden_states) if encoder_hidden_states is None else encoder_hidden_states.split(2)
        images = zip(hidden_states.split(2), context, strict=True)
        return paddle.concat([super(OneByOne, self).__call__(attn, *image, **kwargs) for image in images])


class SideBySide(AttnProcessor):
    """A processor in which all images attend to the tokens of all."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        if encoder_hidden_states is None:
            hidden_states = hidden_states.reshape([1, -1, hidden_states.shape[2]])
        out = super().__call__(attn, hidden_states, encoder_hidden_states, **kwargs)
        return out if encoder_hidden_states is not None else out.reshape([2, -1, out.shape[2]])


@pytest.mark.parametrize("processor", [PerturbedGuidance, OneByOne, SideBySide])
def test_processors_that_project_part_of_the_batch_are_an_error_with_a_remedy(processor):
    unet = make_unet()
    unet.set_attn_processor(processor())
    plain = run(unet)
    with pytest.raises(ToMePassError, match=r'use method="tomesd"'):
        run(unet.apply_tome())
    assert run(unet.apply_tome(method="tomesd")).shape == plain.shape
    np.testing.assert_array_equal(run(unet.remove_tome()), plain)


def test_no_error_recommends_tomesd_where_it_is_one():
    model = dit()
    find_blocks(model)[0].layer.attn1.set_processor(PerturbedGuidance())
    with pytest.raises(ToMePassError, match=r"processor, or remove_tome\(\) first"):
        draw(dit, model.apply_tome())


@METHODS
def test_positional_arguments_are_those_of_the_layer(method):
    """More than the layer takes are an error, as without merging, and so is one that comes twice."""
    unet = make_unet()
    block, expected = find_blocks(unet)[0].layer, run(unet.apply_tome(method=method))
    attend, extra, named = block.attn1.forward, [], {}
    block.attn1.forward = lambda hidden_states, **_: attend(hidden_states, *extra, **named)
    for extra[:] in ([], [None], [None, None]):
        np.testing.assert_array_equal(run(unet), expected)
    extra[:] = [None, None, 2.0]
    with pytest.raises(TypeError, match="positional arguments"):
        run(unet)
    extra[:], named["encoder_hidden_states"] = [None], None
    with pytest.raises(TypeError, match=r"multiple values for .*encoder_hidden_states"):
        run(unet)


@METHODS
def test_positional_arguments_reach_a_method_below(method):
    """Also one that the layer's own `forward` does not have."""
    unet = make_unet()
    attention = find_blocks(unet)[0].layer.attn1

    def scaled(self, hidden_states, encoder_hidden_states=None, attention_mask=None, factor=1.0):
        return factor * type(attention).forward(self, hidden_states)

    attention.forward = MethodType(scaled, attention)
    once = run(unet.apply_tome(method=method))
    attend = attention.forward
    attention.forward = lambda hidden_states, **_: attend(hidden_states, None, None, 2.0) / 2
    np.testing.assert_allclose(run(unet), once, atol=1e-6)
