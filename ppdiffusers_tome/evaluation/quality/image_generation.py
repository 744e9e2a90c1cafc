"""Generates all image sets of an evaluation from the same noise, in a folder that a repeated run continues."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from PIL import Image
from ppdiffusers import DiffusionPipeline, StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from tqdm.auto import tqdm

from ...comparison.environment import commit, model_files, sources, versions
from ...comparison.results import read_json, write_result
from ...config import ToMeConfig
from ...errors import ToMeConfigError, ToMeError, ToMeExportError
from ...generation.engine import Engine, load_engine
from ...generation.jobs import GeneratedImage, Job
from ...generation.offline import ImageBackend, MakeImageBackend, generate
from ...inference import Size, read_manifest
from ...inference.export import unmerged_programs, write_export
from ...inference.loading import load_for_export
from ...inference.manifest import MANIFEST
from ..cache import Cache, digest, program_key, warn_of_damage
from ..speed.cases import EAGER, PLAIN, PROGRAM_FORMATS, PROGRAMS, TOME
from .image_sets import Evaluation, ImageSet

RECORD = "evaluation.json"  # in a folder of images: the evaluation that they belong to


def load_model(model: str) -> DiffusionPipeline:
    """A pipeline from a folder or the hub, in float32, which a process loads once; ToMeExportError if it cannot."""
    return _load(_absolute(model))


_load = lru_cache(maxsize=1)(partial(load_for_export, safety_checker=False))


def _absolute(model: str) -> str:
    """The model as processes in other working directories can load it."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def check_model(evaluation: Evaluation) -> None:
    """Raise ToMeConfigError if the model is another kind of pipeline than its backend or photographs need."""
    pipe = load_model(evaluation.model)
    kind = f"{evaluation.model} is a {type(pipe).__name__}"
    if not hasattr(pipe, "image_processor"):
        raise ToMeConfigError(f"{kind}, whose outputs are no images, and evaluate measures images alone.")
    if "unet" not in pipe.components and evaluation.backend != EAGER:
        raise ToMeConfigError(f"{kind} without a UNet, which is not exported: pass --backend eager.")
    if evaluation.strength is not None and type(pipe) is not StableDiffusionPipeline:
        raise ToMeConfigError(f"{kind}: photographs (--strength) cannot be used, only with a StableDiffusionPipeline.")


class EagerEngine(Engine):
    """Generates with the pipeline itself, which merges by `config` meanwhile."""

    def __init__(self, model: str, config: ToMeConfig) -> None:
        self._pipe = load_model(model)
        self._config = config
        super().__init__(self._pipe, from_image(self._pipe), name=model)
        self._has_unet = "unet" in self._pipe.components

    @property
    def can_batch(self) -> bool:
        """See `Engine.can_batch`. A pipeline without a UNet samples the noise of a whole batch at once."""
        return self._has_unet and super().can_batch

    def generate(self, jobs: Sequence[Job], should_stop: Callable[..., bool] | None = None) -> list[GeneratedImage]:
        """See `Engine.generate`."""
        with self._pipe.tome(**asdict(self._config)) if self._config.ratio else nullcontext():
            if self._has_unet:
                return super().generate(jobs, should_stop)
            return [GeneratedImage(self._image(job)) for job in jobs]

    def _image(self, job: Job) -> Image.Image:
        """The image of a pipeline without a UNet, as Stable Diffusion 3's and FLUX's."""
        paddle.seed(job.seed)
        settings = {"height": job.height, "width": job.width, "num_inference_steps": job.steps}
        return self._pipe(prompt=job.prompt, guidance_scale=job.guidance_scale, **settings).images[0]


def from_image(pipe: DiffusionPipeline) -> StableDiffusionImg2ImgPipeline | None:
    """The image-to-image pipeline of the same models; None if `pipe` is not a StableDiffusionPipeline."""
    if type(pipe) is not StableDiffusionPipeline:
        return None
    return StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)


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


