"""Count the multiply-accumulates (MACs) of one denoiser pass from the layers' shapes, without running it.

Convolutions, linear layers, the two products of each attention, and the score product of each matching count. Norms,
activations and additions do not.
"""

from collections.abc import Sequence

from paddle import nn

from .attach.placement import Placement
from .families.applications import (
    applications_of_attention,
    applications_of_layers,
    attention_width,
    attentions_of_text,
    image_keys,
    text_keys,
)
from .families.blocks import MergeableBlock, find_blocks
from .grid import Grid


def count_macs(
    denoiser: nn.Layer, latent: Grid, text: int, frames: int = 1, blocks: Sequence[MergeableBlock] | None = None
) -> int:
    """MACs of one pass of a model without merging, for one image or video.

    Args:
        denoiser: the model; `applications.is_countable` must be true for it.
        latent: height and width of its latents.
        text: text tokens that attention sees.
        frames: latent frames of a video.
        blocks: all mergeable blocks of the model, if they are known.
    """
    blocks = find_blocks(denoiser) if blocks is None else blocks
    total = 0
    for block in blocks:
        tokens = frames * block.grid(latent).tokens
        for name in block.sublayers:
            total += _layer_macs(block, name, tokens, _keys(name, tokens, text), text)
    outside = applications_of_layers(denoiser, blocks, latent, text, frames)
    total += sum(times * _weights(layer) for layer, times in outside)
    return total + sum(2 * text * text * layer.weight.shape[1] for layer in attentions_of_text(denoiser, blocks))


def saved_macs(block: MergeableBlock, placement: Placement, latent: Grid, text: int, frames: int = 1) -> int:
    """MACs that merging saves in one block for one image; negative if the matching costs more than it saves.

    Args:
        block: the block.
        placement: what merges in it.
        latent, text, frames: as for `count_macs`.
    """
    grid = block.grid(latent)
    if placement.count_kept(grid) == grid.tokens:
        return 0
    tokens, kept = frames * grid.tokens, frames * placement.count_kept(grid)
    queries = kept if placement.config.merges_queries else tokens
    saved = 0
    for name in placement.layers:
        saved += _layer_macs(block, name, tokens, _keys(name, tokens, text), text)
        saved -= _layer_macs(block, name, queries, _keys(name, kept, text), text)
    return saved - frames * matching_macs(block, placement, grid)


def matching_macs(block: MergeableBlock, placement: Placement, grid: Grid) -> int:
    """MACs of the matching in one block for one image or frame; 0 if no tokens are compared."""
    pairs = placement.config.pairs_compared(grid)
    if pairs == 0:
        return 0
    attentions = block.sublayers.get("attn") or block.sublayers["crossattn"]
    return pairs * attention_width(block, attentions[0])[0]


def _keys(name: str, tokens: int, text: int) -> int:
    return text if name == "crossattn" else tokens


def _layer_macs(block: MergeableBlock, name: str, queries: int, keys: int, text: int) -> int:
    """MACs of a block's "attn", "crossattn" or "mlp" for the given numbers of query and key tokens of the image."""
    total = 0
    for layer in block.sublayers[name]:
        of_parts = applications_of_attention(block, name, layer, queries, keys, text)
        total += sum(times * _weights(part) for part, times in of_parts)
        if name != "mlp":
            more, image = text_keys(block, layer, text), image_keys(block, name, layer)
            total += 2 * ((queries + more) * (keys + more) + queries * image) * attention_width(block, layer)[1]
    return total


def _weights(layer: nn.Layer) -> int:
    return layer.weight.size
