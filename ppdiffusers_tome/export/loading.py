"""Models that are not exported: check a model's folder, read its settings, load it."""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paddle
import ppdiffusers
from ppdiffusers import ControlNetModel, DiffusionPipeline, StableDiffusionControlNetPipeline

from ..errors import ToMeConfigError, ToMeError, ToMeExportError
from ..families.grids import latent_grid
from ..families.pipelines import vae_factor
from ..hub import HUB, check_hub_name, download_index, has_diffusers_format
from ..run.defaults import ModelDefaults, read_defaults
from ..run.manifest import MANIFEST

DIFFUSERS_WEIGHTS = (
    "It has diffusers' format, of which ppdiffusers reads weights in float32 or float16, from files that name no "
    "variant such as fp16. It writes those of text encoders beside them, as model_state.pdparams."
)


def model_defaults(model: str, pipe: DiffusionPipeline) -> ModelDefaults:
    """A model's own size, steps and guidance scale: of `read_defaults`, then its denoiser's size and its pipeline's.

    Those that are not known are None.

    Args:
        model: folder or hub name.
        pipe: its pipeline.

    Raises:
        ToMeConfigError: as `read_defaults`.
    """
    parameters = inspect.signature(type(pipe).__call__).parameters
    grid = latent_grid(vars(pipe).get("unet") or vars(pipe).get("transformer"))
    values: dict[str, Any] = {"size": grid and max(grid) * vae_factor(pipe)}
    for name, parameter in (("steps", "num_inference_steps"), ("guidance_scale", "guidance_scale")):
        values[name] = parameters[parameter].default if parameter in parameters else None
    return ModelDefaults(**values | {name: v for name, v in vars(read_defaults(Path(model))).items() if v is not None})


def require_model_folder(model: str | Path, hub_names: bool = False) -> None:
    """Raise unless a model is the folder of a pipeline, in the format of ppdiffusers or diffusers.

    Args:
        model: the folder.
        hub_names: accept a hub name (owner/name) too; nothing is downloaded.

    Raises:
        ToMeConfigError: the folder does not exist, contains no pipeline, or is an export; or as `read_defaults`.
    """
    folder = Path(model)
    if not folder.is_dir():
        # ppdiffusers would create a folder of that name.
        if not hub_names:
            raise ToMeConfigError(
                f"{model} is not a folder: pass the folder of a pipeline of ppdiffusers or diffusers."
            )
        check_hub_name(str(model))
    elif (folder / MANIFEST).is_file():
        raise ToMeConfigError(
            f"{model} is already an export (it has {MANIFEST}): pass the folder of the model that was exported."
        )
    elif not (folder / "model_index.json").is_file():
        raise ToMeConfigError(
            f"{model} has no model_index.json, so it is not a pipeline of ppdiffusers or diffusers: pass the folder "
            "that save_pretrained of a pipeline wrote."
        )
    read_defaults(folder)


def pipeline_class(model: str) -> type[DiffusionPipeline] | None:
    """The class of the pipeline in a folder; None for a hub name, or if ppdiffusers has no class of that name."""
    return _class_of(_read_index(model))


def _class_of(index: dict[str, Any]) -> type[DiffusionPipeline] | None:
    """The class that a model_index.json names; None if it names none, or ppdiffusers has none of that name."""
    name = index.get("_class_name")
    return getattr(ppdiffusers, name, None) if isinstance(name, str) else None


def _read_index(model: str) -> dict[str, Any]:
    """What a folder's model_index.json contains; nothing for a hub name.

    Raises:
        ToMeExportError: it cannot be read.
    """
    file = Path(model) / "model_index.json"
    if not file.is_file():
        return {}
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ToMeExportError(f"{model} cannot be loaded: model_index.json cannot be read: {error}") from error
    return index if isinstance(index, dict) else {}


def load_eager_pipeline(
    model: str,
    controlnet: str | None = None,
    safety_checker: bool = True,
    dtype: str = "float32",
    needs_controlnet: bool = False,
) -> DiffusionPipeline:
    """Load a pipeline that is not exported, as `export_pipeline` needs it, or in a different dtype for `compare`.

    Args:
        model: folder in the format of ppdiffusers or diffusers, or hub name.
        controlnet: the same for a ControlNet; the pipeline is then a StableDiffusionControlNetPipeline.
        safety_checker: False drops a safety checker; a pipeline with a safety checker cannot be exported.
        dtype: of the weights: "float32" or, on a GPU, "float16".
        needs_controlnet: whether an option is for a ControlNet, which the pipeline must then have.

    Raises:
        ToMeConfigError: a folder does not exist and is not a valid hub name, `require_model_folder` rejects it, or
            there is no ControlNet, and it is needed.
        ToMeExportError: ppdiffusers cannot load it.
    """
    if controlnet is not None and not Path(controlnet).is_dir():
        check_hub_name(controlnet)
    require_model_folder(model, hub_names=True)
    with _explaining(model):
        index = _read_index(model) if Path(model).is_dir() else download_index(model)
    if needs_controlnet and controlnet is None and index.get("controlnet") in (None, [None, None]):
        raise ToMeConfigError(
            f"--controlnet-ratio needs a ControlNet, and {model} has none: pass --controlnet DIR, or leave "
            "--controlnet-ratio out."
        )
    # ppdiffusers asks for what the folder says is absent, such as the third text encoder of Stable Diffusion 3.
    dropped: dict[str, Any] = {name: None for name, part in index.items() if part == [None, None]}
    cls = DiffusionPipeline if controlnet is None else StableDiffusionControlNetPipeline
    if not safety_checker:
        own = cls if controlnet is not None else _class_of(index) or cls
        has_checker = "safety_checker" in inspect.signature(own).parameters
        dropped |= {"safety_checker": None, "requires_safety_checker": False} if has_checker else {}
    networks = {} if controlnet is None else {"controlnet": _load(ControlNetModel, controlnet, dtype)}
    return _load(cls, model, dtype, **dropped | networks)


def _load(cls: type[DiffusionPipeline | ControlNetModel], model: str, dtype: str, **components: Any) -> Any:
    """What a folder or a hub name contains, of this class; `components` take the place of its own."""
    with _explaining(model):
        from_diffusers = has_diffusers_format(cls, model)
    with _explaining(model, DIFFUSERS_WEIGHTS if from_diffusers else ""):
        return cls.from_pretrained(
            model, from_diffusers=from_diffusers, paddle_dtype=getattr(paddle, dtype), **components
        )


@contextmanager
def _explaining(model: str, remedy: str = "") -> Iterator[None]:
    """Let errors of ppdiffusers, which are of many types, name the model that it loads in this context.

    Raises:
        ToMeExportError: instead of them.
    """
    try:
        yield
    except ToMeError:
        raise
    except Exception as error:
        words = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
        reason = " ".join((f"{words.rstrip('. ')}. {remedy}" if remedy else words).split())
        if not Path(model).is_dir():
            raise ToMeExportError(
                f"{model} is not a folder in {Path.cwd()}, and could not be loaded as the name of a model on {HUB}: "
                f"{reason}"
            ) from error
        raise ToMeExportError(f"{model} cannot be loaded: {reason}") from error
