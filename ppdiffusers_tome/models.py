"""ppdiffusers' internals, in one place: which models denoise, where their blocks are, and at what level."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import paddle
import ppdiffusers
from paddle import nn
from ppdiffusers import ControlNetModel, DiffusionPipeline, SD3Transformer2DModel, UNet2DConditionModel
from ppdiffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from ppdiffusers.models.attention_processor import (
    JointAttnProcessor2_5,
    LoRAXFormersAttnProcessor,
    XFormersAttnProcessor,
)
from ppdiffusers.models.embeddings import ImagePositionalEmbeddings, PatchEmbed
from ppdiffusers.models.transformer_2d import Transformer2DModel
from ppdiffusers.models.transformer_temporal import TransformerSpatioTemporalModel

from .errors import ToMeConfigError, ToMePassError
from .levels import grid_at, level_of
from .positions import Grid, check_ids, grid_of_ids

SD3ControlNetModel: Any = getattr(ppdiffusers, "SD3ControlNetModel", ())  # (), of which nothing is one, on 0.29.0
MERGEABLE_BLOCKS = (
    "transformer blocks over the pixels of a feature map, in a UNet, ControlNet, DiT, PixArt, SD3, FLUX, CogVideoX, "
    "Wan or HunyuanVideo"
)
# Models whose attention `rotary.py` computes, none of which ppdiffusers 0.29.0 has: the layer that shows the grid.
ROTARY = {
    "FluxTransformer2DModel": "pos_embed",
    "FluxControlNetModel": "pos_embed",
    "CogVideoXTransformer3DModel": "patch_embed.proj",
    "CogVideoXTransformer3DVCtrlModel": "patch_embed.proj",
    "VCtrlModel": "sample_patch_embed.proj",
    "WanTransformer3DModel": "patch_embedding",
    "HunyuanVideoTransformer3DModel": "x_embedder.proj",
}
# Blocks in which text passes through the same layers as the image.
ONE_SEQUENCE = {"CogVideoXBlock", "FluxSingleTransformerBlock", "HunyuanVideoSingleTransformerBlock"}
# Transformers whose MACs are counted: the text tokens that their pipelines pass by default.
TEXT_TOKENS = {
    **dict.fromkeys(("SD3Transformer2DModel", "SD3ControlNetModel"), 77 + 256),  # of CLIP and T5
    **dict.fromkeys(("FluxTransformer2DModel", "FluxControlNetModel", "WanTransformer3DModel"), 512),
    **dict.fromkeys(("CogVideoXTransformer3DModel", "CogVideoXTransformer3DVCtrlModel", "VCtrlModel"), 226),
    "HunyuanVideoTransformer3DModel": 256,
}


@dataclass(frozen=True)
class MergeableBlock:
    """A transformer block whose tokens are the pixels, or patches, of a feature map."""

    path: str  # in its denoiser, e.g. "down_blocks.0.attentions.0.transformer_blocks.0"
    index: int  # position among all such blocks of its denoiser, whatever their level
    level: int  # downsample factor of the feature map: tokens per side = latent pixels per side / level
    transformer: nn.Layer  # the transformer around the block: of a UNet one of many, otherwise the denoiser itself
    grid_layer: nn.Layer  # its first layer, whose input shows the token grid whatever calls it
    block: nn.Layer  # the transformer block itself
    is_rotary: bool = False  # whether its self-attention is one that `rotary.py` computes, as in FLUX

    @property
    def is_single_stream(self) -> bool:
        """Whether attention and MLP are parallel and share a norm and a projection, as in FLUX and HunyuanVideo."""
        return self.is_rotary and hasattr(self.block, "proj_mlp")

    @property
    def is_one_sequence(self) -> bool:
        """Whether text passes through the same layers as the image."""
        return type(self.block).__name__ in ONE_SEQUENCE

    @property
    def text_is_last(self) -> bool:
        """Whether the text comes after the image where both are one sequence, as in HunyuanVideo."""
        return type(self.block).__name__.startswith("HunyuanVideo")

    @property
    def sublayers(self) -> dict[str, tuple[nn.Layer, ...]]:
        """The layers that can run on merged tokens, under the names of the `merge_…` settings."""
        block, second = self.block, getattr(self.block, "attn2", None)
        mlp = None if self.is_single_stream else getattr(block, "ffn", None) or block.ff
        if hasattr(block, "attn"):  # joint attention of text and image; only the image merges
            # Some blocks of Stable Diffusion 3.5 also have an attention over the image tokens alone.
            layers = {"attn": (block.attn, second), "mlp": (mlp,)}
        elif getattr(block, "only_cross_attention", False):  # Stable Diffusion's upscaler: attn1 attends to text too
            layers = {"crossattn": (block.attn1, second), "mlp": (mlp,)}
        else:
            layers = {"attn": (block.attn1,), "crossattn": (second,), "mlp": (mlp,)}
        existing = {name: tuple(layer for layer in some if layer is not None) for name, some in layers.items()}
        return {name: some for name, some in existing.items() if some}


def is_chunked(block: nn.Layer) -> bool:
    """Whether a transformer block calls its feed-forward layer in chunks, see `enable_forward_chunking`."""
    return getattr(block, "_chunk_size", None) is not None


def is_joint(attention: nn.Layer) -> bool:
    """Whether an attention layer computes as in SD3, also without text: a fused kernel with the scale of its width."""
    has_text = getattr(attention, "add_q_proj", None) is not None
    return has_text or isinstance(attention.processor, JointAttnProcessor2_5)


def is_fused(attention: nn.Layer) -> bool:
    """Whether a kernel computes an attention layer's scores and output together, and would take no broadcast mask."""
    return isinstance(attention.processor, (XFormersAttnProcessor, LoRAXFormersAttnProcessor))


