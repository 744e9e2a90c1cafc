"""A ControlNet that follows the edges of an image; tokens merge in the UNet and in the ControlNet."""

from pathlib import Path

import ppdiffusers_tome  # adds apply_tome to pipelines
import cv2
import numpy as np
import paddle
from PIL import Image
from ppdiffusers import ControlNetModel, StableDiffusionControlNetPipeline

MODEL = Path(__file__).parent / "emoji_sd"  # or "stable-diffusion-v1-5/stable-diffusion-v1-5"
DTYPE = paddle.float32  # float16 on a GPU
CONTROLNET = MODEL / "controlnet"  # or "lllyasviel/sd-controlnet-canny"
IMAGE = CONTROLNET / "penguin.png"

edges = cv2.Canny(np.array(Image.open(IMAGE).convert("L")), 100, 200)
condition = Image.fromarray(edges).convert("RGB")

controlnet = ControlNetModel.from_pretrained(str(CONTROLNET), paddle_dtype=DTYPE)
pipe = StableDiffusionControlNetPipeline.from_pretrained(str(MODEL), controlnet=controlnet, paddle_dtype=DTYPE)
pipe.apply_tome(ratio=0.5)  # controlnet=False merges in the UNet only
paddle.seed(0)
image = pipe("a 3d render of penguin", condition, num_inference_steps=20, guidance_scale=2.0).images[0]
image.save("controlnet.png")
