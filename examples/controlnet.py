"""ControlNet with merged tokens: a penguin along the edges of a drawing; writes controlnet.png."""

from pathlib import Path

import ppdiffusers_tome  # adds pipe.apply_tome; before Paddle
import cv2
import numpy as np
import paddle
from PIL import Image
from ppdiffusers import ControlNetModel, StableDiffusionControlNetPipeline

# Bundled models. Of the hub, after ppdiffusers_tome.prepare_download(MODEL): "runwayml/stable-diffusion-v1-5" and
# "lllyasviel/sd-controlnet-canny"
MODEL = str(Path(__file__).parent / "emoji_sd")
CONTROLNET = str(Path(__file__).parent / "emoji_sd" / "controlnet")
IMAGE = Path(__file__).parent / "emoji_sd" / "controlnet" / "penguin.png"

edges = cv2.Canny(np.asarray(Image.open(IMAGE).convert("L")), 100, 200)
condition = Image.fromarray(edges).convert("RGB")
controlnet = ControlNetModel.from_pretrained(CONTROLNET, paddle_dtype=paddle.float32)  # float16 on a GPU
pipe = StableDiffusionControlNetPipeline.from_pretrained(MODEL, controlnet=controlnet, paddle_dtype=paddle.float32)
# With models of the hub on a GPU, merge images of 768 px and more only.
pipe.apply_tome()  # controlnet=False merges in the UNet alone, controlnet=0.5 in the ControlNet at another ratio
paddle.seed(0)
image = pipe("a flat drawing of penguin", image=condition, num_inference_steps=10, guidance_scale=2.0).images[0]
image.save("controlnet.png")
print("wrote controlnet.png")