def splits_heads(attention: nn.Layer) -> bool:
    """Whether a layer's processor is known to use `head_to_batch_dim` and `get_attention_scores`.

    A subclass with a `__call__` of its own may compute scores in another way. Those of Text2Video-Zero count whatever
    they define, because its keys are those of the first frame, which no mask over a frame's own tokens fits.
    """
    classes = type(attention.processor).__mro__
    computing = next(cls for cls in classes if "__call__" in vars(cls)).__name__
    return computing in ("AttnProcessor", "SlicedAttnProcessor") or "CrossFrameAttnProcessor" in (
        cls.__name__ for cls in classes
    )


def components(target: Any) -> dict[str, Any]:
    """A pipeline's components by name, members of a list as "name[i]"; or a model under the name of its class.

    Raises:
        ToMeConfigError: target is not a ppdiffusers pipeline or model.
    """
    if isinstance(target, nn.Layer):
        return {type(target).__name__: target}
    if not isinstance(target, DiffusionPipeline):
        raise ToMeConfigError(
            f"token merging applies to a ppdiffusers pipeline or model, not to {type(target).__name__!r}: "
            "pass pipe or pipe.unet."
        )
    by_name: dict[str, Any] = {}
    # Not .components, which raises for some pipelines, nor getattr, for which ppdiffusers warns about config values.
    for name in (name for name in target.config if not name.startswith("_")):
        component = vars(target).get(name)
        if isinstance(component, (list, tuple)):
            by_name |= {f"{name}[{i}]": member for i, member in enumerate(component)}
        else:
            by_name[name] = component
    return by_name


def label(name: str, component: Any) -> str:
    """A component in a message: "unet (UNet2DConditionModel)", or only the class if that is its name."""
    class_name = type(component).__name__
    return name if name == class_name else f"{name} ({class_name})"


def layer_components(target: Any) -> dict[str, nn.Layer]:
    """The `components` of a pipeline or model that are layers; raises as `components` does."""
    return {name: component for name, component in components(target).items() if isinstance(component, nn.Layer)}


def half_on_cpu(target: Any) -> list[str]:
    """Labels of the components that have half-precision weights on the CPU, where Paddle lacks kernels for them."""
    labels = []
    for name, component in layer_components(target).items():
        for parameter in component.parameters():
            if parameter.dtype in (paddle.float16, paddle.bfloat16) and parameter.place.is_cpu_place():
                labels.append(f"{label(name, component)} in {str(parameter.dtype).rpartition('.')[2]}")
                break
    return labels


def denoisers(target: Any) -> dict[str, nn.Layer]:
    """The models of a pipeline (or within a model) that have mergeable blocks, by name: UNets, ControlNets, DiTs.

    Raises:
        ToMeConfigError: as `components`.
    """
    by_name: dict[str, nn.Layer] = {}
    for name, component in layer_components(target).items():
        prefix = None  # of the paths inside the last denoiser; sublayers come right after their layer
        for path, layer in component.named_sublayers(include_self=True):
            if prefix is not None and path.startswith(prefix):
                continue
            if _is_denoiser(layer) and not any(layer is other for other in by_name.values()):
                by_name[f"{name}.{path}" if path else name] = layer
                prefix = f"{path}." if path else ""
    return by_name


