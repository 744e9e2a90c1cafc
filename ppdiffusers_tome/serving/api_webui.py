"""The API of stable-diffusion-webui ("A1111"): txt2img, img2img, and the other paths that its clients use."""

import asyncio
import json
import logging
import os
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

from .._version import __version__
from ..errors import ToMeConfigError
from ..run.manifest import find_ratio
from . import protocol
from .api_errors import ApiError, responses
from .app_config import AppConfig
from .handler import DEFAULT_STRENGTH, RequestHandler
from .jobs import Job, JobError, SecondPass
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
)
from .queue import ImageQueue
from .tickets import RequestProgress, UnavailableError

NAMES = {
    "images": "batch_size",
    "size": "height",  # for a width that was exported with another height
    "guidance_scale": "cfg_scale",
    "ratio": "override_settings.token_merging_ratio",
    "image": "init_images",
    "strength": "denoising_strength",
    "second_pass.size": "hr_scale",
    "second_pass.ratio": "override_settings.token_merging_ratio_hr",
    "second_pass.steps": "hr_second_pass_steps",
    "second_pass.strength": "denoising_strength",
    "second_pass.image": "enable_hr",
}
# Defaults of stable-diffusion-webui and webuiapi, which cannot be distinguished from a choice. `info` contains the
# sampler that was used.
DEFAULT_SAMPLERS = ("", "Euler", "Euler a")
MAX_LOGGED_NAMES = 100  # of unknown fields, so that clients cannot fill the log
ERRORS = responses(protocol.WebuiErrorResponse, 413, 415, 422)
IMAGE_ERRORS = ERRORS | responses(protocol.WebuiErrorResponse, 409, 429, 500, 503, 504)
logger = logging.getLogger(__name__)

# Paths outside of /sdapi that clients ask before they use it. By an answer to others they would take this server for
# what it is not: one with Gradio's pages (/config), SD.Next (/sdapi/v1/version), Forge (/sdapi/v1/sd-modules), or one
# with an extension (/controlnet/model_list). These are 404, which the clients expect of a server without them.
probes = APIRouter(tags=["stable-diffusion-webui"])
router = APIRouter(prefix="/sdapi/v1", tags=["stable-diffusion-webui"], route_class=JsonRoute)


