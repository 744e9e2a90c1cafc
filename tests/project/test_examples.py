"""The examples run in a folder of their own, with fewer steps: they write an image, and tokens merge meanwhile."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from conftest import tiny_pipeline
from PIL import Image
from serving_support import FakeEngine, serving
from zoo.parts import scheduler

from ppdiffusers_tome.inference import load_pipeline

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {  # px, of the image that each script writes
    "text_to_image": (256, 256),
    "controlnet": (128, 128),
    "inpainting": (128, 128),
    "image_to_image": (128, 128),
    "second_pass": (128, 128),
    "sdxl": (64, 64),
    "lora": (128, 128),
}
IN_OTHER_TESTS = {"sd3", "video", "export_and_run", "onnx_without_paddle", "serve_client"}
OF_OTHER_ENVIRONMENTS = {
    "with_optimum",
    "with_optimum_intel",
    "with_openvino_genai",
    "with_int8",
}  # test_diffusers_layout_loaders.py


def code_of(name, steps, size="128"):
    """An example with fewer steps than it has, and another size in place of 128 px."""
    code = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").replace("128", size)
    return re.sub(r'(num_inference_steps(?:=|": )|GUIDANCE_SCALE = .*?, )\d+', rf"\g<1>{steps}", code)


def run(name, folder, monkeypatch):
    """Run an example in this process, where all is imported; the variables that it leaves."""
    monkeypatch.chdir(folder)
    variables = {"__file__": str(EXAMPLES / f"{name}.py")}
    is_second = name == "second_pass"  # at whose strength none of 2 steps would run
    exec(code_of(name, 4, size="64") if is_second else code_of(name, 2), variables)
    return variables


def in_a_process(code, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def image_of(path, size):
    """The pixels of an image of this size, which must not be of one colour."""
    with Image.open(path) as image:
        assert image.size == size
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.std() > 5
    return pixels.astype(int)


def test_every_example_has_a_test():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(SIZES) | IN_OTHER_TESTS | OF_OTHER_ENVIRONMENTS


def of_text_to_image(variables, plans, printed):
    kept = re.findall(r" 64x64  keys and values (\d+) of 4096 +kv\n", printed)
    assert kept == ["512", "512", "2048"]
    assert not variables["pipe"].tome_summary().blocks, "it removes the merging at its end"


def of_second_pass(variables, plans, printed):
    assert {int(plan.tokens) for plan in plans} == {32 * 32}, "the first pass merges too"
    assert variables["small"].size == (64, 64) and not variables["second_pipe"].tome_summary().blocks


def of_controlnet(variables, plans, printed):
    summary = variables["pipe"].tome_summary(128, 128)
    assert {block.denoiser for block in summary.blocks} == {"unet", "controlnet"}


def of_lora(variables, plans, printed):
    paddle.seed(0)
    settings = {**variables["settings"], "cross_attention_kwargs": {"scale": 0.0}}
    without = np.asarray(variables["pipe"]("a 3d render of fox", **settings).images[0]).astype(int)
    assert np.abs(image_of("lora.png", (128, 128)) - without).mean() > 1


CHECKS = {
    "text_to_image": of_text_to_image,
    "second_pass": of_second_pass,
    "controlnet": of_controlnet,
    "lora": of_lora,
}


@pytest.mark.parametrize("name", SIZES)
def test_an_example_merges_and_writes_its_image(name, tmp_path, monkeypatch, plans, capsys):
    variables = run(name, tmp_path, monkeypatch)
    assert plans, "nothing merged"
    image_of(tmp_path / f"{name}.png", SIZES[name])
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.png"]
    printed = capsys.readouterr().out
    assert f"wrote {name}.png\n" in printed
    CHECKS.get(name, lambda *_: None)(variables, plans, printed)


def test_video(tmp_path, monkeypatch, plans, capsys):
    run("video", tmp_path, monkeypatch)
    assert "wrote video.gif\n" in capsys.readouterr().out
    with Image.open(tmp_path / "video.gif") as video:
        assert (video.size, video.n_frames) == ((64, 64), 4)
    assert plans


def test_sd3_without_the_attention_for_gpus(tmp_path):
    """In a process of its own, as a user runs it: here the tests have made that attention available."""
    done = in_a_process(f"import runpy; runpy.run_path({str(EXAMPLES / 'sd3.py')!r})", tmp_path)
    assert done.returncode == 0, done.stderr
    image_of(tmp_path / "sd3.png", (64, 64))
    assert "transformer.transformer_blocks.0      1  16x16  keys and values 128 of 256  kv" in done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which export_and_run.py has run, of 32 px, with a tiny model in place of the bundled one."""
    folder = tmp_path_factory.mktemp("export_and_run")
    pipe = tiny_pipeline(scheduler=scheduler(prediction_type="v_prediction"))
    pipe.save_pretrained(str(folder / "emoji_sd"))
    with pytest.MonkeyPatch.context() as patch:
        export_and_run(folder, patch)
    return folder