def _is_denoiser(layer: nn.Layer) -> bool:
    if type(layer).__name__ == "UNetFlatConditionModel":  # Versatile Diffusion's text UNet: its tokens are not pixels
        return False
    if hasattr(layer, "down_blocks"):
        return next(_transformers(layer), None) is not None
    is_in_a_unet = isinstance(layer, TransformerSpatioTemporalModel) or getattr(layer, "is_input_continuous", False)
    return _stem(layer) is not None and not is_in_a_unet and not getattr(layer, "inference_optimize", False)


def find_blocks(denoiser: nn.Layer) -> list[MergeableBlock]:
    """All mergeable blocks of a denoiser, at every level, in the order of its layers."""
    blocks: list[MergeableBlock] = []
    for path, transformer, stem in _transformers(denoiser):
        rotary = rotary_stem(transformer) is not None
        for name in ("transformer_blocks", "single_transformer_blocks", *["blocks"] * rotary):
            for i, block in enumerate(getattr(transformer, name, ())):
                if rotary or isinstance(block, (BasicTransformerBlock, JointTransformerBlock)):
                    place = f"{path}.{name}.{i}".lstrip("."), len(blocks), level_of(denoiser, path)
                    blocks.append(MergeableBlock(*place, transformer, stem, block, rotary))
    return blocks


def _transformers(denoiser: nn.Layer) -> Iterator[tuple[str, nn.Layer, nn.Layer]]:
    """Path, layer and stem of each transformer over pixels, except those that INFERENCE_OPTIMIZE has fused."""
    for path, layer in denoiser.named_sublayers(include_self=True):
        stem = _stem(layer)
        if stem is not None and not getattr(layer, "inference_optimize", False):
            yield path, layer, stem


