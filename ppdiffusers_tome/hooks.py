"""The hooks that merge: what they do in a forward pass, and where its data lives.

The data of one pass flows one way. The pre-hook of a transformer, or of its patch embedding, reads the token grid. The
pre-hook of each block opens a call, whose plan is built from the block's input. The hooks of the block's layers merge
and unmerge by that plan.

The arguments of the block's forward own the call: the pre-hook returns them as a tuple that carries it, so the call
ends with the forward, even if that raises. Everything else holds weak references, one per thread. All state is kept in
the hooks, so a deep copy of a model has its own.
"""

import math
import threading
import weakref
from typing import Any

import numpy as np
import paddle
from paddle import nn

from .config import ToMeConfig
from .errors import ToMeConfigError, ToMePassError
from .matching import MergePlan, cast, match_tokens
from .merging import merge, unmerge
from .models import is_chunked, token_grid
from .positions import Grid, count_removed, is_zero

CHUNKED_FEED_FORWARD = (
    "merge_mlp=True cannot be combined with chunked feed-forward layers (enable_forward_chunking(), "
    "set_chunk_feed_forward()), which get the tokens in pieces: turn chunking off or leave merge_mlp=False."
)
SIZE_CHANNELS = 8  # added to each head of a joint attention: fused kernels need a multiple of 8


class _PerThread(threading.local):
    """Thread-local attributes; a copy or a pickle starts empty."""

    def __reduce__(self) -> Any:
        return type(self), ()


class _Call:
    """One forward of a block."""

    plan: MergePlan | None = None  # None where nothing merges
    has_sizes: bool = False  # whether the self-attention has received the sizes of the merged tokens


class _Arguments(tuple):
    """The positional arguments of a block's forward. They own its call."""

    call: _Call


def _hidden_states(layer: nn.Layer, inputs: tuple) -> paddle.Tensor:
    """The first positional argument of a call; Paddle's hooks do not receive keyword arguments."""
    if not inputs:
        raise ToMePassError(
            f"{type(layer).__name__} was called with keyword arguments only: pass hidden_states by position."
        )
    return inputs[0]


class ToMeHook:
    """Base class of all hooks of this package, by which they are recognized for removal."""


class GridHook(ToMeHook):
    """Pre-hook of a transformer or its patch embedding: read the token grid, and draw a seed if the config has none.

    It stores three integers until the next pass, because gradient checkpointing runs single blocks again after the
    pass. In an export with dynamic height and width, two of them are tensors of the exported program.
    """

    def __init__(self, config: ToMeConfig) -> None:
        self.config = config
        self._thread = _PerThread()

    def __call__(self, grid_layer: nn.Layer, inputs: tuple) -> None:
        is_unseeded = self.config.use_rand and self.config.seed is None
        self._thread.seed = np.random.SeedSequence().entropy if is_unseeded else self.config.seed
        self._thread.grid = token_grid(grid_layer, _hidden_states(grid_layer, inputs))

    def grid(self, tokens: int) -> Grid:
        """The grid of the current pass in this thread; raises unless it has `tokens` tokens, -1 if it is dynamic."""
        grid: Grid | None = getattr(self._thread, "grid", None)
        if grid is not None and grid.is_dynamic and tokens != -1:  # left over from an earlier export
            grid = None
        if grid is None or (not grid.is_dynamic and grid.tokens != tokens):
            reason = "no feature map was seen" if grid is None else f"the feature map was {grid.h}×{grid.w}"
            raise ToMePassError(
                f"a block got {tokens} tokens but {reason}: call it through its model, or remove_tome() first."
            )
        return grid

    def random_key(self, block: int) -> tuple[int, ...] | None:
        """The key of a block's random dst in this pass; None if dst is not random."""
        return (self._thread.seed, block) if self.config.use_rand else None


class ConfigHook(ToMeHook):
    """Pre-hook of a transformer block that only stores its config: at ratio 0 the only hook."""

    def __init__(self, config: ToMeConfig) -> None:
        self.config = config

    def __call__(self, block: nn.Layer, inputs: tuple) -> Any:
        return None


