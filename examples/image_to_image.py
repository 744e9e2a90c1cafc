"""Image to image with merged tokens: a fox becomes a wolf; writes image_to_image.png."""

from pathlib import Path

import ppdiffusers_tome  # adds pipe.apply_tome; before Paddle
import paddle
from PIL import Image
from ppdiffusers import StableDiffusionImg2ImgPipeline

# The bundled model, which knows few words. Of the hub, after ppdiffusers_tome.prepare_download(MODEL):
# "runwayml/stable-diffusion-v1-5"
MODEL = str(Path(__file__).parent / "emoji_sd")

fox = Image.open(Path(__file__).parent / "emoji_sd" / "fox.png").convert("RGB")
pipe = StableDiffusionImg2ImgPipeline.from_pretrained(MODEL, paddle_dtype=paddle.float32)  # float16 on a GPU
pipe.apply_tome()  # with a model of the hub on a GPU: for images of 768 px and more
paddle.seed(0)
settings = {"strength": 0.6, "num_inference_steps": 10, "guidance_scale": 2.0}
pipe("a 3d render of wolf", image=fox, **settings).images[0].save("image_to_image.png")
print("wrote image_to_image.png")
