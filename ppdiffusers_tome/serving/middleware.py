"""Checks that precede reading a request's fields (host, API key, origin, body), and the counters of answers."""

import codecs
import logging
import re
import secrets
import shlex
from collections.abc import Callable, Coroutine
from functools import partial
from time import monotonic
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBasic, HTTPBearer
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from .api_errors import WEBUI_PATHS, ApiError, internal_error
from .app_config import HOST, AppConfig, canonical_origin, host_of, origin_remedy
from .prometheus import Metrics

logger = logging.getLogger(__name__)
BEARER = HTTPBearer(auto_error=False, description="the API key")
BASIC = HTTPBasic(auto_error=False, description="any user, with the API key as password, as webuiapi sends it")
ASKS_PRIVATE_NETWORK = "access-control-request-private-network"
PAGE = "/page/"  # the folder of the page's files. They and "/" are public
# For load balancers and kubelets, which have no key and address a server by its IP. Their answers are no secret.
PROBES = ("/health", "/ready")
ENDPOINTS = frozenset(
    (
        *(*PROBES, "/", "/metrics", "/v1/models", "/v1/images/generations", "/v1/images/edits"),
        *("/sdapi/v1/txt2img", "/sdapi/v1/img2img"),
    )
)
# Commas, colons and brackets in a JSON body. Real requests have fewer. The limit stops bodies of millions of small
# values, whose error messages take gigabytes.
MAX_SEPARATORS = 20_000
COMPRESSIONS = frozenset(("br", "compress", "deflate", "gzip", "x-gzip", "zstd"))  # of Content-Encoding
NOT_JSON = {
    codecs.BOM_UTF8: "it begins with a byte order mark (BOM); send it without one",
    codecs.BOM_UTF16_LE: "it is UTF-16; send UTF-8 without a byte order mark (BOM)",
    codecs.BOM_UTF16_BE: "it is UTF-16; send UTF-8 without a byte order mark (BOM)",
    b"\x1f\x8b": "it is compressed by gzip; send it as it is",
}


