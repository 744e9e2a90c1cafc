"""The API of stable-diffusion-webui ("A1111"): txt2img, img2img, and all further paths that its clients use."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from .._version import __version__
from ..run.sizes import Size
from . import protocol
from .api_errors import ApiError, json_response, responses
from .image_engine import ServedModel
from .jobs import Job, JobError, SecondPass
from .limits import NO_IMAGES, Limits, ReadAs, check_strength
from .middleware import JsonRoute
from .png import describe, describe_merging, parse_infotext, read_texts
from .protocol_webui import (
    OFF,
    EmbeddingsResponse,
    FlagsResponse,
    GenerationInfo,
    ImageToImageRequest,
    Lenient,
    MemoryResponse,
    Options,
    PngInfoRequest,
    PngInfoResponse,
    ProgressResponse,
    ProgressState,
    QueueStatus,
    ServerOptions,
    TextRequest,
    TwoPassRequest,
    WebuiResponse,
    aliases_of,
    requests_for,
    samplers_of,
)
from .service import DEFAULT_STRENGTH, ImageService, Service

ERRORS = responses(protocol.WebuiErrorResponse, 413, 415, 422)
IMAGE_ERRORS = ERRORS | responses(protocol.WebuiErrorResponse, 409, 429, 500, 503, 504)
logger = logging.getLogger(__name__)

# Paths outside of /sdapi that clients ask before they use it. Some more would show them a different program: a server
# with Gradio's pages (/config), SD.Next (/sdapi/v1/version), Forge (/sdapi/v1/sd-modules), or a server with an
# extension (/controlnet/model_list). These are 404, which clients expect of a server without them.
probes = APIRouter(tags=["stable-diffusion-webui"])
router = APIRouter(prefix="/sdapi/v1", tags=["stable-diffusion-webui"], route_class=JsonRoute)


@probes.get("/internal/ping")
async def ping() -> dict[str, Any]:
    """Whether there is a server. /ready says whether its model is loaded."""
    return {}


@probes.get("/login_check")
async def check_login() -> None:
    """Whether this client may use the server: 401 without the key, if the server has a key."""


@probes.get("/queue/status")
async def show_queue(service: Service) -> QueueStatus:
    """The number of waiting images, of both interfaces."""
    return QueueStatus(queue_size=service.queue.waiting)


def image_routes(service: ImageService) -> APIRouter:
    """The routes whose requests have the bounds of the service's model, or the server's options."""
    routes = APIRouter(prefix="/sdapi/v1", tags=["stable-diffusion-webui"], route_class=JsonRoute)
    requests = requests_for(service.model)
    options = ServerOptions(
        sd_model_checkpoint=service.model.name,
        sd_vae="Automatic",
        token_merging_ratio=service.model.limits.ratios[0],
        token_merging_ratio_hr=0.0,
        token_merging_ratio_img2img=0.0,
        CLIP_stop_at_last_layers=1,
    )

    @routes.post("/txt2img", response_model=WebuiResponse, responses=IMAGE_ERRORS)
    async def text_to_image(body: Annotated[TwoPassRequest, ReadAs(requests.text)], request: Request) -> Response:
        """Generate images from text."""
        return await _respond(request, service, options, body, None)

    @routes.post("/img2img", response_model=WebuiResponse, responses=IMAGE_ERRORS)
    async def image_to_image(
        body: Annotated[ImageToImageRequest, ReadAs(requests.image)], request: Request
    ) -> Response:
        """Generate images from an image."""
        return await _respond(request, service, options, body, body.init_images[0])

    @routes.get("/options", response_model=ServerOptions)
    async def show_options() -> Response:
        return json_response(options)

    @routes.post("/options", responses=ERRORS)
    async def set_options(body: Annotated[Options, ReadAs(requests.options)]) -> None:
        """Set the default ratios of requests; all remaining options accept only their current value."""
        _set_options(options, body)
        _log_unknown_fields(service, body)

    return routes


@router.post("/interrupt")
async def interrupt(service: Service) -> dict[str, Any]:
    """End all requests of this interface."""
    service.interrupt()
    return {}


@router.post("/skip")
async def skip(service: Service) -> dict[str, Any]:
    """End the oldest request of this interface."""
    service.interrupt(1)
    return {}


@router.get("/progress")
async def show_progress(service: Service) -> ProgressResponse:
    """The progress of the current pipeline call, which may be of OpenAI's interface."""
    images, call = service.queue.accepted, service.queue.oldest_call
    if call is None:
        idle = ProgressState(job_count=images, sampling_step=0, sampling_steps=0)
        return ProgressResponse(progress=0.0, eta_relative=0.0, state=idle)
    share = max(0.01, call.step / max(1, call.steps))
    state = ProgressState(job_count=images, sampling_step=call.step, sampling_steps=call.steps)
    return ProgressResponse(progress=share, eta_relative=call.seconds * (1 / share - 1), state=state)


@router.get("/scripts")
async def list_scripts() -> dict[str, list[str]]:
    return {"txt2img": [], "img2img": []}


