"""Other pipelines: older models, unconditional ones, audio, priors."""

import inspect
from functools import partial
from types import SimpleNamespace

import numpy as np
import paddle
import ppdiffusers
from paddle import nn
from paddlenlp.transformers import ClapTextConfig, ClapTextModelWithProjection
from ppdiffusers import (
    AudioLDM2UNet2DConditionModel,
    CMStochasticIterativeScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DDPMWuerstchenScheduler,
    HeunDiscreteScheduler,
    IPNDMScheduler,
    KarrasVeScheduler,
    PNDMScheduler,
    PriorTransformer,
    RePaintScheduler,
    ScoreSdeVeScheduler,
    T5FilmDecoder,
    UNet1DModel,
    UNet2DConditionModel,
    UNet2DModel,
    VQModel,
)
from ppdiffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP
from ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel
from ppdiffusers.pipelines.spectrogram_diffusion.continous_encoder import SpectrogramContEncoder
from ppdiffusers.pipelines.spectrogram_diffusion.notes_encoder import SpectrogramNotesEncoder
from ppdiffusers.pipelines.versatile_diffusion.modeling_text_unet import UNetFlatConditionModel
from ppdiffusers.pipelines.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from ppdiffusers.pipelines.wuerstchen.modeling_wuerstchen_diffnext import WuerstchenDiffNeXt
from ppdiffusers.pipelines.wuerstchen.modeling_wuerstchen_prior import WuerstchenPrior

from . import parts
from .base import Tiny, family, register
from .images import prior, prior_scheduler
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


# Without text


