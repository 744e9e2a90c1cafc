"""A model that is not exported: whether a folder contains one, and its eager pipeline in float32."""

import re
from pathlib import Path

import paddle
from ppdiffusers import ControlNetModel, DiffusionPipeline, StableDiffusionControlNetPipeline

from ..errors import ToMeConfigError, ToMeExportError
from .manifest import MANIFEST

HUB_NAME = r"\w[\w.-]*/\w[\w.-]*"


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
        if not re.fullmatch(HUB_NAME, str(model)):
            raise ToMeConfigError(f"{model} is neither a folder nor a hub name (owner/name).")
    elif (folder / MANIFEST).is_file():
        raise ToMeConfigError(
            f"{model} is already an export (it has {MANIFEST}): pass the folder of the model that was exported."
        )
    elif not (folder / "model_index.json").is_file():
        raise ToMeConfigError(
            f"{model} has no model_index.json, so it is not a model in ppdiffusers' format: pass the folder that "
            "save_pretrained of a pipeline wrote."
        )


def load_for_export(model: str, controlnet: str | None = None, safety_checker: bool = True) -> DiffusionPipeline:
    """Load a pipeline for `export_pipeline`.

    Args:
        model: folder in ppdiffusers' format, or hub name.
        controlnet: the same for a ControlNet; the pipeline is then a StableDiffusionControlNetPipeline.
        safety_checker: False drops the safety checker, if there is one; a pipeline with one cannot be exported.

    Raises:
        ToMeConfigError: a folder does not exist and is not a valid hub name, or `require_model_folder` rejects it.
        ToMeExportError: ppdiffusers cannot load it.
    """
    if controlnet is not None and not Path(controlnet).is_dir() and not re.fullmatch(HUB_NAME, controlnet):
        raise ToMeConfigError(f"{controlnet} is neither a folder nor a hub name (owner/name).")
    require_model_folder(model, hub_names=True)
    arguments = {"paddle_dtype": paddle.float32}
    dropped = {} if safety_checker else {"safety_checker": None, "requires_safety_checker": False}
    try:
        if controlnet is None:
            return DiffusionPipeline.from_pretrained(model, **arguments, **dropped)
        network = ControlNetModel.from_pretrained(controlnet, **arguments)
        return StableDiffusionControlNetPipeline.from_pretrained(model, controlnet=network, **arguments, **dropped)
    except (OSError, ValueError, KeyError) as error:
        raise ToMeExportError(f"{model} cannot be loaded: {' '.join(str(error).split())}") from error
