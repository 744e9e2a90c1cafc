"""Write the tiny pipelines beside this file, with random weights: python examples/tiny/make.py

They have the layout of SDXL, Stable Diffusion 3 and ModelScope's text-to-video model, so that the examples run without
a download. Their images are noise. `lora/` is a random LoRA of rank 1 for ../emoji_sd.
"""

import json
import tempfile
from pathlib import Path

import ppdiffusers_tome  # before Paddle
import numpy as np
import paddle
import ppdiffusers
from ppdiffusers import transformers as clip
from safetensors.numpy import save_file

HERE = Path(__file__).resolve().parent
WIDTH, GROUPS = 16, 4  # channels of most layers, and groups of their norms
SAMPLE = 32  # latent pixels, of 2×2 image pixels
DENOISER = {"sample_size": SAMPLE, "layers_per_block": 1, "norm_num_groups": GROUPS}


def write_tokenizer(folder):
    """CLIP's tokenizer with bytes alone, each also as the end of a word: 514 entries and no merges.

    Its files are in the folder, from which `save_pretrained` copies them.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as in CLIP, other bytes follow from 256 on
    characters = [*map(chr, printable), *(chr(256 + n) for n in range(256 - len(printable)))]
    entries = [*characters, *(f"{character}</w>" for character in characters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary, merges = (Path(folder, name) for name in ("vocab.json", "merges.txt"))
    numbers = {entry: number for number, entry in enumerate(entries)}
    vocabulary.write_text(json.dumps(numbers, ensure_ascii=False), encoding="utf-8")
    merges.write_text("#version: 0.2\n", encoding="utf-8")
    return clip.CLIPTokenizer(str(vocabulary), str(merges), pad_token="<|endoftext|>", model_max_length=77)


def text_encoder(cls=clip.CLIPTextModel):
    """CLIP's text encoder for `write_tokenizer`, with one layer."""
    ids = {"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "projection_dim": WIDTH}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 77}
    return cls(clip.CLIPTextConfig(vocab_size=514, **ids, **sizes, **layers))


def vae(**changes):
    """A VAE with 2×2 image pixels per latent pixel."""
    down, up = 2 * ("DownEncoderBlock2D",), 2 * ("UpDecoderBlock2D",)
    sizes = {"block_out_channels": (8, 8), "norm_num_groups": GROUPS, "sample_size": 2 * SAMPLE}
    return ppdiffusers.AutoencoderKL(**sizes, down_block_types=down, up_block_types=up, **changes)


def sdxl(tokenizer):
    """SDXL: two text encoders, and no attention at level 1."""
    unet = ppdiffusers.UNet2DConditionModel(
        **DENOISER,
        block_out_channels=(8, 8, 8),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=2,  # heads
        cross_attention_dim=2 * WIDTH,  # of two text encoders
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
    )
    return ppdiffusers.StableDiffusionXLPipeline(
        vae(),
        text_encoder(),
        text_encoder(clip.CLIPTextModelWithProjection),
        tokenizer,
        tokenizer,
        unet,
        ppdiffusers.EulerDiscreteScheduler(),
    )


def sd3(tokenizer):
    """Stable Diffusion 3: joint attention over image and text tokens; without the third text encoder, which is T5."""
    transformer = ppdiffusers.SD3Transformer2DModel(
        sample_size=SAMPLE,
        pos_embed_max_size=SAMPLE,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=WIDTH // 2,
        caption_projection_dim=WIDTH,
        joint_attention_dim=2 * WIDTH,  # of two text encoders
        pooled_projection_dim=2 * WIDTH,
    )
    names = ("", "_2")
    texts = {f"text_encoder{name}": text_encoder(clip.CLIPTextModelWithProjection) for name in names}
    texts |= {f"tokenizer{name}": tokenizer for name in names}
    texts |= {"text_encoder_3": None, "tokenizer_3": None}
    scheduler = ppdiffusers.FlowMatchEulerDiscreteScheduler()
    return ppdiffusers.StableDiffusion3Pipeline(transformer, scheduler, vae(shift_factor=0.0), **texts)


def video(tokenizer):
    """ModelScope's text-to-video model: attention over the pixels of each frame, and over the frames."""
    unet = ppdiffusers.UNet3DConditionModel(
        **DENOISER,
        block_out_channels=(8, 8),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
    )
    scheduler = ppdiffusers.DDIMScheduler(clip_sample=False)
    return ppdiffusers.TextToVideoSDPipeline(vae(), text_encoder(), tokenizer, unet, scheduler)


def lora():
    """Random LoRA weights for the self-attention of emoji_sd's UNet, by name."""
    unet = ppdiffusers.UNet2DConditionModel.from_pretrained(str(HERE.parent / "emoji_sd"), subfolder="unet")
    random, weights = np.random.RandomState(0), {}
    for path, layer in unet.named_sublayers():
        if path.endswith(("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")):
            rows, columns = layer.weight.shape
            for part, shape in (("down", (rows, 1)), ("up", (1, columns))):
                values = 0.3 * random.standard_normal(shape)
                weights[f"unet.{path}.lora.{part}.weight"] = values.astype("float32")
    return weights


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as files:
        for build in (sdxl, sd3, video):
            paddle.seed(0)
            pipe = build(write_tokenizer(files))
            for part in pipe.components.values():
                if isinstance(part, paddle.nn.Layer):
                    part.to(dtype="float16")
            pipe.save_pretrained(str(HERE / build.__name__))
    (HERE / "lora").mkdir(exist_ok=True)
    save_file(lora(), str(HERE / "lora" / "paddle_lora_weights.safetensors"), metadata={"format": "pd"})
