"""The bundled ControlNet follows edges."""

import importlib
from pathlib import Path

import cv2
import numpy as np
import paddle
import pytest
from PIL import Image
from ppdiffusers import ControlNetModel, StableDiffusionControlNetPipeline

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CONTROLNET = EXAMPLES / "emoji_sd" / "controlnet"
PROMPT = "a flat drawing of penguin"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "emoji_sd" / "training")


@pytest.fixture
def edges():
    return importlib.import_module("edges")


def mean_distance(edges, reference):
    """Mean distance in px from a pixel of a mask to the nearest of another."""
    background = np.where(reference, 0, 255).astype("uint8")
    return cv2.distanceTransform(background, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[edges].mean()


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
    settings = {"num_inference_steps": 4, "guidance_scale": 2.0, "latents": paddle.to_tensor(noise)}
    uncontrolled = pipe(PROMPT, height=128, width=128, **settings).images
    controlled = control_pipe(PROMPT, image=edges.as_image(input_edges), **settings).images
    without, followed = (edges.canny(images[0]) for images in (uncontrolled, controlled))
    assert mean_distance(input_edges, followed) < 0.7 * mean_distance(input_edges, without)
    assert mean_distance(followed, input_edges) < 0.7 * mean_distance(without, input_edges)
