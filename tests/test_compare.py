"""`compare`: plain and merged images of one noise, steps that take turns, the sheet and the table."""

import argparse
import json
import re

import numpy as np
import ppdiffusers
import pytest
from conftest import EMOJI_SD, tiny_pipeline
from paddlenlp.utils.log import logger
from PIL import Image

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.commands import compare as compare_command
from ppdiffusers_tome.comparison import arms
from ppdiffusers_tome.comparison.arms import Arm, Scene, check_pipeline, compare, make_table, psnr
from ppdiffusers_tome.comparison.results import check_result
from ppdiffusers_tome.inference import Size

SCENE = Scene(["a fox", "an owl"], size=Size(32, 32), steps=2, guidance_scale=2.0, seed=7)
HALF, QUARTER = ToMeConfig(ratio=0.5), ToMeConfig(ratio=0.25)


@pytest.fixture(autouse=True)
def _logging():
    """The command's changes of loggers and progress bars are undone."""
    level = logger.logger.level
    yield
    logger.logger.setLevel(level)
    ppdiffusers.utils.logging.enable_progress_bar()


@pytest.fixture
def pipe():
    pipe = tiny_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def model(pipe, tmp_path):
    folder = tmp_path / "model"
    pipe.save_pretrained(str(folder))
    (folder / "prompts.txt").write_text("a fox\nan owl\n")
    return folder


def test_images_are_those_of_the_pipeline(pipe):
    plain, half = compare(pipe, SCENE, [HALF], rounds=1)
    assert [arm.name for arm in (plain, half)] == ["plain", "0.5"]
    expected = [SCENE.generate(pipe, prompt) for prompt in SCENE.prompts]  # it is plain again
    assert [np.array_equal(a, b) for a, b in zip(plain.images, expected, strict=True)] == [True, True]
    with pipe.tome(ratio=0.5):
        merged = SCENE.generate(pipe, "an owl")
    assert np.array_equal(half.images[1], merged) and not np.array_equal(merged, expected[1])
    distances = [psnr(np.asarray(a), np.asarray(b)) for a, b in zip(plain.images, half.images, strict=True)]
    assert half.figures(plain)["psnr"] == pytest.approx(np.mean(distances))


def test_steps_take_turns_in_one_image(pipe, monkeypatch):
    turns, switch_on = [], Arm.switch_on
    monkeypatch.setattr(Arm, "switch_on", lambda arm, pipe: turns.append(arm.name) or switch_on(arm, pipe))
    arms = compare(pipe, SCENE, [HALF, QUARTER], rounds=3)
    timed, images = turns[:12], turns[12:]
    assert [sorted(timed[n : n + 3]) for n in range(0, 12, 3)] == 4 * [["0.25", "0.5", "plain"]]
    assert images == ["plain", "0.5", "0.25"]
    assert [len(arm.step_seconds) for arm in arms] == [3, 3, 3]  # without the round that warms up


def test_speed_up_is_that_within_rounds(pipe):
    plain, half = compare(pipe, SCENE, [HALF], rounds=1)
    plain.step_seconds, half.step_seconds = [2.0, 9.0, 4.0], [1.0, 3.0, 4.0]
    figures = half.figures(plain)
    assert (figures["speed_up"], figures["step_seconds"]) == (2.0, 3.0)
    assert figures["keys"] < figures["queries"] < figures["tokens"] == 256 and figures["macs_saved"] > 0
    assert plain.figures(plain)["psnr"] is plain.figures(plain)["macs_saved"] is None
    header, first, second = make_table([plain.figures(plain), figures]).splitlines()
    assert len({len(header), len(first), len(second)}) == 1
    assert second.split()[:3] == ["0.5", str(figures["queries"]), str(figures["keys"])] and "2.00×" in second


def test_pipeline_that_reports_no_steps_is_refused(pipe, monkeypatch):
    monkeypatch.setattr(type(pipe), "__call__", lambda self, prompt: None)
    with pytest.raises(ToMeConfigError, match="StableDiffusionPipeline has no height, so it cannot be compared"):
        compare(pipe, SCENE, [HALF])
    assert not pipe.tome_summary(height=32, width=32).blocks or "off" in str(pipe.tome_summary(height=32, width=32))


