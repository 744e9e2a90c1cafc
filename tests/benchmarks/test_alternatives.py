"""benchmarks/alternatives.py: the alternatives to merging do what their papers say. Measuring them takes hours."""

import sys

import alternatives
import numpy as np
import paddle
import pytest
from conftest import inputs, tiny_pipeline, traces
from lab.arm import Arm
from lab.result_files import read_json
from zoo.parts import unet as unet_of_zoo

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.export import programs


def steps(unet, arm, count=3):
    """The predictions of steps with different inputs, by an arm's passes in eager mode."""
    before = traces(unet)
    traceable = programs.denoiser(unet, None)
    layer = alternatives.Pass(traceable.layer, alternatives.reused_layers(arm, traceable.layer.unet), keywords(seed=9))
    run = lambda **tensors: outputs if isinstance(outputs := layer(**tensors), tuple) else (outputs,)  # noqa: E731
    passes = alternatives.Passes(unet.config, arm, run, run)
    with paddle.no_grad():
        predictions = [passes(**keywords(seed))[0].numpy() for seed in range(count)]
    assert traces(unet) == before
    return predictions


def keywords(seed):
    given = inputs(seed=seed)
    return {name: given[name] for name in ("sample", "timestep", "encoder_hidden_states")}


@paddle.no_grad()
def by_hand(unet, layers, seed):
    """The prediction for a seed when layers return what they return for seed 0."""
    outputs = {}

    def predict(given, hook):
        handles = [layer.register_forward_post_hook(hook) for layer in layers]
        prediction = unet(**given, return_dict=False)[0].numpy()
        for handle in handles:
            handle.remove()
        return prediction

    predict(keywords(0), lambda layer, _, out: outputs.update({layer: out}))
    return predict(keywords(seed), lambda layer, *_: outputs[layer])


def plain(unet, count=3):
    return [by_hand(unet, [], seed) for seed in range(count)]


def test_a_step_of_deep_cache_computes_the_first_level_with_features_of_the_last_full_one(unet):
    own = steps(unet, Arm(every=2))
    expected = plain(unet)
    expected[1] = by_hand(unet, [unet.up_blocks[0]], 1)
    assert len(unet.up_blocks) == 2
    np.testing.assert_array_equal(own, expected)


def test_committed_results_have_these_arms_alone():
    """What no result has goes."""
    known = {arm.name: arm for arm in alternatives.list_arms()}
    results = [read_json(file) for file in sorted(alternatives.RESULTS.glob("alternatives_*.json"))]
    assert {entry["name"] for result in results for entry in result["arms"]} == {*known}
    for entry in (entry for result in results for entry in result["arms"]):
        assert alternatives.arm_of(entry) == known[entry["name"]]
        assert alternatives.arm_of({"settings": known[entry["name"]].to_json()}) == known[entry["name"]]
        assert entry["group"] == alternatives.group_of(known[entry["name"]])


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny pipeline with prompts. Its UNet has two levels, of which DeepCache reuses the second."""
    folder = tmp_path / "model"
    tiny_pipeline(unet=unet_of_zoo()).save_pretrained(str(folder))
    (folder / "prompts.txt").write_text("a fox\nan owl\n")
    return folder


def test_images_are_generated_timed_and_reported(model, tmp_path, monkeypatch, capsys):
    """The whole script, on two images of each arm; it continues its own result, and refuses one of other prompts."""
    arms = [both := Arm(ToMeConfig(0.75), every=2), Arm(other_seed=True)]
    monkeypatch.setattr(alternatives, "list_arms", lambda: arms)
    monkeypatch.setattr(alternatives, "ROOT", tmp_path)
    images = ["--model", str(model), "--size", "32", "--steps", "2", "--output", str(tmp_path / "results")]

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["alternatives.py", *arguments])
        alternatives.main()
        return [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if ": " in line]

    assert call(*images, "--count", "2", "--only", both.name)[-1] == both.name
    (file,) = (tmp_path / "results").glob("*.json")
    first = read_json(file)
    assert call(*images, "--count", "2")[-1] == "another seed"
    drawn = read_json(file)
    assert drawn["arms"][0] == first["arms"][0], "it is not generated again"
    assert [arm["group"] for arm in drawn["arms"]] == ["both", "calibration"]
    call(*images, "--count", "2", "--time", "--rounds", "1")
    timed = read_json(file)
    # the rest, plain, and both of the cache, merged
    timings = timed["timing"]["seconds"]
    assert {runtime: len(passes) for runtime, passes in timings.items()} == {"onnxruntime": 4, "paddle": 4}
    call("report", "--output", str(tmp_path / "results"))
    text = (tmp_path / "alternatives.md").read_text()
    assert both.name in text and "| ONNX Runtime | Paddle Inference |" in text
    assert [path.stem for path in tmp_path.glob("*.png")] == [file.stem]
    with pytest.raises(SystemExit, match=r"prompts.*--restart"):
        call(*images, "--count", "3")
