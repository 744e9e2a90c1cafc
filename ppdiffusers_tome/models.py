"""ppdiffusers' internals, in one place: which models denoise, where their blocks are, and at what level."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import paddle
from paddle import nn
from ppdiffusers import ControlNetModel, DiffusionPipeline, SD3Transformer2DModel, UNet2DConditionModel
from ppdiffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from ppdiffusers.models.attention_processor import (
    AttnProcessor,
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

FIRST, LAST = "first", "last"  # where text is in a sequence of text and image


@dataclass(frozen=True)
class BlockFacts:
    """What this package knows of a class of transformer blocks, and of the models that consist of such blocks.

    Layers are named by attributes of the block. A class that ppdiffusers 0.29.0 does not have is named by a string.
    """

    transformers: tuple[type | str, ...]  # models whose lists of `BLOCK_LISTS` contain such blocks
    grid_layers: tuple[str, ...]  # in the transformer: the first path that exists is the layer that shows the grid
    shows_positions: bool = False  # whether that layer gets the position of each token, not a feature map
    has_frames: bool = False  # whether the frames of a video are one sequence of tokens
    packs_latents: bool = False  # whether the pipeline makes one latent pixel of 2×2
    # The layers that can run on merged tokens, by the names of the `merge_…` settings. A block may lack some of them.
    attn: tuple[str, ...] = ("attn1",)
    crossattn: tuple[str, ...] = ("attn2",)
    mlp: tuple[str, ...] = ("ff",)
    is_joint: bool = False  # whether self-attention has projections of its own for text
    is_single_stream: bool = False  # whether attention and MLP are parallel and share a norm and a projection
    text: str | None = None  # FIRST or LAST where text passes through the same layers as the image, as one sequence
    # The class of the attention processor, where positions rotate: `rotary.py` computes its attention, and no other.
    rotary_processor: str | None = None
    has_mask: bool = False  # whether that processor takes a mask of the text
    # What counting MACs assumes. Without text_tokens only UNet2DConditionModel and ControlNetModel are counted.
    text_tokens: int | None = None  # that the pipeline passes by default; None: as many as its tokenizer allows
    text_layers: tuple[str, ...] = ()  # layers that get the text alone, in the block or in the model around it
    image_tokens: int = 0  # tokens of an image that cross-attention also attends to, if it has projections for them
    image_layers: tuple[str, ...] = ()  # layers that get those image tokens, in the model around the block

    @property
    def is_rotary(self) -> bool:
        """Whether `rotary.py` computes the self-attention."""
        return self.rotary_processor is not None

    @property
    def merging_layers(self) -> tuple[str, ...]:
        """All layers of the block that can run on merged tokens."""
        return self.attn + self.crossattn + self.mlp


BLOCKS: dict[type | str, BlockFacts] = {
    BasicTransformerBlock: BlockFacts(
        transformers=(Transformer2DModel, TransformerSpatioTemporalModel),
        grid_layers=("latent_image_embedding", "pos_embed", "norm"),  # of VQ-Diffusion; DiT and PixArt; UNets
    ),
    JointTransformerBlock: BlockFacts(
        transformers=(SD3Transformer2DModel, "SD3ControlNetModel"),
        grid_layers=("pos_embed",),
        attn=("attn", "attn2"),  # the second, over the image alone, is in some blocks of Stable Diffusion 3.5
        crossattn=(),
        is_joint=True,
        text_tokens=77 + 256,  # of CLIP and T5
        text_layers=("context_embedder", "ff_context"),
    ),
    "FluxTransformerBlock": BlockFacts(
        transformers=("FluxTransformer2DModel", "FluxControlNetModel"),
        grid_layers=("pos_embed",),
        shows_positions=True,
        packs_latents=True,
        attn=("attn",),
        crossattn=(),
        is_joint=True,
        rotary_processor="FluxAttnProcessor2_0",
        text_tokens=512,
        text_layers=("context_embedder", "ff_context"),
    ),
    "FluxSingleTransformerBlock": BlockFacts(
        transformers=("FluxTransformer2DModel", "FluxControlNetModel"),
        grid_layers=("pos_embed",),
        shows_positions=True,
        packs_latents=True,
        attn=("attn",),
        crossattn=(),
        mlp=(),
        is_single_stream=True,
        text=FIRST,
        rotary_processor="FluxAttnProcessor2_0",
        text_tokens=512,
        text_layers=("context_embedder",),
    ),
    "CogVideoXBlock": BlockFacts(
        transformers=("CogVideoXTransformer3DModel", "CogVideoXTransformer3DVCtrlModel"),
        grid_layers=("patch_embed.proj",),
        has_frames=True,
        crossattn=(),
        text=FIRST,
        rotary_processor="CogVideoXAttnProcessor2_0",
        text_tokens=226,
        text_layers=("text_proj",),
    ),
    "VCtrlBlock": BlockFacts(
        transformers=("VCtrlModel",),
        grid_layers=("sample_patch_embed.proj",),
        has_frames=True,
        crossattn=(),
        rotary_processor="VCtrlAttnProcessor2_0",
        text_tokens=226,  # of CogVideoX beside it; the block itself gets no text
    ),
    "WanTransformerBlock": BlockFacts(
        transformers=("WanTransformer3DModel",),
        grid_layers=("patch_embedding",),
        has_frames=True,
        mlp=("ffn",),
        rotary_processor="WanAttnProcessor2_0",
        text_tokens=512,
        text_layers=("text_embedder",),
        image_tokens=257,
        image_layers=("image_embedder",),
    ),
    "HunyuanVideoTransformerBlock": BlockFacts(
        transformers=("HunyuanVideoTransformer3DModel",),
        grid_layers=("x_embedder.proj",),
        has_frames=True,
        attn=("attn",),
        crossattn=(),
        is_joint=True,
        rotary_processor="HunyuanVideoAttnProcessor2_0",
        has_mask=True,
        text_tokens=256,
        text_layers=("context_embedder", "ff_context"),
    ),
    "HunyuanVideoSingleTransformerBlock": BlockFacts(
        transformers=("HunyuanVideoTransformer3DModel",),
        grid_layers=("x_embedder.proj",),
        has_frames=True,
        attn=("attn",),
        crossattn=(),
        mlp=(),
        is_single_stream=True,
        text=LAST,
        rotary_processor="HunyuanVideoAttnProcessor2_0",
        has_mask=True,
        text_tokens=256,
        text_layers=("context_embedder",),
    ),
}
BLOCK_LISTS = ("transformer_blocks", "single_transformer_blocks", "blocks")
_TRANSFORMERS = frozenset(cls for facts in BLOCKS.values() for cls in facts.transformers)
CONTROLNETS = frozenset((ControlNetModel, "SD3ControlNetModel", "FluxControlNetModel", "VCtrlModel"))


@dataclass(frozen=True)
class MergeableBlock:
    """A transformer block whose tokens are the pixels, or patches, of a feature map."""

    path: str  # in its denoiser, e.g. "down_blocks.0.attentions.0.transformer_blocks.0"
    index: int  # position among all such blocks of its denoiser, whatever their level
    level: int  # downsample factor of the feature map: tokens per side = latent pixels per side / level
    transformer: nn.Layer  # the transformer around the block: of a UNet one of many, otherwise the denoiser itself
    grid_layer: nn.Layer  # its first layer, whose input shows the token grid whatever calls it
    block: nn.Layer  # the transformer block itself
    facts: BlockFacts  # of the class of the block

    @property
    def sublayers(self) -> dict[str, tuple[nn.Layer, ...]]:
        """The layers that can run on merged tokens, under the names of the `merge_…` settings."""
        facts = self.facts
        names = {"attn": facts.attn, "crossattn": facts.crossattn, "mlp": facts.mlp}
        if getattr(self.block, "only_cross_attention", False):
            # In Stable Diffusion's upscaler the first attention is to text too.
            names |= {"attn": (), "crossattn": facts.attn + facts.crossattn}
        layers = {key: [getattr(self.block, name, None) for name in some] for key, some in names.items()}
        existing = {key: tuple(layer for layer in some if layer is not None) for key, some in layers.items()}
        return {key: some for key, some in existing.items() if some}


def is_chunked(block: nn.Layer) -> bool:
    """Whether a transformer block calls its feed-forward layer in chunks, see `enable_forward_chunking`."""
    return getattr(block, "_chunk_size", None) is not None


def is_joint(attention: nn.Layer) -> bool:
    """Whether an attention uses SD3's fused kernel, which scales by the width of a head, with or without text."""
    has_text = getattr(attention, "add_q_proj", None) is not None
    return has_text or isinstance(attention.processor, JointAttnProcessor2_5)


