"""Text to image with token merging: twenty seconds on two cores."""

from pathlib import Path

import ppdiffusers_tome  # adds apply_tome to pipelines
import paddle
from ppdiffusers import StableDiffusionPipeline

MODEL = Path(__file__).parent / "scenes_sd"  # or "stable-diffusion-v1-5/stable-diffusion-v1-5"
DTYPE = paddle.float32  # float16 on a GPU

pipe = StableDiffusionPipeline.from_pretrained(str(MODEL), paddle_dtype=DTYPE)
pipe.apply_tome(ratio=0.5)
paddle.seed(0)
image = pipe("a 3d render of fox on red bricks", num_inference_steps=20, guidance_scale=3.0).images[0]
image.save("text_to_image.png")