class CallHook(ConfigHook):
    """Pre-hook of a transformer block: open the call that the block's hooks share."""

    def __init__(self, config: ToMeConfig, grid_hook: GridHook, index: int) -> None:
        super().__init__(config)
        self._grid_hook = grid_hook
        self._index = index
        self._thread = _PerThread()

    def __call__(self, block: nn.Layer, inputs: tuple) -> _Arguments:
        if self.config.merge_mlp and is_chunked(block):
            self.close_call()
            raise ToMeConfigError(CHUNKED_FEED_FORWARD)
        arguments = _Arguments(inputs)
        arguments.call = _Call()
        self._thread.call = weakref.ref(arguments.call)
        return arguments

    def build_plan(self, metric: paddle.Tensor) -> None:
        """Choose the tokens that merge in the current call of this thread, from the block's input [B, N, C]."""
        call = self._current_call()
        if call is None:
            return
        grid = self._grid_hook.grid(metric.shape[1])
        removed = count_removed(grid, self.config)
        if not is_zero(removed):
            random_key = self._grid_hook.random_key(self._index)
            config = self.config
            call.plan = match_tokens(metric, grid, removed, config.sx, config.sy, random_key, config.window)

    def plan(self) -> MergePlan | None:
        """The plan of the current call in this thread; None where nothing merges."""
        call = self._current_call()
        return None if call is None else call.plan

    def note_sizes(self) -> None:
        """Record that the block's self-attention has received the sizes of the merged tokens."""
        call = self._current_call()
        assert call is not None
        call.has_sizes = True

    def require_sizes(self, attention: nn.Layer) -> None:
        """Raise ToMePassError if a self-attention over merged tokens has not received their sizes."""
        call = self._current_call()
        if call is not None and call.plan is not None and not call.has_sizes:
            raise ToMePassError(
                f"proportional=True: {type(attention.processor).__name__} does not call prepare_attention_mask(), so "
                "merged tokens cannot be weighted by their size: set another attention processor, or use "
                "proportional=False."
            )

    def close_call(self) -> None:
        """End the call: from here on a direct call of one of the block's layers merges nothing."""
        self._thread.call = None

    def _current_call(self) -> _Call | None:
        reference = getattr(self._thread, "call", None)
        if reference is None:
            return None
        call = reference()
        if call is None:
            raise ToMePassError(
                "the merge plan of this block no longer exists: a forward pre-hook registered after apply_tome() "
                "replaced the block's arguments, or the layer was called outside its block. Register such hooks "
                "before apply_tome()."
            )
        return call


class BlockHook(ToMeHook):
    """Base class of the hooks that share the call of one block."""

    def __init__(self, call_hook: CallHook) -> None:
        self._call_hook = call_hook


class PlanHook(BlockHook):
    """Pre-hook of the layer that gets the block's input by position: build the plan that all its layers share.

    That layer is the block itself, or, in SD3, whose blocks are called with keyword arguments only, its first norm.
    """

    def __call__(self, layer: nn.Layer, inputs: tuple) -> None:
        self._call_hook.build_plan(_hidden_states(layer, inputs))


class FinishHook(BlockHook):
    """Post-hook of a transformer block: end the call."""

    def __call__(self, block: nn.Layer, inputs: tuple, outputs: Any) -> None:
        self._call_hook.close_call()


class MergeHook(BlockHook):
    """Pre-hook of a layer that runs on merged tokens: merge its input."""

    def __call__(self, layer: nn.Layer, inputs: tuple) -> tuple | None:
        plan = self._call_hook.plan()
        return None if plan is None else (merge(_hidden_states(layer, inputs), plan), *inputs[1:])


class MergeOutputHook(BlockHook):
    """Post-hook of a layer whose output goes to one that is called by keyword only: merge its first output."""

    def __call__(self, layer: nn.Layer, inputs: tuple, outputs: tuple) -> tuple | None:
        plan = self._call_hook.plan()
        return None if plan is None else (merge(outputs[0], plan), *outputs[1:])


class UnmergeHook(BlockHook):
    """Post-hook of a layer that runs on merged tokens: unmerge its output, of joint attention the first (image).

    Args:
        call_hook: that of the layer's block.
        requires_sizes: whether the layer's `MaskHook` must have added the sizes of the merged tokens.
    """

    def __init__(self, call_hook: CallHook, requires_sizes: bool = False) -> None:
        super().__init__(call_hook)
        self._requires_sizes = requires_sizes

    def __call__(self, layer: nn.Layer, inputs: tuple, outputs: Any) -> Any:
        plan = self._call_hook.plan()
        if plan is None:
            return None
        if self._requires_sizes:
            self._call_hook.require_sizes(layer)
        return (unmerge(outputs[0], plan), *outputs[1:]) if isinstance(outputs, tuple) else unmerge(outputs, plan)


