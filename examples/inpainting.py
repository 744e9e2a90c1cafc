"""Inpainting with merged tokens: the lower half of a fox is generated again; writes inpainting.png."""

from pathlib import Path

import ppdiffusers_tome  # adds pipe.apply_tome; before Paddle
import paddle
from PIL import Image
from ppdiffusers import StableDiffusionInpaintPipeline

# The bundled model: the rest is pasted back at each step. Of the hub, after ppdiffusers_tome.prepare_download(MODEL):
# "stabilityai/stable-diffusion-2-inpainting"
MODEL = str(Path(__file__).parent / "emoji_sd")

image = Image.open(Path(MODEL) / "fox.png").convert("RGB")
mask = Image.new("L", image.size, "black")
mask.paste("white", (0, image.height // 2, image.width, image.height))  # white: generate this part again
pipe = StableDiffusionInpaintPipeline.from_pretrained(MODEL, paddle_dtype=paddle.float32)  # float16 on a GPU
pipe.apply_tome()  # with a model of the hub on a GPU: for images of 768 px and more
paddle.seed(0)
settings = {"height": image.height, "width": image.width, "num_inference_steps": 10, "guidance_scale": 2.0}
pipe("a 3d render of panda", image=image, mask_image=mask, **settings).images[0].save("inpainting.png")
print("wrote inpainting.png")
