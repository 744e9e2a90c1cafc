"""Tiny random components of the zoo's pipelines. Every call creates new ones."""

import inspect
from pathlib import Path

import numpy as np
import paddle
from PIL import Image
from ppdiffusers import AutoencoderKL, ControlNetModel, DDIMScheduler, UNet2DConditionModel
from ppdiffusers.transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

TOKENIZER = Path(__file__).parents[2] / "examples" / "emoji_sd" / "tokenizer"
HIDDEN = 32  # channels of text and image embeddings

UNET = {
    "sample_size": 16,
    "layers_per_block": 1,
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": HIDDEN,
    "attention_head_dim": 2,
}
SDXL = {  # SDXL's layout: no attention at level 1, more layers at deeper levels
    "block_out_channels": (32, 32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 1, 2),
    "cross_attention_dim": 2 * HIDDEN,
    "attention_head_dim": (2, 2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + HIDDEN,
}
# Changes of a UNet or ControlNet that leave one level, and of SDXL's one layer there: it exports in seconds.
ONE_LEVEL = {
    "block_out_channels": (32,),
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("CrossAttnUpBlock2D",),
}
ONE_DEPTH = {"transformer_layers_per_block": 1, "attention_head_dim": 2}
SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
}
ENCODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": HIDDEN,
}
UNET_ONLY = ("sample_size", "up_block_types")


def ready(model):
    """The model in evaluation mode, as from_pretrained returns it."""
    model.eval()
    return model


def unet(**changes):
    """A UNet with attention at levels 1 and 2; `unet(**SDXL)` has it at levels 2 and 4."""
    return ready(UNet2DConditionModel(**{**UNET, **changes}))


def controlnet(**changes):
    """A ControlNet for `unet(**changes)`, with non-zero output convolutions, so that it affects the image."""
    settings = {key: value for key, value in {**UNET, **changes}.items() if key not in UNET_ONLY}
    model = ControlNetModel(**settings, conditioning_embedding_out_channels=(16, 32))
    for layer in (*model.controlnet_down_blocks, model.controlnet_mid_block, model.controlnet_cond_embedding.conv_out):
        layer.weight.set_value(0.1 * paddle.randn(layer.weight.shape))
    return ready(model)


AUTOENCODER = {  # that maps 2×2 image pixels to one latent pixel
    "block_out_channels": (32, 32),
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
}


def vae(**changes):
    """A VAE that maps 2×2 image pixels to one latent pixel."""
    return ready(AutoencoderKL(**{**AUTOENCODER, "sample_size": 32, **changes}))


def tokenizer():
    """The bundled CLIP tokenizer: 2,048 entries, 24 positions."""
    return CLIPTokenizer.from_pretrained(str(TOKENIZER))


def text_config():
    """A CLIP text encoder's config for the tokens of `tokenizer()`."""
    return CLIPTextConfig(
        vocab_size=2048,
        max_position_embeddings=24,
        bos_token_id=2046,
        eos_token_id=2047,
        pad_token_id=2047,
        **ENCODER,
    )


def text_encoder():
    return ready(CLIPTextModel(text_config()))


def text_encoder_with_projection():
    return ready(CLIPTextModelWithProjection(text_config()))


def image_config(image_size=32, patch_size=8):
    """A CLIP image encoder's config, for images of 32 px in 16 patches."""
    return CLIPVisionConfig(image_size=image_size, patch_size=patch_size, **ENCODER)


def image_encoder(**size):
    return ready(CLIPVisionModelWithProjection(image_config(**size)))


def image_processor(size=32):
    """The image processor of `image_encoder()` and of safety checkers."""
    return CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def scheduler(cls=DDIMScheduler, **changes):
    """A scheduler with the settings of Stable Diffusion that its class supports."""
    names = inspect.signature(cls.__init__).parameters
    return cls(**{**{name: value for name, value in SCHEDULER.items() if name in names}, **changes})


def image(size=32, seed=0):
    """An image of smooth noise."""
    pixels = np.random.RandomState(seed).randint(0, 256, (size // 8, size // 8, 3)).astype("uint8")
    return Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC)


def mask(size=32):
    """A mask to regenerate the right half."""
    pixels = np.zeros((size, size), "uint8")
    pixels[:, size // 2 :] = 255
    return Image.fromarray(pixels)


def stable_diffusion(**changes):
    """The components of most pipelines over Stable Diffusion 1.x, as keyword arguments."""
    builders = {
        "vae": vae,
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "unet": unet,
        "scheduler": scheduler,
        "feature_extractor": image_processor,
    }
    components = {name: build() for name, build in builders.items() if name not in changes}
    return {**components, "safety_checker": None, "requires_safety_checker": False, **changes}


def sdxl(**changes):
    """The components of pipelines over SDXL, as keyword arguments."""
    builders = {
        "vae": vae,
        "text_encoder": text_encoder,
        "text_encoder_2": text_encoder_with_projection,
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer,
        "unet": lambda: unet(**SDXL),
        "scheduler": scheduler,
    }
    return {**{name: build() for name, build in builders.items() if name not in changes}, **changes}


def sdxl_refiner():
    """The arguments of an image-to-image pipeline over SDXL's refiner: one text encoder; a score, no target size."""
    changes = {**ONE_LEVEL, **ONE_DEPTH, "cross_attention_dim": HIDDEN}
    changes["projection_class_embeddings_input_dim"] = 5 * SDXL["addition_time_embed_dim"] + HIDDEN
    components = sdxl(unet=unet(**{**SDXL, **changes}), text_encoder=None, tokenizer=None)
    return {**components, "requires_aesthetics_score": True, "add_watermarker": False}
