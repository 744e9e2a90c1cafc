"""A second pass at twice the size ("hires fix"); only this pass merges tokens. Writes second_pass.png.

The second pass has four times as many tokens as the first, so merging saves most in it.
"""

from pathlib import Path

import ppdiffusers_tome  # adds pipe.tome; before Paddle
import paddle
from ppdiffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

# The bundled model is for 128 px: this shows how, not how well. Of the hub, with SIZE = 512 and after
# ppdiffusers_tome.prepare_download(MODEL): "runwayml/stable-diffusion-v1-5"
MODEL, SIZE = str(Path(__file__).parent / "emoji_sd"), 128
PROMPT, SETTINGS = "a 3d render of fox", {"num_inference_steps": 10, "guidance_scale": 2.0}

pipe = StableDiffusionPipeline.from_pretrained(MODEL, paddle_dtype=paddle.float32)  # float16 on a GPU
second_pipe = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)  # the same models
paddle.seed(0)
small = pipe(PROMPT, height=SIZE, width=SIZE, **SETTINGS).images[0]
large = small.resize((2 * SIZE, 2 * SIZE))
with second_pipe.tome():  # merging is off again after this block
    second_pipe(PROMPT, image=large, strength=0.3, **SETTINGS).images[0].save("second_pass.png")
print("wrote second_pass.png")
