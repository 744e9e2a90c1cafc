"""The HTTP application, over any service that draws: this process or a cluster."""

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from .._version import __version__
from . import api_openai, api_webui, refusals
from .gate import Gate
from .metrics import Metrics
from .service import Service
from .settings import Settings


def create_app(service: Service, settings: Settings, metrics: Metrics) -> FastAPI:
    """Build the application.

    Args:
        service: draws the jobs; its state is what /ready tells.
        settings: time-outs, sizes and the key.
        metrics: what /metrics shows; requests are counted here, pictures where they are drawn.

    Returns:
        An ASGI application. It reads no file and keeps nothing of a request beyond its answer.
    """
    # No pages of documentation: they would load scripts from elsewhere. /openapi.json describes the interface.
    app = FastAPI(title="ppdiffusers_tome", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, settings=settings, metrics=metrics)
    refusals.install(app)
    api_openai.add_routes(app, service, settings)
    api_webui.add_routes(app, service, settings)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether the process is worth keeping: 503 once the model failed for good."""
        return JSONResponse({"state": service.state}, 503 if service.state == "failed" else 200)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether requests are taken: 503 while loading and shutting down."""
        is_ready = service.state == "ready"
        return JSONResponse(
            {"state": service.state}, 200 if is_ready else 503, {} if is_ready else {"Retry-After": "5"}
        )

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    return app
