"""`compare`: plain and merged images of one noise, steps that take turns, the sheet, the table and the goal."""

import argparse
import inspect
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ppdiffusers
import pytest
from conftest import EMOJI_SD, tiny_pipeline
from paddle.base import core
from PIL import Image

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.cli import escape_unprintable, main
from ppdiffusers_tome.commands import compare as compare_command
from ppdiffusers_tome.commands import compare_options
from ppdiffusers_tome.commands.compare import _next_steps as next_steps
from ppdiffusers_tome.commands.merge_options import all_configs, merge_configs
from ppdiffusers_tome.comparison import environment, fonts
from ppdiffusers_tome.comparison.arms import ComparedArm, Figures, Scene, compare, make_table
from ppdiffusers_tome.comparison.clock import NO_DIFFERENCE, TOO_FEW_ROUNDS, gain
from ppdiffusers_tome.comparison.goal import KNOWN, Goal, known_settings, merges_at, parse_goal
from ppdiffusers_tome.comparison.option_defaults import KNOWN_RATIOS, PROMPT_COUNT, ROUNDS
from ppdiffusers_tome.comparison.pipelines import CONTROLNET, class_to_compare
from ppdiffusers_tome.comparison.sheets import make_sheet
from ppdiffusers_tome.comparison.similarity import psnr, ssim
from ppdiffusers_tome.errors import ParameterError
from ppdiffusers_tome.families.schedules import as_numbers, most_steps, timesteps_of
from ppdiffusers_tome.inference import Size, load_pipeline, read_manifest
from ppdiffusers_tome.methods.steps import PLAIN_STEPS
from ppdiffusers_tome.serving.engine import load_engine

SCENE = Scene(["a fox", "an owl"], size=Size(32, 32), steps=2, guidance_scale=2.0, seed=7)
HALF, QUARTER = ToMeConfig(ratio=0.5), ToMeConfig(ratio=0.25)


@pytest.fixture
def pipe(tiny):
    """The tiny pipeline of this module, with merging off before and after."""
    tiny.set_progress_bar_config(disable=True)
    yield tiny
    tiny.remove_tome()


FEW_ROUNDS = ["--rounds", "3"]  # the fewest that a goal takes
ONE_STEP = ["--steps", "1", "--threads", "1", "--rounds", "1"]


def run_compare(model, output, *options):
    """`compare` of one step at 32 px; the exit status."""
    return main(["compare", "--model", str(model), "--size", "32", *ONE_STEP, "--output", str(output), *options])


def figures(arm="interlace 0.5", gain=1.5, psnr=30.0, **changes):
    """Figures of an arm, of which a goal reads these."""
    fields = dict.fromkeys(Figures.__dataclass_fields__)
    words = NO_DIFFERENCE if gain is None else f"{gain:.2f}×"
    of_arm = {"arm": arm, "config": HALF, "gain": gain, "gain_in_words": words, "psnr": psnr, "ssim": 0.9}
    return Figures(**fields | of_arm | changes)


PLAIN_FIGURES = figures("plain", gain=None, psnr=None, config=None)


def test_images_are_those_of_the_pipeline(pipe):
    plain, half = compare(pipe, SCENE, [HALF], rounds=1)
    assert [arm.name for arm in (plain, half)] == ["plain", "interlace 0.5"]
    expected = [image for prompt in SCENE.prompts for image in SCENE.generate(pipe, prompt)]  # it is plain again
    assert [np.array_equal(a, b) for a, b in zip(plain.images, expected, strict=True)] == [True, True]
    with pipe.tome(ratio=0.5):
        (merged,) = SCENE.generate(pipe, "an owl")
    assert np.array_equal(half.images[1], merged) and not np.array_equal(merged, expected[1])
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(plain.images, half.images, strict=True)]
    measured = half.figures(plain)
    decibels, similarities = [psnr(*pair) for pair in pairs], [ssim(*pair) for pair in pairs]
    assert (measured.psnr, measured.ssim) == (np.median(decibels), np.median(similarities))
    assert (measured.worst_psnr, measured.worst_ssim) == (min(decibels), min(similarities))
    assert measured.worst_psnr < measured.psnr


def test_steps_take_turns_in_one_image(pipe, monkeypatch):
    turns, switch_on = [], ComparedArm.switch_on
    monkeypatch.setattr(ComparedArm, "switch_on", lambda arm, pipe: turns.append(arm.name) or switch_on(arm, pipe))
    arms = compare(pipe, SCENE, [HALF, QUARTER], rounds=3)
    timed, images = turns[:12], turns[12:]
    assert [sorted(timed[n : n + 3]) for n in range(0, 12, 3)] == 4 * [["interlace 0.25", "interlace 0.5", "plain"]]
    assert images == ["plain", "interlace 0.5", "interlace 0.25", "plain"]
    assert [len(arm.step_seconds) for arm in arms] == [3, 3, 3]  # without the round that warms up


