"""Which pipelines can be exported, and what an export takes from them where the request leaves it open."""

import math

from paddle import nn
from ppdiffusers import ControlNetModel, DiffusionPipeline

from ..attach.attach import config_of
from ..errors import ToMeConfigError, ToMeExportError
from ..families.grids import latent_grid
from ..families.pipelines import vae_factor
from ..run.manifest import TEXT_ENCODERS
from ..run.models import ExportedUNet
from ..run.sizes import Size
from .request import STEP, DenoiserMerging, check_multiple

NEEDED = ("unet", "vae", "scheduler", *TEXT_ENCODERS, "tokenizer", "tokenizer_2", "controlnet")  # components
# ppdiffusers' class that reads the folder of a pipeline, without and with a VAE encoder
READERS: dict[str, tuple[str | None, str]] = {
    "StableDiffusionPipeline": ("PaddleInferStableDiffusionPipeline", "PaddleInferStableDiffusionMegaPipeline"),
    "StableDiffusionImg2ImgPipeline": (None, "PaddleInferStableDiffusionImg2ImgPipeline"),
    "StableDiffusionInpaintPipeline": (None, "PaddleInferStableDiffusionInpaintPipeline"),
    "StableDiffusionControlNetPipeline": 2 * ("PaddleInferStableDiffusionControlNetPipeline",),
    "StableDiffusionXLPipeline": ("PaddleInferStableDiffusionXLPipeline", "PaddleInferStableDiffusionXLMegaPipeline"),
    "StableDiffusionXLImg2ImgPipeline": (None, "PaddleInferStableDiffusionXLImg2ImgPipeline"),
}


def check_pipeline(pipe: DiffusionPipeline) -> None:
    """Raise ToMeExportError unless a pipeline can be exported."""
    class_name = type(pipe).__name__
    if class_name not in READERS:
        raise ToMeExportError(
            f"{class_name} cannot be exported: only {', '.join(READERS)} can. Run it in eager mode with apply_tome()."
        )
    _check_components(pipe)


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