class WebuiService:
    """State that the handlers of this interface share. Each application has one, in `app.state.webui`."""

    def __init__(self, queue: ImageQueue, config: AppConfig) -> None:
        self.queue = queue
        self.handler = RequestHandler(queue, config, NAMES)
        self.options = ServerOptions(
            sd_model_checkpoint=queue.name,
            sd_vae="Automatic",
            token_merging_ratio=queue.limits.ratios[0],
            token_merging_ratio_hr=0.0,
            token_merging_ratio_img2img=0.0,
            CLIP_stop_at_last_layers=1,
        )
        self._default_steps = config.steps
        self.has_page = config.page
        self._logged: set[str] = set()  # names of unknown fields

    @property
    def samplers(self) -> list[str]:
        """Names of samplers that requests may have. The exported one is only known once the engine is loaded."""
        sampler = self.queue.sampler
        return [*DEFAULT_SAMPLERS, *((sampler, *_aliases(sampler)) if sampler else ())]

    @property
    def choices(self) -> dict[str, list[Any]]:
        """The allowed values, besides null, of the fields that depend on the export, by name."""
        limits = self.queue.limits
        return {
            "sampler_name": self.samplers,
            "sampler_index": self.samplers,
            "width": sorted({size.width for size in limits.sizes}),
            "height": sorted({size.height for size in limits.sizes}),
            "sd_model_checkpoint": ["", self.queue.name],
        }

    @property
    def _ratios(self) -> dict[str, tuple[float, ...]]:
        """The allowed ratios, besides null, by the name of their field. In two of them 0 is `token_merging_ratio`."""
        exported = self.queue.limits.ratios
        exported_or_zero = tuple(dict.fromkeys((0.0, *exported)))
        return {
            "token_merging_ratio": exported,
            "token_merging_ratio_hr": exported_or_zero,
            "token_merging_ratio_img2img": exported_or_zero,
        }

    @property
    def keywords(self) -> dict[str, dict[str, Any]]:
        """Keywords of JSON Schema that /openapi.json has for the fields, by name."""
        of_jobs = protocol.schema_keywords(self.queue.limits)
        keywords = {name: {"enum": values} for name, values in self.choices.items()}
        keywords |= {name: protocol.ratio_keywords(ratios) for name, ratios in self._ratios.items()}
        return keywords | {
            "prompt": of_jobs["prompt"],
            "negative_prompt": of_jobs["negative_prompt"],
            "batch_size": of_jobs["images"],
            "n_iter": of_jobs["images"],
            "steps": of_jobs["steps"],
            "cfg_scale": of_jobs["guidance_scale"],
        }

    def check(self, values: TextRequest) -> None:
        """Raise ApiError unless the fields have values that this server supports."""
        self._check_choices(values)
        if values.override_settings is not None:
            self._check_choices(values.override_settings, "override_settings.")
        for name in ("batch_size", "n_iter"):  # their product is checked with the jobs
            try:
                self.queue.limits.check_range("images", _one_if_none(getattr(values, name)))
            except JobError as error:
                raise ApiError(422, str(error), name, "invalid_value") from None
        if isinstance(values, TwoPassRequest) and values.enable_hr:
            self._check_second_pass(values)

    def set_options(self, new: Options) -> None:
        """Change the options that are set."""
        self._check_choices(new)
        for name, value in _known_options(new).items():
            setattr(self.options, name, find_ratio(value, self._ratios[name]) if name in self._ratios else value)

    def log_unknown_fields(self, values: Lenient, prefix: str = "") -> None:
        """Log the names, each once and without the values, which may be secret."""
        for name in values.model_extra or {}:
            shown = prefix + name[:100]
            if shown not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
                self._logged.add(shown)
                logger.warning("/sdapi/v1: ignored a field that the request does not have here: %r", shown)

    def make_jobs(self, values: TextRequest) -> list[Job]:
        """The jobs of a request.

        Raises:
            ApiError: 422, a value is not allowed.
        """
        own = _known_options(values.override_settings or Options())
        settings = self.options.model_dump() | own
        is_from_image = isinstance(values, ImageToImageRequest)
        ratio = settings["token_merging_ratio"]
        if is_from_image:  # the order of stable-diffusion-webui
            ratio = own.get("token_merging_ratio") or settings["token_merging_ratio_img2img"] or ratio
        strength = DEFAULT_STRENGTH if values.denoising_strength is None else values.denoising_strength
        second_pass = None
        if isinstance(values, TwoPassRequest) and values.enable_hr:
            second_pass = self._second_pass(values, settings["token_merging_ratio_hr"] or ratio, strength)
        return self.handler.make_jobs(
            _one_if_none(values.batch_size) * _one_if_none(values.n_iter),
            None if values.seed == -1 else values.seed,
            prompt=values.prompt or "",
            negative_prompt=values.negative_prompt,
            width=values.width,
            height=values.height,
            steps=values.steps,
            guidance_scale=values.cfg_scale,
            ratio=ratio,
            strength=strength if is_from_image else None,
            second_pass=second_pass,
        )

    def _second_pass(self, values: TwoPassRequest, ratio: float, strength: float) -> SecondPass:
        """The second pass of a request; sizes as stable-diffusion-webui computes them."""
        height, width = self.queue.limits.sizes[0]
        height, width = values.height or height, values.width or width
        x, y = values.hr_resize_x or 0, values.hr_resize_y or 0
        scale = values.hr_scale or 2.0
        if not x and not y:
            x, y = int(width * scale), int(height * scale)
        return SecondPass(
            height=y or x * height // width,
            width=x or y * width // height,
            ratio=ratio,
            steps=values.hr_second_pass_steps or values.steps or self._default_steps,
            strength=strength,
        )

    def _check_choices(self, values: BaseModel, prefix: str = "") -> None:
        for name, allowed in self.choices.items():
            value = getattr(values, name) if name in type(values).model_fields else None
            if value is not None and value not in allowed:
                raise ApiError(422, self._reason(name, value), prefix + name, "invalid_value")
        for name, ratios in self._ratios.items():
            ratio = getattr(values, name, None)
            try:
                if ratio is not None:
                    find_ratio(ratio, ratios)
            except ToMeConfigError:
                message = f"{ratio} was not exported: it must be one of {', '.join(map(str, ratios))}"
                raise ApiError(422, message, prefix + name, "invalid_value") from None

    def _reason(self, name: str, value: Any) -> str:
        """Why a field cannot have this value."""
        if name == "sd_model_checkpoint":
            return f"this server has one model: {self.queue.name}"
        if name in ("sampler_name", "sampler_index"):
            return "requests cannot change the exported scheduler: see /sdapi/v1/samplers"
        sizes = ", ".join(str(size) for size in self.queue.limits.sizes)
        return f"{value!s:.20} was not exported: width x height must be one of {sizes}"

    def _check_second_pass(self, values: TwoPassRequest) -> None:
        """Raise ApiError if the second pass asks for what only the first one can choose."""
        same_as_first = {"hr_prompt": values.prompt, "hr_negative_prompt": values.negative_prompt}
        choices: dict[str, tuple[str, ...]] = {
            "firstpass_image": (),
            "hr_upscaler": ("Lanczos", "Latent"),
            "hr_checkpoint_name": ("Use same checkpoint", self.queue.name),
            "hr_sampler_name": ("Use same sampler", *self.samplers),
            "hr_scheduler": ("Use same scheduler", *OFF["scheduler"]),
            "hr_prompt": (),
            "hr_negative_prompt": (),
        }
        for name, others in choices.items():
            text = getattr(values, name)
            allowed = ("", *others)
            if text is not None and text not in (*allowed, same_as_first.get(name)):
                message = f"the second pass supports only {' or '.join(map(json.dumps, allowed))}"
                raise ApiError(422, message, name, "invalid_value")


