"""The one file that knows ppdiffusers' insides: which models denoise, where their blocks are, and at what level."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn
from ppdiffusers import ControlNetModel, DiffusionPipeline, UNet2DConditionModel
from ppdiffusers.models.attention import BasicTransformerBlock
from ppdiffusers.models.transformer_2d import Transformer2DModel

from .errors import ToMeConfigError, ToMePassError
from .matching import Grid

LOOKED_FOR = "BasicTransformerBlock inside a Transformer2DModel over [B, C, H, W] latents, in a UNet or ControlNet"


@dataclass(frozen=True)
class MergeableBlock:
    """A transformer block whose tokens are the pixels of a feature map."""

    path: str  # in its denoiser, e.g. "down_blocks.0.attentions.0.transformer_blocks.0"
    index: int  # position among all such blocks of its denoiser, whatever their level
    level: int  # downsample factor of the feature map: tokens per side = latent pixels per side / level
    transformer: nn.Layer  # the Transformer2DModel around it, which sees the feature map
    block: nn.Layer

    @property
    def sublayers(self) -> dict[str, nn.Layer]:
        """The layers that can run on merged tokens, under the names of the `merge_…` settings."""
        found = {"attn": self.block.attn1, "crossattn": self.block.attn2, "mlp": self.block.ff}
        return {name: layer for name, layer in found.items() if layer is not None}


def is_chunked(block: nn.Layer) -> bool:
    """Whether a transformer block feeds its feed-forward layer in pieces, as `enable_forward_chunking` makes it do."""
    return block._chunk_size is not None


def components(target: Any) -> dict[str, nn.Layer]:
    """The layers of a pipeline by name, or the one model under the name of its class.

    Raises:
        ToMeConfigError: target is neither a ppdiffusers pipeline nor a model.
    """
    if isinstance(target, nn.Layer):
        return {type(target).__name__: target}
    if not isinstance(target, DiffusionPipeline):
        raise ToMeConfigError(
            f"token merging applies to a ppdiffusers pipeline or model, not to {type(target).__name__!r}: "
            "pass pipe or pipe.unet."
        )
    found: dict[str, nn.Layer] = {}
    for name, component in target.components.items():
        parts = component if isinstance(component, (list, tuple)) else [component]
        layers = [part for part in parts if isinstance(part, nn.Layer)]
        found.update({name if len(layers) == 1 else f"{name}[{i}]": layer for i, layer in enumerate(layers)})
    return found


def denoisers(target: Any) -> dict[str, nn.Layer]:
    """The models of a pipeline (or within a model) that have blocks to merge: UNets and ControlNets, by name.

    Raises:
        ToMeConfigError: as `components`.
    """
    found: dict[str, nn.Layer] = {}
    for name, component in components(target).items():
        inside = (
            None  # what the paths inside the denoiser found last begin with; sublayers come right after their layer
        )
        for path, layer in component.named_sublayers(include_self=True):
            if inside is not None and path.startswith(inside):
                continue
            if hasattr(layer, "down_blocks") and next(_transformers(layer), None) is not None:
                found[f"{name}.{path}" if path else name] = layer
                inside = f"{path}." if path else ""
    return found


def find_blocks(denoiser: nn.Layer) -> list[MergeableBlock]:
    """All blocks of a UNet or ControlNet that could merge, in the order of its layers, at every level."""
    found: list[MergeableBlock] = []
    for path, transformer in _transformers(denoiser):
        for i, block in enumerate(transformer.transformer_blocks):
            if isinstance(block, BasicTransformerBlock):
                block_path = f"{path}.transformer_blocks.{i}"
                found.append(MergeableBlock(block_path, len(found), level_of(denoiser, path), transformer, block))
    return found


def _transformers(denoiser: nn.Layer) -> Iterator[tuple[str, nn.Layer]]:
    for path, layer in denoiser.named_sublayers():
        if isinstance(layer, Transformer2DModel) and layer.is_input_continuous:
            yield path, layer


def level_of(denoiser: nn.Layer, path: str) -> int:
    """The level of a layer's input in a UNet or ControlNet, read off its path and the samplers that come before it."""
    stage, _, rest = path.partition(".")
    entries, exits = [], [1]  # the level at which each down block begins, and the level after it
    for block in denoiser.down_blocks:
        entries.append(exits[-1])
        exits.append(exits[-1] * (2 if block.downsamplers is not None else 1))
    if stage == "down_blocks":
        return entries[int(rest.partition(".")[0])]
    if stage == "controlnet_down_blocks":  # one 1×1 convolution per residual that the ControlNet hands over
        levels = [1]
        for block, entry, exit_ in zip(denoiser.down_blocks, entries, exits[1:], strict=True):
            levels += [entry] * len(block.resnets) + ([exit_] if block.downsamplers is not None else [])
        return levels[int(rest.partition(".")[0])]
    if stage in ("mid_block", "controlnet_mid_block"):
        return exits[-1]
    if stage != "up_blocks":
        return 1
    position = int(rest.partition(".")[0])
    before = [block for block in list(denoiser.up_blocks)[:position] if block.upsamplers is not None]
    return exits[-1] >> (len(before) + (".upsamplers." in path))  # an upsampler convolves what it has enlarged


