"""The parts of an exported folder that are not programs, and its manifest."""

import filecmp
import inspect
import json
from pathlib import Path
from typing import Any

import paddle
import ppdiffusers

from .._version import __version__
from ..models import vae_factor
from .loading import DEFAULTS
from .manifest import FileFacts, Manifest, ProgramFile, ratio_name, sha256
from .programs import count_residuals
from .request import Request

RUNTIME_MODEL = ["ppdiffusers", "PaddleInferRuntimeModel"]  # the class that ppdiffusers loads a program with
# The folder of each model's config: ppdiffusers reads it from beside a program.
CONFIGS = {"unet": "unet", "text_encoder": "text_encoder", "text_encoder_2": "text_encoder_2", "vae": "vae_decoder"}
CONTROLNET_CONFIG = "controlnet"
COPIED = ("tokenizer", "tokenizer_2", "scheduler", "feature_extractor")


def share_weights(params: Path, others: list[Path]) -> Path:
    """The file to read weights from: one of `others` that equals `params`, which is then deleted, or `params`."""
    for other in dict.fromkeys(others):
        if filecmp.cmp(other, params, shallow=False):
            params.unlink()
            return other
    return params


def copy_parts(request: Request, folder: Path) -> None:
    """Write tokenizers and scheduler, the models' configs, `model_index.json`, and `defaults.json` if there is one."""
    pipe = request.pipe
    defaults = Path(pipe.config.get("_name_or_path") or "") / DEFAULTS
    if defaults.is_file():
        (folder / DEFAULTS).write_bytes(defaults.read_bytes())
    for name in COPIED:
        component = vars(pipe).get(name)
        if component is not None:
            component.save_pretrained(str(folder / name))
    for name, subfolder in CONFIGS.items():
        if name in pipe.config:
            _write_json(folder / subfolder / "config.json", _config(getattr(pipe, name)))
    if request.controlnet is not None:
        _write_json(folder / CONTROLNET_CONFIG / "config.json", _config(request.controlnet))
    _write_json(folder / "model_index.json", _model_index(request, folder))


def describe_export(request: Request, folder: Path, written: list[ProgramFile]) -> Manifest:
    """The folder's manifest; all other files must already exist."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {
        path.relative_to(folder).as_posix(): FileFacts(bytes=path.stat().st_size, sha256=sha256(path))
        for path in paths
    }
    return Manifest(
        format=1,
        name=Path(request.pipe.config.get("_name_or_path") or type(request.pipe).__name__).name,
        pipeline=type(request.pipe).__name__,
        sizes=request.sizes,
        ratios=tuple(request.configs),
        schedule=request.schedule,
        merge_map=any(file.model == "merge_map" for file in written),
        image_to_image=request.image_to_image,
        residuals=0 if request.controlnet is None else count_residuals(request.controlnet),
        vae_factor=vae_factor(request.pipe),
        merging={ratio_name(ratio): pair for ratio, pair in request.configs.items()},
        versions={
            "ppdiffusers_tome": __version__,
            "paddle": paddle.__version__,
            "ppdiffusers": ppdiffusers.__version__,
        },
        programs=tuple(written),
        files=files,
    )


def _model_index(request: Request, folder: Path) -> dict[str, Any]:
    """The contents of `model_index.json` for `PaddleInfer…Pipeline.from_pretrained`: the class of each component."""
    config = request.pipe.config
    reader = getattr(ppdiffusers, request.reader)
    index = {"_class_name": request.reader, "_ppdiffusers_version": ppdiffusers.__version__}
    for name, parameter in list(inspect.signature(reader.__init__).parameters.items())[1:]:
        if name in COPIED and vars(request.pipe).get(name) is not None:
            index[name] = list(config[name])
        elif isinstance(parameter.default, bool):
            index[name] = config.get(name, parameter.default) if name != "requires_safety_checker" else False
        else:
            index[name] = RUNTIME_MODEL if (folder / name).is_dir() else [None, None]
    return index


def _config(model: Any) -> dict[str, Any]:
    config = model.config
    return dict(config) if isinstance(config, dict) else config.to_dict()


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
