"""The one file that knows ppdiffusers' insides: which models denoise, where their blocks are, and at what level."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn
from ppdiffusers import ControlNetModel, DiffusionPipeline, SD3Transformer2DModel, UNet2DConditionModel
from ppdiffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from ppdiffusers.models.embeddings import ImagePositionalEmbeddings, PatchEmbed
from ppdiffusers.models.transformer_2d import Transformer2DModel
from ppdiffusers.models.transformer_temporal import TransformerSpatioTemporalModel
from ppdiffusers.pipelines.versatile_diffusion.modeling_text_unet import UNetFlatConditionModel

from .errors import ToMeConfigError, ToMePassError
from .levels import grid_at, level_of
from .positions import Grid

LOOKED_FOR = "transformer blocks over the pixels of a feature map, in a UNet, ControlNet, DiT, PixArt or SD3"


@dataclass(frozen=True)
class MergeableBlock:
    """A transformer block whose tokens are the pixels, or patches, of a feature map."""

    path: str  # in its denoiser, e.g. "down_blocks.0.attentions.0.transformer_blocks.0"
    index: int  # position among all such blocks of its denoiser, whatever their level
    level: int  # downsample factor of the feature map: tokens per side = latent pixels per side / level
    grid_layer: nn.Layer  # the layer whose input shows the token grid: the transformer around the block, or its stem
    block: nn.Layer

    @property
    def is_joint(self) -> bool:
        """Whether text and image tokens attend together, as in SD3; only its image tokens merge."""
        return isinstance(self.block, JointTransformerBlock)

    @property
    def sublayers(self) -> dict[str, tuple[nn.Layer, ...]]:
        """The layers that can run on merged tokens, under the names of the `merge_…` settings."""
        block = self.block
        if self.is_joint:
            return {"attn": (block.attn,), "mlp": (block.ff,)}
        found: dict[str, list[nn.Layer]] = {"attn": [], "crossattn": [], "mlp": [block.ff]}
        # As in Stable Diffusion's upscaler, where attn1 looks at the text too.
        found["crossattn" if block.only_cross_attention else "attn"].append(block.attn1)
        if block.attn2 is not None:
            found["crossattn"].append(block.attn2)
        return {name: tuple(layers) for name, layers in found.items() if layers}


def is_chunked(block: nn.Layer) -> bool:
    """Whether a transformer block feeds its feed-forward layer in pieces, as `enable_forward_chunking` makes it do."""
    return block._chunk_size is not None


def parts(target: Any) -> dict[str, Any]:
    """What a pipeline is made of, by name, or the one model under the name of its class.

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
    found: dict[str, Any] = {}
    # .components refuses some pipelines, and ppdiffusers warns where a setting is asked for as an attribute.
    for name in (name for name in target.config if not name.startswith("_")):
        component = vars(target).get(name)
        several = isinstance(component, (list, tuple))
        found.update({f"{name}[{i}]": part for i, part in enumerate(component)} if several else {name: component})
    return found


def label(name: str, part: Any) -> str:
    """One of the `parts` in a message: "unet (UNet2DConditionModel)", or the class alone where that is its name."""
    kind = type(part).__name__
    return name if name == kind else f"{name} ({kind})"


def components(target: Any) -> dict[str, nn.Layer]:
    """The layers among the `parts` of a pipeline or model; raises as `parts` does."""
    return {name: part for name, part in parts(target).items() if isinstance(part, nn.Layer)}


def half_on_cpu(target: Any) -> list[str]:
    """The `components` whose weights lie on the CPU in a dtype that Paddle's CPU kernels lack, each with its dtype."""
    found = []
    for name, component in components(target).items():
        for parameter in component.parameters():
            if parameter.dtype in (paddle.float16, paddle.bfloat16) and parameter.place.is_cpu_place():
                found.append(f"{label(name, component)} in {str(parameter.dtype).rpartition('.')[2]}")
                break
    return found


def denoisers(target: Any) -> dict[str, nn.Layer]:
    """The models of a pipeline (or within a model) that have blocks to merge, by name: UNets, ControlNets, DiTs.

    Raises:
        ToMeConfigError: as `parts`.
    """
    found: dict[str, nn.Layer] = {}
    for name, component in components(target).items():
        inside = (
            None  # what the paths inside the denoiser found last begin with; sublayers come right after their layer
        )
        for path, layer in component.named_sublayers(include_self=True):
            if inside is not None and path.startswith(inside):
                continue
            if _is_denoiser(layer) and not any(layer is other for other in found.values()):
                found[f"{name}.{path}" if path else name] = layer
                inside = f"{path}." if path else ""
    return found


