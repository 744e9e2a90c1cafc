"""The examples, run like a user runs them, with the bundled model: images, metadata, table, and invalid options."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import cuda_attention
import numpy as np
import paddle
import ppdiffusers
import pytest
from paddlenlp.utils.log import logger
from PIL import Image, ImageOps
from ppdiffusers.models.attention_processor import JointAttnProcessor2_5

from ppdiffusers_tome import ToMeConfig, __version__
from ppdiffusers_tome.evaluation.results import check_result

EXAMPLES = Path(__file__).parents[1] / "examples"
LEFT, SIDE, GAP = 56, 64, 4  # of the sheet, in px
FOX, OWL = "a 3d render of fox", "a flat drawing of owl"


@pytest.fixture(scope="module")
def examples():
    """The scripts as modules; settings of the process that `load` changes are restored afterwards."""
    verbosity, level = ppdiffusers.utils.logging.get_verbosity(), logger.logger.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        names = ("options", "comparison", "text_to_image", "image_to_image", "hires_fix", "inpaint", "sdxl", "sd3")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    ppdiffusers.utils.logging.set_verbosity(verbosity)
    logger.logger.setLevel(level)


def small(*args, folder):
    return [*args, "--size", str(SIDE), "--steps", "2", "--output", str(folder)]


def cells(path, rows, columns):
    """The sheet's images, [rows][columns], which are at its lower right."""
    sheet = Image.open(path)
    assert sheet.width == LEFT + columns * (SIDE + GAP)
    top = sheet.height - rows * (SIDE + GAP)
    assert 16 <= top <= 64, "the sheet has a different number of rows"
    corners = [[(LEFT + x * (SIDE + GAP), top + y * (SIDE + GAP)) for x in range(columns)] for y in range(rows)]
    return [[np.asarray(sheet.crop((x, y, x + SIDE, y + SIDE))) for x, y in row] for row in corners]


def table(text):
    """The table's rows: first word → other words."""
    rows = {}
    for line in text.splitlines():
        words = line.split()
        if any(word.endswith("×") for word in words):
            rows[words[0]] = words[1:]
    return rows


@pytest.fixture(scope="module")
def output(examples, tmp_path_factory):
    """Output folder of text_to_image.py with two prompts: plain, ratio 0 and ratio 0.5; `printed` has its output."""
    folder = tmp_path_factory.mktemp("text_to_image")
    arguments = small(FOX, OWL, "--ratio", "0", "0.5", "--seed", "7", "--save-images", folder=folder)
    with (folder / "printed").open("w", encoding="utf-8") as printed, redirect_stdout(printed):
        examples.text_to_image.main(arguments)
    return folder


def test_sheet_has_a_row_for_each_arm_and_a_column_for_each_prompt(output):
    sheet = cells(output / "text_to_image_64.png", rows=3, columns=2)
    for row, arm in zip(sheet, ("plain", "0", "0.5"), strict=True):
        for n, cell in enumerate(row, 1):
            assert np.array_equal(cell, np.asarray(Image.open(output / f"text_to_image_64_{arm}_{n}.png"))), (arm, n)
    for column in range(2):
        plain, nothing, half = (row[column] for row in sheet)
        assert np.array_equal(plain, nothing)
        assert not np.array_equal(plain, half)
    assert not np.array_equal(sheet[0][0], sheet[0][1])


def test_sheet_has_its_settings_as_metadata(output):
    text = Image.open(output / "text_to_image_64.png").text
    settings = {"prompts": [FOX, OWL], "ratios": [0, 0.5], "seed": 7, "steps": 2, "size": 64, "guidance_scale": 2}
    assert {key: json.loads(text[key]) for key in settings} == settings
    assert text["model"] == "examples/emoji_sd"
    assert text["ppdiffusers_tome"] == __version__
    assert json.loads(text["tome"]) == [str(ToMeConfig(ratio=0)), str(ToMeConfig(ratio=0.5))]


