"""Which pipelines can be exported, and what an export takes from them where the request leaves it open.

An export stands for a pipeline: what the pipeline does because of the class or the config of a component is the same
with programs in its place. `STANDS_FOR` has the classes and configs of which this is true; the rest is refused.
"""

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ppdiffusers
from paddle import nn
from ppdiffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    ControlNetModel,
    DiffusionPipeline,
    UNet2DConditionModel,
)
from ppdiffusers.transformers import CLIPTextModel, CLIPTextModelWithProjection

from ..attach.attach import choose_blocks, config_of
from ..errors import ToMeConfigError, ToMeExportError
from ..families.grids import latent_grid
from ..families.pipelines import text_tokens, vae_factor
from ..run.defaults import ModelDefaults, read_defaults
from ..run.manifest import TEXT_ENCODERS
from ..run.models import ExportedUNet
from ..run.pipeline import COPIED
from ..run.sizes import Size
from .request import STEP, DenoiserMerging, check_multiple

NEEDED = ("unet", "vae", "scheduler", *TEXT_ENCODERS, "tokenizer", "tokenizer_2", "controlnet")  # components
LIBRARIES = ("ppdiffusers", "ppdiffusers.transformers", "paddlenlp.transformers")  # of components that are not models
EAGER = "Run the pipeline in eager mode with apply_tome()."
# ppdiffusers' class that reads the folder of a pipeline, without and with a VAE encoder
READERS: dict[str, tuple[str | None, str]] = {
    "StableDiffusionPipeline": ("PaddleInferStableDiffusionPipeline", "PaddleInferStableDiffusionMegaPipeline"),
    "StableDiffusionImg2ImgPipeline": (None, "PaddleInferStableDiffusionImg2ImgPipeline"),
    "StableDiffusionInpaintPipeline": (None, "PaddleInferStableDiffusionInpaintPipeline"),
    "StableDiffusionControlNetPipeline": 2 * ("PaddleInferStableDiffusionControlNetPipeline",),
    "StableDiffusionXLPipeline": ("PaddleInferStableDiffusionXLPipeline", "PaddleInferStableDiffusionXLMegaPipeline"),
    "StableDiffusionXLImg2ImgPipeline": (None, "PaddleInferStableDiffusionXLImg2ImgPipeline"),
}


@dataclass(frozen=True)
class Replaceable:
    """The models that a program can stand for.

    Args:
        component: the model's name in a pipeline.
        classes: its classes; subclasses are allowed too.
        config: of entries of its config that change what a pipeline does with the model: the values that are allowed,
            and what the pipeline or the model does at any other value.
    """

    component: str
    classes: tuple[type[nn.Layer], ...]
    config: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)

    def check(self, program: str, model: nn.Layer) -> None:
        """Raise ToMeExportError unless a program, whose name is given, can stand for a model."""
        name = self.component
        if not isinstance(model, self.classes):
            allowed = " or ".join(cls.__name__ for cls in self.classes)
            where = " where --img2img or the pipeline itself needs its encoder" if program == "vae_encoder" else ""
            raise ToMeExportError(
                f"the pipeline's {name} is of the class {type(model).__name__}, but an export can only stand for "
                f"{allowed}{where}: load the pipeline with such a model."
            )
        for entry, (allowed_values, effect) in self.config.items():
            value = getattr(model.config, entry, None)
            if value not in (None, *allowed_values):
                raise ToMeExportError(
                    f"the pipeline's {name} has {entry}={value!r} in its config: {effect}, which no program does, so "
                    f"it cannot be exported. {EAGER}"
                )


