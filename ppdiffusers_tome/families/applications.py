"""How often a pass applies the weights of each layer of a denoiser: what is known of its parts, for counting MACs."""

from collections.abc import Iterator, Sequence

from paddle import nn

from ..grid import Grid
from .blocks import MergeableBlock, is_one_of
from .grids import grid_at, level_of
from .stream import Text


def is_countable(denoiser: nn.Layer, blocks: Sequence[MergeableBlock]) -> bool:
    """Whether the MACs of all layers of a model with these blocks follow from their shapes and places."""
    families = {id(block.family): block.family for block in blocks}.values()
    has_more = any(getattr(denoiser, name, None) not in (None, False) for f in families for name in f.uncounted)
    is_counted = all(f.text_tokens is not None or is_one_of(denoiser, f.counted) for f in families)
    return bool(families) and is_counted and not has_more


def applications_of_layers(
    denoiser: nn.Layer, blocks: Sequence[MergeableBlock], latent: Grid, text: int, frames: int
) -> Iterator[tuple[nn.Layer, int]]:
    """The linear layers and convolutions of a denoiser outside layers that can merge, and how often each is applied.

    Args:
        denoiser: the model; `is_countable` must be true for it.
        blocks: all of its mergeable blocks.
        latent: height and width of its latents.
        text: text tokens that attention sees.
        frames: latent frames of a video.
    """
    if hasattr(denoiser, "down_blocks"):
        yield from _applications_of_unet(denoiser, latent)
        return
    yield from _applications_of_transformer(denoiser, frames * blocks[0].grid(latent).tokens, text, blocks)


def _applications_of_unet(unet: nn.Layer, latent: Grid) -> Iterator[tuple[nn.Layer, int]]:
    pixels = latent.tokens  # after the last convolution that embeds a ControlNet's image; more after those before it
    for conv in reversed(list(getattr(unet, "controlnet_cond_embedding", nn.Layer()).sublayers())):
        if isinstance(conv, nn.Conv2D):
            yield conv, pixels
            pixels *= conv._stride[0] * conv._stride[1]
    for path, layer in unet.named_sublayers():
        if ".transformer_blocks." in path or path.startswith("controlnet_cond_embedding."):
            continue
        if isinstance(layer, nn.Conv2D):
            grid, (stride_h, stride_w) = grid_at(latent, level_of(unet, path)), layer._stride
            yield layer, -(-grid.h // stride_h) * -(-grid.w // stride_w)  # all have "same" padding
        elif isinstance(layer, nn.Linear):  # a Transformer2DModel's projection, or part of the time embedding
            yield layer, grid_at(latent, level_of(unet, path)).tokens if ".attentions." in path else 1


def _applications_of_transformer(
    transformer: nn.Layer, tokens: int, text: int, blocks: Sequence[MergeableBlock]
) -> Iterator[tuple[nn.Layer, int]]:
    family = blocks[0].family
    spec_by_prefix = {f"{block.path}.": block.spec for block in blocks}
    text_layers = {*family.text_layers, *(name for block in blocks for name in block.spec.text_layers)}
    for path, layer in transformer.named_sublayers():
        if not isinstance(layer, (nn.Linear, nn.Conv2D, nn.Conv3D)):
            continue
        prefix = next((prefix for prefix in spec_by_prefix if path.startswith(prefix)), "")
        names = path.removeprefix(prefix).split(".")
        if prefix and names[0] in spec_by_prefix[prefix].merging_layers:
            continue
        if any(name.startswith(family.timestep_layers) for name in names):
            times = 1  # embeddings of the timestep, and norms that it modulates
        elif not text_layers.isdisjoint(names):
            times = text
        elif not set(family.image_layers).isdisjoint(names):
            times = family.image_tokens
        elif prefix:
            times = tokens + text  # the MLP of a single-stream block, and its last projection
        else:
            times = tokens
        yield layer, times


def attentions_of_text(denoiser: nn.Layer, blocks: Sequence[MergeableBlock]) -> Iterator[nn.Linear]:
    """The projections of queries of attention over the text alone, outside of all blocks, as in HunyuanVideo."""
    if hasattr(denoiser, "down_blocks"):
        return
    prefixes = tuple(f"{block.path}." for block in blocks)
    for path, layer in denoiser.named_sublayers():
        if path.endswith(f".{blocks[0].family.attention.image.q}") and not path.startswith(prefixes):
            yield layer


def applications_of_attention(
    block: MergeableBlock, name: str, layer: nn.Layer, queries: int, keys: int, text: int
) -> Iterator[tuple[nn.Layer, int]]:
    """The linear layers in an attention or feed-forward layer of a block, and how often each is applied.

    Args:
        block: the block.
        name: "attn", "crossattn" or "mlp".
        layer: a layer of the block, of that name.
        queries, keys: image tokens of queries, and of keys and values.
        text: text tokens, which are added where they pass through the same layers.
    """
    names, text_in_sequence = block.family.attention, _text_in_sequence(block, text)
    image = image_keys(block, name, layer)
    second_stream = (names.text.q, names.text.k, names.text.v, names.text.out)
    for path, part in layer.named_sublayers():
        if isinstance(part, nn.Linear):
            first = path.split(".")[0]
            times = (keys if first in (names.image.k, names.image.v) else queries) + text_in_sequence
            yield part, (image or text) if first in second_stream else times


def attention_width(block: MergeableBlock, layer: nn.Layer) -> tuple[int, int]:
    """Channels of the tokens that an attention gets, and of all of its heads."""
    query = getattr(layer, block.family.attention.image.q)  # an adapter may be around the projection
    projection = next(part for part in query.sublayers(include_self=True) if isinstance(part, nn.Linear))
    channels, width = projection.weight.shape
    return channels, width


def text_keys(block: MergeableBlock, layer: nn.Layer, text: int) -> int:
    """Text tokens that attend together with the image in a self-attention."""
    has_own = getattr(layer, block.family.attention.text.q, None) is not None
    return text if has_own else _text_in_sequence(block, text)


def image_keys(block: MergeableBlock, name: str, layer: nn.Layer) -> int:
    """Tokens of an image to which a cross-attention also attends, as in Wan with an image."""
    attends = name == "crossattn" and getattr(layer, block.family.attention.text.k, None) is not None
    return block.family.image_tokens if attends else 0


def _text_in_sequence(block: MergeableBlock, text: int) -> int:
    """Text tokens that pass through the same layers as the image."""
    return text if block.spec.text not in (None, Text.OWN_PROJECTIONS) else 0
