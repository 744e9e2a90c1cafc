"""Layouts of the published denoisers of ppdiffusers' pipelines.

Which blocks merge depends on a model's layout, not on its width. So these have the blocks, levels and sizes of the
published models but only a few channels, and take milliseconds to build.
"""

from dataclasses import dataclass, field
from typing import Any

import ppdiffusers
from paddle import nn


@dataclass(frozen=True)
class Layout:
    """A denoiser with the blocks of a published model, but few channels."""

    name: str  # the published model, or family of models
    model: str  # its class in ppdiffusers
    config: dict[str, Any] = field(default_factory=dict)  # differences from the class's defaults
    latent: int | None = None  # latent pixels per side, if the config has no sample_size

    def build(self) -> nn.Layer:
        """The model, with random weights."""
        return getattr(ppdiffusers, self.model)(**self.config)


WIDTH = 32  # channels: the 32 groups of the group norms
NARROW = {"block_out_channels": (WIDTH,) * 4, "cross_attention_dim": 8, "attention_head_dim": 8}
SHALLOW = {"block_out_channels": (WIDTH,) * 3, "cross_attention_dim": 8, "attention_head_dim": 8}
SDXL_CONTROL = {
    **SHALLOW,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "use_linear_projection": True,
}
NO_ATTENTION_AT_LEVEL_1 = {
    **NARROW,
    "down_block_types": ("DownBlock2D", *("CrossAttnDownBlock2D",) * 3),
    "up_block_types": (*("CrossAttnUpBlock2D",) * 3, "UpBlock2D"),
}
DIT = {
    "num_attention_heads": 1,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
    "attention_bias": True,
    "norm_elementwise_affine": False,
}

SD = Layout("Stable Diffusion 1.x", "UNet2DConditionModel", {**NARROW, "sample_size": 64})
UNCLIP = Layout("Stable Diffusion 2.1 unCLIP", "UNet2DConditionModel", {**NARROW, "sample_size": 96})
DEPTH = Layout("Stable Diffusion 2 depth", "UNet2DConditionModel", {**NARROW, "in_channels": 5, "sample_size": 64})
SDXL = Layout(
    "SDXL",
    "UNet2DConditionModel",
    {**SDXL_CONTROL, "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "sample_size": 128},
)
UPSCALER = Layout(
    "Stable Diffusion x4 upscaler",
    "UNet2DConditionModel",
    {
        **NO_ATTENTION_AT_LEVEL_1,
        "in_channels": 7,
        "only_cross_attention": (True, True, True, False),
        "sample_size": 128,
    },
)
LATENT_UPSCALER = Layout(
    "Stable Diffusion x2 latent upscaler",
    "UNet2DConditionModel",
    {
        **NARROW,
        "layers_per_block": 4,
        "down_block_types": ("KDownBlock2D", *("KCrossAttnDownBlock2D",) * 3),
        "mid_block_type": None,
        "up_block_types": (*("KCrossAttnUpBlock2D",) * 3, "KUpBlock2D"),
        "norm_num_groups": None,
        "resnet_time_scale_shift": "scale_shift",
        "time_embedding_type": "fourier",
    },
)
ADDED_TEXT = Layout(
    "DeepFloyd IF, unCLIP, Kandinsky 2",
    "UNet2DConditionModel",
    {
        **NARROW,
        "down_block_types": ("ResnetDownsampleBlock2D", *("SimpleCrossAttnDownBlock2D",) * 3),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": (*("SimpleCrossAttnUpBlock2D",) * 3, "ResnetUpsampleBlock2D"),
        "resnet_time_scale_shift": "scale_shift",
    },
)
LDM = Layout("latent diffusion, text to image", "UNet2DConditionModel", {**NARROW, "sample_size": 32})
AUDIO = Layout(
    "AudioLDM, MusicLDM", "UNet2DConditionModel", {**NO_ATTENTION_AT_LEVEL_1, "in_channels": 8, "sample_size": 128}
)
AUDIO_2 = Layout(
    "AudioLDM 2",
    "AudioLDM2UNet2DConditionModel",
    {**NO_ATTENTION_AT_LEVEL_1, "cross_attention_dim": ((None, 8, 8),) * 4, "in_channels": 8, "sample_size": 128},
)
CONTROLNET = Layout("ControlNet for Stable Diffusion 1.x", "ControlNetModel", NARROW, latent=64)
CONTROLNET_SDXL = Layout("ControlNet for SDXL", "ControlNetModel", SDXL_CONTROL, latent=128)
MOTION = Layout(
    "AnimateDiff",
    "UNetMotionModel",
    {
        "block_out_channels": (WIDTH,) * 4,
        "cross_attention_dim": 8,
        "num_attention_heads": 4,
        "motion_num_attention_heads": 4,
        "sample_size": 64,
    },
)
MODELSCOPE = Layout("ModelScope text-to-video", "UNet3DConditionModel", {**NARROW, "sample_size": 32})
SVD = Layout(
    "Stable Video Diffusion",
    "UNetSpatioTemporalConditionModel",
    {
        "block_out_channels": (WIDTH,) * 4,
        "cross_attention_dim": 8,
        "num_attention_heads": 4,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 24,
        "sample_size": 96,
    },
)
DIT_XL_2 = Layout("DiT-XL/2", "Transformer2DModel", {**DIT, "norm_type": "ada_norm_zero", "sample_size": 32})
PIXART = Layout(
    "PixArt-α",
    "Transformer2DModel",
    {**DIT, "norm_type": "ada_norm_single", "cross_attention_dim": 8, "sample_size": 128},
)
SD3 = Layout(
    "Stable Diffusion 3",
    "SD3Transformer2DModel",
    {
        "num_layers": 24,
        "attention_head_dim": 8,
        "num_attention_heads": 1,
        "joint_attention_dim": 8,
        "caption_projection_dim": 8,
        "pooled_projection_dim": 8,
        "pos_embed_max_size": 96,
    },
)
SD3_CONTROL = Layout(
    "ControlNet for Stable Diffusion 3",
    "SD3ControlNetModel",
    {**SD3.config, "num_layers": 6, "pos_embed_max_size": 192},
)
VQ_DIFFUSION = Layout(
    "VQ-Diffusion-B",
    "Transformer2DModel",
    {
        "num_attention_heads": 1,
        "attention_head_dim": 8,
        "num_layers": 19,
        "cross_attention_dim": 8,
        "attention_bias": True,
        "sample_size": 32,
        "num_vector_embeds": 4097,
        "activation_fn": "geglu-approximate",
        "norm_type": "ada_norm",
        "num_embeds_ada_norm": 100,
    },
)
