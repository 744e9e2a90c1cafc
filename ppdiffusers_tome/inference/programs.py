"""What is traced: a layer around each of a pipeline's models that takes its inputs by name.

The names of programs and inputs, and the order of outputs, are those that ppdiffusers' `PaddleInfer…Pipeline` classes
read. What our own `load_pipeline` needs beyond that comes after what they look at.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.static import InputSpec

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


class TextEncoder(nn.Layer):
    """Stable Diffusion's: the last hidden state [B, T, D], and the pooled one [B, D]."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        out = self.model(input_ids, return_dict=True)
        return out[0], out[1]


class TextEncoderXL(TextEncoder):
    """SDXL's two: the last but one hidden state [B, T, D], and the pooled one, in the second projected, [B, D]."""

    def forward(self, input_ids: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        out = self.model(input_ids, output_hidden_states=True, return_dict=True)
        # Where there is no projection the first output is the last hidden state, and SDXL takes it for the pooled one.
        return out.hidden_states[-2], out[0]


class VaeEncoder(nn.Layer):
    """The mode of the latent distribution, [B, 4, h, w], and its log variance."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        distribution = self.model.encode(sample).latent_dist
        return distribution.mode(), distribution.logvar


class VaeDecoder(nn.Layer):
    """A picture in -1 ... 1, [B, 3, H, W]."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, latent_sample: paddle.Tensor) -> paddle.Tensor:
        return self.model.decode(latent_sample, return_dict=False)[0]


class _Denoiser(nn.Layer):
    """The UNet's prediction [B, C, h, w], with a ControlNet inside where there is one; and the same for SDXL.

    Each variant has a forward of its own, for `paddle.jit` exports no `*args`.
    """

    def __init__(self, unet: nn.Layer, controlnet: nn.Layer | None = None) -> None:
        super().__init__()
        self.unet = unet
        self.controlnet: Any = controlnet

    def _predict(self, sample: Any, timestep: Any, text: Any, added: Any, **residuals: Any) -> paddle.Tensor:
        given = {"encoder_hidden_states": text, "added_cond_kwargs": added, "return_dict": False}
        return self.unet(sample, timestep, **given, **residuals)[0]

    def _control(self, sample: Any, timestep: Any, text: Any, added: Any, image: Any, scale: Any) -> paddle.Tensor:
        given = {"encoder_hidden_states": text, "added_cond_kwargs": added, "return_dict": False}
        down, mid = self.controlnet(sample, timestep, controlnet_cond=image, **given)
        # One scale for each residual, as ppdiffusers hands over.
        down = [residual * scale[i] for i, residual in enumerate(down)]
        residuals = {
            "down_block_additional_residuals": down,
            "mid_block_additional_residual": mid * scale[len(down)],
        }
        return self._predict(sample, timestep, text, added, **residuals)


class Denoiser(_Denoiser):
    """Stable Diffusion's UNet."""

    def forward(
        self, sample: paddle.Tensor, timestep: paddle.Tensor, encoder_hidden_states: paddle.Tensor
    ) -> paddle.Tensor:
        return self._predict(sample, timestep, encoder_hidden_states, None)


class DenoiserXL(_Denoiser):
    """SDXL's UNet."""

    def forward(
        self,
        sample: paddle.Tensor,
        timestep: paddle.Tensor,
        encoder_hidden_states: paddle.Tensor,
        text_embeds: paddle.Tensor,
        time_ids: paddle.Tensor,
    ) -> paddle.Tensor:
        added = {"text_embeds": text_embeds, "time_ids": time_ids}
        return self._predict(sample, timestep, encoder_hidden_states, added)


class ControlledDenoiser(_Denoiser):
    """Stable Diffusion's UNet with a ControlNet."""

    def forward(
        self,
        sample: paddle.Tensor,
        timestep: paddle.Tensor,
        encoder_hidden_states: paddle.Tensor,
        controlnet_cond: paddle.Tensor,
        controlnet_conditioning_scale: paddle.Tensor,
    ) -> paddle.Tensor:
        text, scale = encoder_hidden_states, controlnet_conditioning_scale
        return self._control(sample, timestep, text, None, controlnet_cond, scale)


class ControlledDenoiserXL(_Denoiser):
    """SDXL's UNet with a ControlNet."""

    def forward(
        self,
        sample: paddle.Tensor,
        timestep: paddle.Tensor,
        encoder_hidden_states: paddle.Tensor,
        text_embeds: paddle.Tensor,
        time_ids: paddle.Tensor,
        controlnet_cond: paddle.Tensor,
        controlnet_conditioning_scale: paddle.Tensor,
    ) -> paddle.Tensor:
        added = {"text_embeds": text_embeds, "time_ids": time_ids}
        text, scale = encoder_hidden_states, controlnet_conditioning_scale
        return self._control(sample, timestep, text, added, controlnet_cond, scale)


def denoiser(unet: nn.Layer, controlnet: nn.Layer | None) -> Traceable:
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
    kinds: dict[tuple[bool, bool], type[_Denoiser]]
    kinds = {(False, False): Denoiser, (True, False): DenoiserXL}
    kinds |= {(False, True): ControlledDenoiser, (True, True): ControlledDenoiserXL}
    return _ready(kinds[is_xl, controlnet is not None](_working_copy(unet), controlnet), *inputs)


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
    return copy.deepcopy(model).astype("float32")


def _ready(layer: nn.Layer, *inputs: Input) -> Traceable:
    layer.eval()
    return Traceable(layer, inputs)
