"""What a forward pass computes: the token grid, and the plan of the block that runs.

The wrap of a transformer's first layer reads the token grid. That of a block makes the plan from the block's input,
for as long as the block runs; wraps of the layers inside the block merge and unmerge by this plan. What a pass
computes is stored per thread. All other state is in the wraps.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import paddle
from paddle import nn

from ..errors import ToMeConfigError, ToMePassError
from ..families.grids import token_grid
from ..families.models import gets_timestep, is_chunked, use_old_recompute
from ..families.table import FIRST, Family
from ..grid import Grid
from ..methods.method import Form, Kept
from ..methods.plan import MergePlan, join_frames
from ..methods.turns import FIRST_TURN, Turn, turn_at, turn_table
from .forward import Wrap, is_outermost
from .placement import Placement

Value = TypeVar("Value")
_THROUGH_ITS_MODEL = "call it through its model, or remove_tome() first"
MAX_CACHED = 8  # values of a `Cache`; the constants of a grid of 64×64 tokens take 0.2 MB
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
    use_gpu_form: bool | None = None  # None: the form that suits the place of the tokens


_current = _Pass()


@contextmanager
def gpu_form(use: bool) -> Iterator[None]:
    """Merge in this thread in the form that suits a GPU, or in the other one, wherever the tokens are.

    Programs may run on another device later. Leaving the context restores what was chosen before.
    """
    before, _current.use_gpu_form = _current.use_gpu_form, use
    try:
        yield
    finally:
        _current.use_gpu_form = before


def uses_gpu_form(tensor: paddle.Tensor) -> bool:
    """Whether what is computed from a tensor merges in the form for GPUs: as `gpu_form` says, or the tensor is on one.

    A tensor that is traced is nowhere yet. The current device decides, so that a program equals eager mode there.
    """
    if _current.use_gpu_form is not None:
        return _current.use_gpu_form
    if paddle.in_dynamic_mode():
        return bool(tensor.place.is_gpu_place())
    return paddle.get_device().startswith("gpu")


def is_for_gpu() -> bool:
    """Whether what runs becomes a program for GPUs, or is compared with one."""
    return _current.use_gpu_form is True


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


def current_plan() -> MergePlan | None:
    """The plan of the block that runs in this thread; None outside blocks, and where nothing merges."""
    return _current.plan


class PlacedWrap(Wrap):
    """Wrap of a transformer block: it stores what merges there. At ratio 0 it is the only wrap, and nothing merges."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement


class InnerWrap(Wrap):
    """Wrap of a layer inside a block. It merges by the plan of the block."""

    block: nn.Layer | None = None  # set when the wrap is installed in a block

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

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


class GridOfPass(NamedTuple):
    """What the blocks of a transformer need to know of a pass."""

    grid: Grid  # of its tokens
    timestep: "TimestepOfPass | None"  # None: it is not read


