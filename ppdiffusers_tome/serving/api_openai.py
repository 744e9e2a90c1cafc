"""OpenAI's images API: POST /v1/images/generations and GET /v1/models; and POST /v1/tokens, for the page.

A stream is server-sent events: the progress of one request, then its images or an error.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from ..generation.jobs import Job
from ..inference.manifest import Size
from . import protocol
from .api_errors import ApiError, internal_error, responses
from .app_config import AppConfig
from .handler import DEFAULT_STRENGTH, RequestHandler
from .middleware import JsonRoute
from .queue import ImageQueue
from .tickets import RequestProgress, UnavailableError

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1  # between two looks at the progress
REPEAT_SECONDS = 5.0  # an event is repeated after this time, for proxies; after 10 s without one, the page says so
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
        progress = RequestProgress()
        generation = handler.generate(request, jobs, values.image, progress)
        if values.stream:
            return await _stream(generation, jobs, progress)
        images = await generation
        data = [protocol.Image(b64_json=image, seed=job.seed) for image, job in zip(images, jobs, strict=True)]
        return protocol.ImagesResponse(created=int(time.time()), data=data, size=str(jobs[0].size))

    @router.post("/tokens", responses=responses(protocol.OpenAIErrorResponse, 411, 413, 415, 422, 503))
    async def count_tokens(body: Prompt) -> protocol.TokensResponse:  # type: ignore[valid-type]
        """How many tokens a prompt has, and what of it the text encoder does not read."""
        prompt: str = body.prompt  # type: ignore[attr-defined]
        try:
            tokens, most, cut = await asyncio.to_thread(queue.count_tokens, prompt)
        except UnavailableError as error:
            headers = {"Retry-After": str(error.retry_after)}
            raise ApiError(503, str(error), code="unavailable", headers=headers) from None
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


async def _stream(
    images: Coroutine[None, None, list[str]], jobs: Sequence[Job], progress: RequestProgress
) -> StreamingResponse:
    """The response to a request that asks for a stream.

    Args:
        images: generates the images of the jobs. It is cancelled when the client disconnects.
        jobs, progress: of these images.

    Raises:
        ApiError: the request is not accepted. The response has not begun, so the client gets an ordinary error.
    """
    pending = asyncio.ensure_future(images)
    pending.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may have no reader any more
    while progress.position is None and not pending.done():
        await asyncio.wait([pending], timeout=POLL_SECONDS / 10)
    if progress.position is None:
        pending.result()  # raises
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the latter is for nginx
    return StreamingResponse(_events(pending, jobs, progress), media_type="text/event-stream", headers=headers)


async def _events(
    pending: "asyncio.Future[list[str]]", jobs: Sequence[Job], progress: RequestProgress
) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    last, sent = None, 0.0
    try:
        while not pending.done():
            event = protocol.ProgressEvent(position=progress.position or 0, step=progress.step, steps=progress.steps)
            if event != last or loop.time() - sent > REPEAT_SECONDS:
                last, sent = event, loop.time()
                yield _text(event)
            await asyncio.wait([pending], timeout=POLL_SECONDS)
        try:
            images = pending.result()
        except ApiError as error:
            yield _text(protocol.ErrorEvent(error=error.openai_error()))
        except Exception:  # a bug in this package, as in `RequestMiddleware`
            logger.exception("a stream failed")
            yield _text(protocol.ErrorEvent(error=internal_error().openai_error()))
        else:
            for index, (image, job) in enumerate(zip(images, jobs, strict=True)):
                completed = protocol.CompletedEvent(
                    b64_json=image,
                    created_at=int(time.time()),
                    size=str(job.size),
                    seed=job.seed,
                    index=index,
                    seconds=progress.seconds,
                    batch=progress.batch,
                    step_seconds=progress.step_seconds,
                    merge_map=_merge_map(progress.merge_maps[index]),
                )
                yield _text(completed)
    finally:
        pending.cancel()


def _merge_map(groups: Any) -> protocol.MergeMap | None:
    """The event's field from an array [h, w]."""
    if groups is None:
        return None
    height, width = groups.shape
    return protocol.MergeMap(width=width, height=height, groups=groups.ravel().tolist())


def _text(event: protocol.ProgressEvent | protocol.CompletedEvent | protocol.ErrorEvent) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"
