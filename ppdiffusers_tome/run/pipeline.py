"""Load an exported folder as an ordinary ppdiffusers pipeline whose models are programs in a runtime."""

import importlib
import inspect
import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import ppdiffusers
from ppdiffusers import DiffusionPipeline

from ..errors import ParameterError, ToMeConfigError, ToMeError, ToMeExportError
from .folder import ExportedFolder
from .formats import RUNTIME_FORMATS, check_format, default_runtime
from .manifest import MANIFEST, Format, Manifest, ProgramFile, open_export
from .models import ExportedControlNet, ExportedTextEncoder, ExportedUNet, ExportedVAE
from .onnx_runtime import OnnxRuntime
from .openvino_runtime import OpenVinoRuntime
from .paddle_runtime import PaddleRuntime
from .runtime import Load, Program, Runtime
from .stand_in import NoImageEncoder, refuse_loading

# The folder of each model's config: ppdiffusers reads it from beside a program.
CONFIGS = {"unet": "unet", "text_encoder": "text_encoder", "text_encoder_2": "text_encoder_2", "vae": "vae_decoder"}
CONTROLNET_CONFIG = "controlnet"
COPIED = ("tokenizer", "tokenizer_2", "scheduler", "feature_extractor")  # components that are not models
FROM_IMAGE = {  # pipelines for image-to-image, by those for text-to-image over the same models
    "StableDiffusionPipeline": "StableDiffusionImg2ImgPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLImg2ImgPipeline",
}
RUNTIMES: dict[str, type[Runtime]] = {"paddle": PaddleRuntime, "onnxruntime": OnnxRuntime, "openvino": OpenVinoRuntime}


def load_pipeline(
    folder: str | Path,
    cls: type[DiffusionPipeline] | None = None,
    *,
    ratio: float | None = None,
    runtime: str | None = None,
    verify: bool = True,
    max_programs: int | None = None,
    **settings: Any,
) -> DiffusionPipeline:
    """Load an exported folder as an ordinary pipeline: same call, schedulers, callbacks and progress bar.

    Programs are loaded when they first run: one of the UNet for each size and ratio in use. `pipe.unet.ratio` selects
    one of the exported ratios. Create other pipelines over the same programs as usual:
    `StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)`.

    Args:
        folder: written by `export_pipeline`.
        cls: ppdiffusers class to load it as; None: the class that was exported.
        ratio: merge ratio, one of the exported ones; None: the first of them.
        runtime: "onnxruntime" or "openvino", for a folder with ONNX programs, or "paddle", for a folder with Paddle
            programs. None: ONNX Runtime, or with device="gpu" Paddle Inference; if the folder has only one of the two
            formats, the runtime of that one.
        verify: compare the weights with the hashes in `tome.json`, which takes seconds per GB. All remaining files are
            always compared. With unnoticed damaged weights, images are black or the process crashes.
        max_programs: largest number of programs of the UNet in memory, at least 1. The least recently used program is
            unloaded before a further program is loaded. None: they stay loaded. In ONNX Runtime on a CPU all of
            them share one copy of the weights; in Paddle Inference and OpenVINO each has its own.
        settings: device, threads and precision, as in the runtime's class: `OnnxRuntime`, `OpenVinoRuntime`, or
            `PaddleRuntime`, which also has onednn and optimize.

    Raises:
        ToMeConfigError: an argument is not allowed, or the ratio was not exported (the message lists those that were).
        ToMeExportError: the folder is not an export, is damaged, was not exported for the runtime, or the
            runtime is not installed or cannot run it.

    Example:
        >>> image = load_pipeline("build/emoji")("a 3d render of fox", height=128, width=128).images[0]
    """
    folder = Path(folder)
    is_count = isinstance(max_programs, int) and not isinstance(max_programs, bool)
    if max_programs is not None and not (is_count and max_programs >= 1):
        raise ParameterError("max_programs", max_programs, "it must be 1 or more, or None.")
    chosen = None if runtime is None else choose_runtime(runtime, **settings)  # before the weights are compared
    exported, manifest = open_export(folder, verify)
    name = runtime or default_runtime(manifest, settings.get("device", Runtime.device))
    check_format(folder, manifest, name)
    load = partial(_load_program, chosen or choose_runtime(name, **settings), exported, RUNTIME_FORMATS[name])
    cls = cls or getattr(ppdiffusers, manifest.pipeline)
    try:
        pipe = _assemble(exported.path, manifest, cls, load, ratio, max_programs)
    except ToMeError:
        raise
    except Exception as error:  # ppdiffusers and paddlenlp raise many types on invalid configs
        reason = f"{type(error).__name__}: {error}"
        raise ToMeExportError(f"{folder} cannot be loaded ({reason}): export the model again.") from error
    finally:
        exported.check()  # what was read since the files were compared
    return pipe