class CountingMiddleware:
    """The outermost ASGI middleware, which counts all answers to HTTP requests. It refuses websockets.

    It strips a trailing slash before routing: a redirect would lose the scheme and the prefix of a proxy in front.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # no route is one. Closed before it is accepted, the handshake gets a 403
            await WebSocketClose()(scope, receive, send)
            return
        if scope["type"] != "http":  # the lifespan, which FastAPI answers
            await self._app(scope, receive, send)
            return
        start = monotonic()
        path = scope["path"].rstrip("/") or "/"
        endpoint = path if path in ENDPOINTS else "other"  # so that clients cannot create labels

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(endpoint, str(message["status"])).inc()
                self._metrics.request_seconds.labels(endpoint).observe(monotonic() - start)
            await send(message)

        await self._app({**scope, "path": path}, receive, send_and_count)


class OriginMiddleware(CORSMiddleware):
    """Starlette's, for pages of allowed origins.

    Starlette refuses a preflight in plain text. Here it goes on to the checks and routes within, which answer it with
    403 or 405, in JSON. Chromium also asks whether a page from the internet may reach a server in a private network:
    an allowed origin may.
    """

    def __init__(self, app: ASGIApp, config: AppConfig) -> None:
        super().__init__(
            app,
            allow_origins=config.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # an allowed page may send any: clients add some of their own
            expose_headers=("Retry-After",),
        )
        self._config = config

    def is_allowed_origin(self, origin: str) -> bool:
        return self._config.is_allowed_origin(origin)

    def preflight_response(self, request_headers: Headers) -> ASGIApp:  # type: ignore[override]
        # Without the question that is answered here: newer versions of Starlette refuse it by default.
        usual = Headers({name: value for name, value in request_headers.items() if name != ASKS_PRIVATE_NETWORK})
        response = super().preflight_response(usual)
        if response.status_code == 200:
            if request_headers.get(ASKS_PRIVATE_NETWORK) == "true":
                response.headers["Access-Control-Allow-Private-Network"] = "true"
            return response
        return partial(self.simple_response, request_headers=request_headers)


class RequestMiddleware:
    """ASGI middleware: 400, 401, 403 and 413 by the head, 413 while the body is read; 500 for a bug."""

    def __init__(self, app: ASGIApp, config: AppConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        try:
            await self._check_head(Request(scope))
            await self._app(scope, self._count_body(receive), send)
        except ApiError as error:
            await error.respond(path)(scope, receive, send)
        except Exception:  # a bug in this package
            logger.exception("a request to %.100r failed", path)  # its repr, or clients could forge lines of the log
            await internal_error().respond(path)(scope, receive, send)

    async def _check_head(self, request: Request) -> None:
        if request.method == "PRI":  # only the preface of HTTP/2 has it, which uvicorn reads as a request
            message = "this server speaks HTTP/1.1, and the client begins with HTTP/2: set the client to HTTP/1.1"
            raise ApiError(505, message, code="http_version_not_supported", headers={"Connection": "close"})
        host = request.headers.get("host", "")
        path = request.scope["path"]  # as routing reads it; request.url is built from the client's Host header
        if path not in PROBES and not self._config.is_allowed_host(host):
            raise ApiError(400, _host_refusal(host), code="host_not_allowed")
        is_open = path in ("/", *PROBES) or path.startswith(PAGE) or request.method == "OPTIONS"  # a preflight
        key = self._config.api_key
        if key is not None and not is_open and not await _has_key(request, key):
            scheme = 'Basic realm="ppdiffusers_tome"' if path.startswith(WEBUI_PATHS) else "Bearer"
            challenge = {"WWW-Authenticate": scheme}
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=challenge)
        origin = request.headers.get("origin")
        # Stops foreign web pages that send requests through their visitor's browser, and their preflights.
        if request.method in ("POST", "OPTIONS") and origin is not None and not self._is_allowed(origin, host):
            remedy = origin_remedy(origin) or "start the server with --allow-origin and this origin"
            message = f"web pages of {origin[:100]!r} are not allowed: {remedy}"
            raise ApiError(403, message, code="origin_not_allowed")
        length = request.headers.get("content-length", "0")
        if not re.fullmatch("[0-9]{1,4000}", length):  # int() reads at most 4,300 digits
            message = f"the Content-Length {length[:50]!r} is not a number of bytes"
            raise ApiError(400, message, code="malformed_request")
        if "transfer-encoding" in request.headers and "content-length" in request.headers:
            # A proxy may take the length where h11 takes the chunks, and see further requests in what follows.
            message = "the request has both a Content-Length and a Transfer-Encoding"
            raise ApiError(400, message, code="malformed_request", headers={"Connection": "close"})
        self._check_size(int(length))
        encodings = {name.strip().lower() for name in request.headers.get("content-encoding", "").split(",")}
        if compressions := ", ".join(sorted(encodings & COMPRESSIONS)):
            message = f"the body is compressed (Content-Encoding: {compressions}): send it as it is"
            headers = {"Accept-Encoding": "identity"}
            raise ApiError(415, message, code="unsupported_media_type", headers=headers)

    def _count_body(self, receive: Receive) -> Receive:
        """`receive`, for a body whose length is not in the head: it raises ApiError once the body is too large."""
        size = 0

        async def receive_and_count() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            self._check_size(size)
            return message

        return receive_and_count

    def _check_size(self, size: int) -> None:
        if size > self._config.body_bytes:
            message = f"the body is larger than {self._config.body_bytes} bytes"
            raise ApiError(413, message, code="body_too_large")

    def _is_allowed(self, origin: str, host: str) -> bool:
        """Whether a page of this origin may send requests. The server's own may, under each of its names."""
        own = {canonical_origin(f"{scheme}://{host}") for scheme in ("http", "https")}
        return canonical_origin(origin) in own or self._config.is_allowed_origin(origin)


class JsonRoute(APIRoute):
    """A route whose body must be JSON, with that content type or none.

    For JSON, browsers require a CORS preflight of pages of different origins. They may send a body without a type, but
    with an Origin, which `RequestMiddleware` checks.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
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
        if sum(map(body.count, (b",", b":", b"[", b"{"))) > MAX_SEPARATORS:
            message = f"the body has more than {MAX_SEPARATORS} commas, colons and brackets"
            raise ApiError(413, message, code="too_many_values")
        for start, reason in NOT_JSON.items():
            if body.startswith(start):
                raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _host_refusal(header: str) -> str:
    """The reason for which a Host header is refused, with the option that would accept it."""
    name = host_of(header[:100])
    remedy = f"start it with --allow-host {shlex.quote(name)}"
    if not HOST.fullmatch(name):
        remedy = "no host can have it, and only --allow-host '*' accepts it"
    return f"the Host {header[:100]!r} is not a name of this server: {remedy}"


async def _has_key(request: Request, key: str) -> bool:
    """Whether the request has the key in a Bearer or Basic header; compared in constant time."""
    try:
        token, login = await BEARER(request), await BASIC(request)
    except HTTPException:  # "Basic" with something other than base64
        return False
    sent = token.credentials if token else login.password if login else ""
    return secrets.compare_digest(sent.encode(), key.encode())
