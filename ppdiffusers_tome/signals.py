"""SIGINT (Ctrl-C) and SIGTERM: as errors, held back while a library cannot take errors, or the end at once.

Handlers run in the main thread. In all further threads these contexts do nothing. A signal that the program
handles itself, or ignores, stays as it is.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeAlias

ENDINGS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}  # how a command reports its end
INTERRUPTED, TERMINATED = (128 + number for number in ENDINGS)  # exit statuses, as in shells

Handler: TypeAlias = Callable[[int, FrameType | None], None]


@contextmanager
def signals_as_errors() -> Iterator[list[int]]:
    """In this context SIGINT raises KeyboardInterrupt and SIGTERM SystemExit(143).

    So what is half-written is deleted, as after an error. The default action of SIGTERM would do nothing in the first
    process of a container: the kernel ignores it there, also if the process sends the signal to itself.

    Yields:
        The numbers of the signals that have arrived: a library may turn the error into one of its own.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(TERMINATED)

    with _handling(_unhandled(), end):
        yield received


@contextmanager
def signals_held_back(until: str) -> Iterator[None]:
    """Let signals take effect when this context ends, whatever handles them; stderr says so.

    An error in Python code that C++ calls crashes some libraries, and some report it as a fault of their own.

    Args:
        until: what the context does, as a sentence: "the program is traced".
    """
    received: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        received.append(number)
        with suppress(OSError):  # not by `print`, which must not be called again while it runs
            os.write(2, f"{signal.Signals(number).name}: ending when {until}\n".encode())

    try:
        with _handling([number for number in ENDINGS if signal.getsignal(number) is not None], hold):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)


@contextmanager
def signals_end_process() -> Iterator[None]:
    """In this context, of the main thread, signals end the process at once, which has nothing to clean up.

    They are blocked, and a thread waits for them: the import of Paddle replaces handlers.
    """
    numbers = _unhandled()
    is_over = threading.Event()

    def wait() -> None:
        number = signal.sigwait(numbers)
        if not is_over.is_set():
            with suppress(OSError):
                os.write(2, f"{ENDINGS[signal.Signals(number)]}\n".encode())
            os._exit(128 + number)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        if numbers and thread.ident is not None:
            signal.pthread_kill(thread.ident, numbers[0])
            thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _unhandled() -> list[signal.Signals]:
    """The signals that have Python's own handlers."""
    return [number for number in ENDINGS if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)]


@contextmanager
def _handling(numbers: Iterable[signal.Signals], handler: Handler) -> Iterator[None]:
    """Handle these signals in this context, and as before afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
