"""Attach and detach: install the wraps on a pipeline's models, and remove them completely.

The wraps are the only state. What merges, and by which config, is read from the model each time, so deep copies,
swapped components and pipelines that share a model need no bookkeeping.
"""

from typing import Any

from paddle import nn

from .attention import FIRST, LAST, AttentionWrap, MergeWrap
from .config import ASYMMETRIC, ToMeConfig
from .errors import NoMergeableLayerError, ToMeConfigError
from .models import (
    MergeableBlock,
    denoisers,
    find_blocks,
    is_chunked,
    is_controlnet,
    layer_components,
    remove_builtin,
)
from .rotary import RotaryAttentionWrap
from .unsupported import nothing_to_merge
from .wraps import (
    CHUNKED_FEED_FORWARD,
    BlockWrap,
    GridWrap,
    InnerWrap,
    Wrap,
    install,
    remove,
    wrap_of,
)


def attached_configs(target: Any) -> list[tuple[nn.Layer, ToMeConfig | None]]:
    """The denoisers of a pipeline or model, each with its config; None if it does not merge."""
    return [(denoiser, config_of(denoiser)) for denoiser in denoisers(target).values()]


def attach(target: Any, config: ToMeConfig, controlnet: ToMeConfig | None) -> None:
    """Merge in every denoiser of a pipeline or model that has blocks for its config, replacing earlier settings.

    Args:
        target: a pipeline or model.
        config: for all denoisers except ControlNets.
        controlnet: for ControlNets; None leaves them plain.

    Raises:
        ToMeConfigError: target is not a pipeline or model, or merge_mlp meets chunked feed-forward layers.
        NoMergeableLayerError: no block is at the configs' levels. After any error the target is unchanged.
    """
    before = attached_configs(target)
    chosen: list[tuple[nn.Layer, list[MergeableBlock], ToMeConfig]] = []
    for denoiser, _ in before:
        denoiser_config = controlnet if is_controlnet(denoiser) else config
        if denoiser_config is not None and (blocks := chosen_blocks(denoiser, denoiser_config)):
            chosen.append((denoiser, blocks, denoiser_config))
    if not chosen:
        raise NoMergeableLayerError(nothing_to_merge(target, config, controlnet))
    for _, blocks, denoiser_config in chosen:
        if config.merge_mlp and denoiser_config.ratio and any(is_chunked(block.block) for block in blocks):
            raise ToMeConfigError(CHUNKED_FEED_FORWARD)
    try:
        detach(target)
        for _, blocks, denoiser_config in chosen:
            _install(blocks, denoiser_config)
    except BaseException:
        restore(target, before)
        raise


def detach(target: Any) -> None:
    """Remove all wraps of this package, and the merging that ppdiffusers ships, from a pipeline or model."""
    for component in layer_components(target).values():
        remove_builtin(component)
        for layer in component.sublayers(include_self=True):
            remove(layer)


def restore(target: Any, before: list[tuple[nn.Layer, ToMeConfig | None]]) -> None:
    """Restore the result of `attached_configs`, also for denoisers that the pipeline no longer contains."""
    detach(target)
    for denoiser, config in before:
        detach(denoiser)
        if config is not None:
            _install(chosen_blocks(denoiser, config), config)


def _install(blocks: list[MergeableBlock], config: ToMeConfig) -> None:
    for mergeable in blocks:
        block, text = mergeable.block, LAST if mergeable.text_is_last else FIRST
        if config.ratio == 0:
            install(block, Wrap(config))
            continue
        grid = wrap_of(mergeable.grid_layer)
        if not isinstance(grid, GridWrap):
            grid = GridWrap(config)
            install(mergeable.grid_layer, grid)
        is_whole, text_is_first = merges_whole(mergeable, config), mergeable.is_single_stream and text == FIRST
        install(block, BlockWrap(config, grid, mergeable.index, is_whole, text_is_first))
        inner: list[tuple[nn.Layer, InnerWrap]] = []
        if is_whole:
            inner.append((block.norm, MergeWrap(config, before=False, after=True, text=text)))
            inner.append((block.proj_out, MergeWrap(config, before=False, text=text)))
        for name, layers in merging_layers(mergeable, config).items():
            inner += [(layer, _wrap_for(name, mergeable, config, is_whole)) for layer in layers]
        for layer, wrap in inner:
            wrap.block = block
            install(layer, wrap)


def _wrap_for(name: str, block: MergeableBlock, config: ToMeConfig, is_whole: bool) -> InnerWrap:
    if name == "mlp":
        return MergeWrap(config, text=FIRST if block.is_rotary else None)
    if name == "attn" and block.is_rotary:
        return RotaryAttentionWrap(config, is_whole)
    return AttentionWrap(config, name == "attn")


def merges_whole(block: MergeableBlock, config: ToMeConfig) -> bool:
    """Whether a config merges around attention and the MLP that is parallel to it, in a single-stream block."""
    return block.is_single_stream and config.merge_attn in (True, ASYMMETRIC)


def merging_layers(block: MergeableBlock, config: ToMeConfig) -> dict[str, tuple[nn.Layer, ...]]:
    """The layers of a block around which a config merges, by "attn", "crossattn" and "mlp"."""
    return {name: layers for name, layers in block.sublayers.items() if getattr(config, f"merge_{name}")}


def chosen_blocks(denoiser: nn.Layer, config: ToMeConfig) -> list[MergeableBlock]:
    """The blocks of a denoiser in which a config merges; without max_downsample those at the shallowest level."""
    blocks = [block for block in find_blocks(denoiser) if merging_layers(block, config)]
    deepest = config.max_downsample or min((block.level for block in blocks), default=1)
    return [block for block in blocks if block.level <= deepest]


def config_of(denoiser: nn.Layer) -> ToMeConfig | None:
    """The config of a denoiser; None if it does not merge."""
    wraps = (wrap_of(mergeable.block) for mergeable in find_blocks(denoiser))
    configs = (wrap.config for wrap in wraps if wrap is not None)
    return next((config for config in configs if config is not None), None)  # one that was removed may still be there
