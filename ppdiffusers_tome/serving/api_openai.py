"""OpenAI's images API: POST /v1/images/generations and GET /v1/models; and POST /v1/tokens, for the page."""

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from ..inference.manifest import Size
from . import protocol
from .api_errors import ApiError, responses
from .app_config import AppConfig
from .event_stream import stream_events
from .handler import DEFAULT_STRENGTH, RequestHandler
from .middleware import JsonRoute
from .queue import ImageQueue
from .tickets import RequestProgress

NAMES = {"images": "n", "ratio": "tome_ratio"}
FIELDS = ("prompt", "negative_prompt", "images", "size", "ratio", "seed", "steps", "guidance_scale")


def make_router(queue: ImageQueue, config: AppConfig) -> APIRouter:
    """The routes of this interface."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)
    limits, types = queue.limits, protocol.bounds(queue.limits)
    handler = RequestHandler(queue, config, NAMES)
    Body = protocol.narrow(protocol.ImageRequest, {NAMES.get(field, field): types[field] for field in FIELDS})
    Prompt = protocol.narrow(
        protocol.TokensRequest, {"prompt": Annotated[str, Field(max_length=limits.prompt_characters)]}
    )
    errors = responses(protocol.OpenAIErrorResponse, 404, 411, 413, 415, 422, 429, 500, 503, 504)
    created = int(time.time())
    sizes = {"auto": limits.sizes[0], **{str(size): size for size in limits.sizes}}

    def model() -> protocol.ModelResponse:  # the methods are only known once the engine is loaded
        return protocol.ModelResponse(
            id=queue.name,
            created=created,
            sizes=list(map(str, limits.sizes)),
            tome_ratios=list(limits.ratios),
            tome_methods=[queue.methods.get(ratio, "") for ratio in limits.ratios],
            image_to_image=limits.image_to_image,
            merge_map=limits.merge_map,
            steps=config.steps,
            guidance_scale=config.guidance_scale,
            ranges={NAMES.get(name, name): values for name, values in limits.ranges.items()},
            prompt_characters=limits.prompt_characters,
            prompts=list(config.prompts),
        )

    schema = {"type": "string", "description": "with `stream`; see docs/serving.md for the events"}
    streamed: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": schema}}}}

    @router.post("/images/generations", response_model=protocol.ImagesResponse, responses=streamed | errors)
    async def generate(body: Body, request: Request) -> protocol.ImagesResponse | Response:  # type: ignore[valid-type]
        values: protocol.ImageRequest = body
        check_model(values.model)
        height, width = sizes.get(values.size or "auto", Size(0, 0))  # which is refused, like any other
        if values.image is None and values.strength is not None:
            raise ApiError(422, "without an image there is no strength", "strength", "invalid_value")
        jobs = handler.make_jobs(
            values.n or 1,
            values.seed,
            **values.model_dump(include={"prompt", "negative_prompt", "steps", "guidance_scale", "merge_map"}),
            width=width,
            height=height,
            ratio=values.tome_ratio,
            strength=None if values.image is None else values.strength or DEFAULT_STRENGTH,
        )
        if values.stream:
            progress = RequestProgress()
            return await stream_events(handler.generate(request, jobs, values.image, progress), jobs, progress)
        images = await handler.generate(request, jobs, values.image)
        data = [protocol.Image(b64_json=image, seed=job.seed) for image, job in zip(images, jobs, strict=True)]
        return protocol.ImagesResponse(created=int(time.time()), data=data, size=str(jobs[0].size))

    @router.post("/tokens", responses=responses(protocol.OpenAIErrorResponse, 411, 413, 415, 422, 503))
    async def count_tokens(body: Prompt) -> protocol.TokensResponse:  # type: ignore[valid-type]
        """How many tokens a prompt has, and what of it the text encoder does not read."""
        if queue.engine is None:
            message = f"the server is not ready: {queue.state}"
            raise ApiError(503, message, code="unavailable", headers={"Retry-After": "5"})
        prompt: str = body.prompt  # type: ignore[attr-defined]
        tokens, most, cut = await asyncio.to_thread(queue.engine.count_tokens, prompt)
        return protocol.TokensResponse(tokens=tokens, most=most, cut=cut)

    @router.get("/models")
    async def list_models() -> protocol.ModelsResponse:
        return protocol.ModelsResponse(data=[model()])

    @router.get("/models/{name:path}", responses=responses(protocol.OpenAIErrorResponse, 404, 422))
    async def retrieve_model(name: str) -> protocol.ModelResponse:
        check_model(name)
        return model()

    def check_model(name: str | None) -> None:
        if name not in (None, queue.name):
            message = f"there is no such model: this server has {queue.name}"
            raise ApiError(404, message, "model", "model_not_found")

    return router