def test_a_scheduler_with_few_steps_times_them_in_several_images(monkeypatch):
    """That of a latent consistency model has a schedule of at most `original_inference_steps`."""
    scheduler = ppdiffusers.LCMScheduler(steps_offset=1, original_inference_steps=5)
    pipe = tiny_pipeline(scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    turns, switch_on, steps = [], ComparedArm.switch_on, []
    monkeypatch.setattr(ComparedArm, "switch_on", lambda arm, pipe: turns.append(arm.name) or switch_on(arm, pipe))
    arms = compare(pipe, SCENE, [HALF, QUARTER], 3, after_step=lambda done, total: steps.append((done, total)))
    assert [len(arm.step_seconds) for arm in arms] == [3, 3, 3]
    assert most_steps(scheduler, 12) == 5 and most_steps(scheduler, 3) == 3
    # 12 turns in images of 5 steps, of which the first keeps all tokens, and 2 steps for each image
    assert steps[:15] == [(done, 12) for done in (0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12)]
    assert steps[15:19] == [(done, 4) for done in (1, 2, 3, 4)]
    pipe.scheduler = ppdiffusers.LCMScheduler(steps_offset=1, original_inference_steps=1)
    with pytest.raises(ToMeConfigError, match="LCMScheduler"):
        compare(pipe, SCENE, [HALF])


def test_command_with_more_steps_than_the_scheduler_has(tmp_path, capsys):
    scheduler = ppdiffusers.LCMScheduler(steps_offset=1, original_inference_steps=5)
    tiny_pipeline(scheduler=scheduler).save_pretrained(str(tmp_path / "model"))
    assert run_compare(tmp_path / "model", tmp_path / "outputs", "--steps", "6", "--prompt", "a fox") == 2
    assert re.search("--steps 6 .*LCMScheduler.* 5 steps", capsys.readouterr().err)


def test_gain_is_the_median_of_the_ratios_within_the_rounds(pipe):
    plain, half = compare(pipe, SCENE, [HALF], rounds=1)
    plain.step_seconds, half.step_seconds = [2.0, 9.0, 4.0], [1.0, 3.0, 2.5]
    row = half.figures(plain)
    assert (row.step_seconds, row.gain, row.gain_interval) == (2.5, 2.0, (1.6, 3.0))  # 4 / 2.5 is 1.6
    assert row.keys < row.queries == row.tokens == 256 and row.macs_saved > 0
    of_plain = plain.figures(plain)
    assert (of_plain.queries, of_plain.keys) == (256, 256)
    assert {of_plain.psnr, of_plain.ssim, of_plain.gain, of_plain.gain_interval, of_plain.macs_saved} == {None}
    assert of_plain.gain_in_words is None
    header, first, second = make_table([of_plain, row]).splitlines()
    assert header.split()[:4] == ["s/step", "gain", "PSNR,", "dB"] and first.split()[:2] == ["plain", "4"]
    assert second.startswith("interlace 0.5     2.5  2.00×  ") and len(second) == len(header)


def test_the_gain_is_that_of_an_image_some_of_whose_steps_keep_all_tokens(pipe):
    everywhere = ToMeConfig(0.5, merge_steps="all")
    plain, half, always = compare(pipe, replace(SCENE, steps=10), [HALF, everywhere], rounds=3)
    timesteps = timesteps_of(pipe.scheduler, 10)
    assert half.timesteps == 2 * timesteps and half.plain_share == PLAIN_STEPS.count(timesteps) / 10 > 0.2
    assert (plain.plain_share, always.plain_share) == (0, 0)
    plain.step_seconds, half.step_seconds, always.step_seconds = [4.0] * 3, [2.0] * 3, [2.0] * 3
    plain.peaks, half.peaks, always.peaks = [900], [500], [500]
    row, of_always = half.figures(plain), always.figures(plain)
    seconds = 4 * half.plain_share + 2 * (1 - half.plain_share)
    assert (row.step_seconds, row.gain, row.peak_bytes) == (seconds, 4 / seconds, 900), (
        "plain steps need plain's memory"
    )
    assert (of_always.step_seconds, of_always.gain, of_always.peak_bytes) == (2, 2, 500)
    assert row.macs_saved == pytest.approx((1 - half.plain_share) * of_always.macs_saved)
    assert f" {row.plain_share:.0%} " in make_table([plain.figures(plain), row, of_always])


def test_only_steps_that_merge_are_turns(pipe):
    seen = []
    hook = pipe.unet.register_forward_pre_hook(lambda unet, given: seen.extend(as_numbers(given[1])))
    plain, half = compare(pipe, SCENE, [HALF], rounds=4)
    hook.remove()
    assert [len(arm.step_seconds) for arm in (plain, half)] == [4, 4]
    steps = next(n for n in range(1, len(seen)) if seen[n] > seen[n - 1])  # of the image whose steps are timed
    fewer = timesteps_of(pipe.scheduler, steps - 1)
    assert seen[:steps] == timesteps_of(pipe.scheduler, steps)
    assert len(seen[:steps]) - PLAIN_STEPS.count(seen[:steps]) >= 10 > len(fewer) - PLAIN_STEPS.count(fewer)


@pytest.mark.parametrize(
    ("plain_seconds", "half_seconds", "words"),
    [
        ([1.0, 2.0, 6.0] * 3, [2.0, 1.0, 3.0] * 3, NO_DIFFERENCE),  # whatever the medians are
        ([1.0, 2.0, 6.0], [2.0, 1.0, 3.0], TOO_FEW_ROUNDS),
        ([2.0], [1.0], TOO_FEW_ROUNDS),
    ],
)
def test_rounds_that_show_no_difference_give_no_factor(pipe, plain_seconds, half_seconds, words):
    plain, half = compare(pipe, SCENE, [HALF], rounds=1)
    plain.step_seconds, half.step_seconds = plain_seconds, half_seconds
    row = half.figures(plain)
    assert row.gain is None and row.gain_in_words == words and len(row.gain_interval) == 2
    assert words in make_table([plain.figures(plain), row]) and "×" not in make_table([row])


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([1.2] * 9, "1.20×"),
        ([0.8] * 9, "0.80×"),
        ([1.2] * 8 + [0.5], "1.20×"),  # a single round may disagree
        ([1.2] * 7 + [0.5] * 2, NO_DIFFERENCE),
        ([1.019] * 9, NO_DIFFERENCE),  # within the margin of 2 %, however small the noise is
        ([1 / 1.019] * 9, NO_DIFFERENCE),
        ([1.021] * 6, "1.02×"),
        ([1.021] * 5 + [0.99], NO_DIFFERENCE),
        ([1.2] * 5, "1.20×"),  # few rounds show a large difference, if each of them does
        ([1.2] * 4 + [1.09], TOO_FEW_ROUNDS),
        ([0.8] * 3, "0.80×"),
        ([0.95] * 3, TOO_FEW_ROUNDS),
        ([3.0] * 2, TOO_FEW_ROUNDS),
        ([3.0], TOO_FEW_ROUNDS),
    ],
)
def test_a_difference_is_claimed_beyond_a_margin_and_from_enough_rounds(ratios, words):
    assert str(gain(ratios, [1.0] * len(ratios))) == words


