"""Metrics checked against closed forms, against loops that a reader can check, and for invariance."""

import sys
import types

import numpy as np
import pytest
from golden.quality_inputs import noise, pair

from ppdiffusers_tome import ToMeConfigError, ToMeError
from ppdiffusers_tome.evaluation.quality.metrics import blur, inception_fid, kid, psnr, ssim


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


def test_only_pairs_of_images():
    image = np.zeros((8, 8, 3), np.uint8)
    for metric in (psnr, ssim):
        with pytest.raises(ToMeConfigError, match=r"a must be uint8 \[H, W, 3\], not float64"):
            metric(image.astype(float), image)
        with pytest.raises(ToMeConfigError, match="one shape"):
            metric(image, image[1:])
    with pytest.raises(ToMeConfigError, match="6×8 px: SSIM needs 7"):
        ssim(image[2:], image[2:])


def mmd_by_loops(x, y):
    """The estimator as its authors write it, term by term."""
    n, width = x.shape

    def kernel(a, b):
        return (sum(p * q for p, q in zip(a, b, strict=True)) / width + 1) ** 3

    pairs = [(i, j) for i in range(n) for j in range(n)]
    within = sum(kernel(x[i], x[j]) + kernel(y[i], y[j]) for i, j in pairs if i != j) / (n * (n - 1))
    return within - 2 * sum(kernel(x[i], y[j]) for i, j in pairs) / n**2


def test_kid_equals_the_loops():
    x, y = normal(1, 5, 3), normal(2, 5, 3) + 0.5
    mean, std = kid(x, y, subsets=3, size=5)  # subsets of all members, each in another order
    assert mean == pytest.approx(mmd_by_loops(x, y))
    assert std == pytest.approx(0, abs=1e-12)


def test_kid_is_unbiased():
    """Over many pairs of samples of one distribution its mean is 0, within four standard errors."""
    values = [kid(normal(2 * i, 8, 4), normal(2 * i + 1, 8, 4), subsets=1, size=8).mean for i in range(800)]
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(len(values))
    assert min(values) < 0 < max(values)


def test_kid_grows_with_a_shift_and_is_symmetric():
    x = normal(1, 100, 16)
    near, far = (kid(x, normal(2, 120, 16) + shift) for shift in (0.2, 0.8))
    assert 0 < near.mean < far.mean
    assert near.std > 0
    y = normal(2, 100, 16) + 0.2
    assert kid(x, y, size=100, subsets=1).mean == pytest.approx(kid(y, x, size=100, subsets=1).mean)


def test_kid_repeats_by_its_seed():
    x, y = normal(1, 40, 6), normal(2, 30, 6)
    assert kid(x, y) == kid(x, y, seed=0) == kid(x, y, size=15) != kid(x, y, seed=1)


def test_kid_computes_in_float64():
    x, y = (normal(seed, 9, 4).astype(np.float32) + 100 for seed in (1, 2))
    assert kid(x, y) == kid(x.astype(np.float64), y.astype(np.float64))


@pytest.mark.parametrize(("x", "y"), [((4, 5), (4, 6)), ((4,), (4,)), ((1, 5), (4, 5)), ((0, 5), (0, 5))])
def test_kid_refuses_sets_that_do_not_match(x, y):
    with pytest.raises(ToMeConfigError, match=r"\[N, D\] and \[M, D\]"):
        kid(np.zeros(x), np.zeros(y))


def test_kid_refuses_subsets_out_of_range():
    x = normal(1, 9, 3)
    for size in (1, 10):
        with pytest.raises(ToMeConfigError, match=f"size={size}.*2 to 9"):
            kid(x, x, size=size)
    with pytest.raises(ToMeConfigError, match="subsets=0"):
        kid(x, x, subsets=0)


# FID: only the call, because its package is not installed here
def test_fid_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(ToMeError, match="pip install torch-fidelity"):
        inception_fid(tmp_path, tmp_path)
    with pytest.raises(ToMeConfigError, match="no-such is not a folder"):
        inception_fid(tmp_path, tmp_path / "no-such")


def test_fid_calls_torch_fidelity(tmp_path, monkeypatch):
    options = {}
    fidelity, torch = types.ModuleType("torch_fidelity"), types.ModuleType("torch")
    fidelity.calculate_metrics = lambda **others: options.update(others) or {"frechet_inception_distance": 3}
    torch.cuda = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch_fidelity", fidelity)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert inception_fid(tmp_path, tmp_path) == 3
    assert options == {"input1": str(tmp_path), "input2": str(tmp_path), "fid": True, "cuda": False, "verbose": False}
