"""Tiny random pipelines for --tiny: they show that a script runs, and their images are noise. Imports Paddle."""

import paddle
import ppdiffusers
from options import BUNDLED
from ppdiffusers import transformers as clip

WIDTH = 32  # channels of text embeddings and of the denoisers' first level
SHARED = {"sample_size": 32, "layers_per_block": 1}  # latent pixels: 64 px
TEXT = {
    "vocab_size": 2048,  # the bundled tokenizer's
    "max_position_embeddings": 24,
    "bos_token_id": 2046,
    "eos_token_id": 2047,
    "pad_token_id": 2047,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "projection_dim": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def texts(suffix="", projection=True):
    """A text encoder and its tokenizer, under their names in pipelines."""
    encoder = clip.CLIPTextModelWithProjection if projection else clip.CLIPTextModel
    return {
        f"text_encoder{suffix}": encoder(clip.CLIPTextConfig(**TEXT)),
        f"tokenizer{suffix}": clip.CLIPTokenizer.from_pretrained(str(BUNDLED / "tokenizer")),
    }


def vae(**changes):
    """A VAE with 2×2 pixels per latent pixel."""
    down, up = 2 * ("DownEncoderBlock2D",), 2 * ("UpDecoderBlock2D",)
    sizes = {"block_out_channels": (WIDTH, WIDTH), "down_block_types": down, "up_block_types": up}
    return ppdiffusers.AutoencoderKL(**sizes, **changes)


def ready(pipe):
    for part in pipe.components.values():
        if isinstance(part, paddle.nn.Layer):
            part.eval()
    return pipe


def sdxl():
    """SDXL's layout: no attention at level 1, more layers at level 4 than at level 2."""
    paddle.seed(0)
    unet = ppdiffusers.UNet2DConditionModel(
        **SHARED,
        block_out_channels=(WIDTH, WIDTH, 2 * WIDTH),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=(2, 2, 4),
        cross_attention_dim=2 * WIDTH,  # of two text encoders
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
    )
    parts = {**texts(projection=False), **texts("_2"), "vae": vae(), "unet": unet}
    return ready(ppdiffusers.StableDiffusionXLPipeline(**parts, scheduler=ppdiffusers.EulerDiscreteScheduler()))


def sd3():
    """Stable Diffusion 3's layout: joint attention over image and text tokens, pooled text embeddings; no T5."""
    paddle.seed(0)
    transformer = ppdiffusers.SD3Transformer2DModel(
        sample_size=SHARED["sample_size"],
        pos_embed_max_size=SHARED["sample_size"],
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=WIDTH // 2,
        caption_projection_dim=WIDTH,
        joint_attention_dim=2 * WIDTH,  # of two text encoders
        pooled_projection_dim=2 * WIDTH,
    )
    parts = {**texts(), **texts("_2"), "text_encoder_3": None, "tokenizer_3": None, "transformer": transformer}
    scheduler = ppdiffusers.FlowMatchEulerDiscreteScheduler()
    return ready(ppdiffusers.StableDiffusion3Pipeline(**parts, vae=vae(shift_factor=0.0), scheduler=scheduler))


def inpaint():
    """An inpainting model's UNet: 4 channels for the latents, 1 for the mask, 4 for the masked image."""
    paddle.seed(0)
    unet = ppdiffusers.UNet2DConditionModel(
        **SHARED,
        in_channels=9,
        block_out_channels=(WIDTH, 2 * WIDTH),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=2,
    )
    scheduler = ppdiffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    parts = {**texts(projection=False), "vae": vae(), "unet": unet, "scheduler": scheduler}
    parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return ready(ppdiffusers.StableDiffusionInpaintPipeline(**parts))
