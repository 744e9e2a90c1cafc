"""The interface of OpenAI's images: POST /v1/images/generations and GET /v1/models."""

import base64
import time

from fastapi import APIRouter, Request

from . import protocol
from .drawing import Drawing
from .gate import JsonRoute
from .refusals import Refusal, responses
from .service import Service
from .settings import Settings

NAMES = {"images": "n", "ratio": "tome_ratio"}
FIELDS = ("prompt", "negative_prompt", "images", "size", "ratio", "seed", "steps", "guidance_scale")


def make_router(service: Service, settings: Settings) -> APIRouter:
    """The interface, for the app to include."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)
    limits, types = service.limits, protocol.bounds(service.limits)
    drawing = Drawing(service, settings, NAMES)
    Body = protocol.narrow(protocol.ImageRequest, {NAMES.get(field, field): types[field] for field in FIELDS})
    refusals = responses(protocol.OpenAIErrorResponse, 404, 408, 411, 413, 415, 422, 429, 500, 503, 504)
    model = protocol.ModelResponse(
        id=service.name,
        created=int(time.time()),
        sizes=[f"{width}x{height}" for height, width in limits.sizes],
        tome_ratios=list(limits.ratios),
        image_to_image=limits.image_to_image,
    )

    @router.post("/images/generations", responses=refusals)
    async def generate(body: Body, request: Request) -> protocol.ImagesResponse:  # type: ignore[valid-type]
        asked: protocol.ImageRequest = body
        check_model(asked.model)
        width, height = map(int, asked.size.split("x")) if asked.size not in (None, "auto") else (None, None)
        fields = {name: getattr(asked, name) for name in ("prompt", "negative_prompt", "steps", "guidance_scale")}
        jobs = drawing.make_jobs(
            asked.n or 1, asked.seed, width=width, height=height, ratio=asked.tome_ratio, **fields
        )
        files = await drawing.draw(request, jobs)
        texts = [base64.b64encode(file).decode() for file in files]
        data = [protocol.Image(b64_json=text, seed=job.seed) for text, job in zip(texts, jobs, strict=True)]
        size = f"{jobs[0].width}x{jobs[0].height}"
        return protocol.ImagesResponse(created=int(time.time()), data=data, size=size)

    @router.get("/models")
    async def list_models() -> protocol.ModelsResponse:
        return protocol.ModelsResponse(data=[model])

    @router.get("/models/{name:path}", responses=responses(protocol.OpenAIErrorResponse, 404, 422))
    async def retrieve_model(name: str) -> protocol.ModelResponse:
        check_model(name)
        return model

    def check_model(name: str | None) -> None:
        if name not in (None, service.name):
            message = f"there is no such model here: this server has {service.name}"
            raise Refusal(404, message, "model", "model_not_found")

    return router
