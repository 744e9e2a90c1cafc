"""OpenAI's images API: POST /v1/images/generations and edits, GET /v1/models; and POST /v1/tokens, for the page.

A stream is server-sent events: the progress of one request, then its images or an error.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import Field, ValidationError

from ..generation.jobs import Job
from . import protocol
from .api_errors import ApiError, internal_error, responses
from .app_config import AppConfig
from .forms import read_form
from .handler import DEFAULT_STRENGTH, RequestHandler
from .middleware import JsonRoute
from .queue import ImageQueue
from .tickets import RequestProgress, UnavailableError

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1  # between two looks at the progress
REPEAT_SECONDS = 5.0  # an event is repeated after this time, for proxies; after 10 s without one, the page says so
NAMES = {"images": "n", "ratio": "tome_ratio"}
FIELDS = ("prompt", "negative_prompt", "images", "size", "ratio", "seed", "steps", "guidance_scale")
URL_MODELS = ("dall-e-2", "dall-e-3")  # by OpenAI's rule, requests that name them get URLs unless they say otherwise


def make_router(queue: ImageQueue, config: AppConfig) -> APIRouter:
    """The routes of this interface."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)
    limits, types = queue.limits, protocol.bounds(queue.limits)
    handler = RequestHandler(queue, config, NAMES)
    own_types = {NAMES.get(field, field): types[field] for field in FIELDS}
    Body = protocol.narrow(protocol.ImageRequest, own_types)
    Form = protocol.narrow(protocol.EditRequest, own_types)
    Prompt = protocol.narrow(
        protocol.TokensRequest, {"prompt": Annotated[str, Field(max_length=limits.prompt_characters)]}
    )
    errors = responses(protocol.OpenAIErrorResponse, 404, 413, 415, 422, 429, 500, 503, 504)
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

    @router.post(
        "/images/generations",
        response_model=protocol.ImagesResponse,
        response_model_exclude_none=True,
        responses=streamed | errors,
    )
    async def generate(body: Body, request: Request) -> protocol.ImagesResponse | Response:  # type: ignore[valid-type]
        values: protocol.ImageRequest = body
        return await respond(request, values, values.image, "image_generation")

    @router.post(
        "/images/edits",
        response_model=protocol.ImagesResponse,
        response_model_exclude_none=True,
        responses=streamed | errors,
        openapi_extra={"requestBody": _form_schema(Form)},
        include_in_schema=limits.image_to_image,
    )
    async def edit(request: Request) -> protocol.ImagesResponse | Response:
        """Generate images from an image. The body is a form, in which `image` is a file."""
        if not limits.image_to_image:
            message = "image-to-image was not exported: export the model with --img2img"
            raise ApiError(404, message, code="not_exported")
        texts, files = await read_form(request)
        if "mask" in (*texts, *files):
            message = "masks are not supported: the whole image is generated again"
            raise ApiError(422, message, "mask", "unsupported_parameter")
        images = files.pop("image", []) + files.pop("image[]", [])
        if len(images) != 1:
            raise ApiError(422, f"it must be one file, and {len(images)} were sent", "image", "invalid_value")
        if files:
            raise ApiError(422, "only the image is a file", next(iter(files))[:100], "invalid_value")
        texts = {name: text for name, text in texts.items() if text or name == "prompt"}  # None is sent as ""
        try:
            values = Form.model_validate(texts, strict=False)  # numbers are texts in a form
        except ValidationError as error:
            raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from None
        return await respond(request, values, images[0], "image_edit")

    async def respond(
        request: Request, values: protocol.ImageFields, image: str | bytes | None, stream_name: str
    ) -> protocol.ImagesResponse | Response:
        """The answer to a request for images, which start from the image if there is one.

        The types of the events of a stream begin with its name.
        """
        if not config.any_model:
            check_model(values.model)
        if image is None and values.strength is not None:
            raise ApiError(422, "without an image there is no strength", "strength", "invalid_value")
        size = values.size or "auto"
        if size not in sizes:
            message = f"{size[:60]!r} was not exported: it must be one of {', '.join(sizes)}"
            raise ApiError(422, message, "size", "invalid_value")
        log_ignored(values)
        jobs = handler.make_jobs(
            values.n or 1,
            values.seed,
            **values.model_dump(include={"prompt", "negative_prompt", "steps", "guidance_scale", "merge_map"}),
            width=sizes[size].width,
            height=sizes[size].height,
            ratio=values.tome_ratio,
            strength=None if image is None else values.strength or DEFAULT_STRENGTH,
        )
        progress = RequestProgress()
        generation = handler.generate(request, jobs, image, progress)
        if values.stream:
            return await _stream(generation, jobs, progress, stream_name)
        usual = "url" if values.model in URL_MODELS else "b64_json"
        image_of = _image_with_url if (values.response_format or usual) == "url" else _image
        data = [image_of(text, job.seed) for text, job in zip(await generation, jobs, strict=True)]
        return protocol.ImagesResponse(created=int(time.time()), data=data, size=str(jobs[0].size))

    logged: set[str] = set()

    def log_ignored(values: protocol.ImageFields) -> None:
        """Log each field that asks for what this server does not have, the first time that one is sent."""
        for name, usual in protocol.IGNORED.items():
            value = getattr(values, name, None)
            if value is not None and value not in usual and name not in logged:
                logged.add(name)
                logger.warning("a client asks for %s=%.40r, which this server ignores (logged once)", name, value)

    @router.post("/tokens", responses=responses(protocol.OpenAIErrorResponse, 413, 415, 422, 503))
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
        if name is not None and name != queue.name:
            message = f"there is no model {name[:60]!r}: this server has {queue.name}; --any-model accepts any name"
            raise ApiError(404, message, "model", "model_not_found")

    return router


def _image(text: str, seed: int) -> protocol.Image:
    return protocol.Image(b64_json=text, seed=seed)


def _image_with_url(text: str, seed: int) -> protocol.Image:
    return protocol.Image(url=f"data:image/png;base64,{text}", seed=seed)


def _form_schema(model: type[protocol.EditRequest]) -> dict[str, Any]:
    """OpenAPI's description of a form with the model's fields and an image."""
    schema = model.model_json_schema()
    schema["properties"]["image"] = {"type": "string", "format": "binary", "description": "a PNG, JPEG or WEBP file"}
    schema["required"].append("image")
    return {"content": {"multipart/form-data": {"schema": schema}}, "required": True}


async def _stream(
    images: Coroutine[None, None, list[str]], jobs: Sequence[Job], progress: RequestProgress, name: str
) -> StreamingResponse:
    """The response to a request that asks for a stream.

    Args:
        images: generates the images of the jobs. It is cancelled when the client disconnects.
        jobs, progress: of these images.
        name: the beginning of the events' types.

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
    return StreamingResponse(_events(pending, jobs, progress, name), media_type="text/event-stream", headers=headers)


async def _events(
    pending: "asyncio.Future[list[str]]", jobs: Sequence[Job], progress: RequestProgress, name: str
) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    last, sent = None, 0.0
    try:
        while not pending.done():
            event = protocol.ProgressEvent(
                type=f"{name}.progress", position=progress.position or 0, step=progress.step, steps=progress.steps
            )
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
                    type=f"{name}.completed",
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
