"""Stable Diffusion and SDXL with one ControlNet or two, each for drawing, redrawing and inpainting."""

import ppdiffusers as pp

from .base import Tiny, family
from .images import IMAGE, INPAINT, TEXT
from .parts import SDXL, controlnet, image, sdxl, stable_diffusion

ONE = ("unet", "controlnet")
TWO = ("unet", "controlnet.nets.0", "controlnet.nets.1")
HINT = image(seed=1)


def controlled(cls, given, hint, two=False, **changes):
    """A pipeline of a class, whose call takes the picture that the ControlNet sees by the name `hint`."""
    xl = "XL" in cls.__name__
    layout = SDXL if xl else {}
    nets = [controlnet(**layout) for _ in range(1 + two)]
    pipe = cls(**(sdxl if xl else stable_diffusion)(controlnet=nets if two else nets[0], **changes))
    seen = {hint: [HINT, image(seed=2)] if two else HINT, "controlnet_conditioning_scale": [1.0, 0.5] if two else 1.0}
    return Tiny(pipe, {**given, **seen}, TWO if two else ONE)


@family
def StableDiffusionControlNetPipeline():
    return controlled(pp.StableDiffusionControlNetPipeline, TEXT, "image")


@family
def StableDiffusionControlNetPipeline_two():
    return controlled(pp.StableDiffusionControlNetPipeline, TEXT, "image", two=True)


@family
def StableDiffusionControlNetImg2ImgPipeline():
    return controlled(pp.StableDiffusionControlNetImg2ImgPipeline, IMAGE, "control_image")


@family
def StableDiffusionControlNetImg2ImgPipeline_two():
    return controlled(pp.StableDiffusionControlNetImg2ImgPipeline, IMAGE, "control_image", two=True)


@family
def StableDiffusionControlNetInpaintPipeline():
    return controlled(pp.StableDiffusionControlNetInpaintPipeline, INPAINT, "control_image")


@family
def StableDiffusionControlNetInpaintPipeline_two():
    return controlled(pp.StableDiffusionControlNetInpaintPipeline, INPAINT, "control_image", two=True)


@family
def StableDiffusionXLControlNetPipeline():
    return controlled(pp.StableDiffusionXLControlNetPipeline, TEXT, "image")


@family
def StableDiffusionXLControlNetPipeline_two():
    return controlled(pp.StableDiffusionXLControlNetPipeline, TEXT, "image", two=True)


@family
def StableDiffusionXLControlNetImg2ImgPipeline():
    return controlled(pp.StableDiffusionXLControlNetImg2ImgPipeline, IMAGE, "control_image")


@family
def StableDiffusionXLControlNetImg2ImgPipeline_two():
    return controlled(pp.StableDiffusionXLControlNetImg2ImgPipeline, IMAGE, "control_image", two=True)


@family
def StableDiffusionXLControlNetInpaintPipeline():
    return controlled(pp.StableDiffusionXLControlNetInpaintPipeline, INPAINT, "control_image")


@family
def StableDiffusionXLControlNetInpaintPipeline_two():
    return controlled(pp.StableDiffusionXLControlNetInpaintPipeline, INPAINT, "control_image", two=True)
