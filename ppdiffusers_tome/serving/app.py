"""The HTTP application, over engines and their queue: health, metrics, both APIs and the page for browsers."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from .._version import __version__
from ..errors import ParameterError
from . import api_openai, api_webui
from .api_errors import EXPECTED, RETRY_AFTER, ApiError, handle_bug, handle_error, responses
from .app_config import AppConfig
from .image_engine import ServedModel
from .middleware import BASIC, BEARER, PAGE, CountingMiddleware, OriginMiddleware, RequestMiddleware
from .pool import EnginePool
from .prometheus import Metrics
from .protocol import Health, OpenAIErrorResponse, WebuiErrorResponse
from .service import ImageService, Service

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


def create_app(model: ServedModel, pool: EnginePool, metrics: Metrics, config: AppConfig) -> FastAPI:
    """Build the application.

    Args:
        model: what requests may ask for.
        pool: generates the images of its queue; /ready and /health report its state.
        metrics: those of the pool and its queue; requests are counted there too.
        config: time limits, sizes and the API key.

    Returns:
        An ASGI application. It reads no file and stores nothing of a request after its answer. In a server of your
        own, start the pool before it and close the pool afterwards: the application's lifespan does neither.

    Raises:
        ParameterError: a request may ask for more images than the queue holds.
    """
    queue, images = pool.queue, model.limits.images
    if queue.capacity < images:
        rule = f"one request may ask for {images} images (--max-images), which the queue must hold"
        raise ParameterError("capacity", queue.capacity, rule)
    # FastAPI's documentation pages load scripts from other hosts. /openapi.json describes the interface.
    handlers: dict[Any, Any] = {**dict.fromkeys(EXPECTED, handle_error), Exception: handle_bug}
    app = FastAPI(
        title="ppdiffusers_tome",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        exception_handlers=handlers,
        redirect_slashes=False,  # CountingMiddleware removes them
    )
    service = ImageService(model, pool, config)
    app.state.service, app.state.metrics = service, metrics
    _add_middleware(app, metrics, config)
    app.include_router(open_routes)
    key = [Security(BEARER), Security(BASIC)] if config.api_key is not None else []
    statuses = (400, 401, 403, 415) if key else (400, 403, 415)
    openai, webui = (responses(model, *statuses) for model in (OpenAIErrorResponse, WebuiErrorResponse))
    app.include_router(key_routes, dependencies=key, responses=openai)
    for router in (api_openai.image_routes(service), api_openai.router):
        app.include_router(router, dependencies=key, responses=openai)
    for router in (api_webui.image_routes(service), api_webui.router):
        app.include_router(router, dependencies=key, responses=webui)
    app.include_router(api_webui.probes, dependencies=key, responses=webui)
    if config.page:
        app.state.page = _read_page()
        app.include_router(page_routes)
    return app


def _add_middleware(app: FastAPI, metrics: Metrics, config: AppConfig) -> None:
    """Add the middleware, the outermost last: refusals by the head have CORS headers too, so pages can read them."""
    app.add_middleware(RequestMiddleware, config=config)
    if config.origins:
        app.add_middleware(OriginMiddleware, config=config)
    app.add_middleware(CountingMiddleware, metrics=metrics)


@open_routes.head("/health", include_in_schema=False)
@open_routes.get("/health", responses={503: {"model": Health}}, response_model_exclude_none=True)
async def health(response: Response, service: Service) -> Health:
    """Liveness: 503, with the reason, if the process should be replaced."""
    report = _health_of(service.pool)
    response.status_code = 503 if report.reason else 200
    return report


@open_routes.head("/ready", include_in_schema=False)
@open_routes.get("/ready", responses={503: {"model": Health}}, response_model_exclude_none=True)
async def ready(response: Response, service: Service) -> Health:
    """Readiness: 503 while loading and shutting down."""
    if service.pool.state != "ready":
        response.status_code = 503
        response.headers.update(RETRY_AFTER)
    return _health_of(service.pool)


def _health_of(pool: EnginePool) -> Health:
    return Health(state=pool.state, engines=pool.engines, reason=pool.unhealthy_reason)


@key_routes.get("/metrics", response_class=PlainTextResponse)
async def show_metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(request.app.state.metrics.page(), media_type=CONTENT_TYPE_LATEST)


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
