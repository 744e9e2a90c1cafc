"""Stable Diffusion and SDXL with one ControlNet or two, each for drawing, redrawing and inpainting."""

from functools import partial

import ppdiffusers as pp

from .base import ZOO, Tiny
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


TAKES = {  # a call without the picture that the ControlNet sees, and the name that this picture has in it
    "StableDiffusionControlNetPipeline": (TEXT, "image"),
    "StableDiffusionControlNetImg2ImgPipeline": (IMAGE, "control_image"),
    "StableDiffusionControlNetInpaintPipeline": (INPAINT, "control_image"),
    "StableDiffusionXLControlNetPipeline": (TEXT, "image"),
    "StableDiffusionXLControlNetImg2ImgPipeline": (IMAGE, "control_image"),
    "StableDiffusionXLControlNetInpaintPipeline": (INPAINT, "control_image"),
}
for name, (given, hint) in TAKES.items():
    ZOO[name] = partial(controlled, getattr(pp, name), given, hint)
    ZOO[f"{name}_two"] = partial(ZOO[name], two=True)