@pytest.mark.parametrize("rounds", [6, 7, 8, 9, 12, 15, 21, 50])
def test_the_interval_of_a_gain_is_scipys(rounds):
    stats = pytest.importorskip("scipy.stats")
    ratios = np.random.RandomState(0).lognormal(size=rounds).tolist()
    gained = gain(ratios, [1.0] * rounds)
    assert (gained.low, gained.high) == tuple(stats.quantile_test(ratios, p=0.5).confidence_interval(0.95))


@pytest.mark.parametrize("shape", [(64, 64, 3), (33, 47, 3), (16, 16, 3)])
def test_ssim_is_that_of_scikit_image(shape):
    metrics = pytest.importorskip("skimage.metrics")
    random = np.random.RandomState(0)
    a = random.randint(0, 256, shape).astype(np.uint8)
    b = np.clip(a + random.normal(0, 40, shape), 0, 255).astype(np.uint8)
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    expected = metrics.structural_similarity(a, b, data_range=255, channel_axis=-1, **options)
    assert ssim(a, b) == pytest.approx(expected, abs=1e-12) and ssim(a, a) == 1


def test_a_batch_is_one_call_with_an_image_for_each_noise(pipe, monkeypatch):
    calls, call = [], type(pipe).__call__
    monkeypatch.setattr(
        type(pipe), "__call__", lambda self, prompt, **given: calls.append(prompt) or call(self, prompt, **given)
    )
    monkeypatch.setattr(type(pipe).__call__, "__signature__", inspect.signature(call), raising=False)
    plain, half = compare(pipe, replace(SCENE, batch=2), [HALF], rounds=1)
    assert calls == [["a fox"] * 2, *2 * [["a fox"] * 2, ["an owl"] * 2]]  # the first is timed
    assert len(plain.images) == len(half.images) == 4
    assert not np.array_equal(plain.images[0], plain.images[1])


def test_peak_memory_is_that_of_a_step(pipe):
    """Where Paddle's counter can begin again: Paddle 3."""
    plain, half = (arm.figures(arm) for arm in compare(pipe, SCENE, [HALF], rounds=1))
    weights = sum(4 * parameter.size for parameter in pipe.unet.parameters())
    known = hasattr(core, "host_memory_stat_reset_peak_value")
    assert (plain.peak_bytes is not None) == (half.peak_bytes is not None) == known
    assert not known or plain.peak_bytes > weights
    assert ("peak MB" in make_table([plain])) == known


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.4x", Goal("gain", 1.4)),
        ("2×", Goal("gain", 2)),
        ("35dB", Goal("psnr", 35)),
        ("28.5 db", Goal("psnr", 28.5)),
    ],
)
def test_goals_are_factors_or_decibels(text, expected):
    assert parse_goal(text) == expected


@pytest.mark.parametrize("text", ["1.4", "1x", "0dB", "x", "-2x", "1.4.0x", "fast", "nandB"])
def test_another_goal_is_an_error(text):
    with pytest.raises(ParameterError, match=rf"goal=.{text}. .*1\.4x.*PSNR"):
        parse_goal(text)


ROWS = [
    PLAIN_FIGURES,
    figures("near", gain=1.2, psnr=45.0),
    figures("middle", gain=1.5, psnr=38.0),
    figures("far", gain=2.0, psnr=30.0),
    figures("slower", gain=0.8, psnr=50.0),
    figures("same", gain=None, psnr=60.0),
]


@pytest.mark.parametrize(
    ("goal", "chosen"),
    [("1.4x", "middle"), ("1.1x", "near"), ("35dB", "middle"), ("25dB", "far"), ("40dB", "near")],
)
def test_the_nearest_that_is_fast_enough_or_the_fastest_that_is_near_enough(goal, chosen):
    assert parse_goal(goal).choose(ROWS).arm == chosen


@pytest.mark.parametrize(("goal", "best"), [("2.1x", "far"), ("48dB", "near")])
def test_what_is_not_faster_reaches_no_goal(goal, best):
    assert parse_goal(goal).choose(ROWS) is None and parse_goal(goal).nearest(ROWS).arm == best
    assert parse_goal(goal).nearest([PLAIN_FIGURES, *ROWS[4:]]) is None