def test_result_has_the_figures_of_the_table_and_their_origin(output):
    result = json.loads((output / "text_to_image_64.json").read_text(encoding="utf-8"))
    check_result(result, "comparison", "text_to_image_64.json")
    assert result["command"].startswith(f"python examples/text_to_image.py '{FOX}' '{OWL}' --ratio 0 0.5")
    assert (result["prompts"], result["seed"], result["size"]) == ([FOX, OWL], 7, 64)
    assert result["environment"]["ppdiffusers_tome"] == __version__ and result["environment"]["machine"]
    kept = {arm["arm"]: (arm["tokens"], arm["kept"]) for arm in result["arms"]}
    assert kept == {"plain": (256, 256), "0": (256, 256), "0.5": (256, 204)}
    plain, _, half = result["arms"]
    assert plain["psnr"] is None and 10 < half["psnr"] < 80 and half["macs_saved"] > 0
    assert half["speed_up"] == pytest.approx(plain["seconds"] / half["seconds"])


def test_images_can_be_reproduced_from_their_metadata(output, pipe):
    for path in (output / "text_to_image_64_plain_2.png", output / "text_to_image_64_0.5_2.png"):
        image = Image.open(path)
        names = ("ratio", "seed", "steps", "size", "guidance_scale")
        ratio, seed, steps, size, guidance = (json.loads(image.text[name]) for name in names)
        paddle.seed(seed)
        settings = {"height": size, "width": size, "num_inference_steps": steps, "guidance_scale": guidance}
        with pipe.tome(ratio=ratio):
            again = pipe(image.text["prompt"], **settings).images[0]
        assert np.array_equal(np.asarray(again), np.asarray(image)), path.name
    assert image.text["tome"] == str(ToMeConfig(ratio=0.5))
    assert Image.open(output / "text_to_image_64_plain_1.png").text["tome"] == "off"


def test_table(output):
    out = (output / "printed").read_text(encoding="utf-8")
    assert "64 px, prompts: 2, steps: 2, seed: 7" in out
    assert "median over the prompts, on this machine" in out
    assert "tokens       MACs saved  s/image  speed-up  PSNR dB   SSIM" in out
    assert "trained at" not in out
    plain, zero, half = json.loads((output / "text_to_image_64.json").read_text(encoding="utf-8"))["arms"]

    def times(arm):
        return [f"{arm['seconds']:.2f}", f"{arm['speed_up']:.2f}×"]

    assert table(out) == {  # plain is not compared with itself
        "plain": ["256", *times(plain)],
        "0": ["256", "→", "256", "0.0%", *times(zero), "inf", "1.000"],
        "0.5": [
            "256",
            "→",
            "204",
            f"{half['macs_saved']:.1%}",
            *times(half),
            f"{half['psnr']:.1f}",
            f"{half['ssim']:.3f}",
        ],
    }
    assert zero["psnr"] == math.inf and zero["macs_saved"] == 0 and 0 < half["ssim"] <= 1


