"""The arguments of `export_pipeline`, validated before anything is written."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle import nn
from ppdiffusers import ControlNetModel, DiffusionPipeline

from ..api import controlnet_config
from ..config import Schedule, ToMeConfig, is_schedule
from ..errors import ToMeConfigError, ToMeExportError
from ..models import latent_grid, vae_factor
from ..patch import config_of
from .conversion import check_converter
from .manifest import FORMATS, MANIFEST, READERS, Size, ratio_name
from .models import ExportedUNet
from .replacement import check_replaceable, restore

EXPORT_FORMATS = {"paddle": FORMATS[:1], "onnx": FORMATS[1:], "both": FORMATS}  # argument → formats of the programs
STEP = 8  # px: ppdiffusers' pipelines reject a height or width that is not a multiple of it, whatever the VAE

Configs = tuple[ToMeConfig | None, ToMeConfig | None]  # of UNet and ControlNet; None: plain, or absent


@dataclass(frozen=True)
class Request:
    """Validated arguments of an export."""

    pipe: DiffusionPipeline
    folder: Path
    configs: dict[float, Configs]  # by ratio, in the order of the arguments
    sizes: tuple[Size, ...]
    image_to_image: bool
    formats: tuple[str, ...]  # some of FORMATS
    schedule: Schedule | None  # the default, over ratios of `configs`; None: the default is the first of them

    @property
    def controlnet(self) -> nn.Layer | None:
        """The pipeline's ControlNet; None if it has none."""
        return vars(self.pipe).get("controlnet")

    @property
    def is_xl(self) -> bool:
        """Whether this is an SDXL pipeline, which has two text encoders."""
        return "text_encoder_2" in self.pipe.config

    @property
    def reader(self) -> str:
        """The ppdiffusers class that loads the folder."""
        name = READERS[type(self.pipe).__name__][self.image_to_image]
        assert name is not None  # check_request sets image_to_image for pipelines without a text-to-image reader
        return name


def check_request(
    pipe: DiffusionPipeline,
    folder: str | Path,
    ratios: Any,
    sizes: Iterable[tuple[int, int]] | None,
    image_to_image: bool,
    overwrite: bool,
    controlnet: Any,
    format: str,
    settings: dict[str, Any],
) -> Request:
    """Validate the arguments of `export_pipeline`, which documents them.

    Raises:
        ToMeConfigError, ToMeExportError: as `export_pipeline`.
    """
    class_name = type(pipe).__name__
    if class_name not in READERS:
        raise ToMeExportError(f"{class_name} cannot be exported: only {', '.join(READERS)} can.")
    _check_components(pipe)
    sizes = None if sizes is None else tuple(sizes)
    if ratios is not None:
        configs, schedule = check_arguments(folder, ratios, sizes, overwrite, controlnet, format, settings)
    else:
        _check_output(Path(folder), overwrite, format)
        configs, schedule = _current_configs(pipe, settings)
        _check_programs(configs, sizes)
    return Request(
        pipe=pipe,
        folder=Path(folder),
        configs=configs,
        sizes=_sizes(pipe, sizes),
        image_to_image=image_to_image or READERS[class_name][0] is None,
        formats=EXPORT_FORMATS[format],
        schedule=schedule,
    )


def check_arguments(
    folder: str | Path,
    ratios: Any,
    sizes: Collection[tuple[int, int]] | None,
    overwrite: bool,
    controlnet: Any,
    format: str,
    settings: dict[str, Any],
) -> tuple[dict[float, Configs], Schedule | None]:
    """Validate what needs no pipeline, so that a command can do it before it loads one.

    Returns:
        The configs of UNet and ControlNet by ratio, and the schedule that is the default.

    Raises:
        ToMeConfigError, ToMeExportError: as `export_pipeline`.
    """
    _check_output(Path(folder), overwrite, format)
    configs, schedule = _configs(ratios, controlnet, settings)
    _check_programs(configs, sizes)
    return configs, schedule


def _check_output(folder: Path, overwrite: bool, format: str) -> None:
    if format not in EXPORT_FORMATS:
        raise ToMeConfigError(f"format={format!r} is not allowed: it must be one of {[*EXPORT_FORMATS]}.")
    if "onnx" in EXPORT_FORMATS[format]:
        check_converter()
    restore(folder)
    try:
        check_replaceable(folder)
    except OSError as error:
        raise ToMeExportError(f"{folder} cannot be written ({error.strerror or error}): pass another.") from error
    if folder.exists() and not folder.is_dir():
        raise ToMeExportError(f"{folder} is a file: pass a folder to write to.")
    if folder.is_dir() and any(folder.iterdir()) and not (overwrite and (folder / MANIFEST).is_file()):
        remedy = "pass overwrite=True (--overwrite)" if (folder / MANIFEST).is_file() else "pass another folder"
        raise ToMeExportError(f"{folder} exists and is not empty: {remedy}.")


