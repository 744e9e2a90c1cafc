"""LoRA weights with token merging. The LoRA here is random, so it only disturbs the image."""

from pathlib import Path

import ppdiffusers_tome  # adds apply_tome to pipelines
import paddle
from ppdiffusers import StableDiffusionPipeline
from tiny import write_lora

MODEL = Path(__file__).parent / "emoji_sd"  # or "stable-diffusion-v1-5/stable-diffusion-v1-5"
DTYPE = paddle.float32  # float16 on a GPU

pipe = StableDiffusionPipeline.from_pretrained(str(MODEL), paddle_dtype=DTYPE)
lora = write_lora(pipe)  # or the folder of your own
pipe.load_lora_weights(str(lora.parent), weight_name=lora.name, from_diffusers=False)
pipe.apply_tome(ratio=0.5)
paddle.seed(0)
image = pipe("a 3d render of fox", num_inference_steps=20, guidance_scale=2.0).images[0]
image.save("lora.png")
