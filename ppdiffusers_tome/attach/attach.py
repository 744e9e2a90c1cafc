"""Attach and detach: install the wraps on a pipeline's models, and remove them completely.

The wraps, and the `Attachment` that those of a denoiser share, are the only state. What merges, and by which config,
is read from the model each time, so deep copies, swapped components and pipelines that share a model need no
bookkeeping.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from paddle import nn

from ..errors import NoMergeableLayerError, ParameterError, ToMeConfigError
from ..families.blocks import MergeableBlock, find_blocks, is_controlnet
from ..families.pipelines import DenoiserBlocks, denoisers, find_denoisers, layer_components, why_nothing_merges
from ..families.schedules import as_numbers
from ..grid import Grid
from ..methods import ToMeConfig
from ..methods.config import LEVELS
from .attention import AttentionWrap, ProjectionWrap
from .block import CHUNKED_FEED_FORWARD, BlockWrap
from .computed import ComputedAttentionWrap
from .conflicts import check_not_compiled, remove_builtin
from .forward import ensure, remove, wrap_of
from .layers import MergeWrap
from .outer import GridWrap, PassWrap, PositionsWrap, TimestepWrap, TransformerWrap
from .placement import Placement, placements
from .state import AppliedConfig, Attachment


class ConfigOfDenoiser(NamedTuple):
    """A denoiser, and its config; None if it does not merge."""

    denoiser: nn.Layer
    config: ToMeConfig | None


class MergingOfDenoiser(NamedTuple):
    """How a denoiser is to merge: its config, and what merges in which of its blocks."""

    config: ToMeConfig
    placed: list[tuple[MergeableBlock, Placement]]


def attached_configs(target: Any) -> list[ConfigOfDenoiser]:
    """The denoisers of a pipeline or model, each with its config."""
    return [ConfigOfDenoiser(denoiser, config_of(denoiser)) for denoiser in denoisers(target).values()]


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
    found = find_denoisers(target)
    chosen = _choose_blocks(target, found, config, controlnet)
    before = [ConfigOfDenoiser(model, config_of(model, blocks)) for _, model, blocks in found]
    try:
        for component in layer_components(target).values():
            remove_builtin(component)
        for name, model, blocks in found:
            if name in chosen:
                _apply(model, blocks, chosen[name])
            else:
                _remove(model)
    except BaseException:
        restore(target, before)
        raise


def choose_blocks(target: Any, config: ToMeConfig, controlnet: ToMeConfig | None) -> dict[str, MergingOfDenoiser]:
    """How `attach` lets denoisers merge, by their names, without those that stay plain; nothing is changed.

    Arguments and errors are those of `attach`.
    """
    return _choose_blocks(target, find_denoisers(target), config, controlnet)


def _choose_blocks(
    target: Any, found: Sequence[DenoiserBlocks], config: ToMeConfig, controlnet: ToMeConfig | None
) -> dict[str, MergingOfDenoiser]:
    for denoiser in found:
        check_not_compiled(denoiser)
    chosen = {}
    for denoiser in found:
        own = controlnet if is_controlnet(denoiser.model) else config
        if own is not None and (placed := _placements(denoiser, own, config)):
            chosen[denoiser.name] = MergingOfDenoiser(own, placed)
    if not chosen:
        raise NoMergeableLayerError(_nothing_to_merge(target, found, config, controlnet))
    for own, placed in chosen.values():
        if "mlp" in own.layers and any(block.is_chunked and placement.share < 1 for block, placement in placed):
            raise ToMeConfigError(CHUNKED_FEED_FORWARD)
    return chosen


def _placements(
    found: DenoiserBlocks, config: ToMeConfig, common: ToMeConfig
) -> list[tuple[MergeableBlock, Placement]]:
    """`placements`, whose errors about the ratio of a ControlNet name the argument that it comes from."""
    try:
        return placements(found.model, config, found.blocks)
    except ParameterError as error:
        if not is_controlnet(found.model):
            raise
        name = "ratio" if config == common else "controlnet"
        raise ParameterError(name, error.value, f"in the ControlNet {error.rule}") from None


def _nothing_to_merge(
    target: Any, found: Sequence[DenoiserBlocks], config: ToMeConfig, controlnet: ToMeConfig | None
) -> str:
    """Why no block of a pipeline or model merges with these configs, and what to change."""
    if not any(denoiser.blocks for denoiser in found):
        return f"{why_nothing_merges(target)}."
    start = f"{type(target).__name__} has nothing to merge with {config.describe()}"
    included = [denoiser for denoiser in found if controlnet is not None or not is_controlnet(denoiser.model)]
    if not included:
        return f"{start}, controlnet=False: it only has ControlNets. Pass controlnet=True."
    layers = config.layers
    levels: dict[int, int] = {}
    for denoiser in included:
        for block in denoiser.blocks:
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
            check_not_compiled(DenoiserBlocks(name, denoiser, find_blocks(denoiser)))
    for component in layer_components(target).values():
        remove_builtin(component)
        _remove(component)


def restore(target: Any, before: Sequence[ConfigOfDenoiser]) -> None:
    """Restore the result of `attached_configs`, also for denoisers that the pipeline no longer contains."""
    merging = [denoiser for denoiser, config in before if config is not None]
    for denoiser in denoisers(target).values():
        if not any(denoiser is merged for merged in merging):
            _remove(denoiser)
    for denoiser, config in before:
        if config is None:
            _remove(denoiser)
        else:
            blocks = find_blocks(denoiser)
            _apply(denoiser, blocks, MergingOfDenoiser(config, placements(denoiser, config, blocks)))


def _apply(denoiser: nn.Layer, blocks: Sequence[MergeableBlock], merging: MergingOfDenoiser) -> None:
    """Merge in a denoiser: install the wraps that it lacks, then replace what merges in one step.

    Wraps that are there stay, because passes may be running.
    """
    config, placed = merging
    attachment = _attachment_of(denoiser, blocks) or Attachment()
    first = min(block.index for block, _ in placed)
    argument = placed[0][0].family.grid_positions
    positions = None if argument is None else ensure(denoiser, PositionsWrap(argument))
    for block, placement in placed:
        _install(block, placement, attachment, positions, is_first=block.index == first)
    applied = AppliedConfig(config, {block.index: placement for block, placement in placed})
    before, attachment.applied = attachment.applied, applied
    if before is not None and before.config != config:
        for block in blocks:
            if isinstance(wrap := wrap_of(block.layer), BlockWrap):
                wrap.forget_constants()


def _install(
    block: MergeableBlock,
    placement: Placement,
    attachment: Attachment,
    positions: PositionsWrap | None,
    is_first: bool,
) -> None:
    timestep = None
    if block.timestep_layer is not None:
        timestep = ensure(block.timestep_layer, TimestepWrap(attachment, block.family))
    of_unet = TransformerWrap(attachment, is_first and block.timestep_layer is None)
    transformer = ensure(block.transformer, of_unet) if block.is_in_unet else None
    grid = ensure(block.grid_layer, GridWrap(attachment, block, transformer, positions))
    ensure(block.layer, BlockWrap(attachment, block, grid, timestep))
    if placement.share == 1:
        return
    for name in placement.layers:
        for layer in block.sublayers[name]:
            if name != "attn":
                ensure(layer, MergeWrap(block.layer, name))
            elif block.family.only_processor is not None:
                ensure(layer, ComputedAttentionWrap(block, name))
            else:
                _install_attention(layer, block, placement)


def _install_attention(layer: nn.Layer, block: MergeableBlock, placement: Placement) -> None:
    ensure(layer, AttentionWrap(block, "attn"))
    if not placement.config.merges_queries:
        projections = block.family.attention.image
        for name in (projections.k, projections.v):
            ensure(getattr(layer, name), ProjectionWrap())


def _remove(component: nn.Layer) -> None:
    """Remove all wraps from a component, except those that gradient checkpointing still needs.

    A layer may run again for the gradients of a pass that merged. Its wraps stay until merging is applied or removed
    again, and do nothing in new passes.
    """
    wraps = [wrap_of(layer) for layer in component.sublayers(include_self=True)]
    passes = [wrap for wrap in wraps if isinstance(wrap, PassWrap)]
    for wrap in passes:
        if isinstance(wrap, BlockWrap):  # the component may be a part of a denoiser, whose remaining blocks merge on
            wrap.attachment.stop(wrap.index)
    if not any(len(wrap.records) for wrap in passes):
        for layer in component.sublayers(include_self=True):
            remove(layer)


def attached_placements(
    denoiser: nn.Layer, blocks: Sequence[MergeableBlock] | None = None
) -> list[tuple[MergeableBlock, Placement]]:
    """The blocks of a denoiser in which merging is attached, and what merges in them; none if it does not merge.

    Args:
        denoiser: the model.
        blocks: all mergeable blocks of the model, if they are known.
    """
    attachment = _attachment_of(denoiser, blocks)
    applied = None if attachment is None else attachment.applied
    if applied is None:
        return []
    placed = applied.placements
    blocks = find_blocks(denoiser) if blocks is None else blocks
    return [(block, placed[block.index]) for block in blocks if block.index in placed]


def last_grids(denoiser: nn.Layer) -> dict[int, Grid]:
    """The token grids of a denoiser's blocks in the last pass of this thread, by the index of the block."""
    wraps = (wrap_of(layer) for layer in denoiser.sublayers())
    grids = {wrap.index: wrap.last_grid() for wrap in wraps if isinstance(wrap, BlockWrap)}
    return {index: grid for index, grid in grids.items() if grid is not None}


def last_timesteps(found: DenoiserBlocks) -> list[float]:
    """The timesteps of the rows of the last pass of this thread; none before it, and where they are not read."""
    attachment = _attachment_of(found.model, found.blocks)
    current = None if attachment is None else attachment.current
    values = None if current is None or current.timestep is None else current.timestep.values
    return [] if values is None else as_numbers(values)


def config_of(denoiser: nn.Layer, blocks: Sequence[MergeableBlock] | None = None) -> ToMeConfig | None:
    """The config of a denoiser; None if it does not merge. `blocks` are all of its blocks, if they are known."""
    attachment = _attachment_of(denoiser, blocks)
    return None if attachment is None or attachment.applied is None else attachment.applied.config


def _attachment_of(denoiser: nn.Layer, blocks: Sequence[MergeableBlock] | None = None) -> Attachment | None:
    """What the wraps of a denoiser share; None if it has none. Without its blocks all of its layers are searched."""
    layers = denoiser.sublayers(include_self=True) if blocks is None else [block.layer for block in blocks]
    wraps = (wrap_of(layer) for layer in layers)
    return next((wrap.attachment for wrap in wraps if isinstance(wrap, BlockWrap)), None)