def _check_programs(configs: dict[float, Configs], sizes: Collection[tuple[int, int]] | None) -> None:
    """Raise unless the merging of these configs can be part of programs of these sizes."""
    ratios: dict[str, float] = {}
    for ratio in configs:
        if (other := ratios.setdefault(ratio_name(ratio), ratio)) != ratio:
            raise ToMeConfigError(
                f"ratios {other!r} and {ratio!r} are the same to six digits, by which programs are named: pass one."
            )
    merging = [config for config, _ in configs.values() if config is not None]
    if any(config.use_rand and config.seed is None for config in merging):
        raise ToMeConfigError(
            "seed=None chooses new dst in every pass, but a program contains one fixed choice: pass a number, or "
            "use_rand=False (--no-rand)."
        )
    for size in sizes or ():
        _check_size(size, STEP)


def _check_components(pipe: DiffusionPipeline) -> None:
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
    controlnet = vars(pipe).get("controlnet")
    if controlnet is not None and not isinstance(controlnet, ControlNetModel):
        raise ToMeExportError(f"{type(controlnet).__name__} cannot be exported: pass a single ControlNetModel.")


def _current_configs(
    pipe: DiffusionPipeline, settings: dict[str, Any]
) -> tuple[dict[float, Configs], Schedule | None]:
    """The configs that are applied to a pipeline now."""
    if settings:
        raise ToMeConfigError(f"{', '.join(settings)} cannot be set without ratios: pass ratios as well.")
    config = config_of(pipe.unet)
    current = config_of(pipe.controlnet) if "controlnet" in pipe.config else None
    return ({0.0: (None, current)}, None) if config is None else _by_ratio(config, current)


def _configs(ratios: Any, controlnet: Any, settings: dict[str, Any]) -> tuple[dict[float, Configs], Schedule | None]:
    ratio_list = [ratios] if isinstance(ratios, (int, float)) or is_schedule(ratios) else list(ratios)
    if not ratio_list:
        raise ToMeConfigError("ratios is empty: pass at least one, 0 for a plain program.")
    configs: dict[float, Configs] = {}
    schedules = []
    for ratio in ratio_list:
        config = ToMeConfig(ratio=ratio, **settings)
        by_ratio, schedule = _by_ratio(config, controlnet_config(config, controlnet))
        # Plus 0.0, because -0.0 is 0.
        configs |= {ratio + 0.0: pair if ratio else (None, None) for ratio, pair in by_ratio.items()}
        schedules.append(schedule)
    if any(schedules[1:]):
        raise ToMeConfigError(
            f"ratios={ratios!r:.200} is not allowed: only the first, the default, may be a schedule."
        )
    return configs, schedules[0]


def _by_ratio(config: ToMeConfig, controlnet: ToMeConfig | None) -> tuple[dict[float, Configs], Schedule | None]:
    """The two configs at each ratio of the first one, and its schedule if it has one."""
    if controlnet is not None and len(controlnet.ratios) > 1 and controlnet.ratio != config.ratio:
        raise ToMeExportError(
            f"the ControlNet's {controlnet.describe()} cannot be exported: it is part of the UNet's programs, so it "
            "can only have the UNet's schedule or a constant ratio."
        )
    if not isinstance(config.ratio, tuple):
        return {config.ratio: (config, controlnet)}, None
    pairs = ((config.at(share), controlnet and controlnet.at(share)) for share, _ in config.ratio)
    return {unet.constant_ratio: (unet, other) for unet, other in pairs}, config.ratio


def _sizes(pipe: DiffusionPipeline, sizes: Collection[tuple[int, int]] | None) -> tuple[Size, ...]:
    factor = vae_factor(pipe)
    if sizes is None:
        latent = latent_grid(pipe.unet)
        if latent is None:
            raise ToMeConfigError("sizes is required: the UNet's config has no sample_size to use as the default.")
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
        raise ToMeConfigError(f"size={size} is not allowed: width and height must be multiples of {step} px.")
    if any(side % step for side in size):
        smaller, larger = (
            Size(*(max(round_(side / step), 1) * step for side in size)) for round_ in (math.floor, math.ceil)
        )
        raise ToMeConfigError(
            f"size={size} is not allowed: width and height must be multiples of {step} px. The nearest sizes are "
            f"{smaller} and {larger}."
        )
