"""SDXL with merged tokens; writes sdxl.png. The bundled model has random weights, so the image is noise."""

from pathlib import Path

import ppdiffusers_tome  # adds pipe.apply_tome; before Paddle
import paddle
from ppdiffusers import StableDiffusionXLPipeline

# Of the hub, after ppdiffusers_tome.prepare_download(MODEL): "stabilityai/stable-diffusion-xl-base-1.0". At its own
# 1024 px merging saves little of its work: leave it out there.
MODEL = str(Path(__file__).parent / "tiny" / "sdxl")

pipe = StableDiffusionXLPipeline.from_pretrained(MODEL, paddle_dtype=paddle.float32)  # float16 on a GPU
pipe.apply_tome()  # SDXL has no attention at level 1, so it merges at level 2
paddle.seed(0)
image = pipe("a photo of an owl on a branch", num_inference_steps=4).images[0]
image.save("sdxl.png")
print("wrote sdxl.png")
print(pipe.tome_summary())
