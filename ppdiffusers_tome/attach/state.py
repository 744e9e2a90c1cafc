"""The state of merging: what is applied to a denoiser, and what a pass of it knows from beginning to end.

A pass takes a snapshot of what merges, so that settings which change meanwhile affect the next pass only. What it
computes is stored per thread.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import paddle

from ..grid import Grid
from ..methods import ToMeConfig
from .forward import Wrap
from .placement import Placement

Value = TypeVar("Value")
MAX_CACHED = 8  # values of a `Cache`; the constants of a grid of 64×64 tokens take 0.2 MB


class PerThread(threading.local):
    """Thread-local attributes; a copy or a pickle starts empty."""

    def __reduce__(self) -> Any:
        return type(self), ()


class Cache:
    """The values that a wrap used last, at most `MAX_CACHED`; a copy or a pickle of the wrap starts empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Hashable, Any] = {}  # the last is the value that was used last

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


class AppliedConfig(NamedTuple):
    """What merges in a denoiser since the last `apply_tome`, which replaces it as a whole."""

    config: ToMeConfig
    placements: Mapping[int, Placement]  # by the index of the block

    @property
    def merges(self) -> bool:
        """Whether anything merges; at ratio 0 a pass is not even looked at."""
        return any(placement.share < 1 for placement in self.placements.values())

    def __deepcopy__(self, memo: dict) -> "AppliedConfig":
        return self


class TimestepOfPass(NamedTuple):
    """What follows from the timestep of a pass."""

    turn: paddle.Tensor  # [1] int64: its number
    batch: int  # rows that have a timestep each; -1 where a program does not know it
    is_plain: bool | paddle.Tensor  # whether all tokens remain; in a program [1] bool, which its run decides
    values: paddle.Tensor | None  # as the denoiser got it, [B] or a single number; None in a program


class Pass:
    """A forward pass of a denoiser: all that its blocks need, also if a block is computed again later.

    Args:
        applied: what merges; None if nothing does any more.
        before: the previous pass in this thread. Its grids hold for programs, see `token_grid`.
    """

    def __init__(self, applied: AppliedConfig | None, before: "Pass | None") -> None:
        self.applied = applied
        self.is_partial = False  # whether layers of it have run before there were wraps
        self.reached_blocks = False
        self.timestep: TimestepOfPass | None = None  # None: it is not read
        self.grids: dict[Wrap, Grid] = {} if before is None else dict(before.grids)
        self.seen: set[Wrap] = set()  # the wraps that have run

    def mark_partial(self) -> None:
        """Merge nothing, because layers of this pass have run before there were wraps."""
        self.applied, self.is_partial = None, True


class Attachment:
    """What the wraps of a denoiser share. A copy of the denoiser has a copy of it."""

    def __init__(self) -> None:
        self.applied: AppliedConfig | None = None
        self._thread = PerThread()

    @property
    def current(self) -> Pass | None:
        """The last pass in this thread; None before the first."""
        current: Pass | None = getattr(self._thread, "current", None)
        return current

    def continue_with(self, known: Pass) -> Pass:
        """Make a pass the current one of this thread."""
        self._thread.current = known
        return known

    def stop(self, index: int) -> None:
        """Let a block merge no more. If none does, nothing is applied."""
        if self.applied is not None:
            rest = {number: placement for number, placement in self.applied.placements.items() if number != index}
            self.applied = AppliedConfig(self.applied.config, rest) if rest else None

    def begin(self) -> Pass:
        """Begin a pass in this thread."""
        return self.continue_with(Pass(self.applied, self.current))


class Records:
    """The pass that each input of a layer belongs to, while the input exists; a copy or a pickle starts empty.

    Gradient checkpointing runs a layer again after its pass, with the input from before, perhaps as a new tensor in
    the same memory, and more passes may have run in between.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[weakref.ref, Pass]] = {}

    def __reduce__(self) -> Any:
        return type(self), ()

    def __len__(self) -> int:
        return len(self._by_address)

    def add(self, x: paddle.Tensor, pass_: Pass) -> None:
        """Record the pass of an input, until the input is gone."""
        address = x.data_ptr()

        def forget(gone: weakref.ref) -> None:
            if self._by_address.get(address, (None, None))[0] is gone:
                del self._by_address[address]

        self._by_address[address] = weakref.ref(x, forget), pass_

    def find(self, x: paddle.Tensor) -> Pass | None:
        """The pass of an input; None if it is not recorded."""
        return self._by_address.get(x.data_ptr(), (None, None))[1]
