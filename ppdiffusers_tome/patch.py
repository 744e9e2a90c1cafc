"""Attach: put merging around the layers of a model by hooks, and take it off without a trace.

The data of one forward pass flows one way. The pre-hook of a Transformer2DModel reads the token grid; the pre-hook of
each block inside it builds the plan from the block's input; the pre- and post-hooks of the block's attention and
feed-forward layers merge and unmerge by that plan.

A plan is owned by the arguments of the block's call: the pre-hook returns them as a tuple that carries the plan, which
lives as long as the call does, also when it ends in an exception. All else holds weak references, one per thread. All
state hangs on the hooks, so a deep copy of a model has its own.
"""

import threading
import weakref
from typing import Any, Optional

import numpy as np
import paddle
from paddle import nn

from .config import ToMeConfig
from .errors import NoMergeableLayerError, ToMeConfigError, ToMePassError
from .matching import Grid, MergePlan, count_dst, match_tokens
from .merging import merge, unmerge
from .models import (
    LOOKED_FOR,
    MergeableBlock,
    components,
    denoisers,
    find_blocks,
    is_chunked,
    remove_builtin,
    token_grid,
)


class _PerThread(threading.local):
    """Attributes that each thread sees on its own; a copy or a pickle starts empty."""

    def __reduce__(self) -> Any:
        return type(self), ()


class _Arguments(tuple):
    """The positional arguments of one call, with the plan that the call owns."""

    plan: MergePlan


class ToMeHook:
    """Base class of the hooks here: what is an instance of it belongs to this package."""

    config: ToMeConfig


class GridHook(ToMeHook):
    """Pre-hook of a Transformer2DModel: read the token grid, and draw this pass's seed where none is given.

    What it notes is a few integers, which stay until the next pass: gradient checkpointing runs the blocks again, by
    themselves, after the pass is over.
    """

    def __init__(self, config: ToMeConfig) -> None:
        self.config = config
        self._thread = _PerThread()

    def __call__(self, transformer: nn.Layer, inputs: tuple) -> None:
        fresh = self.config.use_rand and self.config.seed is None
        self._thread.seed = np.random.SeedSequence().entropy if fresh else self.config.seed
        self._thread.grid = token_grid(transformer, inputs[0])

    def grid(self, tokens: int) -> Grid:
        """The grid of this thread's current pass, which must have so many tokens."""
        grid: Optional[Grid] = getattr(self._thread, "grid", None)
        if grid is None or grid.tokens != tokens:
            seen = "no feature map was seen" if grid is None else f"the feature map was {grid.h}×{grid.w}"
            raise ToMePassError(
                f"a block got {tokens} tokens but {seen}: call it through its Transformer2DModel, or remove_tome() first."
            )
        return grid

    def random_key(self, block: int) -> Optional[tuple[int, ...]]:
        """What decides the dst of a block in this pass; None where dst is not random."""
        return (self._thread.seed, block) if self.config.use_rand else None


class PlanHook(ToMeHook):
    """Pre-hook of a transformer block: build the plan from the block's input, once for all layers that merge in it."""

    def __init__(self, config: ToMeConfig, grid_hook: GridHook, index: int) -> None:
        self.config = config
        self._grid_hook = grid_hook
        self._index = index
        self._thread = _PerThread()

    def __call__(self, block: nn.Layer, inputs: tuple) -> Optional[_Arguments]:
        self._thread.plan = None
        if self.config.merge_mlp and is_chunked(block):
            raise ToMeConfigError(_CHUNKED)
        metric, config = inputs[0], self.config
        grid = self._grid_hook.grid(metric.shape[1])
        removed = config.removed(grid.tokens, count_dst(grid, config.sx, config.sy))
        if removed == 0:
            return None
        arguments = _Arguments(inputs)
        random_key = self._grid_hook.random_key(self._index)
        arguments.plan = match_tokens(metric, grid, removed, config.sx, config.sy, random_key)
        self._thread.plan = weakref.ref(arguments.plan)
        return arguments

    def current(self) -> Optional[MergePlan]:
        """The plan of the block's call that is running in this thread; None where nothing merges."""
        reference = getattr(self._thread, "plan", None)
        if reference is None:
            return None
        plan = reference()
        if plan is None:
            raise ToMePassError(
                "the plan of this block is gone: a forward pre-hook registered after apply_tome() replaced the block's "
                "arguments, or the layer was called outside its block. Register such hooks before apply_tome()."
            )
        return plan

    def forget(self) -> None:
        """The block's call is over: from here on a direct call of one of its layers merges nothing."""
        self._thread.plan = None


