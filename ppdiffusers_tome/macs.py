"""Count the multiply-accumulates (MACs) of one denoiser pass from the layers' shapes, without running it.

Convolutions, linear layers, the two products of each attention, and the score product of each matching count. Norms,
activations and additions do not, nor does the addition of sizes to the scores (`proportional`).
"""

from paddle import nn

from .config import GRID, KV, ToMeConfig
from .levels import grid_at, level_of
from .models import MergeableBlock, find_blocks
from .patch import merging_layers
from .positions import Grid, count_pairs, count_removed


def count_macs(denoiser: nn.Layer, latent: Grid, text: int) -> int:
    """MACs of one pass of a UNet2DConditionModel or ControlNetModel without merging, for one image.

    Args:
        denoiser: the model; `models.is_countable` must be true for it.
        latent: height and width of its latents.
        text: text tokens that cross-attention sees.
    """
    total = 0
    for block in find_blocks(denoiser):
        tokens = grid_at(latent, block.level).tokens
        total += sum(_layer_macs(block, name, tokens, _keys(name, tokens, text)) for name in block.sublayers)
    factor = _condition_factor(denoiser)
    image = Grid(latent.h * factor, latent.w * factor)  # the input of a ControlNet's condition embedding
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


def saved_macs(block: MergeableBlock, config: ToMeConfig, latent: Grid, text: int) -> int:
    """MACs that merging saves in one block for one image; negative if the matching costs more than it saves.

    Args:
        block: the block.
        config: its merge settings.
        latent: height and width of its denoiser's latents.
        text: text tokens that cross-attention sees.
    """
    grid = grid_at(latent, block.level)
    tokens, kept = grid.tokens, grid.tokens - count_removed(grid, config)
    if kept == tokens:
        return 0
    saved = 0
    for name in merging_layers(block, config):
        queries = tokens if name == "attn" and config.merge_attn == KV else kept
        saved += _layer_macs(block, name, tokens, _keys(name, tokens, text))
        saved -= _layer_macs(block, name, queries, _keys(name, kept, text))
    return saved - matching_macs(block, config, latent)


def matching_macs(block: MergeableBlock, config: ToMeConfig, latent: Grid) -> int:
    """MACs of the matching in one block for one image; 0 if no tokens are compared. Arguments as for `saved_macs`."""
    grid = grid_at(latent, block.level)
    if config.match == GRID or not count_removed(grid, config):
        return 0
    return count_pairs(grid, config) * block.block.attn1.out_dim


def _keys(name: str, tokens: int, text: int) -> int:
    return text if name == "crossattn" else tokens


def _layer_macs(block: MergeableBlock, name: str, queries: int, keys: int) -> int:
    """MACs of a block's "attn", "crossattn" or "mlp" with so many tokens as queries, and as keys and values."""
    total = 0
    for layer in block.sublayers[name]:
        for path, part in layer.named_sublayers():
            if isinstance(part, nn.Linear):
                total += _weights(part) * (keys if path.split(".")[0] in ("to_k", "to_v") else queries)
        if name != "mlp":
            total += 2 * queries * keys * layer.inner_dim
    return total


def _weights(layer: nn.Layer) -> int:
    return layer.weight.size


def _output_grid(conv: nn.Conv2D, grid: Grid) -> Grid:
    """The output grid of a convolution with "same" padding, as all convolutions in these models have."""
    stride_h, stride_w = conv._stride
    return Grid(-(-grid.h // stride_h), -(-grid.w // stride_w))


def _condition_factor(denoiser: nn.Layer) -> int:
    """Image pixels per latent pixel in a ControlNet's condition embedding; 1 for a model without one."""
    factor = 1
    for path, layer in denoiser.named_sublayers():
        if path.startswith("controlnet_cond_embedding.") and isinstance(layer, nn.Conv2D):
            factor *= layer._stride[0]
    return factor
