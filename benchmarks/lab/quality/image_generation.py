"""Generates the images of all arms of an evaluation from the same noise, in a folder that a repeated run continues."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from ppdiffusers import DiffusionPipeline
from tqdm.auto import tqdm

from ppdiffusers_tome.comparison.environment import commit, versions
from ppdiffusers_tome.comparison.results import read_json, write_result
from ppdiffusers_tome.config import ToMeConfig
from ppdiffusers_tome.errors import ToMeConfigError, ToMeError, ToMeExportError
from ppdiffusers_tome.export.export import write_export
from ppdiffusers_tome.export.loading import load_for_export
from ppdiffusers_tome.inference import Size, read_manifest
from ppdiffusers_tome.run.manifest import MANIFEST
from ppdiffusers_tome.serving.engine import load_engine
from ppdiffusers_tome.serving.offline import ImageBackend, generate, generate_here

from ..arm import Arm
from ..cache import digest, model_files, sources, warn_of_damage
from .image_sets import Evaluation

RUNTIME = "onnxruntime"  # which computes all images
RECORD = "evaluation.json"  # in a folder of images: the evaluation that they belong to


def load_model(model: str) -> DiffusionPipeline:
    """A pipeline from a folder or the hub, in float32, which a process loads once; ToMeExportError if it cannot."""
    return _load(model)


_load = lru_cache(maxsize=1)(partial(load_for_export, safety_checker=False))


def check_model(evaluation: Evaluation) -> None:
    """Raise ToMeConfigError if the model is a pipeline without a UNet, or one whose outputs are no images."""
    pipe = load_model(evaluation.model)
    if "unet" not in pipe.components or not hasattr(pipe, "image_processor"):
        kind = type(pipe).__name__
        raise ToMeConfigError(f"{evaluation.model} is a {kind}: only images of pipelines with a UNet are evaluated.")


def fingerprint(evaluation: Evaluation) -> dict[str, Any]:
    """All that an evaluation's images depend on, ready for JSON, with the model's content, versions and sources."""
    inputs = {name: value for name, value in asdict(evaluation).items() if name != "threads"}
    inputs["content of the model"] = model_files(evaluation.model)
    return json.loads(json.dumps({**inputs, "versions": versions(), "sources": sources()}))


def claim_folder(evaluation: Evaluation, output: Path) -> str:
    """Reserve a folder for an evaluation by these versions and sources; returns the commit of the first run in it.

    Raises:
        ToMeConfigError: the folder holds images of another evaluation or model, or of other versions or sources.
    """
    about, path = fingerprint(evaluation), output / RECORD
    if not path.exists():
        write_result(path, {**about, "commit": commit()})
    recorded = read_json(path)
    if differences := sorted(name for name in about if recorded.get(name) != about[name]):
        raise ToMeConfigError(
            f"{output} holds images of another evaluation: {', '.join(differences)} differ. Choose another folder "
            "with --output, or remove this one."
        )
    return str(recorded["commit"])


def generate_images(evaluation: Evaluation, arms: Sequence[Arm], output: Path, batch: int) -> None:
    """Generate the images that the folder lacks. Raises ToMeError if images failed; the others are stored."""
    programs = export_programs(evaluation, arms, output)
    for arm in tqdm(arms, desc="arms", unit="arm", disable=None):
        load = partial(load_engine, programs[arm], threads=evaluation.threads, runtime=RUNTIME)
        generate_arm(evaluation, arm, output, generate_here(load), batch)


def export_programs(evaluation: Evaluation, arms: Sequence[Arm], output: Path) -> dict[Arm, Path]:
    """The exported folder for each arm; arms that differ only in the ratio share one."""
    groups: dict[ToMeConfig, list[Arm]] = defaultdict(list)
    for arm in arms:
        groups[replace(arm.config or ToMeConfig(method="default"), ratio=0)].append(arm)
    programs: dict[Arm, Path] = {}
    for config, members in groups.items():
        name = config.describe().partition(", ")[2].replace(", ", "_") or "defaults"
        folder = output.resolve() / "programs" / name
        ratios = tuple(dict.fromkeys(arm.ratio for arm in members))
        if not set(ratios) <= _exported_ratios(folder):
            write_export(
                load_model(evaluation.model),
                folder,
                [replace(config, ratio=ratio) for ratio in ratios],
                [Size(evaluation.size, evaluation.size)],
                format="onnx",
                overwrite=True,
            )
        programs |= dict.fromkeys(members, folder)
    return programs


def _exported_ratios(folder: Path) -> set[float]:
    """The ratios of an export; none if there is no export, or if it is damaged, which warns."""
    if not folder.exists():
        return set()
    try:
        return set(read_manifest(folder, verify=False).ratios)  # weights are verified when they are loaded
    except ToMeExportError as error:
        warn_of_damage(folder / MANIFEST, error)
        return set()


def generate_arm(evaluation: Evaluation, arm: Arm, output: Path, backend: ImageBackend, batch: int) -> None:
    """Generate the images that the folder of an arm lacks.

    Raises:
        ToMeError: images failed; the others are stored.
    """
    # Threads and the size of a batch change rounding alone.
    identity = digest([sources(), evaluation.model, arm.to_json()])
    summary = generate(evaluation.jobs(arm), identity, image_folder(arm, output), batch, backend)
    if summary.failures:
        prompt, reason = summary.failures[0]
        raise ToMeError(
            f"{len(summary.failures)} images of {arm.name} failed, the first of {prompt.job.prompt!r}: {reason}"
        )


def image_folder(arm: Arm, output: Path) -> Path:
    """Where the images of an arm are; their names sort in the order of the prompts."""
    return output / "images" / arm.name


def read_images(paths: Sequence[Path], size: int) -> np.ndarray:
    """Images as uint8 [N, size, size, 3]; those of another size are resized."""
    images = [Image.open(path).convert("RGB") for path in paths]
    return np.stack([np.asarray(image.resize((size, size), Image.Resampling.LANCZOS)) for image in images])
