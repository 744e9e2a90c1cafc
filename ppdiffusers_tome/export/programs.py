"""The layers to trace: a pipeline's models, each with named inputs.

Names of programs and inputs, and the order of outputs, are those that ppdiffusers' `PaddleInfer…Pipeline` classes
expect. Further outputs, which only `load_pipeline` reads, come last.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.static import InputSpec

from ..attach.attach import attach, detach
from ..families.blocks import find_blocks
from ..families.kernels import use_ordinary_attention
from ..methods import ToMeConfig

# Random inputs for the comparison with eager. They have the scale of real inputs, because rounding depends on it.
Sample = Callable[[np.random.RandomState, tuple[int, ...]], np.ndarray]
NORMAL: Sample = np.random.RandomState.standard_normal
UNIFORM: Sample = np.random.RandomState.random_sample  # from 0 to 1


def _integers(below: int, least: int = 0) -> Sample:
    return lambda random, shape: random.randint(least, below, shape)


@dataclass(frozen=True)
class Input:
    """One input of a program. A dimension is a number, or a name if it may differ from call to call."""

    name: str
    dims: tuple[int | str, ...]  # names: "batch", "tokens", "height", "width" in px, "latent_height", "latent_width"
    sample: Sample = NORMAL
    dtype: str = "float32"

    def spec(self, fixed: Mapping[str, int]) -> InputSpec:
        """The input's shape. Named dimensions have their size in `fixed`, or are dynamic."""
        return InputSpec([fixed.get(d) if isinstance(d, str) else d for d in self.dims], self.dtype, name=self.name)

    def random(self, random: np.random.RandomState, dims: Mapping[str, int]) -> paddle.Tensor:
        """A random value; `dims` has all named dimensions."""
        shape = tuple(dims[d] if isinstance(d, str) else d for d in self.dims)
        return paddle.to_tensor(np.asarray(self.sample(random, shape), dtype=self.dtype))


@dataclass(frozen=True)
class Traceable:
    """A layer to trace, in float32 on the CPU, and its inputs, by keyword. Tracing may modify the layer."""

    layer: nn.Layer
    inputs: tuple[Input, ...]

    def __post_init__(self) -> None:
        self.layer.eval()


class ModelWrapper(nn.Layer):
    """A layer around one model."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model


class TextEncoder(ModelWrapper):
    """Text encoder of Stable Diffusion: the last hidden state [B, T, D] and the pooled state [B, D]."""

    def forward(self, input_ids: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        out = self.model(input_ids, return_dict=True)
        return out[0], out[1]


class TextEncoderXL(ModelWrapper):
    """Text encoders of SDXL: penultimate hidden state [B, T, D] and pooled (in the second: projected) state [B, D]."""

    def forward(self, input_ids: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        out = self.model(input_ids, output_hidden_states=True, return_dict=True)
        # Without a projection the first output is the last hidden state, which SDXL reads as the pooled state.
        return out.hidden_states[-2], out[0]


class TextEncoderStates(ModelWrapper):
    """Text encoder with the states of all its layers: its two outputs, and the input [B, T, D] and output of each.

    The two outputs are the last hidden state and the pooled state, or with a projection the pooled and projected
    state [B, D] and the last hidden state.
    """

    def forward(self, input_ids: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        out = self.model(input_ids, output_hidden_states=True, return_dict=True)
        return out[0], out[1], *out.hidden_states


class VaeEncoder(ModelWrapper):
    """VAE encoder: the mode of the latent distribution, [B, 4, h, w], and its log variance."""

    def forward(self, sample: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        distribution = self.model.encode(sample).latent_dist
        return distribution.mode(), distribution.logvar


class VaeDecoder(ModelWrapper):
    """VAE decoder: an image [B, 3, H, W], from -1 to 1."""

    def forward(self, latent_sample: paddle.Tensor) -> paddle.Tensor:
        return self.model.decode(latent_sample, return_dict=False)[0]


class Denoiser(nn.Layer):
    """UNet of Stable Diffusion or SDXL, perhaps fused with a ControlNet: the prediction [B, C, h, w]."""

    def __init__(self, unet: nn.Layer, controlnet: nn.Layer | None) -> None:
        super().__init__()
        self.unet = unet
        self.controlnet: Any = controlnet

    # Traced without a translation of the models' Python code, which would take nine tenths of an export.
    @paddle.jit.not_to_static
    def forward(
        self,
        sample: paddle.Tensor,
        timestep: paddle.Tensor,
        encoder_hidden_states: paddle.Tensor,
        controlnet_cond: paddle.Tensor | None = None,
        controlnet_conditioning_scale: Any = None,  # [residuals]: a scale for each, as ppdiffusers passes them
        **added: paddle.Tensor,  # SDXL's text_embeds and time_ids
    ) -> paddle.Tensor:
        arguments = {"encoder_hidden_states": encoder_hidden_states, "added_cond_kwargs": added or None}
        residuals = {}
        if self.controlnet is not None:
            outputs = self.controlnet(
                sample, timestep, controlnet_cond=controlnet_cond, return_dict=False, **arguments
            )
            *down, mid = [x * controlnet_conditioning_scale[i] for i, x in enumerate([*outputs[0], outputs[1]])]
            residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        return self.unet(sample, timestep, return_dict=False, **arguments, **residuals)[0]


def unet_inputs(unet: nn.Layer, time_ids: int = 6) -> tuple[Input, ...]:
    """The inputs of the UNet of Stable Diffusion or SDXL, without those for a ControlNet.

    Args:
        time_ids: number of SDXL's numbers that are embedded as a time is: sizes, a crop and, in its refiner, a score.
    """
    config, batch = unet.config, "batch"
    inputs: tuple[Input, ...] = (
        Input("sample", (batch, config.in_channels, "latent_height", "latent_width")),
        Input("timestep", (1,), _integers(800, 200)),  # tokens merge in these steps
        Input("encoder_hidden_states", (batch, "tokens", config.cross_attention_dim)),
    )
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - time_ids * config.addition_time_embed_dim
        inputs += Input("text_embeds", (batch, pooled)), Input("time_ids", (batch, time_ids), _integers(1024))
    return inputs


def denoiser(unet: nn.Layer, controlnet: nn.Layer | None, time_ids: int = 6) -> Traceable:
    """The UNet of Stable Diffusion or SDXL, fused with the ControlNet, if any, for a fixed size. Both are copied.

    `time_ids` is that of `unet_inputs`.
    """
    inputs = unet_inputs(unet, time_ids)
    if controlnet is not None:
        inputs += (
            Input("controlnet_cond", ("batch", 3, "height", "width"), UNIFORM),
            Input("controlnet_conditioning_scale", (count_residuals(controlnet),), UNIFORM),
        )
        controlnet = working_copy(controlnet)
    layer = Denoiser(working_copy(unet), controlnet)
    for model in filter(None, (layer.unet, layer.controlnet)):
        for transformer in {block.transformer for block in find_blocks(model)}:
            transformer.register_forward_post_hook(_restore_shape)
    return Traceable(layer, inputs)


def _restore_shape(transformer: nn.Layer, inputs: tuple[paddle.Tensor, ...], output: Any) -> Any:
    """Give a transformer's output [B, C, H, W] its fixed height and width back.

    ppdiffusers reshapes it to sizes that the program computes. From the sum with the input, Paddle infers each side
    that is more than 1. With a side of 1, the next block would see a grid without a fixed size.
    """
    h, w = inputs[0].shape[2:]
    return (output[0].reshape([0, 0, h, w]), *output[1:]) if 1 in (h, w) else output


def count_residuals(controlnet: nn.Layer) -> int:
    """Number of residuals of a ControlNet, including the mid block's; 13 for Stable Diffusion 1 and 2."""
    return len(controlnet.controlnet_down_blocks) + 1


