"""The API of stable-diffusion-webui ("A1111"): txt2img, img2img, and the other paths that its clients use."""

import logging
import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from .._version import __version__
from ..generation.jobs import LARGEST_SEED, Job, Limits, SecondPass
from ..generation.png import describe, describe_merging
from . import protocol, protocol_webui
from .api_errors import responses
from .app_config import AppConfig
from .handler import DEFAULT_STRENGTH, RequestHandler
from .middleware import JsonRoute
from .protocol import narrow
from .queue import ImageQueue
from .tickets import RequestProgress

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
# What stable-diffusion-webui lists, and an exported folder does not have
EMPTY_LISTS = ("latent-upscale-modes", "loras", "prompt-styles", "sd-vae")
MAX_LOGGED_NAMES = 100  # of unknown fields, so that clients cannot fill the log
logger = logging.getLogger(__name__)


def make_router(queue: ImageQueue, config: AppConfig) -> APIRouter:
    """The routes of this interface."""
    router = APIRouter(prefix="/sdapi/v1", tags=["stable-diffusion-webui"], route_class=JsonRoute)
    limits, types = queue.limits, protocol.bounds(queue.limits)
    handler = RequestHandler(queue, config, NAMES)
    unknown_fields = _UnknownFields()
    model = protocol.one_of(str, lambda: ["", queue.name], f"this server has one model: {queue.name}")
    sampler = protocol.one_of(
        str,
        lambda: [*DEFAULT_SAMPLERS, queue.sampler, *_aliases(queue.sampler)],
        "requests cannot change the exported scheduler: see /sdapi/v1/samplers",
    )
    ratio, ratio_or_0 = (
        protocol.one_of(float, partial(tuple, allowed), f"it must be one of {', '.join(map(str, allowed))}")
        for allowed in (limits.ratios, dict.fromkeys((0.0, *limits.ratios)))
    )
    new_options = {
        "sd_model_checkpoint": model,
        "token_merging_ratio": ratio,
        "token_merging_ratio_hr": ratio_or_0,
        "token_merging_ratio_img2img": ratio_or_0,
    }
    NewOptions = narrow(protocol_webui.Options, new_options)
    fields = {
        "prompt": types["prompt"] | None,
        "negative_prompt": types["negative_prompt"],
        "seed": Annotated[int, Field(ge=-1, le=LARGEST_SEED)] | None,
        "sampler_name": sampler,
        "sampler_index": sampler,
        "batch_size": types["images"],
        "n_iter": types["images"],
        "steps": types["steps"],
        "cfg_scale": types["guidance_scale"],
        "width": types["width"],
        "height": types["height"],
        "override_settings": NewOptions | None,
    }
    second_pass_one_of = protocol_webui.second_pass_one_of
    of_second_pass = {
        "firstpass_image": second_pass_one_of(list),
        "hr_upscaler": second_pass_one_of(lambda: ["Lanczos", "Latent"]),
        "hr_checkpoint_name": second_pass_one_of(lambda: ["Use same checkpoint", queue.name]),
        "hr_sampler_name": second_pass_one_of(
            lambda: ["Use same sampler", *DEFAULT_SAMPLERS, queue.sampler, *_aliases(queue.sampler)]
        ),
        "hr_scheduler": second_pass_one_of(lambda: ["Use same scheduler", *protocol_webui.OFF["scheduler"]]),
        "hr_prompt": second_pass_one_of(list),
        "hr_negative_prompt": second_pass_one_of(list),
    }
    FromText = narrow(protocol_webui.TwoPassRequest, fields | of_second_pass)
    FromImage = narrow(protocol_webui.ImageToImageRequest, fields | {"enable_hr": protocol.only(bool, False)})
    errors = partial(responses, protocol.WebuiErrorResponse, 413, 415, 422)
    options = protocol_webui.Options(
        sd_model_checkpoint=queue.name,
        sd_vae="Automatic",
        token_merging_ratio=limits.ratios[0],
        token_merging_ratio_hr=0.0,
        token_merging_ratio_img2img=0.0,
        CLIP_stop_at_last_layers=1,
    )

    @router.post("/txt2img", responses=errors(409, 429, 500, 503, 504))
    async def text_to_image(body: FromText, request: Request) -> protocol_webui.WebuiResponse:  # type: ignore[valid-type]
        return await answer(request, body)

    @router.post("/img2img", responses=errors(409, 429, 500, 503, 504))
    async def image_to_image(body: FromImage, request: Request) -> protocol_webui.WebuiResponse:  # type: ignore[valid-type]
        return await answer(request, body)

    async def answer(request: Request, values: protocol_webui.TextRequest) -> protocol_webui.WebuiResponse:
        image = values.init_images[0] if isinstance(values, protocol_webui.ImageToImageRequest) else None
        own = values.override_settings or protocol_webui.Options()
        unknown_fields.log(values)
        unknown_fields.log(own, "override_settings.")
        changes = _set_options(own)
        settings = options.model_dump() | changes
        ratio, second_pass = settings["token_merging_ratio"], None
        if image is not None:  # the order of stable-diffusion-webui
            ratio = changes.get("token_merging_ratio") or settings["token_merging_ratio_img2img"] or ratio
        strength = DEFAULT_STRENGTH if values.denoising_strength is None else values.denoising_strength
        if isinstance(values, protocol_webui.TwoPassRequest) and values.enable_hr:
            second_ratio = settings["token_merging_ratio_hr"] or ratio
            second_pass = _second_pass(values, second_ratio, strength, limits, config.steps)
        jobs = handler.make_jobs(
            (values.batch_size or 1) * (values.n_iter or 1),
            None if values.seed == -1 else values.seed,
            prompt=values.prompt or "",
            negative_prompt=values.negative_prompt,
            width=values.width,
            height=values.height,
            steps=values.steps,
            guidance_scale=values.cfg_scale,
            ratio=ratio,
            strength=None if image is None else strength,
            second_pass=second_pass,
        )
        if values.override_settings_restore_afterwards is False:
            change_options(own)
        images = await handler.generate(request, jobs, image, RequestProgress())
        return protocol_webui.WebuiResponse(
            images=[] if values.send_images is False else images,
            parameters=_parameters(values, jobs[0]),
            info=_info(values, jobs, queue).model_dump_json(),
        )

    def change_options(new: protocol_webui.Options) -> None:
        for name, value in _set_options(new).items():
            setattr(options, name, value)

    @router.post("/interrupt")
    async def interrupt() -> dict[str, Any]:
        """End all requests of this interface."""
        handler.interrupt()
        return {}

    @router.post("/skip")
    async def skip() -> dict[str, Any]:
        """End the oldest request of this interface."""
        handler.interrupt(1)
        return {}

    @router.get("/progress")
    async def show_progress() -> protocol_webui.ProgressResponse:
        """The progress of the current pipeline call, which may be of the other interface."""
        now = queue.progress()
        share = max(0.01, now.step / max(1, now.steps)) if now.running else 0.0
        state = protocol_webui.ProgressState(
            job_count=now.running + now.waiting, sampling_step=now.step, sampling_steps=now.steps
        )
        eta = now.seconds * (1 / share - 1) if share else 0.0
        return protocol_webui.ProgressResponse(progress=share, eta_relative=eta, state=state)

    @router.get("/options")
    async def show_options() -> protocol_webui.Options:
        return options

    @router.post("/options", responses=errors())
    async def set_options(body: NewOptions) -> None:  # type: ignore[valid-type]
        """Set the default ratios of requests; other options accept only their current value."""
        unknown_fields.log(body)
        change_options(body)

    @router.get("/scripts")
    async def list_scripts() -> dict[str, list[str]]:
        return {"txt2img": [], "img2img": []}

    @router.get("/samplers")
    async def list_samplers() -> list[dict[str, Any]]:
        return [{"name": queue.sampler, "aliases": _aliases(queue.sampler), "options": {}}]

    @router.get("/schedulers")
    async def list_schedulers() -> list[dict[str, Any]]:
        unused = {"aliases": None, "default_rho": -1, "need_inner_model": False}
        return [{"name": "automatic", "label": "Automatic", **unused}]

    @router.get("/upscalers")
    async def list_upscalers() -> list[dict[str, Any]]:
        """What enlarges the image before a second pass."""
        return [{"name": "Lanczos", "model_name": None, "model_path": None, "model_url": None, "scale": 4}]

    @router.get("/sd-models")
    async def list_models() -> list[dict[str, str | None]]:
        no_file = {"hash": None, "sha256": None, "filename": "", "config": None}
        return [{"title": queue.name, "model_name": queue.name, **no_file}]

    async def list_nothing() -> list[dict[str, str]]:
        """There are none."""
        return []

    for name in EMPTY_LISTS:
        router.add_api_route(f"/{name}", list_nothing, methods=["GET"])

    return router


