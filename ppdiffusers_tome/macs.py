"""Count the multiply-accumulates (MACs) of one denoiser pass from the layers' shapes, without running it.

Convolutions, linear layers, the two products of each attention, and the score product of each matching count. Norms,
activations and additions do not, nor does the addition of sizes to the scores (`proportional`).
"""

from paddle import nn

from .config import GRID, KV, ToMeConfig
from .levels import grid_at, level_of
from .models import MergeableBlock, block_grid, find_blocks
from .patch import merges_whole, merging_layers
from .positions import Grid, count_pairs, count_removed, tokens_kept

# Projections of the second stream: of the text in joint attention, of the conditioning image in Wan's image-to-video.
ADDED_PROJECTIONS = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def count_macs(denoiser: nn.Layer, latent: Grid, text: int, frames: int = 1) -> int:
    """MACs of one pass of a model without merging, for one image or video.

    Args:
        denoiser: the model; `models.is_countable` must be true for it.
        latent: height and width of its latents.
        text: text tokens that attention sees.
        frames: latent frames of a video.
    """
    total, blocks = 0, find_blocks(denoiser)
    for block in blocks:
        tokens = frames * block_grid(block, latent).tokens
        for name in block.sublayers:
            total += _layer_macs(block, name, tokens, _keys(name, tokens, text), text)
    if not hasattr(denoiser, "down_blocks"):
        return total + _other_macs(denoiser, frames * block_grid(blocks[0], latent).tokens, text, blocks)
    pixels = latent.tokens  # after the last convolution that embeds a ControlNet's image; more after those before it
    for conv in reversed(list(getattr(denoiser, "controlnet_cond_embedding", nn.Layer()).sublayers())):
        if isinstance(conv, nn.Conv2D):
            total += pixels * _weights(conv)
            pixels *= conv._stride[0] * conv._stride[1]
    for path, layer in denoiser.named_sublayers():
        if ".transformer_blocks." in path or path.startswith("controlnet_cond_embedding."):
            continue
        if isinstance(layer, nn.Conv2D):
            grid, (stride_h, stride_w) = grid_at(latent, level_of(denoiser, path)), layer._stride
            total += -(-grid.h // stride_h) * -(-grid.w // stride_w) * _weights(layer)  # all have "same" padding
        elif isinstance(layer, nn.Linear):  # a Transformer2DModel's projection, or part of the time embedding
            rows = grid_at(latent, level_of(denoiser, path)).tokens if ".attentions." in path else 1
            total += rows * _weights(layer)
    return total


def _other_macs(transformer: nn.Layer, tokens: int, text: int, blocks: list[MergeableBlock]) -> int:
    """MACs of everything in a transformer without a UNet except the layers of its blocks that can merge.

    Args:
        transformer: the model.
        tokens, text: image and text tokens.
        blocks: its blocks.
    """
    facts_by_prefix = {f"{block.path}.": block.facts for block in blocks}
    text_layers = {name for block in blocks for name in block.facts.text_layers}
    image_layers = {name: block.facts.image_tokens for block in blocks for name in block.facts.image_layers}
    total = 0
    for path, layer in transformer.named_sublayers():
        if not isinstance(layer, (nn.Linear, nn.Conv2D, nn.Conv3D)):
            continue
        prefix = next((prefix for prefix in facts_by_prefix if path.startswith(prefix)), "")
        names = path.removeprefix(prefix).split(".")
        if prefix and names[0] in facts_by_prefix[prefix].merging_layers:
            continue
        if any(name.startswith(("time", "norm")) for name in names):
            rows = 1  # embeddings of the timestep, and norms that it modulates
        elif not text_layers.isdisjoint(names):
            rows = text
        elif not image_layers.keys().isdisjoint(names):
            rows = next(image_layers[name] for name in names if name in image_layers)
        elif prefix:
            rows = tokens + text  # the MLP of a single-stream block, and its last projection
        else:
            rows = tokens
        total += rows * _weights(layer)
        if not prefix and names[-1] == "to_q":
            total += 2 * text * text * layer.weight.shape[1]  # attention of the text alone, in HunyuanVideo
    return total


def saved_macs(block: MergeableBlock, config: ToMeConfig, latent: Grid, text: int, frames: int = 1) -> int:
    """MACs that merging saves in one block for one image; negative if the matching costs more than it saves.

    Args:
        block: the block.
        config: its merge settings.
        latent, text, frames: as for `count_macs`.
    """
    grid = block_grid(block, latent)
    is_whole = merges_whole(block, config)
    config = config.symmetric() if is_whole else config
    tokens, saved = frames * grid.tokens, 0
    kept, keys = (frames * count for count in tokens_kept(grid, config))
    if keys == tokens:
        return 0
    for name in merging_layers(block, config):
        queries = tokens if name == "attn" and config.merge_attn == KV else kept
        saved += _layer_macs(block, name, tokens, _keys(name, tokens, text), text)
        saved -= _layer_macs(block, name, queries, _keys(name, keys, text), text)
    if is_whole:
        saved += (tokens - kept) * (_weights(block.block.proj_mlp) + _weights(block.block.proj_out))
    return saved - frames * matching_macs(block, config, latent)


def matching_macs(block: MergeableBlock, config: ToMeConfig, latent: Grid) -> int:
    """MACs of the matching in one block for one image or frame; 0 if no tokens are compared."""
    grid = block_grid(block, latent)
    if config.match == GRID or not count_removed(grid, config, keys=True):
        return 0
    return count_pairs(grid, config) * next(iter(block.sublayers.values()))[0].out_dim


def _keys(name: str, tokens: int, text: int) -> int:
    return text if name == "crossattn" else tokens


def _layer_macs(block: MergeableBlock, name: str, queries: int, keys: int, text: int) -> int:
    """MACs of a block's "attn", "crossattn" or "mlp" for the given numbers of query and key tokens of the image.

    Text tokens are added where they attend with the image or pass through the same layers.
    """
    total = 0
    shared = 0 if block.facts.text is None else text
    for layer in block.sublayers[name]:
        attends_to_image = name == "crossattn" and getattr(layer, "add_k_proj", None) is not None
        image = block.facts.image_tokens if attends_to_image else 0
        for path, part in layer.named_sublayers():
            if isinstance(part, nn.Linear):
                first = path.split(".")[0]
                rows = (keys if first in ("to_k", "to_v") else queries) + shared
                total += _weights(part) * ((image or text) if first in ADDED_PROJECTIONS else rows)
        if name != "mlp":
            beside = text if getattr(layer, "add_q_proj", None) is not None else shared
            total += 2 * ((queries + beside) * (keys + beside) + queries * image) * layer.inner_dim
    return total


def _weights(layer: nn.Layer) -> int:
    return layer.weight.size
