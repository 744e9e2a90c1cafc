"""What every request passes before its fields are read: key, origin, size, pace and form of its body, counters."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBasic, HTTPBearer
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import Metrics
from .refusals import Refusal
from .settings import Settings

logger = logging.getLogger(__name__)
BEARER = HTTPBearer(auto_error=False, description="the API key")
BASIC = HTTPBasic(auto_error=False, description="any user, and the API key as password, as webuiapi sends it")
OPEN = ("/health", "/ready")  # what a load balancer asks, without a key
ENDPOINTS = frozenset(
    (*OPEN, "/metrics", "/v1/images/generations", "/v1/models", "/sdapi/v1/txt2img", "/sdapi/v1/img2img")
)
LARGEST_LENGTH = 15  # digits of a Content-Length; Python itself reads no more than 4,300
MOST_SEPARATORS = 20_000  # of JSON: no request has that many values, and millions of them cost seconds and gigabytes


class Gate:
    """ASGI middleware: 401, 403, 411 and 413 by the head, 408 while the body comes in; counts every answer."""

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

        async def counted(message: Message) -> None:
            nonlocal is_counted
            if message["type"] == "http.response.start":
                is_counted = True
                self._metrics.requests.labels(endpoint, str(message["status"])).inc()
                self._metrics.request_seconds.labels(endpoint).observe(monotonic() - start)
            await send(message)

        try:
            refusal = await self._refuse(Request(scope))
            if refusal is None:
                await self._app(scope, _Body(receive, self._settings.body_seconds), counted)
            else:
                await refusal.respond(path)(scope, receive, counted)
        except Exception:
            # A mistake in this package. The client does not see it, and may go on using its connection.
            logger.exception("%s failed", path)
            if is_counted:
                raise
            message = "internal error; the log of the server has the reason"
            await Refusal(500, message, code="internal_error").respond(path)(scope, receive, counted)

    async def _refuse(self, request: Request) -> Refusal | None:
        path, is_preflight = request.url.path, request.method == "OPTIONS"  # which a browser sends without a key
        key = self._settings.api_key
        if key is not None and path not in OPEN and not is_preflight and not await _has_key(request, key):
            scheme = 'Basic realm="ppdiffusers_tome"' if path.startswith("/sdapi/") else "Bearer"
            challenge = {"WWW-Authenticate": scheme}
            return Refusal(401, "the API key is missing or wrong", code="invalid_api_key", headers=challenge)
        origin = request.headers.get("origin")
        if request.method == "POST" and origin is not None and not {origin, "*"} & {*self._settings.origins}:
            message = f"a web page of {origin[:100]!r} may not draw here: start the server with --allow-origin"
            return Refusal(403, message, code="origin_not_allowed")
        if "transfer-encoding" in request.headers:  # chunks of one byte take h11 minutes, in which nobody is answered
            message = "the body must be sent with a Content-Length, not in chunks"
            return Refusal(411, message, code="length_required", headers={"Connection": "close"})
        length = request.headers.get("content-length", "0")
        if len(length) > LARGEST_LENGTH or int(length) > self._settings.body_bytes:
            message = f"the body is larger than {self._settings.body_bytes} bytes"
            return Refusal(413, message, code="body_too_large")
        return None


class _Body:
    """`receive`, with an eye on how long the body takes."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive, self._seconds = receive, seconds
        self._deadline = monotonic() + seconds
        self._is_complete = False

    async def __call__(self) -> Message:
        if self._is_complete:  # what comes now is the client hanging up, at any time
            return await self._receive()
        try:
            part = await asyncio.wait_for(self._receive(), max(0.0, self._deadline - monotonic()))
        except asyncio.TimeoutError:
            message = f"the body took longer than {self._seconds:g} s"
            raise Refusal(408, message, code="slow_body") from None
        self._is_complete = not part.get("more_body", False)
        return part


class JsonRoute(APIRoute):
    """A route whose body must be sent as JSON, which a web page elsewhere cannot do, and is parsed in a thread."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json if self.body_field else handle


class _JsonRequest(Request):
    async def body(self) -> bytes:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refusal(
                415, "the body must be sent as Content-Type: application/json", code="unsupported_media_type"
            )
        return await super().body()

    async def json(self) -> Any:
        return await asyncio.to_thread(_parse, await self.body())


def _parse(body: bytes) -> Any:
    if sum(map(body.count, (b",", b":", b"[", b"{"))) > MOST_SEPARATORS:
        raise Refusal(
            413, f"the body has more than {MOST_SEPARATORS} commas, colons and brackets", code="too_many_values"
        )
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}", code="invalid_json") from None


async def _has_key(request: Request, key: str) -> bool:
    """Whether the request has the key as FastAPI's schemes read it; compared in constant time."""
    try:
        token, login = await BEARER(request), await BASIC(request)
    except HTTPException:  # "Basic" that is not base64
        return False
    given = token.credentials if token else login.password if login else ""
    return secrets.compare_digest(given.encode(), key.encode())