def from_image(pipe: DiffusionPipeline) -> DiffusionPipeline:
    """The pipeline for image-to-image over the models of a pipeline for text-to-image, of a class in FROM_IMAGE.

    It has the settings too, which `components` does not contain, as whether an absent negative prompt is zeros.
    """
    cls = getattr(ppdiffusers, FROM_IMAGE[type(pipe).__name__])
    settings = {name: pipe.config.get(name) for name in inspect.signature(cls).parameters}
    if hasattr(pipe, "watermark"):  # of SDXL
        settings["add_watermarker"] = pipe.watermark is not None
    flags = {name: value for name, value in settings.items() if isinstance(value, bool)}
    return cls(**pipe.components, **flags)


def choose_runtime(runtime: str, **settings: Any) -> Runtime:
    """The runtime of a name, with the settings of its class.

    Raises:
        ToMeConfigError: there is none of that name, or a setting is not allowed.
        ToMeExportError: the runtime is not installed.
    """
    if runtime not in RUNTIMES:
        raise ParameterError("runtime", runtime, f"it must be one of {[*RUNTIMES]}.")
    allowed = [field.name for field in fields(RUNTIMES[runtime])]
    if unknown := sorted(set(settings) - set(allowed)):
        having = [name for name, cls in RUNTIMES.items() if set(unknown) <= {field.name for field in fields(cls)}]
        remedy = f"pass runtime={having[0]!r}, or leave it out" if having else "leave it out"
        raise ToMeConfigError(
            f"{', '.join(unknown)}: runtime={runtime!r} has only the settings {', '.join(allowed)}; {remedy}."
        )
    return RUNTIMES[runtime](**settings)


def _load_program(runtime: Runtime, folder: ExportedFolder, format: Format, file: ProgramFile) -> Program:
    return runtime.load(folder, file.files[format])


def _assemble(
    folder: Path, manifest: Manifest, cls: type[DiffusionPipeline], load: Load, ratio: Any, max_programs: int | None
) -> DiffusionPipeline:
    index = _read_json(folder / "model_index.json")
    available = _exported_components(
        folder, manifest, load, manifest.ratios[0] if ratio is None else ratio, max_programs
    )
    for name in COPIED:
        if (folder / name).is_dir():
            available[name] = _copied_component(folder, name, index)
    arguments = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in available:
            arguments[name] = available[name]
        elif parameter.default is inspect.Parameter.empty:
            is_none = index.get(name) == [None, None]  # in the pipeline that was exported, as in SDXL's refiner
            if not is_none and name in (*CONFIGS, "tokenizer", "tokenizer_2", "controlnet"):
                raise ToMeConfigError(
                    f"{cls.__name__} needs a {name}, but {folder} has none: it was exported from {manifest.pipeline}. "
                    "Load it as that class."
                )
            arguments[name] = None
        elif isinstance(parameter.default, bool) or isinstance(index.get(name), bool):
            arguments[name] = index.get(name, parameter.default if name != "requires_safety_checker" else False)
    pipe = cls(**arguments)
    refuse_loading(pipe)
    if getattr(pipe, "vae_scale_factor", manifest.vae_factor) != manifest.vae_factor:
        raise ToMeExportError(f"{folder / MANIFEST} is damaged: vae_factor is not {pipe.vae_scale_factor}, the VAE's.")
    return pipe


def _exported_components(
    folder: Path, manifest: Manifest, load: Load, ratio: Any, max_programs: int | None
) -> dict[str, Any]:
    """The components that run programs, by their names in ordinary pipelines."""
    paths = {name: folder / subfolder / "config.json" for name, subfolder in CONFIGS.items()}
    configs = {name: _read_json(path) for name, path in paths.items() if path.is_file()}
    height, width = manifest.sizes[0]
    if height == width:
        configs["unet"]["sample_size"] = height // manifest.vae_factor  # the default height and width
    exported: dict[str, Any] = {
        name: ExportedTextEncoder(configs[name], manifest, load, name)
        for name in ("text_encoder", "text_encoder_2")
        if name in configs
    }
    exported["unet"] = ExportedUNet(configs["unet"], manifest, load, ratio, max_programs)
    exported["vae"] = ExportedVAE(configs["vae"], manifest, load, "vae_decoder")
    exported["image_encoder"] = NoImageEncoder()
    if manifest.controlnet:
        exported["controlnet"] = ExportedControlNet(_read_json(folder / CONTROLNET_CONFIG / "config.json"))
    return exported


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _copied_component(folder: Path, name: str, index: dict[str, Any]) -> Any:
    """A tokenizer, scheduler or feature extractor, of the class in model_index.json."""
    library, class_name = index[name]
    if library.partition(".")[0] not in ("ppdiffusers", "paddlenlp"):
        raise ToMeExportError(
            f"{folder / 'model_index.json'}: {name} is from {library}, but only ppdiffusers and paddlenlp are "
            "allowed: export the model again."
        )
    return getattr(importlib.import_module(library), class_name).from_pretrained(str(folder / name))
