"""SDXL with token merging. The model here is tiny and random, so its image is noise."""

import ppdiffusers_tome  # adds apply_tome to pipelines
import paddle
from ppdiffusers import StableDiffusionXLPipeline
from tiny import write_tiny

MODEL = write_tiny("sdxl")  # or "stabilityai/stable-diffusion-xl-base-1.0"

pipe = StableDiffusionXLPipeline.from_pretrained(str(MODEL))
pipe.apply_tome(ratio=0.5)  # at level 2, the first with attention: 4,096 tokens at 1024 px
paddle.seed(0)
image = pipe("a photo of an owl on a branch", num_inference_steps=4).images[0]
image.save("sdxl.png")
