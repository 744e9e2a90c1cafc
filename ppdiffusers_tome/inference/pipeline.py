"""An exported folder becomes an ordinary pipeline of ppdiffusers, whose models are predictors."""

import importlib
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ppdiffusers
from ppdiffusers import DiffusionPipeline

from ..errors import ToMeConfigError, ToMeError, ToMeExportError
from .layout import CONFIGS, CONTROLNET_CONFIG, COPIED
from .manifest import MANIFEST, Manifest, ProgramFile, read_manifest
from .models import ExportedControlNet, ExportedTextEncoder, ExportedUNet, ExportedVAE, Load
from .runtime import Predictor, Runtime
from .tracing import right_for_onednn


def load_pipeline(
    folder: str | Path,
    cls: type[DiffusionPipeline] | None = None,
    *,
    ratio: float | None = None,
    device: str = "cpu",
    threads: int | None = None,
    onednn: bool | None = None,
    tensorrt: bool | str = False,
    precision: str = "fp32",
    verify: bool = True,
) -> DiffusionPipeline:
    """Load an exported folder as an ordinary pipeline: same call, schedulers, callbacks and progress bar.

    Programs are loaded when they first run, and kept: a UNet per size and ratio that is used. `pipe.unet.ratio`
    chooses among the exported ratios. Other pipelines over the same programs are made as always:
    `StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)`.

    Args:
        folder: what `export_pipeline` wrote.
        cls: class of ppdiffusers to load it as; None: the class that was exported.
        ratio: to merge by, one of the exported; None: the first of them.
        device, threads, onednn, tensorrt, precision: as in `Runtime`.
        verify: compare the weights with the hashes in `tome.json`, which takes seconds for each GB. All other files
            are compared in any case. Damaged weights that were not compared draw black images or end the process.

    Raises:
        ToMeConfigError: an argument is not allowed, or the ratio was not exported (the message lists what there is).
        ToMeExportError: the folder is none that was exported, is damaged, or this Paddle cannot run it.

    Example:
        >>> image = load_pipeline("build/emoji")("a 3d render of fox", height=128, width=128).images[0]
    """
    folder = Path(folder)
    runtime = Runtime(device, threads, onednn, tensorrt, precision)
    manifest = read_manifest(folder, verify)

    def load(program: ProgramFile) -> Predictor:
        is_open = runtime.onednn is None and runtime.gpu is None
        fast = right_for_onednn(program.onednn_parity) if is_open else runtime.onednn
        return Predictor(
            folder / program.program, folder / program.params, replace(runtime, onednn=fast), program.model == "unet"
        )

    try:
        return _assemble(folder, manifest, cls or getattr(ppdiffusers, manifest.pipeline), load, ratio)
    except ToMeError:
        raise
    except Exception as error:  # whatever ppdiffusers and paddlenlp raise on configs that they do not understand
        reason = f"{type(error).__name__}: {error}"
        raise ToMeExportError(f"{folder} cannot be loaded ({reason}): export the model again.") from error


def _assemble(
    folder: Path, manifest: Manifest, cls: type[DiffusionPipeline], load: Load, ratio: float | None
) -> DiffusionPipeline:
    index = _read_json(folder / "model_index.json")
    parts: dict[str, Any] = _exported(folder, manifest, load, manifest.ratios[0] if ratio is None else ratio)
    for name in COPIED:
        if (folder / name).is_dir():
            parts[name] = _copied(folder, name, index)
    taken = {}
    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if name in parts:
            taken[name] = parts[name]
        elif parameter.default is inspect.Parameter.empty:
            if name in ("unet", "vae", "text_encoder", "tokenizer", "controlnet", "text_encoder_2", "tokenizer_2"):
                raise ToMeConfigError(
                    f"{cls.__name__} needs a {name}, and {folder} has none: it was exported from {manifest.pipeline}."
                )
            taken[name] = None
        elif isinstance(parameter.default, bool):
            taken[name] = index.get(name, parameter.default if name != "requires_safety_checker" else False)
    pipe = cls(**taken)
    if getattr(pipe, "vae_scale_factor", manifest.vae_factor) != manifest.vae_factor:
        raise ToMeExportError(f"{folder / MANIFEST} is damaged: vae_factor is not {pipe.vae_scale_factor}, the VAE's.")
    return pipe


def _exported(folder: Path, manifest: Manifest, load: Load, ratio: float) -> dict[str, Any]:
    """The parts that are programs, under their names in ordinary pipelines."""
    paths = {name: folder / where / "config.json" for name, where in CONFIGS.items()}
    configs = {name: _read_json(path) for name, path in paths.items() if path.is_file()}
    if manifest.sizes and manifest.sizes[0].height == manifest.sizes[0].width:
        configs["unet"]["sample_size"] = manifest.sizes[0].height // manifest.vae_factor  # the size without height=
    encoders = [name for name in ("text_encoder", "text_encoder_2") if name in configs]
    parts: dict[str, Any] = {
        name: ExportedTextEncoder(configs[name], manifest, load, name, len(encoders) == 2) for name in encoders
    }
    parts["unet"] = ExportedUNet(configs["unet"], manifest, load, ratio)
    parts["vae"] = ExportedVAE(configs["vae"], manifest, load)
    if manifest.controlnet:
        parts["controlnet"] = ExportedControlNet(_read_json(folder / CONTROLNET_CONFIG / "config.json"))
    return parts


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _copied(folder: Path, name: str, index: dict[str, Any]) -> Any:
    """A tokenizer, scheduler or feature extractor, of the class that model_index.json names."""
    library, kind = index[name]
    if library.partition(".")[0] not in ("ppdiffusers", "paddlenlp"):
        raise ToMeExportError(f"{folder / 'model_index.json'}: {name} is of {library}, which is not ppdiffusers'.")
    return getattr(importlib.import_module(library), kind).from_pretrained(str(folder / name))
