"""EfficientNet-Lite0 in Paddle computes what the PyTorch package does: recorded, and live where PyTorch is."""

from pathlib import Path

import numpy as np
import pytest
from golden.quality_inputs import network_inputs, noise
from PIL import Image
from skimage import data

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.evaluation.quality import efficientnet
from ppdiffusers_tome.evaluation.quality.efficientnet import EfficientNetLite0
from ppdiffusers_tome.evaluation.quality.torch_files import MissingWeightsError

GOLDEN = Path(__file__).with_name("golden")
CLOSE = {"rtol": 0, "atol": 5e-5}  # of values up to 8; float32 through 17 blocks differs by 6e-6


@pytest.fixture(scope="module")
def network():
    return EfficientNetLite0()


def test_it_is_that_of_pytorch(network):
    with np.load(GOLDEN / "quality.npz") as golden:
        features, logits = golden["efficientnet/features"], golden["efficientnet/logits"]
    np.testing.assert_allclose(network.features(network_inputs()), features, **CLOSE)
    np.testing.assert_allclose(network.logits(network_inputs()), logits, **CLOSE)


def test_live_it_is_that_of_pytorch(network, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("efficientnet_lite_pytorch", reason="efficientnet-lite-pytorch is not installed")
    monkeypatch.syspath_prepend(GOLDEN)
    from make_quality_golden import efficientnet as of_torch

    live = of_torch()
    np.testing.assert_allclose(network.features(network_inputs()), live["features"], **CLOSE)
    np.testing.assert_allclose(network.logits(network_inputs()), live["logits"], **CLOSE)


def test_it_knows_photographs(network):
    """ImageNet's classes: 285 Egyptian cat, 967 espresso."""
    assert network.logits(data.chelsea()[None]).argmax() == 285
    assert network.logits(data.coffee()[None]).argmax() == 967


def test_pictures_of_any_size_in_any_batches(network):
    pictures = np.stack([noise(seed, 40, 57, 4) for seed in range(3)])
    together = network.features(pictures)
    assert together.shape == (3, 1280) and together.dtype == np.float32
    np.testing.assert_allclose(network.features(pictures, batch=2), together, atol=1e-5)
    resized = [np.asarray(Image.fromarray(p).resize((224, 224), Image.Resampling.BICUBIC)) for p in pictures]
    np.testing.assert_allclose(network.features(np.stack(resized)), together, atol=1e-5)
    assert network.features(pictures[:0]).shape == (0, 1280)
    assert network.logits(pictures[:0]).shape == (0, 1000)


def test_it_leaves_the_picture_alone_and_has_no_memory(network):
    pictures = network_inputs()[:1]
    before, first = pictures.copy(), network.features(pictures)
    np.testing.assert_array_equal(network.features(pictures), first)
    np.testing.assert_array_equal(pictures, before)


@pytest.mark.parametrize(
    "pictures", [np.zeros((8, 8, 3), np.uint8), np.zeros((1, 3, 8, 8), np.uint8), np.zeros((1, 8, 8, 3), np.float32)]
)
def test_only_batches_of_pictures(network, pictures):
    with pytest.raises(ToMeConfigError, match=r"uint8 \[B, H, W, 3\]"):
        network.features(pictures)


def test_weights_that_do_not_fit(monkeypatch):
    whole = efficientnet.read_state_dict
    monkeypatch.setattr(efficientnet, "read_state_dict", lambda path: {**whole(path), "_fc.bias": np.zeros(3, "f4")})
    with pytest.raises(ToMeConfigError, match=r"do not fit: bias \(3,\) for classifier.bias"):
        EfficientNetLite0()


def test_without_its_package(monkeypatch):
    monkeypatch.setattr(efficientnet, "PACKAGE", "no_such_package")
    with pytest.raises(MissingWeightsError, match="no_such_package is not installed"):
        EfficientNetLite0()


def test_version():
    assert EfficientNetLite0.version() == "0.1.0"
