"""Generate images of all prompts by each setting, from the same noise, in a folder that a repeated run continues."""

import hashlib
import inspect
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from PIL import Image
from ppdiffusers import DiffusionPipeline, StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from pydantic import BaseModel, ValidationError
from tqdm.auto import tqdm

from ...config import ToMeConfig
from ...errors import ToMeConfigError, ToMeError, ToMeExportError
from ...generation.engine import Engine, load_engine
from ...generation.jobs import Job
from ...generation.offline import ImageBackend, MakeImageBackend, generate_here, generate_identified
from ...inference import export_pipeline, load_pipeline, read_manifest
from ...inference.loading import load_for_export
from ...inference.manifest import STRICT, Size, first_error
from ...models import latent_grid, vae_factor
from ..cached_programs import CachedPrograms, program_key
from ..environment import commit, model_files, sources, versions
from ..results import read_json
from ..speed.cases import PLAIN as PLAIN_ARM
from ..speed.cases import PROGRAM_FORMATS, PROGRAMS, TOME
from ..torch_unet import TorchProcess
from .settings import PLAIN, Evaluation, Setting

DEFAULTS = "defaults.json"  # in a model's folder: fields of ModelDefaults that differ from its pipeline's
RECORD = "evaluation.json"  # what generated the images of a folder


def load_model(model: str) -> DiffusionPipeline:
    """A pipeline from a folder or the hub, in float32, which a process loads once; ToMeExportError if it cannot."""
    return _load(_absolute(model))


_load = lru_cache(maxsize=1)(partial(load_for_export, safety_checker=False))


class ModelDefaults(BaseModel):
    """What a model's images have unless a user says otherwise."""

    model_config = STRICT

    size: int | None  # px, height and width; None: the UNet's config has none
    steps: int
    guidance_scale: float


def model_defaults(model: str) -> ModelDefaults:
    """A model's own defaults: those in its DEFAULTS, then its UNet's size and its pipeline's defaults.

    Raises:
        ToMeConfigError: DEFAULTS has another field or a value that is not allowed, or there is no size.
        ToMeExportError: the model cannot be loaded.
    """
    pipe, file = load_model(model), Path(model) / DEFAULTS
    parameters = inspect.signature(type(pipe).__call__).parameters
    grid = latent_grid(vars(pipe).get("unet"))
    values = {"size": grid and max(grid) * vae_factor(pipe)}
    for name, parameter in (("steps", "num_inference_steps"), ("guidance_scale", "guidance_scale")):
        values |= {name: parameters[parameter].default} if parameter in parameters else {}
    try:
        defaults = ModelDefaults(**{**values, **(read_json(file) if file.is_file() else {})})
    except ValidationError as error:
        raise ToMeConfigError(f"{model}, its default settings: {first_error(error)}") from None
    if defaults.size is None:
        raise ToMeConfigError(f"{model} has no size of its own (sample_size of its UNet's config): pass --size.")
    return defaults