def test_known_settings_are_those_of_the_methods(pipe):
    assert known_settings([]) == [*KNOWN] and len(set(KNOWN)) == len(KNOWN)
    assert known_settings(["todo", "tomesd"]) == [ToMeConfig(method="todo"), ToMeConfig(method="tomesd")]
    assert [c.effective_ratio for c in known_settings(["interlace"])] == [0.25, 0.5, 0.625, 0.75, 0.875, 0.9375]
    assert all(merges_at(pipe, config, Size(32, 32)) for config in KNOWN)
    without_cells = Size(6, 6)  # 3×3 tokens, and a cell has 4×4
    assert not any(merges_at(pipe, config, without_cells) for config in KNOWN)
    assert merges_at(pipe, ToMeConfig(method="tomesd"), without_cells)


def test_pipeline_that_reports_no_steps_is_refused(pipe, monkeypatch):
    monkeypatch.setattr(type(pipe), "__call__", lambda self, prompt: None)
    with pytest.raises(ToMeConfigError, match=r"StableDiffusionPipeline .*num_inference_steps"):
        class_to_compare(type(pipe), uses_controlnet=False, has_image=False)


def test_command_writes_sheet_figures_and_table(model, tmp_path, capsys):
    """For each size, which is a side or width x height."""
    options = ["--size", "32", "48x32", "--ratio", "0.5", "0.25", "--steps", "2", "--guidance-scale", "2"]
    options += ["--prompt", "a fox"]
    assert run_compare(model, tmp_path, *options) == 0
    printed, reports = capsys.readouterr()
    assert "  1 image, plain …\n" in reports and "1 images" not in reports
    for name, (width, height) in {"32": (32, 32), "48x32": (48, 32)}.items():
        result = json.loads((tmp_path / f"compare_{name}.json").read_text())
        assert (result["kind"], result["format"]) == ("comparison", 7)
        assert [result[field] for field in ("prompts", "width", "height", "steps")] == [["a fox"], width, height, 2]
        assert [row["arm"] for row in result["arms"]] == ["plain", "interlace 0.5", "interlace 0.25"]
        assert result["arms"][1]["config"]["ratio"] == 0.5 and result["arms"][0]["tokens"] == width * height // 4
        with Image.open(tmp_path / f"compare_{name}.jpg") as sheet:
            assert sheet.height > 3 * height and b"ratio=0.5" in sheet.info["comment"]
        assert all(f"{row['step_seconds']:.4g}" in printed for row in result["arms"])
    assert printed.count("images: ") == 2


def test_several_prompts_of_the_model_show_the_worst_image(tmp_path, capsys, exported_folder):
    """By default. What the images and the times take is printed before they are made."""
    output = tmp_path / "outputs"
    assert run_compare(EMOJI_SD, output, "--size", "64", "--ratio", "0.5", "--rounds", "2") == 0
    result = json.loads((output / "compare_64.json").read_text())
    own = (EMOJI_SD / "prompts.txt").read_text().splitlines()
    assert result["prompts"] == own[:PROMPT_COUNT] and PROMPT_COUNT > 2
    plain, half = result["arms"]
    assert half["worst_psnr"] < half["psnr"] and half["worst_ssim"] < half["ssim"]
    assert plain["worst_psnr"] is None and half["gain_in_words"] == TOO_FEW_ROUNDS
    cost, header, _, row = capsys.readouterr().out.splitlines()[1:5]
    assert f"{2 * PROMPT_COUNT} × 1 steps for images, and 6 for the times" in cost
    columns = re.split("  +", header.strip())
    cells = re.split("  +", row.strip())[-len(columns) :]
    shown = dict(zip(columns, cells, strict=True))
    assert shown["gain"] == TOO_FEW_ROUNDS
    assert (shown["PSNR, dB"], shown["worst PSNR"]) == (f"{half['psnr']:.1f}", f"{half['worst_psnr']:.1f}")
    assert (shown["SSIM"], shown["worst SSIM"]) == (f"{half['ssim']:.3f}", f"{half['worst_ssim']:.3f}")
    assert run_compare(EMOJI_SD, output, "--size", "64", "--prompt", "a fox") == 0
    assert json.loads((output / "compare_64.json").read_text())["arms"][1]["worst_psnr"] is None
    assert "worst" not in capsys.readouterr().out
    folder = shutil.copytree(exported_folder, tmp_path / "exported")
    (folder / "defaults.json").write_text(json.dumps({"prompts": [f"prompt {n}" for n in range(9)]}))
    assert run_compare(folder, output) == 0
    of_export = json.loads((output / "compare_32.json").read_text())["prompts"]
    assert of_export == [f"prompt {n}" for n in range(PROMPT_COUNT)]


def test_a_model_without_prompts_and_a_guidance_scale_of_zero(model, tmp_path, capsys):
    """The message names the option for other prompts; 0 is a value, in place of the model's own."""
    folder = shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("prompts.txt"))
    assert run_compare(folder, tmp_path / "outputs", "--guidance-scale", "0") == 0
    assert re.search(r"prompts\.txt .*--prompt ", capsys.readouterr().err)
    result = json.loads((tmp_path / "outputs" / "compare_32.json").read_text())
    assert result["guidance_scale"] == 0 and len(result["prompts"]) == 1