def generate_images(
    evaluation: Evaluation, image_sets: Sequence[ImageSet], output: Path, make_backend: MakeImageBackend, batch: int
) -> None:
    """Generate the images that the folder lacks. Raises ToMeError if images failed; the others are stored."""
    programs = export_programs(evaluation, image_sets, output) if evaluation.backend in PROGRAMS else {}
    for image_set in tqdm(image_sets, desc="image sets", unit="set", disable=None):
        load: Callable[[], Engine]
        if programs:
            runtime = PROGRAMS[evaluation.backend_of(image_set)]
            load = partial(load_engine, programs[image_set], threads=evaluation.threads, **runtime)
        else:
            load = partial(EagerEngine, _absolute(evaluation.model), image_set.config)
        generate_image_set(evaluation, image_set, output, make_backend(load), batch)


def export_programs(
    evaluation: Evaluation, image_sets: Sequence[ImageSet], output: Path, cached: Cache | None = None
) -> dict[ImageSet, Path]:
    """The exported folder for each image set; image sets that differ only in the ratio share one.

    UNets that `cached` has, which are those of `bench`, are linked instead of traced again.
    """
    groups: dict[ToMeConfig, list[ImageSet]] = defaultdict(list)
    for image_set in image_sets:
        groups[replace(image_set.config, ratio=0)].append(image_set)
    programs: dict[ImageSet, Path] = {}
    for config, members in groups.items():
        name = config.describe().partition(", ")[2].replace(", ", "_") or "defaults"
        folder = output.resolve() / "programs" / name
        ratios = tuple(dict.fromkeys(image_set.config.ratio for image_set in members))
        if not set(ratios) <= _exported_ratios(folder):
            earlier = [*programs.values(), *([folder] if _exported_ratios(folder) else [])]
            linked = unmerged_programs(earlier[0]) if earlier else []  # the other models are exported once
            if cached is not None:
                unets = [cached.load_program(_unet_key(evaluation, config, ratio)) for ratio in ratios]
                linked += [(cached.folder, file) for file in unets if file is not None]
            size = Size(evaluation.size, evaluation.size)
            write_export(
                load_model(evaluation.model),
                folder,
                [replace(config, ratio=ratio) for ratio in ratios],
                [size],
                image_to_image=evaluation.strength is not None,
                format=PROGRAM_FORMATS[evaluation.backend],
                overwrite=True,
                linked=linked,
            )
        programs |= dict.fromkeys(members, folder)
    return programs


def _unet_key(evaluation: Evaluation, config: ToMeConfig, ratio: float) -> str:
    arm, merging = (TOME, replace(config, ratio=ratio)) if ratio else (PLAIN, None)
    return program_key("unet", evaluation.size, arm, merging, PROGRAM_FORMATS[evaluation.backend])


def _exported_ratios(folder: Path) -> set[float]:
    """The ratios of an export; none if there is no export, or if it is damaged, which warns."""
    if not folder.exists():
        return set()
    try:
        return set(read_manifest(folder, verify=False).ratios)  # weights are verified when they are loaded
    except ToMeExportError as error:
        warn_of_damage(folder / MANIFEST, error)
        return set()


def generate_image_set(
    evaluation: Evaluation, image_set: ImageSet, output: Path, backend: ImageBackend, batch: int
) -> None:
    """Generate the images that the folder of an image set lacks.

    Raises:
        ToMeError: images failed; the others are stored.
    """
    # Threads and the size of a batch change rounding alone.
    inputs = [evaluation.backend_of(image_set), image_set.framework, image_set.config.describe()]
    identity = digest([sources(), evaluation.model, *inputs])
    summary = generate(evaluation.jobs(image_set), identity, image_folder(image_set, output), batch, backend)
    if summary.failures:
        prompt, reason = summary.failures[0]
        raise ToMeError(
            f"{len(summary.failures)} images of {image_set.name} failed, the first of {prompt.job.prompt!r}: {reason}"
        )


def image_folder(image_set: ImageSet, output: Path) -> Path:
    """Where the images of an image set are; their names sort in the order of the prompts."""
    return output / "images" / image_set.name


def read_images(paths: Sequence[Path], size: int) -> np.ndarray:
    """Images as uint8 [N, size, size, 3]; those of another size are resized."""
    images = [Image.open(path).convert("RGB") for path in paths]
    return np.stack([np.asarray(image.resize((size, size), Image.Resampling.LANCZOS)) for image in images])
