"""Attach and detach: install the wraps on a pipeline's models, and remove them completely.

The wraps are the only state. What merges, and by which config, is read from the model each time, so deep copies,
swapped components and pipelines that share a model need no bookkeeping.
"""

from collections.abc import Iterator
from typing import Any

from paddle import nn

from ..config import LAYERS, LEVELS, ToMeConfig
from ..errors import NoMergeableLayerError, ToMeConfigError
from ..families.models import (
    MergeableBlock,
    check_not_compiled,
    denoisers,
    find_blocks,
    is_controlnet,
    layer_components,
    remove_builtin,
    why_nothing_merges,
)
from .attention import AttentionWrap
from .forward import install, remove, wrap_of
from .layers import MergeWrap
from .passes import CHUNKED_FEED_FORWARD, BlockWrap, GridWrap, InnerWrap, PlacedWrap, TimestepWrap
from .placement import Placement, placements


def attached_configs(target: Any) -> list[tuple[nn.Layer, ToMeConfig | None]]:
    """The denoisers of a pipeline or model, each with its config, or with None if it does not merge."""
    return [(denoiser, config_of(denoiser)) for denoiser in denoisers(target).values()]


def attach(target: Any, config: ToMeConfig, controlnet: ToMeConfig | None) -> None:
    """Merge in every denoiser of a pipeline or model that has blocks for its config, replacing earlier settings.

    Args:
        target: a pipeline or model.
        config: the config of all denoisers except ControlNets.
        controlnet: the config of ControlNets; None leaves them plain.

    Raises:
        ToMeConfigError: target is not a pipeline or model, a model runs a compiled program, or merge_mlp meets chunked
            feed-forward layers.
        NoMergeableLayerError: no block is at the configs' levels. After any error the target is unchanged.
    """
    before = attached_configs(target)
    for name, denoiser in denoisers(target).items():
        check_not_compiled(name, denoiser)
    chosen: list[tuple[MergeableBlock, Placement]] = []
    for denoiser, _ in before:
        denoiser_config = controlnet if is_controlnet(denoiser) else config
        if denoiser_config is not None:
            chosen += placements(denoiser, denoiser_config)
    if not chosen:
        raise NoMergeableLayerError(_nothing_to_merge(target, config, controlnet))
    if any(block.is_chunked and placement.config.merge_mlp and placement.config.ratio for block, placement in chosen):
        raise ToMeConfigError(CHUNKED_FEED_FORWARD)
    try:
        detach(target)
        for block, placement in chosen:
            _install(block, placement)
    except BaseException:
        restore(target, before)
        raise


def _nothing_to_merge(target: Any, config: ToMeConfig, controlnet: ToMeConfig | None) -> str:
    """Why no block of a pipeline or model merges with these configs, and what to change."""
    models = denoisers(target)
    if not any(find_blocks(denoiser) for denoiser in models.values()):
        return f"{why_nothing_merges(target)}."
    start = f"{type(target).__name__} has nothing to merge with {config.describe()}"
    included = [denoiser for denoiser in models.values() if controlnet is not None or not is_controlnet(denoiser)]
    if not included:
        return f"{start}, controlnet=False: it only has ControlNets. Pass controlnet=True."
    layers = [name for name in LAYERS if getattr(config, f"merge_{name}")]
    levels: dict[int, int] = {}
    for denoiser in included:
        for block in find_blocks(denoiser):
            if not block.sublayers.keys().isdisjoint(layers):
                levels[block.level] = levels.get(block.level, 0) + 1
    if not levels:
        names = ", ".join(f"merge_{name}" for name in layers)
        return f"{start}: none of its blocks has a layer for {names}."
    listed = ", ".join(f"level {level} ({count})" for level, count in sorted(levels.items()))
    remedy = "leave max_downsample out" + (f" or pass {min(levels)}" if min(levels) in LEVELS else "")
    reason = f"no block is at level {config.max_downsample} or less, its blocks are at {listed}"
    return f"{start}: {reason}. To merge there, {remedy}."


def detach(target: Any) -> None:
    """Remove all wraps of this package, and the merging that ppdiffusers ships, from a pipeline or model.

    Raises:
        ToMeConfigError: target is not a pipeline or model, or a model that merges runs a compiled program.
    """
    for name, denoiser in denoisers(target).items():
        if config_of(denoiser) is not None:
            check_not_compiled(name, denoiser)
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
            for block, placement in placements(denoiser, config):
                _install(block, placement)


def _install(block: MergeableBlock, placement: Placement) -> None:
    if placement.ratio == 0:
        install(block.block, PlacedWrap(placement))
        return
    grid = wrap_of(block.grid_layer)
    if not isinstance(grid, GridWrap):
        grid = GridWrap(placement)
        install(block.grid_layer, grid)
    install(block.block, BlockWrap(placement, grid, _timestep_wrap(block) if placement.takes_turns else None))
    for layer, wrap in _inner_wraps(block, placement):
        wrap.block = block.block
        install(layer, wrap)


def _timestep_wrap(block: MergeableBlock) -> TimestepWrap | None:
    """The wrap that sees the timestep, which is installed with the first block; None if no layer shows it."""
    if block.timestep_layer is None:
        return None
    wrap = wrap_of(block.timestep_layer)
    if not isinstance(wrap, TimestepWrap):
        wrap = TimestepWrap()
        install(block.timestep_layer, wrap)
    return wrap


def _inner_wraps(block: MergeableBlock, placement: Placement) -> Iterator[tuple[nn.Layer, InnerWrap]]:
    """The layers inside a block that run on merged tokens, each with its wrap."""
    if placement.merges_block:
        names = placement.facts.single_stream
        assert names is not None
        yield getattr(block.block, names.norm), MergeWrap(placement, merge_input=False, merge_output=True)
        yield getattr(block.block, names.out), MergeWrap(placement, merge_input=False)
    for name in placement.layers:
        for layer in block.sublayers[name]:
            is_mlp, is_self = name == "mlp", name == "attn"
            yield layer, MergeWrap(placement) if is_mlp else AttentionWrap(placement, is_self)


def attached_placements(denoiser: nn.Layer) -> list[tuple[MergeableBlock, Placement]]:
    """The blocks of a denoiser in which merging is attached, and what merges in them; none if it does not merge."""
    wraps = [(block, wrap_of(block.block)) for block in find_blocks(denoiser)]
    # A wrap that was removed may still be there, without a placement.
    return [(block, wrap.placement) for block, wrap in wraps if isinstance(wrap, PlacedWrap)]


def config_of(denoiser: nn.Layer) -> ToMeConfig | None:
    """The config of a denoiser; None if it does not merge."""
    return next((placement.config for _, placement in attached_placements(denoiser)), None)
