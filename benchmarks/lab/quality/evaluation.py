"""An evaluation: generate the images, measure them, and make one result."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from tqdm.auto import tqdm

from ppdiffusers_tome.comparison.results import make_result
from ppdiffusers_tome.comparison.sheets import image_paths
from ppdiffusers_tome.comparison.similarity import psnr
from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.files import write_file

from ..arm import Arm
from ..cache import digest, warn_of_damage
from .image_generation import (
    RUNTIME,
    check_model,
    claim_folder,
    generate_images,
    image_folder,
    load_model,
    read_images,
)
from .image_sets import OTHER_SEEDS, PLAIN_IMAGES, Evaluation
from .metrics import blur, kid, ssim
from .networks import EFFICIENTNET, STLPIPS, efficientnet_features, st_lpips

PAIRS = ("psnr", "ssim", "perceptual")  # measures of an image and its plain one
SIGMA = 1.0  # px: a blur that is visible at once
MIN_REAL_IMAGES = 4  # KID compares their halves, which need two images each
CHUNK = 16  # images in memory at a time

Measured = dict[str, np.ndarray]  # "features" [N, 1280] of N images, and each of PAIRS [N] where there are references


def evaluate(
    evaluation: Evaluation,
    arms: Sequence[Arm],
    output: Path,
    batch: int,
    real: Path | None,
    command: str,
) -> dict[str, Any]:
    """Generate plain images and those of all arms in a folder, which a repeated run continues; measure them.

    Args:
        batch: the largest number of images in one pipeline call.
        real: folder of at least MIN_REAL_IMAGES real images, to measure KID to them too.
        command: for the record.

    Returns:
        A result of kind "quality", as docs/development/evaluation.md describes.

    Raises:
        ToMeConfigError: an argument is not allowed, also with this model, or the folder holds images of another
            evaluation.
        ToMeError: weights or a package are missing, or images could not be generated.
    """
    check_model(evaluation)
    # What may be missing is loaded now, because generation takes hours.
    real_images = [] if real is None else image_paths(real)
    if real is not None and len(real_images) < MIN_REAL_IMAGES:
        raise ToMeConfigError(f"{real} has {len(real_images)} PNG files: KID needs {MIN_REAL_IMAGES} real images.")
    for weights in (EFFICIENTNET, STLPIPS):
        weights.read()
    generated_by = claim_folder(evaluation, output)
    generate_images(evaluation, [PLAIN_IMAGES, OTHER_SEEDS, *arms], output, batch)
    measurer = Measurer(output, evaluation.size)
    calibration, references = calibrate(measurer, real_images)
    entries = [entry_of(measurer, arm, references) for arm in arms]
    return make_result(
        "quality",
        command,
        commit=generated_by,
        **{key: value for key, value in asdict(evaluation).items() if key != "prompts"},
        backend=RUNTIME,
        scheduler=type(load_model(evaluation.model).scheduler).__name__,
        prompts=[{"prompt": text, "seed": seed} for text, seed in evaluation.prompts],
        weights={weights.package: weights.version for weights in (EFFICIENTNET, STLPIPS)},
        real=None if real is None else {"folder": str(real), "images": len(real_images)},
        calibration=calibration,
        settings=entries,
    )


@dataclass(frozen=True)
class Measurer:
    """Measures images once, and caches the values in the folder of an evaluation."""

    output: Path
    size: int  # px; images of another size are resized

    def compare(self, arm: Arm, sigma: float = 0, count: int | None = None) -> Measured:
        """The first images of an arm, blurred by sigma px, each against the plain one of the same prompt and noise."""
        images, plain = (image_paths(image_folder(one, self.output))[:count] for one in (arm, PLAIN_IMAGES))
        return self.measure(images, plain, sigma)

    def measure(self, images: Sequence[Path], references: Sequence[Path] = (), sigma: float = 0) -> Measured:
        """Features of images, blurred by sigma px, and each of PAIRS between them and their references."""
        # Names of generated images contain a hash of their inputs. Those of real images do not, so sizes are added.
        names = [f"{path.parent.name}/{path.name}/{path.stat().st_size}" for path in (*images, *references)]
        key = digest([names, len(references), self.size, sigma, EFFICIENTNET.sha256, STLPIPS.sha256])
        path = self.output / "measured" / f"{key}.npz"
        if path.exists():
            try:
                with np.load(io.BytesIO(path.read_bytes())) as arrays:
                    return dict(arrays)
            except (OSError, ValueError, EOFError, BadZipFile) as error:
                warn_of_damage(path, error)
        starts = tqdm(range(0, len(images), CHUNK), f"measure {images[0].parent.name}", unit="chunk", disable=None)
        parts = [self._measure_chunk(images[n : n + CHUNK], references[n : n + CHUNK], sigma) for n in starts]
        measured = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        content = io.BytesIO()
        np.savez(content, **measured)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content.getvalue())
        return measured

    def _measure_chunk(self, files: Sequence[Path], reference_files: Sequence[Path], sigma: float) -> Measured:
        images = read_images(files, self.size)
        if sigma:
            images = np.stack([blur(image, sigma) for image in images])
        measured = {"features": efficientnet_features(images)}
        if reference_files:
            references = read_images(reference_files, self.size)
            pairs = list(zip(images, references, strict=True))
            measured["psnr"] = np.array([psnr(a, b) for a, b in pairs])
            measured["ssim"] = np.array([ssim(a, b) for a, b in pairs])
            measured["perceptual"] = st_lpips(images, references)
        return measured


def calibrate(measurer: Measurer, real_images: Sequence[Path]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Measure known differences: other noise, a blur, and halves of the real images.

    Returns the result's "calibration", and the features of each set that arms are compared with.
    """
    plain, other = measurer.compare(PLAIN_IMAGES), measurer.compare(OTHER_SEEDS)
    blurred = measurer.compare(PLAIN_IMAGES, SIGMA)
    references = {"to plain, other seeds": other["features"]}
    sets: dict[str, tuple[Any, np.ndarray, np.ndarray]] = {
        "plain, other seeds": (_pairs(other), plain["features"], other["features"]),
        "plain, blurred": (_pairs(blurred), blurred["features"], other["features"]),
    }
    if real_images:
        sharp, soft = (measurer.measure(real_images, sigma=sigma)["features"] for sigma in (0, SIGMA))
        references["to real"] = sharp
        sets["real halves"] = (None, sharp[::2], sharp[1::2])
        sets["real, blurred"] = (None, sharp[::2], soft[1::2])
        sets["plain against real"] = (None, plain["features"], sharp)
    return {name: {"pairs": pairs, "kid": kid(x, y)} for name, (pairs, x, y) in sets.items()}, references


def entry_of(measurer: Measurer, arm: Arm, references: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The entry of an arm in the result: distances of its images from plain ones, and from each reference."""
    measured = measurer.compare(arm)
    distances = {name: kid(measured["features"], features) for name, features in references.items()}
    return {"name": arm.name, "arm": arm.to_json(), "pairs": _pairs(measured), "kid": distances}


def _pairs(measured: Measured) -> dict[str, list[float | None]]:
    """For JSON, which has no infinity: None for the PSNR of equal images."""
    return {name: [round(x, 5) if math.isfinite(x) else None for x in measured[name].tolist()] for name in PAIRS}
