"""Distances between two pictures, and between two sets of pictures given as features."""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from skimage.filters import gaussian
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from ...errors import ToMeConfigError, ToMeError

SMALLEST_FOR_SSIM = 7  # px: the side of its window


class KID(NamedTuple):
    """A kernel distance over random subsets: its mean, and the standard deviation of one subset's value."""

    mean: float
    std: float


class MissingInceptionError(ToMeError, ImportError):
    """The package that computes FID is not installed."""


def psnr(
    a: np.ndarray,  # [H, W, 3] uint8
    b: np.ndarray,  # the same shape
) -> float:
    """Peak signal-to-noise ratio in dB, higher is closer; infinite for equal pictures."""
    _check_pair(a, b)
    return float("inf") if np.array_equal(a, b) else float(peak_signal_noise_ratio(a, b, data_range=255))


def ssim(
    a: np.ndarray,  # [H, W, 3] uint8, H and W at least 7
    b: np.ndarray,  # the same shape
) -> float:
    """Structural similarity (Wang et al. 2004), 1 for equal pictures: in windows of 7×7 px, the mean over colours."""
    _check_pair(a, b)
    if min(a.shape[:2]) < SMALLEST_FOR_SSIM:
        raise ToMeConfigError(f"pictures of {a.shape[0]}×{a.shape[1]} px: SSIM needs {SMALLEST_FOR_SSIM} px each way.")
    return float(structural_similarity(a, b, data_range=255, channel_axis=-1))


def blurred(
    picture: np.ndarray,  # [H, W, 3] uint8
    sigma: float,  # px
) -> np.ndarray:  # [H, W, 3] uint8
    """The picture under a Gaussian blur: a known loss, against which a distance is read."""
    soft = gaussian(picture, sigma, channel_axis=-1, preserve_range=True)
    return np.round(soft).clip(0, 255).astype(np.uint8)


def kid(
    x: np.ndarray,  # [N, D] features of one set
    y: np.ndarray,  # [M, D] of the other
    subsets: int = 100,
    size: int | None = None,
    seed: int = 0,
) -> KID:
    """Kernel distance between the sets behind two samples: the unbiased squared MMD under the kernel (x·y/D + 1)³.

    Unbiased means that the expected value is 0 for two samples of one distribution, whatever their size, so it can be
    negative.

    Args:
        subsets: from how many random pairs of subsets the mean is taken.
        size: members of a subset, drawn without repetition, 2 to min(N, M). None: half of the smaller set and at most
            1000, so that subsets differ and `std` says something.
        seed: of the draws.

    Raises:
        ToMeConfigError: the features do not match, or `size` or `subsets` is out of range.

    Source: Bińkowski et al. 2018, arXiv:1801.01401 §4, there in Inception's features and called KID.
    """
    x, y = _check_sets(x, y)
    largest = min(len(x), len(y))
    size = min(max(largest // 2, 2), 1000) if size is None else size
    if not 2 <= size <= largest:
        raise ToMeConfigError(f"size={size}: subsets of {len(x)} and {len(y)} pictures have 2 to {largest} members.")
    if subsets < 1:
        raise ToMeConfigError(f"subsets={subsets} must be at least 1.")
    rng = np.random.RandomState(seed)
    values = [
        _squared_mmd(x[rng.choice(len(x), size, replace=False)], y[rng.choice(len(y), size, replace=False)])
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


def frechet(
    x: np.ndarray,  # [N, D] features of one set, N at least 2
    y: np.ndarray,  # [M, D] of the other
) -> float:
    """Squared Fréchet distance between the Gaussians with the two samples' means and covariances.

    |μx − μy|² + tr(Σx + Σy − 2 (Σx Σy)^½), the formula behind FID (Heusel et al. 2017, arXiv:1706.08500). It is FID
    only in Inception's features: in others' call it by theirs. The trace of the root is the sum of the singular values
    of the product of the centred samples, so no covariance is formed and no matrix root is taken, and covariances
    without full rank do no harm.

    Small samples are biased upwards, the more so below D members, where they cannot show every direction: compare
    values only between samples of equal size, and see what two halves of one set give.

    Raises:
        ToMeConfigError: the features do not match, or a set has fewer than two members.
    """
    x, y = _check_sets(x, y)
    # Σx = Aᵀ A with A [N, D]. The trace of the root is the nuclear norm of A Bᵀ, or of what QR leaves of both: R, at
    # most D × D, of each.
    a, b = ((s - s.mean(axis=0)) / np.sqrt(len(s) - 1) for s in (x, y))
    (_, of_a), (_, of_b) = np.linalg.qr(a), np.linalg.qr(b)
    shared = np.linalg.svd(of_a @ of_b.T, compute_uv=False).sum()
    moved = ((x.mean(axis=0) - y.mean(axis=0)) ** 2).sum()
    return max(float(moved + (a**2).sum() + (b**2).sum() - 2 * shared), 0.0)


def find_inception() -> tuple[Any, Any]:
    """The modules torch_fidelity and torch.

    Raises:
        MissingInceptionError: one of them is not installed.
    """
    try:
        return importlib.import_module("torch_fidelity"), importlib.import_module("torch")
    except ImportError as error:
        raise MissingInceptionError(f"{error}. FID needs PyTorch and: pip install torch-fidelity") from error


def inception_fid(folder_a: str | Path, folder_b: str | Path) -> float:
    """FID proper, in Inception's features, between the pictures of two folders, by the package torch-fidelity.

    Not run by this project: it needs PyTorch, and downloads Inception's weights (90 MB) when it is first called. For
    values that others' tables can be held to, give it as many pictures as they used, usually 5,000 to 50,000.

    Raises:
        MissingInceptionError: torch-fidelity is not installed.
        ToMeConfigError: a folder does not exist.
    """
    for folder in (folder_a, folder_b):
        if not Path(folder).is_dir():
            raise ToMeConfigError(f"{folder} is not a folder.")
    torch_fidelity, torch = find_inception()
    found = torch_fidelity.calculate_metrics(
        input1=str(folder_a), input2=str(folder_b), fid=True, cuda=torch.cuda.is_available(), verbose=False
    )
    return float(found["frechet_inception_distance"])


def _check_pair(a: np.ndarray, b: np.ndarray) -> None:
    for name, picture in (("a", a), ("b", b)):
        if picture.ndim != 3 or picture.shape[-1] != 3 or picture.dtype != np.uint8:
            raise ToMeConfigError(f"{name} is uint8 [H, W, 3], not {picture.dtype} {list(picture.shape)}.")
    if a.shape != b.shape:
        raise ToMeConfigError(f"two pictures of one shape are compared, not {list(a.shape)} and {list(b.shape)}.")


def _check_sets(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both sets in float64, with two members or more and one width."""
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ToMeConfigError(
            f"features are [N, D] and [M, D], N and M at least 2: not {list(x.shape)}, {list(y.shape)}."
        )
    return x.astype(np.float64), y.astype(np.float64)