def test_image_to_image_of_a_large_image_with_the_unet_of_that_size(examples, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(examples.options, "TRAINED_AT", 48)
    file = tmp_path / "input.png"
    Image.open(EXAMPLES / "emoji_sd" / "fox.png").crop((0, 0, 128, 96)).save(file)
    arguments = small(OWL, "--image", str(file), "--strength", "0.5", "--ratio", "0.5", folder=tmp_path)
    examples.image_to_image.main(arguments)
    path = tmp_path / "image_to_image_64.png"
    (source,), (plain,), (half,) = cells(path, rows=3, columns=1)
    assert np.array_equal(source, np.asarray(ImageOps.fit(Image.open(file), (SIDE, SIDE))))
    assert not np.array_equal(source, plain)
    assert not np.array_equal(plain, half)
    text = Image.open(path).text
    assert (text["strength"], text["image"], text["ratios"]) == ("0.5", str(file), "[0.5]")
    assert text["model"] == "examples/emoji_sd_256"
    out = capsys.readouterr().out
    assert list(table(out)) == ["plain", "0.5"]
    assert f"Rows input, plain, 0.5: {path}" in out


def test_second_pass_starts_from_the_enlarged_first_and_merges(examples, tmp_path, capsys):
    arguments = small(FOX, "--strength", "0.5", "--ratio", "0", "0.5", folder=tmp_path)
    arguments[arguments.index("2")] = "4"  # steps
    examples.hires_fix.main(arguments)
    (enlarged,), (plain,), (nothing,), (half,) = cells(tmp_path / "hires_fix_64.png", rows=4, columns=1)
    blurred = np.asarray(Image.fromarray(enlarged).resize((SIDE // 2, SIDE // 2)).resize((SIDE, SIDE)))
    assert np.abs(blurred.astype(int) - enlarged).mean() < 4, "it has no detail of its own"
    assert np.array_equal(plain, nothing) and not np.array_equal(plain, half)
    result = json.loads((tmp_path / "hires_fix_64.json").read_text(encoding="utf-8"))
    assert (result["size"], result["first_size"], result["strength"], result["steps"]) == (64, 32, 0.5, 4)
    seconds = {arm["arm"]: arm["seconds"] + result["first_pass_seconds"] for arm in result["arms"]}
    assert result["seconds_of_both_passes"] == pytest.approx(seconds)
    assert "Both passes: plain" in capsys.readouterr().out


def test_bundled_models_differ_in_the_unet_alone():
    small, large = EXAMPLES / "emoji_sd", EXAMPLES / "emoji_sd_256"
    files = {path.relative_to(large) for path in large.rglob("*") if path.is_file()}
    own = {path for path in files if path.parts[0] in ("unet", "README.md", "samples.png")}
    assert len(files - own) >= 10
    for path in files - own:
        assert (large / path).read_bytes() == (small / path).read_bytes(), path
    unet = ppdiffusers.UNet2DConditionModel.from_pretrained(str(large / "unet"), paddle_dtype=paddle.float32)
    unet.apply_tome(0.5, max_downsample=4)
    grids = {block.level: block.grid.tokens for block in unet.tome_summary(height=64, width=64).blocks}
    assert grids == {1: 4096, 2: 1024, 4: 256}


def test_inpaint_regenerates_the_white_region_and_merges(examples, tmp_path):
    right = tmp_path / "right.png"
    Image.fromarray(np.repeat([[0, 255]], 64, axis=1).repeat(128, axis=0).astype("uint8")).save(right)
    examples.inpaint.main(small("a 3d render of panda", "--mask", str(right), "--ratio", "0.5", folder=tmp_path))
    path = tmp_path / "inpaint_64.png"
    (source,), (mask,), (plain,), (half,) = cells(path, rows=4, columns=1)
    fox = Image.open(EXAMPLES / "emoji_sd" / "fox.png")
    assert np.array_equal(source, np.asarray(ImageOps.fit(fox, (SIDE, SIDE))))
    assert (mask[:, : SIDE // 2 - 2] == 0).all() and (mask[:, SIDE // 2 + 2 :] == 255).all()
    assert not np.array_equal(plain, half)
    for image in (plain, half):
        change = np.abs(image.astype("float") - source).mean(axis=(0, 2))  # of each column of pixels
        assert change[: SIDE // 2].mean() < 0.3 * change[SIDE // 2 :].mean()
    text = Image.open(path).text
    assert (text["model"], text["mask"], text["guidance_scale"]) == ("examples/emoji_sd", str(right), "2.0")


TINY = {  # rows above the plain one, tokens plain and at ratio 0.5, the pipeline's default guidance scale
    "sdxl": ([], 256, 204, 5.0),  # level 2 of 32×32 latent pixels
    "sd3": ([], 256, 204, 7.0),  # patches of 2×2
    "inpaint": (["input", "mask"], 1024, 813, 7.5),
}


@pytest.mark.parametrize("script", TINY)
def test_tiny_random_models(examples, monkeypatch, tmp_path, capsys, script):
    before, tokens, kept, guidance = TINY[script]
    monkeypatch.chdir(tmp_path)
    getattr(examples, script).main([FOX, "--tiny", "--ratio", "0.5", "--steps", "2"])
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "random weights: the images are noise"
    assert list(table(out)) == ["plain", "0.5"]
    assert "MACs cannot be counted" not in out
    *above, (plain,), (half,) = cells(tmp_path / "outputs" / f"{script}_64.png", len(before) + 2, columns=1)
    assert plain.std() > 5 and not np.array_equal(plain, half)
    assert f"Rows {', '.join([*before, 'plain', '0.5'])}: " in out and len(above) == len(before)
    if "mask" in before:
        mask = above[1][0]
        assert (mask[: SIDE // 2] == 0).all() and (mask[SIDE // 2 :] == 255).all()
    result = json.loads((tmp_path / "outputs" / f"{script}_64.json").read_text(encoding="utf-8"))
    assert (result["model"], result["guidance_scale"], result["size"]) == (f"tiny random {script}", guidance, 64)
    assert [(arm["tokens"], arm["kept"]) for arm in result["arms"]] == [(tokens, tokens), (tokens, kept)]
    assert result["arms"][1]["macs_saved"] > 0


def test_joint_attention_equals_that_of_ppdiffusers(examples):
    transformer = importlib.import_module("tiny").sd3().transformer
    inputs = [paddle.randn(shape) for shape in ([2, 4, 6, 10], [2, 5, 64], [2, 64])]  # latents, text, pooled text
    outputs = []
    for processor in (examples.sd3.JointAttention(), JointAttnProcessor2_5()):
        transformer.set_attn_processor(processor)
        outputs.append(transformer(*inputs, timestep=paddle.to_tensor([500])).sample.numpy())
    assert np.allclose(*outputs, rtol=0, atol=1e-6) and outputs[0].std() > 0.01


def test_tiny_model_defaults_to_few_steps(examples):
    args = examples.options.parse(examples.options.make_parser("", tiny="sdxl", bundled=False), ["--tiny"])
    assert (args.tiny, examples.options.steps_for(args, 64)) == ("sdxl", 4)


def test_mask_without_white_is_rejected(examples, tmp_path, capsys):
    Image.new("L", (8, 8), 100).save(tmp_path / "grey.png")
    with pytest.raises(SystemExit, match="2"):
        examples.inpaint.main(["--tiny", "--mask", str(tmp_path / "grey.png")])
    assert re.search(r"error: --mask .*grey\.png has no white pixels", capsys.readouterr().err)


def test_default_sizes_prompts_and_steps(examples, monkeypatch, tmp_path):
    calls = []

    def compare(pipe, args, name, size, prompts, draw, *rest, **details):
        assert (args.ratio, args.seed, args.guidance_scale) == ([0.25, 0.5, 0.75], 0, 2.0)
        calls.append((name, size, len(prompts), examples.options.steps_for(args, size)))

    monkeypatch.setattr(examples.comparison, "compare", compare)
    for script in (examples.text_to_image, examples.image_to_image, examples.inpaint):
        script.main(["--output", str(tmp_path)])
    expected = [("text_to_image", 128, 2, 20), ("text_to_image", 256, 1, 10)]
    expected += [("image_to_image", 128, 1, 20), ("image_to_image", 256, 1, 10)]
    assert calls == [*expected, ("inpaint", 128, 2, 20)]


REFUSED = [  # options, and what the error names
    ("text_to_image", ["--model", "/no/folder/here"], "/no/folder/here"),
    ("text_to_image", ["--model", str(EXAMPLES)], "model_index.json"),
    ("text_to_image", ["--ratio", "0.5", "0.8"], "ratio=0.8"),
    ("text_to_image", ["--size", "128", "100"], "--size 100"),
    ("text_to_image", ["--seed", "-1"], "--seed -1"),
    ("image_to_image", ["--image", "/no/such.png"], "/no/such.png"),
    ("image_to_image", ["--image", __file__], __file__),
    ("image_to_image", ["--strength", "0.1", "--steps", "5"], "--strength 0.1"),  # of 5 steps none is left
    ("hires_fix", ["--size", "200"], "--size 200"),
    ("hires_fix", ["--strength", "0"], "--strength 0"),
    ("inpaint", ["--mask", "/no/such.png"], "/no/such.png"),
    ("sdxl", [], "--tiny"),
    ("sd3", ["--tiny", "--model", "a/b"], "--model"),
    ("sdxl", ["--model", str(EXAMPLES / "emoji_sd")], "SDXL"),
    ("sd3", ["--model", str(EXAMPLES / "emoji_sd")], "StableDiffusion3Pipeline"),
]


@pytest.mark.parametrize(("script", "options", "named"), REFUSED)
def test_invalid_option_is_an_error_of_one_line_before_generation(
    examples, monkeypatch, tmp_path, capsys, script, options, named
):
    monkeypatch.setattr(examples.comparison, "compare", lambda *args, **kwargs: pytest.fail("images were generated"))
    with pytest.raises(SystemExit) as stopped:
        getattr(examples, script).main([*options, "--output", str(tmp_path)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and "error: " in last and named in last


def test_xformers_without_a_gpu_is_an_error_of_one_line(examples, tmp_path, capsys):
    with cuda_attention.available(False), pytest.raises(SystemExit, match="2"):
        examples.text_to_image.main(["--xformers", "--output", str(tmp_path)])
    assert "error: --xformers needs a GPU" in capsys.readouterr().err.splitlines()[-1]


def test_images_are_read_as_serve_reads_them(examples, tmp_path):
    """16-bit gray is scaled, EXIF's rotation applied, and what is transparent is white."""
    Image.fromarray(np.full((8, 8), 0x8080, "uint16")).save(tmp_path / "gray.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # rotate by 90 degrees
    Image.new("RGB", (8, 4)).save(tmp_path / "turned.png", exif=turned)
    Image.new("RGBA", (8, 8), (9, 9, 9, 0)).save(tmp_path / "clear.png")
    images = (SimpleNamespace(image=tmp_path / f"{name}.png", threads=1) for name in ("gray", "turned", "clear"))
    gray, turned, clear = (examples.options.open_image(examples.options.make_parser(""), args) for args in images)
    assert (gray.mode, gray.getpixel((0, 0)), turned.size) == ("RGB", (128, 128, 128), (4, 8))
    assert clear.getpixel((0, 0)) == (255, 255, 255)


def test_ctrl_c_is_one_line(examples, capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        examples.options.run(main)
    assert capsys.readouterr().err == "interrupted: run the script again from the start\n"
    for script in EXAMPLES.glob("*.py"):
        text = script.read_text(encoding="utf-8")
        assert "__main__" not in text or "options.run(main)" in text or "except KeyboardInterrupt" in text, script


def test_xformers(examples, tmp_path):
    with cuda_attention.available():
        examples.text_to_image.main(small(FOX, "--xformers", "--ratio", "0.5", folder=tmp_path))
    assert json.loads((tmp_path / "text_to_image_64.json").read_text(encoding="utf-8"))["xformers"] is True


def test_runs_from_another_folder_and_quietly(tmp_path):
    command = [sys.executable, str(EXAMPLES / "sd3.py"), "--tiny", FOX, "--size", "64"]
    command += ["--steps", "1", "--ratio", "0.5", "--threads", "2"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "outputs" / "sd3_64.png").is_file() and "2 thread(s)" in ran.stdout
    assert "it/s" in ran.stderr  # the progress bar
    assert "WARNING" not in ran.stderr and "INFO" not in ran.stderr


def test_paddle_is_not_imported_before_the_threads_are_set():
    code = "import sys, text_to_image, image_to_image, inpaint, sdxl, sd3; sys.exit('paddle' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, check=True, timeout=60)