class MaskHook(BlockHook):
    """Wraps `prepare_attention_mask` of an attention layer: weights merged tokens, raises on a mask over them.

    Masks are keyword arguments, which Paddle's hooks do not receive, but every attention processor passes them to
    this method and adds the result to the scores.

    Args:
        call_hook: that of the layer's block.
        attention: the layer.
        is_proportional: whether the layer's keys are the merged tokens and are weighted by their sizes.
    """

    def __init__(self, call_hook: CallHook, attention: nn.Layer, is_proportional: bool) -> None:
        super().__init__(call_hook)
        self._attention = attention
        self._is_proportional = is_proportional

    def __call__(
        self,
        attention_mask: paddle.Tensor | None,
        target_length: int,
        batch_size: int,
        out_dim: int = 4,
        **kwargs: Any,
    ) -> Any:
        plan = self._call_hook.plan()
        if plan is not None and attention_mask is not None and attention_mask.shape[-1] != target_length:
            raise ToMePassError(
                f"attention_mask has shape {list(attention_mask.shape)} but attention sees {target_length} of "
                f"{plan.tokens} tokens because the others are merged, and a mean of masked and unmasked tokens "
                "has no mask: call without attention_mask, or remove_tome() first."
            )
        attention = self._attention
        mask = type(attention).prepare_attention_mask(
            attention, attention_mask, target_length, batch_size, out_dim, **kwargs
        )
        if plan is None or not self._is_proportional:
            return mask
        if type(attention.processor).__name__.startswith("CrossFrame"):
            raise ToMePassError(
                f"proportional=True: {type(attention.processor).__name__} attends to the tokens of another frame, "
                "which merge differently: use proportional=False."
            )
        self._call_hook.note_sizes()
        sizes = cast(plan.log_sizes(), attention.to_k.weight.dtype)
        if out_dim == 3:  # attention slicing: [B·heads, 1, keys]
            sizes = sizes.repeat_interleave(attention.heads, axis=0).unsqueeze(1)
        else:  # [B, 1, 1, keys]
            sizes = sizes.unsqueeze([1, 2])
        return sizes if mask is None else mask + sizes


class SizeChannelHook(BlockHook):
    """Post-hook of a projection of a joint attention: add channels to each head that weight merged tokens.

    A joint attention has no mask. In the first of the added channels, queries hold a constant and the keys of merged
    image tokens the logarithm of their size; everything else is 0. The product of query and key is then the score
    plus this logarithm. `DropChannelHook` removes the channels from the output.

    Args:
        call_hook: that of the attention's block.
        attention: the joint attention.
        role: "query", "key" (of image tokens), or "other" (values, and the keys of text tokens, whose size is 1).
    """

    def __init__(self, call_hook: CallHook, attention: nn.Layer, role: str) -> None:
        super().__init__(call_hook)
        self._heads, self._role = attention.heads, role

    def __call__(self, projection: nn.Layer, inputs: tuple, output: paddle.Tensor) -> paddle.Tensor | None:
        plan = self._call_hook.plan()
        if plan is None:
            return None
        heads = output.reshape([0, 0, self._heads, -1])  # [B, N, heads, C]
        width = heads.shape[-1] + SIZE_CHANNELS
        extra = paddle.zeros_like(heads[..., :1])
        if self._role == "query":  # the attention divides by the root of the new width
            heads = heads * math.sqrt(width / heads.shape[-1])
            extra = extra + math.sqrt(width)
        elif self._role == "key":
            extra = extra + cast(plan.log_sizes(), output.dtype).unsqueeze([2, 3])
        zeros = paddle.zeros_like(heads[..., : SIZE_CHANNELS - 1])
        return paddle.concat([heads, extra, zeros], axis=-1).reshape([0, 0, self._heads * width])


class DropChannelHook(BlockHook):
    """Pre-hook of an output projection of a joint attention: remove the channels of `SizeChannelHook`."""

    def __init__(self, call_hook: CallHook, attention: nn.Layer) -> None:
        super().__init__(call_hook)
        self._heads = attention.heads

    def __call__(self, projection: nn.Layer, inputs: tuple) -> tuple | None:
        if self._call_hook.plan() is None:
            return None
        heads = _hidden_states(projection, inputs).reshape([0, 0, self._heads, -1])[..., :-SIZE_CHANNELS]
        return heads.reshape([0, 0, -1]), *inputs[1:]
