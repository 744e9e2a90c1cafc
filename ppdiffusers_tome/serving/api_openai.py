"""OpenAI's images API: POST /v1/images/generations and edits, GET /v1/models; and POST /v1/tokens, for the page.

A stream is server-sent events: the progress of one request, then its images or an error.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..run.manifest import Size
from . import protocol
from .api_errors import CLIENT_GONE, ApiError, internal_error, responses
from .app_config import AppConfig
from .handler import DEFAULT_STRENGTH, RequestHandler
from .jobs import Job, JobError
from .middleware import JsonRoute
from .queue import ImageQueue
from .tickets import RequestProgress, UnavailableError

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1  # between two looks at the progress
REPEAT_SECONDS = 5.0  # an event is repeated after this time, for proxies; after 10 s without one, the page says so
NAMES = {"images": "n", "ratio": "tome_ratio"}
URL_MODELS = ("dall-e-2", "dall-e-3")  # by OpenAI's rule, requests that name them get URLs unless they say otherwise
EDITS = "/v1/images/edits"
MAX_PARTS = 50  # files of a form, and as many other fields; real requests have fewer
A_FILE = 'a file is a part with a filename, as in filename="a.png", and filename* is none in a form'
EVENT = {
    "type": "object",
    "description": "with `stream`: one of the events in docs/serve.md, whose data is JSON",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": EVENT}}}}
ERRORS = responses(protocol.OpenAIErrorResponse, 404, 413, 415, 422, 429, 500, 503, 504)

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)


class OpenAIService:
    """State that the handlers of this interface share. Each application has one, in `app.state.openai`."""

    def __init__(self, queue: ImageQueue, config: AppConfig) -> None:
        self.queue, self.config = queue, config
        self.handler = RequestHandler(queue, config, NAMES)
        self._created = int(time.time())
        self._logged: set[str] = set()

    @property
    def keywords(self) -> dict[str, dict[str, Any]]:
        """Keywords of JSON Schema that /openapi.json has for the fields, by name."""
        return {NAMES.get(name, name): one for name, one in protocol.schema_keywords(self.queue.limits).items()}

    def describe_model(self) -> protocol.ModelResponse:
        """The model of this server. Its methods are only known once the engine is loaded."""
        limits = self.queue.limits
        return protocol.ModelResponse(
            id=self.queue.name,
            created=self._created,
            sizes=[str(size) for size in limits.sizes],
            tome_ratios=list(limits.ratios),
            tome_methods=[self.queue.methods.get(ratio, "") for ratio in limits.ratios],
            image_to_image=limits.image_to_image,
            steps=self.config.steps,
            guidance_scale=self.config.guidance_scale,
            ranges={NAMES.get(name, name): values for name, values in limits.ranges.items()},
            prompt_characters=limits.prompt_characters,
            prompts=list(self.config.prompts),
        )

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if the name is that of another model."""
        own = self.queue.name
        if name is not None and name != own:
            message = f"there is no model {name[:60]!r}: this server has {own}; --any-model accepts any name"
            raise ApiError(404, message, "model", "model_not_found")

    def make_jobs(self, values: protocol.ImageFields, has_image: bool) -> list[Job]:
        """The jobs of a request.

        Raises:
            ApiError: 404 it names another model, 422 a value is not allowed.
        """
        if not self.config.any_model:
            self.check_model(values.model or None)
        if values.strength is not None and not has_image:
            raise ApiError(422, "without an image there is no strength", "strength", "invalid_value")
        size = self._size(values.size or "auto")
        self._log_ignored_fields(values)
        return self.handler.make_jobs(
            1 if values.n is None else values.n,
            values.seed,
            prompt=values.prompt,
            negative_prompt=values.negative_prompt,
            width=size.width,
            height=size.height,
            steps=values.steps,
            guidance_scale=values.guidance_scale,
            ratio=values.tome_ratio,
            strength=(values.strength or DEFAULT_STRENGTH) if has_image else None,
        )

    def _size(self, name: str) -> Size:
        sizes = {"auto": self.queue.limits.sizes[0]}
        sizes.update((str(size), size) for size in self.queue.limits.sizes)
        if name not in sizes:
            message = f"{name[:60]!r} was not exported: it must be one of {', '.join(sizes)}"
            raise ApiError(422, message, "size", "invalid_value")
        return sizes[name]

    def _log_ignored_fields(self, values: protocol.ImageFields) -> None:
        """Log each field that asks for what this server does not have, the first time that one is sent."""
        for name, usual in protocol.IGNORED.items():
            value = getattr(values, name, None)
            if value not in (None, "", *usual) and name not in self._logged:
                self._logged.add(name)
                logger.warning("a client asks for %s=%.40r, which this server ignores (logged once)", name, value)


async def _service(request: Request) -> OpenAIService:
    return request.app.state.openai


Service = Annotated[OpenAIService, Depends(_service)]
ImagesAnswer: TypeAlias = protocol.ImagesResponse | Response  # the latter is a stream


@router.post(
    "/images/generations",
    response_model=protocol.ImagesResponse,
    response_model_exclude_none=True,
    responses=STREAM | ERRORS,
)
async def generate(body: protocol.ImageRequest, request: Request, service: Service) -> ImagesAnswer:
    """Generate images from a prompt, and from an image if the request has one."""
    return await _answer(request, service, body, body.image or None, "image_generation")


