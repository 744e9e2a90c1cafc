"""The models of a pipeline: which denoise, where their blocks are, and what a pipeline passes to them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import paddle
from paddle import nn
from paddle.jit.dy2static.program_translator import ASTStaticFunction
from ppdiffusers import DiffusionPipeline
from ppdiffusers.models.embeddings import GaussianFourierProjection

from ..errors import ToMeConfigError
from ..grid import Grid
from .grids import grid_of_latents, level_of
from .table import FAMILIES, INSIDE_UNET, WITHOUT_PIXELS, Block, Family


@dataclass(frozen=True)
class MergeableBlock:
    """A transformer block whose tokens are the pixels, or patches, of a feature map."""

    path: str  # in its denoiser, e.g. "down_blocks.0.attentions.0.transformer_blocks.0"
    index: int  # position among all such blocks of its denoiser, whatever their level
    level: int  # downsample factor of the feature map: tokens per side = latent pixels per side / level
    transformer: nn.Layer  # the transformer around the block: of a UNet one of many, otherwise the denoiser itself
    grid_layer: nn.Layer  # its first layer, whose input shows the token grid whatever calls it
    block: nn.Layer  # the transformer block itself
    timestep_layer: nn.Layer | None  # a layer of the denoiser whose first argument is the timestep
    family: Family  # of the transformer
    facts: Block  # of the class of the block
    is_in_unet: bool  # whether its denoiser is a UNet, or the ControlNet of one

    @property
    def sees_timestep(self) -> bool:
        """Whether the timestep of a pass can be read, from a layer of the denoiser or from the block's arguments."""
        return self.timestep_layer is not None or gets_timestep(self.block, self.facts)

    @property
    def merges_queries(self) -> bool:
        """Whether layers can run on merged tokens, as in tomesd: in `BasicTransformerBlock`s of UNets."""
        return self.is_in_unet and self.facts.follows_tomesd

    @property
    def sublayers(self) -> dict[str, tuple[nn.Layer, ...]]:
        """The layers around which tokens can merge, under the names of the `merge_…` settings."""
        facts = self.facts
        paths_by_setting = {"attn": facts.attn, "crossattn": facts.crossattn, "mlp": facts.mlp}
        if getattr(self.block, facts.only_crossattn, False):
            # In Stable Diffusion's upscaler the first attention is to text too.
            paths_by_setting |= {"attn": (), "crossattn": facts.attn + facts.crossattn}
        layers_by_setting = {}
        for setting, paths in paths_by_setting.items():
            layers = tuple(layer for path in paths if (layer := getattr(self.block, path, None)) is not None)
            if layers:
                layers_by_setting[setting] = layers
        return layers_by_setting

    @property
    def is_chunked(self) -> bool:
        """Whether the block calls its feed-forward layer in chunks, see `enable_forward_chunking`."""
        return is_chunked(self.block, self.facts)

    def grid(self, latent: Grid) -> Grid:
        """The token grid of the block for a grid of latents."""
        return grid_of_latents(self.grid_layer, self.level, latent)


def gets_timestep(block: nn.Layer, facts: Block) -> bool:
    """Whether a block gets the timestep itself, which its norm embeds, as in DiT and VQ-Diffusion."""
    norms = (getattr(block, name, False) for name in ("use_ada_layer_norm", "use_ada_layer_norm_zero"))
    return facts.timestep is not None and any(norms)


def is_chunked(block: nn.Layer, facts: Block) -> bool:
    """Whether a block calls its feed-forward layer in chunks, see `enable_forward_chunking`."""
    return getattr(block, facts.chunk_size, None) is not None


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


def why_nothing_merges(target: Any) -> str:
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
        f"nothing merges in {name}: it has no transformer blocks over the pixels of a feature map, as these models "
        f"have: {', '.join(family.name for family in FAMILIES)}"
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
    """Whether a layer is a UNet with transformers over pixels, or a transformer that is not part of a UNet."""
    if _is_one_of(layer, WITHOUT_PIXELS):
        return False
    if hasattr(layer, "down_blocks"):
        return next(_transformers(layer), None) is not None
    is_inside_unet = isinstance(layer, INSIDE_UNET) or getattr(layer, "is_input_continuous", False)
    return _family_of(layer) is not None and not is_inside_unet


