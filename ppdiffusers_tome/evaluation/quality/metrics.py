"""Measures of two images (PSNR, SSIM) and of two sets of images (KID, FID)."""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from skimage.filters import gaussian
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from ...errors import ToMeConfigError, ToMeError

SSIM_SMALLEST = 7  # px: the side of its window


class KID(NamedTuple):
    """The mean over random subsets, and the standard deviation of one subset's value."""

    mean: float
    std: float


def psnr(
    a: np.ndarray,  # [H, W, 3] uint8
    b: np.ndarray,  # the same shape
) -> float:
    """Peak signal-to-noise ratio in dB, higher is closer; infinite for equal images."""
    _check_pair(a, b)
    return float("inf") if np.array_equal(a, b) else float(peak_signal_noise_ratio(a, b, data_range=255))


def ssim(
    a: np.ndarray,  # [H, W, 3] uint8, H and W at least 7
    b: np.ndarray,  # the same shape
) -> float:
    """Structural similarity (Wang et al. 2004), 1 for equal images: in windows of 7×7 px, the mean over colours."""
    _check_pair(a, b)
    if min(a.shape[:2]) < SSIM_SMALLEST:
        raise ToMeConfigError(f"images of {a.shape[0]}×{a.shape[1]} px: SSIM needs {SSIM_SMALLEST} px.")
    return float(structural_similarity(a, b, data_range=255, channel_axis=-1))


def blur(
    image: np.ndarray,  # [H, W, 3] uint8
    sigma: float,  # px
) -> np.ndarray:  # [H, W, 3] uint8
    """The image under a Gaussian blur: a known loss that calibrates the measures."""
    values = gaussian(image, sigma, channel_axis=-1, preserve_range=True)
    return np.round(values).clip(0, 255).astype(np.uint8)


def kid(
    x: np.ndarray,  # [N, D] features of one set
    y: np.ndarray,  # [M, D] features of the other
    subsets: int = 100,
    size: int | None = None,
    seed: int = 0,
) -> KID:
    """Kernel distance between two sets: the unbiased squared MMD under the kernel (x·y/D + 1)³.

    Its expected value is 0 for two samples of one distribution, whatever their size, so it can be negative.

    Args:
        subsets: number of random pairs of subsets.
        size: members of a subset, drawn without repetition, 2 to min(N, M). None: half of the smaller set and at most
            1000, so that subsets differ and `std` is meaningful.
        seed: of the draws.

    Raises:
        ToMeConfigError: the features do not match, or `size` or `subsets` is out of range.

    Source: Bińkowski et al. 2018, arXiv:1801.01401 §4, there in Inception's features.
    """
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ToMeConfigError(f"features of {x.shape} and {y.shape}: they must be [N, D] and [M, D], N and M above 1.")
    largest = min(len(x), len(y))
    size = min(max(largest // 2, 2), 1000) if size is None else size
    if not 2 <= size <= largest:
        raise ToMeConfigError(f"size={size} is not allowed: it must be 2 to {largest}, the size of the smaller set.")
    if subsets < 1:
        raise ToMeConfigError(f"subsets={subsets} is not allowed: it must be at least 1.")
    x, y = x.astype(np.float64), y.astype(np.float64)
    random = np.random.RandomState(seed)
    values = [
        _squared_mmd(x[random.choice(len(x), size, replace=False)], y[random.choice(len(y), size, replace=False)])
        for _ in range(subsets)
    ]
    return KID(float(np.mean(values)), float(np.std(values)))


def _squared_mmd(x: np.ndarray, y: np.ndarray) -> float:
    """Of two equally large samples [n, D], without the terms of a member with itself."""
    n, width = x.shape

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (a @ b.T / width + 1) ** 3

    within = sum(k.sum() - np.trace(k) for k in (kernel(x, x), kernel(y, y)))
    return float(within / (n * (n - 1)) - 2 * kernel(x, y).mean())


def find_inception() -> tuple[Any, Any]:
    """The modules torch_fidelity and torch, which compute FID.

    Raises:
        ToMeError: one of them is not installed.
    """
    try:
        return importlib.import_module("torch_fidelity"), importlib.import_module("torch")
    except ImportError as error:
        raise ToMeError(f"{error}. FID needs PyTorch and torch-fidelity: pip install torch-fidelity") from error


def inception_fid(folder_a: str | Path, folder_b: str | Path) -> float:
    """FID, in Inception's features, between the images of two folders, by the package torch-fidelity.

    This project has not run it: it needs PyTorch, and downloads Inception's weights (90 MB) at the first call. To
    compare with published values, use as many images as they do, usually 5,000 to 50,000.

    Raises:
        ToMeError: torch-fidelity is not installed.
        ToMeConfigError: a folder does not exist.
    """
    for folder in (folder_a, folder_b):
        if not Path(folder).is_dir():
            raise ToMeConfigError(f"{folder} is not a folder.")
    torch_fidelity, torch = find_inception()
    metrics = torch_fidelity.calculate_metrics(
        input1=str(folder_a), input2=str(folder_b), fid=True, cuda=torch.cuda.is_available(), verbose=False
    )
    return float(metrics["frechet_inception_distance"])


def _check_pair(a: np.ndarray, b: np.ndarray) -> None:
    for name, image in (("a", a), ("b", b)):
        if image.ndim != 3 or image.shape[-1] != 3 or image.dtype != np.uint8:
            raise ToMeConfigError(f"{name} must be uint8 [H, W, 3], not {image.dtype} {image.shape}.")
    if a.shape != b.shape:
        raise ToMeConfigError(f"a and b have the shapes {a.shape} and {b.shape}: they must have one shape.")