def parse(*given):
    parser = argparse.ArgumentParser()
    compare_options.add(parser.add_subparsers())
    return parser.parse_args(["compare", *given])


def test_help_says_what_a_goal_tries(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"Tries interlace at {', '.join(map(str, KNOWN_RATIOS))}; with --method" in text
    assert known_settings([]) == [ToMeConfig(ratio, "interlace") for ratio in KNOWN_RATIOS]


def test_next_steps_name_what_was_fastest():
    """They promise no speed-up that was not measured, and their command is one that `export` takes."""
    options = parse("--model", "m", "--size", "64x32", "--method", "interlace", "todo")
    todo = figures(gain=1.2, config=ToMeConfig(method="todo", min_tokens=9))
    lines = next_steps(options, [PLAIN_FIGURES, figures(gain=1.1), todo], is_exported=False).splitlines()
    words = "export --model m --output build/export --size 64x32 --merging method=todo,min_tokens=9 --ratio 0.75 0"
    assert words in lines[1] and "pipe.apply_tome(ratio=0.75, method='todo', min_tokens=9) " in lines[2]
    given = argparse.Namespace(method=[], config=[], ratio=[0.75, 0.0], merging=[words.split()[-4]])
    assert merge_configs(given) == [todo.config.with_settings(ratio=ratio) for ratio in (0.75, 0.0)]
    lines = next_steps(options, [PLAIN_FIGURES, figures(gain=1.1)], is_exported=False).splitlines()
    assert "--merging" not in lines[1] and " --ratio 0.5 0 " in lines[1], "of the default method"
    assert "pipe.apply_tome(ratio=0.5) " in lines[2]
    tomesd = figures(gain=1.3, config=ToMeConfig(method="tomesd"))
    lines = next_steps(options, [PLAIN_FIGURES, tomesd], is_exported=False).splitlines()
    assert "--merging method=tomesd --ratio 0.5 0 " in lines[1]
    assert "pipe.apply_tome(ratio=0.5, method='tomesd') " in lines[2]
    assert next_steps(options, [PLAIN_FIGURES, tomesd], is_exported=True).splitlines()[1:] == [
        "  load_pipeline('m', ratio=0.5)   # in your own code"
    ]
    for rows in ([PLAIN_FIGURES, figures(gain=0.99)], [PLAIN_FIGURES, figures(gain=None)]):
        assert "not faster here" in next_steps(options, rows, is_exported=False)
    unknown = figures(gain=None, gain_in_words=TOO_FEW_ROUNDS)
    assert f"--rounds {ROUNDS} or more" in next_steps(options, [PLAIN_FIGURES, unknown], is_exported=False)


def test_each_method_runs_at_the_ratios_that_it_allows(tmp_path):
    def configs(*given):
        return all_configs(parse("--model", "m", *given))

    todo = ToMeConfig(0.75, method="todo")
    assert configs() == configs("--method", "interlace") == [ToMeConfig()]
    assert configs("--method", "tomesd", "todo") == [ToMeConfig(method="tomesd"), todo]
    assert configs("--method", "interlace", "--merging", "ratio=0.75") == [ToMeConfig(0.75)], "each once"
    both = ("--method", "interlace", "todo")
    assert configs(*both, "--ratio", "0.3", "0.6") == [ToMeConfig(0.3), ToMeConfig(0.6), todo]
    assert configs(*both, "--ratio", "0.5") == [HALF, ToMeConfig(0.5, "todo")]
    assert configs("--method", "todo", "tomesd", "--ratio", "0.75") == [todo, ToMeConfig(0.75, method="tomesd")]
    cells = "method=tomesd,sx=4,ratio=0.8"
    assert configs("--merging", cells, "--method", "tomesd", "--ratio", "0.8") == [
        ToMeConfig(method="tomesd"),
        ToMeConfig(0.8, "tomesd", sx=4),
    ]
    assert configs("--ratio", "0.5", "0.5", "--method", "interlace", "interlace") == [HALF]
    seeded = ToMeConfig(0.6, "tomesd", seed=4)
    seeded.save(tmp_path / "tome.json")
    assert configs("--config", str(tmp_path / "tome.json")) == [seeded]
    for given in (["--method", "todo", "--ratio", "0.6"], ["--method", "tomesd", "todo", "--ratio", "0.9", "0.5"]):
        with pytest.raises(ToMeConfigError, match=r"--ratio 0\.[69]"):
            configs(*given)


def test_command_saves_the_settings_that_reach_the_goal(model, tmp_path, capsys, monkeypatch):
    """The file is one that `apply_tome` and `export --config` read, and has how it was chosen."""
    gains = {"interlace 0.25": 1.2, "interlace 0.5": 1.5, "todo 0.75": 1.6}
    measured, tried = ComparedArm.figures, []

    def with_gain(arm, plain):
        tried.append(arm.name)
        gain = gains.get(arm.name, 0)
        return replace(measured(arm, plain), gain=gain or None, gain_in_words=f"{gain:.2f}×", psnr=50 - 10 * gain)

    monkeypatch.setattr(ComparedArm, "figures", with_gain)
    save = tmp_path / "new" / "tome.json"
    options = [*FEW_ROUNDS, "--method", "interlace", "todo", "--save", str(save)]
    assert run_compare(model, tmp_path, *options, "--goal", "1.4x") == 0
    assert re.search("interlace 0.5, 1.50×.* 35.0 dB", capsys.readouterr().out)
    assert ToMeConfig.load(save) == HALF
    content = json.loads(save.read_text())
    assert "1.4" in content["goal"] and (content["width"], content["figures"]["gain"]) == (32, 1.5)
    assert [row["arm"] for row in content["compared"]] == tried
    ratios = ("0.25", "0.5", "0.625", "0.75", "0.875", "0.9375")
    assert tried == ["plain", *(f"interlace {ratio}" for ratio in ratios), "todo 0.75"]
    of_todo = [*FEW_ROUNDS, "--method", "todo", "--save", str(save)]
    assert run_compare(model, tmp_path, *of_todo, "--goal", "33dB") == 0
    assert ToMeConfig.load(save) == ToMeConfig(ratio=0.75, method="todo")
    save.unlink()
    assert run_compare(model, tmp_path, *of_todo, "--goal", "1.7x") == 1
    assert "todo 0.75, 1.60×" in capsys.readouterr().out and not save.exists()
    for words, printed in ((NO_DIFFERENCE, "not faster here"), (TOO_FEW_ROUNDS, f"--rounds {ROUNDS} or more")):

        def without_gain(arm, plain, words=words):
            return replace(measured(arm, plain), gain=None, gain_in_words=words)

        monkeypatch.setattr(ComparedArm, "figures", without_gain)
        assert run_compare(model, tmp_path, *of_todo, "--goal", "30dB") == 1
        assert printed in capsys.readouterr().out and not save.exists()


def test_a_goal_at_a_size_at_which_nothing_merges_is_an_error(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare_command, "merges_at", lambda *_: False)
    assert run_compare(model, tmp_path / "outputs", *FEW_ROUNDS, "--goal", "30dB") == 2
    assert "--size 32x32" in capsys.readouterr().err and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_exported_ratios_are_compared(runtime, onnx_folder, tmp_path, capsys):
    save = tmp_path / "tome.json"
    options = ["--model", str(onnx_folder), "--runtime", runtime, "--steps", "2", "--threads", "1", *FEW_ROUNDS]
    assert main(["compare", *options, "--output", str(tmp_path), "--goal", "0.1dB", "--save", str(save)]) in (0, 1)
    result = json.loads((tmp_path / "compare_40x32.json").read_text())
    exported = read_manifest(onnx_folder).merging[0].settings
    assert [row["arm"] for row in result["arms"]] == ["plain", "tomesd 0.5"]
    assert result["arms"][1]["config"] == exported and result["runtime"] == runtime
    assert result["arms"][1]["tokens"] is result["arms"][1]["peak_bytes"] is None
    assert result["arms"][1]["psnr"] < 60 and result["arms"][1]["ssim"] < 1
    printed = capsys.readouterr().out
    assert "SSIM" in printed and "MACs" not in printed
    assert not save.exists() or ToMeConfig.load(save).settings() == exported
    assert "load_pipeline(" in printed or not save.exists()


def test_an_export_of_a_method_that_this_release_lacks_runs_but_is_not_compared(exported_folder, tmp_path, capsys):
    """Its programs are complete, and `tome.json` says in words how they merge."""
    folder = Path(shutil.copytree(exported_folder, tmp_path / "later"))
    content = json.loads((folder / "tome.json").read_text())
    content["merging"][0] |= {"words": "cluster, size=4", "settings": {"ratio": 0.5, "method": "cluster", "size": 4}}
    (folder / "tome.json").write_text(json.dumps(content))
    pipe = load_pipeline(folder)
    assert pipe.unet.ratio == 0.5 and "ratio 0.5: cluster, size=4" in str(pipe.tome_summary())
    np.testing.assert_array_equal(*(SCENE.generate(one, "a fox")[0] for one in (pipe, load_pipeline(exported_folder))))
    assert load_engine(folder).methods[0.5] == "cluster, size=4"
    assert run_compare(folder, tmp_path / "outputs", "--prompt", "a fox") == 2
    error = capsys.readouterr().err
    assert f"{folder} merges in a way that this release does not have, cluster, size=4 (" in error
    assert not (tmp_path / "outputs").exists(), "before anything is loaded"


def test_images_of_an_exported_folder_are_those_of_its_ratios(exported_folder, tmp_path):
    pipe = load_pipeline(exported_folder, ratio=0)
    scene = replace(SCENE, prompts=["a fox"])
    plain, half = compare(pipe, scene, [HALF], rounds=1)
    assert pipe.unet.ratio == 0 and np.array_equal(plain.images[0], scene.generate(pipe, "a fox")[0])
    pipe.unet.ratio = 0.5
    assert np.array_equal(half.images[0], scene.generate(pipe, "a fox")[0])
    assert not np.array_equal(half.images[0], plain.images[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "todo"], "--method .*exported folder"),
        (["--ratio", "0.3"], "--ratio 0.3 .*only 0.5, 0"),
        (["--ratio", "0"], "--ratio 0 "),
        (["--size", "64"], "--size 64x64 .*only 32x32, 48x32"),
        (["--controlnet", "net", "--image", "x"], "--controlnet net "),
        (["--runtime", "onnxruntime"], "ONNX .*runtime paddle"),
        (["--runtime", "paddle", "--device", "tpu"], "--device tpu "),
    ],
)
def test_what_an_exported_folder_does_not_have_is_an_error(options, message, exported_folder, tmp_path, capsys):
    given = ["--model", str(exported_folder), "--output", str(tmp_path / "outputs")]
    assert main(["compare", *given, *options]) == 2
    assert re.search(message, capsys.readouterr().err) and not list(tmp_path.iterdir())


