"""Pipelines whose denoiser is a transformer over patches or codes, without a UNet around it."""

import paddle
import ppdiffusers
from ppdiffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    Transformer2DModel,
    VQDiffusionScheduler,
    VQModel,
)
from ppdiffusers.pipelines.vq_diffusion.pipeline_vq_diffusion import LearnedClassifierFreeSamplingEmbeddings
from ppdiffusers_source import newer_class

from . import parts
from .base import Tiny, family
from .noise import embeddings

HIDDEN = parts.HIDDEN
TEXT = 6  # text tokens of calls with embeddings
CALL = {"prompt": "a red fox", "num_inference_steps": 2, "output_type": "np"}

PATCHED = {  # 64 tokens: 16×16 latents in patches of 2×2
    "num_attention_heads": 2,
    "attention_head_dim": HIDDEN // 2,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 16,
    "patch_size": 2,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_elementwise_affine": False,
}


def dit(**changes):
    """DiT's transformer, conditioned on a class."""
    return parts.ready(Transformer2DModel(**{**PATCHED, "norm_type": "ada_norm_zero", **changes}))


def pixart(**changes):
    """PixArt-α's transformer, conditioned on text; with sample_size=128 also on the image size.

    It has no caption_channels as the real one has: ppdiffusers 0.29 fails to build that projection (a TypeError).
    """
    settings = {"norm_type": "ada_norm_single", "cross_attention_dim": HIDDEN, "norm_eps": 1e-6}
    return parts.ready(Transformer2DModel(**{**PATCHED, **settings, **changes}))


SD3 = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "attention_head_dim": HIDDEN // 2,
    "num_attention_heads": 2,
    "joint_attention_dim": 2 * HIDDEN,
    "caption_projection_dim": HIDDEN,
    "pooled_projection_dim": 2 * HIDDEN,
    "pos_embed_max_size": 16,
}


def sd3(**changes):
    """Stable Diffusion 3's transformer: joint attention over image and text tokens; the last block drops the text."""
    return parts.ready(SD3Transformer2DModel(**SD3, patch_size=2, num_layers=3, **changes))


def sd3_controlnet():
    """A ControlNet for `sd3`, not in ppdiffusers 0.29.0; its outputs, which are 0 until it is trained, are random."""
    model = newer_class("SD3ControlNetModel")(**SD3, num_layers=2)
    for layer in model.controlnet_blocks:
        layer.weight.set_value(paddle.rand(layer.weight.shape) - 0.5)
    return parts.ready(model)


@family
def DiTPipeline():
    pipe = ppdiffusers.DiTPipeline(dit(), parts.vae(), parts.scheduler())
    return Tiny(pipe, {"class_labels": [7], "num_inference_steps": 2, "output_type": "np"}, ("transformer",))


@family
def PixArtAlphaPipeline():
    pipe = ppdiffusers.PixArtAlphaPipeline(
        None, None, parts.vae(), pixart(), parts.scheduler(DPMSolverMultistepScheduler)
    )
    mask = paddle.to_tensor([[1] * (TEXT - 1) + [0]])
    call = {
        **embeddings(1, TEXT, HIDDEN),
        "prompt_attention_mask": mask,
        "negative_prompt_attention_mask": mask,
        "negative_prompt": None,
        "num_inference_steps": 2,
        "output_type": "np",
        "use_resolution_binning": False,
    }
    return Tiny(pipe, call, ("transformer",))


def _sd3(cls):
    return cls(
        transformer=sd3(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=parts.vae(shift_factor=0.06),
        text_encoder=parts.text_encoder_with_projection(),
        tokenizer=parts.tokenizer(),
        text_encoder_2=parts.text_encoder_with_projection(),
        tokenizer_2=parts.tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


@family
def StableDiffusion3Pipeline():
    return Tiny(_sd3(ppdiffusers.StableDiffusion3Pipeline), CALL, ("transformer",))


@family
def StableDiffusion3Img2ImgPipeline():
    call = {**CALL, "image": parts.image()}
    return Tiny(_sd3(ppdiffusers.StableDiffusion3Img2ImgPipeline), call, ("transformer",))


@family
def VQDiffusionPipeline():
    codes = 16
    transformer = Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=HIDDEN // 2,
        num_layers=2,
        cross_attention_dim=HIDDEN,
        attention_bias=True,
        sample_size=8,
        num_vector_embeds=codes + 1,
        activation_fn="geglu-approximate",
        norm_type="ada_norm",
        num_embeds_ada_norm=100,
    )
    pipe = ppdiffusers.VQDiffusionPipeline(
        vqvae=parts.ready(VQModel(block_out_channels=(32,), num_vq_embeddings=codes, vq_embed_dim=3)),
        text_encoder=parts.text_encoder(),
        tokenizer=parts.tokenizer(),
        transformer=parts.ready(transformer),
        scheduler=VQDiffusionScheduler(num_vec_classes=codes + 1),
        learned_classifier_free_sampling_embeddings=LearnedClassifierFreeSamplingEmbeddings(learnable=False),
    )
    return Tiny(pipe, CALL, ("transformer",))
