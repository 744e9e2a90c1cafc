"""Video pipelines."""

import atexit
import shutil
import tempfile
from unittest.mock import patch

import numpy as np
import paddle
import ppdiffusers
from ppdiffusers import (
    AutoencoderKL_imgtovideo,
    AutoencoderKLTemporalDecoder,
    EulerDiscreteScheduler,
    LVDMAutoencoderKL,
    LVDMUNet3DModel,
    MotionAdapter,
    STUNetModel,
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


def motion_adapter(**changes):
    """AnimateDiff's temporal layers, for `parts.unet()`."""
    settings = {
        "block_out_channels": parts.UNET["block_out_channels"],
        "motion_layers_per_block": 1,
        "motion_num_attention_heads": 2,
    }
    return parts.ready(MotionAdapter(**{**settings, **changes}))


def unet_3d(**changes):
    """ModelScope's UNet: a Transformer2DModel over the pixels, a TransformerTemporalModel over the frames."""
    settings = {
        **SMALL,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        "attention_head_dim": 4,
    }
    return parts.ready(UNet3DConditionModel(**{**settings, **changes}))


def unet_spatio_temporal(**changes):
    """Stable Video Diffusion's UNet: blocks over the pixels and blocks over the frames in one transformer."""
    settings = {
        **SMALL,
        "in_channels": 8,
        "out_channels": 4,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        "num_attention_heads": (2, 4),
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 3 * 8,
        "num_frames": FRAMES,
    }
    return parts.ready(UNetSpatioTemporalConditionModel(**{**settings, **changes}))


def unet_hotshot(**changes):
    """Hotshot-XL's UNet: a Transformer2DModel that gets five dimensions, and attention over the frames.

    Its pipeline is not here: ppdiffusers 0.29 does not export it, and it fails (`Tensor.to` refuses a tensor's place).
    """
    settings = {
        **parts.UNET,
        "sample_size": 8,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    }
    model = HotshotUNet(**{**settings, **changes})
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
    call = {"prompt": "a red fox", "num_frames": FRAMES, "num_inference_steps": 2, "output_type": "np"}
    return Tiny(pipe, call, ("unet",), "frames")


def _modelscope(cls):
    return cls(parts.vae(), parts.text_encoder(), parts.tokenizer(), unet_3d(), parts.scheduler())


@family
def TextToVideoSDPipeline():
    call = {"prompt": "a red fox", "num_frames": FRAMES, "num_inference_steps": 2, "output_type": "np"}
    return Tiny(_modelscope(ppdiffusers.TextToVideoSDPipeline), call, ("unet",), "frames")


@family
def VideoToVideoSDPipeline():
    video = [np.asarray(parts.image(16, seed=i)) for i in range(FRAMES)]
    call = {"prompt": "a red fox", "video": video, "num_inference_steps": 3, "output_type": "np"}
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


def _lvdm(**changes):
    """LVDM's UNet over frames and pixels at once, with attention at level 2, and its VAE."""
    settings = {
        "image_size": 8,
        "in_channels": 4,
        "model_channels": 32,
        "out_channels": 4,
        "num_res_blocks": 1,
        "attention_resolutions": [2],
        "channel_mult": [1, 2],
        "num_heads": 2,
        "temporal_length": FRAMES,
        "use_relative_position": True,
        "padding_t": 0,
    }
    vae = LVDMAutoencoderKL(n_hiddens=32, downsample=[1, 2, 2], upsample=[1, 2, 2])
    return parts.ready(vae), parts.ready(LVDMUNet3DModel(**settings, **changes))


def _lvdm_call():
    """LVDM's pipelines also write every video to a folder, which is deleted when the tests end."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    size = {"height": 64, "width": 64, "num_frames": FRAMES}
    return {**size, "num_inference_steps": 2, "output_type": "np", "save_dir": folder}


@family
def LVDMTextToVideoPipeline():
    vae, unet = _lvdm(use_temporal_transformer=True, context_dim=HIDDEN, legacy=False)
    pipe = ppdiffusers.LVDMTextToVideoPipeline(vae, parts.text_encoder(), parts.tokenizer(), unet, parts.scheduler())
    return Tiny(pipe, {"prompt": "a red fox", "encoder_type": "3d", **_lvdm_call()}, (), "frames")


@family
def LVDMUncondPipeline():
    pipe = ppdiffusers.LVDMUncondPipeline(*_lvdm(), parts.scheduler())
    return Tiny(pipe, _lvdm_call(), (), "frames")


@family
def ImgToVideoSDPipeline():
    unet = STUNetModel(
        in_channels=4,
        out_channels=4,
        dim=32,
        y_dim=HIDDEN,
        context_channels=1024,  # its second half takes no other
        dim_mult=[1, 2],
        num_heads=2,
        head_dim=16,
        num_res_blocks=1,
        attn_scales=[1.0, 0.5],
    )
    settings = {
        "seed": 0,
        "batch_size": 1,
        "target_fps": 8,
        "max_frames": FRAMES,
        "latent_hei": 8,
        "latent_wid": 8,
        "resolution_crop": 32,
        "vit_resolution": 32,
        "vit_mean": [0.5, 0.5, 0.5],
        "vit_std": [0.25, 0.25, 0.25],
        "beta_type": "linear",
        "num_timesteps": 1000,
        "init_beta": 0.00085,
        "last_beta": 0.012,
        "mean_type": "eps",
        "var_type": "fixed_small",
        "loss_type": "mse",
        "noise_strength": 0.0,
        "input_dim": HIDDEN,
        "ddim_timesteps": 2,
        "guide_scale": 2.0,
        "scale_factor": 0.18215,
        "decoder_bs": FRAMES,
    }
    vae = AutoencoderKL_imgtovideo(
        ch=32,
        out_ch=3,
        in_channels=3,
        resolution=16,
        z_channels=4,
        embed_dim=4,
        attn_resolutions=[],
        ch_mult=[1, 1],
        num_res_blocks=1,
    )
    vae.register_to_config(**settings)
    pipe = ppdiffusers.ImgToVideoSDPipeline(parts.ready(vae), parts.image_encoder(), parts.ready(unet))
    return Tiny(pipe, {"image": parts.image()}, (), "frames")
