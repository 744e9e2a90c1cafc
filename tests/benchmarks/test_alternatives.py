"""benchmarks/alternatives.py: the alternatives to merging do what their papers say. Measuring them takes hours."""

import sys

import alternatives
import numpy as np
import paddle
import pandas as pd
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


def test_frontier_leaves_out_what_is_slower_or_further():
    speed_up, nearness = pd.Series([1.5, 1.2, 1.1, 0.9, 1.3]), pd.Series([30.0, 40.0, 35.0, 50.0, 29.0])
    assert alternatives.is_on_frontier(speed_up, nearness).tolist() == [True, True, False, False, False]


def test_arms_have_names_of_their_own_and_allowed_settings():
    arms = alternatives.list_arms()
    assert len({arm.name for arm in arms}) == len(arms)
    assert {arm.name for arm in arms} >= set(alternatives.SHEET)
    assert {*map(alternatives.group_of, arms)} == {*alternatives.COLOURS, alternatives.CALIBRATION}


def test_committed_results_have_these_arms_alone():
    """What no result has goes."""
    known = {arm.name: arm for arm in alternatives.list_arms()}
    results = [read_json(file) for file in sorted(alternatives.RESULTS.glob("alternatives_*.json"))]
    assert {entry["name"] for result in results for entry in result["arms"]} == {*known}
    for entry in (entry for result in results for entry in result["arms"]):
        assert alternatives.arm_of(entry) == known[entry["name"]]
        assert alternatives.arm_of({"settings": known[entry["name"]].to_json()}) == known[entry["name"]]
        assert entry["group"] == alternatives.group_of(known[entry["name"]])


def test_an_arm_that_is_no_faster_has_no_factor_and_no_place_on_the_frontier():
    seconds = {
        "rest": [0.0] * 9,
        "plain": [1.0, 2.0, 1.0] * 3,
        "interlace 0.75": [0.5, 2.5, 1.0] * 3,
        "todo 0.75": [0.5] * 9,
    }
    entries = [{"name": arm.name, "group": "merging", "settings": arm.to_json(), "psnr": psnr, "perceptual": 0.1}
               for arm, psnr in ((Arm(ToMeConfig(0.75)), 50.0), (Arm(ToMeConfig(0.75, "todo")), 30.0))]  # fmt: skip
    timing = {"seconds": dict.fromkeys(alternatives.TIMED, seconds)}
    frame = alternatives.read_frame({"steps": 1, "strength": None, "arms": entries, "timing": timing})
    assert frame["gain_onnxruntime"].map(str).tolist() == ["2.00×", "no difference"]
    assert frame["on_onnxruntime"].tolist() == [True, False]


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny pipeline with prompts. Its UNet has two levels, of which DeepCache reuses the second."""
    folder = tmp_path / "model"
    tiny_pipeline(unet=unet_of_zoo()).save_pretrained(str(folder))
    (folder / "prompts.txt").write_text("a fox\nan owl\n")
    return folder


def test_a_result_is_continued_timed_and_reported_and_one_of_other_images_is_refused_or_replaced(
    model, tmp_path, monkeypatch, capsys
):
    arms = [both := Arm(ToMeConfig(0.75), every=2), Arm(steps=1), Arm(other_seed=True)]
    monkeypatch.setattr(alternatives, "list_arms", lambda: arms)
    monkeypatch.setattr(alternatives, "ROOT", tmp_path)

    def about(count, folder):
        return ["--model", str(model), "--size", "32", "--count", count, "--output", str(tmp_path / folder)]

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["alternatives.py", *arguments])
        alternatives.main()
        return [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if ": " in line]

    settings = ["--steps", "2", "--guidance-scale", "2", "--dpm-solver"]
    images = [*about("2", "results"), *settings]
    assert call(*images, "--only", "1 steps")[-1] == "1 steps"
    assert call(*images)[-2:] == [both.name, "another seed"]
    (file,) = (tmp_path / "results").glob("*.json")
    assert file.stem.endswith("_32_dpm_solver_2_steps_guidance_2")
    assert read_json(file)["scheduler"] == "DPMSolverMultistepScheduler"
    assert read_json(file)["variant"] == ["DPM-Solver++", "2 steps", "guidance 2"]
    generated = {path: path.stat().st_mtime_ns for path in tmp_path.glob("build/alternatives_*/*/images/*/*.png")}
    assert len(generated) == 8
    drawn = read_json(file)
    assert [arm["group"] for arm in drawn["arms"]] == ["alternative", "both", "calibration"]
    assert all(len(arm["images"]["psnr"]) == 2 and arm["psnr"] < 100 for arm in drawn["arms"])
    call(*images, "--time", "--rounds", "1")
    timed = read_json(file)
    # the rest, plain, and both of the cache, merged
    timings = timed["timing"]["seconds"]
    assert {runtime: len(passes) for runtime, passes in timings.items()} == {"onnxruntime": 4, "paddle": 4}
    assert [timed[name] == drawn[name] for name in ("commit", "command")] == [True, True]
    assert "--time" in timed["timing"]["command"]
    assert call(*about("3", "more"), *settings)[-1] == "another seed"
    assert all(path.stat().st_mtime_ns == before for path, before in generated.items()), "images are generated once"
    extended = read_json(next((tmp_path / "more").glob("*.json")))
    first, again = ({arm["name"]: arm["images"]["psnr"][:2] for arm in one["arms"]} for one in (drawn, extended))
    assert first == again
    call("report", "--output", str(tmp_path / "results"))
    text = (tmp_path / "alternatives.md").read_text()
    assert "1 steps" in text and "| ONNX Runtime | Paddle Inference |" in text
    assert [path.stem for path in tmp_path.glob("*.png")] == [file.stem]
    others = [*about("3", "results"), *settings]
    with pytest.raises(SystemExit, match=r"prompts.*--restart"):
        call(*others)
    with pytest.raises(SystemExit, match=r"prompts.*without --time"):
        call(*others, "--time", "--restart")
    with pytest.raises(SystemExit, match="generate its images"):
        call(*about("2", "none"), *settings, "--time")
    call(*others, "--restart", "--only", both.name)
    restarted = read_json(file)
    assert len(restarted["prompts"]) == 3 and [arm["name"] for arm in restarted["arms"]] == [both.name]
    assert restarted["timing"] is None
    call(*images, "--restart", "--keep", both.name, "--only", "1 steps")
    kept, _ = read_json(file)["arms"]
    (of_three,) = restarted["arms"]
    assert kept["images"]["psnr"] == of_three["images"]["psnr"][:2] == first[both.name]
    with pytest.raises(SystemExit):
        call(*images, "--only", "2 steps")
