"""Check the arguments of `export_pipeline` before anything is written."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

import paddle
from paddle import nn
from ppdiffusers import ControlNetModel, DiffusionPipeline

from ..attach.attach import config_of
from ..config import ToMeConfig, check_names, controlnet_config
from ..errors import ParameterError, ToMeConfigError, ToMeExportError
from ..families.grids import latent_grid
from ..families.models import vae_factor
from ..replacement import check_replaceable, restore
from ..run.manifest import MANIFEST, READERS, TEXT_ENCODERS, Size, ratio_name
from ..run.models import ExportedUNet
from .choices import EXPORT_FORMATS
from .conversion import check_converter
from .diffusers_layout import DiffusersLayout, check_single, is_layout

Configs: TypeAlias = tuple[ToMeConfig | None, ToMeConfig | None]  # of UNet and ControlNet; None: plain or none
NEEDED = ("unet", "vae", "scheduler", *TEXT_ENCODERS, "tokenizer", "tokenizer_2", "controlnet")  # components
STEP = 8  # px: ppdiffusers' pipelines reject a height or width that is not a multiple of it, whatever the VAE


def default_format() -> str:
    """The default format of an export, one of `EXPORT_FORMATS`.

    It is that of the default runtime: ONNX, or Paddle's where Paddle is a build for GPUs (paddlepaddle-gpu).
    """
    return "paddle" if paddle.is_compiled_with_cuda() else "onnx"


def make_configs(ratios: Iterable[float] | float | None, settings: Mapping[str, Any]) -> list[ToMeConfig] | None:
    """A config for each ratio, with these settings. Without ratios that of a method that is named, or None.

    Raises:
        ToMeConfigError: a name is not a setting, a value is not allowed, or there are settings but neither ratios nor
            a method.
    """
    check_names(settings)
    if ratios is None:
        if "method" in settings:
            return [ToMeConfig(**settings)]
        if settings:
            raise ToMeConfigError(f"{', '.join(settings)} cannot be set without ratios: pass ratios as well.")
        return None
    values: Any = ratios
    if isinstance(values, str) or not isinstance(values, Iterable):
        values = [values]
    return [ToMeConfig(ratio=ratio, **settings) for ratio in values]


def list_sizes(sizes: Iterable[tuple[int, int]] | int | None) -> list[tuple[int, int]] | None:
    """The sizes as (height, width); a number is a square, None the UNet's default.

    Raises:
        ToMeConfigError: they are something else.
    """
    if sizes is None:
        return None
    if isinstance(sizes, Integral):
        return [(int(sizes), int(sizes))]
    pairs: list[Any] = [*sizes] if isinstance(sizes, Iterable) else [sizes]
    if not all(isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2 for pair in pairs):
        rule = "it must be a list of (height, width), such as [(512, 768)], or one number for a square."
        raise ParameterError("sizes", sizes, rule)
    are_numbers = all(isinstance(side, Integral) for pair in pairs for side in pair)  # such as NumPy's
    return [(int(height), int(width)) for height, width in pairs] if are_numbers else pairs


def check_arguments(
    folder: Path,
    configs: Sequence[ToMeConfig] | None,
    sizes: Collection[tuple[int, int]] | None,
    *,
    controlnet: Any,
    overwrite: bool,
    format: str,
    layout: DiffusersLayout | None = None,
) -> None:
    """Check the arguments of `write_export` that need no pipeline, so that this can be done before one is loaded.

    Raises:
        ToMeConfigError, ToMeExportError: as `export_pipeline`.
    """
    _check_output(folder, overwrite, format)
    if layout is not None:
        check_single(configs, sizes)
    if configs is not None:
        _check_configs(_requested_configs(configs, controlnet))
    for size in sizes or ():
        _check_size(size, STEP)


def check_pipeline(pipe: DiffusionPipeline) -> None:
    """Raise ToMeExportError unless a pipeline can be exported."""
    class_name = type(pipe).__name__
    if class_name not in READERS:
        raise ToMeExportError(
            f"{class_name} cannot be exported: only {', '.join(READERS)} can. Run it in eager mode with apply_tome()."
        )
    _check_components(pipe)


def merging_of(pipe: DiffusionPipeline, configs: Sequence[ToMeConfig] | None, controlnet: Any) -> dict[float, Configs]:
    """The configs of UNet and ControlNet by the UNet's ratio, in the order of the arguments; the first is the default.

    Args:
        configs: one for each ratio; None: those that are applied to the pipeline.
    """
    merging = _applied_configs(pipe) if configs is None else _requested_configs(configs, controlnet)
    _check_configs(merging)
    return merging


def controlnet_of(pipe: DiffusionPipeline) -> nn.Layer | None:
    """The pipeline's ControlNet; None if it has none."""
    return vars(pipe).get("controlnet")


def is_xl(pipe: DiffusionPipeline) -> bool:
    """Whether this is an SDXL pipeline, which has two text encoders."""
    return "text_encoder_2" in pipe.config


