"""UNets with the published configs and random weights: speed does not depend on the weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle import nn
from ppdiffusers import UNet2DConditionModel

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.families.grids import grid_at
from ppdiffusers_tome.grid import Grid

WITH_ATTENTION = "CrossAttnDownBlock2D"


@dataclass(frozen=True)
class Architecture:
    """The config of a UNet, and the sizes of its inputs."""

    of: str  # the published model, or the folder
    config: Mapping[str, Any]  # arguments of UNet2DConditionModel that differ from its defaults
    factor: int = 8  # image pixels per latent pixel, along each side
    text: int = 77  # number of text tokens

    def build(self) -> nn.Layer:
        """The UNet, with random weights from Paddle's generator."""
        return UNet2DConditionModel(**self.config)

    @property
    def first_level(self) -> int:
        """The shallowest level with attention: 1 in Stable Diffusion, 2 in SDXL."""
        kinds = list(self.config["down_block_types"])
        if WITH_ATTENTION not in kinds:
            raise ToMeConfigError(f"{self.of} has no {WITH_ATTENTION}, only {', '.join(kinds)}: nothing can merge.")
        return 2 ** kinds.index(WITH_ATTENTION)

    def latent(self, size: int) -> Grid:
        """The grid of the latents of a square image of `size` px."""
        return Grid(size // self.factor, size // self.factor)

    def first_grid(self, size: int) -> Grid:
        """The grid of the tokens at the shallowest level with attention."""
        return grid_at(self.latent(size), self.first_level)


# Sources: unet/config.json of these models on Hugging Face. tests/benchmarks/test_speed_architectures.py compares the
# numbers of parameters with the published ones.
_PUBLISHED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ARCHITECTURES = {name: Architecture(**fields) for name, fields in _PUBLISHED.items()}


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
    files = folder / "vae" / "config.json", folder / "tokenizer" / "tokenizer_config.json"
    vae, tokenizer = (json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {} for file in files)
    factor = 2 ** (len(vae["block_out_channels"]) - 1) if vae else 8
    text = tokenizer.get("model_max_length", 77)
    return Architecture(str(folder), config, factor, text if 0 < text < 10_000 else 77)


def architecture_of(model: str) -> Architecture:
    """The architecture of a name in ARCHITECTURES or of a pipeline's folder; raises as `read_architecture`."""
    return ARCHITECTURES[model] if model in ARCHITECTURES else read_architecture(Path(model))