def _is_denoiser(layer: nn.Layer) -> bool:
    if isinstance(layer, UNetFlatConditionModel):  # Versatile Diffusion's text UNet: its tokens are no pixels
        return False
    if hasattr(layer, "down_blocks"):
        return next(_transformers(layer), None) is not None
    return _stem(layer) not in (None, layer) and not layer.inference_optimize


def find_blocks(denoiser: nn.Layer) -> list[MergeableBlock]:
    """All blocks of a denoiser that could merge, in the order of its layers, at every level."""
    found: list[MergeableBlock] = []
    for path, transformer, grid_layer in _transformers(denoiser):
        for i, block in enumerate(transformer.transformer_blocks):
            if isinstance(block, (BasicTransformerBlock, JointTransformerBlock)):
                block_path = f"{path}.transformer_blocks.{i}".lstrip(".")
                found.append(MergeableBlock(block_path, len(found), level_of(denoiser, path), grid_layer, block))
    return found


def _transformers(denoiser: nn.Layer) -> Iterator[tuple[str, nn.Layer, nn.Layer]]:
    """Path, layer and stem of each transformer over pixels; INFERENCE_OPTIMIZE replaces the blocks by fused ones."""
    for path, layer in denoiser.named_sublayers(include_self=True):
        stem = _stem(layer)
        if stem is not None and not getattr(layer, "inference_optimize", False):
            yield path, layer, stem


def _stem(layer: nn.Layer) -> nn.Layer | None:
    """The layer whose input shows the token grid of a transformer over pixels; None where `layer` is no such thing."""
    if isinstance(layer, SD3Transformer2DModel):
        return layer.pos_embed
    if isinstance(layer, Transformer2DModel):
        if layer.is_input_continuous:
            return layer
        return layer.pos_embed if layer.is_input_patches else layer.latent_image_embedding
    return layer if isinstance(layer, TransformerSpatioTemporalModel) else None


def token_grid(grid_layer: nn.Layer, x: paddle.Tensor) -> Grid:
    """The grid of the tokens that a transformer makes of the input of its `grid_layer`.

    Where x has no fixed height and width (an export with dynamic sizes), the program itself reads them off x.

    Raises:
        ToMePassError: x is no feature map, or has fewer indices than its grid.
    """
    if isinstance(grid_layer, ImagePositionalEmbeddings):  # [B, h·w] indices of a fixed grid, as in VQ-Diffusion
        grid = Grid(grid_layer.height, grid_layer.width)
        if x.shape[-1] not in (grid.tokens, -1):
            raise ToMePassError(
                f"{type(grid_layer).__name__} got {x.shape[-1]} indices, and its grid of {grid.h}×{grid.w} has "
                f"{grid.tokens}: merging needs the whole grid. Pass all indices, or remove_tome() first."
            )
        return grid
    if x.ndim not in (4, 5):  # 5 in Hotshot-XL, [B, C, F, H, W]: its F frames are then taken for images
        raise ToMePassError(
            f"{type(grid_layer).__name__} got {list(x.shape)}: merging needs a feature map [B, C, H, W]."
        )
    channels_last = getattr(grid_layer, "data_format", "NCHW") != "NCHW"
    h_axis, w_axis = (1, 2) if channels_last else (x.ndim - 2, x.ndim - 1)
    h, w = x.shape[h_axis], x.shape[w_axis]
    if h < 0 or w < 0:
        shape = paddle.shape(x).cast("int64")
        h, w = shape[h_axis], shape[w_axis]
    return _in_patches(grid_layer, Grid(h, w))


def block_grid(found: MergeableBlock, latent: Grid) -> Grid:
    """The token grid of a block on latents of a size."""
    if isinstance(found.grid_layer, ImagePositionalEmbeddings):
        return Grid(found.grid_layer.height, found.grid_layer.width)
    return _in_patches(found.grid_layer, grid_at(latent, found.level))


def _in_patches(grid_layer: nn.Layer, grid: Grid) -> Grid:
    patch = grid_layer.patch_size if isinstance(grid_layer, PatchEmbed) else 1
    return Grid(grid.h // patch, grid.w // patch)


def is_controlnet(denoiser: nn.Layer) -> bool:
    """Whether a model is a ControlNet, which `apply_tome(controlnet=…)` can treat apart."""
    return isinstance(denoiser, ControlNetModel)


def is_countable(denoiser: nn.Layer) -> bool:
    """Whether `level_of` is right for all layers of a model, so that their cost can be read off their shapes."""
    return isinstance(denoiser, (UNet2DConditionModel, ControlNetModel))


def latent_grid(denoiser: nn.Layer) -> Grid | None:
    """The latents' grid that a model was made for, from its config's `sample_size`; None where there is none."""
    size = getattr(getattr(denoiser, "config", None), "sample_size", None)
    if size is None:
        return None
    return Grid(size, size) if isinstance(size, int) else Grid(*size)


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
