"""One process that serves: uvicorn in one thread, the queue in another; SIGTERM finishes what was accepted."""

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import ToMeConfigError, ToMeError
from .queue import PictureQueue

logger = logging.getLogger("uvicorn.error")
HEAD_SECONDS = 10.0  # for a request's first line and headers, which uvicorn itself would wait for without end
CONNECTIONS = 512  # uvicorn answers 503 beyond; far more than the queue holds, far less than a process may open


class ServerFailedError(ToMeError, RuntimeError):
    """The server ended because its model could not be loaded, or because the thread that draws has ended."""


def serve(queue: PictureQueue, app: FastAPI, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until SIGTERM or SIGINT.

    The first signal drains: further requests get 503, /ready too, and when all accepted ones are answered this
    returns. That takes no longer than a request may take. The second signal abandons what is left.

    Args:
        queue: not yet started; it loads its engine while the server already answers /health and /ready.
        app: from `create_app`, over that queue.
        host, port: where to listen; port 0 for one that is free, which the log tells.

    Raises:
        ServerFailedError: see there.
        ToMeConfigError: the address cannot be listened at.
    """
    listener = _listen(host, port)
    server = DrainingServer(app, queue)
    logger.info("listening at http://%s:%d", *listener.getsockname()[:2])
    queue.start()
    try:
        server.run(sockets=[listener])
    finally:
        has_failed = queue.state == "failed"
        queue.close()
        listener.close()
    if has_failed:
        raise ServerFailedError("the model could not be loaded, or drawing has ended; the log has the reason")


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ToMeConfigError(f"port={port} is not allowed: it must be 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ToMeConfigError(f"host={host!r}, port={port}: cannot listen there: {error}") from error


class DrainingServer(uvicorn.Server):
    """Ends when the queue is idle after a signal, or when it has failed, and then without raising the signal again."""

    def __init__(self, app: FastAPI, queue: PictureQueue) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=PatientProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                limit_concurrency=CONNECTIONS,
                server_header=False,
                proxy_headers=False,
            )
        )
        self._queue = queue
        self._is_told = False  # a signal has come; set in its handler, where no lock may be taken

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once."""
        self.should_exit = self.force_exit = self._is_told
        self._is_told = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self._is_told and self._queue.state in ("loading", "ready"):
            logger.info("%s: finishing what was accepted", signal.Signals.SIGTERM.name)
            self._queue.drain()
        if self._queue.state == "failed" or (self._is_told and self._queue.is_idle):
            self.should_exit = True
        return await super().on_tick(counter)


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that loses patience with who sends no whole head in HEAD_SECONDS, or goes on after the answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._impatience: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        is_asking = self.cycle is not None and not self.cycle.response_complete
        if is_asking:
            self._stop_watching()
        elif self._impatience is None:
            self._impatience = self.loop.call_later(HEAD_SECONDS, self._close)

    def _stop_watching(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None

    def _close(self) -> None:
        self._impatience = None
        self.transport.close()