_MORE_INPUTS = "it has inputs that Stable Diffusion and SDXL do not have"
_INPUTS = {"class_embed_type": ((), _MORE_INPUTS), "num_class_embeds": ((), _MORE_INPUTS)}
_MASKED = {"use_attention_mask": ((False,), "pipelines pass it a mask of the text")}
STANDS_FOR = {  # by program
    "unet": Replaceable(
        "unet",
        (UNet2DConditionModel,),
        {
            "time_cond_proj_dim": ((), "it takes the guidance scale as an input, as latent consistency models do"),
            "addition_embed_type": (("text_time",), _MORE_INPUTS),
            **_INPUTS,
        },
    ),
    "controlnet": Replaceable(
        "controlnet",
        (ControlNetModel,),
        {
            "global_pool_conditions": ((False,), "ppdiffusers turns guess mode on for it"),
            "addition_embed_type": ((), _MORE_INPUTS),
            **_INPUTS,
        },
    ),
    "text_encoder": Replaceable("text_encoder", (CLIPTextModel,), _MASKED),
    "text_encoder_2": Replaceable("text_encoder_2", (CLIPTextModelWithProjection,), _MASKED),
    # Not AsymmetricAutoencoderKL, to whose decoder pipelines pass the image and its mask, nor ConsistencyDecoderVAE,
    # whose decoder samples noise. An AutoencoderTiny encodes to latents, and not to a distribution.
    "vae_decoder": Replaceable("vae", (AutoencoderKL, AutoencoderTiny)),
    "vae_encoder": Replaceable("vae", (AutoencoderKL,)),
}


def check_pipeline(pipe: DiffusionPipeline, image_to_image: bool) -> None:
    """Raise unless a pipeline can be exported.

    Args:
        pipe: the pipeline.
        image_to_image: as in an ExportRequest.

    Raises:
        ToMeExportError: it is of a class, or has a component, that an export cannot have.
        ToMeConfigError: as `defaults_of`.
    """
    cls = type(pipe)
    if cls.__name__ not in READERS:
        raise ToMeExportError(f"{cls.__name__} cannot be exported: only {', '.join(READERS)} can. {EAGER}")
    if cls is not getattr(ppdiffusers, cls.__name__):
        raise ToMeExportError(
            f"{cls.__module__}.{cls.__name__} cannot be exported: an export is loaded as ppdiffusers.{cls.__name__}. "
            f"{EAGER}"
        )
    _check_components(pipe)
    for program, replaceable in STANDS_FOR.items():
        model = vars(pipe).get(replaceable.component)
        if model is not None and (program != "vae_encoder" or needs_encoder(pipe, image_to_image)):
            replaceable.check(program, model)
    for name in COPIED:
        if vars(pipe).get(name) is not None:
            library_of(name, getattr(pipe, name))
    _check_tokens(pipe)
    defaults_of(pipe)  # which is copied, and read, when the programs are written


def check_merging(pipe: DiffusionPipeline, merging: Iterable[DenoiserMerging]) -> None:
    """Raise, before any program is written, what `attach` raises for the models of a program.

    Raises:
        ToMeConfigError, NoMergeableLayerError: as `attach`.
    """
    controlnet = controlnet_of(pipe)
    for of_program in merging:
        if of_program.unet is not None:
            choose_blocks(pipe.unet, of_program.unet, None)
        if of_program.controlnet is not None and controlnet is not None:
            choose_blocks(controlnet, of_program.unet or of_program.controlnet, of_program.controlnet)


def defaults_of(pipe: DiffusionPipeline) -> ModelDefaults:
    """The recommended settings in the folder that a pipeline was loaded from; errors are those of `read_defaults`."""
    folder = pipe.config.get("_name_or_path")  # None of a pipeline that was made in Python
    return read_defaults(Path(folder)) if folder else ModelDefaults()


def needs_encoder(pipe: DiffusionPipeline, image_to_image: bool) -> bool:
    """Whether an export has the VAE's encoder: if it is asked for, or the pipeline starts from images."""
    return image_to_image or READERS[type(pipe).__name__][0] is None


def library_of(name: str, component: Any) -> str:
    """The library from which `load_pipeline` takes the class of a tokenizer, scheduler or feature extractor.

    Args:
        name: the component's name in a pipeline.

    Raises:
        ToMeExportError: none of LIBRARIES has it.
    """
    cls = type(component)
    for library in LIBRARIES:
        if getattr(importlib.import_module(library), cls.__name__, None) is cls:
            return library
    raise ToMeExportError(
        f"the pipeline's {name} is of the class {cls.__module__}.{cls.__name__}, but an export is loaded with classes "
        f"of {', '.join(LIBRARIES)} only: set another {name} for the export, and yours in the pipeline that "
        "load_pipeline returns."
    )


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
    if getattr(unet, "encoder_hid_proj", None) is not None:
        raise ToMeExportError("IP-Adapters cannot be exported: load the pipeline without one.")
    if any(getattr(block, "b1", None) is not None for block in unet.up_blocks):
        raise ToMeExportError("FreeU cannot be exported: call disable_freeu() of the pipeline first.")


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
