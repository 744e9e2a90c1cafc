"""Stable Diffusion and SDXL with one or two ControlNets: text to image, image to image and inpainting."""

from functools import partial

import ppdiffusers as pp

from .base import ZOO, Tiny
from .images import IMAGE, INPAINT, TEXT
from .parts import SDXL, controlnet, image, sdxl, stable_diffusion

ONE = ("unet", "controlnet")
TWO = ("unet", "controlnet.nets.0", "controlnet.nets.1")
CONDITION = image(seed=1)


def controlled(cls, call, argument, two=False, **changes):
    """A pipeline of a class; `argument` is the name of the ControlNet's image in its call."""
    xl = "XL" in cls.__name__
    layout = SDXL if xl else {}
    nets = [controlnet(**layout) for _ in range(1 + two)]
    pipe = cls(**(sdxl if xl else stable_diffusion)(controlnet=nets if two else nets[0], **changes))
    condition = [CONDITION, image(seed=2)] if two else CONDITION
    scale = [1.0, 0.5] if two else 1.0
    call = {**call, argument: condition, "controlnet_conditioning_scale": scale}
    return Tiny(pipe, call, TWO if two else ONE)


CALLS = {  # the call without the ControlNet's image, and the name of that argument
    "StableDiffusionControlNetPipeline": (TEXT, "image"),
    "StableDiffusionControlNetImg2ImgPipeline": (IMAGE, "control_image"),
    "StableDiffusionControlNetInpaintPipeline": (INPAINT, "control_image"),
    "StableDiffusionXLControlNetPipeline": (TEXT, "image"),
    "StableDiffusionXLControlNetImg2ImgPipeline": (IMAGE, "control_image"),
    "StableDiffusionXLControlNetInpaintPipeline": (INPAINT, "control_image"),
}
for name, (call, argument) in CALLS.items():
    ZOO[name] = partial(controlled, getattr(pp, name), call, argument)
for name in ("StableDiffusionControlNetPipeline", "StableDiffusionXLControlNetPipeline"):
    ZOO[f"{name}_two"] = partial(ZOO[name], two=True)
