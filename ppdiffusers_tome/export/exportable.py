"""Which pipelines can be exported, and what an export takes from them where the request leaves it open."""

import math
from collections.abc import Iterable
from pathlib import Path

import ppdiffusers
from paddle import nn
from ppdiffusers import ControlNetModel, DiffusionPipeline

from ..attach.attach import choose_blocks, config_of
from ..errors import ToMeConfigError, ToMeExportError
from ..families.grids import latent_grid
from ..families.models import text_tokens, vae_factor
from ..run.defaults import ModelDefaults, read_defaults
from ..run.manifest import READERS, TEXT_ENCODERS, Size
from ..run.models import ExportedUNet
from .request import STEP, DenoiserMerging, check_multiple

NEEDED = ("unet", "vae", "scheduler", *TEXT_ENCODERS, "tokenizer", "tokenizer_2", "controlnet")  # components


def check_pipeline(pipe: DiffusionPipeline) -> None:
    """Raise unless a pipeline can be exported.

    Raises:
        ToMeExportError: it is of a class, or has a component, that an export cannot have.
        ToMeConfigError: as `defaults_of`.
    """
    class_name = type(pipe).__name__
    if class_name not in READERS:
        raise ToMeExportError(
            f"{class_name} cannot be exported: only {', '.join(READERS)} can. Run it in eager mode with apply_tome()."
        )
    _check_components(pipe)
    _check_scheduler(pipe)
    _check_tokens(pipe)
    defaults_of(pipe)  # a file with errors is one now, and not in the export that gets a copy


def check_merging(pipe: DiffusionPipeline, merging: Iterable[DenoiserMerging]) -> None:
    """Raise, before any program is written, what `attach` raises for the models of a program.

    Raises:
        ToMeConfigError, NoMergeableLayerError: as `attach`.
    """
    controlnet = controlnet_of(pipe)
    for one in merging:
        if one.unet is not None:
            choose_blocks(pipe.unet, one.unet, None)
        if one.controlnet is not None and controlnet is not None:
            choose_blocks(controlnet, one.unet or one.controlnet, one.controlnet)


def defaults_of(pipe: DiffusionPipeline) -> ModelDefaults:
    """The recommended settings in the folder that a pipeline was loaded from; errors are those of `read_defaults`."""
    folder = pipe.config.get("_name_or_path")  # None of a pipeline that was made in Python
    return read_defaults(Path(folder)) if folder else ModelDefaults()


def applied_merging(pipe: DiffusionPipeline) -> DenoiserMerging:
    """How a pipeline merges now.

    Raises:
        ToMeConfigError: only its ControlNet merges.
    """
    return DenoiserMerging(config_of(pipe.unet), config_of(pipe.controlnet) if "controlnet" in pipe.config else None)


def sizes_for(pipe: DiffusionPipeline, sizes: tuple[Size, ...] | None) -> tuple[Size, ...]:
    """The sizes of a request for this pipeline; None is the UNet's default.

    Raises:
        ToMeConfigError: the UNet has no default, or its VAE does not allow a size.
    """
    factor = vae_factor(pipe)
    if sizes is None:
        latent = latent_grid(pipe.unet)
        if latent is None:
            raise ToMeConfigError(
                "sizes (--size) is required: the UNet's config has no sample_size to use as the default."
            )
        sizes = (Size(latent.h * factor, latent.w * factor),)
    for size in sizes:
        check_multiple(size, math.lcm(STEP, factor))
    return sizes


def text_encoders(pipe: DiffusionPipeline) -> list[str]:
    """The names of a pipeline's text encoders: one in Stable Diffusion, two in SDXL, the second in SDXL's refiner."""
    return [name for name in TEXT_ENCODERS if vars(pipe).get(name) is not None]


def controlnet_of(pipe: DiffusionPipeline) -> nn.Layer | None:
    """The pipeline's ControlNet; None if it has none."""
    return vars(pipe).get("controlnet")


def is_xl(pipe: DiffusionPipeline) -> bool:
    """Whether this is an SDXL pipeline, which has two text encoders."""
    return "text_encoder_2" in pipe.config


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


def _check_scheduler(pipe: DiffusionPipeline) -> None:
    """Raise ToMeExportError if what loads an export has no scheduler of this class."""
    cls = type(pipe.scheduler)
    if getattr(ppdiffusers, cls.__name__, None) is not cls:
        raise ToMeExportError(
            f"the scheduler is {cls.__module__}.{cls.__name__}, but an export is loaded with a class that ppdiffusers "
            "has under its name. Set one for the export, such as pipe.scheduler = "
            "DDIMScheduler.from_config(pipe.scheduler.config), and yours in the pipeline that load_pipeline returns."
        )


def _check_tokens(pipe: DiffusionPipeline) -> None:
    """Raise ToMeExportError if prompts are padded to more tokens than a text encoder has positions for."""
    tokens = text_tokens(pipe)
    for name in text_encoders(pipe):
        positions = getattr(getattr(pipe, name).config, "max_position_embeddings", tokens)
        if tokens > positions:
            raise ToMeExportError(
                f"the tokenizer pads prompts to {tokens} tokens, but the {name} has {positions} positions: set "
                f"model_max_length to {positions} in tokenizer_config.json, or in the pipeline's tokenizers."
            )
