"""The eager pipeline that is to be exported, from a folder or hub name, in float32."""

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
    """Load a pipeline as `export_pipeline` takes it.

    Args:
        model: a folder that ppdiffusers reads, or a hub name.
        controlnet: the same for a ControlNet; the pipeline is then a StableDiffusionControlNetPipeline.
        safety_checker: False leaves a safety checker out; with it, one that is there makes the export fail.

    Raises:
        ToMeExportError: there is no such folder, and the name is no hub's either, or ppdiffusers cannot load it.
    """
    for source in (model, controlnet):
        # ppdiffusers would make a folder of that name.
        if source is not None and not Path(source).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source):
            raise ToMeExportError(f"{source}: there is no such folder, and a hub name looks like owner/name.")
    given = {"paddle_dtype": paddle.float32}
    left_out = {} if safety_checker else {"safety_checker": None, "requires_safety_checker": False}
    try:
        if controlnet is None:
            return DiffusionPipeline.from_pretrained(model, **given, **left_out)
        network = ControlNetModel.from_pretrained(controlnet, **given)
        return StableDiffusionControlNetPipeline.from_pretrained(model, controlnet=network, **given, **left_out)
    except (OSError, ValueError, KeyError) as error:
        raise ToMeExportError(f"{model} cannot be loaded: {' '.join(str(error).split())}") from error
