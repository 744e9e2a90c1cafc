"""The pipelines that can be compared: which class runs, and how a pipeline becomes one of that class."""

import inspect
from collections.abc import Collection
from typing import Any

import paddle.nn.functional as F
import ppdiffusers
from ppdiffusers import DiffusionPipeline

from ..errors import ToMeConfigError

# What a pipeline must take beside the inputs of `Scene`: a text, and a function that it calls after each step.
PARAMETERS = ("prompt", "num_inference_steps", "guidance_scale", "callback_on_step_end")
# Parameters of pipelines for which text and size are not enough, unless they are among the inputs.
OTHER_PARAMETERS = {
    "mask_image": "needs a mask",
    "num_frames": "generates videos",
    "image": "needs an image (--image)",
}
CONTROLNET = "StableDiffusionControlNetPipeline"
# Whose models it takes.
WITH_CONTROLNET = ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", CONTROLNET)
IMAGE_TO_IMAGE = {  # the pipeline that starts from an image, over the same models
    "StableDiffusionPipeline": "StableDiffusionImg2ImgPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusion3Pipeline": "StableDiffusion3Img2ImgPipeline",
    "LatentConsistencyModelPipeline": "LatentConsistencyModelImg2ImgPipeline",
}


def inputs_of(uses_controlnet: bool, has_image: bool) -> tuple[str, ...]:
    """The names of the pipeline's arguments for an image: of a ControlNet, of image-to-image, or from text alone."""
    if not has_image:
        return ("height", "width")
    return ("image", "height", "width") if uses_controlnet else ("image", "strength")


def class_to_compare(own: type[DiffusionPipeline], uses_controlnet: bool, has_image: bool) -> type[DiffusionPipeline]:
    """The class that generates the images of a model.

    Args:
        own: the class of the model's pipeline.
        uses_controlnet: whether there is a ControlNet, whose input is the image.
        has_image: whether there is an image; without a ControlNet, the pipeline starts from it.

    Raises:
        ToMeConfigError: pipelines of this class cannot be compared, with a ControlNet or from an image.
    """
    name = own.__name__
    if uses_controlnet:
        if name not in WITH_CONTROLNET:
            raise ToMeConfigError(
                f"--controlnet cannot be used with a {name}: compare generates images with a ControlNet of Stable "
                "Diffusion alone."
            )
        name = CONTROLNET
    elif has_image:
        name = IMAGE_TO_IMAGE.get(name, name)
    cls = own if name == own.__name__ else getattr(ppdiffusers, name)
    check_pipeline(cls, inputs_of(uses_controlnet, has_image))
    return cls


def check_pipeline(pipeline: type[DiffusionPipeline], inputs: Collection[str] = inputs_of(False, False)) -> None:
    """Raise unless pipelines of this class can be compared.

    Args:
        pipeline: the class.
        inputs: the names of the arguments that it gets beside PARAMETERS.

    Raises:
        ToMeConfigError: they lack one of PARAMETERS or inputs, have one of OTHER_PARAMETERS that is not among the
            inputs, or run on GPUs only.
    """
    parameters = inspect.signature(pipeline.__call__).parameters
    reasons = [why for name, why in OTHER_PARAMETERS.items() if name in parameters and name not in inputs]
    reasons += [f"has no {name}" for name in (*PARAMETERS, *inputs) if name not in parameters]
    if reasons:
        raise ToMeConfigError(
            f"{pipeline.__name__} {reasons[0]}, so it cannot be compared: compare generates images with pipelines "
            "that report their steps, such as those of Stable Diffusion, SDXL and Stable Diffusion 3, from text or "
            "from an image, and with a ControlNet of Stable Diffusion."
        )
    if pipeline.__name__.startswith("StableDiffusion3") and not hasattr(F, "scaled_dot_product_attention_"):
        raise ToMeConfigError(
            f"{pipeline.__name__} cannot be compared on this machine: ppdiffusers {ppdiffusers.__version__} defines "
            "the attention that it calls on GPUs only. On a CPU, compare generates images with Stable Diffusion and "
            "SDXL."
        )


def as_class(pipe: DiffusionPipeline, cls: type[DiffusionPipeline]) -> DiffusionPipeline:
    """The pipeline itself, or one of another class over the same models."""
    if isinstance(pipe, cls):
        return pipe
    has_checker = "requires_safety_checker" in inspect.signature(cls).parameters
    options: dict[str, Any] = {"requires_safety_checker": False} if has_checker else {}
    return cls(**pipe.components, **options)
