"""The HTTP application, over a queue that generates images: health, metrics, both APIs and the page for browsers."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from .._version import __version__
from . import api_openai, api_webui
from .api_errors import ApiError, answer, answer_bug, responses
from .app_config import AppConfig
from .middleware import BASIC, BEARER, PAGE, CountingMiddleware, OriginMiddleware, RequestMiddleware
from .protocol import Health, OpenAIErrorResponse, WebuiErrorResponse
from .queue import ImageQueue

FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Of the page: everything from elsewhere is forbidden. Styles that its scripts set on an element
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


def create_app(queue: ImageQueue, config: AppConfig) -> FastAPI:
    """Build the application.

    Args:
        queue: generates the images; /ready reports its state. Requests are counted in its metrics, as its images are.
        config: time limits, sizes and the API key.

    Returns:
        An ASGI application. It reads no file and stores nothing of a request after its answer.
    """
    # FastAPI's documentation pages load scripts from other hosts. /openapi.json describes the interface.
    handlers: dict[Any, Any] = {HTTPException: answer, RequestValidationError: answer, Exception: answer_bug}
    app = FastAPI(
        title="ppdiffusers_tome",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        exception_handlers=handlers,
        redirect_slashes=False,  # CountingMiddleware removes them
    )
    # The last one added is the outermost: refusals by the head have CORS headers too, or pages could not read them.
    app.add_middleware(RequestMiddleware, config=config)
    if config.origins:
        app.add_middleware(
            OriginMiddleware,
            allow_origins=config.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # an allowed page may send any: clients add some of their own
            expose_headers=("Retry-After",),
        )
    app.add_middleware(CountingMiddleware, metrics=queue.metrics)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: {"model": Health}}, response_model_exclude_none=True)
    async def health(response: Response) -> Health:
        """Liveness: 503, with the reason, if the process should be replaced."""
        reason = queue.unhealthy_reason
        response.status_code = 503 if reason else 200
        return Health(state=queue.state, reason=reason)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses={503: {"model": Health}}, response_model_exclude_none=True)
    async def ready(response: Response) -> Health:
        """Readiness: 503 while loading and shutting down."""
        if queue.state != "ready":
            response.status_code = 503
            response.headers["Retry-After"] = "5"
        return Health(state=queue.state, reason=queue.unhealthy_reason)

    key = [Security(BEARER), Security(BASIC)] if config.api_key is not None else []
    statuses = (400, 401, 403) if key else (400, 403)
    openai, webui = (responses(model, *statuses) for model in (OpenAIErrorResponse, WebuiErrorResponse))

    @app.get("/metrics", response_class=PlainTextResponse, dependencies=key, responses=openai)
    async def show_metrics() -> Response:
        """Prometheus metrics."""
        return Response(queue.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(api_openai.make_router(queue, config), dependencies=key, responses=openai)
    app.include_router(api_webui.make_router(queue, config), dependencies=key, responses=webui)
    if config.page:
        _add_page(app)

    def openapi() -> dict[str, Any]:
        schema = FastAPI.openapi(app)
        if queue.state == "loading":  # the sampler is not yet known
            app.openapi_schema = None
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _add_page(app: FastAPI) -> None:
    """Add the page. All its files are read now: no path from a request reaches the file system."""
    contents = {
        PAGE + file.relative_to(FOLDER).as_posix(): (file.read_bytes(), TYPES.get(file.suffix, "text/plain"))
        for file in FOLDER.rglob("*")
        if file.is_file()
    }
    contents["/"] = contents.pop(f"{PAGE}index.html")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route(PAGE + "{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def show(request: Request) -> Response:
        path = request.scope["path"]
        if path not in contents:
            raise ApiError(404, "Not Found")
        content, kind = contents[path]
        return Response(content, media_type=kind, headers=HEADERS)
