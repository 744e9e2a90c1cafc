"""An evaluation: draw the images, measure them, and make one result."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ...errors import ToMeConfigError
from ...generation.offline import Drawer
from ...models import find_blocks
from ...serving.engine import Engine
from ...serving.jobs import Job
from ..results import make_result
from .drawing import claim_folder, draw, image_folder, image_paths, load_model, read_images
from .merge_maps import write_merge_maps
from .metrics import blur, find_inception, inception_fid, kid, psnr, ssim
from .networks import EFFICIENTNET, STLPIPS, EfficientNetLite0, ShiftTolerantLPIPS
from .quality_report import default_setting, read_frame
from .settings import OTHER_SEEDS, PLAIN, Evaluation, Setting

PAIRS = ("psnr", "ssim", "perceptual")  # measures of an image and its plain one
SIGMA = 1.0  # px: a blur that is visible at once
SMALLEST_REAL = 4  # images: KID compares their halves, of two images at least
CHUNK = 16  # images in memory at a time

Measured = dict[str, np.ndarray]  # "features" [N, 1280] of N images, and each of PAIRS [N] where there are references


def model_levels(model: str) -> list[int]:
    """The levels at which a model's UNet has blocks that can merge, the shallowest first.

    Raises:
        ToMeExportError: the model cannot be loaded.
        ToMeConfigError: it has no UNet.
    """
    pipe = load_model(model)
    if "unet" not in pipe.components:
        raise ToMeConfigError(f"{model} is a {type(pipe).__name__} without a UNet: only UNets are evaluated.")
    return sorted({block.level for block in find_blocks(pipe.unet)})


def evaluate(
    evaluation: Evaluation,
    settings: Sequence[Setting],
    output: Path,
    make_drawer: Callable[[Callable[[], Engine]], Drawer],
    batch: int = 4,
    real: Path | None = None,
    with_inception: bool = False,
    command: str = "",
) -> dict[str, Any]:
    """Draw plain images and those of all settings into a folder, which a repeated run continues, and measure them.

    Args:
        evaluation: what is drawn.
        settings: what is compared with plain; see `settings.list_settings`.
        output: folder for images, programs and measured values.
        make_drawer: `offline.draw_here`, or one that draws elsewhere.
        batch: most images in one pipeline call.
        real: folder of at least four real images, to measure KID to them too.
        with_inception: measure FID to the real images too.
        command: for the record.

    Returns:
        A result of kind "quality", as docs/evaluation.md describes.

    Raises:
        ToMeConfigError: an argument is not allowed, or the folder holds images of another evaluation.
        ToMeError: a package or an interpreter is missing, or images could not be drawn.
    """
    real_images = [] if real is None else image_paths(real)
    if real is not None and len(real_images) < SMALLEST_REAL:
        raise ToMeConfigError(f"{real} has {len(real_images)} PNG files: KID needs {SMALLEST_REAL} real images.")
    if real is None and with_inception:
        raise ToMeConfigError("FID compares with real images: name their folder with --real.")
    if with_inception:  # before anything is drawn: packages may be missing
        find_inception()
    measurer = Measurer(output, evaluation.size)
    drawn_by = claim_folder(evaluation, output)
    about_torch = draw(evaluation, [PLAIN, OTHER_SEEDS, *settings], output, make_drawer, batch)
    calibration, references = calibrate(measurer, real_images)
    measured = []
    for setting in settings:
        values = measurer.compare(setting)
        entry: dict[str, Any] = {"name": setting.name, "group": setting.group, "config": asdict(setting.config)}
        entry |= {"framework": setting.framework, "pairs": _pairs(values)}
        entry["kid"] = {name: kid(values["features"], features)._asdict() for name, features in references.items()}
        if real is not None and with_inception:
            entry["fid"] = inception_fid(image_folder(setting.name, output), real)
        measured.append(entry)
    return make_result(
        "quality",
        command,
        commit=drawn_by,
        **{key: value for key, value in asdict(evaluation).items() if key not in ("prompts", "torch_python")},
        scheduler=type(load_model(evaluation.model).scheduler).__name__,
        torch=about_torch,
        prompts=[{"prompt": text, "seed": seed} for text, seed in evaluation.prompts],
        weights={weights.package: weights.version for weights in (EFFICIENTNET, STLPIPS)},
        real=None if real is None else {"folder": str(real), "images": len(real_images)},
        calibration=calibration,
        settings=measured,
    )


class Measurer:
    """Measures images once, and keeps the values in the folder.

    Args:
        output: the folder of an evaluation.
        size: px, of all its images; others are resized to it.

    Raises:
        WeightsError: the weights of a network are missing.
    """

    def __init__(self, output: Path, size: int) -> None:
        self._output = output
        self._size = size
        for weights in (EFFICIENTNET, STLPIPS):  # now, because drawing takes hours
            weights.read()

    @cached_property
    def _networks(self) -> tuple[EfficientNetLite0, ShiftTolerantLPIPS]:
        return EfficientNetLite0(), ShiftTolerantLPIPS()

    def compare(self, setting: Setting, sigma: float = 0) -> Measured:
        """A setting's images, blurred by sigma px, each against the plain one of the same prompt and noise."""
        images, plain = (image_paths(image_folder(name, self._output)) for name in (setting.name, PLAIN.name))
        if len(images) != len(plain):
            raise ToMeConfigError(f"{setting.name} has {len(images)} images and plain {len(plain)}: draw the rest.")
        return self.measure(images, plain, sigma)

    def measure(self, images: Sequence[Path], references: Sequence[Path] = (), sigma: float = 0) -> Measured:
        """Features of images, blurred by sigma px, and each of PAIRS between them and their references."""
        # Names of drawn images contain a hash of all that decides them; those of real images do not: hence their size.
        names = [f"{path.parent.name}/{path.name}/{path.stat().st_size}" for path in (*images, *references)]
        key = repr([names, len(references), self._size, sigma, EFFICIENTNET.sha256, STLPIPS.sha256])
        path = self._output / "measured" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
        if path.exists():
            with np.load(path) as arrays:
                return dict(arrays)
        starts = tqdm(range(0, len(images), CHUNK), f"measure {images[0].parent.name}", unit="chunk", disable=None)
        parts = [self._measure_chunk(images[n : n + CHUNK], references[n : n + CHUNK], sigma) for n in starts]
        measured = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}")
        np.savez(unfinished, **measured)
        unfinished.replace(path)
        return measured

    def _measure_chunk(self, files: Sequence[Path], reference_files: Sequence[Path], sigma: float) -> Measured:
        images = read_images(files, self._size)
        if sigma:
            images = np.stack([blur(image, sigma) for image in images])
        efficientnet, lpips = self._networks
        measured = {"features": efficientnet.features(images)}
        if reference_files:
            references = read_images(reference_files, self._size)
            measured["psnr"] = np.array(list(map(psnr, images, references)))
            measured["ssim"] = np.array(list(map(ssim, images, references)))
            measured["perceptual"] = lpips.distance(images, references)
        return measured


