"""An exported folder becomes an ordinary pipeline of ppdiffusers, whose models are predictors."""

import importlib
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ppdiffusers
from ppdiffusers import DiffusionPipeline

from ..errors import ToMeConfigError, ToMeExportError
from .layout import CONFIGS, CONTROLNET_CONFIG, COPIED
from .manifest import Manifest, ProgramFile, read_manifest
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
    verify: bool = False,
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
        verify: compare also the weights with the hashes in `tome.json`, as `read_manifest` does.

    Raises:
        ToMeConfigError: an argument is not allowed, or the ratio was not exported (the message lists what there is).
        ToMeExportError: the folder is none that was exported, is damaged, or this Paddle cannot run it.

    Example:
        >>> image = load_pipeline("build/emoji")("a 3d render of fox", height=128, width=128).images[0]
    """
    folder = Path(folder)
    runtime = Runtime(device, threads, onednn, tensorrt, precision)
    manifest = read_manifest(folder, verify)
    cls = cls or getattr(ppdiffusers, manifest.pipeline)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))

    def load(program: ProgramFile) -> Predictor:
        is_open = runtime.onednn is None and runtime.gpu is None
        fast = right_for_onednn(program.onednn_parity) if is_open else runtime.onednn
        return Predictor(
            folder / program.program, folder / program.params, replace(runtime, onednn=fast), program.model == "unet"
        )

    ratio = manifest.ratios[0] if ratio is None else ratio
    parts: dict[str, Any] = _exported(folder, manifest, load, ratio)
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
    return cls(**taken)


def _exported(folder: Path, manifest: Manifest, load: Load, ratio: float) -> dict[str, Any]:
    """The parts that are programs, under their names in ordinary pipelines."""
    configs = {name: _read_config(folder / where) for name, where in CONFIGS.items() if (folder / where).is_dir()}
    if manifest.sizes and manifest.sizes[0].height == manifest.sizes[0].width:
        configs["unet"]["sample_size"] = manifest.sizes[0].height // manifest.vae_factor  # the size without height=
    encoders = [name for name in ("text_encoder", "text_encoder_2") if name in configs]
    parts: dict[str, Any] = {
        name: ExportedTextEncoder(configs[name], manifest, load, name, len(encoders) == 2) for name in encoders
    }
    parts["unet"] = ExportedUNet(configs["unet"], manifest, load, ratio)
    parts["vae"] = ExportedVAE(configs["vae"], manifest, load)
    if manifest.controlnet:
        parts["controlnet"] = ExportedControlNet(_read_config(folder / CONTROLNET_CONFIG))
    return parts


def _read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _copied(folder: Path, name: str, index: dict[str, Any]) -> Any:
    """A tokenizer, scheduler or feature extractor, of the class that model_index.json names."""
    library, kind = index[name]
    if library.partition(".")[0] not in ("ppdiffusers", "paddlenlp"):
        raise ToMeExportError(f"{folder / 'model_index.json'}: {name} is of {library}, which is not ppdiffusers'.")
    return getattr(importlib.import_module(library), kind).from_pretrained(str(folder / name))