def find_blocks(denoiser: nn.Layer) -> list[MergeableBlock]:
    """All mergeable blocks of a denoiser, at every level, in the order of its layers."""
    blocks: list[MergeableBlock] = []
    for path, transformer, family in _transformers(denoiser):
        level = level_of(denoiser, path)
        for name, block in _members(transformer, family):
            facts = _facts_of(block, family)
            if facts is None:
                continue
            mergeable = MergeableBlock(
                path=f"{path}.{name}".lstrip("."),
                index=len(blocks),
                level=level,
                transformer=transformer,
                grid_layer=_grid_layer(transformer, family),
                timestep_layer=_timestep_layer(denoiser, family),
                block=block,
                family=family,
                facts=facts,
                is_in_unet=hasattr(denoiser, "down_blocks"),
            )
            blocks.append(mergeable)
    return blocks


def _members(transformer: nn.Layer, family: Family) -> Iterator[tuple[str, nn.Layer]]:
    """The layers that a transformer has under the names in `block_lists`: those of lists, and single ones."""
    for name in family.block_lists:
        layers = getattr(transformer, name, None)
        if isinstance(layers, (nn.LayerList, nn.Sequential)):
            yield from ((f"{name}.{i}", layer) for i, layer in enumerate(layers))
        elif isinstance(layers, nn.Layer):
            yield name, layers


def _transformers(denoiser: nn.Layer) -> Iterator[tuple[str, nn.Layer, Family]]:
    """Path, layer and family of each transformer over pixels."""
    for path, layer in denoiser.named_sublayers(include_self=True):
        if (family := _family_of(layer)) is not None:
            yield path, layer, family


def _family_of(layer: nn.Layer) -> Family | None:
    """The family of a transformer over pixels; None for other layers, and if INFERENCE_OPTIMIZE fused its blocks."""
    if getattr(layer, "inference_optimize", False):
        return None
    return next((family for family in FAMILIES if _is_one_of(layer, family.transformers)), None)


def _is_one_of(layer: Any, classes: Collection[type | str]) -> bool:
    """Whether a layer is of one of these classes, or of a subclass; a string is the name of a class."""
    return any(cls in classes or cls.__name__ in classes for cls in type(layer).__mro__)


def _facts_of(block: nn.Layer, family: Family) -> Block | None:
    """The family's facts for the class of a block, or for a parent class; None if there are none."""
    for cls in type(block).__mro__:
        facts = family.blocks.get(cls) or family.blocks.get(cls.__name__)
        if facts is not None:
            return facts
    return None


def _timestep_layer(denoiser: nn.Layer, family: Family) -> nn.Layer | None:
    """The layer of a denoiser whose first argument is the timestep; None if there is none.

    It is inside the denoiser for the reason that `_grid_layer` has. A layer that embeds class labels too, or embeds
    the logarithm of a noise level, does not show the timestep.
    """
    layers = (getattr(denoiser, name, None) for name in family.timestep_inputs)
    layer = next((layer for layer in layers if layer is not None), None)
    embeds_labels = getattr(getattr(denoiser, "config", None), "class_embed_type", None) == "timestep"
    return None if embeds_labels or isinstance(layer, GaussianFourierProjection) else layer


def _grid_layer(transformer: nn.Layer, family: Family) -> nn.Layer:
    """The layer whose input shows the token grid of a transformer.

    It is inside the transformer, so that a library that replaces the whole `forward` of a transformer, as caches of
    ppdiffusers do, still calls it.
    """
    for path in family.grid_layers:
        if getattr(transformer, path.partition(".")[0], None) is not None:
            layer: nn.Layer = attrgetter(path)(transformer)
            return layer
    raise ToMeConfigError(
        f"{type(transformer).__name__} has none of the layers whose input shows its token grid: "
        f"{', '.join(family.grid_layers)}. Name one in grid_layers of the entry {family.name!r} in families.table."
    )