class GridsOfInputs:
    """The pass that each input of a block belongs to, while the input exists; a copy or a pickle starts empty.

    Gradient checkpointing runs a block again after its pass, with the input from before, perhaps as another tensor in
    the same memory, and other passes may have come in between.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[weakref.ref, GridOfPass]] = {}

    def __reduce__(self) -> Any:
        return type(self), ()

    def get(self, x: paddle.Tensor, current: GridOfPass) -> GridOfPass:
        """The pass in which the block first got x: the current one if that is now."""
        if not paddle.in_dynamic_mode():
            return current
        address = x.data_ptr()
        _, known = self._by_address.get(address, (None, None))
        if known is None:
            entry = weakref.ref(x, lambda _: self._by_address.pop(address, None))
            self._by_address[address] = entry, current
        return known or current


class TimestepOfPass(NamedTuple):
    """The timestep of a pass, as methods that take turns need it."""

    turn: paddle.Tensor  # [1] int64: its number
    batch: int  # rows that have a timestep each; -1 where a program does not know it


def read_timestep(timestep: paddle.Tensor, tables: Cache) -> TimestepOfPass:
    """Whose turn it is at a timestep, [B] or one number. `tables` caches the table of turns by device."""
    with paddle.no_grad():
        is_eager = paddle.in_dynamic_mode()
        table = tables.get(paddle.get_device(), turn_table) if is_eager else turn_table()
        return TimestepOfPass(turn_at(timestep, table), timestep.shape[0] if timestep.ndim else 1)


class TimestepWrap(Wrap):
    """Wrap of the layer that gets the timestep: compute whose turn it is, once in a pass."""

    def __init__(self) -> None:
        self._thread = _PerThread()
        self._tables = Cache()

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        if layer.training and use_old_recompute():
            raise ToMePassError(
                "FLAG_USE_OLD_RECOMPUTE runs whole transformers again for the gradients, where their timestep is not "
                "known, and this method chooses other tokens at each timestep: unset the flag, or pass another method "
                'to apply_tome(), such as "todo".'
            )
        self._thread.current = read_timestep(_first(args, kwargs), self._tables)
        return self.forward(layer, *args, **kwargs)

    def current(self) -> TimestepOfPass | None:
        """The timestep of the last pass in this thread; None before the first."""
        current: TimestepOfPass | None = getattr(self._thread, "current", None)
        return current


class GridWrap(Wrap):
    """Wrap of a transformer's first layer: read the token grid.

    Args:
        placement: of a block of the transformer.
    """

    def __init__(self, placement: Placement) -> None:
        self._family: Family = placement.family
        self._thread = _PerThread()

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        self._thread.grid = token_grid(self._family, layer, _first(args, kwargs), self.current())
        return self.forward(layer, *args, **kwargs)

    def current(self) -> Grid | None:
        """The grid of the last pass in this thread; None before the first."""
        grid: Grid | None = getattr(self._thread, "grid", None)
        return grid

    def check(self, grid: Grid, tokens: int) -> None:
        """Raise ToMePassError unless the tokens of a block are those of a grid, or of the frames of a video."""
        if tokens != grid.tokens and not (self._family.has_frames and tokens % grid.tokens == 0):
            raise ToMePassError(
                f"a block got {tokens} tokens but the feature map was {grid.h}×{grid.w}: {_THROUGH_ITS_MODEL}."
            )


class BlockWrap(PlacedWrap):
    """Wrap of a transformer block: make the plan that the layers inside it share.

    Args:
        placement: what merges in the block.
        grid: the wrap that sees the block's token grid.
        timestep: the wrap that sees the timestep; None if it is not read, or is an argument of the block.
    """

    def __init__(self, placement: Placement, grid: GridWrap, timestep: TimestepWrap | None) -> None:
        super().__init__(placement)
        self.grid, self.timestep = grid, timestep
        self._constants = Cache()
        self._inputs = GridsOfInputs()

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.placement.config.merge_mlp and is_chunked(layer, self.placement.facts):
            raise ToMeConfigError(CHUNKED_FEED_FORWARD)
        _current.block, _current.plan = layer, self.build_plan(hidden_states, self._timestep(layer, args, kwargs))
        try:
            return self.forward(layer, hidden_states, *args, **kwargs)
        finally:
            _current.block, _current.plan = None, None

    def _timestep(self, layer: nn.Layer, args: tuple, kwargs: dict[str, Any]) -> TimestepOfPass | None:
        """The timestep of the pass that runs; None if it is not read."""
        if self.timestep is not None:
            return self.timestep.current()
        name = self.placement.facts.timestep
        if name is None or not (self.placement.takes_turns and gets_timestep(layer, self.placement.facts)):
            return None
        arguments = inspect.signature(type(layer).forward).bind(layer, None, *args, **kwargs).arguments
        timestep = arguments.get(name)
        # Blocks that get the timestep are those of images. One timestep may be that of both halves of guidance.
        return None if timestep is None else read_timestep(timestep, self._constants)._replace(batch=-1)

    def build_plan(self, metric: paddle.Tensor, timestep: TimestepOfPass | None = None) -> MergePlan | None:
        """The plan of a pass of the block; None if nothing merges.

        Args:
            metric: the block's input [B, N, C], of frames in one sequence [B, F·N, C].
            timestep: of the pass.
        """
        placement, grid = self.placement, self.grid.current()
        if grid is None:
            raise ToMePassError(
                f"a block got {metric.shape[1]} tokens but no feature map was seen: {_THROUGH_ITS_MODEL}."
            )
        grid, timestep = self._inputs.get(metric, GridOfPass(grid, timestep))
        if placement.facts.single_stream is not None and placement.facts.sequence == FIRST:
            metric = metric[:, -grid.tokens :]  # without the text
        tokens, use_gpu_form = metric.shape[1], uses_gpu_form(metric)
        self.grid.check(grid, tokens)
        kept = placement.kept(grid, use_gpu_form)
        if kept.keys == grid.tokens:
            return None
        if (frames := max(1, tokens // grid.tokens)) > 1:
            metric = metric.reshape([-1, grid.tokens, metric.shape[2]])
        form = placement.form(grid, use_gpu_form)
        turn = FIRST_TURN if timestep is None else Turn(timestep.turn, self._frames_in_batch(metric, timestep))
        return join_frames(form.plan(metric, self._constants_of(form, grid, kept), kept, turn), frames)

    def _frames_in_batch(self, metric: paddle.Tensor, timestep: TimestepOfPass) -> int:
        """How many rows of the batch are the frames of one video; 1 where a program does not know it."""
        rows, batch = metric.shape[0], timestep.batch
        is_known = self.placement.family.has_frame_rows and rows > batch > 0 and rows % batch == 0
        return rows // batch if is_known else 1

    def _constants_of(self, form: Form, grid: Grid, kept: Kept) -> Any:
        """The constants of a grid, cached by device; a traced program gets its own."""

        def build() -> Any:
            return form.constants(grid, self.placement.config, kept, self.placement.index)

        if not paddle.in_dynamic_mode():
            return build()
        return self._constants.get((paddle.get_device(), type(form), grid), build)
