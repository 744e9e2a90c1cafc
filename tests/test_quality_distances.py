"""Distances held to closed forms, to loops that a reader can check, and to what they must not depend on."""

import sys
import types

import numpy as np
import pytest
from golden.quality_inputs import noise, pair
from scipy.linalg import sqrtm

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.evaluation.quality.distances import (
    KID,
    MissingInceptionError,
    blurred,
    frechet,
    inception_fid,
    kid,
    psnr,
    ssim,
)


def normal(seed, count, width, spread=1.0):
    return np.random.RandomState(seed).standard_normal((count, width)) * spread


# pairs of pictures
def test_psnr():
    a = noise(0, 8, 9, 2)
    b = np.where(a > 127, a - 5, a + 5).astype(np.uint8)
    assert psnr(a, b) == pytest.approx(20 * np.log10(255 / 5))
    assert psnr(a, a) == float("inf")


def test_ssim():
    fox, shifted = pair("fox", 128, 128)
    assert ssim(fox, fox) == 1
    assert ssim(fox, shifted) == ssim(shifted, fox)
    assert -1 < ssim(fox, 255 - fox) < ssim(fox, shifted) < ssim(fox, blurred(fox, 0.5)) < 1
    # two flat pictures: only the term of the means is left, (2ab + c) / (a² + b² + c) with c = (0.01 · 255)²
    flat = [np.full((9, 11, 3), value, np.uint8) for value in (50, 100)]
    c = (0.01 * 255) ** 2
    assert ssim(*flat) == pytest.approx((2 * 50 * 100 + c) / (50**2 + 100**2 + c))


def test_blur():
    point = np.zeros((31, 31, 3), np.uint8)
    point[15, 15] = [255, 0, 128]
    soft = blurred(point, 2)
    assert soft.dtype == np.uint8 and soft.shape == point.shape
    assert soft[15, 15].tolist() == [round(255 / (8 * np.pi)), 0, round(128 / (8 * np.pi))]  # 1 / (2πσ²) of it
    flat = np.full((9, 9, 3), 255, np.uint8)
    np.testing.assert_array_equal(blurred(flat, 3), flat)


def test_only_pairs_of_pictures():
    good = np.zeros((8, 8, 3), np.uint8)
    for measure in (psnr, ssim):
        with pytest.raises(ToMeConfigError, match=r"a is uint8 \[H, W, 3\], not float64"):
            measure(good.astype(float), good)
        with pytest.raises(ToMeConfigError, match="of one shape"):
            measure(good, good[1:])
    with pytest.raises(ToMeConfigError, match="6×8 px: SSIM needs 7"):
        ssim(good[2:], good[2:])


# sets of features
def loops_of_mmd(x, y):
    """The estimator as its authors write it, term by term."""
    n, width = x.shape

    def kernel(a, b):
        return (sum(p * q for p, q in zip(a, b, strict=True)) / width + 1) ** 3

    pairs = [(i, j) for i in range(n) for j in range(n)]
    within = sum(kernel(x[i], x[j]) + kernel(y[i], y[j]) for i, j in pairs if i != j) / (n * (n - 1))
    return within - 2 * sum(kernel(x[i], y[j]) for i, j in pairs) / n**2


def test_kid_is_the_loops():
    x, y = normal(1, 5, 3), normal(2, 5, 3) + 0.5
    found = kid(x, y, subsets=3, size=5)  # subsets of everything: each in another order
    assert found.mean == pytest.approx(loops_of_mmd(x, y))
    assert found.std == pytest.approx(0, abs=1e-12)


def test_kid_is_unbiased():
    """Over many pairs of samples of one distribution its mean is 0, within four standard errors."""
    values = [kid(normal(2 * i, 8, 4), normal(2 * i + 1, 8, 4), subsets=1, size=8).mean for i in range(800)]
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(len(values))
    assert min(values) < 0 < max(values)


def test_kid_sees_a_shift_and_its_direction_does_not_matter():
    x = normal(1, 100, 16)
    near, far = (kid(x, normal(2, 120, 16) + shift) for shift in (0.2, 0.8))
    assert 0 < near.mean < far.mean
    assert near.std > 0
    y = normal(2, 100, 16) + 0.2
    assert kid(x, y, size=100, subsets=1).mean == pytest.approx(kid(y, x, size=100, subsets=1).mean)


