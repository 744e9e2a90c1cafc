"""Checks before a request's fields are read: API key, origin, and size, duration and type of the body; counters."""

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

from .api_errors import ApiError, internal_error
from .app_config import AppConfig
from .prometheus import Metrics

logger = logging.getLogger(__name__)
BEARER = HTTPBearer(auto_error=False, description="the API key")
BASIC = HTTPBasic(auto_error=False, description="any user, with the API key as password, as webuiapi sends it")
PAGE = "/page/"  # the folder of the page's files. They and "/" are public
WITHOUT_KEY = ("/health", "/ready")  # for load balancers
ENDPOINTS = frozenset(
    (*WITHOUT_KEY, "/", "/metrics", "/v1/images/generations", "/v1/models", "/sdapi/v1/txt2img", "/sdapi/v1/img2img")
)
# In JSON; no request has as many. Stops bodies of millions of small values, whose error messages take gigabytes.
MOST_SEPARATORS = 20_000


class CountingMiddleware:
    """ASGI middleware around all others, which counts all answers."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = monotonic()
        endpoint = scope["path"] if scope["path"] in ENDPOINTS else "other"  # so that clients cannot create labels

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(endpoint, str(message["status"])).inc()
                self._metrics.request_seconds.labels(endpoint).observe(monotonic() - start)
            await send(message)

        await self._app(scope, receive, send_and_count)


class RequestMiddleware:
    """ASGI middleware: 401, 403, 411 and 413 by the head; 500 for a bug."""

    def __init__(self, app: ASGIApp, config: AppConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        try:
            await self._check_head(Request(scope))
            await self._app(scope, receive, send)
        except ApiError as error:
            await error.respond(path)(scope, receive, send)
        except Exception:  # a bug in this package
            logger.exception("a request to %.100r failed", path)  # its repr, or clients could forge lines of the log
            await internal_error().respond(path)(scope, receive, send)

    async def _check_head(self, request: Request) -> None:
        path = request.scope["path"]  # as routing reads it; request.url is built from the client's Host header
        is_open = path in ("/", *WITHOUT_KEY) or path.startswith(PAGE) or request.method == "OPTIONS"  # a preflight
        key = self._config.api_key
        if key is not None and not is_open and not await _has_key(request, key):
            scheme = 'Basic realm="ppdiffusers_tome"' if path.startswith("/sdapi/") else "Bearer"
            challenge = {"WWW-Authenticate": scheme}
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=challenge)
        origin = request.headers.get("origin")
        # Stops web pages of others that send requests through their visitor's browser.
        if request.method == "POST" and origin is not None and not self._is_allowed(origin, request):
            message = f"web pages of {origin[:100]!r} are not allowed: start the server with --allow-origin"
            raise ApiError(403, message, code="origin_not_allowed")
        if "transfer-encoding" in request.headers:  # stops bodies of any size, and chunks of one byte, which block h11
            message = "the body must be sent with a Content-Length, not in chunks"
            raise ApiError(411, message, code="length_required", headers={"Connection": "close"})
        if int(request.headers.get("content-length", "0")) > self._config.body_bytes:
            message = f"the body is larger than {self._config.body_bytes} bytes"
            raise ApiError(413, message, code="body_too_large")

    def _is_allowed(self, origin: str, request: Request) -> bool:
        """Whether a page of this origin may send requests.

        The server's own page may, under any name: TrustedHostMiddleware refuses names that are not this server's.
        """
        own = request.headers.get("host")
        return origin.partition("://")[2] == own or bool({origin, "*"} & {*self._config.origins})


class JsonRoute(APIRoute):
    """A route whose body must be JSON, with that content type or none.

    Browsers send JSON for a page of another origin only after a preflight. They may send a body without a type, but
    with an Origin, which `RequestMiddleware` checks.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json if self.body_field else handle


class _JsonRequest(Request):
    async def body(self) -> bytes:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Some clients send no type, as stable-diffusion-webui allows. The Origin check of POST requests protects.
        if kind not in ("", "application/json"):
            message = "the body must be sent as Content-Type: application/json"
            raise ApiError(415, message, code="unsupported_media_type")
        return await super().body()

    async def json(self) -> Any:
        body = await self.body()
        if sum(map(body.count, (b",", b":", b"[", b"{"))) > MOST_SEPARATORS:
            message = f"the body has more than {MOST_SEPARATORS} commas, colons and brackets"
            raise ApiError(413, message, code="too_many_values")
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


async def _has_key(request: Request, key: str) -> bool:
    """Whether the request has the key in a Bearer or Basic header; compared in constant time."""
    try:
        token, login = await BEARER(request), await BASIC(request)
    except HTTPException:  # "Basic" with something other than base64
        return False
    sent = token.credentials if token else login.password if login else ""
    return secrets.compare_digest(sent.encode(), key.encode())
