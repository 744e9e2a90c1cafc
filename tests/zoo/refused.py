"""Pipelines in which nothing merges: `REFUSED["DDPMPipeline"]()`, with their denoisers and few other components."""

import inspect
from functools import partial
from types import SimpleNamespace

import ppdiffusers as pp
from ppdiffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP
from ppdiffusers.pipelines.spectrogram_diffusion.continous_encoder import SpectrogramContEncoder
from ppdiffusers.pipelines.spectrogram_diffusion.notes_encoder import SpectrogramNotesEncoder
from ppdiffusers.pipelines.unclip.text_proj import UnCLIPTextProjModel
from ppdiffusers.pipelines.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from ppdiffusers.pipelines.wuerstchen.modeling_wuerstchen_diffnext import WuerstchenDiffNeXt
from ppdiffusers.pipelines.wuerstchen.modeling_wuerstchen_prior import WuerstchenPrior

from . import parts
from .images import prior
from .parts import HIDDEN, ready
from .videos import FRAMES


def unet_2d(**changes):
    """A UNet without text; its attention is inside convolutional blocks."""
    settings = {
        "sample_size": 16,
        "layers_per_block": 1,
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    return ready(pp.UNet2DModel(**{**settings, **changes}))


def vq(**changes):
    """A VQ autoencoder that maps 2×2 image pixels to one latent pixel."""
    return ready(pp.VQModel(**{**parts.AUTOENCODER, "num_vq_embeddings": 16, **changes}))


def simple_unet(**changes):
    """A UNet of DeepFloyd IF, UnCLIP and Kandinsky, whose attention takes pixels and text together."""
    settings = {
        "in_channels": 3,
        "out_channels": 6,
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        "resnet_time_scale_shift": "scale_shift",
    }
    return parts.unet(**{**settings, **changes})


def floyd(**changes):
    """DeepFloyd IF, which denoises pixels instead of latents."""
    settings = {
        "addition_embed_type": "text",
        "addition_embed_type_num_heads": 2,
        "cross_attention_norm": "group_norm",
        "attention_head_dim": 16,
        "encoder_hid_dim": 24,
        "encoder_hid_dim_type": "text_proj",
        "time_embedding_act_fn": "gelu",
    }
    return {"unet": simple_unet(**settings, **changes), "requires_safety_checker": False}


def floyd_upscaler():
    return floyd(in_channels=6, class_embed_type="timestep", sample_size=32)


def latent_upscaler():
    """K-blocks, whose attention is not inside a Transformer2DModel."""
    upscaler = parts.unet(
        in_channels=8,
        out_channels=5,
        block_out_channels=(32, 64, 64),
        down_block_types=("KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"),
        mid_block_type=None,
        up_block_types=("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"),
        act_fn="gelu",
        attention_head_dim=8,
        conv_in_kernel=1,
        conv_out_kernel=1,
        norm_num_groups=None,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
        time_cond_proj_dim=128 + HIDDEN,
        time_embedding_dim=64,
    )
    return {"unet": upscaler, "vae": parts.vae(), "text_encoder": parts.text_encoder()}


def unclip(**changes):
    upscaler = partial(
        unet_2d,
        in_channels=6,
        down_block_types=2 * ("ResnetDownsampleBlock2D",),
        up_block_types=2 * ("ResnetUpsampleBlock2D",),
        resnet_time_scale_shift="scale_shift",
    )
    projection = UnCLIPTextProjModel(
        clip_embeddings_dim=HIDDEN, time_embed_dim=4 * 32, cross_attention_dim=HIDDEN, clip_extra_context_tokens=4
    )
    return {
        "decoder": simple_unet(class_embed_type="identity"),
        "text_encoder": parts.text_encoder_with_projection(),
        "text_proj": ready(projection),
        "super_res_first": upscaler(),
        "super_res_last": upscaler(),
        **changes,
    }


def kandinsky(condition, **changes):
    settings = {
        "in_channels": 4,
        "out_channels": 8,
        "attention_head_dim": 16,
        "addition_embed_type": condition,
        "encoder_hid_dim_type": "text_image_proj" if condition == "text_image" else "image_proj",
        "encoder_hid_dim": HIDDEN,
    }
    movq = vq(norm_type="spatial", latent_channels=4)
    return {"unet": simple_unet(**{**settings, **changes}), "movq": movq, "scheduler": parts.scheduler()}


def kandinsky_1(**changes):
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
    return {"text_encoder": ready(MultilingualCLIP(config)), **kandinsky("text_image", **changes)}


def kandinsky_prior(prefix=""):
    return {f"{prefix}prior": prior(), f"{prefix}image_encoder": parts.image_encoder()}


def wuerstchen():
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
    return {"decoder": ready(decoder), "vqgan": ready(vqgan), "text_encoder": parts.text_encoder()}


def wuerstchen_prior(prefix=""):
    model = WuerstchenPrior(c_in=4, c=HIDDEN, c_cond=HIDDEN, depth=1, nhead=2, dropout=0.0)
    return {f"{prefix}prior": ready(model), f"{prefix}text_encoder": parts.text_encoder()}


def shape(**encoder):
    """Shap·E, whose latents describe a solid."""
    return {"prior": prior(added_emb_type=None, clip_embed_dim=2 * HIDDEN), **encoder}


def spectrogram():
    size = {"d_model": HIDDEN, "num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 64, "dropout_rate": 0.0}
    shared = {**size, "feed_forward_proj": "gated-gelu"}
    return {
        "notes_encoder": ready(SpectrogramNotesEncoder(max_length=16, vocab_size=32, **shared)),
        "continuous_encoder": ready(SpectrogramContEncoder(input_dims=128, targets_context_length=256, **shared)),
        "decoder": ready(pp.T5FilmDecoder(**size)),
    }


def lvdm(**changes):
    """LVDM's UNet over frames and pixels at once, with attention at level 2, and its VAE."""
    unet = pp.LVDMUNet3DModel(
        image_size=8,
        in_channels=4,
        model_channels=32,
        out_channels=4,
        num_res_blocks=1,
        attention_resolutions=[2],
        channel_mult=[1, 2],
        num_heads=2,
        temporal_length=FRAMES,
        use_relative_position=True,
        padding_t=0,
        **changes,
    )
    vae = pp.LVDMAutoencoderKL(n_hiddens=32, downsample=[1, 2, 2], upsample=[1, 2, 2])
    return {"unet": ready(unet), "vae": ready(vae), "scheduler": parts.scheduler()}


class VideoVae:
    """In place of a VAE, whose settings the pipeline reads."""

    config = SimpleNamespace(
        seed=0,
        batch_size=1,
        target_fps=8,
        max_frames=FRAMES,
        latent_hei=8,
        latent_wid=8,
        resolution_crop=32,
        vit_resolution=32,
        vit_mean=[0.5, 0.5, 0.5],
        vit_std=[0.25, 0.25, 0.25],
        beta_type="linear",
        num_timesteps=1000,
        init_beta=0.00085,
        last_beta=0.012,
        mean_type="eps",
        var_type="fixed_small",
        loss_type="mse",
        noise_strength=0.0,
        input_dim=HIDDEN,
        ddim_timesteps=2,
        guide_scale=2.0,
        scale_factor=0.18215,
        decoder_bs=FRAMES,
    )


def image_to_video():
    unet = pp.STUNetModel(
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
    return {"unet": ready(unet), "img_encoder": parts.image_encoder(), "vae": VideoVae()}


def uvit():
    unet = pp.UViTT2IModel(
        sample_size=8,
        in_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=HIDDEN // 2,
        clip_dim=HIDDEN,
        num_text_tokens=24,
    )
    encoder = {"text_encoder": parts.text_encoder(), "tokenizer": parts.tokenizer()}
    return {"unet": ready(unet), "vqvae": parts.vae(), **encoder}


def uni_diffuser():
    unet = pp.UniDiffuserModel(
        text_dim=HIDDEN,
        clip_img_dim=HIDDEN,
        num_text_tokens=24,
        num_attention_heads=2,
        attention_head_dim=HIDDEN // 2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        norm_type="layer_norm",
    )
    decoder = pp.UniDiffuserTextDecoder(
        24, HIDDEN, HIDDEN, vocab_size=64, n_positions=32, n_embd=HIDDEN, n_layer=1, n_head=2
    )
    encoders = {"text_encoder": parts.text_encoder(), "image_encoder": parts.image_encoder()}
    return {"unet": ready(unet), "text_decoder": ready(decoder), "vae": parts.vae(), **encoders}


COMPONENTS = {
    **dict.fromkeys(
        (
            "DDPMPipeline",
            "DDIMPipeline",
            "PNDMPipeline",
            "ScoreSdeVePipeline",
            "KarrasVePipeline",
            "ConsistencyModelPipeline",
            "RePaintPipeline",
        ),
        lambda: {"unet": unet_2d(), "scheduler": pp.DDPMScheduler()},
    ),
    "LDMPipeline": lambda: {"unet": unet_2d(), "vqvae": vq()},
    "LDMSuperResolutionPipeline": lambda: {"unet": unet_2d(in_channels=6, out_channels=3), "vqvae": vq()},
    "DanceDiffusionPipeline": lambda: {
        "unet": ready(pp.UNet1DModel(sample_size=512, sample_rate=16_000, extra_in_channels=16)),
        "scheduler": pp.IPNDMScheduler(),
    },
    "AudioDiffusionPipeline": lambda: {"unet": unet_2d(in_channels=1, out_channels=1, sample_size=(32, 32))},
    "SpectrogramDiffusionPipeline": spectrogram,
    "StableDiffusionLatentUpscalePipeline": latent_upscaler,
    "UnCLIPPipeline": lambda: unclip(prior=prior()),
    "UnCLIPImageVariationPipeline": lambda: unclip(image_encoder=parts.image_encoder()),
    **dict.fromkeys(("IFPipeline", "IFImg2ImgPipeline", "IFInpaintingPipeline"), floyd),
    **dict.fromkeys((f"IF{task}SuperResolutionPipeline" for task in ("", "Img2Img", "Inpainting")), floyd_upscaler),
    **dict.fromkeys(("KandinskyPipeline", "KandinskyImg2ImgPipeline"), kandinsky_1),
    "KandinskyInpaintPipeline": partial(kandinsky_1, in_channels=9),
    **dict.fromkeys(("KandinskyV22Pipeline", "KandinskyV22Img2ImgPipeline"), partial(kandinsky, "image")),
    "KandinskyV22InpaintPipeline": partial(kandinsky, "image", in_channels=9),
    **dict.fromkeys(
        (f"KandinskyV22Controlnet{task}Pipeline" for task in ("", "Img2Img")),
        partial(kandinsky, "image_hint", in_channels=8),
    ),
    **dict.fromkeys(
        (f"Kandinsky{prior}Pipeline" for prior in ("Prior", "V22Prior", "V22PriorEmb2Emb")), kandinsky_prior
    ),
    **dict.fromkeys(
        (f"Kandinsky{task}CombinedPipeline" for task in ("", "Img2Img", "Inpaint")),
        lambda: {**kandinsky_1(), **kandinsky_prior("prior_")},
    ),
    **dict.fromkeys(
        (f"KandinskyV22{task}CombinedPipeline" for task in ("", "Img2Img", "Inpaint")),
        lambda: {**kandinsky("image"), **kandinsky_prior("prior_")},
    ),
    "WuerstchenDecoderPipeline": wuerstchen,
    "WuerstchenPriorPipeline": wuerstchen_prior,
    "WuerstchenCombinedPipeline": lambda: {**wuerstchen(), **wuerstchen_prior("prior_")},
    "ShapEPipeline": lambda: shape(text_encoder=parts.text_encoder_with_projection()),
    "ShapEImg2ImgPipeline": lambda: shape(image_encoder=parts.image_encoder()),
    "LVDMTextToVideoPipeline": lambda: {
        **lvdm(use_temporal_transformer=True, context_dim=HIDDEN, legacy=False),
        "text_encoder": parts.text_encoder(),
    },
    "LVDMUncondPipeline": lvdm,
    "ImgToVideoSDPipeline": image_to_video,
    "LDMTextToImageUViTPipeline": uvit,
    "UniDiffuserPipeline": uni_diffuser,
}


def build(name):
    """A pipeline with the components of its name; the others are None."""
    cls = getattr(pp, name)
    required = [key for key, value in inspect.signature(cls).parameters.items() if value.default is value.empty]
    return cls(**{**dict.fromkeys(required), **COMPONENTS[name]()})


REFUSED = {name: partial(build, name) for name in COMPONENTS}
