"""OpenAI's images API: POST /v1/images/generations and edits, GET /v1/models; and POST /v1/tokens, for the page.

A stream is server-sent events: the progress of one request, then its images or an error.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from . import protocol
from .api_errors import CLIENT_GONE, EXPECTED, ApiError, api_error, json_response, model_not_found, responses
from .jobs import Job
from .limits import NO_IMAGES, ReadAs
from .middleware import JsonRoute
from .service import DEFAULT_STRENGTH, ImageService, Service
from .tickets import Ticket

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.1  # between two looks at the progress
REPEAT_SECONDS = 5.0  # an event is repeated after this time, for proxies; the page reports 10 s without an event
URL_MODELS = ("dall-e-2", "dall-e-3")  # by OpenAI's rule, requests that name them get URLs unless they say otherwise
EDITS = "/v1/images/edits"
MAX_PARTS = 50  # files of a form, and as many fields that are no files; real requests have fewer
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


def image_routes(service: ImageService) -> APIRouter:
    """The routes whose requests have the bounds of the service's model."""
    routes = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)
    requests = protocol.requests_for(service.model, service.config.any_model)

    @routes.post("/images/generations", response_model=protocol.ImagesResponse, responses=STREAM | ERRORS)
    async def generate(body: Annotated[protocol.ImageRequest, ReadAs(requests.image)], request: Request) -> Response:
        """Generate images from a prompt, and from an image if the request has an image."""
        return await _respond(request, service, body, body.image or None, "image_generation")

    @routes.post(
        EDITS.removeprefix("/v1"),
        response_model=protocol.ImagesResponse,
        responses=STREAM | ERRORS,
        openapi_extra={"requestBody": protocol.form_of(requests.edit)},
        include_in_schema=service.model.limits.image_to_image,
    )
    async def edit(request: Request) -> Response:
        """Generate images from an image. The body is a form, in which `image` is a file."""
        if not service.model.limits.image_to_image:
            raise ApiError(404, NO_IMAGES, code="not_exported")
        texts, files = await _read_form(request)
        if texts.pop("mask", "") or any(files.pop("mask", ())):
            message = "masks are not supported: the whole image is generated again"
            raise ApiError(422, message, "mask", "unsupported_parameter")
        image = _only_image(texts, files)
        return await _respond(request, service, _read_fields(texts, requests.edit), image, "image_edit")

    @routes.post("/tokens", responses=responses(protocol.OpenAIErrorResponse, 413, 415, 422, 503))
    async def count_tokens(
        body: Annotated[protocol.TokensRequest, ReadAs(requests.tokens)],
    ) -> protocol.TokensResponse:
        """Count the tokens of a prompt, and return the end of it that the text encoder does not read."""
        tokens, max_tokens, cut = await asyncio.to_thread(service.pool.count_tokens, body.prompt)
        return protocol.TokensResponse(tokens=tokens, max_tokens=max_tokens, cut=cut)

    return routes


@router.get("/models")
async def list_models(service: Service) -> protocol.ModelsResponse:
    return protocol.ModelsResponse(data=[_describe_model(service)])


@router.get("/models/{name:path}", responses=responses(protocol.OpenAIErrorResponse, 404, 422))
async def retrieve_model(name: str, service: Service) -> protocol.ModelResponse:
    if name != service.model.name:
        raise model_not_found(protocol.unknown_model(name, service.model.name))
    return _describe_model(service)


def _describe_model(service: ImageService) -> protocol.ModelResponse:
    """The model of this server."""
    model, limits, config = service.model, service.model.limits, service.config
    return protocol.ModelResponse(
        id=model.name,
        created=service.created,
        sizes=[str(size) for size in limits.sizes],
        tome_ratios=list(limits.ratios),
        tome_methods=[model.methods.get(ratio, "") for ratio in limits.ratios],
        image_to_image=limits.image_to_image,
        steps=config.steps,
        guidance_scale=config.guidance_scale,
        ranges={protocol.NAMES.get(name, name): values for name, values in limits.ranges.items()},
        prompt_characters=limits.prompt_characters,
        prompts=list(config.prompts),
    )


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
    """The image of a form, which may have no further files."""
    images = files.pop("image", []) + files.pop("image[]", [])
    if not images and (texts.get("image") or texts.get("image[]")):
        raise ApiError(422, f"it must be a file, and was sent as a text: {A_FILE}", "image", "invalid_value")
    if len(images) != 1:
        raise ApiError(422, f"it must be one file, and {len(images)} were sent", "image", "invalid_value")
    if files:
        raise ApiError(422, "only the image is a file", next(iter(files))[:100], "invalid_value")
    return images[0]