@router.post(
    EDITS.removeprefix("/v1"),
    response_model=protocol.ImagesResponse,
    response_model_exclude_none=True,
    responses=STREAM | ERRORS,
    openapi_extra={"requestBody": protocol.form_of(protocol.EditRequest)},
)
async def edit(request: Request, service: Service) -> ImagesAnswer:
    """Generate images from an image. The body is a form, in which `image` is a file."""
    if not service.queue.limits.image_to_image:
        message = "image-to-image was not exported: export the model with --img2img"
        raise ApiError(404, message, code="not_exported")
    texts, files = await _read_form(request)
    if texts.pop("mask", "") or any(files.pop("mask", ())):
        message = "masks are not supported: the whole image is generated again"
        raise ApiError(422, message, "mask", "unsupported_parameter")
    image = _only_image(texts, files)
    return await _answer(request, service, _read_fields(texts), image, "image_edit")


@router.post("/tokens", responses=responses(protocol.OpenAIErrorResponse, 413, 415, 422, 503))
async def count_tokens(body: protocol.TokensRequest, service: Service) -> protocol.TokensResponse:
    """Count the tokens of a prompt, and return the end of it that the text encoder does not read."""
    try:
        service.queue.limits.check_text("prompt", body.prompt)
        tokens, max_tokens, cut = await asyncio.to_thread(service.queue.count_tokens, body.prompt)
    except JobError as error:
        raise service.handler.refusal(error) from None
    except UnavailableError as error:
        raise service.handler.unavailability(error) from None
    return protocol.TokensResponse(tokens=tokens, max_tokens=max_tokens, cut=cut)


@router.get("/models")
async def list_models(service: Service) -> protocol.ModelsResponse:
    return protocol.ModelsResponse(data=[service.describe_model()])


@router.get("/models/{name:path}", responses=responses(protocol.OpenAIErrorResponse, 404, 422))
async def retrieve_model(name: str, service: Service) -> protocol.ModelResponse:
    service.check_model(name)
    return service.describe_model()


async def _read_form(request: Request) -> tuple[dict[str, str], dict[str, list[bytes]]]:
    """The texts and the files of a form, by name. `RequestMiddleware` limits the size of the body.

    Raises:
        ApiError: 400 the form is malformed or has too many or too large parts, 415 the body is not a form, 422 a text
            is sent twice, 499 the client disconnected.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        message = "the body must be sent as Content-Type: multipart/form-data, with a boundary"
        raise ApiError(415, message, code="unsupported_media_type")
    texts: dict[str, str] = {}
    files: dict[str, list[bytes]] = {}
    try:
        await request.body()  # whole, because Starlette's parser leaves files open if the rest is too large or missing
        async with request.form(max_files=MAX_PARTS, max_fields=MAX_PARTS) as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    files.setdefault(name, []).append(await value.read())
                elif name in texts:
                    raise ApiError(422, "it is sent more than once", name[:100], "invalid_value")
                else:
                    texts[name] = value
    except ApiError:
        raise
    except HTTPException as error:  # Starlette's. A field above 1 MiB is most likely meant as a file
        remedy = f" Only files may be larger: {A_FILE}" if "maximum size" in error.detail else ""
        raise ApiError(400, f"the form cannot be read: {error.detail}{remedy}", code="invalid_form") from None
    except ValueError as error:  # python-multipart's errors
        raise ApiError(400, f"the form cannot be read: {error!s:.200}", code="invalid_form") from None
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "the client has disconnected") from None
    return texts, files


def _only_image(texts: dict[str, str], files: dict[str, list[bytes]]) -> bytes:
    """The image of a form, whose other files are refused."""
    images = files.pop("image", []) + files.pop("image[]", [])
    if not images and (texts.get("image") or texts.get("image[]")):
        raise ApiError(422, f"it must be a file, and was sent as a text: {A_FILE}", "image", "invalid_value")
    if len(images) != 1:
        raise ApiError(422, f"it must be one file, and {len(images)} were sent", "image", "invalid_value")
    if files:
        raise ApiError(422, "only the image is a file", next(iter(files))[:100], "invalid_value")
    return images[0]


def _read_fields(texts: dict[str, str]) -> protocol.EditRequest:
    """The fields of a form, in which numbers are texts. Clients send None as an empty text."""
    given = {name: text for name, text in texts.items() if text or name == "prompt"}
    try:
        return protocol.EditRequest.model_validate(given, strict=False)
    except ValidationError as error:
        raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from None


async def _answer(
    request: Request, service: OpenAIService, values: protocol.ImageFields, image: str | bytes | None, stream_name: str
) -> ImagesAnswer:
    """The answer to a request for images, which start from the image if there is one.

    The types of the events of a stream begin with its name.
    """
    jobs = service.make_jobs(values, image is not None)
    progress = RequestProgress()
    generation = service.handler.generate(request, jobs, image, progress)
    if values.stream:
        return await _stream(generation, jobs, progress, stream_name)
    usual = "url" if values.model in URL_MODELS else "b64_json"
    image_of = _image_with_url if (values.response_format or usual) == "url" else _image
    data = [image_of(image, job.seed) for image, job in zip(await generation, jobs, strict=True)]
    return protocol.ImagesResponse(created=int(time.time()), data=data, size=str(jobs[0].size))


def _image(text: str, seed: int) -> protocol.Image:
    return protocol.Image(b64_json=text, seed=seed)


def _image_with_url(text: str, seed: int) -> protocol.Image:
    return protocol.Image(url=f"data:image/png;base64,{text}", seed=seed)


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
                )
                yield _text(completed)
    finally:
        pending.cancel()


def _text(event: protocol.ProgressEvent | protocol.CompletedEvent | protocol.ErrorEvent) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"
