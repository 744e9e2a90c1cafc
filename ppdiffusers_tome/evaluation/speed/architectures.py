"""UNets with the published configs and random weights: speed does not depend on the weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle import nn
from ppdiffusers import Transformer2DModel, UNet2DConditionModel

from ...errors import ToMeConfigError
from ...levels import grid_at
from ...positions import Grid

WITH_ATTENTION = "CrossAttnDownBlock2D"


@dataclass(frozen=True)
class Architecture:
    """The config of a UNet, and the sizes of its inputs.

    Args:
        of: the published model, or the folder.
        config: arguments of UNet2DConditionModel that differ from its defaults.
        factor: image pixels per latent pixel, along each side.
        text: number of text tokens.
    """

    of: str
    config: Mapping[str, Any]
    factor: int = 8
    text: int = 77

    def build(self) -> nn.Layer:
        """The UNet, with random weights from Paddle's generator."""
        return UNet2DConditionModel(**self.config)

    def build_transformer(self) -> nn.Layer:
        """The UNet's first transformer, with its first block only."""
        channels, heads = self.config["block_out_channels"][self._first_stage], self.config["attention_head_dim"]
        heads = heads if isinstance(heads, int) else heads[self._first_stage]
        names = ("cross_attention_dim", "norm_num_groups", "use_linear_projection", "upcast_attention")
        settings = {name: self.config[name] for name in names if name in self.config}
        return Transformer2DModel(heads, channels // heads, in_channels=channels, **settings)

    @property
    def first_level(self) -> int:
        """The shallowest level with attention: 1 in Stable Diffusion, 2 in SDXL."""
        return 2**self._first_stage

    def latent(self, size: int) -> Grid:
        """The grid of the latents of a square image of `size` px."""
        return Grid(size // self.factor, size // self.factor)

    def first_grid(self, size: int) -> Grid:
        """The grid of the tokens at the shallowest level with attention."""
        return grid_at(self.latent(size), self.first_level)

    @property
    def _first_stage(self) -> int:
        kinds = list(self.config["down_block_types"])
        if WITH_ATTENTION not in kinds:
            raise ToMeConfigError(f"{self.of} has no {WITH_ATTENTION}, only {', '.join(kinds)}: nothing can merge.")
        return kinds.index(WITH_ATTENTION)


_SD = {
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": (*(WITH_ATTENTION,) * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
    "layers_per_block": 2,
}
# Sources: unet/config.json of these models on Hugging Face. tests/test_speed_architectures.py compares the numbers of
# parameters with the published ones.
ARCHITECTURES = {
    "sd15": Architecture(
        "runwayml/stable-diffusion-v1-5",
        {**_SD, "sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
    ),
    "sd21": Architecture(
        "stabilityai/stable-diffusion-2-1",
        {
            **_SD,
            "sample_size": 96,
            "cross_attention_dim": 1024,
            "attention_head_dim": (5, 10, 20, 20),
            "use_linear_projection": True,
        },
    ),
    "sdxl": Architecture(
        "stabilityai/stable-diffusion-xl-base-1.0",
        {
            **_SD,
            "sample_size": 128,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", WITH_ATTENTION, WITH_ATTENTION),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10),
            "cross_attention_dim": 2048,
            "attention_head_dim": (5, 10, 20),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
    "bk-sdm-tiny": Architecture(
        "nota-ai/bk-sdm-tiny",
        {
            **_SD,
            "sample_size": 64,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": (WITH_ATTENTION,) * 3,
            "up_block_types": ("CrossAttnUpBlock2D",) * 3,
            "mid_block_type": None,
            "layers_per_block": 1,
            "cross_attention_dim": 768,
            "attention_head_dim": 8,
        },
    ),
    "tiny": Architecture(
        "nothing published: one level of 32 channels, for tests",
        {
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": 16,
            "block_out_channels": (32,),
            "down_block_types": (WITH_ATTENTION,),
            "mid_block_type": None,
            "up_block_types": ("CrossAttnUpBlock2D",),
            "layers_per_block": 1,
            "cross_attention_dim": 24,
            "attention_head_dim": 2,
        },
        text=7,
    ),
}


def read_architecture(folder: Path) -> Architecture:
    """The architecture of a pipeline's UNet, from the configs in its folder.

    Raises:
        ToMeConfigError: the folder has no unet/config.json, or one of another class.
    """
    try:
        config = json.loads((folder / "unet" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ToMeConfigError(
            f"--model {folder} is not allowed: it must be a pipeline's folder with unet/config.json ({error})."
        ) from None
    if config.get("_class_name") != "UNet2DConditionModel":
        raise ToMeConfigError(
            f"--model {folder} is not allowed: its UNet is a {config.get('_class_name')}, and only "
            "UNet2DConditionModel is timed."
        )
    vae, tokenizer = (_optional(folder / part) for part in ("vae/config.json", "tokenizer/tokenizer_config.json"))
    factor = 2 ** (len(vae["block_out_channels"]) - 1) if vae else 8
    text = tokenizer.get("model_max_length", 77)
    return Architecture(str(folder), config, factor, text if 0 < text < 10_000 else 77)


def architecture_of(model: str) -> Architecture:
    """The architecture of a name in ARCHITECTURES or of a pipeline's folder; raises as `read_architecture`."""
    return ARCHITECTURES[model] if model in ARCHITECTURES else read_architecture(Path(model))


def _optional(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
