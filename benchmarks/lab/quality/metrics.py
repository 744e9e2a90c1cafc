"""Measures of two images (SSIM) and of two sets of images (KID)."""

import numpy as np
from skimage.filters import gaussian
from skimage.metrics import structural_similarity

SUBSETS = 100  # pairs of subsets that KID compares
MAX_SUBSET = 1000  # images


def ssim(a: np.ndarray, b: np.ndarray) -> float:  # [H, W, 3] uint8 both, H and W at least 7
    """Structural similarity (Wang et al. 2004), 1 for equal images: in windows of 7×7 px, the mean over colours."""
    return float(structural_similarity(a, b, data_range=255, channel_axis=-1))


def blur(image: np.ndarray, sigma: float) -> np.ndarray:  # [H, W, 3] uint8 both
    """The image under a Gaussian blur of sigma px: a known loss that calibrates the measures."""
    values = gaussian(image, sigma, channel_axis=-1, preserve_range=True)
    return np.round(values).clip(0, 255).astype(np.uint8)


def kid(x: np.ndarray, y: np.ndarray) -> dict[str, float]:  # [N, D] and [M, D], N and M at least 2
    """Kernel distance between features of two sets: "mean" and "std" of `squared_mmd` over random pairs of subsets.

    A subset has half the members of the smaller set, at most MAX_SUBSET, so that subsets differ and "std" is
    meaningful. Equal arguments give equal values.

    Source: Bińkowski et al. 2018, arXiv:1801.01401 §4, there in Inception's features.
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    size = min(max(min(len(x), len(y)) // 2, 2), MAX_SUBSET)
    random = np.random.RandomState(0)
    values = [
        squared_mmd(*(members[random.choice(len(members), size, replace=False)] for members in (x, y)))
        for _ in range(SUBSETS)
    ]
    return {"mean": float(np.mean(values)), "std": float(np.std(values))}


def squared_mmd(x: np.ndarray, y: np.ndarray) -> float:  # [N, D] float64 both
    """The unbiased squared MMD under the kernel (x·y/D + 1)³.

    Its expected value is 0 for two samples of one distribution, whatever their size, so it can be negative.
    """
    n, width = x.shape

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a @ b.T / width + 1) ** 3

    within = sum(k.sum() - np.trace(k) for k in (kernel(x, x), kernel(y, y)))
    return float(within / (n * (n - 1)) - 2 * kernel(x, y).mean())
