"""Other pipelines: older models, unconditional ones, audio, priors."""

import inspect
from functools import partial
from types import SimpleNamespace

import paddle
import ppdiffusers
from paddle import nn
from paddlenlp.transformers import ClapTextConfig, ClapTextModelWithProjection
from ppdiffusers import (
    AudioLDM2UNet2DConditionModel,
)
from ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel
from ppdiffusers.pipelines.versatile_diffusion.modeling_text_unet import UNetFlatConditionModel

from . import parts
from .base import Tiny, family, register
from .noise import embeddings, noise

HIDDEN = parts.HIDDEN
TEXT = 6  # text tokens of calls with embeddings


# Text to image


@family
def LDMTextToImagePipeline():
    config = LDMBertConfig(
        vocab_size=2048, encoder_layers=1, encoder_ffn_dim=64, encoder_attention_heads=2, head_dim=16, d_model=HIDDEN
    )
    pipe = ppdiffusers.LDMTextToImagePipeline(
        parts.vae(), parts.ready(LDMBertModel(config)), parts.tokenizer(), parts.unet(), parts.scheduler()
    )
    call = {"prompt": "a red fox", "height": 128, "width": 128, "num_inference_steps": 2, "output_type": "np"}
    return Tiny(pipe, {**call, "guidance_scale": 2.0}, ("unet",))


def _versatile(name):
    """Versatile Diffusion: an image UNet whose attention is replaced by, or mixed with, that of a text UNet."""
    builders = {
        "tokenizer": parts.tokenizer,
        "image_feature_extractor": parts.image_processor,
        "text_encoder": parts.text_encoder_with_projection,
        "image_encoder": parts.image_encoder,
        "image_unet": parts.unet,
        "text_unet": text_unet,
        "vae": parts.vae,
        "scheduler": parts.scheduler,
    }
    names = inspect.signature(getattr(ppdiffusers, f"VersatileDiffusion{name}Pipeline")).parameters
    return {name: builders[name]() for name in names}


def text_unet():
    """A UNet over text, as a feature map of 1×1 pixels; only its attention layers are used here."""
    types = {
        "down_block_types": ("CrossAttnDownBlockFlat", "CrossAttnDownBlockFlat"),
        "up_block_types": ("CrossAttnUpBlockFlat", "CrossAttnUpBlockFlat"),
        "mid_block_type": "UNetMidBlockFlatCrossAttn",
    }
    return parts.ready(UNetFlatConditionModel(**{**parts.UNET, "sample_size": None, **types}))


# Audio


class Vocoder(nn.Layer):
    """Replaces the model that converts spectrograms to sound."""

    config = SimpleNamespace(model_in_dim=32, upsample_rates=[2], sampling_rate=100)

    def forward(self, spectrogram):
        return spectrogram[:, :, :2].flatten(1)


def _latent_audio(**changes):
    """AudioLDM's UNet, which gets the text only as a class embedding; both attentions of a block are over pixels."""
    settings = {
        "cross_attention_dim": parts.UNET["block_out_channels"],
        "class_embed_type": "simple_projection",
        "projection_class_embeddings_input_dim": HIDDEN,
        "class_embeddings_concat": True,
    }
    config = ClapTextConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    return {
        "vae": parts.vae(in_channels=1, out_channels=1),
        "text_encoder": parts.ready(ClapTextModelWithProjection(config)),
        "tokenizer": parts.tokenizer(),
        "unet": parts.unet(**settings),
        "scheduler": parts.scheduler(),
        "vocoder": Vocoder(),
        **changes,
    }


@family
def AudioLDM2Pipeline():
    """Its UNet has three transformers in a row: with self-attention only, and with each of two texts."""
    unet = AudioLDM2UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=((None, HIDDEN, 24),) * 2,
        attention_head_dim=2,
    )
    more = {
        "unet": parts.ready(unet),
        "text_encoder_2": parts.text_encoder(),
        "projection_model": None,
        "language_model": parts.text_encoder(),
        "tokenizer_2": None,
        "feature_extractor": None,
    }
    mask = paddle.ones([1, TEXT], dtype="int64")
    call = {
        **embeddings(1, TEXT, 24),
        "generated_prompt_embeds": noise(1, 8, HIDDEN, seed=3),
        "negative_generated_prompt_embeds": noise(1, 8, HIDDEN, seed=4),
        "attention_mask": mask,
        "negative_attention_mask": mask,
        "num_inference_steps": 2,
    }
    return Tiny(ppdiffusers.AudioLDM2Pipeline(**_latent_audio(**more)), call, ("unet",), "audios")


STEPS = {"num_inference_steps": 2, "output_type": "np"}
PROMPT = {"prompt": "a red fox", **STEPS}

register(
    {
        f"VersatileDiffusion{name}Pipeline": (partial(_versatile, name), {**STEPS, **call})
        for name, call in {
            "TextToImage": {"prompt": "a red fox"},
            "ImageVariation": {"image": parts.image()},
            "DualGuided": {"prompt": "a red fox", "image": parts.image()},
        }.items()
    },
    ("image_unet",),
)
# Without an editing_prompt: with one, ppdiffusers 0.29 fails (`paddle.Tensor` of a list).
register({"SemanticStableDiffusionPipeline": (parts.stable_diffusion, PROMPT)}, ("unet",))
register(
    {
        "AudioLDMPipeline": (_latent_audio, {**embeddings(1, HIDDEN), "num_inference_steps": 2}),
        "MusicLDMPipeline": (
            lambda: _latent_audio(feature_extractor=None),
            {**embeddings(1, HIDDEN), "num_inference_steps": 2},
        ),
    },
    ("unet",),
    "audios",
)