class BlockHook(ToMeHook):
    """Base class of the hooks that follow the plan of one block."""

    def __init__(self, plan_hook: PlanHook) -> None:
        self.config = plan_hook.config
        self._plan_hook = plan_hook


class FinishHook(BlockHook):
    """Post-hook of a transformer block: its call is over."""

    def __call__(self, block: nn.Layer, inputs: tuple, outputs: Any) -> None:
        self._plan_hook.forget()


class MergeHook(BlockHook):
    """Pre-hook of a layer that runs on merged tokens."""

    def __call__(self, layer: nn.Layer, inputs: tuple) -> Optional[tuple]:
        plan = self._plan_hook.current()
        return None if plan is None else (merge(inputs[0], plan), *inputs[1:])


class UnmergeHook(BlockHook):
    """Post-hook of a layer that runs on merged tokens."""

    def __call__(self, layer: nn.Layer, inputs: tuple, outputs: paddle.Tensor) -> Optional[paddle.Tensor]:
        plan = self._plan_hook.current()
        return None if plan is None else unmerge(outputs, plan)

def attached(target: Any) -> list[tuple[nn.Layer, Optional[ToMeConfig]]]:
    """The denoisers of a pipeline or model, each with the config it merges by, None where it does not merge."""
    return [(denoiser, _config_of(denoiser)) for denoiser in denoisers(target).values()]


def attach(target: Any, config: ToMeConfig) -> None:
    """Merge by this config in every denoiser of a pipeline or model that has blocks for it; replaces what was there.

    Raises:
        ToMeConfigError: target is no pipeline or model, or merge_mlp meets chunked feed-forward layers.
        NoMergeableLayerError: no block lies at the config's levels. Nothing has changed after any error.
    """
    chosen = {name: _chosen_blocks(denoiser, config) for name, denoiser in denoisers(target).items()}
    if not any(chosen.values()):
        raise NoMergeableLayerError(_nothing_to_merge(target, config))
    if config.merge_mlp and any(block.chunked for blocks in chosen.values() for block in blocks):
        raise ToMeConfigError(_CHUNKED)
    before = attached(target)
    try:
        detach(target)
        for blocks in chosen.values():
            _install(blocks, config)
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


def restore(target: Any, before: list[tuple[nn.Layer, Optional[ToMeConfig]]]) -> None:
    """Put a pipeline or model back to what `attached` said of it."""
    detach(target)
    for denoiser, config in before:
        if config is not None:
            _install(_chosen_blocks(denoiser, config), config)


def _install(blocks: list[MergeableBlock], config: ToMeConfig) -> None:
    grid_hooks: dict[int, GridHook] = {}
    for found in blocks:
        if id(found.transformer) not in grid_hooks:
            grid_hooks[id(found.transformer)] = GridHook(config)
            found.transformer.register_forward_pre_hook(grid_hooks[id(found.transformer)])
        plan_hook = PlanHook(config, grid_hooks[id(found.transformer)], found.index)
        found.block.register_forward_pre_hook(plan_hook)
        found.block.register_forward_post_hook(FinishHook(plan_hook))
        for layer in merging_layers(found, config).values():
            layer.register_forward_pre_hook(MergeHook(plan_hook))
            layer.register_forward_post_hook(UnmergeHook(plan_hook))


def merging_layers(block: MergeableBlock, config: ToMeConfig) -> dict[str, nn.Layer]:
    """The layers of a block that a config merges around: some of "attn", "crossattn" and "mlp"."""
    return {name: layer for name, layer in block.sublayers.items() if getattr(config, f"merge_{name}")}


def _chosen_blocks(denoiser: nn.Layer, config: ToMeConfig) -> list[MergeableBlock]:
    found = find_blocks(denoiser)
    return [block for block in found if block.level <= config.max_downsample and merging_layers(block, config)]


def _config_of(denoiser: nn.Layer) -> Optional[ToMeConfig]:
    for found in find_blocks(denoiser):
        for hook in found.block._forward_pre_hooks.values():
            if isinstance(hook, PlanHook):
                return hook.config
    return None


_CHUNKED = (
    "merge_mlp=True does not go together with enable_forward_chunking(), which cuts the tokens into pieces before the "
    "feed-forward layer sees them: call disable_forward_chunking() or leave merge_mlp=False."
)


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
    return f"{start}, at level {config.max_downsample} or less; its blocks lie at {seen}: pass max_downsample={min(levels)}."