def merge_by(target: Any, unet: ToMeConfig | None, controlnet: ToMeConfig | None) -> None:
    """Let the UNet and the ControlNet of a `Denoiser` or a pipeline merge by these configs alone; None is plain."""
    detach(target)
    if unet is not None:
        attach(target.unet, unet, None)
    if controlnet is not None and getattr(target, "controlnet", None) is not None:
        attach(target.controlnet, controlnet, controlnet)


def text_encoder(model: nn.Layer, is_xl: bool, all_states: bool = False) -> Traceable:
    """A text encoder. It is copied.

    Args:
        is_xl: of SDXL.
        all_states: in SDXL, return the states of all layers, not only the penultimate state.
    """
    ids = Input("input_ids", ("batch", "tokens"), _integers(model.config.vocab_size), "int64")
    layer = (TextEncoderStates if all_states else TextEncoderXL) if is_xl else TextEncoder
    return Traceable(layer(working_copy(model)), (ids,))


def vae_encoder(model: nn.Layer) -> Traceable:
    """The VAE's encoder, for images from -1 to 1. It is copied."""
    dims = ("batch", model.config.in_channels, "height", "width")
    return Traceable(VaeEncoder(_convertible(working_copy(model))), (Input("sample", dims),))


def vae_decoder(model: nn.Layer) -> Traceable:
    """The VAE's decoder. It is copied."""
    dims = ("batch", model.config.latent_channels, "latent_height", "latent_width")
    return Traceable(VaeDecoder(_convertible(working_copy(model))), (Input("latent_sample", dims),))


def _convertible(vae: nn.Layer) -> nn.Layer:
    """The same VAE with four dimensions in the norms of its attention layers: paddle2onnx does not know three."""
    for layer in vae.sublayers():
        norm = getattr(layer, "group_norm", None)
        if norm is not None and hasattr(layer, "to_q"):  # [B, C, H·W]
            norm.register_forward_pre_hook(lambda _, inputs: inputs[0].unsqueeze(-1))
            norm.register_forward_post_hook(lambda _, inputs, output: output.squeeze(-1))
    return vae


def working_copy(model: nn.Layer) -> nn.Layer:
    """A copy that tracing may modify, on the CPU and in float32: a runtime chooses device and precision.

    It shares weights that are there in float32 already, which tracing only reads. What saves memory in eager mode is
    off in it: attention in slices, and slices and tiles of a VAE, which a program of any size and batch cannot have.
    """
    tensors = [*model.parameters(), *model.buffers()]
    shared = [tensor for tensor in tensors if tensor.dtype == paddle.float32 and tensor.place.is_cpu_place()]
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    if any(not tensor.place.is_cpu_place() for tensor in tensors):
        copied._to_impl(device="cpu", include_sublayers=True, floating_only=False)  # ppdiffusers' to() leaves integers
    use_ordinary_attention(copied)
    for name in ("disable_slicing", "disable_tiling"):
        if hasattr(copied, name):  # of a VAE
            getattr(copied, name)()
    return copied.float()  # not astype("float32"), which does nothing on Paddle 3 (Paddle #76614)