def test_command_writes_sheet_figures_and_table(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(arms, "ROUNDS", 1)
    output = tmp_path / "outputs"
    options = ["--model", str(model), "--size", "32", "48", "--ratio", "0.5", "0.25", "--steps", "2"]
    assert main(["compare", *options, "--guidance-scale", "2", "--threads", "1", "--output", str(output)]) == 0
    printed, reports = capsys.readouterr()
    assert "  1 image, plain …\n" in reports and "1 images" not in reports
    for size in (32, 48):
        result = json.loads((output / f"compare_{size}.json").read_text())
        check_result(result, "comparison", "compare.json")
        assert [result[name] for name in ("prompts", "width", "height", "steps")] == [["a fox"], size, size, 2]
        assert [row["arm"] for row in result["arms"]] == ["plain", "0.5", "0.25"]
        with Image.open(output / f"compare_{size}.jpg") as sheet:
            assert sheet.height > 3 * size and b"ratio=0.5" in sheet.info["comment"]
        assert make_table(result["arms"]) in printed
    assert printed.count("images: ") == 2


def test_command_takes_sizes_as_width_x_height(model, tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "ROUNDS", 1)
    options = ["--model", str(model), "--size", "32x32", "48x32", "--steps", "1", "--threads", "1"]
    assert main(["compare", *options, "--output", str(tmp_path / "outputs")]) == 0
    for name, (width, height) in {"32": (32, 32), "48x32": (48, 32)}.items():
        result = json.loads((tmp_path / "outputs" / f"compare_{name}.json").read_text())
        assert (result["width"], result["height"], result["arms"][0]["tokens"]) == (width, height, width * height // 4)


def test_a_model_without_prompts_is_reported_with_the_option_that_names_others(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(arms, "ROUNDS", 1)
    (model / "prompts.txt").unlink()
    options = ["--model", str(model), "--size", "32", "--steps", "1", "--threads", "1"]
    assert main(["compare", *options, "--output", str(tmp_path / "outputs")]) == 0
    assert "prompts.txt does not exist: general prompts are used; --prompt names others" in capsys.readouterr().err


def test_next_steps_name_what_was_fastest():
    """They promise no speed-up that was not measured."""
    parser = argparse.ArgumentParser()
    compare_command.add(parser.add_subparsers())
    given = ["--model", "m", "--size", "64x32", "--ratio", "0.5", "0.25", "--merging", "window=8"]
    options = parser.parse_args(["compare", *given])
    lines = compare_command._next_steps(options, ToMeConfig(ratio=0.25, window=8), 1.07).splitlines()
    export = "export --model m --output build/export --size 64x32 --merging window=8 --ratio 0.25 "
    assert export in lines[1] and "pipe.apply_tome(ratio=0.25, window=8) " in lines[2]
    assert not re.search(r"tune|1\.5|docs/", "".join(lines))
    assert "not faster here" in compare_command._next_steps(options, ToMeConfig(), 0.99)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("video", "TextToVideoSDPipeline generates videos, so it cannot be compared: compare generates images from"),
        ("sd3", "StableDiffusion3Pipeline cannot be compared on this machine: .* on GPUs only"),
    ],
)
def test_a_pipeline_that_cannot_be_compared_is_an_error_before_it_is_loaded(
    name, reason, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("ppdiffusers_tome.inference.loading.load_for_export", None)
    monkeypatch.delattr("paddle.nn.functional.scaled_dot_product_attention_")
    output = tmp_path / "outputs"
    assert main(["compare", "--model", str(EMOJI_SD.parent / "tiny" / name), "--output", str(output)]) == 2
    assert re.match(f"error: {reason}", capsys.readouterr().err) and not output.exists()


def test_a_controlnet_of_another_family_is_an_error_before_it_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ppdiffusers_tome.inference.loading.load_for_export", None)
    options = ["--model", str(EMOJI_SD.parent / "tiny" / "sdxl"), "--output", str(tmp_path / "outputs")]
    options += ["--controlnet", str(EMOJI_SD / "controlnet"), "--image", str(EMOJI_SD / "fox.png")]
    assert main(["compare", *options]) == 2
    assert re.search("cannot be used with .*sdxl, a StableDiffusionXLPipeline", capsys.readouterr().err)


def test_stable_diffusion_3_is_compared_where_ppdiffusers_runs_it(tmp_path, capsys, monkeypatch):
    """Its folder names a third text encoder and has none."""
    monkeypatch.setattr(arms, "ROUNDS", 1)
    options = ["--model", str(EMOJI_SD.parent / "tiny" / "sd3"), "--steps", "1", "--threads", "1"]
    assert main(["compare", *options, "--output", str(tmp_path)]) == 0
    assert "plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    "cls", [ppdiffusers.StableDiffusionImg2ImgPipeline, ppdiffusers.StableDiffusionInpaintPipeline]
)
def test_a_pipeline_that_needs_an_image_is_refused(cls):
    with pytest.raises(ToMeConfigError, match=f"{cls.__name__} needs an image, so it cannot be compared"):
        check_pipeline(cls)


def test_command_takes_a_guidance_scale_of_zero(model, tmp_path, monkeypatch):
    """It is a value, in place of the model's own."""
    monkeypatch.setattr(arms, "ROUNDS", 1)
    options = ["--model", str(model), "--size", "32", "--steps", "1", "--guidance-scale", "0", "--threads", "1"]
    assert main(["compare", *options, "--output", str(tmp_path / "outputs")]) == 0
    assert json.loads((tmp_path / "outputs" / "compare_32.json").read_text())["guidance_scale"] == 0


def test_command_with_a_controlnet(tmp_path, capsys):
    """The input stands above the images on the sheet."""
    options = [
        "--controlnet",
        str(EMOJI_SD / "controlnet"),
        "--image",
        str(EMOJI_SD / "controlnet" / "penguin_edges.png"),
        "--size",
        "64",
    ]
    options += ["--prompt", "a 3d render of fox", "--steps", "1", "--threads", "1", "--output", str(tmp_path)]
    assert main(["compare", "--model", str(EMOJI_SD), *options]) == 0
    with Image.open(tmp_path / "compare_64.jpg") as sheet:
        assert sheet.height > 3 * 64
    assert "0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/no/such"], "/no/such is neither a folder nor a hub name"),
        (["--image", "fox.png"], "--controlnet and --image belong together"),
        (["--controlnet", "net"], "--controlnet and --image belong together"),
        (["--controlnet", "net", "--image", "/no.png"], "--image /no.png cannot be read"),
        (["--size", "100"], "--size 100 is not allowed: it must be a multiple of 8 px"),
        (["--size", "64x100"], "--size 64x100 is not allowed: it must be a multiple of 8 px"),
        (["--size", "64*64"], "--size 64*64 is not allowed: it must be WIDTHxHEIGHT"),
        (["--output", str(EMOJI_SD / "fox.png")], "fox.png (Not a directory): name a folder"),
        (["--output", str(EMOJI_SD / "fox.png" / "folder")], "fox.png (Not a directory): name a folder"),
        (["--output", "/proc/outputs"], "--output /proc/outputs is not allowed: no file can be written to /proc ("),
        (["--steps", "0"], "--steps 0 is not allowed: it must be 1 to 1000"),
        (["--seed", "-1"], "--seed -1 is not allowed"),
        (["--threads", "0"], "--threads 0 is not allowed"),
        (["--ratio", "0.5", "0"], "--ratio 0 is not allowed: plain images are always generated"),
        (["--ratio", "0.9"], "--ratio 0.9 is not allowed"),
        (["--merging", "windows=3"], "windows"),
    ],
)
def test_wrong_option_is_an_error_before_anything_is_loaded(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ppdiffusers_tome.inference.loading.load_for_export", None)
    given = options if "--model" in options else ["--model", str(EMOJI_SD), *options]
    assert main(["compare", "--output", str(tmp_path / "outputs"), *given]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
