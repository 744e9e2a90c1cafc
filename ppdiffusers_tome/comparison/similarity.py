"""How similar two images are: PSNR and SSIM."""

import math

import numpy as np

# The window of SSIM: a Gaussian of 1.5 px, cut off at 3.5 times that.
RADIUS = 5
_weights = np.exp(-0.5 * (np.arange(-RADIUS, RADIUS + 1) / 1.5) ** 2)
WINDOW = _weights / _weights.sum()
C1, C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


def psnr(a: np.ndarray, b: np.ndarray) -> float:  # [H, W, 3] uint8 both
    """Peak signal-to-noise ratio in dB, higher is closer; infinite for equal images."""
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return 10 * math.log10(255**2 / error) if error else math.inf


def ssim(a: np.ndarray, b: np.ndarray) -> float:  # [H, W, 3] uint8 both, H and W at least 11
    """Structural similarity, 1 for equal images: the mean over pixels and colours, without a border of 5 px.

    Source: Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity". It is
    scikit-image's with gaussian_weights=True, sigma=1.5, use_sample_covariance=False.
    """
    x, y = a.astype(np.float64), b.astype(np.float64)
    mean_x, mean_y = _blur(x), _blur(y)
    variances = _blur(x * x) - mean_x**2 + _blur(y * y) - mean_y**2
    covariance = _blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
    return float(np.mean(luminance * (2 * covariance + C2) / (variances + C2)))


def _blur(image: np.ndarray) -> np.ndarray:  # [H, W, C] → [H - 10, W - 10, C]
    """The weighted mean of the window around each pixel, where the window is inside the image."""
    for axis in (0, 1):
        count = image.shape[axis] - 2 * RADIUS
        image = sum(weight * image.take(range(n, n + count), axis) for n, weight in enumerate(WINDOW))
    return image
