"""Attach and detach: put the hooks of `hooks.py` on a pipeline's models, and take them off without a trace.

Nothing is kept beside the hooks themselves. What merges, and by which config, is read off the model each time, so deep
copies, swapped components and pipelines that share a model need no bookkeeping.
"""

from typing import Any

from paddle import nn

from .config import LAYERS, LEVELS, ToMeConfig
from .errors import NoMergeableLayerError, ToMeConfigError
from .hooks import (
    CHUNKED,
    CallHook,
    ConfigHook,
    DropChannelHook,
    FinishHook,
    GridHook,
    MaskHook,
    MergeHook,
    MergeOutputHook,
    PlanHook,
    SizeChannelHook,
    ToMeHook,
    UnmergeHook,
)
from .limits import reasons
from .models import (
    LOOKED_FOR,
    MergeableBlock,
    components,
    denoisers,
    find_blocks,
    is_chunked,
    is_controlnet,
    label,
    remove_builtin,
)


def attached(target: Any) -> list[tuple[nn.Layer, ToMeConfig | None]]:
    """The denoisers of a pipeline or model, each with the config it merges by, None where it does not merge."""
    return [(denoiser, config_of(denoiser)) for denoiser in denoisers(target).values()]


def attach(target: Any, config: ToMeConfig, controlnet: ToMeConfig | None) -> None:
    """Merge in every denoiser of a pipeline or model that has blocks for its config; replaces what was there.

    Args:
        target: a pipeline or model.
        config: for every denoiser but ControlNets.
        controlnet: for ControlNets; None leaves them plain.

    Raises:
        ToMeConfigError: target is no pipeline or model, or merge_mlp meets chunked feed-forward layers.
        NoMergeableLayerError: no block lies at the configs' levels. Nothing has changed after any error.
    """
    before = attached(target)
    chosen: list[tuple[list[MergeableBlock], ToMeConfig]] = []
    for denoiser, _ in before:
        its_config = controlnet if is_controlnet(denoiser) else config
        if its_config is not None and (blocks := chosen_blocks(denoiser, its_config)):
            chosen.append((blocks, its_config))
    if not chosen:
        raise NoMergeableLayerError(_nothing_to_merge(target, config, controlnet))
    merging = [found.block for blocks, its_config in chosen for found in blocks if its_config.ratio]
    if config.merge_mlp and any(map(is_chunked, merging)):
        raise ToMeConfigError(CHUNKED)
    try:
        detach(target)
        for blocks, its_config in chosen:
            _install(blocks, its_config)
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
            if isinstance(layer.__dict__.get("prepare_attention_mask"), MaskHook):
                del layer.prepare_attention_mask


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
        if config.ratio == 0:
            found.block.register_forward_pre_hook(ConfigHook(config))
            continue
        grid_hook = grid_hooks.get(id(found.grid_layer))
        if grid_hook is None:
            grid_hook = grid_hooks[id(found.grid_layer)] = GridHook(config)
            found.grid_layer.register_forward_pre_hook(grid_hook)
        call_hook = CallHook(config, grid_hook, found.index)
        found.block.register_forward_pre_hook(call_hook)
        found.block.register_forward_post_hook(FinishHook(call_hook))
        (found.block.norm1 if found.is_joint else found.block).register_forward_pre_hook(PlanHook(call_hook))
        for name, layers in merging_layers(found, config).items():
            is_proportional = config.proportional and name == "attn"
            for layer in layers:
                if found.is_joint and name == "attn":
                    found.block.norm1.register_forward_post_hook(MergeOutputHook(call_hook))
                    if is_proportional:
                        _install_size_channels(layer, call_hook)
                else:
                    layer.register_forward_pre_hook(MergeHook(call_hook))
                has_mask = name != "mlp" and not found.is_joint
                layer.register_forward_post_hook(UnmergeHook(call_hook, has_mask and is_proportional))
                if name != "mlp":
                    layer.prepare_attention_mask = MaskHook(call_hook, layer, is_proportional)


def _install_size_channels(attention: nn.Layer, call_hook: CallHook) -> None:
    """Give a joint attention the sizes of merged tokens; its processor passes no mask on."""
    roles = {"to_q": "query", "add_q_proj": "query", "to_k": "key"}
    for name in (*roles, "to_v", "add_k_proj", "add_v_proj"):
        hook = SizeChannelHook(call_hook, attention, roles.get(name, "other"))
        getattr(attention, name).register_forward_post_hook(hook)
    outputs = [attention.to_out[0], *([] if attention.context_pre_only else [attention.to_add_out])]
    for projection in outputs:
        projection.register_forward_pre_hook(DropChannelHook(call_hook, attention))


def merging_layers(block: MergeableBlock, config: ToMeConfig) -> dict[str, tuple[nn.Layer, ...]]:
    """The layers of a block that a config merges around, under some of "attn", "crossattn" and "mlp"."""
    return {name: layers for name, layers in block.sublayers.items() if getattr(config, f"merge_{name}")}


def chosen_blocks(denoiser: nn.Layer, config: ToMeConfig) -> list[MergeableBlock]:
    """The blocks of a denoiser that a config merges in; without max_downsample those at the shallowest level."""
    found = [block for block in find_blocks(denoiser) if merging_layers(block, config)]
    deepest = config.max_downsample or min((block.level for block in found), default=1)
    return [block for block in found if block.level <= deepest]


def config_of(denoiser: nn.Layer) -> ToMeConfig | None:
    """The config that a denoiser merges by, None where it does not merge."""
    for found in find_blocks(denoiser):
        for hook in found.block._forward_pre_hooks.values():
            if isinstance(hook, ConfigHook):
                return hook.config
    return None


def _nothing_to_merge(target: Any, config: ToMeConfig, controlnet: ToMeConfig | None) -> str:
    start = f"{type(target).__name__} has nothing to merge with {config.describe()}"
    models = denoisers(target)
    if not models:
        names = ", ".join(label(name, layer) for name, layer in components(target).items())
        why = "".join(f" {reason}" for reason in reasons(target))
        return f"{start}: looked for {LOOKED_FOR}, and found none in {names or 'a pipeline without models'}.{why}"
    others = [denoiser for denoiser in models.values() if controlnet is not None or not is_controlnet(denoiser)]
    if not others:
        return f"{start}, controlnet=False: there is nothing but ControlNets here. Pass controlnet=True."
    levels: dict[int, int] = {}
    for denoiser in others:
        for found in find_blocks(denoiser):
            if merging_layers(found, config):
                levels[found.level] = levels.get(found.level, 0) + 1
    if not levels:
        layers = ", ".join(f"merge_{name}" for name in LAYERS if getattr(config, f"merge_{name}"))
        return f"{start}: none of its blocks has a layer for {layers}."
    seen = ", ".join(f"level {level} ({count})" for level, count in sorted(levels.items()))
    remedy = "leave max_downsample out" + (f" or pass {min(levels)}" if min(levels) in LEVELS else "")
    return f"{start}: no block lies at level {config.max_downsample} or less, but at {seen}. To merge there, {remedy}."
