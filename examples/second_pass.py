"""A second pass ("hires fix"): a small image, enlarged and denoised again, where merging saves most."""

from pathlib import Path

import ppdiffusers_tome  # adds apply_tome to pipelines
import paddle
from ppdiffusers import AutoPipelineForImage2Image, StableDiffusionPipeline

MODEL = Path(__file__).parent / "scenes_sd"  # or "stable-diffusion-v1-5/stable-diffusion-v1-5"
DTYPE = paddle.float32  # float16 on a GPU
PROMPT = "a 3d render of fox on red bricks"
SMALL, LARGE = 128, 256  # px; 512 and 1024 for Stable Diffusion 1.5

pipe = StableDiffusionPipeline.from_pretrained(str(MODEL), paddle_dtype=DTYPE)
settings = {"num_inference_steps": 20, "guidance_scale": 3.0}
paddle.seed(0)
small = pipe(PROMPT, height=SMALL, width=SMALL, **settings).images[0]

second = AutoPipelineForImage2Image.from_pipe(pipe)
with second.tome(ratio=0.5):  # the first pass has few tokens, so it stays plain
    large = second(PROMPT, small.resize((LARGE, LARGE)), strength=0.5, **settings).images[0]
large.save("second_pass.png")
