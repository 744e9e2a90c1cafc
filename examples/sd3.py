"""Stable Diffusion 3 with token merging: image tokens merge, text tokens do not. The model here is tiny and random."""

import ppdiffusers_tome  # adds apply_tome to pipelines
import paddle
from paddle.nn import functional
from ppdiffusers import StableDiffusion3Pipeline
from tiny import write_tiny

MODEL = write_tiny("sd3")  # or "stabilityai/stable-diffusion-3-medium-diffusers"

# ppdiffusers 0.29 calls a function of CUDA builds in Stable Diffusion 3; on a CPU this one takes its place.
if not hasattr(functional, "scaled_dot_product_attention_"):
    functional.scaled_dot_product_attention_ = lambda *qkv, **_: functional.scaled_dot_product_attention(*qkv)

pipe = StableDiffusion3Pipeline.from_pretrained(str(MODEL), text_encoder_3=None, tokenizer_3=None)  # without T5
pipe.apply_tome(ratio=0.5)
paddle.seed(0)
image = pipe("a sign that says hello", num_inference_steps=4).images[0]
image.save("sd3.png")