@router.get("/samplers")
async def list_samplers(service: Service) -> list[dict[str, Any]]:
    sampler = service.model.sampler
    return [{"name": sampler, "aliases": aliases_of(sampler), "options": {}}]


@router.get("/schedulers")
async def list_schedulers() -> list[dict[str, Any]]:
    unused = {"aliases": None, "default_rho": -1, "need_inner_model": False}
    return [{"name": "automatic", "label": "Automatic", **unused}]


@router.get("/upscalers")
async def list_upscalers() -> list[dict[str, Any]]:
    """List the filter that enlarges the image before a second pass."""
    return [{"name": "Lanczos", "model_name": None, "model_path": None, "model_url": None, "scale": 4}]


@router.get("/sd-models")
async def list_models(service: Service) -> list[dict[str, str | None]]:
    name = service.model.name
    no_file = {"hash": None, "sha256": None, "filename": "", "config": None}
    return [{"title": name, "model_name": name, **no_file}]


@router.get("/extensions")
@router.get("/face-restorers")
@router.get("/hypernetworks")
@router.get("/latent-upscale-modes")
@router.get("/loras")
@router.get("/prompt-styles")
@router.get("/realesrgan-models")
@router.get("/script-info")
@router.get("/sd-vae")
async def list_nothing() -> list[dict[str, str]]:
    """An exported folder has none."""
    return []


@router.get("/embeddings")
async def list_embeddings() -> EmbeddingsResponse:
    return EmbeddingsResponse()


@router.post("/refresh-checkpoints")
@router.post("/refresh-loras")
@router.post("/refresh-vae")
async def refresh() -> None:
    """Do nothing: the server has the model that it was started with."""


@router.get("/cmd-flags")
async def show_flags(service: Service) -> FlagsResponse:
    return FlagsResponse(nowebui=not service.config.page)


@router.get("/memory")
async def show_memory(request: Request) -> MemoryResponse:
    """The memory of the server's process, without that of engines on Ray."""
    used = request.app.state.metrics.resident_bytes
    if used is None:
        return MemoryResponse(ram={"error": "unavailable"})
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MemoryResponse(ram={"free": total - used, "used": used, "total": total})


@router.post("/png-info", responses=ERRORS)
async def show_png_info(body: PngInfoRequest, service: Service) -> PngInfoResponse:
    """Read how an image was made, from its text chunks."""
    try:
        texts = await asyncio.to_thread(read_texts, body.image, service.model.limits)
    except JobError as error:
        raise ApiError(422, str(error), "image", "invalid_value") from None
    info = texts.pop("parameters", "")
    return PngInfoResponse(info=info, items=texts, parameters=parse_infotext(info))


async def _respond(
    request: Request, service: ImageService, options: ServerOptions, values: TextRequest, image: str | None
) -> Response:
    """The response to a request for images, which start from the image if the request has an image."""
    own = values.override_settings or Options()
    _log_unknown_fields(service, values)
    _log_unknown_fields(service, own, "override_settings.")
    jobs = _jobs(service, options, values)
    if values.override_settings_restore_afterwards is False:
        _set_options(options, own)
    images = await service.generate(request, jobs, image, interruptible=True)
    body = WebuiResponse(
        images=[] if values.send_images is False else images,
        parameters=_parameters(values, jobs[0]),
        info=_info(values, jobs, service.model).model_dump_json(),
    )
    return json_response(body)


def _log_unknown_fields(service: ImageService, values: Lenient, prefix: str = "") -> None:
    """Log the names, each once and without the values, which may be secret."""
    for name in values.model_extra or {}:
        shown = prefix + name[:100]
        if service.may_log(shown):
            logger.warning("/sdapi/v1: ignored a field that the request does not have here: %r", shown)


def _jobs(service: ImageService, options: ServerOptions, values: TextRequest) -> list[Job]:
    """The jobs of a request, whose own options come before the server's.

    Raises:
        ApiError, JobError: values are not allowed together.
    """
    own = _known_options(values.override_settings or Options())
    settings = dict(options) | own
    is_from_image = isinstance(values, ImageToImageRequest)
    ratio = settings["token_merging_ratio"]
    if is_from_image:  # the order of stable-diffusion-webui
        ratio = own.get("token_merging_ratio") or settings["token_merging_ratio_img2img"] or ratio
    strength = DEFAULT_STRENGTH if values.denoising_strength is None else values.denoising_strength
    size = _size(values, service.model.limits)
    second_pass = None
    if isinstance(values, TwoPassRequest) and values.enable_hr:
        _check_second_pass(values, service.model)
        second_pass = _second_pass(values, service, size, settings["token_merging_ratio_hr"] or ratio, strength)
    return service.jobs(
        _count_images(values, service.model.limits),
        None if values.seed == -1 else values.seed,
        prompt=values.prompt,
        negative_prompt=values.negative_prompt,
        size=size,
        steps=values.steps,
        guidance_scale=values.cfg_scale,
        ratio=ratio,
        strength=strength if is_from_image else None,
        second_pass=second_pass,
    )


