"""The measurement of joint attention: what its ways do to a model, and the tables of the committed result."""

import joint_attention
import numpy as np
import paddle
import pytest
from joint_attention import Way, decibels, switched, ways
from lab.result_files import read_json
from lab.shapes import LENGTH, SIDE, WORDS, in_words, make_scenes
from zoo.noise import noise
from zoo.transformers import HIDDEN, sd3

from ppdiffusers_tome import ToMeConfig


@paddle.no_grad()
def once(model):
    """A pass in which tokens merge."""
    text = {
        "encoder_hidden_states": noise(2, 5, 2 * HIDDEN, seed=1),
        "pooled_projections": noise(2, 2 * HIDDEN, seed=2),
    }
    return model(noise(2, 4, 16, 16), **text, timestep=paddle.full([2], 500.0)).sample.numpy()


def test_scenes_are_equal_for_equal_seeds_and_captions_describe_them():
    scenes, again = (make_scenes(np.random.default_rng(3), 6) for _ in range(2))
    for one, other in zip(scenes, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert scenes.images.shape == (6, 3, SIDE, SIDE) and np.abs(scenes.images).max() <= 1
    assert scenes.captions.shape == (6, LENGTH) and 0 < scenes.captions.max() < len(WORDS)
    for caption in scenes.captions:
        words = in_words(caption).split()
        assert words[-2] == "on" and (len(words) - 2) % 4 == 0 and words[-1] not in words[:-2]


def test_ways_merge_and_leave_the_model_as_it_was():
    model = sd3()
    plain = once(model)
    every = ToMeConfig(0.75, merge_steps="all")
    outputs = {}
    for way in (Way("a", every), Way("b", every, has_constant=False), Way("c", every, takes_turns=False)):
        with switched(model, way):
            outputs[way.name] = once(model)
        np.testing.assert_array_equal(once(model), plain)
    assert all(np.abs(output - plain).max() > 1e-3 for output in outputs.values())
    assert np.abs(outputs["a"] - outputs["b"]).max() > 1e-4
    with switched(model, Way("plain")):
        np.testing.assert_array_equal(once(model), plain)


def test_decibels():
    images = np.zeros([2, 3, 4, 4])
    assert decibels(images + 0.1, images) == pytest.approx([20, 20])


def test_the_report_has_a_row_for_each_way_of_the_committed_result():
    result = read_json(joint_attention.RESULT)
    report = joint_attention.report(result)
    for way in ways():
        assert way.name == "plain" or f"| {way.name} |" in report
    assert {name: set(seconds) for name, seconds in result["timing"].items()} == {
        name: {"without", "mask", "channel"} for name in joint_attention.SHAPES
    }
    assert joint_attention.SHEET.is_file()
