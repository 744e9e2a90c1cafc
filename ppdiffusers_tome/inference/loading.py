"""Load the eager pipeline to export, from a folder or by hub name, in float32."""

import re
from pathlib import Path

import paddle
from ppdiffusers import (
    ControlNetModel,
    DiffusionPipeline,
    StableDiffusionControlNetPipeline,
)

from ..errors import ToMeExportError


def load_for_export(model: str, controlnet: str | None = None, safety_checker: bool = True) -> DiffusionPipeline:
    """Load a pipeline for `export_pipeline`.

    Args:
        model: folder in ppdiffusers' format, or hub name.
        controlnet: the same for a ControlNet; the pipeline is then a StableDiffusionControlNetPipeline.
        safety_checker: False drops the safety checker, if there is one; a pipeline with one cannot be exported.

    Raises:
        ToMeExportError: the folder does not exist and is not a valid hub name, or ppdiffusers cannot load it.
    """
    for source in (model, controlnet):
        # Checked first, because ppdiffusers would create a folder of that name.
        if source is not None and not Path(source).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source):
            raise ToMeExportError(f"{source} is neither a folder nor a hub name (owner/name).")
    arguments = {"paddle_dtype": paddle.float32}
    dropped = {} if safety_checker else {"safety_checker": None, "requires_safety_checker": False}
    try:
        if controlnet is None:
            return DiffusionPipeline.from_pretrained(model, **arguments, **dropped)
        network = ControlNetModel.from_pretrained(controlnet, **arguments)
        return StableDiffusionControlNetPipeline.from_pretrained(model, controlnet=network, **arguments, **dropped)
    except (OSError, ValueError, KeyError) as error:
        raise ToMeExportError(f"{model} cannot be loaded: {' '.join(str(error).split())}") from error
