"""One process that serves: uvicorn in one thread, the queue in another; SIGTERM finishes what was accepted."""

import asyncio
import logging
import os
import resource
import signal
import socket
from time import monotonic
from types import FrameType

import uvicorn
from fastapi import FastAPI
from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import ToMeConfigError, ToMeError
from .queue import PictureQueue

logger = logging.getLogger("uvicorn.error")
CONNECTIONS = 512  # at most; far more than the queue holds
FILES = 4096  # the limit on descriptors that is asked for, where the process may raise it
SPARE_FILES = 32  # for what is not a connection, beyond what is open when the server starts
HEAD_SECONDS = 10.0  # for a request's first line and headers
SEND_SECONDS = 30.0  # without one more byte of an answer sent
REPEAT_SECONDS = 60.0  # until the log repeats itself


class ServerFailedError(ToMeError, RuntimeError):
    """The server ended because its model could not be loaded, or because the thread that draws has ended."""


def serve(queue: PictureQueue, app: FastAPI, host: str = "127.0.0.1", port: int = 8000, seconds: float = 120) -> None:
    """Serve until SIGTERM or SIGINT.

    The first signal drains: further requests get 503, /ready too, and when all accepted ones are answered, or
    `seconds` after the signal, every connection is closed and this returns. The second signal abandons what is left.
    A pipeline call that does not end at its next step ends the process, with exit status 1.

    Args:
        queue: not yet started; it loads its engine while the server already answers /health and /ready.
        app: from `create_app`, over that queue.
        host, port: where to listen; port 0 for one that is free, which the log shows.
        seconds: longest time from the first signal to the end.

    Raises:
        ServerFailedError: see there.
        ToMeConfigError: the address cannot be listened at, or the process may open too few files.
    """
    server = DrainingServer(app, queue, seconds)
    listener = _listen(host, port)
    logger.info("listening at http://%s:%d", *listener.getsockname()[:2])
    logs, repetition = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")], RepetitionFilter()
    for log in logs:
        log.addFilter(repetition)
    queue.start()
    try:
        server.run(sockets=[listener])
    finally:
        failure, is_drawing = queue.failure, queue.running_since is not None
        if not queue.close(max(1.0, server.end - monotonic()) if is_drawing else 1.0):
            logger.warning("ending the process while the model is %s", "drawing" if is_drawing else "being loaded")
            logging.shutdown()
            os._exit(1 if is_drawing else 0)
        listener.close()
        for log in logs:
            log.removeFilter(repetition)
    if failure is not None:
        raise ServerFailedError(f"the model could not be loaded, or drawing has ended: {failure}") from failure


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ToMeConfigError(f"port={port} is not allowed: it must be 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, ValueError) as error:
        raise ToMeConfigError(f"host={host!r}, port={port}: cannot listen there: {error}") from error


def connection_limits() -> tuple[int, int]:
    """Most connections, and most to accept at once, that keep clear of the limit on this process' descriptors.

    Raises:
        ToMeConfigError: the limit leaves no room for 8 connections.
    """
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
    if files != resource.RLIM_INFINITY and files < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
        files = wanted
    files = FILES if files == resource.RLIM_INFINITY else min(FILES, files)
    at_once = files // 16
    # asyncio accepts so many in each turn of its loop, and it takes four turns until one that is cut off is closed.
    connections = min(CONNECTIONS, files - len(os.listdir("/dev/fd")) - SPARE_FILES - 4 * at_once)
    if connections < 8:
        raise ToMeConfigError(
            f"this process may open {files} files, which is too few: raise the limit (ulimit -n 1024)"
        )
    return connections, at_once


class DrainingServer(uvicorn.Server):
    """Ends when the queue is idle after a signal, or when it has failed, and then without raising the signal again.

    Args:
        app: answers.
        queue: draws.
        seconds: from a signal to the end, at most.
    """

    def __init__(self, app: FastAPI, queue: PictureQueue, seconds: float = 120) -> None:
        connections, at_once = connection_limits()
        super().__init__(
            uvicorn.Config(
                app,
                http=PatientProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                limit_concurrency=connections + 1,  # 503 where all have a request under way
                backlog=at_once,
                server_header=False,
                proxy_headers=False,
            )
        )
        self.end = 0.0  # by time.monotonic(), once a signal has come
        self._queue, self._seconds = queue, seconds
        self._signal: int | None = None  # set in its handler, where no lock may be taken

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once."""
        self.should_exit = self.force_exit = self._signal is not None
        self._signal = self._signal or sig

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self._signal and not self.end:
            logger.info("%s: finishing what was accepted", signal.Signals(self._signal).name)
            self.end = monotonic() + self._seconds
            self._queue.drain()
        if self._queue.state == "failed" or (self.end and (self._queue.is_idle or monotonic() > self._close_by)):
            self.should_exit = True
        self._abort_stalled()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the clients take their answers, as long as there is time."""
        self.end = self.end or monotonic() + self._seconds
        closing = asyncio.ensure_future(super().shutdown(sockets))
        while not closing.done():
            self.force_exit = self.force_exit or monotonic() > self._close_by
            self._abort_stalled()
            await asyncio.wait([closing], timeout=0.1)
        await closing
        self._abort_stalled(all_of_them=True)
        await asyncio.sleep(0.1)  # for requests to notice

    @property
    def _close_by(self) -> float:
        return self.end - self._seconds / 10  # the rest is for the thread that draws

    def _abort_stalled(self, all_of_them: bool = False) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, PatientProtocol) and (connection.is_stalled() or all_of_them):
                connection.transport.abort()


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with what no setting of uvicorn gives.

    - A time limit for a request's head, which uvicorn waits for without end, and for a client to read its answer.
    - Where there are too many connections, the one that has been idle longest makes room, rather than a 503 for all.
    - A 400, not a traceback in the log, for a Content-Length of so many digits that int() refuses it (h11 before
      0.15), and the end of the connection for a broken body whose request was answered already.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._since = monotonic()  # when the client last did what it is waited for
        self._unsent = 0  # bytes of answers that it had not read then
        if len(self.connections) + 1 >= (self.limit_concurrency or CONNECTIONS):
            idle = [other for other in self.connections if isinstance(other, PatientProtocol) and other._is_idle]
            if idle:
                oldest = min(idle, key=lambda other: other._since)
                oldest.transport.abort()
                self.connections.discard(oldest)  # so that it does not count until its loss is reported
        super().connection_made(transport)

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except ValueError:
            self.send_400_response("Invalid HTTP request received.")
        except LocalProtocolError:  # from uvicorn's own 400, where an answer was sent before the body was read
            self.transport.close()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is under way and no answer is being sent."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and not self.transport.get_write_buffer_size()

    def is_stalled(self) -> bool:
        """Whether the client has done nothing for too long; to be asked now and then."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent or not (unsent or self._is_idle):
            self._since, self._unsent = monotonic(), unsent
        return monotonic() - self._since > (SEND_SECONDS if unsent else HEAD_SECONDS)


class RepetitionFilter(logging.Filter):
    """Drops a warning or an error that was logged a minute ago or less, so that nobody can fill the disk with them."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        text = f"{record.getMessage()} {record.exc_info and record.exc_info[1]!r}"
        now = monotonic()
        self._last = {other: time for other, time in self._last.items() if now - time < REPEAT_SECONDS}
        return self._last.setdefault(text, now) == now
