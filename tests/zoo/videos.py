"""Video pipelines."""

from unittest.mock import patch

import numpy as np
import paddle
import ppdiffusers
from ppdiffusers import (
    AutoencoderKLTemporalDecoder,
    EulerDiscreteScheduler,
    MotionAdapter,
    UNet3DConditionModel,
    UNetSpatioTemporalConditionModel,
)
from ppdiffusers.models.hotshot_xl.transformer_3d import Transformer3DModel
from ppdiffusers.models.hotshot_xl.unet import UNet3DConditionModel as HotshotUNet
from ppdiffusers.pipelines.text_to_video_synthesis.pipeline_text_to_video_zero import CrossFrameAttnProcessor

from . import parts
from .base import Tiny, family

HIDDEN = parts.HIDDEN
FRAMES = 3

SMALL = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (32, 64), "cross_attention_dim": HIDDEN}
BLOCKS_3D = {
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
}
TEXT = {"prompt": "a red fox", "num_inference_steps": 2, "output_type": "np"}


def motion_adapter():
    """AnimateDiff's temporal layers, for `parts.unet()`."""
    channels = parts.UNET["block_out_channels"]
    return parts.ready(
        MotionAdapter(block_out_channels=channels, motion_layers_per_block=1, motion_num_attention_heads=2)
    )


def unet_3d():
    """ModelScope's UNet: a Transformer2DModel over the pixels, a TransformerTemporalModel over the frames."""
    return parts.ready(UNet3DConditionModel(**SMALL, **BLOCKS_3D, attention_head_dim=4))


def unet_spatio_temporal():
    """Stable Video Diffusion's UNet: blocks over the pixels and blocks over the frames in one transformer."""
    model = UNetSpatioTemporalConditionModel(
        **SMALL,
        in_channels=8,
        out_channels=4,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        num_attention_heads=(2, 4),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=3 * 8,
        num_frames=FRAMES,
    )
    return parts.ready(model)


def unet_hotshot():
    """Hotshot-XL's UNet: a Transformer2DModel that gets five dimensions, and attention over the frames.

    Its pipeline is not here: ppdiffusers 0.29 does not export it, and it fails (`Tensor.to` refuses a tensor's place).
    """
    model = HotshotUNet(**{**parts.UNET, **BLOCKS_3D, "sample_size": 8})
    for layer in model.sublayers():
        if isinstance(layer, Transformer3DModel):  # initialized as an identity
            layer.proj_out.weight.set_value(0.1 * paddle.randn(layer.proj_out.weight.shape))
    return parts.ready(model)


@family
def AnimateDiffPipeline():
    pipe = ppdiffusers.AnimateDiffPipeline(
        vae=parts.vae(),
        text_encoder=parts.text_encoder(),
        tokenizer=parts.tokenizer(),
        unet=parts.unet(sample_size=8),
        motion_adapter=motion_adapter(),
        scheduler=parts.scheduler(),
    )
    return Tiny(pipe, {**TEXT, "num_frames": FRAMES}, ("unet",), "frames")


def _modelscope(cls):
    return cls(parts.vae(), parts.text_encoder(), parts.tokenizer(), unet_3d(), parts.scheduler())


@family
def TextToVideoSDPipeline():
    call = {**TEXT, "num_frames": FRAMES}
    return Tiny(_modelscope(ppdiffusers.TextToVideoSDPipeline), call, ("unet",), "frames")


@family
def VideoToVideoSDPipeline():
    video = [np.asarray(parts.image(16, seed=i)) for i in range(FRAMES)]
    call = {**TEXT, "video": video, "num_inference_steps": 3}
    return Tiny(_modelscope(ppdiffusers.VideoToVideoSDPipeline), call, ("unet",), "frames")


@family
def StableVideoDiffusionPipeline():
    vae = AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1, sample_size=32
    )
    pipe = ppdiffusers.StableVideoDiffusionPipeline(
        vae=parts.ready(vae),
        image_encoder=parts.image_encoder(image_size=224, patch_size=56),  # the pipeline itself resizes to 224
        unet=unet_spatio_temporal(),
        scheduler=parts.scheduler(EulerDiscreteScheduler, timestep_type="continuous", prediction_type="v_prediction"),
        feature_extractor=parts.image_processor(224),
    )
    call = {"image": parts.image(16), "height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    return Tiny(pipe, call, ("unet",), "frames")


class CrossFrameAttention(CrossFrameAttnProcessor):
    """Text2Video-Zero's attention: every frame attends to the first one, in both halves of the batch.

    ppdiffusers' own fails without a CUDA build of Paddle: its `paddle.bmm` gets four dimensions.
    """

    def __call__(self, *args, **kwargs):
        with patch.object(paddle, "bmm", paddle.matmul):
            return super().__call__(*args, **kwargs)


def _zero(cls, components, **changes):
    """Text2Video-Zero, a text-to-image pipeline that generates consistent frames."""
    pipe = cls(**components)
    pipe.unet.set_attn_processor(CrossFrameAttention())
    call = {"prompt": "a red fox", "video_length": FRAMES, "num_inference_steps": 4, "t0": 1, "t1": 2}
    return Tiny(pipe, {**call, **changes}, ("unet",))


@family
def TextToVideoZeroPipeline():
    return _zero(ppdiffusers.TextToVideoZeroPipeline, parts.stable_diffusion())


@family
def TextToVideoZeroSDXLPipeline():
    return _zero(ppdiffusers.TextToVideoZeroSDXLPipeline, parts.sdxl())
