"""What a forward pass computes: the settings that it has from begin to end, its token grids, and the plans of blocks.

A pass begins when one of the layers that come first in a model runs again. It takes a snapshot of what merges, so
that settings which change meanwhile affect the next pass only. So does the first `apply_tome`: where a later layer is
the first that runs with a wrap, its pass began without merging, and stays plain. The wrap of a block makes the plan,
for as long as the block runs; wraps of the layers inside the block move tokens by this plan. What a pass computes is
stored per thread.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import paddle
from paddle import nn

from ..errors import ToMeConfigError, ToMePassError
from ..families.grids import token_grid
from ..families.models import MergeableBlock, gets_timestep, is_chunked
from ..families.stream import split
from ..families.table import Family
from ..grid import Grid
from ..methods import ToMeConfig
from ..methods.plan import MergePlan, Turn, turn_at
from ..methods.steps import plain_steps_of
from ..methods.turns import turn_table
from ..tensors import constants, first_number
from .forward import Wrap, is_outermost
from .placement import Placement

Value = TypeVar("Value")
_THROUGH_ITS_MODEL = "call it through its model, or remove_tome() first"
MAX_CACHED = 8  # values of a `Cache`; the constants of a grid of 64×64 tokens take 0.2 MB
CHUNKED_FEED_FORWARD = (
    "merge_mlp=True cannot be combined with chunked feed-forward layers (enable_forward_chunking(), "
    "set_chunk_feed_forward()), which get the tokens in pieces: turn chunking off or leave merge_mlp=False."
)


class PerThread(threading.local):
    """Thread-local attributes; a copy or a pickle starts empty."""

    def __reduce__(self) -> Any:
        return type(self), ()


class Cache:
    """The values that a wrap used last, at most `MAX_CACHED`; a copy or a pickle of the wrap starts empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Hashable, Any] = {}  # the one that was used last is last

    def __reduce__(self) -> Any:
        return type(self), ()

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._values.clear()

    def get(self, key: Hashable, build: Callable[[], Value]) -> Value:
        """The value of a key, which `build` returns if it is not there."""
        with self._lock:
            value: Value = self._values.pop(key) if key in self._values else build()
            self._values[key] = value
            if len(self._values) > MAX_CACHED:
                del self._values[next(iter(self._values))]
        return value


# Passes


class Applied(NamedTuple):
    """What merges in a denoiser since the last `apply_tome`. It does not change: another call makes another."""

    config: ToMeConfig
    placements: Mapping[int, Placement]  # by the index of the block

    @property
    def merges(self) -> bool:
        """Whether anything merges; at ratio 0 a pass is not even looked at."""
        return any(placement.share < 1 for placement in self.placements.values())

    def __deepcopy__(self, memo: dict) -> "Applied":
        return self


class TimestepOfPass(NamedTuple):
    """What follows from the timestep of a pass."""

    turn: paddle.Tensor  # [1] int64: its number
    batch: int  # rows that have a timestep each; -1 where a program does not know it
    is_plain: bool | paddle.Tensor = False  # whether all tokens remain; in a program [1] bool, which its run decides


class Pass:
    """One forward pass of a denoiser: all that its blocks need, also if one of them is computed again later.

    Args:
        applied: what merges; None if nothing does any more.
        before: the pass before it in this thread. Its grids hold for transformers that do not show theirs.
        is_joined: whether it began before there were wraps, so that layers which come first have not been seen.
    """

    def __init__(self, applied: Applied | None, before: "Pass | None", is_joined: bool = False) -> None:
        self.applied, self.is_joined = applied, is_joined
        self.timestep: TimestepOfPass | None = None  # None: it is not read
        self.grids: dict[GridWrap, Grid] = {} if before is None else dict(before.grids)
        self.seen: set[PassWrap] = set()  # the wraps that have run


