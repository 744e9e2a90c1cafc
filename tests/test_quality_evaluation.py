"""A whole evaluation on a tiny model: every number is there, known differences are seen, nothing is drawn twice."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
from conftest import tiny_pipeline
from PIL import Image

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.evaluation.quality import evaluation
from ppdiffusers_tome.evaluation.quality.drawing import Plan, folder_of
from ppdiffusers_tome.evaluation.quality.evaluation import evaluate, read_model
from ppdiffusers_tome.evaluation.quality.measuring import Measurer
from ppdiffusers_tome.evaluation.quality.settings import PLAIN, Setting, study
from ppdiffusers_tome.evaluation.quality.timing import time_settings
from ppdiffusers_tome.generation.offline import draw_here


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline().save_pretrained(str(folder))
    (folder / "prompts.txt").write_text("a fox\nan owl\n")
    return folder


@pytest.fixture(scope="module")
def evaluated(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluation")
    arguments = ["--model", str(model), "--backend", "eager", "--count", "4", "--steps", "2", "--size", "32"]
    arguments += ["--ratio", "0.25", "0.75", "--ablations", "use_rand", "--rounds", "1", "--out", str(out)]
    real = out / "pictures" / "other-seeds"
    assert main(["evaluate", *arguments]) == 0
    assert main(["evaluate", *arguments, "--real", str(real), "--json", str(out / "again.json")]) == 0
    return out


def test_the_result_tells_all(evaluated, model):
    result = json.loads((evaluated / "quality.json").read_text())
    assert result["kind"] == "quality" and result["commit"] and result["model"] == str(model)
    assert [p["prompt"] for p in result["prompts"]] == ["a fox", "an owl"] * 2
    assert [p["seed"] for p in result["prompts"]] == [0, 1, 2, 3]
    assert [s["name"] for s in result["settings"]] == ["0.25", "0.75", "0.25-fixed", "0.75-fixed"]
    for setting in result["settings"]:
        assert all(len(values) == 4 for values in setting["pairs"].values())
        assert setting["set"]["to plain, other seeds"]["frechet"] >= 0 and setting["seconds"]["ratio"] > 0
        assert max(setting["pairs"]["ssim"]) < 1 and min(setting["pairs"]["perceptual"]) > 0
    assert set(result["calibration"]) == {"plain, other seeds", "plain, blurred"}
    assert result["features"].keys() == {"efficientnet-lite0", "stlpips"}
    assert (evaluated / "quality.md").exists()


def test_more_merging_is_further_from_plain_and_less_so_than_other_noise(evaluated):
    result = json.loads((evaluated / "quality.json").read_text())
    psnr = {s["name"]: np.mean(s["pairs"]["psnr"]) for s in result["settings"]}
    assert psnr["0.25"] > psnr["0.75"] > np.mean(result["calibration"]["plain, other seeds"]["pairs"]["psnr"])


def test_a_second_run_draws_nothing_and_measures_what_is_new(evaluated):
    first, again = (json.loads((evaluated / name).read_text()) for name in ("quality.json", "again.json"))
    for a, b in zip(first["settings"], again["settings"], strict=True):
        assert a["pairs"] == b["pairs"] and set(b["set"]) == {"to plain, other seeds", "to real"}
    assert again["real"]["pictures"] == 4
    # The "real" ones are the plain ones of other seeds.
    assert again["settings"][0]["set"]["to real"] == again["settings"][0]["set"]["to plain, other seeds"]
    assert set(again["calibration"]) >= {"real halves", "real, blurred", "plain against real"}


def test_equal_pictures_have_no_finite_psnr(evaluated):
    measured = Measurer(evaluated, 32).pairs(PLAIN)
    assert np.isinf(measured.psnr).all() and (measured.ssim == 1).all() and not measured.perceptual.any()


def test_a_picture_that_is_missing_is_noticed(evaluated, tmp_path):
    lacking = Setting("lacking", "ratio", ToMeConfig(ratio=0.5))
    there = folder_of(PLAIN, evaluated)
    folder_of(lacking, evaluated).mkdir()
    picture = next(there.glob("*.png"))
    (folder_of(lacking, evaluated) / picture.name).write_bytes(picture.read_bytes())
    with pytest.raises(ToMeConfigError, match="lacking has 1 pictures and plain 4"):
        Measurer(evaluated, 32).pairs(lacking)


def test_a_model_tells_its_levels_and_scheduler(model):
    assert read_model(str(model)) == ([1], "DDIMScheduler")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tomesd-ratio", "0.5"], "name an interpreter"),
        (["--tomesd-ratio", "0.5", "--torch-python", "/no/python"], "is of no use: /no/python cannot be run"),
        (["--batch", "0"], "--batch 0 is not allowed"),
        (["--threads", "0"], "--threads 0 is not allowed"),
        (["--threads", "-1"], "--threads -1 is not allowed"),
        (["--guidance", "nan"], "guidance=nan is not allowed"),
        (["--count", "0"], "count=0 is not allowed"),
        (["--ratio", "0"], "must be above 0"),
        (["--ablations", "seeds"], "must be one of use_rand"),
        (["--actors", "0"], "--actors 0 is not allowed"),
        (["--real", "/no/pictures"], "has no PNG files"),
        (["--features", "inception"], "--real"),
        (["--prompts", "/no/file.txt"], "cannot be read"),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_anything_is_drawn(model, tmp_path, capsys, arguments, message):
    common = ["evaluate", "--model", str(model), "--ablations", "use_rand", "--out", str(tmp_path / "out")]
    assert main([*common, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_quick_replaces_defaults_alone(model, tmp_path, monkeypatch):
    """What is given explicitly stays, also where it is the usual default."""
    drawn = []

    def note(plan, settings, *args, rounds, **others):
        drawn.append((plan.size, plan.steps, len(plan.prompts), [setting.name for setting in settings], rounds))
        raise ToMeConfigError("enough")

    monkeypatch.setattr(evaluation, "evaluate", note)
    command = ["evaluate", "--model", str(model), "--out", str(tmp_path), "--quick"]
    for given in ([], ["--steps", "10", "--ratio", "0.1", "0.25", "--rounds", "5", "--ablations", "use_rand"]):
        assert main([*command, *given]) == 2
    assert drawn == [(64, 2, 2, ["0.5"], 1), (64, 10, 2, ["0.1", "0.25", "0.1-fixed", "0.25-fixed"], 5)]


@pytest.mark.skipif(find_spec("torch_fidelity") is not None, reason="this interpreter has torch-fidelity")
def test_fid_that_cannot_be_computed_is_said_before_anything_is_drawn(model, tmp_path, capsys):
    Image.new("RGB", (32, 32)).save(tmp_path / "real.png")
    arguments = ["--ablations", "--features", "inception", "--real", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["evaluate", "--model", str(model), *arguments]) == 2
    assert "pip install torch-fidelity" in capsys.readouterr().err and not (tmp_path / "out").exists()


class Clock:
    """Takes 1 s for a plain picture, 1 / (1 + ratio) for others; twice that in every other round."""

    now = 0.0
    calls = 0

    def generate(self, jobs):
        Clock.calls += 1
        Clock.now += (1 + (Clock.calls - 1) // 2 % 2) / (1 + jobs[0].ratio)


def test_seconds_are_compared_within_rounds(monkeypatch):
    monkeypatch.setattr("ppdiffusers_tome.evaluation.quality.timing.time.perf_counter", lambda: Clock.now)
    plan = Plan("model", (("a fox", 0),), 32)
    half = study((0.5,), ())[0]
    found = time_settings(plan, {PLAIN: Clock(), half: Clock()}, rounds=4)
    assert found["0.5"]["ratio"] == pytest.approx(1.5) and found["plain"]["ratio"] == 1
    assert found["plain"]["picture"] == 1.5 and Clock.calls == 10


def test_nothing_is_timed_without_rounds(monkeypatch):
    monkeypatch.setattr(evaluation, "time_settings", lambda *args: pytest.fail("timed"))
    assert evaluation._time(Plan("model", (("a", 0),), 32), [], {}, 0) == {}


def test_pictures_of_another_plan_are_not_mixed_in(evaluated, model):
    plan = Plan(str(model), (("a bear", 0),), 32, steps=2, guidance=2.0, backend="eager")
    with pytest.raises(ToMeConfigError, match="choose another folder"):
        evaluate(plan, study((0.25,), ()), "DDIMScheduler", evaluated, draw_here)