def _check_output(folder: Path, overwrite: bool, format: str) -> None:
    if format not in EXPORT_FORMATS:
        raise ParameterError("format", format, f"it must be one of {[*EXPORT_FORMATS]}.")
    if "onnx" in EXPORT_FORMATS[format]:
        check_converter()
    restore(folder)
    try:
        check_replaceable(folder, overwrite)
    except OSError as error:
        raise ToMeExportError(f"{folder} cannot be written ({error.strerror or error}): pass another.") from error
    if folder.exists() and not folder.is_dir():
        raise ToMeExportError(f"{folder} is a file: pass a folder to write to.")
    is_export = (folder / MANIFEST).is_file() or is_layout(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (overwrite and is_export):
        remedy = "pass overwrite=True (--overwrite)" if is_export else "pass another folder"
        raise ToMeExportError(f"{folder} exists and is not empty: {remedy}.")


def _check_configs(configs: dict[float, Configs]) -> None:
    """Raise unless the merging of these configs can be part of programs."""
    for unet, controlnet in configs.values():
        if not (unet and unet.effective_ratio) and controlnet is not None and controlnet.effective_ratio:
            raise ToMeConfigError(
                f"only the ControlNet merges, at ratio {ratio_name(controlnet.effective_ratio)}, but a program is "
                "known by the UNet's ratio, and 0 is plain: merge in the UNet too, or call remove_tome() of the "
                "ControlNet."
            )
    ratios: dict[str, float] = {}
    for ratio in configs:
        if (other := ratios.setdefault(ratio_name(ratio), ratio)) != ratio:
            raise ToMeConfigError(
                f"ratios {other!r} and {ratio!r} are the same to six digits, by which programs are named: pass one."
            )


def _check_components(pipe: DiffusionPipeline) -> None:
    optional = ("text_encoder", "tokenizer") if is_xl(pipe) else ()  # SDXL's refiner has only the second ones
    for name in NEEDED:
        if name in pipe.config and name not in optional and vars(pipe).get(name) is None:
            raise ToMeExportError(
                f"the pipeline's {name} is None, so it cannot be exported: load the pipeline with a {name}."
            )
    if vars(pipe).get("safety_checker") is not None:
        raise ToMeExportError(
            "the pipeline's safety checker cannot be exported: to export without it, load the pipeline with "
            "safety_checker=None, requires_safety_checker=False (--no-safety-checker)."
        )
    unet = pipe.unet
    if isinstance(unet, ExportedUNet):
        raise ToMeExportError("the pipeline is already an export: pass the pipeline of the model that was exported.")
    if unet.config.time_cond_proj_dim is not None:
        raise ToMeExportError(
            "the UNet takes the guidance scale as an input (time_cond_proj_dim, as in latent consistency models), "
            "which ppdiffusers' programs do not have: it cannot be exported."
        )
    if unet.config.addition_embed_type not in (None, "text_time") or unet.config.class_embed_type is not None:
        raise ToMeExportError(
            f"the UNet has inputs that those of Stable Diffusion and SDXL do not have (addition_embed_type="
            f"{unet.config.addition_embed_type!r}, class_embed_type={unet.config.class_embed_type!r}): it cannot be "
            "exported."
        )
    if getattr(unet, "encoder_hid_proj", None) is not None:
        raise ToMeExportError("IP-Adapters cannot be exported: load the pipeline without one.")
    controlnet = controlnet_of(pipe)
    if controlnet is not None and not isinstance(controlnet, ControlNetModel):
        raise ToMeExportError(f"{type(controlnet).__name__} cannot be exported: pass a single ControlNetModel.")


def _applied_configs(pipe: DiffusionPipeline) -> dict[float, Configs]:
    """The configs of UNet and ControlNet that are applied to a pipeline now, by the UNet's ratio."""
    config = config_of(pipe.unet)
    controlnet = config_of(pipe.controlnet) if "controlnet" in pipe.config else None
    return {config.effective_ratio if config else 0.0: (config, controlnet)}


def _requested_configs(configs: Sequence[ToMeConfig], controlnet: Any) -> dict[float, Configs]:
    """The configs of UNet and ControlNet by the UNet's ratio; both are plain at ratio 0."""
    if not configs:
        raise ToMeConfigError("ratios is empty: pass at least one, 0 for a plain program.")
    by_ratio: dict[float, Configs] = {}
    for config in configs:
        pair = config, controlnet_config(config, controlnet)
        ratio = config.effective_ratio + 0.0  # because -0.0 is 0
        by_ratio[ratio] = pair if ratio else (None, None)
    if not any(by_ratio) and not isinstance(controlnet, bool) and controlnet:
        rule = "the UNet does not merge at any of the ratios, and ratio 0 is plain in the ControlNet too."
        raise ParameterError("controlnet", controlnet, rule)
    return by_ratio


def sizes_of(pipe: DiffusionPipeline, sizes: Collection[tuple[int, int]] | None) -> tuple[Size, ...]:
    """The sizes to export, each once; None: the UNet's default."""
    factor = vae_factor(pipe)
    if sizes is None:
        latent = latent_grid(pipe.unet)
        if latent is None:
            raise ToMeConfigError(
                "sizes (--size) is required: the UNet's config has no sample_size to use as the default."
            )
        sizes = [(latent.h * factor, latent.w * factor)]
    if not sizes:
        raise ToMeConfigError("sizes is empty: pass at least one, as (height, width) in pixels.")
    for size in sizes:
        _check_size(size, math.lcm(STEP, factor))
    return tuple(dict.fromkeys(Size(*size) for size in sizes))


def _check_size(size: tuple[int, int], step: int) -> None:
    """Raise unless both sides are multiples of a number of pixels."""
    size = Size(*size)
    if any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in size):
        raise ParameterError("size", str(size), f"width and height must be multiples of {step} px.")
    if any(side % step for side in size):
        smaller, larger = (
            Size(*(max(round_(side / step), 1) * step for side in size)) for round_ in (math.floor, math.ceil)
        )
        rule = f"width and height must be multiples of {step} px. The nearest sizes are {smaller} and {larger}."
        raise ParameterError("size", str(size), rule)
