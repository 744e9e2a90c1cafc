"""What benchmarks/alternatives.py compares merging with does what it says; measuring it takes hours."""

import importlib
import shutil
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from conftest import TEXT, inputs, run, traces

from ppdiffusers_tome import Grid, ToMeConfig, apply_tome, remove_tome
from ppdiffusers_tome.evaluation.results import read_json
from ppdiffusers_tome.macs import count_macs, saved_macs
from ppdiffusers_tome.patch import chosen_blocks


@pytest.fixture(autouse=True)
def alternatives(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("alternatives")


def passes(unet, opened, count=3):
    """The outputs of passes on different inputs while something is open."""
    with opened:
        return [run(unet, seed=seed) for seed in range(count)]


def outputs_of(layer, into):
    return layer.register_forward_post_hook(lambda layer, inputs, output: into.append(output))


@pytest.mark.parametrize("last_layer", [False, True])
def test_a_skipped_step_reuses_the_features_of_the_last_full_one(unet, alternatives, last_layer):
    before, plain = traces(unet), [run(unet, seed=seed) for seed in range(3)]
    every = passes(unet, alternatives.deep_cache(unet, 1, last_layer))
    assert all((a == b).all() for a, b in zip(every, plain, strict=True)), "every step computes everything"
    deep, shallow = [], []
    handles = [outputs_of(unet.up_blocks[0], deep), outputs_of(unet.down_blocks[0].resnets[0], shallow)]
    own = passes(unet, alternatives.deep_cache(unet, 2, last_layer))
    for handle in handles:
        handle.remove()
    assert deep[1] is deep[0] and (deep[2] != deep[0]).any()
    assert (shallow[1] is shallow[0]) == last_layer
    assert [bool((a == b).all()) for a, b in zip(own, plain, strict=True)] == [True, False, True]
    assert traces(unet) == before and (run(unet, seed=1) == plain[1]).all()


def test_deep_cache_computes_what_a_pass_with_those_features_computes(unet, alternatives):
    """By hand: a whole pass in which the deep part's output is replaced by that of the earlier pass."""
    kept = []
    handle = outputs_of(unet.up_blocks[0], kept)
    run(unet, seed=0)
    handle.remove()
    handle = unet.up_blocks[0].register_forward_post_hook(lambda layer, inputs, output: kept[0])
    expected = run(unet, seed=1)
    handle.remove()
    assert (passes(unet, alternatives.deep_cache(unet, 2), 2)[1] == expected).all()


def test_cross_attention_is_reused_after_the_gate(unet, alternatives):
    before, plain = traces(unet), [run(unet, seed=seed) for seed in range(3)]
    own = passes(unet, alternatives.gated(unet, 3))
    assert all((a == b).all() for a, b in zip(own, plain, strict=True))
    attention, outputs = unet.mid_block.attentions[0].transformer_blocks[0].attn2, []
    handle = outputs_of(attention, outputs)
    own = passes(unet, alternatives.gated(unet, 1))
    handle.remove()
    assert outputs[1] is outputs[0] and outputs[2] is outputs[0]
    assert [bool((a == b).all()) for a, b in zip(own, plain, strict=True)] == [True, False, False]
    assert traces(unet) == before and (run(unet, seed=1) == plain[1]).all()


def test_t_gate_drops_guidance_and_keeps_the_mean_of_both_halves(unet, alternatives):
    before, attention, outputs = traces(unet), unet.mid_block.attentions[0].transformer_blocks[0].attn2, []
    handle = outputs_of(attention, outputs)
    x = inputs()
    call = lambda: unet(  # noqa: E731
        x["sample"], x["timestep"], encoder_hidden_states=x["encoder_hidden_states"], return_dict=False
    )[0]
    with paddle.no_grad(), alternatives.gated(unet, 1, guided=False):
        first, second = call(), call()
    handle.remove()
    assert (first == call()).all()
    np.testing.assert_array_equal(outputs[1].numpy(), outputs[0].numpy().reshape(2, 1, *outputs[0].shape[1:]).mean(0))
    assert (second[0] == second[1]).all() and (second[1] != first[1]).any()
    assert traces(unet) == before


@pytest.mark.parametrize("settings", [None, {}, {"merge_attn": "kv", "ratio": 0.75}, {"match": "grid", "ratio": 0.75}])
def test_macs_that_are_counted_while_drawing_are_those_of_the_shapes(unet, alternatives, settings):
    latent, expected = Grid(16, 16), count_macs(unet, Grid(16, 16), TEXT)
    if settings is not None:
        config = ToMeConfig(**{"ratio": 0.5, "proportional": False, **settings})
        apply_tome(unet, **vars(config))
        expected -= sum(saved_macs(block, config, latent, TEXT) for block in chosen_blocks(unet, config))
    with alternatives.counting_macs() as macs:
        run(unet, batch=1)
    assert macs() == expected
    remove_tome(unet)


def test_two_ratios_compare_tokens_once(unet, alternatives):
    counts = []
    for queries in (0.0, 0.25):
        config = {"ratio": 0.5, "merge_attn": "kv", "proportional": False}
        arm = alternatives.Arm(merging=config, queries=queries)
        with arm.open(type("Pipe", (), {"unet": unet})), alternatives.counting_macs() as macs:
            apply_tome(unet, **config)
            run(unet, batch=1)
            remove_tome(unet)
        counts.append(macs())
    blocks = chosen_blocks(unet, ToMeConfig(**config))
    width = blocks[0].block.attn1.inner_dim
    fewer = 64 * (2 * width**2 + 2 * 128 * width)  # queries: two projections, two products with 128 keys
    assert counts[0] - counts[1] == len(blocks) * fewer


def test_arms_have_names_of_their_own_and_allowed_settings(pipe, alternatives):
    arms = alternatives.list_arms()
    assert len({arm.name for arm in arms}) == len(arms)
    assert all(arm.config.ratio == arm.merging.get("ratio", 0) for arm in arms)
    assert {arm.name for arm in arms} >= set(alternatives.SHEET)
    assert alternatives.Arm().name == "plain"
    assert {arm.group for arm in arms} == {*alternatives.COLOURS, alternatives.CALIBRATION}
    scheduler = pipe.scheduler
    with alternatives.Arm(dpm_solver=True).open(pipe):
        assert type(pipe.scheduler).__name__ == "DPMSolverMultistepScheduler"
        assert pipe.scheduler.config.prediction_type == scheduler.config.prediction_type
    assert pipe.scheduler is scheduler


def test_a_result_is_continued_timed_and_reported_and_one_of_other_images_is_refused(
    alternatives, model, tmp_path, monkeypatch, capsys
):
    arms = [alternatives.Arm(merging={"ratio": 0.5}), alternatives.Arm(steps=1), alternatives.Arm(other_seed=True)]
    monkeypatch.setattr(alternatives, "list_arms", lambda: arms)
    monkeypatch.setattr(alternatives, "ROOT", tmp_path)
    about = ["--model", str(model), "--size", "32", "--count", "2", "--output", str(tmp_path / "results")]

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["alternatives.py", *arguments])
        alternatives.main()
        return [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if ": " in line]

    images = [*about, "--steps", "2", "--guidance-scale", "2"]
    assert call(*images, "--only", "1 steps")[-1] == "1 steps"
    assert call(*images)[-2:] == ["default 0.5", "another seed"]
    (file,) = (tmp_path / "results").glob("*.json")
    drawn = read_json(file)
    assert [arm["group"] for arm in drawn["arms"]] == ["alternative", "merging", "calibration"]
    assert all(len(arm["images"]["psnr"]) == 2 and arm["psnr"] < 100 for arm in drawn["arms"])
    few, merged, other = (arm["macs"] for arm in drawn["arms"])
    assert 0.5 < few < merged < other == 1  # half of the steps is more than half of text encoder, UNet and VAE
    call(*images, "--time", "--rounds", "1")
    timed = read_json(file)
    assert [bool(arm["seconds"]) for arm in timed["arms"]] == [True, True, False]
    assert (
        timed["commit"] == drawn["commit"]
        and timed["command"] == drawn["command"]
        and "--time" in timed["timing"]["command"]
    )
    call("report", "--output", str(tmp_path / "results"))
    text = (tmp_path / "alternatives.md").read_text()
    assert "1 steps" in text and "| time |" in text and len(list(tmp_path.glob("*.png"))) == 2
    with pytest.raises(SystemExit, match="another steps"):
        call(*about, "--steps", "3", "--guidance-scale", "2")
    with pytest.raises(SystemExit):
        call(*images, "--only", "2 steps")


def test_the_page_is_that_of_the_committed_results(alternatives, tmp_path, monkeypatch, empty_plots):
    monkeypatch.setattr(alternatives, "label_points", lambda *_: None)
    shutil.copytree(alternatives.RESULTS, tmp_path / "results")
    for sheet in alternatives.RESULTS.parent.glob("alternatives_*_sheet.png"):
        shutil.copy(sheet, tmp_path)
    text = alternatives.write_report(sorted((tmp_path / "results").glob("alternatives_*.json")), tmp_path)
    assert text == (alternatives.RESULTS.parent / "alternatives.md").read_text(encoding="utf-8")
