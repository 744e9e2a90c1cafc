"""Metrics checked against closed forms, against loops that a reader can check, and for invariance."""

import numpy as np
import pytest
from golden.quality_inputs import noise, pair
from lab.quality import metrics
from lab.quality.metrics import blur, kid, squared_mmd, ssim

from ppdiffusers_tome.comparison.similarity import psnr


def normal(seed, count, width):
    return np.random.RandomState(seed).standard_normal((count, width))


def test_psnr():
    a = noise(0, 8, 9, 2)
    b = np.where(a > 127, a - 5, a + 5).astype(np.uint8)
    assert psnr(a, b) == pytest.approx(20 * np.log10(255 / 5))
    assert psnr(a, a) == float("inf")


def test_ssim():
    fox, shifted = pair("fox", 128, 128)
    assert ssim(fox, fox) == 1
    assert ssim(fox, shifted) == ssim(shifted, fox)
    assert -1 < ssim(fox, 255 - fox) < ssim(fox, shifted) < ssim(fox, blur(fox, 0.5)) < 1
    # Of two flat images only the term of the means remains: (2ab + c) / (a² + b² + c) with c = (0.01 · 255)².
    flat = [np.full((9, 11, 3), value, np.uint8) for value in (50, 100)]
    c = (0.01 * 255) ** 2
    assert ssim(*flat) == pytest.approx((2 * 50 * 100 + c) / (50**2 + 100**2 + c))


def test_blur():
    point = np.zeros((31, 31, 3), np.uint8)
    point[15, 15] = [255, 0, 128]
    blurred = blur(point, 2)
    assert blurred.dtype == np.uint8 and blurred.shape == point.shape
    assert blurred[15, 15].tolist() == [round(255 / (8 * np.pi)), 0, round(128 / (8 * np.pi))]  # 1 / (2πσ²)
    flat = np.full((9, 9, 3), 255, np.uint8)
    np.testing.assert_array_equal(blur(flat, 3), flat)


def mmd_by_loops(x, y):
    """The estimator as its authors write it, term by term."""
    n, width = x.shape

    def kernel(a, b):
        return (sum(p * q for p, q in zip(a, b, strict=True)) / width + 1) ** 3

    pairs = [(i, j) for i in range(n) for j in range(n)]
    within = sum(kernel(x[i], x[j]) + kernel(y[i], y[j]) for i, j in pairs if i != j) / (n * (n - 1))
    return within - 2 * sum(kernel(x[i], y[j]) for i, j in pairs) / n**2


def test_squared_mmd_equals_the_loops():
    x, y = normal(1, 5, 3), normal(2, 5, 3) + 0.5
    assert squared_mmd(x, y) == pytest.approx(mmd_by_loops(x, y))
    assert squared_mmd(x, y) == pytest.approx(squared_mmd(y, x))


@pytest.mark.parametrize(("members", "subset"), [((2, 9), 2), ((40, 30), 15), ((2100, 2200), 1000)])
def test_kid_compares_halves_of_the_smaller_set(monkeypatch, members, subset):
    monkeypatch.setattr(metrics, "squared_mmd", lambda x, y: len(x) + len(y) / 10)
    assert kid(normal(1, members[0], 3), normal(2, members[1], 3))["mean"] == pytest.approx(1.1 * subset)


def test_kid_grows_with_a_shift_and_repeats():
    x = normal(1, 100, 16)
    near, far = (kid(x, normal(2, 120, 16) + shift) for shift in (0.2, 0.8))
    assert 0 < near["mean"] < far["mean"] and near["std"] > 0
    assert kid(x, normal(2, 120, 16) + 0.2) == near
    large = [(normal(seed, 9, 4) + 100).astype(np.float32) for seed in (1, 2)]
    assert kid(*large) == kid(*(x.astype(np.float64) for x in large)), "computed in float64"
    all_members = kid(x[:2], x[2:4])  # subsets of all members, in some order
    assert all_members == {"mean": pytest.approx(squared_mmd(x[:2], x[2:4])), "std": pytest.approx(0, abs=1e-12)}