def unet_2d(**changes):
    """A UNet without text; its attention is inside convolutional blocks."""
    settings = {
        "sample_size": 16,
        "layers_per_block": 1,
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    return parts.ready(UNet2DModel(**{**settings, **changes}))


def vq(**changes):
    """A VQ autoencoder that maps 2×2 image pixels to one latent pixel."""
    settings = {
        "block_out_channels": (32, 32),
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
        "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
        "num_vq_embeddings": 16,
    }
    return parts.ready(VQModel(**{**settings, **changes}))


STEPS = {"num_inference_steps": 2, "output_type": "np"}


class Sound:
    """Replaces the converter from spectrogram images to sound."""

    def get_sample_rate(self):
        return 100

    def image_to_audio(self, image):
        return np.asarray(image, dtype="float32").reshape(-1)


@family
def SpectrogramDiffusionPipeline():
    size = {"d_model": HIDDEN, "num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 64, "dropout_rate": 0.0}
    shared = {**size, "feed_forward_proj": "gated-gelu"}
    pipe = ppdiffusers.SpectrogramDiffusionPipeline(
        parts.ready(SpectrogramNotesEncoder(max_length=16, vocab_size=32, **shared)),
        parts.ready(SpectrogramContEncoder(input_dims=128, targets_context_length=256, **shared)),
        parts.ready(T5FilmDecoder(**size)),
        DDPMScheduler(),
        None,
    )
    call = {"input_tokens": [list(range(1, 17))], "num_inference_steps": 2, "output_type": "mel"}
    return Tiny(pipe, call, (), "audios")


# Kandinsky, and priors


def kandinsky_unet(condition, **changes):
    """Kandinsky's UNet; its attention takes pixels and text together."""
    settings = {
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 8,
        "layers_per_block": 1,
        "block_out_channels": (32, 64),
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "attention_head_dim": 16,
        "resnet_time_scale_shift": "scale_shift",
        "addition_embed_type": condition,
        "encoder_hid_dim_type": "text_image_proj" if condition == "text_image" else "image_proj",
        "encoder_hid_dim": HIDDEN,
        "cross_attention_dim": HIDDEN,
    }
    return parts.ready(UNet2DConditionModel(**{**settings, **changes}))


def movq():
    return vq(norm_type="spatial", latent_channels=4)


def _image_embeds():
    return {"image_embeds": noise(1, HIDDEN, seed=1), "negative_image_embeds": noise(1, HIDDEN, seed=2)}


SIZE = {"height": 32, "width": 32}


def _kandinsky_1(**changes):
    config = MCLIPConfig(
        transformerDimSize=HIDDEN,
        imageDimSize=HIDDEN,
        vocab_size=2048,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=96,
    )
    return {
        "text_encoder": parts.ready(MultilingualCLIP(config)),
        "tokenizer": parts.tokenizer(),
        "unet": kandinsky_unet("text_image", **changes),
        "scheduler": parts.scheduler(),
        "movq": movq(),
    }


def _kandinsky_2(condition="image", **changes):
    scheduler = parts.scheduler(DDPMScheduler)
    return {"unet": kandinsky_unet(condition, **changes), "scheduler": scheduler, "movq": movq()}


def _prior(prefix=""):
    """The prior, which converts text embeddings to image embeddings."""
    model = prior()
    model.clip_std.set_value(paddle.ones_like(model.clip_std))
    components = {
        "prior": model,
        "image_encoder": parts.image_encoder(),
        "text_encoder": parts.text_encoder_with_projection(),
        "tokenizer": parts.tokenizer(),
        "scheduler": prior_scheduler(),
        "image_processor": parts.image_processor(),
    }
    return {prefix + name: part for name, part in components.items()}


def _wuerstchen(**changes):
    decoder = WuerstchenDiffNeXt(
        c_cond=HIDDEN,
        c_hidden=[32, 32],
        nhead=[-1, 2],
        blocks=[1, 1],
        level_config=["CT", "CTA"],
        inject_effnet=[False, True],
        effnet_embd=4,
        clip_embd=HIDDEN,
        dropout=0.0,
    )
    vqgan = PaellaVQModel(bottleneck_blocks=1, embed_dim=32, num_vq_embeddings=16)
    return {
        "tokenizer": parts.tokenizer(),
        "text_encoder": parts.text_encoder(),
        "decoder": parts.ready(decoder),
        "scheduler": DDPMWuerstchenScheduler(),
        "vqgan": parts.ready(vqgan),
        **changes,
    }


def _wuerstchen_prior(prefix=""):
    components = {
        "tokenizer": parts.tokenizer(),
        "text_encoder": parts.text_encoder(),
        "scheduler": DDPMWuerstchenScheduler(),
        "prior": parts.ready(WuerstchenPrior(c_in=4, c=HIDDEN, c_cond=HIDDEN, depth=1, nhead=2, dropout=0.0)),
    }
    return {prefix + name: part for name, part in components.items()}


def _shape(**encoder):
    """Shap·E, whose latents describe a solid; here they are what it returns, without a renderer."""
    model = PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        embedding_dim=HIDDEN,
        num_embeddings=8,
        additional_embeddings=0,
        embedding_proj_norm_type="layer",
        encoder_hid_proj_type=None,
        added_emb_type=None,
        clip_embed_dim=2 * HIDDEN,
    )
    scheduler = HeunDiscreteScheduler(beta_schedule="exp", prediction_type="sample", use_karras_sigmas=True)
    return {"prior": parts.ready(model), "scheduler": scheduler, "shap_e_renderer": None, **encoder}


def diffusion(scheduler, make=unet_2d, **changes):
    """The components of a pipeline of one model."""
    return lambda: {"unet": make(), "scheduler": scheduler(), **changes}


def latent_diffusion(**changes):
    return lambda: {"vqvae": vq(), "unet": unet_2d(**changes), "scheduler": DDIMScheduler()}


def dance_unet():
    return parts.ready(UNet1DModel(sample_size=512, sample_rate=16_000, extra_in_channels=16))


PROMPT = {"prompt": "a red fox", **STEPS}
PRIOR = {**PROMPT, "prior_num_inference_steps": 2}
IMAGE = {"image": parts.image(), "strength": 0.5}
INPAINT = {"image": parts.image(), "mask_image": parts.mask()}
EMBEDS = {**SIZE, **STEPS, **_image_embeds()}
LATENTS = {"num_inference_steps": 2, "output_type": "latent"}
HINT = {"hint": noise(1, 3, 128, 128)}

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
register(
    {
        "DanceDiffusionPipeline": (diffusion(IPNDMScheduler, dance_unet), {"num_inference_steps": 4}),
        "AudioDiffusionPipeline": (
            lambda: {
                "vqvae": None,
                "unet": unet_2d(in_channels=1, out_channels=1, sample_size=(32, 32)),
                "mel": Sound(),
                "scheduler": DDIMScheduler(),
            },
            {"steps": 2},
        ),
    },
    output="audios",
)
register(
    {
        "DDPMPipeline": (diffusion(DDPMScheduler), STEPS),
        "DDIMPipeline": (diffusion(DDIMScheduler), STEPS),
        "PNDMPipeline": (diffusion(partial(PNDMScheduler, skip_prk_steps=True)), STEPS),
        "ScoreSdeVePipeline": (diffusion(ScoreSdeVeScheduler), STEPS),
        "KarrasVePipeline": (diffusion(KarrasVeScheduler), STEPS),
        "ConsistencyModelPipeline": (diffusion(CMStochasticIterativeScheduler), STEPS),
        "RePaintPipeline": (
            diffusion(RePaintScheduler),
            {"image": parts.image(), "mask_image": parts.mask(), "jump_length": 1, "jump_n_sample": 1, **STEPS},
        ),
        "LDMPipeline": (latent_diffusion(), STEPS),
        "LDMSuperResolutionPipeline": (
            latent_diffusion(in_channels=6, out_channels=3),
            {"image": parts.image(), **STEPS},
        ),
        "KandinskyPipeline": (_kandinsky_1, {**EMBEDS, **PROMPT}),
        "KandinskyImg2ImgPipeline": (_kandinsky_1, {**EMBEDS, **PROMPT, **IMAGE}),
        "KandinskyInpaintPipeline": (partial(_kandinsky_1, in_channels=9), {**EMBEDS, **PROMPT, **INPAINT}),
        "KandinskyV22Pipeline": (_kandinsky_2, EMBEDS),
        "KandinskyV22Img2ImgPipeline": (_kandinsky_2, {**EMBEDS, **IMAGE}),
        "KandinskyV22InpaintPipeline": (partial(_kandinsky_2, in_channels=9), {**EMBEDS, **INPAINT}),
        "KandinskyV22ControlnetPipeline": (partial(_kandinsky_2, "image_hint", in_channels=8), {**EMBEDS, **HINT}),
        "KandinskyV22ControlnetImg2ImgPipeline": (
            partial(_kandinsky_2, "image_hint", in_channels=8),
            {**EMBEDS, **HINT, **IMAGE},
        ),
        # Kandinsky and its prior in one
        **{
            f"Kandinsky{version}{task}CombinedPipeline": (
                lambda make=make, changes=changes: {**make(**changes), **_prior("prior_")},
                {**PRIOR, **SIZE, **call},
            )
            for version, make in (("", _kandinsky_1), ("V22", _kandinsky_2))
            for task, call, changes in (
                ("", {}, {}),
                ("Img2Img", IMAGE, {}),
                ("Inpaint", INPAINT, {"in_channels": 9}),
            )
        },
        "WuerstchenDecoderPipeline": (
            partial(_wuerstchen, latent_dim_scale=4),
            {**PROMPT, "image_embeddings": noise(1, 4, 4, 4)},
        ),
        "WuerstchenCombinedPipeline": (
            lambda: _wuerstchen(**_wuerstchen_prior("prior_")),
            {**PRIOR, "height": 128, "width": 128},
        ),
        "ShapEPipeline": (
            lambda: _shape(text_encoder=parts.text_encoder_with_projection(), tokenizer=parts.tokenizer()),
            {"prompt": "a red fox", **LATENTS},
        ),
        "ShapEImg2ImgPipeline": (
            lambda: _shape(image_encoder=parts.image_encoder(), image_processor=parts.image_processor()),
            {"image": parts.image(), **LATENTS},
        ),
    }
)
register(
    {
        "KandinskyPriorPipeline": (_prior, PROMPT),
        "KandinskyV22PriorPipeline": (_prior, PROMPT),
        "KandinskyV22PriorEmb2EmbPipeline": (_prior, {**PROMPT, "image": noise(1, HIDDEN), "strength": 0.5}),
    },
    output="image_embeds",
)
register(
    {"WuerstchenPriorPipeline": (_wuerstchen_prior, {**PROMPT, "height": 128, "width": 128})},
    output="image_embeddings",
)