def export_and_run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(code_of("export_and_run", 2, size="32"), {"__file__": str(folder / "export_and_run.py")})


def test_export_and_run(folder, monkeypatch):
    """A second run uses the export of the first."""
    first, manifest = image_of(folder / "export_and_run.png", (32, 32)), folder / "build" / "exported" / "tome.json"
    assert [merging["ratio"] for merging in json.loads(manifest.read_text())["merging"]] == [0.75]
    written = manifest.stat().st_mtime_ns
    export_and_run(folder, monkeypatch)
    assert np.array_equal(image_of(folder / "export_and_run.png", (32, 32)), first)
    assert manifest.stat().st_mtime_ns == written


def test_onnx_without_paddle(folder, tmp_path):
    """In a process that cannot import Paddle; the image is that of the pipeline from the same latents."""
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "onnx").symlink_to(folder / "build" / "exported")
    blocked = "import sys; sys.modules.update(dict.fromkeys(['paddle', 'ppdiffusers', 'ppdiffusers_tome']))"
    done = in_a_process(f"{blocked}\n{code_of('onnx_without_paddle', 2)}", tmp_path)
    assert done.returncode == 0, done.stderr
    pipe = load_pipeline(folder / "build" / "exported", runtime="onnxruntime", threads=1)
    pipe.set_progress_bar_config(disable=True)
    latents = np.random.RandomState(0).standard_normal((1, 4, 16, 16)).astype("float32")
    settings = {"height": 32, "width": 32, "num_inference_steps": 2, "guidance_scale": 2.0}
    expected = pipe("a 3d render of fox", latents=paddle.to_tensor(latents), **settings).images[0]
    pixels = image_of(tmp_path / "onnx_without_paddle.png", (32, 32))
    assert np.abs(pixels - np.asarray(expected)).max() <= 1


def test_onnx_without_paddle_rejects_other_schedulers(onnx_folder, tmp_path, monkeypatch):
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "onnx").symlink_to(onnx_folder)
    with pytest.raises(SystemExit, match="DDIMScheduler"):
        run("onnx_without_paddle", tmp_path, monkeypatch)


@pytest.mark.parametrize("ratio", ["0.5", "0.3"])
def test_serve_client(ratio, tmp_path, monkeypatch, capsys):
    """With the port and a ratio of this server; and with one that it lacks, which its answer explains."""
    monkeypatch.chdir(tmp_path)
    code = (EXAMPLES / "serve_client.py").read_text(encoding="utf-8")
    code = code.replace('tome_ratio": 0.75', f'tome_ratio": {ratio}')
    with serving(FakeEngine()) as server:
        code = code.replace("http://127.0.0.1:8000", server.url)
        if ratio == "0.3":
            with pytest.raises(SystemExit, match=r"422: .*tome_ratio"):
                exec(code, {})
            return
        exec(code, {})
        (job,) = server.engine.calls[0]
    assert (job.prompt, job.seed, job.ratio) == ("a 3d render of fox on red bricks", 7, 0.5)
    assert capsys.readouterr().out.endswith("wrote serve_client.png\n")
    assert Image.open(tmp_path / "serve_client.png").getpixel((0, 0)) == (7, 0, 0)


@pytest.mark.parametrize("name", ["sdxl", "sd3", "video"])
def test_tiny_pipelines_are_those_of_their_script(name, tmp_path):
    script = runpy.run_path(str(EXAMPLES / "tiny" / "make.py"))
    built = script[name](script["write_tokenizer"](tmp_path))
    folder = EXAMPLES / "tiny" / name
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 300_000
    absent = {"text_encoder_3": None, "tokenizer_3": None} if name == "sd3" else {}
    pipe = type(built).from_pretrained(str(folder), paddle_dtype=paddle.float32, **absent)
    for component, model in built.components.items():
        if isinstance(model, paddle.nn.Layer):
            shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
            assert shapes == {key: list(value.shape) for key, value in pipe.components[component].state_dict().items()}
