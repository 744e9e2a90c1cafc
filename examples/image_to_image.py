"""Image to image with token merging: a fox becomes a wolf."""

from pathlib import Path

import ppdiffusers_tome  # adds apply_tome to pipelines
import paddle
from PIL import Image
from ppdiffusers import StableDiffusionImg2ImgPipeline

MODEL = Path(__file__).parent / "emoji_sd"  # or "stable-diffusion-v1-5/stable-diffusion-v1-5"
DTYPE = paddle.float32  # float16 on a GPU
IMAGE = MODEL / "fox.png"

pipe = StableDiffusionImg2ImgPipeline.from_pretrained(str(MODEL), paddle_dtype=DTYPE)
pipe.apply_tome(ratio=0.5)
paddle.seed(0)
fox = Image.open(IMAGE).convert("RGB")
image = pipe("a 3d render of wolf", fox, strength=0.8, num_inference_steps=20, guidance_scale=2.0).images[0]
image.save("image_to_image.png")
