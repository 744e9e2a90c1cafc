"""Count the multiply-accumulates (MACs) of one denoiser pass from layer shapes alone, without running it.

Counted are convolutions, linear layers, the two products of each attention, and the score product of each matching.
Norms, activations and additions are not.
"""

from paddle import nn

from .config import ToMeConfig
from .levels import grid_at, level_of
from .models import MergeableBlock, find_blocks
from .patch import merging_layers
from .positions import Grid, count_pairs, count_removed


def count_macs(denoiser: nn.Layer, latent: Grid, text: int) -> int:
    """MACs of one pass of a UNet2DConditionModel or ControlNetModel without merging, for one image.

    Args:
        denoiser: the model; `models.is_countable` must hold of it.
        latent: height and width of its latents.
        text: text tokens that cross-attention sees.
    """
    total = 0
    for found in find_blocks(denoiser):
        tokens = grid_at(latent, found.level).tokens
        total += sum(_layer_macs(found, name, tokens, text) for name in found.sublayers)
    shrink = _shrink(denoiser)
    image = Grid(latent.h * shrink, latent.w * shrink)  # what a ControlNet's condition embedding starts from
    for path, layer in denoiser.named_sublayers():
        if ".transformer_blocks." in path:
            continue
        if path.startswith("controlnet_cond_embedding.") and isinstance(layer, nn.Conv2D):
            image = _output_grid(layer, image)
            total += image.tokens * _weights(layer)
        elif isinstance(layer, nn.Conv2D):
            total += _output_grid(layer, grid_at(latent, level_of(denoiser, path))).tokens * _weights(layer)
        elif isinstance(layer, nn.Linear):  # a Transformer2DModel's projection, or part of the time embedding
            rows = grid_at(latent, level_of(denoiser, path)).tokens if ".attentions." in path else 1
            total += rows * _weights(layer)
    return total


def saved_macs(found: MergeableBlock, config: ToMeConfig, latent: Grid, text: int) -> int:
    """MACs that merging saves in one block for one image; below 0 where the matching costs more than it saves.

    Args:
        found: the block.
        config: the settings it merges by.
        latent: height and width of its denoiser's latents.
        text: text tokens that cross-attention sees.
    """
    grid = grid_at(latent, found.level)
    tokens, kept = grid.tokens, grid.tokens - count_removed(grid, config)
    if kept == tokens:
        return 0
    matching = count_pairs(grid, config) * found.block.attn1.to_q.weight.shape[0]
    names = merging_layers(found, config)
    return sum(_layer_macs(found, n, tokens, text) - _layer_macs(found, n, kept, text) for n in names) - matching


def _layer_macs(found: MergeableBlock, name: str, tokens: int, text: int) -> int:
    """MACs of a block's "attn", "crossattn" or "mlp" on so many tokens."""
    context = text if name == "crossattn" else tokens
    total = 0
    for layer in found.sublayers[name]:
        for path, part in layer.named_sublayers():
            if isinstance(part, nn.Linear):
                total += _weights(part) * (context if path.split(".")[0] in ("to_k", "to_v") else tokens)
        if name != "mlp":
            total += 2 * tokens * context * layer.to_q.weight.shape[1]
    return total


def _weights(layer: nn.Layer) -> int:
    return layer.weight.size


def _output_grid(conv: nn.Conv2D, grid: Grid) -> Grid:
    """The output grid of a convolution whose padding keeps a stride-1 size, as all in these models do."""
    stride_h, stride_w = conv._stride
    return Grid(-(-grid.h // stride_h), -(-grid.w // stride_w))


def _shrink(denoiser: nn.Layer) -> int:
    """Image pixels per latent pixel in a ControlNet's condition embedding; 1 in a model that has none."""
    factor = 1
    for path, layer in denoiser.named_sublayers():
        if path.startswith("controlnet_cond_embedding.") and isinstance(layer, nn.Conv2D):
            factor *= layer._stride[0]
    return factor
