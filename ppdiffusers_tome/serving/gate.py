"""What every request passes before it is parsed: the key, the size and pace of its body, and the counters."""

import asyncio
import base64
import binascii
import hmac
import logging
from time import monotonic

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import Metrics
from .refusals import Refusal
from .settings import Settings

logger = logging.getLogger(__name__)
OPEN = ("/health", "/ready")  # what a load balancer asks, without a key
ENDPOINTS = frozenset(
    (*OPEN, "/metrics", "/v1/images/generations", "/v1/models", "/sdapi/v1/txt2img", "/sdapi/v1/img2img")
)


class Gate:
    """ASGI middleware: 401 without the key, 413 and 408 while the body comes in, one count for each answer."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = monotonic()
        path = scope["path"]
        endpoint = path if path in ENDPOINTS else "other"  # few labels, whatever clients ask for
        is_counted = False

        def count(status: int) -> None:
            nonlocal is_counted
            is_counted = True
            self._metrics.requests.labels(endpoint, str(status)).inc()
            self._metrics.request_seconds.labels(endpoint).observe(monotonic() - start)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        try:
            refusal = self._refuse(scope)
            if refusal is None:
                await self._app(scope, _Body(receive, self._settings), counted)
            else:
                await refusal.respond(path)(scope, receive, counted)
        except Exception:
            # A mistake in this package. The client does not see it, and may go on using its connection.
            logger.exception("%s failed", path)
            if is_counted:
                raise
            message = "internal error; the log of the server has the reason"
            await Refusal(500, message, code="internal_error").respond(path)(scope, receive, counted)

    def _refuse(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        key = self._settings.api_key
        if key is not None and scope["path"] not in OPEN and not _has_key(headers.get("authorization", ""), key):
            is_basic = scope["path"].startswith("/sdapi/")
            challenge = {"WWW-Authenticate": 'Basic realm="ppdiffusers_tome"' if is_basic else "Bearer"}
            return Refusal(401, "the API key is missing or wrong", code="invalid_api_key", headers=challenge)
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._settings.body_bytes:
            return _too_large(self._settings)
        return None


class _Body:
    """`receive`, with an eye on how large the body is and how long it takes."""

    def __init__(self, receive: Receive, settings: Settings) -> None:
        self._receive, self._settings = receive, settings
        self._deadline = monotonic() + settings.body_seconds
        self._size = 0
        self._is_complete = False

    async def __call__(self) -> Message:
        if self._is_complete:  # what comes now is the client hanging up, at any time
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._deadline - monotonic()))
        except asyncio.TimeoutError:
            raise Refusal(
                408, f"the body took longer than {self._settings.body_seconds:g} s", code="slow_body"
            ) from None
        self._size += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if self._size > self._settings.body_bytes:
            raise _too_large(self._settings)
        return message


def _too_large(settings: Settings) -> Refusal:
    return Refusal(413, f"the body is larger than {settings.body_bytes} bytes", code="body_too_large")


def _has_key(authorization: str, key: str) -> bool:
    """Whether the header is "Bearer KEY" or, as webuiapi sends it, "Basic base64(anybody:KEY)"; in constant time."""
    scheme, _, credentials = authorization.partition(" ")
    given = credentials.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            given = b""
    elif scheme.lower() != "bearer":
        given = b""
    return hmac.compare_digest(given, key.encode("ascii"))
