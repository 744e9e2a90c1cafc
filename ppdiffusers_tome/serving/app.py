"""The HTTP application, over a queue that generates images: health, metrics, both APIs and the page for browsers."""

from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from .._version import __version__
from . import api_openai, api_webui
from .api_errors import ApiError, answer, answer_bug, responses
from .app_config import AppConfig
from .middleware import BASIC, BEARER, PAGE, CountingMiddleware, OriginMiddleware, RequestMiddleware
from .protocol import Health, OpenAIErrorResponse, WebuiErrorResponse, add_keywords
from .queue import ImageQueue

FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# The page's policy forbids everything from elsewhere. Styles that its scripts set on an element
# (`style.setProperty`) need no 'unsafe-inline'.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


open_routes = APIRouter()  # need no key
key_routes = APIRouter()
page_routes = APIRouter(include_in_schema=False)


class App(FastAPI):
    """The application. `state` has what its handlers need: queue, page, openai and webui."""

    def openapi(self) -> dict[str, Any]:
        """The schema, with the values of fields that depend on the export, the command line and the loaded engine."""
        schema = deepcopy(super().openapi())
        openai: api_openai.OpenAIService = self.state.openai
        webui: api_webui.WebuiService = self.state.webui
        keywords = dict.fromkeys(("ImageRequest", "TokensRequest"), openai.keywords)
        keywords |= dict.fromkeys(("TwoPassRequest", "ImageToImageRequest", "Options"), webui.keywords)
        for name, model in schema["components"]["schemas"].items():
            add_keywords(model, keywords.get(name, {}))
        if openai.queue.limits.image_to_image:
            body = schema["paths"][api_openai.EDITS]["post"]["requestBody"]
            add_keywords(body["content"]["multipart/form-data"]["schema"], openai.keywords)
        else:
            del schema["paths"][api_openai.EDITS]
        return schema


def create_app(queue: ImageQueue, config: AppConfig) -> FastAPI:
    """Build the application.

    Args:
        queue: generates the images; /ready reports its state. Requests are counted in its metrics, as its images are.
        config: time limits, sizes and the API key.

    Returns:
        An ASGI application. It reads no file and stores nothing of a request after its answer. In a server of your
        own, start the queue before it and close the queue afterwards: the application's lifespan does neither.
    """
    # FastAPI's documentation pages load scripts from other hosts. /openapi.json describes the interface.
    handlers: dict[Any, Any] = {HTTPException: answer, RequestValidationError: answer, Exception: answer_bug}
    app = App(
        title="ppdiffusers_tome",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        exception_handlers=handlers,
        redirect_slashes=False,  # CountingMiddleware removes them
    )
    app.state.queue = queue
    app.state.openai = api_openai.OpenAIService(queue, config)
    app.state.webui = api_webui.WebuiService(queue, config)
    _add_middleware(app, queue, config)
    app.include_router(open_routes)
    key = [Security(BEARER), Security(BASIC)] if config.api_key is not None else []
    statuses = (400, 401, 403, 415) if key else (400, 403, 415)
    openai, webui = (responses(model, *statuses) for model in (OpenAIErrorResponse, WebuiErrorResponse))
    app.include_router(key_routes, dependencies=key, responses=openai)
    app.include_router(api_openai.router, dependencies=key, responses=openai)
    app.include_router(api_webui.router, dependencies=key, responses=webui)
    app.include_router(api_webui.probes, dependencies=key, responses=webui)
    if config.page:
        app.state.page = _read_page()
        app.include_router(page_routes)
    return app


def _add_middleware(app: FastAPI, queue: ImageQueue, config: AppConfig) -> None:
    """The last one added is the outermost: refusals by the head have CORS headers too, so that pages can read them."""
    app.add_middleware(RequestMiddleware, config=config)
    if config.origins:
        app.add_middleware(OriginMiddleware, config=config)
    app.add_middleware(CountingMiddleware, metrics=queue.metrics)


async def _queue(request: Request) -> ImageQueue:
    return request.app.state.queue


Queue = Annotated[ImageQueue, Depends(_queue)]


@open_routes.head("/health", include_in_schema=False)
@open_routes.get("/health", responses={503: {"model": Health}}, response_model_exclude_none=True)
async def health(response: Response, queue: Queue) -> Health:
    """Liveness: 503, with the reason, if the process should be replaced."""
    reason = queue.unhealthy_reason
    response.status_code = 503 if reason else 200
    return Health(state=queue.state, reason=reason)


@open_routes.head("/ready", include_in_schema=False)
@open_routes.get("/ready", responses={503: {"model": Health}}, response_model_exclude_none=True)
async def ready(response: Response, queue: Queue) -> Health:
    """Readiness: 503 while loading and shutting down."""
    if queue.state != "ready":
        response.status_code = 503
        response.headers["Retry-After"] = "5"
    return Health(state=queue.state, reason=queue.unhealthy_reason)


@key_routes.get("/metrics", response_class=PlainTextResponse)
async def show_metrics(queue: Queue) -> Response:
    """Prometheus metrics."""
    return Response(queue.metrics.page(), media_type=CONTENT_TYPE_LATEST)


def _read_page() -> dict[str, tuple[bytes, str]]:
    """The page's files by path, with their types: no path from a request reaches the file system."""
    files = {
        PAGE + file.relative_to(FOLDER).as_posix(): (file.read_bytes(), TYPES.get(file.suffix, "text/plain"))
        for file in FOLDER.rglob("*")
        if file.is_file()
    }
    files["/"] = files.pop(f"{PAGE}index.html")
    return files


@page_routes.api_route("/", methods=["GET", "HEAD"])
@page_routes.api_route(PAGE + "{name:path}", methods=["GET", "HEAD"])
async def show_page(request: Request) -> Response:
    """A file of the page."""
    files: dict[str, tuple[bytes, str]] = request.app.state.page
    path = request.scope["path"]
    if path not in files:
        raise ApiError(404, "Not Found")
    content, kind = files[path]
    return Response(content, media_type=kind, headers=HEADERS)