def token_grid(transformer: nn.Layer, x: paddle.Tensor) -> Grid:
    """The grid of the tokens that a Transformer2DModel makes of its input.

    Raises:
        ToMePassError: x is no feature map, or its height and width are not known (an export with dynamic sizes).
    """
    if x.ndim != 4:
        raise ToMePassError(
            f"{type(transformer).__name__} got {list(x.shape)}: merging needs a feature map [B, C, H, W]."
        )
    h, w = x.shape[2:] if transformer.data_format == "NCHW" else x.shape[1:3]
    if h < 0 or w < 0:
        raise ToMePassError(
            f"{type(transformer).__name__} got {list(x.shape)}: merging needs a fixed height and width."
        )
    return Grid(h, w)


def is_countable(denoiser: nn.Layer) -> bool:
    """Whether `level_of` is right for all layers of a model, so that their cost can be read off their shapes."""
    return isinstance(denoiser, (UNet2DConditionModel, ControlNetModel))


def latent_grid(denoiser: nn.Layer) -> Grid | None:
    """The latents' grid that a model was made for, from its config's `sample_size`; None where there is none."""
    size = getattr(getattr(denoiser, "config", None), "sample_size", None)
    if size is None:
        return None
    return Grid(size, size) if isinstance(size, int) else Grid(*size)


def grid_at(latent: Grid, level: int) -> Grid:
    """The grid at a level: each halving rounds up, as a stride-2 convolution does."""
    h, w = latent
    while level > 1:
        h, w, level = -(-h // 2), -(-w // 2), level // 2
    return Grid(h, w)


def vae_factor(pipe: DiffusionPipeline) -> int:
    """Image pixels per latent pixel, along each side; 8 in Stable Diffusion."""
    return getattr(pipe, "vae_scale_factor", 8)


def text_tokens(target: Any) -> int:
    """How many text tokens cross-attention sees: the tokenizer's maximum, 77 where there is none."""
    length = getattr(getattr(target, "tokenizer", None), "model_max_length", 77)
    return length if 0 < length < 10_000 else 77  # tokenizers without a maximum report 1e30


def remove_builtin(model: nn.Layer) -> None:
    """Take the merging that ppdiffusers itself ships off a model: its classes, hooks and `_tome_info`."""
    for layer in model.sublayers(include_self=True):
        parent = getattr(type(layer), "_parent", None)
        if parent is not None and type(layer).__name__.startswith("ToMe"):
            layer.__class__ = parent
        info = layer.__dict__.pop("_tome_info", None)
        for hook in info["hooks"] if info else ():
            hook.remove()
