"""What merges in a forward pass: wraps around the `forward` of layers, and where the data of a pass lives.

A layer that takes part has one `Wrap`. That of a transformer's first layer reads the token grid; that of a block
builds the plan from the block's input, for as long as the block runs; those of the layers inside the block merge and
unmerge by this plan. What a pass computes is stored per thread. All other state is in the wraps, which are attributes
of their layers, so a deep copy of a model has its own.
"""

import secrets
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import paddle
from paddle import nn

from .config import GRID, ToMeConfig
from .errors import ToMeConfigError, ToMePassError
from .matching import plan_cells, plan_pairs, plan_windows
from .models import BlockFacts, is_chunked, token_grid
from .plans import MergePlan, join_frames
from .positions import (
    Grid,
    constant_cells,
    constant_positions,
    constant_windows,
    tokens_kept,
)

Value = TypeVar("Value")
ATTRIBUTE = "_tome"  # of a layer: its wrap
MAX_CACHED = 8  # values of a `Cache`; the positions of a grid of 64×64 tokens take 0.2 MB
CHUNKED_FEED_FORWARD = (
    "merge_mlp=True cannot be combined with chunked feed-forward layers (enable_forward_chunking(), "
    "set_chunk_feed_forward()), which get the tokens in pieces: turn chunking off or leave merge_mlp=False."
)


class _PerThread(threading.local):
    """Thread-local attributes; a copy or a pickle starts empty."""

    def __reduce__(self) -> Any:
        return type(self), ()


class _Pass(_PerThread):
    block: nn.Layer | None = None  # the one that runs
    plan: MergePlan | None = None  # of that block; None if nothing merges
    is_for_gpu: bool | None = None  # whether what runs becomes a program for GPUs; None: as its device suggests


_current = _Pass()


@contextmanager
def merging_for_gpu(is_for_gpu: bool = True) -> Iterator[None]:
    """Merge by the operations that suit a GPU in this thread, or a CPU, whatever its device.

    Programs may run on another device later. Leaving the context restores what was chosen before.
    """
    before, _current.is_for_gpu = _current.is_for_gpu, is_for_gpu
    try:
        yield
    finally:
        _current.is_for_gpu = before


class Cache:
    """The values that a wrap used last, at most `MAX_CACHED`; a copy or a pickle of the wrap starts empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Hashable, Any] = {}  # the one that was used last is last

    def __reduce__(self) -> Any:
        return type(self), ()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """The value of a key, which `build` returns if it is not there."""
        with self._lock:
            value: Value = self._values.pop(key) if key in self._values else build()
            self._values[key] = value
            if len(self._values) > MAX_CACHED:
                del self._values[next(iter(self._values))]
        return value


def is_for_gpu() -> bool:
    """Whether what runs in this thread becomes a program for GPUs: see `merging_for_gpu`."""
    return bool(_current.is_for_gpu)


def current_plan() -> MergePlan | None:
    """The plan of the block that runs in this thread; None outside blocks, and where nothing merges."""
    return _current.plan


class Wrap:
    """Runs in place of a layer's `forward`. This one only passes the call on: at ratio 0 it stores the config.

    Args:
        config: the settings of the denoiser; None for a wrap that was removed but that another library still calls.
    """

    below: Callable[..., Any] | None = None  # the `forward` of another library that was there before

    def __init__(self, config: ToMeConfig | None) -> None:
        self.config = config

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        return self.forward(layer, *args, **kwargs)

    def forward(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the layer without this wrap."""
        if self.below is not None:
            return self.below(*args, **kwargs)
        return type(layer).forward(layer, *args, **kwargs)


@paddle.jit.not_to_static  # a program records what the wrap computes; Paddle would translate its Python code
def _forward(layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
    wrap = wrap_of(layer) or Wrap(None)  # None if another library has put this back after the wrap was removed
    return wrap(layer, *args, **kwargs)


def wrap_of(layer: nn.Layer) -> Wrap | None:
    """The wrap of a layer; None if it has none."""
    wrap: Wrap | None = layer.__dict__.get(ATTRIBUTE)
    return wrap


def is_outermost(layer: nn.Layer) -> bool:
    """Whether no other library has replaced the `forward` of a layer since its wrap was installed."""
    return getattr(layer.__dict__.get("forward"), "__func__", None) is _forward


def install(layer: nn.Layer, wrap: Wrap) -> None:
    """Put a wrap in place of the layer's `forward`. It calls the one that was there, also one of another library."""
    removed = wrap_of(layer)
    if removed is None:
        wrap.below = layer.__dict__.get("forward")
        layer.forward = MethodType(_forward, layer)
    else:  # another library's `forward` still calls it
        wrap.below = removed.below
    setattr(layer, ATTRIBUTE, wrap)


def _is_lost(layer: nn.Layer, wrap: Wrap) -> bool:
    """Whether a layer's `forward` is again one from before its wrap, which another library has put back."""
    forward = layer.__dict__.get("forward")
    return forward in (None, wrap.below) or getattr(forward, "__func__", None) is type(layer).forward


def remove(layer: nn.Layer) -> None:
    """Remove the layer's wrap, if it has one; under another library's `forward`, one that does nothing remains."""
    wrap = wrap_of(layer)
    if wrap is None:
        return
    if _is_lost(layer, wrap):
        delattr(layer, ATTRIBUTE)
    elif is_outermost(layer):
        delattr(layer, ATTRIBUTE)
        delattr(layer, "forward")
        if wrap.below is not None:
            layer.forward = wrap.below
    else:
        idle = Wrap(None)
        idle.below = wrap.below
        setattr(layer, ATTRIBUTE, idle)


class InnerWrap(Wrap):
    """Wrap of a layer inside a block. It merges by the plan of the block."""

    block: nn.Layer | None = None  # set when the wrap is installed in a block

    def plan(self) -> MergePlan | None:
        """The plan of the block; None outside it, and where nothing merges.

        Raises:
            ToMePassError: another library's `forward` of the block has left out the wrap of the block.
        """
        if self.block is not None and self.block is not _current.block and not is_outermost(self.block):
            raise ToMePassError(
                f"the layers of a {type(self.block).__name__} run without its merging, because another library has "
                "replaced the forward of the block since apply_tome(), or put back an earlier one: call apply_tome() "
                "again afterwards, or remove_tome() first."
            )
        return _current.plan


def _first(args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))


