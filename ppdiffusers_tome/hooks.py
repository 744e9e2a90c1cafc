"""The hooks that merge around layers: what they do in a forward pass, and where its data lives.

The data of one pass flows one way. The pre-hook of a transformer, or of its patch embedding, reads the token grid. The
pre-hook of each block opens a call, whose plan is built from the block's input. The hooks of the block's layers merge
and unmerge by that plan.

The arguments of the block's forward own the call: the pre-hook returns them as a tuple that carries it, so the call
ends with the forward, even if that raises. Everything else holds weak references, one per thread. All state is kept in
the hooks, so a deep copy of a model has its own.
"""

import inspect
import secrets
import threading
import weakref
from typing import Any

import paddle
from paddle import nn

from .config import GRID, KV, SEEDS, ToMeConfig
from .errors import ToMeConfigError, ToMePassError
from .matching import MergePlan, match_cells, match_tokens
from .merging import merge, unmerge
from .models import is_chunked, shares_left, token_grid
from .positions import Grid, count_removed, is_zero

CHUNKED_FEED_FORWARD = (
    "merge_mlp=True cannot be combined with chunked feed-forward layers (enable_forward_chunking(), "
    "set_chunk_feed_forward()), which get the tokens in pieces: turn chunking off or leave merge_mlp=False."
)


class _PerThread(threading.local):
    """Thread-local attributes; a copy or a pickle starts empty."""

    def __reduce__(self) -> Any:
        return type(self), ()


class _Call:
    """One forward of a block."""

    plan: MergePlan | None = None  # None where nothing merges
    has_sizes: bool = False  # whether the self-attention has received the sizes of the merged tokens
    keys: tuple[paddle.Tensor, paddle.Tensor] | None = None  # an input of `to_k`, and the same merged, for `to_v`
    merged_projections: int = 0  # how many of `to_k` and `to_v` have run on merged tokens

    def __init__(self) -> None:
        self.inputs: dict[str, paddle.Tensor] = {}  # of the projections "query" and "key", with `proportional`


class _Arguments(tuple):
    """The positional arguments of a block's forward. They own its call."""

    call: _Call


def hidden_states(layer: nn.Layer, inputs: tuple) -> paddle.Tensor:
    """The first positional argument of a call; Paddle's hooks do not receive keyword arguments."""
    if not inputs:
        raise ToMePassError(
            f"{type(layer).__name__} was called with keyword arguments only: pass hidden_states by position."
        )
    return inputs[0]


class ToMeHook:
    """Base class of all hooks of this package, by which they are recognized for removal."""


