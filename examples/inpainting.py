"""Inpainting with token merging: the lower half of a fox becomes a panda's."""

from pathlib import Path

import ppdiffusers_tome  # adds apply_tome to pipelines
import paddle
from PIL import Image
from ppdiffusers import AutoPipelineForInpainting

MODEL = Path(__file__).parent / "emoji_sd"  # or "stabilityai/stable-diffusion-2-inpainting"
DTYPE = paddle.float32  # float16 on a GPU
SIZE = 128  # px

fox = Image.open(Path(__file__).parent / "emoji_sd" / "fox.png").convert("RGB").resize((SIZE, SIZE))
mask = Image.new("L", (SIZE, SIZE), "black")
mask.paste("white", (0, SIZE // 2, SIZE, SIZE))  # white is generated anew

pipe = AutoPipelineForInpainting.from_pretrained(str(MODEL), paddle_dtype=DTYPE)
pipe.apply_tome(ratio=0.5)
paddle.seed(0)
inputs = {"image": fox, "mask_image": mask, "height": SIZE, "width": SIZE}
pipe("a 3d render of panda", **inputs, num_inference_steps=20, guidance_scale=2.0).images[0].save("inpainting.png")