class GridWrap(Wrap):
    """Wrap of a transformer's first layer: read the token grid, and choose a seed if the config has none.

    It stores three integers until the next pass, because gradient checkpointing runs single blocks again after the
    pass.

    Args:
        config: the settings of the denoiser.
        facts: the facts of the transformer's blocks.
    """

    def __init__(self, config: ToMeConfig, facts: BlockFacts) -> None:
        super().__init__(config)
        self._facts = facts
        self._use_rand, self._seed = config.use_rand, config.seed
        self._thread = _PerThread()

    @property
    def changes_dst(self) -> bool:
        """Whether each pass has other dst, because they are random and the config has no seed."""
        return self._use_rand and self._seed is None

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        self._thread.seed = secrets.randbits(64) if self.changes_dst else self._seed
        before = getattr(self._thread, "grid", None)
        self._thread.grid = token_grid(self._facts, layer, _first(args, kwargs), before)
        return self.forward(layer, *args, **kwargs)

    def grid(self, tokens: int | None = None) -> Grid:
        """The grid of the current pass in this thread; raises unless it, or each frame, has `tokens`, None for any."""
        grid: Grid | None = getattr(self._thread, "grid", None)
        if grid is None:
            reason = "no feature map was seen"
        elif tokens in (None, grid.tokens) or (self._facts.has_frames and tokens % grid.tokens == 0):
            return grid  # frames of a video come one after another
        else:
            reason = f"the feature map was {grid.h}×{grid.w}"
        got = "tokens" if tokens is None else f"{tokens} tokens"
        raise ToMePassError(f"a block got {got} but {reason}: call it through its model, or remove_tome() first.")

    def random_key(self, block: int) -> tuple[int, ...] | None:
        """The key of a block's random dst in this pass; None if dst is not random."""
        return (self._thread.seed, block) if self._use_rand else None


class BlockWrap(Wrap):
    """Wrap of a transformer block: build the plan that the layers inside it share.

    Args:
        config: the settings of the denoiser.
        grid: the wrap that sees the block's token grid.
        index: of the block in its denoiser.
        is_whole: whether attention gets tokens that are merged already, so that all merge alike.
        text_is_first: whether the block gets text and image in one sequence [B, T + N, C].
    """

    config: ToMeConfig

    def __init__(
        self,
        config: ToMeConfig,
        grid: GridWrap,
        index: int,
        is_whole: bool = False,
        text_is_first: bool = False,
    ) -> None:
        super().__init__(config)
        self.grid = grid
        self.index = index
        self._constants = Cache()
        self._is_whole = is_whole
        self._text_is_first = text_is_first

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.config.merge_mlp and is_chunked(layer):
            raise ToMeConfigError(CHUNKED_FEED_FORWARD)
        _current.block, _current.plan = layer, self.build_plan(hidden_states)
        try:
            return self.forward(layer, hidden_states, *args, **kwargs)
        finally:
            _current.block, _current.plan = None, None

    def build_plan(self, metric: paddle.Tensor) -> MergePlan | None:
        """Choose which tokens merge, from the block's input [B, N, C], in each frame [B, F·N, C]; None if none do."""
        if self._text_is_first:
            metric = metric[:, -self.grid.grid().tokens :]
        tokens = metric.shape[1]
        grid = self.grid.grid(tokens)
        config = self.config.symmetric() if self._is_whole else self.config
        removed, removed_keys = (grid.tokens - kept for kept in tokens_kept(grid, config))
        if not removed_keys:
            return None
        if (frames := max(1, tokens // grid.tokens)) > 1:
            metric = metric.reshape([-1, grid.tokens, metric.shape[2]])
        shape, window = (grid, config.sx, config.sy), config.window
        if config.match == GRID:
            plan = plan_cells(metric, self._constant(constant_cells, *shape))
        elif _suits_gpu(metric) and (windows := self._constant(constant_windows, *shape, window=window)) is not None:
            plan = plan_windows(metric, windows, removed, removed_keys)
        else:
            positions = self._constant(constant_positions, *shape, window=window)
            plan = plan_pairs(metric, positions, removed, removed_keys)
        return join_frames(plan, frames)

    def _constant(self, make: Callable[..., Value], grid: Grid, *shape: int, **settings: int | None) -> Value:
        """The constants of a grid, cached by device unless each pass has its own; a traced program gets its own."""

        def build() -> Value:
            return make(grid, *shape, random_key=self.grid.random_key(self.index), **settings)

        if self.grid.changes_dst or not paddle.in_dynamic_mode():
            return build()
        return self._constants.get((paddle.get_device(), make, grid), build)


def _suits_gpu(metric: paddle.Tensor) -> bool:
    """Whether to merge by the operations that suit a GPU: as `merging_for_gpu` says, or the tokens are on one.

    Tokens that are traced are nowhere yet. The current device decides, so that a program equals eager mode there.
    """
    if _current.is_for_gpu is not None:
        return _current.is_for_gpu
    if paddle.in_dynamic_mode():
        return bool(metric.place.is_gpu_place())
    return paddle.get_device().startswith("gpu")
