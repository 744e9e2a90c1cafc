"""`compare`: plain and merged images from the same noise, steps timed in turn, and options that are not allowed."""

import json
import math
from functools import partial

import numpy as np
import paddle
import ppdiffusers
import pytest
from conftest import EMOJI_SD, tiny_pipeline
from PIL import Image
from zoo import ZOO
from zoo.parts import ONE_LEVEL
from zoo.parts import controlnet as controlnet_of_zoo
from zoo.parts import scheduler as scheduler_of_zoo
from zoo.parts import unet as unet_of_zoo

from ppdiffusers_tome import NoMergeableLayerError, ToMeConfig, ToMeConfigError, __version__
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.commands import compare as command
from ppdiffusers_tome.evaluation.clock import quartiles
from ppdiffusers_tome.evaluation.quality import comparison
from ppdiffusers_tome.evaluation.quality.comparison import Arm, Images, check_pipeline, figures_of, table_of
from ppdiffusers_tome.evaluation.results import check_result, read_json

SIDE, GAP = 32, 4  # px, of the sheet


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """What the command sets is undone."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(model, output, *options, steps="2"):
    settings = ["--model", str(model), "--output", str(output), "--threads", "1", "--steps", steps]
    return main(["compare", *settings, *map(str, options)])


def cells(path, rows, columns):
    """The images of a sheet, [rows][columns], which are at its lower right."""
    sheet = Image.open(path)
    left, top = sheet.width - columns * (SIDE + GAP), sheet.height - rows * (SIDE + GAP)
    assert 16 <= top <= 64, "the sheet has a different number of rows"
    corners = [[(left + x * (SIDE + GAP), top + y * (SIDE + GAP)) for x in range(columns)] for y in range(rows)]
    return [[np.asarray(sheet.crop((x, y, x + SIDE, y + SIDE))) for x, y in row] for row in corners]


def test_images_are_those_of_the_pipeline_from_the_same_noise(model, tmp_path, capsys):
    assert run(model, tmp_path, "--size", SIDE, "--ratio", 0.25, 0.5, "--prompt", "a fox", "an owl", "--seed", 7) == 0
    pipe = tiny_pipeline()
    pipe.set_progress_bar_config(disable=True)
    for row, ratio in zip(cells(tmp_path / "compare_32.png", rows=3, columns=2), (0, 0.25, 0.5), strict=True):
        for nth, prompt in enumerate(("a fox", "an owl")):
            paddle.seed(7 + nth)
            with pipe.tome(ratio=ratio):
                image = pipe(prompt, height=SIDE, width=SIDE, num_inference_steps=2, guidance_scale=7.5).images[0]
            assert np.array_equal(np.asarray(image), row[nth]), (ratio, prompt)
    result = read_json(tmp_path / "compare_32.json")
    check_result(result, "comparison", "compare_32.json")
    plain, quarter, half = result["arms"]
    assert [arm["arm"] for arm in result["arms"]] == ["plain", "0.25", "0.5"]
    assert plain["psnr"] is None and 10 < half["psnr"] < quarter["psnr"] < 80
    assert (half["tokens"], half["kept"]) == (256, 204) and 0 < half["macs_saved"] < 1
    assert all(len(arm["rounds"]) == comparison.ROUNDS for arm in result["arms"])
    text = Image.open(tmp_path / "compare_32.png").text
    assert json.loads(text["prompts"]) == ["a fox", "an owl"] and text["seed"] == "7"
    assert result["environment"]["ppdiffusers_tome"] == __version__ and result["environment"]["threads"] == "1"
    printed = capsys.readouterr().out
    assert f"{half['speed_up']:.2f}× {half['psnr']:.1f}" in " ".join(printed.split())
    assert (
        f"tune --model {model} --size 32" in printed and f"export --model {model} --size 32 --ratio 0.5 0" in printed
    )


def test_the_model_chooses_what_the_options_leave_out(model, tmp_path, capsys):
    """Its first prompt, its size, and the ratio and the settings of --merging, which the next steps repeat."""
    assert run(model, tmp_path, "--merging", "merge_attn=kv,ratio=0.75", steps="1") == 0
    result = read_json(tmp_path / "compare_32.json")
    assert (result["prompts"], result["size"], result["guidance_scale"]) == (["a fox"], 32, 7.5)
    assert [arm["arm"] for arm in result["arms"]] == ["plain", "0.75"]
    assert result["configs"][0]["merge_attn"] == "kv"
    assert "--merging merge_attn=kv,ratio=0.75 --ratio 0.75 0" in capsys.readouterr().out


def test_controlnet(model, tmp_path, capsys):
    paddle.seed(1)
    controlnet_of_zoo(**ONE_LEVEL).save_pretrained(str(tmp_path / "controlnet"))
    edges = EMOJI_SD / "controlnet" / "penguin_edges.png"
    options = ["--size", SIDE, "--prompt", "a fox"]
    assert run(model, tmp_path, *options, "--controlnet", tmp_path / "controlnet", "--image", edges) == 0
    (condition,), (plain,), (half,) = cells(tmp_path / "compare_32.png", rows=3, columns=1)
    expected = Image.open(edges).convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    assert np.array_equal(condition, np.asarray(expected)) and not np.array_equal(plain, half)
    assert run(model, tmp_path / "without", *options) == 0
    assert not np.array_equal(plain, cells(tmp_path / "without" / "compare_32.png", rows=2, columns=1)[0][0])
    assert "export" not in capsys.readouterr().out.partition("Sheet")[2].partition("Sheet")[0]


def test_steps_take_turns_and_merged_ones_have_made_their_constants(monkeypatch):
    pipe, calls, taken = tiny_pipeline(), [], iter(range(1, 100))
    generate = Images.generate

    def record(images, pipe, nth, **changes):
        merges = bool(pipe.tome_summary(SIDE, SIDE).blocks)
        calls.append(("image" if "output_type" not in changes else "step", merges))
        return generate(images, pipe, nth, **changes)

    def seconds_of(step):
        calls.append("timed")
        step()
        return float(next(taken))

    monkeypatch.setattr(Images, "generate", record)
    monkeypatch.setattr(comparison, "seconds_of", seconds_of)
    pipe.set_progress_bar_config(disable=True)
    plain, half = comparison.compare(pipe, Images(("a fox",), SIDE, 2, 7.5, 0), [ToMeConfig(ratio=0.5)])
    assert calls[:2] == [("image", False), ("image", True)]
    merged = [("step", True), "timed", ("step", True)]
    rest = calls[2:]
    orders = {first < second for first, second in zip(plain.seconds, half.seconds, strict=True)}
    assert len(orders) == 2, "the order changes from round to round"
    for first, second in zip(plain.seconds, half.seconds, strict=True):
        turn = ["timed", ("step", False)]
        expected = [*turn, *merged] if first < second else [*merged, *turn]
        assert abs(first - second) == 1 and rest[:5] == expected
        rest = rest[5:]
    assert not rest and len(plain.seconds) == comparison.ROUNDS
    assert not pipe.tome_summary(SIDE, SIDE).blocks


def test_speed_up_is_the_median_of_the_ratios_within_rounds():
    """A round in which the machine is busy does not count twice: by medians of seconds this would be 1.5."""
    summary = tiny_pipeline().apply_tome(ratio=0.5).tome_summary(SIDE, SIDE)
    image = Image.new("RGB", (8, 8))
    plain = Arm(None, None, [image], [2.0, 8.0, 3.0])
    half = Arm(ToMeConfig(ratio=0.5), summary, [image], [1.0, 4.0, 2.0])
    figures = figures_of([plain, half])
    assert figures[1]["speed_up"] == 2 and figures[1]["psnr"] == math.inf
    header, first, second = table_of(figures).splitlines()
    assert "MACs saved" in header and first.split() == ["plain", "–", "–", "3.00", "–", "–"]
    assert second.split()[1:4] == ["256", "→", "204"] and second.split()[-3:] == ["2.00", "2.00×", "inf"]


SCHEDULERS = ("PNDMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_one_step_is_one_pass_of_the_denoiser(scheduler):
    pipe, passes = tiny_pipeline(), []
    pipe.scheduler = scheduler_of_zoo(getattr(ppdiffusers, scheduler))
    pipe.set_progress_bar_config(disable=True)
    pipe.unet.register_forward_post_hook(lambda *_: passes.append(1))
    latents = Images(("a fox",), SIDE, 2, 7.5, 0).generate(pipe, 0, num_inference_steps=1, output_type="latent")
    assert len(passes) == 1 and latents.shape == [4, 16, 16]


def test_pipelines_without_a_unet(model, tmp_path, monkeypatch, capsys):
    """Stable Diffusion 3; it cannot be exported, so that is no next step."""
    pipe = ZOO["StableDiffusion3Pipeline"]().pipe
    monkeypatch.setattr(command, "load_for_export", lambda *_, **__: pipe)
    assert run(model, tmp_path, "--size", SIDE, steps="1") == 0
    plain, half = (row[0] for row in cells(tmp_path / "compare_32.png", rows=2, columns=1))
    assert not np.array_equal(plain, half) and "export --model" not in capsys.readouterr().out


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("gpu:0", "float16")])
def test_models_load_in_half_precision_on_a_gpu(model, tmp_path, monkeypatch, device, dtype):
    def load(*_, **options):
        assert options.pop("dtype") == dtype
        raise ToMeConfigError("that is enough")

    monkeypatch.setattr(command, "load_for_export", load)
    monkeypatch.setattr(paddle, "get_device", lambda: device)
    assert run(model, tmp_path) == 2


def test_pipelines_that_generate_something_else_are_rejected():
    for name in ("DiTPipeline", "TextToVideoSDPipeline"):
        with pytest.raises(ToMeConfigError, match=f"m is a {name}, which does not generate images from prompts"):
            check_pipeline(ZOO[name]().pipe, "m", [ToMeConfig()])


def test_a_config_that_merges_nothing_is_rejected():
    level_2 = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    level_2["up_block_types"] = ("CrossAttnUpBlock2D", "UpBlock2D")
    pipe = tiny_pipeline(unet=unet_of_zoo(**level_2))
    with pytest.raises(NoMergeableLayerError, match="level 2"):
        check_pipeline(pipe, "m", [ToMeConfig(), ToMeConfig(max_downsample=1)])
    assert not pipe.tome_summary(SIDE, SIDE).blocks


def test_a_size_at_which_merging_does_not_pay(model, tmp_path, monkeypatch, capsys):
    for speed_up in (0.5, 2.0):
        monkeypatch.setattr(comparison, "ratio_within_rounds", lambda *_, value=speed_up: quartiles([value]))
        assert run(model, tmp_path, "--size", SIDE, steps="1") == 0
        printed = capsys.readouterr().out
        assert f"{speed_up:.2f}×" in printed and ("does not pay at 32 px" in printed) == (speed_up < 1)


INVALID = [
    (["--ratio", "0"], "--ratio 0 is not allowed"),
    (["--ratio", "0.5", "0.5"], "--ratio 0.5 is repeated"),
    (["--ratio", "1.5"], "ratio=1.5 is not allowed"),
    (["--size", "100"], "--size 100 is not allowed"),
    (["--size", "0"], "--size 0 is not allowed"),
    (["--size", "64", "64"], "--size 64 is repeated"),
    (["--steps", "0"], "--steps: steps=0 is not allowed"),
    (["--guidance-scale", "nan"], "--guidance-scale: guidance_scale=nan"),
    (["--seed", "-1"], "--seed: seed=-1 is not allowed"),
    (["--threads", "0"], "--threads 0 is not allowed"),
    (["--controlnet", "net"], "--controlnet net needs --image too"),
    (["--image", "FILE"], "needs --controlnet too"),
    (["--controlnet", "a/b", "--image", "nosuch.png"], "--image nosuch.png cannot be read: No such file"),
    (["--controlnet", "a/b", "--image", "FILE"], "it is none of PNG, JPEG, WEBP"),
    (["--controlnet", "/no/folder", "--image", "PNG"], "/no/folder is neither a folder nor a hub name"),
    (["--output", "FILE"], "is a file: name a folder"),
    (["--merging", "nosuch=1"], "nosuch"),
    (["--model", "nosuch"], "nosuch is neither a folder nor a hub name"),
]


@pytest.mark.parametrize(("options", "message"), INVALID, ids=[" ".join(options) for options, _ in INVALID])
def test_invalid_options_are_one_line_before_anything_is_loaded_or_written(
    options, message, model, tmp_path, monkeypatch, capsys
):
    file, png = tmp_path / "file.txt", tmp_path / "image.png"
    file.write_text("text")
    Image.new("RGB", (8, 8)).save(png)
    monkeypatch.chdir(tmp_path)
    loads = partial(pytest.fail, "the model was loaded")
    monkeypatch.setattr(ppdiffusers.DiffusionPipeline, "from_pretrained", loads)
    monkeypatch.setattr(ppdiffusers.ControlNetModel, "from_pretrained", loads)
    options = [{"FILE": str(file), "PNG": str(png)}.get(option, option) for option in options]
    assert main(["compare", "--model", str(model), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "image.png"]