def _absolute(model: str) -> str:
    """The model as processes in other working directories can load it."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def check_model(evaluation: Evaluation, settings: Sequence[Setting]) -> None:
    """Raise ToMeConfigError if tomesd or photographs need Stable Diffusion and the model is another pipeline."""
    needs = ["photographs (--strength)"] if evaluation.strength is not None else []
    needs += ["tomesd"] if any(setting.framework == "PyTorch" for setting in settings) else []
    if needs and type(pipe := load_model(evaluation.model)) is not StableDiffusionPipeline:
        raise ToMeConfigError(
            f"{evaluation.model} is a {type(pipe).__name__}: {needs[0]} cannot be used, only with a "
            "StableDiffusionPipeline."
        )


class EagerEngine(Engine):
    """Generates with the pipeline itself, which merges by `config` meanwhile."""

    def __init__(self, model: str, config: ToMeConfig) -> None:
        self._pipe = load_model(model)
        self._config = config
        super().__init__(self._pipe, from_image(self._pipe), name=model)

    def generate(self, jobs: Sequence[Job], should_stop: Callable[[], bool] | None = None) -> list[Image.Image]:
        """See `Engine.generate`."""
        with self._pipe.tome(**asdict(self._config)) if self._config.ratio else nullcontext():
            return super().generate(jobs, should_stop)


def from_image(pipe: DiffusionPipeline) -> StableDiffusionImg2ImgPipeline | None:
    """The image-to-image pipeline of the same models; None if `pipe` is not a StableDiffusionPipeline."""
    if type(pipe) is not StableDiffusionPipeline:
        return None
    return StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)


class RemoteUNet:
    """The UNet of a StableDiffusionPipeline, computed by PyTorch and merged by tomesd with its defaults."""

    dtype = paddle.float32

    def __init__(self, config: Any, process: TorchProcess, ratio: float) -> None:
        self.config = config
        self._process = process
        self._ratio = ratio

    def __call__(
        self,
        sample: paddle.Tensor,  # [B, C, h, w]
        timestep: Any,
        encoder_hidden_states: paddle.Tensor,  # [B, T, D]
        **_: Any,  # None, and return_dict=False
    ) -> tuple[paddle.Tensor]:
        inputs = {"sample": sample.numpy(), "encoder_hidden_states": encoder_hidden_states.numpy()}
        self._process.set_inputs({**inputs, "timestep": np.asarray(timestep, "float32").reshape(1)})
        return (paddle.to_tensor(self._process.output({"ratio": self._ratio})),)


@contextmanager
def open_torch_engine(
    evaluation: Evaluation, ratio: float, exported: Path | None
) -> Iterator[tuple[Engine, Mapping[str, Any]]]:
    """An engine whose UNet runs in PyTorch and merges by tomesd, and versions and threads of PyTorch's process.

    Everything else, the noise included, is the same as in the other engines, so images differ by the merging alone.
    tomesd has no seed: it samples its random dst anew in every pass. The other models are those of the folder
    `exported`, if there is one.

    Raises:
        ToMeError: PyTorch's process fails.
    """
    pipe = load_model(evaluation.model)
    rest = pipe
    if exported is not None:
        rest = load_pipeline(exported, threads=evaluation.threads, **PROGRAMS[evaluation.backend_of(PLAIN)])
    with tempfile.TemporaryDirectory(prefix="torch_engine_") as folder:
        process = TorchProcess(evaluation.torch_python, Path(folder), pipe.unet, evaluation.threads)
        components = {**rest.components, "unet": RemoteUNet(pipe.unet.config, process, ratio)}
        torch_pipe = StableDiffusionPipeline(**components, requires_safety_checker=False)
        with process:
            yield Engine(torch_pipe, from_image(torch_pipe), f"{evaluation.model} in PyTorch"), process.versions


def claim_folder(evaluation: Evaluation, output: Path) -> str:
    """Reserve a folder for an evaluation by these versions and sources; returns the commit of the first run in it.

    Raises:
        ToMeConfigError: the folder holds images of another evaluation or model, or of other versions or sources.
    """
    about = {key: value for key, value in asdict(evaluation).items() if key not in ("threads", "torch_python")}
    about |= {"model_files": model_files(evaluation.model), "versions": versions(), "sources": sources()}
    about = json.loads(json.dumps(about))
    path = output / RECORD
    if path.exists():
        recorded = json.loads(path.read_text(encoding="utf-8"))
        if differences := sorted(key for key in about if recorded.get(key) != about[key]):
            raise ToMeConfigError(
                f"{output} holds images of another evaluation: {', '.join(differences)} differ. Choose another folder "
                "with --output, or remove this one."
            )
        return str(recorded["commit"])
    about["commit"] = commit()
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return str(about["commit"])


def generate_images(
    evaluation: Evaluation, settings: Sequence[Setting], output: Path, make_backend: MakeImageBackend, batch: int
) -> Mapping[str, Any] | None:
    """Generate the images that the folder lacks.

    Returns:
        Versions and threads of PyTorch's process; None if no setting uses it.

    Raises:
        ToMeError: images failed, or PyTorch did; all other images are kept.
    """
    programs = export_programs(evaluation, settings, output) if evaluation.backend in PROGRAMS else {}
    about_torch = None
    for setting in tqdm(settings, desc="settings", unit="setting", disable=None):
        if setting.framework == "PyTorch":
            with open_torch_engine(evaluation, setting.config.ratio, programs.get(PLAIN)) as (engine, about_torch):
                generate_setting(evaluation, setting, output, generate_here(lambda: engine), batch)
        elif programs:
            runtime = PROGRAMS[evaluation.backend_of(setting)]
            load = partial(load_engine, programs[setting], threads=evaluation.threads, **runtime)
            generate_setting(evaluation, setting, output, make_backend(load), batch)
        else:
            eager = partial(EagerEngine, _absolute(evaluation.model), setting.config)
            generate_setting(evaluation, setting, output, make_backend(eager), batch)
    return about_torch


def export_programs(
    evaluation: Evaluation, settings: Sequence[Setting], output: Path, cached: CachedPrograms | None = None
) -> dict[Setting, Path]:
    """The exported folder for each setting of Paddle; settings that differ only in the ratio share one.

    UNets that `cached` has, which are those of `bench`, are linked instead of traced again.
    """
    groups: dict[ToMeConfig, list[Setting]] = defaultdict(list)
    for setting in settings:
        if setting.framework == "Paddle":
            groups[replace(setting.config, ratio=0)].append(setting)
    programs: dict[Setting, Path] = {}
    for config, members in groups.items():
        name = config.describe().partition(", ")[2].replace(", ", "_") or "defaults"
        folder = output.resolve() / "programs" / name
        ratios = tuple(dict.fromkeys(setting.config.constant_ratio for setting in members))
        if not set(ratios) <= _exported_ratios(folder):
            options = {key: value for key, value in asdict(config).items() if key != "ratio"}
            options |= {"image_to_image": evaluation.strength is not None, "overwrite": True}
            options["format"] = PROGRAM_FORMATS[evaluation.backend]
            earlier = [*programs.values(), *([folder] if _exported_ratios(folder) else [])]
            options["others"] = next(iter(earlier), None)  # the other models are exported once
            size = Size(evaluation.size, evaluation.size)
            if cached is not None:
                found = {(size, ratio): cached.find(_unet_key(evaluation, config, ratio)) for ratio in ratios}
                options["unets"] = {which: saved for which, saved in found.items() if saved is not None}
            export_pipeline(load_model(evaluation.model), folder, ratios, [size], **options)
        programs |= dict.fromkeys(members, folder)
    return programs


def _unet_key(evaluation: Evaluation, config: ToMeConfig, ratio: float) -> str:
    arm, merging = (TOME, replace(config, ratio=ratio)) if ratio else (PLAIN_ARM, None)
    return program_key("unet", evaluation.size, arm, merging, PROGRAM_FORMATS[evaluation.backend])


def _exported_ratios(folder: Path) -> set[float]:
    try:
        return set(read_manifest(folder, verify=False).ratios)  # weights are verified when they are loaded
    except ToMeExportError:
        return set()


def generate_setting(
    evaluation: Evaluation, setting: Setting, output: Path, backend: ImageBackend, batch: int
) -> None:
    """Generate the images that a setting's folder lacks. Raises ToMeError if images failed; the others are kept."""
    # Threads and the size of a batch change rounding alone.
    of_setting = [evaluation.backend_of(setting), setting.framework, setting.config.describe()]
    identity = hashlib.sha256(json.dumps([sources(), evaluation.model, *of_setting]).encode()).hexdigest()
    summary = generate_identified(evaluation.jobs(setting), identity, image_folder(setting, output), batch, backend)
    if summary.failures:
        prompt, failure = summary.failures[0]
        raise ToMeError(
            f"{len(summary.failures)} images of {setting.name} failed, the first of {prompt.job.prompt!r}: "
            f"{failure.reason}"
        )


def image_folder(setting: Setting, output: Path) -> Path:
    """Where the images of a setting are; their names sort in the order of the prompts."""
    return output / "images" / setting.name


def image_paths(folder: Path) -> list[Path]:
    """The PNG files of a folder in the order of their names, without unfinished ones."""
    return sorted(folder.glob("[!.]*.png"))


def read_images(paths: Sequence[Path], size: int) -> np.ndarray:
    """Images as uint8 [N, size, size, 3]; those of another size are resized."""
    images = [Image.open(path).convert("RGB") for path in paths]
    return np.stack([np.asarray(image.resize((size, size), Image.Resampling.LANCZOS)) for image in images])
