"""What merges in a forward pass: wraps around the `forward` of layers, and where the data of a pass lives.

A layer that takes part has one `Wrap`. That of a transformer's first layer reads the token grid; that of a block
builds the plan from the block's input, for as long as the block runs; those of the layers inside the block merge and
unmerge by this plan. What a pass computes is stored per thread. All other state is in the wraps, which are attributes
of their layers, so a deep copy of a model has its own.
"""

import secrets
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import paddle
from paddle import nn

from .config import GRID, SEEDS, ToMeConfig
from .errors import ToMeConfigError, ToMePassError
from .matching import MergePlan, join_frames, match_cells, match_tokens
from .models import has_frames, is_chunked, token_grid
from .positions import Grid, tokens_kept

ATTRIBUTE = "_tome"  # of a layer: its wrap
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


_current = _Pass()


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
        """What the layer computes without this wrap."""
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
    """Let a wrap run in place of the layer's `forward`, around another library's that is there."""
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
    """Of a layer inside a block, which merges by the plan of the block."""

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
    """Of a transformer's first layer: read the token grid, and choose a seed if the config has none.

    It stores three integers until the next pass, because gradient checkpointing runs single blocks again after the
    pass.
    """

    def __init__(self, config: ToMeConfig) -> None:
        super().__init__(config)
        self._use_rand, self._seed = config.use_rand, config.seed
        self._thread = _PerThread()

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        # Beyond all seeds, so that its positions are not cached.
        is_unseeded = self._use_rand and self._seed is None
        self._thread.seed = SEEDS + secrets.randbits(64) if is_unseeded else self._seed
        before = getattr(self._thread, "grid", None)
        self._thread.grid, self._thread.has_frames = token_grid(layer, _first(args, kwargs), before), has_frames(layer)
        return self.forward(layer, *args, **kwargs)

    def grid(self, tokens: int | None = None) -> Grid:
        """The grid of the current pass in this thread; raises unless it, or each frame, has `tokens`, None for any."""
        grid: Grid | None = getattr(self._thread, "grid", None)
        if grid is None:
            reason = "no feature map was seen"
        elif tokens in (None, grid.tokens) or (self._thread.has_frames and tokens % grid.tokens == 0):
            return grid  # frames of a video come one after another
        else:
            reason = f"the feature map was {grid.h}×{grid.w}"
        got = "tokens" if tokens is None else f"{tokens} tokens"
        raise ToMePassError(f"a block got {got} but {reason}: call it through its model, or remove_tome() first.")

    def random_key(self, block: int) -> tuple[int, ...] | None:
        """The key of a block's random dst in this pass; None if dst is not random."""
        return (self._thread.seed, block) if self._use_rand else None


class BlockWrap(Wrap):
    """Of a transformer block: build the plan that the layers inside it share.

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
        config = self.config.equally() if self._is_whole else self.config
        removed, removed_keys = (grid.tokens - kept for kept in tokens_kept(grid, config))
        if not removed_keys:
            return None
        if (frames := max(1, tokens // grid.tokens)) > 1:
            metric = metric.reshape([-1, grid.tokens, metric.shape[2]])
        random_key = self.grid.random_key(self.index)
        if config.match == GRID:
            plan = match_cells(metric, grid, config.sx, config.sy, random_key)
        else:
            plan = match_tokens(metric, grid, removed, config.sx, config.sy, random_key, config.window, removed_keys)
        return join_frames(plan, frames)
