"""Memory of one pass: Paddle's own counters for its peak, and a limit under which it must fit.

Paddle counts the bytes of its tensors ("Allocated") now and at their peak. Paddle 3 can set the peak back, Paddle 2.6
cannot. There a ballast fills up what lies between now and the peak, so that every further byte raises it; on the CPU
nobody touches the ballast's pages, which therefore cost no memory.
"""

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.base import core

PIECE = 1 << 30  # bytes of ballast at a time: Linux refuses one allocation of more than there is, not several
RESERVE = 256 << 20  # bytes that are left to the rest of the machine where no limit is given
OUT_OF_MEMORY = ("ResourceExhausted", "Out of memory", "out of memory", "bad_alloc", "allocate memory", "MemoryError")


def weights_bytes(model: nn.Layer) -> int:
    """Bytes of a model's parameters and buffers."""
    return sum(value.numel().item() * value.element_size() for value in model.state_dict().values())


def current_bytes() -> int:
    """Bytes of the tensors that there are, on the current device."""
    return _counter("current_value")


def peak_bytes(run: Callable[[], Any]) -> int | None:
    """The most bytes that there were at once while `run` ran, those included that were there before.

    Returns:
        Bytes by Paddle's counter; None on a GPU of Paddle 2.6 whose memory has no room for the ballast.
    """
    ballast: list[paddle.Tensor] = []
    offset = 0
    if (reset := getattr(core, f"{_device()}_memory_stat_reset_peak_value", None)) is not None:
        reset("Allocated", _index())
    elif (gap := _counter("peak_value") - current_bytes()) > 0:
        before = current_bytes()
        try:
            for start in range(0, gap, PIECE):
                ballast.append(paddle.empty([min(PIECE, gap - start)], dtype="int8"))
        except MemoryError:
            return None
        offset = current_bytes() - before
    run()
    peak = _counter("peak_value") - offset
    del ballast
    return peak


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether an error, or what a process wrote of it, says that memory ran out."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)


@contextlib.contextmanager
def limited(limit: int | None, weights: int, process: int = 0) -> Iterator[None]:
    """Let a process allocate so much and no more, until the context is left; more is Paddle's MemoryError.

    Without this the system ends a process that takes too much, and what it had measured is lost.

    Args:
        limit: bytes for the weights and all that a pass allocates; None: what the machine has left now.
        weights: bytes of the weights, which are in memory already and count as part of the limit.
        process: its number; 0 is this one.
    """
    soft, hard = resource.prlimit(process, resource.RLIMIT_DATA)
    room = available_bytes() - RESERVE if limit is None else limit - weights
    allowed = max(_data_bytes(process) + room, 0)
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.prlimit(process, resource.RLIMIT_DATA, (allowed, hard))
    try:
        yield
    finally:
        # The process may have ended.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_DATA, (soft, hard))


def available_bytes() -> int:
    """What the machine can give to new processes without swapping."""
    return _kib(Path("/proc/meminfo"), "MemAvailable:")


def offer_to_the_system() -> None:
    """Should the machine run out of memory all the same, it is to end this process and no other."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _data_bytes(process: int) -> int:
    return _kib(Path("/proc") / (str(process) if process else "self") / "status", "VmData:")


def _kib(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def _counter(which: str) -> int:
    return int(getattr(core, f"{_device()}_memory_stat_{which}")("Allocated", _index()))


def _device() -> str:
    return "host" if paddle.get_device() == "cpu" else "device"


def _index() -> int:
    return int(paddle.get_device().partition(":")[2] or 0)
