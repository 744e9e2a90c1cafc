"""The server of one process: uvicorn in a thread, an engine in each further thread. SIGTERM finishes accepted jobs."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from errno import EADDRINUSE
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..errors import ToMeConfigError, ToMeError
from .app_config import AppConfig, url_of
from .pool import EnginePool

logger = logging.getLogger("uvicorn.error")


class ServerFailedError(ToMeError, RuntimeError):
    """The server ended because its model could not be loaded or its image thread has ended."""


def serve(
    pool: EnginePool,
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 8000,
    seconds: float = 120,
    on_ready: Callable[[str], None] | None = None,
    keep_alive: float = AppConfig.keep_alive_seconds,
) -> None:
    """Serve until SIGTERM or SIGINT.

    After the first signal, further requests get 503, /ready too. When all accepted requests are answered, or `seconds`
    after the signal, all connections are closed and this returns. The second signal abandons all requests. If a
    pipeline call does not end at its next step, the process ends with exit status 1.

    Args:
        pool: not yet started. It loads its engine while the server already answers /health and /ready.
        app: from `create_app`, over that pool.
        host, port: address to listen on; port 0 selects a free port, which is logged.
        seconds: longest time from the first signal to the end.
        on_ready: called once with the address for a browser on this machine, when the model is loaded.
        keep_alive: seconds without a request after which a connection is closed.

    Raises:
        ServerFailedError: the model could not be loaded, or the image thread has ended.
        ToMeConfigError: the server cannot listen on the address.
    """
    server = DrainingServer(app, pool, seconds, keep_alive)
    logger.addFilter(_is_about_this_server)
    listener = listen(host, port)
    if on_ready is not None:
        server.on_ready = partial(on_ready, url_of(host, listener.getsockname()[1]))
    logger.info("listening at http://%s:%d and loading the model", *listener.getsockname()[:2])
    pool.start()
    try:
        server.run(sockets=[listener])
    finally:
        failure, is_running = pool.failure, pool.queue.running_calls > 0
        if not pool.close(max(1.0, server.end - monotonic()) if is_running else 1.0):
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol's number, unlike that of socket.create_server: asyncio sets TCP_NODELAY only for such sockets.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        return listener
    except (OSError, OverflowError, ValueError) as error:
        listener.close()
        is_in_use = isinstance(error, OSError) and error.errno == EADDRINUSE
        remedy = ". Choose another port, or 0 for a free one." if is_in_use else ""
        raise ToMeConfigError(f"cannot listen on {host}, port {port}: {error}{remedy}") from error


def _is_about_this_server(record: logging.LogRecord) -> bool:
    """Whether a line of the log is not uvicorn's advice to install a library of websockets: this server has none."""
    return not record.getMessage().startswith("No supported WebSocket library")


class DrainingServer(uvicorn.Server):
    """Ends when the queue is idle after a signal, `seconds` after it, or when the pool has failed."""

    def __init__(
        self,
        app: FastAPI,
        pool: EnginePool,
        seconds: float = 120,
        keep_alive: float = AppConfig.keep_alive_seconds,
    ) -> None:
        options: dict[str, Any] = {"http": "h11", "ws": "none", "loop": "asyncio", "lifespan": "off"}
        options["timeout_keep_alive"] = keep_alive
        super().__init__(uvicorn.Config(app, **options, server_header=False, proxy_headers=False))
        self.end = 0.0  # by time.monotonic(), after a signal
        self.on_ready: Callable[[], None] | None = None  # called once, when the pool is ready
        self._pool, self._seconds = pool, seconds
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
            self._pool.drain()
        if self.on_ready is not None and self._pool.state == "ready":
            self.on_ready()
            self.on_ready = None
        if self._pool.state == "failed" or (self.end and (self._pool.queue.is_idle or monotonic() > self._close_by)):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until the clients have read their answers, or the time limit passes."""
        self.end = self.end or monotonic() + self._seconds
        at_the_end = asyncio.get_running_loop().call_later(
            max(0.0, self._close_by - monotonic()), self._close_connections
        )
        await super().shutdown(sockets)
        at_the_end.cancel()
        self._close_connections()  # after a second signal
        await asyncio.sleep(0.1)  # so that requests notice it

    def _close_connections(self) -> None:
        """Close the connections of clients that do not read. Their requests then end, and uvicorn waits for that.

        With a timeout of its own, uvicorn would cancel them, and log that as a fault of the application.
        """
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @property
    def _close_by(self) -> float:
        return self.end - self._seconds / 10  # the rest is for the image thread
