"""Stable Diffusion 3 with merged tokens; writes sd3.png. The bundled model has random weights: the image is noise."""

from pathlib import Path

import ppdiffusers_tome  # adds pipe.apply_tome; before Paddle
import paddle
from paddle.nn import functional
from ppdiffusers import StableDiffusion3Pipeline

# Of the hub, after ppdiffusers_tome.prepare_download(MODEL): "stabilityai/stable-diffusion-3-medium-diffusers", here
# without its third text encoder, T5. Whether merging makes it faster was not measured.
MODEL = str(Path(__file__).parent / "tiny" / "sd3")

if not hasattr(functional, "scaled_dot_product_attention_"):  # ppdiffusers 0.29 calls it, and defines it for GPUs only
    functional.scaled_dot_product_attention_ = functional.scaled_dot_product_attention
without_t5 = {"text_encoder_3": None, "tokenizer_3": None}
pipe = StableDiffusion3Pipeline.from_pretrained(MODEL, paddle_dtype=paddle.float32, **without_t5)  # float16 on a GPU
pipe.apply_tome(ratio=0.5)  # less than the default, because every block merges; text tokens never do
paddle.seed(0)
image = pipe("a photo of an owl on a branch", num_inference_steps=4).images[0]
image.save("sd3.png")
print("wrote sd3.png")
print(pipe.tome_summary())  # the attention that it calls fused is fused on a GPU
