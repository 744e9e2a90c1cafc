"""uvicorn's HTTP connections, over h11. A malformed request gets an answer in JSON and one line in the log."""

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .api_errors import ApiError

logger = logging.getLogger("uvicorn.error")
# h11 needs 7 µs for a chunk, even of one byte, and other clients wait until all chunks of a read are parsed. In chunks
# of one byte that takes 0.4 s for a read of 256 KiB, asyncio's default, and 0.03 s for 16 KiB. A body of 16 MiB takes
# two minutes in all.
MAX_READ_BYTES = 16 * 2**10
MAX_CHUNKS = 100_000


class _Connection(h11.Connection):
    """h11's parser. It raises an ApiError for a malformed request, and for a body in more than MAX_CHUNKS chunks."""

    _chunks = 0  # in the current body

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # After this mark h11's message quotes the request, which may contain a key, and the message is logged.
            raise _malformed(str(error).partition(": bytearray(")[0]) from None
        except ValueError:  # int() refuses more than 4,300 digits
            raise _malformed("bad Content-Length") from None
        if isinstance(event, h11.Request):
            self._chunks = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_end
            if self._chunks > MAX_CHUNKS:
                raise _malformed(f"the body has more than {MAX_CHUNKS} chunks: send it in larger ones")
        return event


def _malformed(reason: str) -> ApiError:
    message = f"malformed request: {reason}"
    return ApiError(400, message, code="malformed_request", headers={"Connection": "close"})


class HttpProtocol(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's protocol, with small reads and with our answer to a malformed request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Connection(h11.SERVER)
        self._buffer = bytearray()

    # asyncio reads into this buffer, so no read is larger than it.
    def get_buffer(self, sizehint: int) -> bytearray:
        self._buffer = bytearray(MAX_READ_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except ApiError as error:
            logger.warning(error.detail)
            self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        """Send the error, unless the application has begun an answer, and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # from now on uvicorn ignores what the application sends
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error.respond("")
            head = h11.Response(status_code=400, headers=response.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
