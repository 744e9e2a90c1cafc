"""Attach and detach: install the wraps on a pipeline's models, and remove them completely.

The wraps, and the `Attachment` that those of a denoiser share, are the only state. What merges, and by which config,
is read from the model each time, so deep copies, swapped components and pipelines that share a model need no
bookkeeping.
"""

from typing import Any

from paddle import nn

from ..config import LAYERS, LEVELS, ToMeConfig
from ..errors import NoMergeableLayerError, ToMeConfigError
from ..families.blocks import MergeableBlock, find_blocks, is_controlnet
from ..families.pipelines import denoisers, layer_components, why_nothing_merges
from ..grid import Grid
from .attention import AttentionWrap, ProjectionWrap
from .block import CHUNKED_FEED_FORWARD, BlockWrap
from .computed import ComputedAttentionWrap
from .conflicts import check_not_compiled, remove_builtin
from .forward import ensure, remove, wrap_of
from .layers import MergeWrap
from .outer import GridWrap, PassWrap, TimestepWrap, TransformerWrap
from .placement import Placement, placements
from .state import Applied, Attachment

Before = list[tuple[nn.Layer, ToMeConfig | None]]


def attached_configs(target: Any) -> Before:
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
    chosen: dict[nn.Layer, tuple[ToMeConfig, list[tuple[MergeableBlock, Placement]]]] = {}
    for denoiser, _ in before:
        denoiser_config = controlnet if is_controlnet(denoiser) else config
        if denoiser_config is not None and (placed := placements(denoiser, denoiser_config)):
            chosen[denoiser] = denoiser_config, placed
    if not chosen:
        raise NoMergeableLayerError(_nothing_to_merge(target, config, controlnet))
    for placed_config, placed in chosen.values():
        if placed_config.merge_mlp and any(block.is_chunked and one.share < 1 for block, one in placed):
            raise ToMeConfigError(CHUNKED_FEED_FORWARD)
    try:
        for component in layer_components(target).values():
            remove_builtin(component)
        for denoiser, _ in before:
            if denoiser in chosen:
                _apply(denoiser, *chosen[denoiser])
            else:
                _remove(denoiser)
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
        _remove(component)


def restore(target: Any, before: Before) -> None:
    """Restore the result of `attached_configs`, also for denoisers that the pipeline no longer contains."""
    kept = [denoiser for denoiser, config in before if config is not None]
    for denoiser in denoisers(target).values():
        if not any(denoiser is one for one in kept):
            _remove(denoiser)
    for denoiser, config in before:
        if config is None:
            _remove(denoiser)
        else:
            _apply(denoiser, config, placements(denoiser, config))


def _apply(denoiser: nn.Layer, config: ToMeConfig, placed: list[tuple[MergeableBlock, Placement]]) -> None:
    """Merge in a denoiser: install the wraps that it lacks, then replace what merges in one step.

    Wraps that are there stay, because passes may be running.
    """
    attachment = _attachment_of(denoiser) or Attachment()
    first = min(block.index for block, _ in placed)
    for block, placement in placed:
        _install(block, placement, attachment, is_first=block.index == first)
    before, attachment.applied = attachment.applied, Applied(config, {block.index: one for block, one in placed})
    if before is not None and before.config != config:
        for layer in denoiser.sublayers(include_self=True):
            if isinstance(wrap := wrap_of(layer), BlockWrap):
                wrap.forget_constants()


def _install(block: MergeableBlock, placement: Placement, attachment: Attachment, is_first: bool) -> None:
    timestep = None
    if block.timestep_layer is not None:
        timestep = ensure(block.timestep_layer, TimestepWrap(attachment, block.family))
    of_unet = TransformerWrap(attachment, is_first and block.timestep_layer is None)
    transformer = ensure(block.transformer, of_unet) if block.is_in_unet else None
    grid = ensure(block.grid_layer, GridWrap(attachment, block, transformer))
    ensure(block.block, BlockWrap(attachment, block, grid, timestep))
    if placement.share == 1:
        return
    for name in placement.layers:
        for layer in block.sublayers[name]:
            if name != "attn":
                ensure(layer, MergeWrap(block.block, name))
            elif block.family.only_processor is not None:
                ensure(layer, ComputedAttentionWrap(block, name))
            else:
                _install_attention(layer, block, placement)


def _install_attention(layer: nn.Layer, block: MergeableBlock, placement: Placement) -> None:
    ensure(layer, AttentionWrap(block, "attn"))
    if not placement.method.merges_queries:
        projections = block.family.attention.image
        for name in (projections.k, projections.v):
            ensure(getattr(layer, name), ProjectionWrap())


def _remove(component: nn.Layer) -> None:
    """Remove all wraps from a model or another component, except those that gradient checkpointing still needs.

    A layer may run again for the gradients of a pass that merged. Its wraps stay until merging is applied or removed
    again, and do nothing in new passes.
    """
    wraps = [wrap_of(layer) for layer in component.sublayers(include_self=True)]
    passes = [wrap for wrap in wraps if isinstance(wrap, PassWrap)]
    for wrap in passes:
        if isinstance(wrap, BlockWrap):  # perhaps of a part of a denoiser, whose other blocks merge on
            wrap.attachment.stop(wrap.index)
    if not any(len(wrap.records) for wrap in passes):
        for layer in component.sublayers(include_self=True):
            remove(layer)


def attached_placements(denoiser: nn.Layer) -> list[tuple[MergeableBlock, Placement]]:
    """The blocks of a denoiser in which merging is attached, and what merges in them; none if it does not merge."""
    attachment = _attachment_of(denoiser)
    applied = None if attachment is None else attachment.applied
    if applied is None:
        return []
    placed = applied.placements
    return [(block, placed[block.index]) for block in find_blocks(denoiser) if block.index in placed]


def last_grids(denoiser: nn.Layer) -> dict[int, Grid]:
    """The token grids of a denoiser's blocks in the last pass of this thread, by the index of the block."""
    wraps = (wrap_of(layer) for layer in denoiser.sublayers())
    grids = {wrap.index: wrap.last_grid() for wrap in wraps if isinstance(wrap, BlockWrap)}
    return {index: grid for index, grid in grids.items() if grid is not None}


def config_of(denoiser: nn.Layer) -> ToMeConfig | None:
    """The config of a denoiser; None if it does not merge."""
    attachment = _attachment_of(denoiser)
    return None if attachment is None or attachment.applied is None else attachment.applied.config


def _attachment_of(denoiser: nn.Layer) -> Attachment | None:
    """What the wraps of a denoiser share; None if it has none."""
    wraps = (wrap_of(layer) for layer in denoiser.sublayers(include_self=True))
    return next((wrap.attachment for wrap in wraps if isinstance(wrap, BlockWrap)), None)
