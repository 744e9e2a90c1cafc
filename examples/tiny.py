"""Tiny random models for the examples of families that have no bundled model. Their images are noise."""

from pathlib import Path

import ppdiffusers_tome
import paddle
import ppdiffusers
from ppdiffusers import transformers as clip

BUNDLED = Path(__file__).resolve().parent / "emoji_sd"
FOLDER = BUNDLED.parents[1] / "build" / "tiny"

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


def sdxl():
    """SDXL's layout: no attention at level 1, more layers at level 4 than at level 2."""
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
    return ppdiffusers.StableDiffusionXLPipeline(**parts, scheduler=ppdiffusers.EulerDiscreteScheduler())


def sd3():
    """Stable Diffusion 3's layout: joint attention over image and text tokens, pooled text embeddings; no T5."""
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
    return ppdiffusers.StableDiffusion3Pipeline(**parts, vae=vae(shift_factor=0.0), scheduler=scheduler)


def video():
    """The layout of ModelScope's text-to-video: a UNet with attention over the frames too."""
    unet = ppdiffusers.UNet3DConditionModel(
        **SHARED,
        block_out_channels=(WIDTH, 2 * WIDTH),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=WIDTH // 2,
    )
    scheduler = ppdiffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    return ppdiffusers.TextToVideoSDPipeline(vae=vae(), **texts(projection=False), unet=unet, scheduler=scheduler)


def write_tiny(name):
    """The folder of a tiny random model, "sdxl", "sd3" or "video"; it is written when it is first needed."""
    folder = FOLDER / name
    if not (folder / "model_index.json").exists():
        paddle.seed(0)
        {"sdxl": sdxl, "sd3": sd3, "video": video}[name]().save_pretrained(str(folder))
    return folder


def write_lora(pipe):
    """The file of random LoRA weights of rank 2 for a pipeline's UNet."""
    paddle.seed(0)
    weights = {}
    for path, layer in pipe.unet.named_sublayers():
        if path.endswith(("to_q", "to_v")):
            inputs, outputs = layer.weight.shape
            weights[f"unet.{path}.lora.down.weight"] = 0.05 * paddle.randn([inputs, 2])
            weights[f"unet.{path}.lora.up.weight"] = 0.05 * paddle.randn([2, outputs])
    file = FOLDER / "lora" / "paddle_lora_weights.pdparams"
    file.parent.mkdir(parents=True, exist_ok=True)
    paddle.save(weights, str(file))
    return file