def is_fused(attention: nn.Layer) -> bool:
    """Whether one kernel computes the scores and the output of an attention, and takes no broadcast mask."""
    return isinstance(attention.processor, (XFormersAttnProcessor, LoRAXFormersAttnProcessor))


def use_ordinary_attention(model: nn.Layer) -> None:
    """Replace ppdiffusers' default attention on a machine with a GPU, whose kernel a CPU lacks, by that on a CPU."""
    for layer in model.sublayers():
        if type(getattr(layer, "processor", None)) is XFormersAttnProcessor:
            layer.set_processor(AttnProcessor())


def splits_heads(attention: nn.Layer) -> bool:
    """Whether a layer's processor is known to use `head_to_batch_dim` and `get_attention_scores`.

    A subclass with a `__call__` of its own may compute scores in another way. Text2Video-Zero's processors always
    count: their keys are those of the first frame, so a mask over the tokens of one frame would have the wrong length.
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


def nothing_merges(target: Any) -> str:
    """Why a pipeline or model has no denoiser that can merge, in one sentence: what was looked for, and a remedy.

    Raises:
        ToMeConfigError: as `components`.
    """
    name = type(target).__name__
    for component in components(target).values():
        if hasattr(component, "exported_merging"):
            return f"{name} runs exported programs: select one of their ratios by pipe.unet.ratio, or export again"
        if getattr(component, "inference_optimize", False):
            return f"INFERENCE_OPTIMIZE=True has replaced the blocks of {name} by fused ones: load it without"
    return (
        f"nothing merges in {name}: it has no transformer blocks over the pixels of a feature map, as UNets, "
        "ControlNets, DiT, PixArt, SD3, FLUX, CogVideoX, Wan and HunyuanVideo have them"
    )


def denoisers(target: Any) -> dict[str, nn.Layer]:
    """The models of a pipeline, or within a model, that have mergeable blocks, by name: UNets, ControlNets, DiTs.

    Raises:
        ToMeConfigError: as `components`.
    """
    by_name: dict[str, nn.Layer] = {}
    for name, component in layer_components(target).items():
        prefix = None  # paths inside the last denoiser start with it; sublayers come right after their layer
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
    return _is_transformer(layer) and not is_in_a_unet


def find_blocks(denoiser: nn.Layer) -> list[MergeableBlock]:
    """All mergeable blocks of a denoiser, at every level, in the order of its layers."""
    blocks: list[MergeableBlock] = []
    for path, transformer in _transformers(denoiser):
        level = level_of(denoiser, path)
        for name in BLOCK_LISTS:
            for i, block in enumerate(getattr(transformer, name, ())):
                facts = _facts_of(block)
                if facts is None:
                    continue
                mergeable = MergeableBlock(
                    path=f"{path}.{name}.{i}".lstrip("."),
                    index=len(blocks),
                    level=level,
                    transformer=transformer,
                    grid_layer=_grid_layer(transformer, facts),
                    block=block,
                    facts=facts,
                )
                blocks.append(mergeable)
    return blocks


def _transformers(denoiser: nn.Layer) -> Iterator[tuple[str, nn.Layer]]:
    """Path and layer of each transformer over pixels."""
    for path, layer in denoiser.named_sublayers(include_self=True):
        if _is_transformer(layer):
            yield path, layer


def _is_transformer(layer: nn.Layer) -> bool:
    """Whether a layer is a transformer over pixels, and INFERENCE_OPTIMIZE has not fused its blocks."""
    return _is_one_of(layer, _TRANSFORMERS) and not getattr(layer, "inference_optimize", False)


def _is_one_of(layer: Any, classes: frozenset[type | str]) -> bool:
    """Whether a layer is of one of these classes, or of a subclass; a string is the name of a class."""
    return any(cls in classes or cls.__name__ in classes for cls in type(layer).__mro__)


def _facts_of(block: nn.Layer) -> BlockFacts | None:
    """The row of `BLOCKS` for the class of a block, or for a parent class; None if there is none."""
    for cls in type(block).__mro__:
        facts = BLOCKS.get(cls) or BLOCKS.get(cls.__name__)
        if facts is not None:
            return facts
    return None


def _grid_layer(transformer: nn.Layer, facts: BlockFacts) -> nn.Layer:
    """The layer whose input shows the token grid of a transformer.

    It is inside the transformer, so that a library that replaces the whole `forward` of a transformer, as caches of
    ppdiffusers do, still calls it.
    """
    return next(
        attrgetter(path)(transformer)
        for path in facts.grid_layers
        if getattr(transformer, path.partition(".")[0], None) is not None
    )


def token_grid(facts: BlockFacts, grid_layer: nn.Layer, x: paddle.Tensor, before: Grid | None = None) -> Grid:
    """The token grid of a transformer, from the input x of its `grid_layer`.

    Args:
        facts: the facts of the transformer's blocks.
        grid_layer: the layer that shows the grid.
        x: the input of that layer.
        before: the grid of the previous pass. A program of FLUX is traced for it, because its positions are only known
            when it runs; the program checks them then.

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
    if facts.shows_positions:
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
        return Grid(grid.h // grid_layer.patch_size, grid.w // grid_layer.patch_size)
    if isinstance(grid_layer, (nn.Conv2D, nn.Conv3D)):
        return Grid(grid.h // grid_layer._stride[-2], grid.w // grid_layer._stride[-1])
    return grid


def is_controlnet(denoiser: nn.Layer) -> bool:
    """Whether a model is a ControlNet, to which `apply_tome(controlnet=…)` applies."""
    return _is_one_of(denoiser, CONTROLNETS)


def is_countable(denoiser: nn.Layer) -> bool:
    """Whether the MACs of all layers of a model follow from their shapes and places.

    They do not in FLUX's ControlNets that add a token for the kind of their image, or that embed it by convolutions.
    """
    if isinstance(denoiser, (UNet2DConditionModel, ControlNetModel)):
        return True
    has_more = getattr(denoiser, "union", False) or getattr(denoiser, "input_hint_block", None) is not None
    blocks = find_blocks(denoiser)
    return not has_more and bool(blocks) and all(block.facts.text_tokens is not None for block in blocks)


def count_frames(target: Any, frames: int | None) -> int | None:
    """Frames of one sequence of tokens: 1 for images; of a video those given, or of the config; None if unknown."""
    models = list(denoisers(target).values())
    if not any(block.facts.has_frames for model in models for block in find_blocks(model)):
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
    transformer = vars(pipe).get("transformer")
    if isinstance(transformer, nn.Layer) and any(block.facts.packs_latents for block in find_blocks(transformer)):
        return 16
    return getattr(pipe, "vae_scale_factor", getattr(pipe, "vae_scale_factor_spatial", 8))


def text_tokens(target: Any) -> int:
    """Number of text tokens: those of the first block that knows them, or the tokenizer's maximum, or 77."""
    for denoiser in denoisers(target).values():
        for block in find_blocks(denoiser):
            if block.facts.text_tokens is not None:
                return block.facts.text_tokens
    tokenizer = getattr(target, "tokenizer", None) or getattr(target, "tokenizer_2", None)  # SDXL's refiner has one
    length = getattr(tokenizer, "model_max_length", 77)
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