class _UnknownFields:
    """Names the unknown fields of requests in the log, each once, and at most `MAX_LOGGED_NAMES`."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, values: protocol_webui.Lenient, prefix: str = "") -> None:
        """Log the names, without the values, which may be secret."""
        for name in values.model_extra or {}:
            shown = prefix + name[:100]
            if shown not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
                self._logged.add(shown)
                logger.warning("/sdapi/v1: ignored a field that the request does not have here: %r", shown)


def _set_options(new: protocol_webui.Options) -> dict[str, Any]:
    """The known options that are set; clients send an empty model for the server's."""
    values = new.model_dump(include=set(protocol_webui.Options.model_fields))
    return {name: value for name, value in values.items() if value not in (None, "")}


def _second_pass(
    values: protocol_webui.TwoPassRequest, ratio: float, strength: float, limits: Limits, default_steps: int
) -> SecondPass:
    """The second pass of a request; sizes as stable-diffusion-webui computes them."""
    height, width = limits.sizes[0]
    height, width = values.height or height, values.width or width
    x, y = values.hr_resize_x or 0, values.hr_resize_y or 0
    scale = values.hr_scale or 2.0
    if not x and not y:
        x, y = int(width * scale), int(height * scale)
    return SecondPass(
        height=y or x * height // width,
        width=x or y * width // height,
        ratio=ratio,
        steps=values.hr_second_pass_steps or values.steps or default_steps,
        strength=strength,
    )


def _aliases(sampler: str) -> list[str]:
    """stable-diffusion-webui's abbreviations: "dpmpp_2m" and "k_dpmpp_2m" for "DPM++ 2M"."""
    short = sampler.lower().replace("++", "pp").replace(" ", "_")
    return [short, f"k_{short}"]


def _parameters(values: protocol_webui.TextRequest, job: Job) -> dict[str, Any]:
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


def _info(values: protocol_webui.TextRequest, jobs: list[Job], queue: ImageQueue) -> protocol_webui.GenerationInfo:
    first, seeds = jobs[0], [job.seed for job in jobs]
    strength = first.strength if first.second_pass is None else first.second_pass.strength
    return protocol_webui.GenerationInfo(
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