def is_controlnet(denoiser: nn.Layer) -> bool:
    """Whether a model is a ControlNet, to which `apply_tome(controlnet=…)` applies."""
    return any(_is_one_of(denoiser, family.controlnets) for family in FAMILIES)


def is_countable(denoiser: nn.Layer) -> bool:
    """Whether the MACs of all layers of a model follow from their shapes and places."""
    families = {id(block.family): block.family for block in find_blocks(denoiser)}.values()
    has_more = any(getattr(denoiser, name, None) not in (None, False) for f in families for name in f.uncounted)
    is_counted = all(f.text_tokens is not None or _is_one_of(denoiser, f.counted) for f in families)
    return bool(families) and is_counted and not has_more


def count_frames(target: Any, frames: int | None) -> int | None:
    """Frames of one sequence of tokens: 1 for images; of a video those given, or of the config; None if unknown."""
    models = list(denoisers(target).values())
    if not any(block.family.has_frames for model in models for block in find_blocks(model)):
        return 1
    configs = [getattr(model, "config", {}) for model in models]
    known = [(c["sample_frames"] - 1) // c["temporal_compression_ratio"] + 1 for c in configs if "sample_frames" in c]
    return frames or next(iter(known), None)


def vae_factor(pipe: DiffusionPipeline) -> int:
    """Image pixels per latent pixel, along each side; 8 in Stable Diffusion, 16 in FLUX, which packs 2×2 of them."""
    transformer = vars(pipe).get("transformer")
    if isinstance(transformer, nn.Layer) and any(block.family.packs_latents for block in find_blocks(transformer)):
        return 16
    return getattr(pipe, "vae_scale_factor", getattr(pipe, "vae_scale_factor_spatial", 8))


def text_tokens(target: Any) -> int:
    """Number of text tokens: those of the first block that knows them, or the tokenizer's maximum, or 77."""
    for denoiser in denoisers(target).values():
        for block in find_blocks(denoiser):
            if block.family.text_tokens is not None:
                return block.family.text_tokens
    tokenizer = getattr(target, "tokenizer", None) or getattr(target, "tokenizer_2", None)  # SDXL's refiner has one
    length = getattr(tokenizer, "model_max_length", 77)
    return length if 0 < length < 10_000 else 77  # tokenizers without a maximum report 1e30


def check_not_compiled(name: str, denoiser: nn.Layer) -> None:
    """Raise ToMeConfigError if a denoiser runs a program, in which merging cannot change.

    Args:
        name: of the denoiser in its pipeline.
        denoiser: the model.
    """
    paths = [f"{block.path}." for block in find_blocks(denoiser)]
    for path, layer in denoiser.named_sublayers(include_self=True):
        by = _compiled_by(layer)
        if by is not None and any(block.startswith(path and f"{path}.") for block in paths):
            where = f"{name}.{path}" if path else name
            raise ToMeConfigError(
                f"{where} runs a program that {by} has made, in which merging cannot change: undo that by "
                f"`del {where}.forward`, or load the model again. Then merge first, and make the program afterwards."
            )


def _compiled_by(layer: nn.Layer) -> str | None:
    """What has replaced the `forward` of a layer by a program; None if nothing has."""
    forward = layer.__dict__.get("forward")
    if getattr(forward, "__name__", None) == "innermost_decorator":  # as Paddle's `is_inference_mode`
        return "paddle.incubate.jit.inference()"
    if isinstance(forward, ASTStaticFunction) and len(forward.program_cache):
        return "paddle.jit.to_static()"
    return None


def remove_builtin(model: nn.Layer) -> None:
    """Remove the merging that ppdiffusers ships from a model: its classes, hooks and `_tome_info`."""
    for layer in model.sublayers(include_self=True):
        parent = getattr(type(layer), "_parent", None)
        if parent is not None and type(layer).__name__.startswith("ToMe"):
            layer.__class__ = parent
        info = layer.__dict__.pop("_tome_info", None)
        for hook in info["hooks"] if info else ():
            hook.remove()