def test_image_to_image(model, exported_folder, tmp_path):
    """The images start from one, whose size is theirs; all steps of a step count are timed, whatever the strength."""
    image = str(EMOJI_SD / "fox.png")
    options = ["--image", image, "--steps", "2", "--batch", "2", "--ratio", "0.5"]
    for folder in (model, exported_folder):
        output = tmp_path / folder.name
        assert run_compare(folder, output, *options) == 0
        result = json.loads((output / "compare_32.json").read_text())
        assert (result["strength"], result["batch"], len(result["arms"][1]["rounds"])) == (0.5, 2, 1)
        with Image.open(output / "compare_32.jpg") as sheet:
            assert sheet.height > 3 * 32  # the image that they start from stands above


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("video", "TextToVideoSDPipeline .*videos"),
        ("sd3", "StableDiffusion3Pipeline .*GPUs only"),
    ],
)
def test_a_pipeline_that_cannot_be_compared_is_an_error_before_it_is_loaded(
    name, reason, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(compare_command, "load_eager_pipeline", None)
    monkeypatch.delattr("paddle.nn.functional.scaled_dot_product_attention_")
    output = tmp_path / "outputs"
    assert main(["compare", "--model", str(EMOJI_SD.parent / "tiny" / name), "--output", str(output)]) == 2
    assert re.match(f"error: {reason}", capsys.readouterr().err) and not output.exists()


def test_a_controlnet_of_another_family_is_an_error_before_it_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare_command, "load_eager_pipeline", None)
    options = ["--model", str(EMOJI_SD.parent / "tiny" / "sdxl"), "--output", str(tmp_path / "outputs")]
    options += ["--controlnet", str(EMOJI_SD / "controlnet"), "--image", str(EMOJI_SD / "fox.png")]
    assert main(["compare", *options]) == 2
    assert re.search("--controlnet .*StableDiffusionXLPipeline", capsys.readouterr().err)


