"""Attach and detach: put the hooks of `hooks.py` on a pipeline's models, and take them off without a trace.

Nothing is kept beside the hooks themselves. What merges, and by which config, is read off the model each time, so deep
copies, swapped components and pipelines that share a model need no bookkeeping.
"""

from typing import Any

from paddle import nn

from .config import LEVELS, ToMeConfig
from .errors import NoMergeableLayerError, ToMeConfigError
from .hooks import CHUNKED, FinishHook, GridHook, MergeHook, PlanHook, ToMeHook, UnmergeHook
from .models import LOOKED_FOR, MergeableBlock, components, denoisers, find_blocks, is_chunked, remove_builtin


def attached(target: Any) -> list[tuple[nn.Layer, ToMeConfig | None]]:
    """The denoisers of a pipeline or model, each with the config it merges by, None where it does not merge."""
    return [(denoiser, config_of(denoiser)) for denoiser in denoisers(target).values()]


def attach(target: Any, config: ToMeConfig) -> None:
    """Merge by this config in every denoiser of a pipeline or model that has blocks for it; replaces what was there.

    Raises:
        ToMeConfigError: target is no pipeline or model, or merge_mlp meets chunked feed-forward layers.
        NoMergeableLayerError: no block lies at the config's levels. Nothing has changed after any error.
    """
    before = attached(target)
    chosen = [found for denoiser, _ in before for found in chosen_blocks(denoiser, config)]
    if not chosen:
        raise NoMergeableLayerError(_nothing_to_merge(target, config))
    if config.merge_mlp and any(is_chunked(found.block) for found in chosen):
        raise ToMeConfigError(CHUNKED)
    try:
        detach(target)
        _install(chosen, config)
    except BaseException:
        restore(target, before)
        raise


def detach(target: Any) -> None:
    """Take every hook of this package, and the merging that ppdiffusers ships, off a pipeline or model."""
    for component in components(target).values():
        remove_builtin(component)
        for layer in component.sublayers(include_self=True):
            for hooks in (layer._forward_pre_hooks, layer._forward_post_hooks):
                for key in [key for key, hook in hooks.items() if isinstance(hook, ToMeHook)]:
                    del hooks[key]


def restore(target: Any, before: list[tuple[nn.Layer, ToMeConfig | None]]) -> None:
    """Put a pipeline or model back to what `attached` said of it; also denoisers that have left the pipeline since."""
    detach(target)
    for denoiser, config in before:
        detach(denoiser)
        if config is not None:
            _install(chosen_blocks(denoiser, config), config)


def _install(blocks: list[MergeableBlock], config: ToMeConfig) -> None:
    grid_hooks: dict[int, GridHook] = {}
    for found in blocks:
        grid_hook = grid_hooks.get(id(found.transformer))
        if grid_hook is None:
            grid_hook = grid_hooks[id(found.transformer)] = GridHook(config)
            found.transformer.register_forward_pre_hook(grid_hook)
        plan_hook = PlanHook(config, grid_hook, found.index)
        found.block.register_forward_pre_hook(plan_hook)
        found.block.register_forward_post_hook(FinishHook(plan_hook))
        for layer in merging_layers(found, config).values():
            layer.register_forward_pre_hook(MergeHook(plan_hook))
            layer.register_forward_post_hook(UnmergeHook(plan_hook))


def merging_layers(block: MergeableBlock, config: ToMeConfig) -> dict[str, nn.Layer]:
    """The layers of a block that a config merges around: some of "attn", "crossattn" and "mlp"."""
    return {name: layer for name, layer in block.sublayers.items() if getattr(config, f"merge_{name}")}


def chosen_blocks(denoiser: nn.Layer, config: ToMeConfig) -> list[MergeableBlock]:
    """The blocks of a denoiser that a config merges in."""
    found = find_blocks(denoiser)
    return [block for block in found if block.level <= config.max_downsample and merging_layers(block, config)]


def config_of(denoiser: nn.Layer) -> ToMeConfig | None:
    """The config that a denoiser merges by, None where it does not merge."""
    for found in find_blocks(denoiser):
        for hook in found.block._forward_pre_hooks.values():
            if isinstance(hook, PlanHook):
                return hook.config
    return None


def _nothing_to_merge(target: Any, config: ToMeConfig) -> str:
    levels: dict[int, int] = {}
    for denoiser in denoisers(target).values():
        for found in find_blocks(denoiser):
            levels[found.level] = levels.get(found.level, 0) + 1
    start = f"{type(target).__name__} has nothing to merge with {config.describe()}: looked for {LOOKED_FOR}"
    if not levels:
        names = ", ".join(f"{name} ({type(layer).__name__})" for name, layer in components(target).items())
        return f"{start}, and found none in {names or 'a pipeline without models'}."
    seen = ", ".join(f"level {level} ({count})" for level, count in sorted(levels.items()))
    remedy = f"pass max_downsample={min(levels)}" if min(levels) in LEVELS else "no max_downsample reaches them"
    return f"{start}, at level {config.max_downsample} or less; its blocks lie at {seen}: {remedy}."