def _size(values: TextRequest, limits: Limits) -> Size:
    """The size of a request, whose sides were exported, but perhaps not with each other."""
    default = limits.sizes[0]
    size = Size(
        default.height if values.height is None else values.height,
        default.width if values.width is None else values.width,
    )
    with _refusing("height"):
        return limits.find_size(size)


def _count_images(values: TextRequest, limits: Limits) -> int:
    """The number of images, which the request has as a product."""
    counts = [1 if count is None else count for count in (values.batch_size, values.n_iter)]
    images = counts[0] * counts[1]
    with _refusing("batch_size"):
        limits.check_number("images", images)
    return images


def _second_pass(
    values: TwoPassRequest, service: ImageService, first: Size, ratio: float, strength: float
) -> SecondPass:
    """The second pass of a request; sizes as stable-diffusion-webui computes them."""
    limits = service.model.limits
    x, y = values.hr_resize_x or 0, values.hr_resize_y or 0
    scale = values.hr_scale or 2.0
    if not x and not y:
        x, y = int(first.width * scale), int(first.height * scale)
    with _refusing("hr_second_pass_steps"):
        steps = values.hr_second_pass_steps or values.steps or service.config.steps
        limits.check_number("steps", steps)
    with _refusing("hr_scale"):
        size = Size(height=y or x * first.height // first.width, width=x or y * first.width // first.height)
        limits.find_size(size)
    with _refusing("denoising_strength"):
        return SecondPass(size, ratio, steps, check_strength(strength))


def _check_second_pass(values: TwoPassRequest, model: ServedModel) -> None:
    """Raise ApiError if the second pass asks for what only the first pass can choose, or cannot be served."""
    if not model.limits.image_to_image:
        raise ApiError(422, NO_IMAGES, "enable_hr", "invalid_value")
    same_as_first = {"hr_prompt": values.prompt, "hr_negative_prompt": values.negative_prompt}
    choices: dict[str, tuple[str, ...]] = {
        "firstpass_image": (),
        "hr_upscaler": ("Lanczos", "Latent"),
        "hr_checkpoint_name": ("Use same checkpoint", model.name),
        "hr_sampler_name": ("Use same sampler", *samplers_of(model.sampler)),
        "hr_scheduler": ("Use same scheduler", *OFF["scheduler"]),
        "hr_prompt": (),
        "hr_negative_prompt": (),
    }
    for name, texts in choices.items():
        text = getattr(values, name)
        allowed = ("", *texts)
        if text is not None and text not in (*allowed, same_as_first.get(name)):
            message = f"the second pass supports only {' or '.join(map(json.dumps, allowed))}"
            raise ApiError(422, message, name, "invalid_value")


@contextmanager
def _refusing(field: str) -> Iterator[None]:
    """In this context a ValueError, such as a JobError, is the answer that this field has a wrong value."""
    try:
        yield
    except ValueError as error:
        raise ApiError(422, str(error), field, "invalid_value") from None


def _set_options(options: ServerOptions, new: Options) -> None:
    """Change the options that are set."""
    for name, value in _known_options(new).items():
        setattr(options, name, value)


def _known_options(new: Options) -> dict[str, Any]:
    """The known options that are set; clients send an empty model for the server's."""
    values = {name: getattr(new, name) for name in Options.model_fields}
    return {name: value for name, value in values.items() if value not in (None, "")}


def _parameters(values: TextRequest, job: Job) -> dict[str, Any]:
    """The request with its defaults, without images unless it asks for them."""
    parameters = values.model_dump(include=set(type(values).model_fields))
    if values.override_settings is not None:
        parameters["override_settings"] = values.override_settings.model_dump(exclude_unset=True)
    if not parameters.get("include_init_images"):
        images = {"init_images", "latent_mask", "firstpass_image"} & parameters.keys()
        parameters |= dict.fromkeys(images)
    parameters["steps"] = job.steps
    parameters["cfg_scale"] = job.guidance_scale
    parameters["width"] = job.size.width
    parameters["height"] = job.size.height
    return parameters


def _info(values: TextRequest, jobs: list[Job], model: ServedModel) -> GenerationInfo:
    first, seeds = jobs[0], [job.seed for job in jobs]
    strength = first.strength if first.second_pass is None else first.second_pass.strength
    return GenerationInfo(
        prompt=first.prompt,
        all_prompts=[job.prompt for job in jobs],
        negative_prompt=first.negative_prompt,
        all_negative_prompts=[job.negative_prompt for job in jobs],
        seed=first.seed,
        all_seeds=seeds,
        subseed=first.seed,
        all_subseeds=seeds,
        width=first.size.width,
        height=first.size.height,
        sampler_name=model.sampler,
        cfg_scale=first.guidance_scale,
        steps=first.steps,
        batch_size=values.batch_size or 1,
        sd_model_name=model.name,
        denoising_strength=strength,
        extra_generation_params=describe_merging(first, model),
        infotexts=[describe(job, model) for job in jobs],
        job_timestamp=time.strftime("%Y%m%d%H%M%S"),
        version=f"ppdiffusers_tome {__version__}",
    )