def test_stable_diffusion_3_is_compared_where_ppdiffusers_runs_it(tmp_path, capsys):
    """Its folder names a third text encoder and has none."""
    model = EMOJI_SD.parent / "tiny" / "sd3"
    assert main(["compare", "--model", str(model), *ONE_STEP, "--output", str(tmp_path)]) == 0
    assert "plain" in capsys.readouterr().out


def test_the_class_that_generates_follows_from_the_inputs():
    text, image = ppdiffusers.StableDiffusionPipeline, ppdiffusers.StableDiffusionImg2ImgPipeline
    assert class_to_compare(text, uses_controlnet=False, has_image=False) is text
    assert class_to_compare(text, uses_controlnet=False, has_image=True) is image
    assert class_to_compare(image, uses_controlnet=False, has_image=True) is image
    assert class_to_compare(image, uses_controlnet=True, has_image=True).__name__ == CONTROLNET


@pytest.mark.parametrize(
    ("name", "has_image", "reason"),
    [
        ("StableDiffusionImg2ImgPipeline", False, "needs an image"),
        ("StableDiffusionInpaintPipeline", True, "needs a mask"),
        ("TextToVideoSDPipeline", True, "generates videos"),
        ("StableDiffusionControlNetPipeline", False, "needs an image"),
        ("KandinskyV22Pipeline", False, "has no prompt"),
    ],
)
def test_a_pipeline_that_needs_other_inputs_is_refused(name, has_image, reason):
    own = getattr(ppdiffusers, name)
    with pytest.raises(ToMeConfigError, match=f"{name} {reason}"):
        class_to_compare(own, uses_controlnet="ControlNet" in name, has_image=has_image)


def test_command_with_a_controlnet(tmp_path, capsys):
    """The input stands above the images on the sheet."""
    controlnet = EMOJI_SD / "controlnet"
    options = ["--controlnet", str(controlnet), "--image", str(controlnet / "penguin_edges.png")]
    assert run_compare(EMOJI_SD, tmp_path, *options, "--size", "64", "--prompt", "a 3d render of fox") == 0
    with Image.open(tmp_path / "compare_64.jpg") as sheet:
        assert sheet.height > 3 * 64
    assert "interlace 0.75" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--controlnet", "net"], "--controlnet .*--image"),
        (["--strength", "0.5"], "--strength 0.5 .*--image"),
        (["--controlnet", "net", "--image", "x.png", "--strength", "0.5"], "--strength 0.5 .*ControlNet"),
        (["--image", "/no.png", "--strength", "1.5"], "--strength 1.5 .*above 0"),
        (["--image", "/no.png", "--strength", "0.2", "--steps", "4"], "--strength 0.2 of 4 steps"),
        (["--image", "/no.png"], "--image /no.png "),
        (["--controlnet", "net", "--image", "/no.png"], "--image /no.png "),
        (["--size", "100"], "--size 100 .* 8 px"),
        (["--size", "8"], "--size 8 .* 8 px from 16 px"),
        (["--batch", "0"], "--batch 0 .* 1 to 64"),
        (["--rounds", "0"], "--rounds 0 .* 1 to 50"),
        (["--runtime", "paddle"], "--runtime paddle "),
        (["--goal", "1.4"], "--goal 1.4 .* 1.4x"),
        (["--goal", "1.4x", "--size", "64", "128"], "--goal .*one --size"),
        (["--goal", "1.4x", "--rounds", "2"], "--rounds 2 .*--goal.* 3 or more"),
        (["--save", "x.json"], "--save x.json .*--goal"),
        (["--goal", "35dB", "--save", str(EMOJI_SD)], "emoji_sd .*name a file"),
        (["--goal", "35dB", "--save", "/proc/x/y.json"], "--save /proc/x "),
        (["--method", "todo", "--ratio", "0.6"], "--ratio 0.6 .*method='todo'"),
        (["--size", "64x100"], "--size 64x100 .* 8 px"),
        (["--size", "64*64"], r"--size 64\*64 .*WIDTHxHEIGHT"),
        (["--output", str(EMOJI_SD / "fox.png")], "fox.png .*name a folder"),
        (["--output", str(EMOJI_SD / "fox.png" / "folder")], "fox.png .*name a folder"),
        (["--output", "/proc/outputs"], "--output /proc/outputs "),
        (["--steps", "0"], "--steps 0 .* 1 to 1000"),
        (["--seed", "-1"], "--seed -1 "),
        (["--threads", "0"], "--threads 0 "),
        (["--ratio", "0.5", "0"], "--ratio 0 "),
    ],
)
def test_wrong_option_is_an_error_before_anything_is_loaded(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare_command, "load_eager_pipeline", None)
    assert main(["compare", "--model", str(EMOJI_SD), "--output", str(tmp_path / "outputs"), *options]) == 2
    assert re.search(message, capsys.readouterr().err) and not list(tmp_path.iterdir())


