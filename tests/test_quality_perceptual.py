"""ST-LPIPS in Paddle computes what the PyTorch package does: recorded, and live where PyTorch is installed."""

from pathlib import Path

import numpy as np
import pytest
from golden.quality_inputs import PAIRS, noise, pair

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.evaluation.quality import perceptual
from ppdiffusers_tome.evaluation.quality.distances import blurred
from ppdiffusers_tome.evaluation.quality.perceptual import SMALLEST, ShiftTolerantLPIPS
from ppdiffusers_tome.evaluation.quality.torch_files import MissingWeightsError

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture(scope="module")
def measure():
    return ShiftTolerantLPIPS()


def distance(measure, a, b):
    return float(measure.distance(a[None], b[None])[0])


@pytest.mark.parametrize(("name", "height", "width"), PAIRS, ids=[name for name, *_ in PAIRS])
def test_it_is_that_of_pytorch(measure, name, height, width):
    with np.load(GOLDEN / "quality.npz") as golden:
        assert distance(measure, *pair(name, height, width)) == pytest.approx(
            float(golden[f"stlpips/{name}"]), abs=2e-6
        )


def test_live_it_is_that_of_pytorch(measure, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.syspath_prepend(GOLDEN)
    from make_quality_golden import st_lpips

    live = st_lpips()
    for name, height, width in PAIRS:
        assert distance(measure, *pair(name, height, width)) == pytest.approx(float(live[name]), abs=2e-6)


def test_what_a_distance_is(measure):
    fox, shifted = pair("fox", 128, 128)
    assert distance(measure, fox, fox) == 0
    assert distance(measure, fox, shifted) == pytest.approx(distance(measure, shifted, fox), rel=1e-5)
    losses = [distance(measure, fox, blurred(fox, sigma)) for sigma in (0.5, 1, 2, 4)]
    assert losses[0] > 0 and losses == sorted(losses)


def test_it_forgives_a_shift_where_a_mean_of_squares_does_not(measure):
    """A pixel's shift is to the eye less than a blur of 2 px, and to PSNR more."""
    fox = pair("fox", 128, 128)[0]
    shifted, soft = np.roll(fox, 1, axis=1), blurred(fox, 2)
    assert distance(measure, fox, shifted) < distance(measure, fox, soft) / 4


def test_pairs_in_any_batches(measure):
    a = np.stack([noise(seed, 33, 47, 5) for seed in range(3)])
    b = np.stack([noise(seed + 9, 33, 47, 5) for seed in range(3)])
    together = measure.distance(a, b)
    assert together.shape == (3,) and len(set(together.round(5))) == 3
    np.testing.assert_allclose(measure.distance(a, b, batch=2), together, rtol=1e-5)
    np.testing.assert_allclose([distance(measure, *each) for each in zip(a, b, strict=True)], together, rtol=1e-5)
    assert measure.distance(a[:0], b[:0]).shape == (0,)


@pytest.mark.parametrize(("height", "width"), [(SMALLEST - 1, 64), (64, SMALLEST - 1)])
def test_pictures_that_are_too_small(measure, height, width):
    small = np.zeros((1, height, width, 3), np.uint8)
    with pytest.raises(ToMeConfigError, match=f"{height}×{width} px: ST-LPIPS needs 21"):
        measure.distance(small, small)


def test_only_pairs_of_pictures(measure):
    good = np.zeros((1, 32, 32, 3), np.uint8)
    with pytest.raises(ToMeConfigError, match=r"b is uint8 \[B, H, W, 3\], not float32"):
        measure.distance(good, good.astype(np.float32))
    with pytest.raises(ToMeConfigError, match=r"a is uint8 \[B, H, W, 3\]"):
        measure.distance(good[0], good[0])
    with pytest.raises(ToMeConfigError, match="not one shape"):
        measure.distance(good, good[:, :, 1:])


def test_without_its_package(monkeypatch):
    monkeypatch.setattr(perceptual, "PACKAGE", "no_such_package")
    with pytest.raises(MissingWeightsError, match="no_such_package is not installed"):
        ShiftTolerantLPIPS()


def test_version():
    assert ShiftTolerantLPIPS.version() == "0.0.2"