def calibrate(measurer: Measurer, real_images: Sequence[Path]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Measure known differences: other noise, a blur, and halves of the real images.

    Returns:
        The result's "calibration", and the features of each set that settings are compared with.
    """
    plain, blurred, other = measurer.compare(PLAIN), measurer.compare(PLAIN, SIGMA), measurer.compare(OTHER_SEEDS)
    sets: dict[str, tuple[Any, np.ndarray, np.ndarray]] = {
        "plain, other seeds": (_pairs(other), plain["features"], other["features"]),
        "plain, blurred": (_pairs(blurred), blurred["features"], other["features"]),
    }
    references = {"to plain, other seeds": other["features"]}
    if real_images:
        sharp, soft = (measurer.measure(real_images, sigma=sigma)["features"] for sigma in (0, SIGMA))
        references["to real"] = sharp
        sets["real halves"] = (None, sharp[::2], sharp[1::2])
        sets["real, blurred"] = (None, sharp[::2], soft[1::2])
        sets["plain against real"] = (None, plain["features"], sharp)
    return {name: {"pairs": pairs, "kid": kid(x, y)._asdict()} for name, (pairs, x, y) in sets.items()}, references


def _pairs(measured: Measured) -> dict[str, list[float | None]]:
    """For JSON, which has no infinity: None for the PSNR of equal images."""
    values = {name: measured[name].tolist() for name in PAIRS}
    return {name: [round(x, 5) if math.isfinite(x) else None for x in listed] for name, listed in values.items()}


def draw_merge_maps(result: dict[str, Any], output: Path) -> list[tuple[Path, str]]:
    """Draw a result's first prompt in eager mode, and write maps of the tokens that merge.

    Args:
        result: what `evaluate` returned; its `quality_report.default_setting` is drawn.
        output: folder for the PNG files.

    Returns:
        Each file with its caption.

    Raises:
        ToMeExportError: the model cannot be loaded.
    """
    pipe, (first, *_), size = load_model(result["model"]), result["prompts"], result["size"]
    frame = read_frame(result)
    ratio = float(frame.at[default_setting(frame), "ratio"])
    fields = {"seed": first["seed"], "ratio": ratio, "steps": result["steps"]}
    job = Job(first["prompt"], size, size, **fields, guidance_scale=result["guidance_scale"])
    fields |= {"prompt": first["prompt"], "model": result["model"]}
    with pipe.tome(ratio=job.ratio):
        return write_merge_maps(pipe, lambda: np.asarray(Engine(pipe).generate([job])[0]), output, **fields)