def test_the_device_of_a_result_names_the_gpu(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA T4", total_memory=15_843_721_216)
    monkeypatch.setattr("paddle.get_device", lambda: "gpu:0")
    monkeypatch.setattr("paddle.device.cuda.get_device_properties", lambda: gpu)
    about = environment.describe_environment()
    assert about["device"].startswith("gpu:0: NVIDIA T4, 15.8 GB, CUDA ") and about["paddlenlp"][0].isdigit()


def test_prompts_in_other_scripts_are_legible_on_the_sheet(monkeypatch):
    """In an installed font that has their characters; without one as escapes, so that prompts differ."""
    matplotlib = pytest.importorskip("matplotlib")
    image, prompts = Image.new("RGB", (64, 64), "red"), ("\u0531\u0532", "\u0533\u0534")  # Armenian
    dejavu = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf"
    for installed in (["/no/such.ttf", dejavu], []):
        monkeypatch.setattr(fonts, "_installed", lambda chars, files=installed: iter(files))
        font = fonts.font_for("".join(prompts))
        assert fonts.missing(font, "fox") == ""
        assert fonts.missing(font, prompts[0]) == ("" if installed else prompts[0])
        assert fonts.printable(font, "a \u0531") == ("a \u0531" if installed else "a \\u0531")
        one, other = (np.asarray(make_sheet([("plain", [image])], [text], 64)) for text in prompts)
        assert not np.array_equal(one, other)


def test_command_says_that_no_font_has_a_prompt(model, tmp_path, monkeypatch, capsys):
    searches = []
    monkeypatch.setattr(fonts, "_installed", lambda chars: searches.append(chars) or iter(()))
    assert run_compare(model, tmp_path, "--prompt", "\u7ea2\u72d0") == 0
    assert searches == ["\u7ea2\u72d0"], "once, for the message and the sheet"
    assert "font has \u7ea2\u72d0" in capsys.readouterr().err


def test_a_terminal_without_utf_8_shows_escapes(model, tmp_path, monkeypatch):
    """A prompt or a table that it cannot show does not end the command."""
    for errors in ("strict", "surrogateescape"):  # the second is that of LC_ALL=C
        printed = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii", errors=errors))
        escape_unprintable()
        print("狐", flush=True)
        assert printed.getvalue() == rb"\u72d0" + b"\n"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    options = [*FEW_ROUNDS, "--goal", "0.1dB", "--ratio", "0.5", "--prompt", "红狐狸"]
    options += ["--save", str(tmp_path / "größe.json")]
    assert run_compare(model, tmp_path / "outputs", *options) in (0, 1)
    sys.stdout.flush()
    assert rb"prompts: \u7ea2\u72d0\u72f8" in printed.getvalue() and b"oal" in printed.getvalue()


def test_a_result_names_the_commit_of_the_packages_own_repository_alone(tmp_path, monkeypatch):
    """And not that of a project in whose folder it is installed."""

    def git(*arguments):
        command = ["git", "-C", str(tmp_path / "project"), "-c", "user.name=a", "-c", "user.email=a@b.example"]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    def package(*folders):
        folder = tmp_path.joinpath("project", *folders, "ppdiffusers_tome")
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        monkeypatch.setattr(environment, "PACKAGE", folder)
        return folder

    installed = package(".venv", "site-packages")
    assert environment.commit() == "none"
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "x")
    assert environment.commit() == "none", "untracked"
    git("add", "-f", str(installed))
    git("commit", "-q", "-m", "a project that tracks its environment")
    assert environment.commit() == "none"
    own = package()
    assert environment.commit() == "none", "copied to the top, and untracked"
    git("add", str(own))
    git("commit", "-q", "-m", "the package's own repository")
    head = git("rev-parse", "--short", "HEAD")
    assert environment.commit() == head
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another"))  # as in a hook of another repository
    assert environment.commit() == head
    (own / "__init__.py").write_text("changed")
    assert environment.commit() == f"{head}+"
