"""The bundled models: their files, and the edges that the ControlNet follows, with the distances that measure it."""

import hashlib
import importlib
import math
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
    monkeypatch.syspath_prepend(EXAMPLES / "emoji_sd" / "training")


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


def test_result_is_of_the_bundled_weights():
    weights = (CONTROLNET / "diffusion_paddle_model.safetensors").read_bytes()
    result = read_json(CONTROLNET / "edges.json")
    check_result(result, "edges", "edges.json")
    assert result["weights"] == f"sha256 {hashlib.sha256(weights).hexdigest()[:12]}…"
