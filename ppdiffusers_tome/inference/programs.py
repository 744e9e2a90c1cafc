"""What is traced: the layers of `layers.py`, with the inputs that they take.

The names of programs and inputs, and the order of outputs, are those that ppdiffusers' `PaddleInfer…Pipeline` classes
read. What our own `load_pipeline` needs beyond that comes after what they look at.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import nn
from paddle.static import InputSpec

from .layers import (
    ControlledDenoiser,
    ControlledDenoiserXL,
    Denoiser,
    DenoiserXL,
    Fused,
    TextEncoder,
    TextEncoderXL,
    VaeDecoder,
    VaeEncoder,
)

# The draws are parity's inputs: the scales that models meet, where rounding is what it is in use.
Draw = Callable[[np.random.RandomState, tuple[int, ...]], np.ndarray]


def _normal(random: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    return random.standard_normal(shape)


def _whole(below: int) -> Draw:
    return lambda random, shape: random.randint(0, below, shape)


def _from_zero_to_one(random: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    return random.random_sample(shape)


@dataclass(frozen=True)
class Input:
    """One input of a program. A dimension is a number, or the name of one that may differ from call to call."""

    name: str
    dims: tuple[int | str, ...]  # names: "batch", "tokens", "height", "width" in px, "latent_height", "latent_width"
    draw: Draw = _normal
    dtype: str = "float32"

    def spec(self, fixed: Mapping[str, int]) -> InputSpec:
        """The input's shape with the dimensions in `fixed` known, and the other named ones dynamic."""
        return InputSpec([fixed.get(d) if isinstance(d, str) else d for d in self.dims], self.dtype, name=self.name)

    def random(self, random: np.random.RandomState, dims: Mapping[str, int]) -> paddle.Tensor:
        """A random value, with all named dimensions given."""
        shape = tuple(dims[d] if isinstance(d, str) else d for d in self.dims)
        return paddle.to_tensor(np.asarray(self.draw(random, shape), dtype=self.dtype))


@dataclass(frozen=True)
class Traceable:
    """A layer in float32 and evaluation mode, which may be changed, and what it takes."""

    layer: nn.Layer
    inputs: tuple[Input, ...]


def denoiser(unet: nn.Layer, controlnet: nn.Layer | None, is_size_known: bool) -> Traceable:
    """The UNet of Stable Diffusion or SDXL, fused with a ControlNet where one is given. Works on copies."""
    config, batch = unet.config, "batch"
    inputs = [
        Input("sample", (batch, config.in_channels, "latent_height", "latent_width")),
        Input("timestep", (1,), _whole(1000)),
        Input("encoder_hidden_states", (batch, "tokens", config.cross_attention_dim)),
    ]
    is_xl = config.addition_embed_type == "text_time"
    if is_xl:
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs += [Input("text_embeds", (batch, pooled)), Input("time_ids", (batch, 6), _whole(1024))]
    if controlnet is not None:
        inputs += [
            Input("controlnet_cond", (batch, 3, "height", "width"), _from_zero_to_one),
            Input("controlnet_conditioning_scale", (count_residuals(controlnet),), _from_zero_to_one),
        ]
        controlnet = _working_copy(controlnet)
    kinds: dict[tuple[bool, bool], type[Fused]]
    kinds = {(False, False): Denoiser, (True, False): DenoiserXL}
    kinds |= {(False, True): ControlledDenoiser, (True, True): ControlledDenoiserXL}
    layer = kinds[is_xl, controlnet is not None](_working_copy(unet), controlnet)
    if is_size_known:
        layer.record_directly()
    return _ready(layer, *inputs)


def count_residuals(controlnet: nn.Layer) -> int:
    """How many residuals a ControlNet hands to the UNet, the mid block's included; 13 for Stable Diffusion 1 and 2."""
    return len(controlnet.controlnet_down_blocks) + 1


def text_encoder(model: nn.Layer, is_xl: bool) -> Traceable:
    """A text encoder. Works on a copy."""
    ids = Input("input_ids", ("batch", "tokens"), _whole(model.config.vocab_size), "int64")
    return _ready((TextEncoderXL if is_xl else TextEncoder)(_working_copy(model)), ids)


def vae_encoder(model: nn.Layer) -> Traceable:
    """The VAE's encoder, for pictures in -1 ... 1. Works on a copy."""
    return _ready(
        VaeEncoder(_working_copy(model)), Input("sample", ("batch", model.config.in_channels, "height", "width"))
    )


def vae_decoder(model: nn.Layer) -> Traceable:
    """The VAE's decoder. Works on a copy."""
    dims = ("batch", model.config.latent_channels, "latent_height", "latent_width")
    return _ready(VaeDecoder(_working_copy(model)), Input("latent_sample", dims))


def _working_copy(model: nn.Layer) -> nn.Layer:
    """A copy that tracing may change; float32, for the precision of a program is chosen when it is loaded."""
    return copy.deepcopy(model).float()  # astype("float32") leaves half precision as it is on Paddle 3 (Paddle #76614)


def _ready(layer: nn.Layer, *inputs: Input) -> Traceable:
    layer.eval()
    return Traceable(layer, inputs)