class TimestepHook(ToMeHook):
    """Pre-hook of a denoiser's timestep projection: choose the ratio of the pass from the schedule in its config.

    The config of the pass is stored until the next one, as the grid is. Reading the timestep waits for the device once
    in a pass.
    """

    def __init__(self, config: ToMeConfig) -> None:
        self._config = config
        self._thread = _PerThread()

    def __call__(self, projection: nn.Layer, inputs: tuple) -> None:
        timesteps = hidden_states(projection, inputs)
        if not paddle.in_dynamic_mode():
            raise ToMePassError(
                "a ratio schedule reads timesteps, which a program that is traced does not know: "
                "export_pipeline() writes a program for each ratio."
            )
        configs = [*{self._config.at(share) for share in shares_left(timesteps)}]
        if len(configs) > 1:
            raise ToMePassError(
                f"{self._config.describe()}: the timesteps of this batch, {timesteps.tolist()!r:.200}, have "
                "different ratios: pass those of one ratio, or a constant ratio."
            )
        self._thread.config = configs[0]

    def config(self) -> ToMeConfig:
        """The config of the current pass in this thread, with its ratio."""
        config: ToMeConfig | None = getattr(self._thread, "config", None)
        if config is None:
            raise ToMePassError(
                "a block with a ratio schedule got tokens but no timestep: call it through its "
                "model, or remove_tome() first."
            )
        return config


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
        # Beyond all seeds, so that its positions are not kept.
        self._thread.seed = SEEDS + secrets.randbits(64) if is_unseeded else self.config.seed
        self._thread.grid = token_grid(grid_layer, hidden_states(grid_layer, inputs))

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

    def __init__(
        self, config: ToMeConfig, grid_hook: GridHook, timestep_hook: TimestepHook | None, index: int
    ) -> None:
        super().__init__(config)
        self._grid_hook = grid_hook
        self._timestep_hook = timestep_hook  # None: the ratio is constant
        self._index = index
        self._thread = _PerThread()

    def __call__(self, block: nn.Layer, inputs: tuple) -> _Arguments:
        if self.config.merge_mlp and is_chunked(block):
            self.close_call()
            raise ToMeConfigError(CHUNKED_FEED_FORWARD)
        arguments = _Arguments(inputs)
        arguments.call = _Call()
        self._thread.call, self._thread.block = weakref.ref(arguments.call), weakref.ref(block)
        return arguments

    def build_plan(self, metric: paddle.Tensor) -> None:
        """Choose the tokens that merge in the current call of this thread, from the block's input [B, N, C]."""
        call = self._current_call()
        if call is None:
            return
        grid = self._grid_hook.grid(metric.shape[1])
        config = self.config if self._timestep_hook is None else self._timestep_hook.config()
        removed = count_removed(grid, config)
        if not is_zero(removed):
            random_key = self._grid_hook.random_key(self._index)
            if config.match == GRID:
                call.plan = match_cells(metric, grid, config.sx, config.sy, random_key)
            else:
                call.plan = match_tokens(metric, grid, removed, config.sx, config.sy, random_key, config.window)

    def plan(self) -> MergePlan | None:
        """The plan of the current call in this thread; None where nothing merges."""
        call = self._current_call()
        return None if call is None else call.plan

    def merge(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """Merge tokens by the plan of the current call in this thread; unchanged where nothing merges."""
        plan = self.plan()
        return tokens if plan is None else merge(tokens, plan, self.config.blend)

    def merge_for_keys(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """The same for a projection of keys or values; the second one reuses what the first has computed."""
        call = self._current_call()
        if call is None or call.plan is None:
            return tokens
        call.merged_projections += 1
        call.inputs.setdefault("key", tokens)
        before, call.keys = call.keys, None
        if before is not None and before[0] is tokens:
            return before[1]
        merged = self.merge(tokens)
        call.keys = tokens, merged
        return merged

    def note_sizes(self) -> None:
        """Record that the block's self-attention has received the sizes of the merged tokens."""
        call = self._current_call()  # no walrus, which Paddle 2.6 cannot trace
        if call is not None:
            call.has_sizes = True

    def note_input(self, role: str, tokens: paddle.Tensor) -> None:
        """Record the input of the projection of the block's self-attention to "query" or "key"."""
        call = self._current_call()  # no walrus, which Paddle 2.6 cannot trace
        if call is not None:
            call.inputs.setdefault(role, tokens)  # the first is the one before `KeyValueHook`

    def check_attention(self, attention: nn.Layer, tokens: paddle.Tensor | None) -> None:
        """Raise ToMePassError if a self-attention has computed without the merged keys, or without their sizes.

        Args:
            attention: the layer.
            tokens: what it was given; None if it was called by keyword.
        """
        call = self._current_call()
        if call is None or call.plan is None:
            return
        if self.config.merge_attn == KV and call.merged_projections != 2:
            raise ToMePassError(
                f"merge_attn={KV!r}: {type(attention.processor).__name__} has not called the layers to_k and to_v "
                "that apply_tome() found: call apply_tome() again after replacing them (as LoRA may do), do not fuse "
                "projections, or use merge_attn=True."
            )
        if not self.config.proportional:
            return
        name, remedy = type(attention.processor).__name__, "set another attention processor, or use"
        if not call.has_sizes:
            raise ToMePassError(
                f"proportional=True: {name} has neither called prepare_attention_mask() nor, in fused attention, "
                "the projections that apply_tome() found, so merged tokens cannot be weighted by their size: call "
                f"apply_tome() again if you have replaced layers, {remedy} proportional=False."
            )
        keys, queries = call.inputs.get("key"), call.inputs.get("query")
        is_own = keys is None or tokens is None or keys is tokens or keys is queries
        if not is_own:
            raise ToMePassError(
                f"proportional=True: {name} attends to other tokens than its own, whose sizes are not known: "
                f"{remedy} proportional=False."
            )

    def close_call(self) -> None:
        """End the call: from here on a direct call of one of the block's layers merges nothing."""
        self._thread.call = None

    def _current_call(self) -> _Call | None:
        reference = getattr(self._thread, "call", None)
        if reference is None:
            return None
        call = reference()
        if call is None and self._is_running():
            raise ToMePassError(
                "the merge plan of this block no longer exists: a forward pre-hook registered after apply_tome() "
                "replaced the block's arguments. Register such hooks before apply_tome()."
            )
        if call is None:  # the block raised, and no post-hook has closed its call
            self.close_call()
        return call

    @paddle.jit.not_to_static
    def _is_running(self) -> bool:
        """Whether the block is on this thread's stack; slow, for calls that have lost their plan."""
        block = self._thread.block()
        return any(frame.frame.f_locals.get("self", self) is block for frame in inspect.stack(0))


class BlockHook(ToMeHook):
    """Base class of the hooks that share the call of one block."""

    def __init__(self, call_hook: CallHook) -> None:
        self._call_hook = call_hook


class PlanHook(BlockHook):
    """Pre-hook of the layer that gets the block's input by position: build the plan that all its layers share.

    That layer is the block itself, or, in SD3, whose blocks are called with keyword arguments only, its first norm.
    """

    def __call__(self, layer: nn.Layer, inputs: tuple) -> None:
        self._call_hook.build_plan(hidden_states(layer, inputs))


class FinishHook(BlockHook):
    """Post-hook of a transformer block: end the call."""

    def __call__(self, block: nn.Layer, inputs: tuple, outputs: Any) -> None:
        self._call_hook.close_call()


class MergeHook(BlockHook):
    """Pre-hook of a layer that runs on merged tokens: merge its input."""

    def __call__(self, layer: nn.Layer, inputs: tuple) -> tuple:
        return self._call_hook.merge(hidden_states(layer, inputs)), *inputs[1:]


class MergeOutputHook(BlockHook):
    """Post-hook of a layer whose output goes to one that is called by keyword only: merge its first output."""

    def __call__(self, layer: nn.Layer, inputs: tuple, outputs: tuple) -> tuple:
        return self._call_hook.merge(outputs[0]), *outputs[1:]


class UnmergeHook(BlockHook):
    """Post-hook of a layer that runs on merged tokens: unmerge its output, of joint attention the first (image)."""

    def __call__(self, layer: nn.Layer, inputs: tuple, outputs: Any) -> Any:
        plan = self._call_hook.plan()
        if plan is None:
            return None
        return (unmerge(outputs[0], plan), *outputs[1:]) if isinstance(outputs, tuple) else unmerge(outputs, plan)
