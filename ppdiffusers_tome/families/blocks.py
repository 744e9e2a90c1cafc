"""The blocks of a model that can merge: where they are, and what the table of families says of each."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from paddle import nn
from ppdiffusers.models.embeddings import GaussianFourierProjection

from ..errors import ToMeConfigError
from ..grid import Grid
from .grids import grid_of_latents, level_of
from .table import FAMILIES, INSIDE_UNET, WITHOUT_PIXELS, BlockSpec, Family


@dataclass(frozen=True)
class MergeableBlock:
    """A transformer block whose tokens are the pixels, or patches, of a feature map."""

    path: str  # in its denoiser, e.g. "down_blocks.0.attentions.0.transformer_blocks.0"
    index: int  # position among all such blocks of its denoiser, whatever their level
    level: int  # downsample factor of the feature map: tokens per side = latent pixels per side / level
    transformer: nn.Layer  # the transformer around the block: in a UNet one of several, otherwise the denoiser itself
    grid_layer: nn.Layer  # its first layer, whose input shows the token grid whatever calls it
    layer: nn.Layer  # the transformer block itself
    timestep_layer: nn.Layer | None  # a layer of the denoiser whose first argument is the timestep
    family: Family  # of the transformer
    spec: BlockSpec  # describes the class of the block
    is_in_unet: bool  # whether its denoiser is a UNet, or the ControlNet of a UNet

    @property
    def sees_timestep(self) -> bool:
        """Whether the timestep of a pass can be read, from a layer of the denoiser or from the block's arguments."""
        return self.timestep_layer is not None or gets_timestep(self.layer, self.spec)

    @property
    def merges_queries(self) -> bool:
        """Whether layers can run on merged tokens, as in tomesd: in `BasicTransformerBlock`s of UNets."""
        return self.is_in_unet and self.spec.follows_tomesd

    @property
    def sublayers(self) -> dict[str, tuple[nn.Layer, ...]]:
        """The layers around which tokens can merge, under the names of the `merge_…` settings."""
        spec = self.spec
        paths_by_setting = {"attn": spec.attn, "crossattn": spec.crossattn, "mlp": spec.mlp}
        if getattr(self.layer, spec.only_crossattn, False):
            # In Stable Diffusion's upscaler the first attention is to text too.
            paths_by_setting |= {"attn": (), "crossattn": spec.attn + spec.crossattn}
        layers_by_setting = {}
        for setting, paths in paths_by_setting.items():
            layers = tuple(layer for path in paths if (layer := getattr(self.layer, path, None)) is not None)
            if layers:
                layers_by_setting[setting] = layers
        return layers_by_setting

    @property
    def is_chunked(self) -> bool:
        """Whether the block calls its feed-forward layer in chunks, see `enable_forward_chunking`."""
        return is_chunked(self.layer, self.spec)

    def grid(self, latent: Grid) -> Grid:
        """The token grid of the block for a grid of latents."""
        return grid_of_latents(self.grid_layer, self.level, latent)


def gets_timestep(layer: nn.Layer, spec: BlockSpec) -> bool:
    """Whether a block gets the timestep itself, which its norm embeds, as in DiT and VQ-Diffusion."""
    norms = (getattr(layer, name, False) for name in ("use_ada_layer_norm", "use_ada_layer_norm_zero"))
    return spec.timestep is not None and any(norms)


def is_chunked(layer: nn.Layer, spec: BlockSpec) -> bool:
    """Whether a block calls its feed-forward layer in chunks, see `enable_forward_chunking`."""
    return getattr(layer, spec.chunk_size, None) is not None


def find_blocks(denoiser: nn.Layer) -> list[MergeableBlock]:
    """All mergeable blocks of a denoiser, at every level, in the order of its layers."""
    blocks: list[MergeableBlock] = []
    for path, transformer, family in _transformers(denoiser):
        level = level_of(denoiser, path)
        for name, layer in _members(transformer, family):
            spec = _spec_of(layer, family)
            if spec is None:
                continue
            mergeable = MergeableBlock(
                path=f"{path}.{name}".lstrip("."),
                index=len(blocks),
                level=level,
                transformer=transformer,
                grid_layer=_grid_layer(transformer, family),
                timestep_layer=_timestep_layer(denoiser, family),
                layer=layer,
                family=family,
                spec=spec,
                is_in_unet=hasattr(denoiser, "down_blocks"),
            )
            blocks.append(mergeable)
    return blocks


def is_denoiser(layer: nn.Layer) -> bool:
    """Whether a layer is a UNet with transformers over pixels, or a transformer that is not part of a UNet."""
    if is_one_of(layer, WITHOUT_PIXELS):
        return False
    if hasattr(layer, "down_blocks"):
        return next(_transformers(layer), None) is not None
    is_inside_unet = isinstance(layer, INSIDE_UNET) or getattr(layer, "is_input_continuous", False)
    return _family_of(layer) is not None and not is_inside_unet


def is_controlnet(denoiser: nn.Layer) -> bool:
    """Whether a model is a ControlNet, to which `apply_tome(controlnet=…)` applies."""
    return any(is_one_of(denoiser, family.controlnets) for family in FAMILIES)


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
    return next((family for family in FAMILIES if is_one_of(layer, family.transformers)), None)


def is_one_of(layer: Any, classes: Collection[type | str]) -> bool:
    """Whether a layer is of one of these classes, or of a subclass; a string is the name of a class."""
    return any(cls in classes or cls.__name__ in classes for cls in type(layer).__mro__)


def _spec_of(layer: nn.Layer, family: Family) -> BlockSpec | None:
    """The family's description of the class of a layer, or of a parent class; None if the layer is no block."""
    for cls in type(layer).__mro__:
        spec = family.blocks.get(cls) or family.blocks.get(cls.__name__)
        if spec is not None:
            return spec
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
