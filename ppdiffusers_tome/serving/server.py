"""The server of one process: uvicorn in one thread, the queue in another. SIGTERM finishes accepted jobs."""

import asyncio
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable
from errno import EADDRINUSE
from functools import partial
from time import monotonic
from types import FrameType

import uvicorn
from fastapi import FastAPI
from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import ToMeConfigError, ToMeError
from .app_config import url_of
from .middleware import is_not_repeated
from .queue import ImageQueue

logger = logging.getLogger("uvicorn.error")
CONNECTIONS = 512  # at most; many more than the queue holds
FILES = 4096  # limit on open files to set, if the process may raise it
SPARE_FILES = 32  # other files than connections that may be opened after the start
HEAD_SECONDS = 10.0  # for a request's first line and headers
SEND_SECONDS = 30.0  # in which a client must read at least a byte of its answer


class ServerFailedError(ToMeError, RuntimeError):
    """The server ended because its model could not be loaded or its image thread has ended."""


def serve(
    queue: ImageQueue,
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 8000,
    seconds: float = 120,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    After the first signal, further requests get 503, /ready too. When all accepted requests are answered, or `seconds`
    after the signal, all connections are closed and this returns. The second signal abandons all requests. If a
    pipeline call does not end at its next step, the process ends with exit status 1.

    Args:
        queue: not yet started. It loads its engine while the server already answers /health and /ready.
        app: from `create_app`, over that queue.
        host, port: address to listen on; port 0 selects a free one, which is logged.
        seconds: longest time from the first signal to the end.
        on_ready: called once with the address for a browser on this machine, when the model is loaded.

    Raises:
        ServerFailedError: the model could not be loaded, or the image thread has ended.
        ToMeConfigError: the server cannot listen on the address, or the process may open too few files.
    """
    server = DrainingServer(app, queue, seconds)
    listener = listen(host, port)
    if on_ready is not None:
        server.on_ready = partial(on_ready, url_of(host, listener.getsockname()[1]))
    logger.info("listening at http://%s:%d", *listener.getsockname()[:2])
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(is_not_repeated)
    queue.start()
    try:
        server.run(sockets=[listener])
    finally:
        failure, is_running = queue.failure, queue.running_since is not None
        if not queue.close(max(1.0, server.end - monotonic()) if is_running else 1.0):
            logger.warning("ending the process while the model is %s", "running" if is_running else "loading")
            logging.shutdown()
            os._exit(1 if is_running else 0)
        listener.close()
    if failure is not None:
        raise ServerFailedError(
            f"the model could not be loaded, or the image thread has ended: {failure}"
        ) from failure


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the address.

    Raises:
        ToMeConfigError: the address is not one of this machine's, or its port is in use.
    """
    if not 0 <= port <= 65535:
        raise ToMeConfigError(f"port={port} is not allowed: it must be 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, ValueError) as error:
        is_in_use = isinstance(error, OSError) and error.errno == EADDRINUSE
        remedy = ". Choose another --port, or 0 for a free one." if is_in_use else ""
        raise ToMeConfigError(f"host={host!r}, port={port}: cannot listen on this address: {error}{remedy}") from error


def connection_limits() -> tuple[int, int]:
    """The most connections, and the most to accept at once, within this process's limit on open files.

    Raises:
        ToMeConfigError: the limit leaves no room for 8 connections.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)  # soft and hard
    soft, files = (FILES if limit == resource.RLIM_INFINITY else min(FILES, limit) for limit in limits)
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, limits[1]))
    at_once = files // 16
    # asyncio accepts up to `at_once` in one turn of its loop, and an aborted connection is closed four turns later.
    connections = min(CONNECTIONS, files - len(os.listdir("/dev/fd")) - SPARE_FILES - 4 * at_once)
    if connections < 8:
        raise ToMeConfigError(f"this process may open {files} files, which is too few: set ulimit -n 1024")
    return connections, at_once


class DrainingServer(uvicorn.Server):
    """Ends when the queue is idle after a signal, `seconds` after it, or when the queue has failed."""

    def __init__(self, app: FastAPI, queue: ImageQueue, seconds: float = 120) -> None:
        connections, at_once = connection_limits()
        super().__init__(
            uvicorn.Config(
                app,
                http=PatientProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                limit_concurrency=connections + 1,  # 503 if every connection has a request
                backlog=at_once,
                server_header=False,
                proxy_headers=False,
            )
        )
        self.end = 0.0  # by time.monotonic(), after a signal
        self.on_ready: Callable[[], None] | None = None  # called once, when the queue is ready
        self._queue, self._seconds = queue, seconds
        self._signal: int | None = None  # set by the signal handler, which must not lock

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends the server at once."""
        self.should_exit = self.force_exit = self._signal is not None
        self._signal = self._signal or sig

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether to end."""
        if self._signal and not self.end:
            logger.info("%s: finishing accepted requests", signal.Signals(self._signal).name)
            self.end = monotonic() + self._seconds
            self._queue.drain()
        if self.on_ready is not None and self._queue.state == "ready":
            self.on_ready()
            self.on_ready = None
        if self._queue.state == "failed" or (self.end and (self._queue.is_idle or monotonic() > self._close_by)):
            self.should_exit = True
        self._abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until the clients have read their answers or the time is over."""
        self.end = self.end or monotonic() + self._seconds
        closing = asyncio.ensure_future(super().shutdown(sockets))
        while not closing.done():
            self.force_exit = self.force_exit or monotonic() > self._close_by
            self._abort()
            await asyncio.wait([closing], timeout=0.1)
        await closing
        self._abort(stalled_only=False)
        await asyncio.sleep(0.1)  # so that requests notice it

    @property
    def _close_by(self) -> float:
        return self.end - self._seconds / 10  # the rest is for the image thread

    def _abort(self, stalled_only: bool = True) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, PatientProtocol) and (not stalled_only or connection.is_stalled()):
                connection.transport.abort()


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with features that uvicorn has no settings for.

    - A time limit for a request's head, and for a client to read its answer.
    - If there are too many connections, the one that has been idle longest is closed, instead of a 503 for all; first
      those without any request.
    - A 400 instead of a traceback for a Content-Length with more digits than int() accepts (h11 before 0.15), and for
      a body that becomes malformed while its request is answered.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._since = monotonic()  # time of the client's last progress
        self._unsent = 0  # bytes of answers that it had not read at that time
        # asyncio sets this only for sockets whose protocol number is not 0; socket.create_server makes such with 0.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) + 1 >= (self.limit_concurrency or CONNECTIONS):
            idle = [other for other in self.connections if isinstance(other, PatientProtocol) and other._is_idle]
            if idle:
                oldest = min(idle, key=lambda other: (other.cycle is not None, other._since))
                oldest.transport.abort()
                self.connections.discard(oldest)  # it must not count until the event loop reports its loss
        super().connection_made(transport)

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except ValueError:
            self.send_400_response("Invalid HTTP request received.")

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:  # the malformed part may be its body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except LocalProtocolError:  # it already has an answer
            self.transport.close()

    def on_response_complete(self) -> None:
        self._since = monotonic()  # is_stalled() may never see a short request
        super().on_response_complete()

    @property
    def _is_idle(self) -> bool:
        """Whether there is no open request and no answer to send."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and not self.transport.get_write_buffer_size()

    def is_stalled(self) -> bool:
        """Whether the client has made no progress for too long; must be called regularly."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent or not (unsent or self._is_idle):
            self._since, self._unsent = monotonic(), unsent
        return monotonic() - self._since > (SEND_SECONDS if unsent else HEAD_SECONDS)
