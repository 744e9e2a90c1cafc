"""LoRA with merged tokens: load the LoRA first or later, both work; writes lora.png.

The bundled LoRA has random weights: it distorts the fox, and shows that both work together.
"""

from pathlib import Path

import ppdiffusers_tome  # adds pipe.apply_tome; before Paddle
import paddle
from ppdiffusers import StableDiffusionPipeline

# The bundled model and a LoRA for it. Of the hub, after ppdiffusers_tome.prepare_download(MODEL):
# "runwayml/stable-diffusion-v1-5", and any LoRA for it in the format of diffusers, with
# pipe.load_lora_weights(LORA, from_diffusers=True)
MODEL = str(Path(__file__).parent / "emoji_sd")
LORA = str(Path(__file__).parent / "tiny" / "lora")

pipe = StableDiffusionPipeline.from_pretrained(MODEL, paddle_dtype=paddle.float32)  # float16 on a GPU
pipe.load_lora_weights(LORA)
pipe.apply_tome()  # with a model of the hub on a GPU: for images of 768 px and more
paddle.seed(0)
settings = {"num_inference_steps": 10, "guidance_scale": 2.0, "cross_attention_kwargs": {"scale": 1.0}}
pipe("a 3d render of fox", **settings).images[0].save("lora.png")
print("wrote lora.png")
