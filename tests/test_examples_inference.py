"""The examples for an exported folder and for a client, run like a user runs them: a tiny export, a fake engine."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from conftest import tiny_pipeline
from PIL import Image
from serving_support import FakeEngine, serving

from ppdiffusers_tome.inference import load_pipeline
from ppdiffusers_tome.serving.app_config import AppConfig

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Import a script by its name; its changes of the environment are undone."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    return importlib.import_module


def test_exported_and_eager_images_on_one_sheet(example, exported_folder, tmp_path, capsys):
    tiny_pipeline().save_pretrained(str(tmp_path / "eager"))
    options = ["a fox", "--eager", str(tmp_path / "eager"), "--steps", "2", "--output", str(tmp_path)]
    example("export_and_run").main([str(exported_folder), *options])
    printed = capsys.readouterr().out
    assert "ratio 0.5, 2 steps" in printed and "as fast as eager" in printed
    assert int(printed.rsplit("a pixel: ")[1].split()[0]) <= 1
    sheet = Image.open(tmp_path / "export_and_run_32x32.png")
    rows = [np.asarray(sheet)[-36 * (2 - row) :][:32, -36:-4] for row in range(2)]
    assert np.abs(rows[0].astype(int) - rows[1]).max() <= 1 and np.ptp(rows[0]) > 0
    assert sheet.text["ratio"] == "0.5"


def test_exported_images_only(example, exported_folder, tmp_path, capsys):
    options = ["a fox", "--ratio", "0", "--steps", "1", "--threads", "1", "--output", str(tmp_path)]
    example("export_and_run").main([str(exported_folder), *options])
    printed = capsys.readouterr().out
    assert "ratio 0, 1 steps" in printed and "eager" not in printed


def test_invalid_folder_ends_the_script(example, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        example("export_and_run").main([str(tmp_path)])
    assert ended.value.code == 2 and "not an exported pipeline" in capsys.readouterr().err


@pytest.mark.parametrize("image", [[], ["--image", str(EXAMPLES / "emoji_sd" / "fox.png")]])
def test_client_writes_an_image(example, image, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PPDIFFUSERS_TOME_API_KEY", "secret")
    output = tmp_path / "images"
    with serving(FakeEngine(), config=AppConfig(api_key="secret")) as server:
        options = ["a fox", "--url", server.url, "--seed", "7", "--ratio", "0.5", "--steps", "2"]
        assert example("serve_client").main([*options, *image, "--output", str(output)]) == 0
        (job,) = server.engine.calls[0]
    assert (job.prompt, job.seed, job.ratio, job.steps) == ("a fox", 7, 0.5, 2)
    assert (job.image is not None) == bool(image)
    assert Image.open(output / "served.png").getpixel((0, 0)) == (7, 0, 0)
    assert str(output / "served.png") in capsys.readouterr().out


def test_client_shows_the_error(example, tmp_path, capsys):
    with serving(FakeEngine()) as server:
        options = ["a fox", "--url", server.url, "--ratio", "0.3", "--output", str(tmp_path)]
        assert example("serve_client").main(options) == 1
    assert "422" in (error := capsys.readouterr().err) and "tome_ratio" in error
    assert not (tmp_path / "served.png").exists()


def test_client_without_a_server_or_an_image_is_one_line(example, tmp_path, capsys):
    assert example("serve_client").main(["a fox", "--url", "http://127.0.0.1:9", "--output", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("http://127.0.0.1:9 has no answer (ConnectionError): start") and error.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        example("serve_client").main(["a fox", "--image", "/no/such.png"])
    assert "error: --image /no/such.png: No such file" in capsys.readouterr().err


def test_onnx_without_paddle_checks_its_arguments(
    example, onnx_folder, exported_folder, tmp_path, monkeypatch, capsys
):
    module = example("onnx_without_paddle")
    for folder, output, message in (
        (onnx_folder, tmp_path / "new", "new is not allowed: it must be a folder that exists, or end in .png"),
        (exported_folder, tmp_path, "has no ONNX programs"),
    ):
        with pytest.raises(SystemExit, match="2"):
            module.main([str(folder), "a fox", "--output", str(output)])
        assert message in capsys.readouterr().err
    monkeypatch.setattr(module, "generate", lambda *_: np.zeros((32, 40, 3)))
    module.main([str(onnx_folder), "a fox", "--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["onnx_without_paddle.png"]


def test_onnx_without_paddle(example, onnx_folder, tmp_path):
    """In a process that cannot import Paddle; and the image of a pipeline from the same latents."""
    output = tmp_path / "image.png"
    blocked = "import sys; sys.modules.update(dict.fromkeys(['paddle', 'ppdiffusers', 'ppdiffusers_tome']))"
    script = (
        f"{blocked}; sys.path.insert(0, {str(EXAMPLES)!r}); import onnx_without_paddle; onnx_without_paddle.main()"
    )
    options = [str(onnx_folder), "a fox", "--steps", "2", "--threads", "1", "--output", str(output)]
    subprocess.run([sys.executable, "-c", script, *options], check=True, timeout=120)
    with Image.open(output) as written:
        assert written.size == (40, 32)
    module = example("onnx_without_paddle")
    noise = np.random.RandomState(0).standard_normal([1, 4, 16, 20]).astype("float32")
    pipe = load_pipeline(onnx_folder, runtime="onnxruntime", threads=1)
    pipe.set_progress_bar_config(disable=True)
    settings = {"num_inference_steps": 2, "guidance_scale": 2.0, "output_type": "np", "height": 32, "width": 40}
    expected = pipe("A fox", negative_prompt="blue", latents=paddle.to_tensor(noise), **settings).images[0]
    actual = module.generate(onnx_folder, "A fox", "blue", noise, 0.5, 2, 2.0, threads=1)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert np.abs(module.generate(onnx_folder, "A fox", "blue", noise, 0, 2, 2.0, threads=1) - actual).max() > 1e-3