async def _service(request: Request) -> WebuiService:
    return request.app.state.webui


Service = Annotated[WebuiService, Depends(_service)]


@probes.get("/internal/ping")
async def ping() -> dict[str, Any]:
    """Whether there is a server. /ready says whether its model is loaded."""
    return {}


@probes.get("/login_check")
async def check_login() -> None:
    """Whether this client may use the server: 401 without the key, if there is one."""


@probes.get("/queue/status")
async def show_queue(service: Service) -> QueueStatus:
    """The number of waiting images, of both interfaces, and an estimate of their time."""
    queue = service.queue
    return QueueStatus(queue_size=queue.progress().waiting, queue_eta=queue.wait_seconds())


@router.post("/txt2img", responses=IMAGE_ERRORS)
async def text_to_image(body: TwoPassRequest, request: Request, service: Service) -> WebuiResponse:
    """Generate images from text."""
    return await _answer(request, service, body, None)


@router.post("/img2img", responses=IMAGE_ERRORS)
async def image_to_image(body: ImageToImageRequest, request: Request, service: Service) -> WebuiResponse:
    """Generate images from an image."""
    return await _answer(request, service, body, body.init_images[0])


@router.post("/interrupt")
async def interrupt(service: Service) -> dict[str, Any]:
    """End all requests of this interface."""
    service.handler.interrupt()
    return {}


@router.post("/skip")
async def skip(service: Service) -> dict[str, Any]:
    """End the oldest request of this interface."""
    service.handler.interrupt(1)
    return {}


@router.get("/progress")
async def show_progress(service: Service) -> ProgressResponse:
    """The progress of the current pipeline call, which may be of the other interface."""
    now = service.queue.progress()
    share = max(0.01, now.step / max(1, now.steps)) if now.running else 0.0
    state = ProgressState(job_count=now.running + now.waiting, sampling_step=now.step, sampling_steps=now.steps)
    eta = now.seconds * (1 / share - 1) if share else 0.0
    return ProgressResponse(progress=share, eta_relative=eta, state=state)


