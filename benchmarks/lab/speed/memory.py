"""The peak of the memory of one pass, by Paddle's own counters.

Paddle counts the bytes of its tensors ("Allocated"), now and at their peak. Paddle 3 can reset the peak, Paddle 2.6
cannot. There a ballast fills the gap between now and the peak, so that every further byte raises it. On the CPU the
pages of the ballast are never touched, so they cost no memory.
"""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.base import core

PIECE = 1 << 30  # bytes of ballast per allocation: Linux refuses a single allocation larger than the memory


def weights_bytes(model: nn.Layer) -> int:
    """Bytes of a model's parameters and buffers."""
    return sum(value.numel().item() * value.element_size() for value in model.state_dict().values())


def current_bytes() -> int:
    """Bytes of all tensors on the current device."""
    return _stat("current_value")()


def peak_bytes(run: Callable[[], Any]) -> int | None:
    """The most bytes allocated at once while `run` runs, including those allocated before.

    Returns None on a GPU with Paddle 2.6 if the ballast does not fit into its memory, or `run` does not fit beside the
    ballast. In the latter case `run` runs again without it.
    """
    ballast: list[paddle.Tensor] = []
    offset = 0
    if reset := _stat("reset_peak_value"):
        reset()
    elif (gap := _stat("peak_value")() - (before := current_bytes())) > 0:
        try:
            for start in range(0, gap, PIECE):
                ballast.append(paddle.empty([min(PIECE, gap - start)], dtype="int8"))
        except MemoryError:
            return None
        offset = current_bytes() - before
    try:
        run()
        return _stat("peak_value")() - offset
    except MemoryError:
        if not ballast:
            raise
    # The pass may fit without the ballast. The error is gone here, and with it the frames that hold tensors, except
    # those in reference cycles.
    ballast.clear()
    gc.collect()
    run()
    return None


def available_bytes() -> int:
    """Bytes that new processes can allocate without swapping."""
    return _number(Path("/proc/meminfo"), "MemAvailable:") << 10  # KiB


def _number(path: Path, name: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def _stat(name: str) -> Any:
    """A function of Paddle that reads or resets its counter for the current device; None if this version lacks it."""
    device, _, index = paddle.get_device().partition(":")
    function = getattr(core, f"{'host' if device == 'cpu' else 'device'}_memory_stat_{name}", None)
    return function and partial(function, "Allocated", int(index or 0))
