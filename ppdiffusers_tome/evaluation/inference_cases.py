"""What inference is timed on: UNets, their inputs, and how to measure."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from paddle import nn
from ppdiffusers import UNet2DConditionModel

from ..config import ToMeConfig
from ..errors import ToMeConfigError
from ..positions import Grid, count_removed


@dataclass(frozen=True)
class InferenceCase:
    """One UNet at one size."""

    name: str
    model: str  # in words
    build: Callable[[], nn.Layer]
    latent: int  # latent pixels per side
    width: int  # of the text embedding
    text: int = 77  # text tokens
    batch: int = 2

    def describe(self, config: ToMeConfig) -> dict[str, Any]:
        """What the result says of it."""
        grid = Grid(self.latent, self.latent)
        described = {name: value for name, value in vars(self).items() if name != "build"}
        return described | {"tokens": grid.tokens, "kept": grid.tokens - int(count_removed(grid, config))}


@dataclass(frozen=True)
class Measurement:
    """How to measure: merged share of tokens, timed rounds, threads of every arm, and PyTorch's interpreter if any."""

    ratio: float = 0.5
    rounds: int = 9
    threads: int = 1
    torch_python: str | None = None

    def __post_init__(self) -> None:
        ToMeConfig(ratio=self.ratio)
        for name in ("rounds", "threads"):
            if getattr(self, name) < 1:
                raise ToMeConfigError(f"{name}={getattr(self, name)!r} is not allowed: it must be 1 or more.")
        if self.ratio == 0:
            raise ToMeConfigError("ratio=0 merges nothing: raise it.")

    @property
    def config(self) -> ToMeConfig:
        """Everywhere the first token of each cell is dst: tomesd's random choice is another than ours."""
        return ToMeConfig(ratio=self.ratio, use_rand=False)


def draw(case: InferenceCase, seed: int) -> dict[str, np.ndarray]:
    """Random inputs, by the names "sample", "timestep" and "text"."""
    stream = np.random.RandomState(seed)
    return {
        "sample": stream.standard_normal((case.batch, 4, case.latent, case.latent)).astype("float32"),
        "timestep": np.array([500.0], dtype="float32"),
        "text": stream.standard_normal((case.batch, case.text, case.width)).astype("float32"),
    }


def _top_level(channels: int, heads: int, latent: int, width: int) -> nn.Layer:
    """A UNet of one level with three transformer blocks; random weights, on which speed does not depend."""
    return UNet2DConditionModel(
        sample_size=latent,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(channels,),
        down_block_types=("CrossAttnDownBlock2D",),
        mid_block_type=None,
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=width,
        attention_head_dim=heads,
    )


def cases(model: Path) -> dict[str, InferenceCase]:
    """All cases by name; `model` is the bundled model's folder."""

    def bundled() -> nn.Layer:
        if not (model / "unet").is_dir():
            raise ToMeConfigError(
                f"model={str(model)!r} has no folder unet: pass the bundled model, examples/emoji_sd."
            )
        return UNet2DConditionModel.from_pretrained(str(model), subfolder="unet")

    found = [
        InferenceCase("tiny", "one level, 32 channels", lambda: _top_level(32, 2, 16, 24), 16, 24, text=7),
        InferenceCase("emoji-32", "bundled model at its own size", bundled, 32, 192),
        InferenceCase("emoji-64", "bundled model at twice its size", bundled, 64, 192),
        InferenceCase(
            "sd15-top-64",
            "SD1.5's top level alone: 320 channels, 8 heads, 3 blocks",
            lambda: _top_level(320, 8, 64, 768),
            64,
            768,
        ),
    ]
    return {case.name: case for case in found}