def _read_fields(texts: dict[str, str], model: type[protocol.EditRequest]) -> protocol.EditRequest:
    """The fields of a form, in which numbers are texts. Clients send None as an empty text."""
    given = {name: text for name, text in texts.items() if text or name == "prompt"}
    try:
        return model.model_validate(given, strict=False)
    except ValidationError as error:
        problems = [problem | {"loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise RequestValidationError(problems) from None


async def _respond(
    request: Request, service: ImageService, values: protocol.ImageFields, image: str | bytes | None, stream_name: str
) -> Response:
    """The response to a request for images, which start from the image if there is one.

    The types of the events of a stream begin with its name.
    """
    if values.strength is not None and image is None:
        raise ApiError(422, "without an image there is no strength", "strength", "invalid_value")
    _log_ignored_fields(service, values)
    jobs = service.jobs(
        values.n,
        values.seed,
        prompt=values.prompt,
        negative_prompt=values.negative_prompt,
        size=values.size,
        steps=values.steps,
        guidance_scale=values.guidance_scale,
        ratio=values.tome_ratio,
        strength=None if image is None else values.strength or DEFAULT_STRENGTH,
    )
    if values.stream:
        return await _stream(request, service, jobs, image, stream_name)
    usual = "url" if values.model in URL_MODELS else "b64_json"
    images = zip(await service.generate(request, jobs, image), jobs, strict=True)
    if (values.response_format or usual) == "url":
        data = [protocol.ImageData(url=f"data:image/png;base64,{text}", seed=job.seed) for text, job in images]
    else:
        data = [protocol.ImageData(b64_json=text, seed=job.seed) for text, job in images]
    body = protocol.ImagesResponse(created=int(time.time()), data=data, size=str(jobs[0].size))
    return json_response(body, exclude_none=True)


def _log_ignored_fields(service: ImageService, values: protocol.ImageFields) -> None:
    """Log each field that asks for what this server does not have, the first time that it is sent."""
    for name, usual in protocol.IGNORED.items():
        value = getattr(values, name, None)
        if value not in (None, "", *usual) and service.may_log(name):
            logger.warning("a client asks for %s=%.40r, which this server ignores (logged once)", name, value)


async def _stream(
    request: Request, service: ImageService, jobs: list[Job], image: str | bytes | None, name: str
) -> StreamingResponse:
    """The response to a request that asks for a stream. It ends when the client disconnects.

    Args:
        jobs, image: see `ImageService.generate`.
        name: the beginning of the events' types.

    Raises:
        Exception: the request is not accepted. The response has not begun, so the client gets an ordinary error.
    """
    accepted: asyncio.Future[list[Ticket]] = asyncio.get_running_loop().create_future()
    pending = asyncio.ensure_future(service.generate(request, jobs, image, accepted.set_result))
    pending.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may have no reader any more
    await asyncio.wait((accepted, pending), return_when=asyncio.FIRST_COMPLETED)
    if not accepted.done():
        pending.result()  # raises
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the latter is for nginx
    events = _events(pending, accepted.result(), name)
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events(pending: "asyncio.Future[list[str]]", tickets: Sequence[Ticket], name: str) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    last, sent = None, 0.0
    try:
        while not pending.done():
            event = _progress(tickets, name, last.step if last else 0)
            if event != last or loop.time() - sent > REPEAT_SECONDS:
                last, sent = event, loop.time()
                yield _text(event)
            await asyncio.wait([pending], timeout=POLL_SECONDS)
        try:
            images = pending.result()
        except Exception as error:
            if not isinstance(error, EXPECTED):  # a bug in this package, as in `RequestMiddleware`
                logger.exception("a stream failed")
            yield _text(protocol.ErrorEvent(error=api_error(error, "/v1/").openai_error()))
        else:
            calls = [ticket.progress for ticket in tickets if ticket.progress is not None]
            seconds = sum(call.seconds for call in dict.fromkeys(calls))
            for index, (image, ticket) in enumerate(zip(images, tickets, strict=True)):
                completed = protocol.CompletedEvent(
                    type=f"{name}.completed",
                    b64_json=image,
                    created_at=int(time.time()),
                    size=str(ticket.job.size),
                    seed=ticket.job.seed,
                    index=index,
                    seconds=seconds,
                    batch=calls[-1].images,
                    step_seconds=calls[-1].step_seconds,
                )
                yield _text(completed)
    finally:
        pending.cancel()


def _progress(tickets: Sequence[Ticket], name: str, last_step: int) -> protocol.ProgressEvent:
    """The progress of a request: the mean step of its images, which may be in several pipeline calls.

    Args:
        last_step: of the event before. A batch that failed is repeated image by image, and no step is taken back.
    """
    calls = [ticket.progress for ticket in tickets if ticket.progress is not None]
    return protocol.ProgressEvent(
        type=f"{name}.progress",
        position=max(ticket.place for ticket in tickets),
        step=max(last_step, sum(call.step for call in calls) // len(tickets)),
        steps=max((call.steps for call in calls), default=0),
    )


def _text(event: protocol.ProgressEvent | protocol.CompletedEvent | protocol.ErrorEvent) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"
