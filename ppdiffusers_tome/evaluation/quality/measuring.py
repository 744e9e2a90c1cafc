"""From pictures to distances: each setting against plain from the same noise, and against sets of other pictures."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from ...errors import ToMeConfigError
from .distances import blurred, frechet, kid, psnr, ssim
from .drawing import folder_of, picture_paths, read_pictures
from .efficientnet import EfficientNetLite0
from .perceptual import ShiftTolerantLPIPS
from .settings import OTHER_SEEDS, PLAIN, Setting

BLUR = 1.0  # px: a loss that one sees at once
CHUNK = 32  # pictures in memory at a time


class Measured(NamedTuple):
    """One set of pictures: what compares it with plain, picture by picture, and its features."""

    psnr: np.ndarray  # [N] dB, infinite for equal pictures
    ssim: np.ndarray  # [N]
    perceptual: np.ndarray  # [N]
    features: np.ndarray  # [N, 1280]


class Measurer:
    """Measures folders of pictures once, and keeps the results beside them.

    Args:
        out: the folder of an evaluation.
        size: px, of all its pictures; others are resized to it.

    Raises:
        ToMeError: the packages with the weights are not installed.
    """

    def __init__(self, out: Path, size: int) -> None:
        self._out = out
        self._size = size
        self._network = EfficientNetLite0()
        self._perceptual = ShiftTolerantLPIPS()
        self.versions = {"efficientnet-lite0": self._network.version(), "stlpips": self._perceptual.version()}

    def pairs(self, setting: Setting, blur: float = 0) -> Measured:
        """A setting's pictures, blurred by so many px if asked, each against plain's of the same place."""
        own = picture_paths(folder_of(setting, self._out))
        plain = picture_paths(folder_of(PLAIN, self._out))
        if len(own) != len(plain):
            raise ToMeConfigError(f"{setting.name} has {len(own)} pictures and plain {len(plain)}: draw the rest.")
        label = f"{setting.name}-blurred" if blur else setting.name
        return self._kept(label, [*own, *plain], blur, lambda: self._compare(own, plain, blur, label))

    def features(self, folder: Path, blur: float = 0) -> np.ndarray:
        """Features [N, 1280] of a folder of real pictures."""
        paths = picture_paths(folder)
        label = "real-blurred" if blur else "real"
        return self._kept(label, paths, blur, lambda: self._compare(paths, paths, blur, label)).features

    def _compare(self, own: Sequence[Path], plain: Sequence[Path], blur: float, label: str) -> Measured:
        found: list[Measured] = []
        for a, b in tqdm(list(self._chunks(own, plain)), desc=f"measure {label}", unit="chunk", disable=None):
            mine, other = read_pictures(a, self._size), read_pictures(b, self._size)
            if blur:
                mine = np.stack([blurred(picture, blur) for picture in mine])
            pairs = list(zip(mine, other, strict=True))
            found.append(
                Measured(
                    np.array([psnr(*pair) for pair in pairs]),
                    np.array([ssim(*pair) for pair in pairs]),
                    self._perceptual.distance(mine, other),
                    self._network.features(mine),
                )
            )
        return Measured(*(np.concatenate(each) for each in zip(*found, strict=True)))

    @staticmethod
    def _chunks(own: Sequence[Path], plain: Sequence[Path]) -> Iterator[tuple[Sequence[Path], Sequence[Path]]]:
        for start in range(0, len(own), CHUNK):
            yield own[start : start + CHUNK], plain[start : start + CHUNK]

    def _kept(self, label: str, paths: Sequence[Path], blur: float, measure: Any) -> Measured:
        """What was measured of the same pictures before, or else `measure()`; pictures' names are hashes of them."""
        names = [*(f"{path.parent.name}/{path.name}/{path.stat().st_size}" for path in paths), self._size, blur]
        key = hashlib.sha256(repr([*names, self.versions]).encode()).hexdigest()[:16]
        path = self._out / "measured" / f"{label}-{key}.npz"
        if path.exists():
            with np.load(path) as kept:
                return Measured(*(kept[name] for name in Measured._fields))
        measured = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}")
        with unfinished.open("wb") as file:
            np.savez(file, **measured._asdict())
        unfinished.replace(path)
        return measured


def measure(settings: Sequence[Setting], measurer: Measurer, real: Path | None) -> dict[str, Any]:
    """Measure all settings, and what the measures say of known differences.

    Args:
        settings: those to compare with plain; plain and its other seeds are measured too.
        measurer: of the folder with the pictures.
        real: folder of real pictures, at least four; None where there are none.

    Returns:
        "settings": for each name "pairs" and "set". "calibration": the same of known differences: other noise, a blur,
        and where there are real pictures, their halves against each other, blurred, and against plain.
    """
    plain, other = measurer.pairs(PLAIN), measurer.pairs(OTHER_SEEDS)
    soft = measurer.pairs(PLAIN, BLUR)
    sets = {"to plain, other seeds": other.features}
    calibration: dict[str, Any] = {
        "plain, other seeds": {"pairs": _listed(other), "set": _apart(plain.features, other.features)},
        "plain, blurred": {"pairs": _listed(soft), "set": _apart(soft.features, other.features)},
    }
    if real is not None:
        sharp, dull = measurer.features(real), measurer.features(real, BLUR)
        sets["to real"] = sharp
        calibration |= {
            "real halves": {"pairs": None, "set": _apart(sharp[::2], sharp[1::2])},
            "real, blurred": {"pairs": None, "set": _apart(sharp[::2], dull[1::2])},
            "plain against real": {"pairs": None, "set": _apart(plain.features, sharp)},
        }
    found = {}
    for setting in settings:
        measured = measurer.pairs(setting)
        to_sets = {name: _apart(measured.features, features) for name, features in sets.items()}
        found[setting.name] = {"pairs": _listed(measured), "set": to_sets}
    return {"calibration": calibration, "settings": found}


def _apart(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    return {"kid": kid(x, y)._asdict(), "frechet": frechet(x, y)}


def _listed(measured: Measured) -> dict[str, list[float | None]]:
    """For JSON, which has no infinity: None for the PSNR of equal pictures. Five decimals tell all there is."""
    return {
        name: [round(float(value), 5) if math.isfinite(value) else None for value in getattr(measured, name)]
        for name in ("psnr", "ssim", "perceptual")
    }