def rotary_stem(model: nn.Layer) -> nn.Layer | None:
    """The layer that shows the token grid of a model in `ROTARY`; None if it is none of them."""
    path = next((ROTARY[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in ROTARY), None)
    return None if path is None else attrgetter(path)(model)


def has_frames(grid_layer: nn.Layer) -> bool:
    """Whether a sequence of tokens is that of several frames with one grid each, as in CogVideoX and Wan."""
    return isinstance(grid_layer, (nn.Conv2D, nn.Conv3D))


def _stem(layer: nn.Layer) -> nn.Layer | None:
    """The layer whose input shows the token grid of a transformer over pixels; None if `layer` is no such model.

    It is inside the transformer, so that a library that replaces the whole `forward` of a transformer, as caches of
    ppdiffusers do, still calls it.
    """
    if (stem := rotary_stem(layer)) is not None:
        return stem
    if isinstance(layer, (SD3Transformer2DModel, SD3ControlNetModel)):
        return layer.pos_embed
    if isinstance(layer, Transformer2DModel):
        if layer.is_input_continuous:
            return layer.norm
        return layer.pos_embed if layer.is_input_patches else layer.latent_image_embedding
    return layer.norm if isinstance(layer, TransformerSpatioTemporalModel) else None


def token_grid(grid_layer: nn.Layer, x: paddle.Tensor, before: Grid | None = None) -> Grid:
    """The token grid of a transformer, from the input x of its `grid_layer`.

    Args:
        grid_layer, x: the layer, and what it gets.
        before: the grid of the pass before, which is that of a program of FLUX: the positions that it gets are only
            known when it runs, and it checks them then.

    Raises:
        ToMePassError: x is not a feature map, has fewer indices than its grid, or has no fixed height and width.
    """
    if isinstance(grid_layer, ImagePositionalEmbeddings):  # [B, h·w] indices of a fixed grid, as in VQ-Diffusion
        grid = Grid(grid_layer.height, grid_layer.width)
        if x.shape[-1] not in (grid.tokens, -1):
            raise ToMePassError(
                f"{type(grid_layer).__name__} got {x.shape[-1]} indices, but its grid of {grid.h}×{grid.w} has "
                f"{grid.tokens}: merging needs the complete grid. Pass all indices, or remove_tome() first."
            )
        return grid
    if type(grid_layer).__name__ == "FluxPosEmbed":
        return grid_of_ids(x) if paddle.in_dynamic_mode() else check_ids(x, before)
    if x.ndim not in (4, 5):  # 5 in Hotshot-XL, [B, C, F, H, W], whose F frames become images of the batch
        raise ToMePassError(
            f"{type(grid_layer).__name__} got {list(x.shape)}: merging needs a feature map [B, C, H, W]."
        )
    data_format = getattr(grid_layer, "data_format", getattr(grid_layer, "_data_format", "NCHW"))
    channels_last = not data_format.startswith("NC")
    h_axis, w_axis = (1, 2) if channels_last else (x.ndim - 2, x.ndim - 1)
    h, w = x.shape[h_axis], x.shape[w_axis]
    if h < 0 or w < 0:
        raise ToMePassError(
            f"{type(grid_layer).__name__} got {list(x.shape)}: a program that merges needs a fixed height and width. "
            "Export one for each size, as export_pipeline(sizes=[(height, width), …]) does."
        )
    return _in_patches(grid_layer, Grid(h, w))


def block_grid(block: MergeableBlock, latent: Grid) -> Grid:
    """The token grid of a block for a grid of latents."""
    if isinstance(block.grid_layer, ImagePositionalEmbeddings):
        return Grid(block.grid_layer.height, block.grid_layer.width)
    return _in_patches(block.grid_layer, grid_at(latent, block.level))


def _in_patches(grid_layer: nn.Layer, grid: Grid) -> Grid:
    if isinstance(grid_layer, PatchEmbed):
        sides = (grid_layer.patch_size,) * 2
    else:
        sides = grid_layer._stride[-2:] if has_frames(grid_layer) else (1, 1)
    return Grid(grid.h // sides[0], grid.w // sides[1])


def is_controlnet(denoiser: nn.Layer) -> bool:
    """Whether a model is a ControlNet, to which `apply_tome(controlnet=…)` applies."""
    is_other = type(denoiser).__name__ in ("FluxControlNetModel", "VCtrlModel")
    return is_other or isinstance(denoiser, (ControlNetModel, SD3ControlNetModel))


def is_countable(denoiser: nn.Layer) -> bool:
    """Whether the MACs of all layers of a model follow from their shapes and places.

    Not in FLUX's ControlNets that add a token for the kind of their image, or that embed it by convolutions.
    """
    if isinstance(denoiser, (UNet2DConditionModel, ControlNetModel)):
        return True
    is_other = getattr(denoiser, "union", False) or getattr(denoiser, "input_hint_block", None) is not None
    return type(denoiser).__name__ in TEXT_TOKENS and not is_other


def count_frames(target: Any, frames: int | None) -> int | None:
    """Frames of one sequence of tokens: 1 for images; of a video those given, or of the config; None if unknown."""
    models = list(denoisers(target).values())
    if not any(has_frames(block.grid_layer) for model in models for block in find_blocks(model)[:1]):
        return 1
    configs = [getattr(model, "config", {}) for model in models]
    known = [(c["sample_frames"] - 1) // c["temporal_compression_ratio"] + 1 for c in configs if "sample_frames" in c]
    return frames or next(iter(known), None)


def latent_grid(denoiser: nn.Layer) -> Grid | None:
    """The default grid of latents: `sample_size` of the model's config, or CogVideoX's; None if it has none."""
    config: Any = getattr(denoiser, "config", None)
    size = getattr(config, "sample_size", None)
    if size is None and getattr(config, "sample_height", None) is not None:
        size = config.sample_height, config.sample_width
    if size is None:
        return None
    return Grid(size, size) if isinstance(size, int) else Grid(*size)


def vae_factor(pipe: DiffusionPipeline) -> int:
    """Image pixels per latent pixel, along each side; 8 in Stable Diffusion, 16 in FLUX, which packs 2×2 of them."""
    classes = type(vars(pipe).get("transformer")).__mro__
    if any(cls.__name__ == "FluxTransformer2DModel" for cls in classes):
        return 16
    return getattr(pipe, "vae_scale_factor", getattr(pipe, "vae_scale_factor_spatial", 8))


def text_tokens(target: Any) -> int:
    """Number of text tokens: those in `TEXT_TOKENS`, or the tokenizer's maximum, 77 if it has none."""
    for model in layer_components(target).values():
        if type(model).__name__ in TEXT_TOKENS:
            return TEXT_TOKENS[type(model).__name__]
    length = getattr(getattr(target, "tokenizer", None), "model_max_length", 77)
    return length if 0 < length < 10_000 else 77  # tokenizers without a maximum report 1e30


def remove_builtin(model: nn.Layer) -> None:
    """Remove the merging that ppdiffusers ships from a model: its classes, hooks and `_tome_info`."""
    for layer in model.sublayers(include_self=True):
        parent = getattr(type(layer), "_parent", None)
        if parent is not None and type(layer).__name__.startswith("ToMe"):
            layer.__class__ = parent
        info = layer.__dict__.pop("_tome_info", None)
        for hook in info["hooks"] if info else ():
            hook.remove()