@router.get("/options")
async def show_options(service: Service) -> ServerOptions:
    return service.options


@router.post("/options", responses=ERRORS)
async def set_options(body: Options, service: Service) -> None:
    """Set the default ratios of requests; other options accept only their current value."""
    service.set_options(body)
    service.log_unknown_fields(body)


@router.get("/scripts")
async def list_scripts() -> dict[str, list[str]]:
    return {"txt2img": [], "img2img": []}


@router.get("/samplers")
async def list_samplers(service: Service) -> list[dict[str, Any]]:
    sampler = service.queue.sampler
    if not sampler:  # the engine is not loaded yet
        return []
    return [{"name": sampler, "aliases": _aliases(sampler), "options": {}}]


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
    name = service.queue.name
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
    return FlagsResponse(nowebui=not service.has_page)


@router.get("/memory")
async def show_memory(service: Service) -> MemoryResponse:
    """The memory of the server's process, without that of engines on Ray."""
    used = service.queue.metrics.resident_bytes
    if used is None:
        return MemoryResponse(ram={"error": "unavailable"})
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MemoryResponse(ram={"free": total - used, "used": used, "total": total})


@router.post("/png-info", responses=ERRORS)
async def show_png_info(body: PngInfoRequest, service: Service) -> PngInfoResponse:
    """Read how an image was made, from its text chunks."""
    try:
        texts = await asyncio.to_thread(read_texts, body.image, service.queue.limits)
    except JobError as error:
        raise ApiError(422, str(error), "image", "invalid_value") from None
    info = texts.pop("parameters", "")
    return PngInfoResponse(info=info, items=texts, parameters=parse_infotext(info))


async def _answer(request: Request, service: WebuiService, values: TextRequest, image: str | None) -> WebuiResponse:
    """The answer to a request for images, which start from the image if there is one."""
    try:
        service.queue.check_ready()  # first: before the engine is loaded, its sampler is not known
    except UnavailableError as error:
        raise service.handler.unavailability(error) from None
    service.check(values)
    own = values.override_settings or Options()
    service.log_unknown_fields(values)
    service.log_unknown_fields(own, "override_settings.")
    jobs = service.make_jobs(values)
    if values.override_settings_restore_afterwards is False:
        service.set_options(own)
    images = await service.handler.generate(request, jobs, image, RequestProgress())
    return WebuiResponse(
        images=[] if values.send_images is False else images,
        parameters=_parameters(values, jobs[0]),
        info=_info(values, jobs, service.queue).model_dump_json(),
    )


def _one_if_none(count: int | None) -> int:
    return 1 if count is None else count


def _known_options(new: Options) -> dict[str, Any]:
    """The known options that are set; clients send an empty model for the server's."""
    values = new.model_dump(include=set(Options.model_fields))
    return {name: value for name, value in values.items() if value not in (None, "")}


def _aliases(sampler: str) -> list[str]:
    """stable-diffusion-webui's abbreviations: "dpmpp_2m" and "k_dpmpp_2m" for "DPM++ 2M"."""
    short = sampler.lower().replace("++", "pp").replace(" ", "_")
    return [short, f"k_{short}"]


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
    parameters["width"] = job.width
    parameters["height"] = job.height
    return parameters


def _info(values: TextRequest, jobs: list[Job], queue: ImageQueue) -> GenerationInfo:
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
        width=first.width,
        height=first.height,
        sampler_name=queue.sampler,
        cfg_scale=first.guidance_scale,
        steps=first.steps,
        batch_size=values.batch_size or 1,
        sd_model_name=queue.name,
        denoising_strength=strength,
        extra_generation_params=describe_merging(first, queue),
        infotexts=[describe(job, queue) for job in jobs],
        job_timestamp=time.strftime("%Y%m%d%H%M%S"),
        version=f"ppdiffusers_tome {__version__}",
    )
