"""The ControlNet example: its images and figures, edge distances, and the effect of the bundled ControlNet."""

import hashlib
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from PIL import Image
from ppdiffusers import ControlNetModel, StableDiffusionControlNetPipeline

from ppdiffusers_tome.evaluation.results import check_result, read_json

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
CONTROLNET = EXAMPLES / "emoji_sd" / "controlnet"
PROMPT = "a flat drawing of penguin"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def edges():
    return importlib.import_module("edges")


@pytest.fixture
def masks():
    rng = np.random.RandomState(0)
    return rng.rand(9, 13) < 0.2, rng.rand(9, 13) < 0.1


def brute_force_distances(edges, reference):
    pixels, targets = np.argwhere(edges), np.argwhere(reference)
    return np.sqrt(((pixels[:, None] - targets[None]) ** 2).sum(axis=2)).min(axis=1)


def test_distance_equals_brute_force_and_is_directed(edges, masks):
    a, b = masks
    np.testing.assert_allclose(edges.distances(a, b), brute_force_distances(a, b), atol=1e-5)
    assert edges.mean_distance(a, b) == pytest.approx(brute_force_distances(a, b).mean(), abs=1e-5)
    assert edges.mean_distance(b, a) == pytest.approx(brute_force_distances(b, a).mean(), abs=1e-5)
    assert edges.mean_distance(a, b) != edges.mean_distance(b, a)


def test_distance_of_equal_and_empty_edges(edges, masks):
    a, nothing = masks[0], np.zeros((9, 13), bool)
    assert edges.mean_distance(a, a) == 0
    assert edges.mean_distance(a, nothing) == pytest.approx(math.hypot(9, 13))
    assert math.isnan(edges.mean_distance(nothing, a))


def test_edges_and_their_outline(edges):
    image = np.full((64, 64, 3), 255, "uint8")
    image[8:56, 8:56] = (200, 30, 30)
    image[26:38, 26:38] = 255  # a white hole does not belong to the background
    mask, outline = edges.canny(image), edges.outline_region(image)
    assert mask.dtype == bool and mask.any()
    condition = np.asarray(edges.as_image(mask))
    assert condition.shape == (64, 64, 3) and np.array_equal(condition[..., 1] > 0, mask)
    square = np.zeros((64, 64), bool)
    square[20:44, 20:44] = True
    assert np.array_equal(mask & ~outline, mask & square)
    assert (mask & outline).sum() > (mask & ~outline).sum() > 0


@pytest.fixture
def control_pipe(pipe):
    controlnet = ControlNetModel.from_pretrained(str(CONTROLNET), paddle_dtype=paddle.float32)
    controlnet.eval()
    parts = {**pipe.components, "controlnet": controlnet}
    controlled = StableDiffusionControlNetPipeline(**parts, requires_safety_checker=False)
    controlled.set_progress_bar_config(disable=True)
    return controlled


def test_bundled_controlnet_follows_edges(edges, pipe, control_pipe):
    input_edges = edges.canny(Image.open(CONTROLNET / "penguin.png").convert("RGB"))
    noise = np.random.RandomState(0).standard_normal((1, 4, 32, 32)).astype("float32")
    settings = {"num_inference_steps": 6, "guidance_scale": 2.0, "latents": paddle.to_tensor(noise)}
    uncontrolled = pipe(PROMPT, height=128, width=128, **settings).images
    controlled = control_pipe(PROMPT, image=edges.as_image(input_edges), **settings).images
    without = edges.mean_distances(input_edges, uncontrolled)
    with_controlnet = edges.mean_distances(input_edges, controlled)
    for direction in ("input_to_output", "output_to_input"):
        assert with_controlnet[direction] < 0.7 * without[direction], direction


def test_runs_from_another_folder_and_writes_a_sheet(tmp_path):
    command = [sys.executable, str(EXAMPLES / "controlnet_canny.py"), PROMPT, "--size", "64", "--steps", "2"]
    command += ["--ratio", "0.5", "--plain-controlnet", "--threads", "1"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=240)
    assert ran.returncode == 0, ran.stderr
    with Image.open(tmp_path / "outputs" / "controlnet_canny_64.png") as sheet:
        sheet.load()
    side, gap, rows = 64, 4, ["input", "edges", "without", "plain", "0.5"]
    assert f"Rows {', '.join(rows)}:" in ran.stdout
    assert json.loads(sheet.text["merging"]) == {"controlnet": False}
    left, top = sheet.width - side - gap, sheet.height - len(rows) * (side + gap)
    assert 16 <= top <= 80, "the sheet has a different number of rows"
    cells = [sheet.crop((left, y, left + side, y + side)) for y in range(top, sheet.height, side + gap)]
    assert len({cell.tobytes() for cell in cells}) == len(rows)
    result = json.loads((tmp_path / "outputs" / "controlnet_canny_64.json").read_text(encoding="utf-8"))
    check_result(result, "comparison", "controlnet_canny_64.json")
    table = result["edge_distances_px"]
    assert list(table) == ["without", "plain", "0.5"]
    for label, directions in table.items():
        figures = " ".join(f"{value:.2f}" for value in directions.values())
        assert f"{label} {figures}" in " ".join(ran.stdout.split())
    assert [arm["arm"] for arm in result["arms"]] == ["plain", "0.5"]


@pytest.mark.parametrize(
    "option", [["--image", "/no/such.png"], ["--controlnet", "/no/folder"], ["--image", "white.png"]]
)
def test_invalid_option_is_an_error_that_names_it(option, tmp_path, monkeypatch, capsys):
    """Also an image without edges."""
    Image.new("RGB", (32, 32), "white").save(tmp_path / "white.png")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module("controlnet_canny").main(option)
    assert stopped.value.code == 2 and f"error: {option[0]} {option[1]}" in " ".join(capsys.readouterr().err.split())


def test_result_is_of_the_bundled_weights():
    weights = (CONTROLNET / "diffusion_paddle_model.safetensors").read_bytes()
    result = read_json(CONTROLNET / "edges.json")
    check_result(result, "comparison", "edges.json")
    assert result["weights"] == f"sha256 {hashlib.sha256(weights).hexdigest()[:12]}…"
