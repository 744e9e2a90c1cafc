"""The most memory that Paddle's tensors take at once, by Paddle's own counter for the current device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import paddle
from paddle.base import core


def restart_peak() -> None:
    """Let the peak begin again at what is allocated now; no effect with Paddle 2.6, which cannot."""
    if (restart := _counter("reset_peak_value")) is not None:
        restart()


def peak_bytes() -> int | None:
    """The largest number of bytes since `restart_peak`, weights included; None with Paddle 2.6."""
    return None if _counter("reset_peak_value") is None else _counter("peak_value")()  # type: ignore[misc]


def _counter(function: str) -> Callable[[], Any] | None:
    """A function of the counter; None if this version of Paddle lacks it."""
    device, _, index = paddle.get_device().partition(":")
    found = getattr(core, f"{'host' if device == 'cpu' else 'device'}_memory_stat_{function}", None)
    return found and partial(found, "Allocated", int(index or 0))