class Attachment:
    """What the wraps of a denoiser share. A copy of the denoiser has a copy of it."""

    def __init__(self) -> None:
        self.applied: Applied | None = None
        self._thread = PerThread()

    @property
    def current(self) -> Pass | None:
        """The last pass in this thread; None before the first."""
        current: Pass | None = getattr(self._thread, "current", None)
        return current

    def continue_with(self, one: Pass) -> Pass:
        """Make a pass the current one of this thread."""
        self._thread.current = one
        return one

    def stop(self, index: int) -> None:
        """Let a block merge no more. If none does, nothing is applied."""
        if self.applied is not None:
            rest = {number: one for number, one in self.applied.placements.items() if number != index}
            self.applied = Applied(self.applied.config, rest) if rest else None

    def begin(self) -> Pass:
        """Begin a pass in this thread."""
        return self.continue_with(Pass(self.applied, self.current))

    def join(self) -> Pass:
        """The pass of this thread, which began before there were wraps, and in which nothing merges."""
        return self.continue_with(Pass(None, None, is_joined=True))


class Records:
    """The pass that each input of a layer belongs to, while the input exists; a copy or a pickle starts empty.

    Gradient checkpointing runs a layer again after its pass, with the input from before, perhaps as another tensor in
    the same memory, and other passes may have come in between.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[weakref.ref, Pass]] = {}

    def __reduce__(self) -> Any:
        return type(self), ()

    def __len__(self) -> int:
        return len(self._by_address)

    def add(self, x: paddle.Tensor, one: Pass) -> None:
        """Record the pass of an input, until the input is gone."""
        address = x.data_ptr()

        def forget(gone: weakref.ref) -> None:
            if self._by_address.get(address, (None, None))[0] is gone:
                del self._by_address[address]

        self._by_address[address] = weakref.ref(x, forget), one

    def find(self, x: paddle.Tensor) -> Pass | None:
        """The pass of an input; None if it is not recorded."""
        return self._by_address.get(x.data_ptr(), (None, None))[1]


class PassWrap(Wrap):
    """Wrap of a layer that knows to which pass a call of it belongs.

    Args:
        attachment: of the denoiser.
    """

    is_recomputed = False  # whether gradient checkpointing may run the layer again without what came before it
    is_first = False  # whether the layer is one of those that come first in a model

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.records = Records()

    def is_like(self, other: "PassWrap") -> bool:
        return self.attachment is other.attachment

    def begins(self, before: Pass) -> bool:
        """Whether a pass begins when the layer runs again after a pass in which it ran."""
        return False

    def enter(self, layer: nn.Layer, x: paddle.Tensor) -> Pass:
        """The pass to which a call with the input x belongs."""
        attachment, current = self.attachment, self.attachment.current
        keeps_records = self.is_recomputed and paddle.in_dynamic_mode()
        is_again = current is not None and self in current.seen
        known = self.records.find(x) if keeps_records and (current is None or is_again) else None
        if known is not None:
            current = attachment.continue_with(known)
        elif current is None or current.is_joined:
            if self.is_first:
                current = attachment.begin()
            elif current is None:
                current = attachment.join()
        elif is_again and self.begins(current):
            current = attachment.begin()
        current.seen.add(self)
        if keeps_records and layer.training:
            self.records.add(x, current)
        return current


class TimestepWrap(PassWrap):
    """Wrap of the layer that gets the timestep: read it, once in a pass.

    Args:
        attachment: of the denoiser.
        family: of its blocks.
    """

    def __init__(self, attachment: Attachment, family: Family) -> None:
        super().__init__(attachment)
        self._family = family
        self._tables = Cache()

    is_first = True

    def begins(self, before: Pass) -> bool:
        return True

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        timestep = _first(args, kwargs)
        one = self.enter(layer, timestep)
        if one.applied is not None and one.applied.config.takes_turns:
            one.timestep = read_timestep(timestep, one.applied.config, self._family, self._tables)
        return self.forward(layer, *args, **kwargs)


class TransformerWrap(PassWrap):
    """Wrap of a transformer inside a UNet, which gradient checkpointing may run again as a whole.

    Args:
        attachment: of the denoiser.
        is_first: whether no layer before it has a wrap.
    """

    is_recomputed = True

    def __init__(self, attachment: Attachment, is_first: bool) -> None:
        super().__init__(attachment)
        self.is_first = is_first

    def begins(self, before: Pass) -> bool:
        return True

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        self.enter(layer, _first(args, kwargs))
        return self.forward(layer, *args, **kwargs)


class GridWrap(PassWrap):
    """Wrap of a transformer's first layer: read the token grid.

    Args:
        attachment: of the denoiser.
        block: one of the transformer.
        transformer: the wrap of the transformer inside a UNet; None outside UNets.
    """

    def __init__(self, attachment: Attachment, block: MergeableBlock, transformer: TransformerWrap | None) -> None:
        super().__init__(attachment)
        self._family: Family = block.family
        self._transformer = transformer
        self.is_first = transformer is None or transformer.is_first

    def begins(self, before: Pass) -> bool:
        """Unless the wrap of the transformer has begun the pass, which a cache in its place leaves out."""
        return self._transformer not in before.seen

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        x = _first(args, kwargs)
        one = self.enter(layer, x)
        if one.applied is not None and one.applied.merges:
            one.grids[self] = token_grid(self._family, layer, x, one.grids.get(self))
        return self.forward(layer, *args, **kwargs)

    def check(self, grid: Grid, tokens: int) -> None:
        """Raise ToMePassError unless the tokens of a block are those of a grid, or of the frames of a video."""
        if tokens != grid.tokens and not (self._family.has_frames and tokens % grid.tokens == 0):
            raise ToMePassError(
                f"a block got {tokens} tokens but the feature map was {grid.h}×{grid.w}: {_THROUGH_ITS_MODEL}."
            )


def _first(args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))


def read_timestep(timestep: paddle.Tensor, config: ToMeConfig, family: Family, tables: Cache) -> TimestepOfPass:
    """What follows from a timestep, [B] or one number, with a config. `tables` caches the table of turns by device.

    Where the first and last steps are plain, eager mode decides it in Python, and waits for a GPU to know the value.
    """
    with paddle.no_grad():
        is_eager = paddle.in_dynamic_mode()
        table = tables.get(paddle.get_device(), _turns) if is_eager else _turns()
        is_plain: bool | paddle.Tensor = False
        if config.has_plain_steps:
            is_plain = plain_steps_of(family.is_flow).include(first_number(timestep))
            is_plain = bool(is_plain) if is_eager else is_plain
        turn = turn_at(timestep, table, family.is_flow)
        return TimestepOfPass(turn, timestep.shape[0] if timestep.ndim else 1, is_plain)


@paddle.jit.not_to_static  # not to be computed in the program
def _turns() -> paddle.Tensor:  # [LAST_TIMESTEP + 1] int64
    table: paddle.Tensor = constants(turn_table())
    return table


# Blocks


class _Running(NamedTuple):
    """A block that runs."""

    layer: nn.Layer
    placement: Placement | None  # what merges in it
    plan: MergePlan | None  # None if nothing merges


class _InThread(PerThread):
    block: _Running | None = None  # the innermost one


_in_thread = _InThread()


class BlockWrap(PassWrap):
    """Wrap of a transformer block: make the plan that the layers inside it share.

    Args:
        attachment: of the denoiser.
        block: the block.
        grid: the wrap that sees the block's token grid.
    """

    is_recomputed = True

    def __init__(self, attachment: Attachment, block: MergeableBlock, grid: GridWrap) -> None:
        super().__init__(attachment)
        self.index, self._family, self._facts = block.index, block.family, block.facts
        self._grid = grid
        self._constants, self._tables = Cache(), Cache()

    def forget_constants(self) -> None:
        """Free the constants of earlier settings; a pass that still needs them builds them again."""
        self._constants.clear()

    def is_like(self, other: PassWrap) -> bool:
        return super().is_like(other) and isinstance(other, BlockWrap) and self.index == other.index

    def last_grid(self) -> Grid | None:
        """The token grid of the block in the last pass of this thread; None before the first."""
        last = self.attachment.current
        return None if last is None else last.grids.get(self._grid)

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        name = self._facts.tokens
        if not args and name not in kwargs:
            raise ToMePassError(f"{type(layer).__name__} got no {name}: {_THROUGH_ITS_MODEL}.")
        tokens, others = (args[0], args[1:]) if args else (kwargs[name], ())
        one = self.enter(layer, tokens)
        placement = None if one.applied is None else one.applied.placements.get(self.index)
        plan = None
        if placement is not None and placement.share < 1:
            if "mlp" in placement.layers and is_chunked(layer, self._facts):
                raise ToMeConfigError(CHUNKED_FEED_FORWARD)
            named = {key: value for key, value in kwargs.items() if key != name}
            plan = self._plan(placement, one, tokens, self._timestep(layer, placement, one, others, named))
        outer, _in_thread.block = _in_thread.block, _Running(layer, placement, plan)
        try:
            return self.forward(layer, *args, **kwargs)
        finally:
            _in_thread.block = outer

    def _timestep(
        self, layer: nn.Layer, placement: Placement, one: Pass, args: tuple, kwargs: dict[str, Any]
    ) -> TimestepOfPass | None:
        """The timestep of a pass; None if it is not read."""
        if one.timestep is not None:
            return one.timestep
        name = self._facts.timestep
        if name is None or not (placement.takes_turns and gets_timestep(layer, self._facts)):
            return None
        arguments = inspect.signature(type(layer).forward).bind(layer, None, *args, **kwargs).arguments
        timestep = arguments.get(name)
        if timestep is None:
            return None
        read = read_timestep(timestep, placement.config, self._family, self._tables)
        # Blocks that get the timestep are those of images. One timestep may be that of both halves of guidance.
        read = read._replace(batch=-1)
        one.timestep = read  # for the blocks after this one
        return read

    def _plan(
        self,
        placement: Placement,
        one: Pass,
        tokens: paddle.Tensor,  # [B, N, C], of frames in one sequence [B, F·N, C], perhaps with text
        timestep: TimestepOfPass | None,
    ) -> MergePlan | None:
        """The plan of a call of the block; None if nothing merges on its grid."""
        grid = one.grids.get(self._grid)
        if grid is None:
            raise ToMePassError(
                f"a block got {tokens.shape[1]} tokens but no feature map was seen: {_THROUGH_ITS_MODEL}."
            )
        metric = split(self._facts.gets_text, tokens, grid.tokens).image
        self._grid.check(grid, metric.shape[1])
        kept = placement.count_kept(grid)
        is_plain = timestep is not None and timestep.is_plain
        if kept == grid.tokens or is_plain is True:
            return None
        frames = metric.shape[1] // grid.tokens
        if frames > 1:
            metric = metric.reshape([-1, grid.tokens, metric.shape[2]])
        number = None if timestep is None else timestep.turn
        turn = Turn(number, frames if frames > 1 else self._frames_in_batch(metric, timestep))
        choice = placement.config.choose(metric, self._constants_of(placement, grid, kept), kept, turn)
        if is_plain is not False:
            choice = choice.or_all(is_plain, grid.tokens)
        return MergePlan(choice, grid.tokens, frames)

    def _frames_in_batch(self, metric: paddle.Tensor, timestep: TimestepOfPass | None) -> int:
        """How many rows of the batch are the frames of one video; 1 where a program does not know it."""
        rows, batch = metric.shape[0], -1 if timestep is None else timestep.batch
        is_known = self._family.has_frame_rows and rows > batch > 0 and rows % batch == 0
        return rows // batch if is_known else 1

    def _constants_of(self, placement: Placement, grid: Grid, kept: int) -> Any:
        """The constants of a grid, cached by device; a traced program gets its own."""

        def build() -> Any:
            return constants(placement.config.constants(grid, kept, self.index))

        if not paddle.in_dynamic_mode():
            return build()
        return self._constants.get((paddle.get_device(), placement.config, grid, kept), build)


class InnerWrap(Wrap):
    """Wrap of a layer inside a block. It moves tokens by the plan of the block.

    Args:
        block: the block.
        name: of `LAYERS`.
    """

    def __init__(self, block: nn.Layer, name: str) -> None:
        self._block, self._name = block, name

    def is_like(self, other: "InnerWrap") -> bool:
        return self._block is other._block and self._name == other._name

    def plan(self) -> MergePlan | None:
        """The plan of the block; None outside it, and where nothing merges around this layer.

        Raises:
            ToMePassError: another library's `forward` of the block has left out the wrap of the block.
        """
        running = _in_thread.block
        if running is not None and running.layer is self._block:
            is_merged = running.placement is not None and self._name in running.placement.layers
            return running.plan if is_merged else None
        if not is_outermost(self._block):
            raise ToMePassError(
                f"the layers of a {type(self._block).__name__} run without its merging, because another library has "
                "replaced the forward of the block since apply_tome(), or put back an earlier one: call apply_tome() "
                "again afterwards, or remove_tome() first."
            )
        return None
