"""The interface of OpenAI's images: POST /v1/images/generations and GET /v1/models."""

import base64
import re
import time
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from .drawing import choose_seed, draw
from .errors import JobError
from .jobs import Job, Limits
from .refusals import Refusal, refuse_job
from .service import Service
from .settings import Settings

NAMES = {"images": "n", "ratio": "tome_ratio"}
# Fields of OpenAI's that mean something we have one way of only: what says so is taken, anything else refused.
ONE_WAY: dict[str, tuple[Any, ...]] = {
    "background": (None, "auto", "opaque"),
    "moderation": (None, "auto"),
    "output_compression": (None, 100),
    "output_format": (None, "png"),
    "partial_images": (None, 0),
    "quality": (None, "auto", "standard"),
    "response_format": (None, "b64_json"),  # no "url": this server keeps no pictures that one could fetch
    "stream": (None, False),
    "style": (None,),
}


class ImageRequest(BaseModel):
    """What to draw. Numbers must be numbers, and fields that do not exist are refused, not ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    prompt: str
    model: str | None = Field(None, description="the name that GET /v1/models lists")
    n: int | None = Field(None, description="pictures, 1 if absent; they get seed, seed + 1, …")
    size: str | None = Field(None, description='"WIDTHxHEIGHT" in pixels, an exported size; "auto": the first')
    user: str | None = Field(None, description="taken and not used")
    seed: int | None = Field(None, description="0 to 2**32 - 1; drawn at random and reported if absent")
    steps: int | None = Field(None, description="denoising steps")
    guidance_scale: float | None = Field(None, description="weight of classifier-free guidance; up to 1: none")
    negative_prompt: str | None = Field(None, description="what not to draw")
    tome_ratio: float | None = Field(None, description="share of tokens to merge away, an exported ratio")


def add_routes(app: FastAPI, service: Service, settings: Settings) -> None:
    """Add the interface to the app."""
    router = APIRouter(prefix="/v1")
    created = int(time.time())

    @router.post("/images/generations")
    async def generate(asked: ImageRequest, request: Request) -> dict[str, Any]:
        _check_extra(asked.model_extra or {})
        if asked.model is not None and asked.model != service.name:
            raise _no_such_model(service)
        jobs = to_jobs(asked, service.limits, settings)
        files = await draw(request, service, settings, jobs, NAMES)
        data = [
            {"b64_json": base64.b64encode(file).decode(), "seed": job.seed}
            for file, job in zip(files, jobs, strict=True)
        ]
        size = f"{jobs[0].width}x{jobs[0].height}"
        return {"created": int(time.time()), "data": data, "output_format": "png", "size": size}

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @router.get("/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        if name != service.name:
            raise _no_such_model(service)
        return model()

    def model() -> dict[str, Any]:
        limits = service.limits
        sizes = [f"{width}x{height}" for height, width in limits.sizes]
        ours = {"sizes": sizes, "tome_ratios": list(limits.ratios), "image_to_image": limits.image_to_image}
        return {"id": service.name, "object": "model", "created": created, "owned_by": "ppdiffusers_tome", **ours}

    app.include_router(router)


def to_jobs(asked: ImageRequest, limits: Limits, settings: Settings) -> list[Job]:
    """The pictures of a request, not yet checked but for their number and the form of the size."""
    images = 1 if asked.n is None else asked.n
    try:
        limits.check_count(images)
    except JobError as error:
        raise refuse_job(error, NAMES) from None
    height, width = _size(asked.size, limits)
    seed = choose_seed(images) if asked.seed is None else asked.seed
    return [
        Job(
            prompt=asked.prompt,
            negative_prompt=asked.negative_prompt or "",
            height=height,
            width=width,
            ratio=limits.ratios[0] if asked.tome_ratio is None else asked.tome_ratio,
            seed=seed + index,
            steps=settings.steps if asked.steps is None else asked.steps,
            guidance_scale=settings.guidance_scale if asked.guidance_scale is None else asked.guidance_scale,
        )
        for index in range(images)
    ]


def _size(text: str | None, limits: Limits) -> tuple[int, int]:
    if text is None or text == "auto":
        return limits.sizes[0]
    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
    if match is None:
        raise Refusal(422, 'size must be "WIDTHxHEIGHT" in pixels, "512x768" for instance', "size", "invalid_value")
    return int(match[2]), int(match[1])


def _check_extra(extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        if name not in ONE_WAY:
            raise Refusal(422, f"{name[:100]} is not a field of this request", name[:100], "unknown_parameter")
        if value not in ONE_WAY[name]:
            allowed = ", ".join(repr(one) for one in ONE_WAY[name] if one is not None) or "no value"
            raise Refusal(422, f"{name}: only {allowed} is supported", name, "unsupported_value")


def _no_such_model(service: Service) -> Refusal:
    return Refusal(404, f"there is no such model here: this server has {service.name}", "model", "model_not_found")
