"""Models that are not exported: check a model's folder, read its recommended settings, load it for an export."""

import re
from pathlib import Path

import paddle
from ppdiffusers import ControlNetModel, DiffusionPipeline, StableDiffusionControlNetPipeline
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..errors import ToMeConfigError, ToMeExportError
from .manifest import MANIFEST, STRICT, first_error

DEFAULTS = "defaults.json"  # in a model's folder, and copied to its export
HUB_NAME = r"\w[\w.-]*/\w[\w.-]*"


@dataclass(frozen=True, config=STRICT)
class ModelDefaults:
    """Recommended settings of a model, from its `defaults.json`; None where that has no value."""

    size: int | None = None  # px, height and width; an export's default is its first size
    steps: int | None = None
    guidance_scale: float | None = None
    prompts: tuple[str, ...] = ()  # examples, for the page of `serve`


def read_defaults(folder: Path) -> ModelDefaults:
    """Recommended settings of the model in a folder, exported or not.

    Raises:
        ToMeConfigError: DEFAULTS has another field, or a value that is not allowed.
    """
    file = folder / DEFAULTS
    try:
        return TypeAdapter(ModelDefaults).validate_json(file.read_bytes()) if file.is_file() else ModelDefaults()
    except ValidationError as error:
        raise ToMeConfigError(f"{file}: {first_error(error)}") from None


def require_model_folder(model: str | Path, hub_names: bool = False) -> None:
    """Raise unless a model is the folder of a pipeline in ppdiffusers' format.

    Args:
        model: the folder.
        hub_names: accept a hub name (owner/name) too; nothing is downloaded.

    Raises:
        ToMeConfigError: the folder does not exist, contains no pipeline, or is an export.
    """
    folder = Path(model)
    if not folder.is_dir():
        # ppdiffusers would create a folder of that name.
        if not hub_names:
            raise ToMeConfigError(f"{model} is not a folder: pass the folder of a model in ppdiffusers' format.")
        _check_hub_name(str(model))
    elif (folder / MANIFEST).is_file():
        raise ToMeConfigError(
            f"{model} is already an export (it has {MANIFEST}): pass the folder of the model that was exported."
        )
    elif not (folder / "model_index.json").is_file():
        raise ToMeConfigError(
            f"{model} has no model_index.json, so it is not a model in ppdiffusers' format: pass the folder that "
            "save_pretrained of a pipeline wrote."
        )


def _check_hub_name(model: str) -> None:
    """Raise ToMeConfigError unless a model that is not a folder may be one of a hub."""
    if not re.fullmatch(HUB_NAME, model):
        raise ToMeConfigError(f"{model} is neither a folder nor a hub name (owner/name).")
    owner = Path(model).parent
    if owner.is_dir():
        raise ToMeConfigError(
            f"{model} does not exist. It is not taken for a hub name (owner/name), because {owner} is a folder here: "
            "for a model of a hub, run this in another folder."
        )


def load_for_export(
    model: str, controlnet: str | None = None, safety_checker: bool = True, dtype: str = "float32"
) -> DiffusionPipeline:
    """Load a pipeline for `export_pipeline`, which needs float32, or for `compare`.

    Args:
        model: folder in ppdiffusers' format, or hub name.
        controlnet: the same for a ControlNet; the pipeline is then a StableDiffusionControlNetPipeline.
        safety_checker: False drops the safety checker, if there is one; a pipeline with one cannot be exported.
        dtype: of the weights: "float32" or, on a GPU, "float16".

    Raises:
        ToMeConfigError: a folder does not exist and is not a valid hub name, or `require_model_folder` rejects it.
        ToMeExportError: ppdiffusers cannot load it.
    """
    if controlnet is not None and not Path(controlnet).is_dir():
        _check_hub_name(controlnet)
    require_model_folder(model, hub_names=True)
    arguments = {"paddle_dtype": getattr(paddle, dtype)}
    dropped = {} if safety_checker else {"safety_checker": None, "requires_safety_checker": False}
    try:
        if controlnet is None:
            return DiffusionPipeline.from_pretrained(model, **arguments, **dropped)
        network = ControlNetModel.from_pretrained(controlnet, **arguments)
        return StableDiffusionControlNetPipeline.from_pretrained(model, controlnet=network, **arguments, **dropped)
    except (OSError, ValueError, KeyError) as error:
        raise ToMeExportError(f"{model} cannot be loaded: {' '.join(str(error).split())}") from error