def test_kid_repeats_by_its_seed():
    x, y = normal(1, 40, 6), normal(2, 30, 6)
    assert kid(x, y) == kid(x, y, seed=0) == kid(x, y, size=15) != kid(x, y, seed=1)
    assert isinstance(kid(x, y), KID)


def test_frechet_of_gaussians_with_a_known_distance():
    """Samples with exact moments: what is whitened has covariance 1, what is then scaled the scale's square."""
    d = 7
    white = np.linalg.qr(normal(0, 60, d) - normal(0, 60, d).mean(axis=0))[0] * np.sqrt(59)
    shift, scale = np.arange(d) / 3, np.arange(1, d + 1) / 2
    assert frechet(white, white + shift) == pytest.approx((shift**2).sum())
    assert frechet(white, white * scale) == pytest.approx(((scale - 1) ** 2).sum())
    # rotated together they are as far apart; rotated alone, covariances no longer commute
    turn = np.linalg.qr(normal(3, d, d))[0]
    assert frechet(white @ turn, (white * scale) @ turn) == pytest.approx(((scale - 1) ** 2).sum())


@pytest.mark.parametrize(("n", "m", "d"), [(40, 50, 7), (200, 30, 11), (13, 300, 12)])
def test_frechet_is_the_formula(n, m, d):
    x, y = normal(1, n, d) @ normal(2, d, d), normal(3, m, d) @ normal(4, d, d) + 1
    sigma_x, sigma_y = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    moved = ((x.mean(0) - y.mean(0)) ** 2).sum()
    formula = moved + np.trace(sigma_x + sigma_y - 2 * sqrtm(sigma_x @ sigma_y).real)
    assert frechet(x, y) == pytest.approx(formula, rel=1e-6)


def test_frechet_without_full_rank():
    """Fewer members than directions: finite, 0 to itself, symmetric."""
    x, y = normal(1, 6, 50), normal(2, 9, 50)
    assert frechet(x, x) == pytest.approx(0, abs=1e-10) and frechet(x, x) >= 0
    assert frechet(x, y) == pytest.approx(frechet(y, x)) and frechet(x, y) > 1
    # all in one line and equally large: covariances of rank 1 along one axis, so |√Σx − √Σy|² is the whole of it
    line = np.zeros((4, 5))
    line[:, 0] = [-1, 1, -1, 1]
    assert frechet(line, 3 * line) == pytest.approx(4 * 4 / 3)  # (3 − 1)² times the variance, 4/3


def test_float32_features_are_summed_in_float64():
    x = (normal(1, 30, 8) + 1000).astype(np.float32)
    assert frechet(x, x + np.float32(1)) == pytest.approx(8, rel=1e-6)
    assert x.dtype == np.float32


@pytest.mark.parametrize("measure", [kid, frechet])
@pytest.mark.parametrize(("x", "y"), [((4, 5), (4, 6)), ((4,), (4,)), ((1, 5), (4, 5)), ((0, 5), (0, 5))])
def test_sets_that_do_not_match(measure, x, y):
    with pytest.raises(ToMeConfigError, match=r"\[N, D\] and \[M, D\]"):
        measure(np.zeros(x), np.zeros(y))


def test_subsets_out_of_range():
    x = normal(1, 9, 3)
    for size in (1, 10):
        with pytest.raises(ToMeConfigError, match=f"size={size}.*2 to 9"):
            kid(x, x, size=size)
    with pytest.raises(ToMeConfigError, match="subsets=0"):
        kid(x, x, subsets=0)


# FID proper: only that the call is right, for its package is not installed here
def test_inception_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(MissingInceptionError, match="pip install torch-fidelity"):
        inception_fid(tmp_path, tmp_path)
    with pytest.raises(ToMeConfigError, match="no-such is not a folder"):
        inception_fid(tmp_path, tmp_path / "no-such")


def test_inception_asks_for_fid(tmp_path, monkeypatch):
    asked = {}
    fidelity, torch = types.ModuleType("torch_fidelity"), types.ModuleType("torch")
    fidelity.calculate_metrics = lambda **options: asked.update(options) or {"frechet_inception_distance": 3}
    torch.cuda = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch_fidelity", fidelity)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert inception_fid(tmp_path, tmp_path) == 3
    assert asked == {"input1": str(tmp_path), "input2": str(tmp_path), "fid": True, "cuda": False, "verbose": False}
