"""The hooks that merge: what happens in a forward pass, and where its data lives.

The data of one pass flows one way. The pre-hook of a Transformer2DModel reads the token grid; the pre-hook of each
block inside it builds the plan from the block's input; the pre- and post-hooks of the block's attention and
feed-forward layers merge and unmerge by that plan.

A plan is owned by the arguments of the block's call: the pre-hook returns them as a tuple that carries the plan, which
lives as long as the call does, also when the call ends in an exception. All else holds weak references, one per
thread. All state hangs on the hooks, so a deep copy of a model has its own.
"""

import threading
import weakref
from typing import Any

import numpy as np
import paddle
from paddle import nn

from .config import ToMeConfig
from .errors import ToMeConfigError, ToMePassError
from .matching import Grid, MergePlan, count_removed, match_tokens
from .merging import merge, unmerge
from .models import is_chunked, token_grid

CHUNKED = (
    "merge_mlp=True does not go together with chunked feed-forward layers (enable_forward_chunking(), "
    "set_chunk_feed_forward()), which get the tokens in pieces: turn chunking off or leave merge_mlp=False."
)


class _PerThread(threading.local):
    """Attributes that each thread sees on its own; a copy or a pickle starts empty."""

    def __reduce__(self) -> Any:
        return type(self), ()


class _Arguments(tuple):
    """The positional arguments of one call, with the plan that the call owns."""

    plan: MergePlan


def _first(layer: nn.Layer, inputs: tuple) -> paddle.Tensor:
    """A call's first positional argument, the hidden states; Paddle's hooks do not see keyword arguments."""
    if not inputs:
        raise ToMePassError(f"{type(layer).__name__} was called by keyword alone: pass hidden_states by position.")
    return inputs[0]


class ToMeHook:
    """Base class of the hooks here: what is an instance of it belongs to this package."""


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
        self._thread.grid = token_grid(transformer, _first(transformer, inputs))

    def grid(self, tokens: int) -> Grid:
        """The grid of this thread's current pass, which must have so many tokens."""
        grid: Grid | None = getattr(self._thread, "grid", None)
        if grid is None or grid.tokens != tokens:
            seen = "no feature map was seen" if grid is None else f"the feature map was {grid.h}×{grid.w}"
            raise ToMePassError(
                f"a block got {tokens} tokens but {seen}: call it through its Transformer2DModel, "
                "or remove_tome() first."
            )
        return grid

    def random_key(self, block: int) -> tuple[int, ...] | None:
        """What decides the dst of a block in this pass; None where dst is not random."""
        return (self._thread.seed, block) if self.config.use_rand else None


class PlanHook(ToMeHook):
    """Pre-hook of a transformer block: build the plan from the block's input, once for all layers that merge in it."""

    def __init__(self, config: ToMeConfig, grid_hook: GridHook, index: int) -> None:
        self.config = config
        self._grid_hook = grid_hook
        self._index = index
        self._thread = _PerThread()

    def __call__(self, block: nn.Layer, inputs: tuple) -> _Arguments | None:
        self._thread.plan = None
        if self.config.merge_mlp and is_chunked(block):
            raise ToMeConfigError(CHUNKED)
        metric, config = _first(block, inputs), self.config
        grid = self._grid_hook.grid(metric.shape[1])
        removed = count_removed(grid, config)
        if removed == 0:
            return None
        arguments = _Arguments(inputs)
        random_key = self._grid_hook.random_key(self._index)
        arguments.plan = match_tokens(metric, grid, removed, config.sx, config.sy, random_key)
        self._thread.plan = weakref.ref(arguments.plan)
        return arguments

    def current(self) -> MergePlan | None:
        """The plan of the block's call that is running in this thread; None where nothing merges."""
        reference = getattr(self._thread, "plan", None)
        if reference is None:
            return None
        plan = reference()
        if plan is None:
            raise ToMePassError(
                "the plan of this block is gone: a forward pre-hook registered after apply_tome() replaced the "
                "block's arguments, or the layer was called outside its block. Register such hooks before "
                "apply_tome()."
            )
        return plan

    def forget(self) -> None:
        """The block's call is over: from here on a direct call of one of its layers merges nothing."""
        self._thread.plan = None


class BlockHook(ToMeHook):
    """Base class of the hooks that follow the plan of one block."""

    def __init__(self, plan_hook: PlanHook) -> None:
        self._plan_hook = plan_hook


class FinishHook(BlockHook):
    """Post-hook of a transformer block: its call is over."""

    def __call__(self, block: nn.Layer, inputs: tuple, outputs: Any) -> None:
        self._plan_hook.forget()


class MergeHook(BlockHook):
    """Pre-hook of a layer that runs on merged tokens."""

    def __call__(self, layer: nn.Layer, inputs: tuple) -> tuple | None:
        plan = self._plan_hook.current()
        return None if plan is None else (merge(_first(layer, inputs), plan), *inputs[1:])


class UnmergeHook(BlockHook):
    """Post-hook of a layer that runs on merged tokens."""

    def __call__(self, layer: nn.Layer, inputs: tuple, outputs: paddle.Tensor) -> paddle.Tensor | None:
        plan = self._plan_hook.current()
        return None if plan is None else unmerge(outputs, plan)
