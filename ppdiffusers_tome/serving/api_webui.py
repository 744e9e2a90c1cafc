"""The API of stable-diffusion-webui ("A1111"): txt2img, img2img, and the other paths that its clients use."""

import base64
import json
import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from .._version import __version__
from . import protocol
from .api_errors import responses
from .app_config import AppConfig
from .handler import RequestHandler
from .jobs import LARGEST_SEED, Job
from .middleware import JsonRoute
from .png import describe, load_image
from .protocol import narrow
from .service import Service

NAMES = {
    "images": "batch_size",
    "size": "height",  # for a width that was exported with another height
    "guidance_scale": "cfg_scale",
    "ratio": "override_settings.token_merging_ratio",
    "image": "init_images",
    "strength": "denoising_strength",
}
# webuiapi's defaults, which cannot be distinguished from a choice. `info` contains the sampler that was used.
DEFAULT_SAMPLERS = ("", "Euler a")


def make_router(service: Service, config: AppConfig) -> APIRouter:
    """The routes of this interface."""
    router = APIRouter(prefix="/sdapi/v1", tags=["stable-diffusion-webui"], route_class=JsonRoute)
    limits, types = service.limits, protocol.bounds(service.limits)
    handler = RequestHandler(service, config, NAMES)
    model = protocol.one_of(str, lambda: [service.name], f"this server has one model: {service.name}")
    sampler = protocol.one_of(
        str,
        lambda: [*DEFAULT_SAMPLERS, service.sampler, *_aliases(service.sampler)],
        "requests cannot change the exported scheduler: see /sdapi/v1/samplers",
    )
    NewOptions = narrow(protocol.Options, {"sd_model_checkpoint": model, "token_merging_ratio": types["ratio"]})
    fields = {
        **protocol.OFF,
        **{name: types[name] for name in ("prompt", "negative_prompt", "width", "height", "steps")},
        **{NAMES[name]: types[name] for name in ("guidance_scale", "strength")},
        **{"batch_size": types["images"], "n_iter": types["images"], "override_settings": NewOptions | None},
        **{"sampler_name": sampler, "sampler_index": sampler},
        "seed": Annotated[int, Field(ge=-1, le=LARGEST_SEED), protocol.WHOLE] | None,
    }
    FromText, FromImage = narrow(protocol.TextRequest, fields), narrow(protocol.ImageToImageRequest, fields)
    errors = partial(responses, protocol.WebuiErrorResponse, 408, 411, 413, 415, 422)
    options = protocol.Options(sd_model_checkpoint=service.name, token_merging_ratio=limits.ratios[0])
    options.CLIP_stop_at_last_layers = 1

    @router.post("/txt2img", responses=errors(409, 429, 500, 503, 504))
    async def text_to_image(body: FromText, request: Request) -> protocol.WebuiResponse:  # type: ignore[valid-type]
        return await answer(request, body)

    @router.post("/img2img", responses=errors(409, 429, 500, 503, 504))
    async def image_to_image(body: FromImage, request: Request) -> protocol.WebuiResponse:  # type: ignore[valid-type]
        return await answer(request, body)

    async def answer(request: Request, values: protocol.TextRequest) -> protocol.WebuiResponse:
        load, strength = None, None
        if isinstance(values, protocol.ImageToImageRequest):
            strength = 0.75 if values.denoising_strength is None else values.denoising_strength
            size = values.width or limits.sizes[0][1], values.height or limits.sizes[0][0]
            load = partial(load_image, values.init_images[0], size, limits)
        own_ratio = values.override_settings and values.override_settings.token_merging_ratio
        jobs = handler.make_jobs(
            (values.batch_size or 1) * (values.n_iter or 1),
            None if values.seed == -1 else values.seed,
            **{name: getattr(values, name) for name in ("prompt", "negative_prompt", "width", "height", "steps")},
            guidance_scale=values.cfg_scale,
            ratio=options.token_merging_ratio if own_ratio is None else own_ratio,
            strength=strength,
        )
        files = await handler.generate(request, jobs, load)
        parameters = values.model_dump(include=set(protocol.TextRequest.model_fields))
        texts = [base64.b64encode(file).decode() for file in files]
        info = json.dumps(_info(values, jobs, service))
        return protocol.WebuiResponse(images=texts, parameters=parameters, info=info)

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
    async def show_progress() -> protocol.ProgressResponse:
        """The progress of the current pipeline call, which may be of the other interface."""
        now = service.progress()
        share = max(0.01, now.step / max(1, now.steps)) if now.running else 0.0
        state = {"skipped": False, "interrupted": False, "job": "", "job_timestamp": "", "job_no": 0}
        state |= {"job_count": now.running + now.waiting, "sampling_step": now.step, "sampling_steps": now.steps}
        eta = now.seconds * (1 / share - 1) if share else 0.0
        return protocol.ProgressResponse(progress=share, eta_relative=eta, state=state)

    @router.get("/options")
    async def show_options() -> protocol.Options:
        return options

    @router.post("/options", responses=errors())
    async def set_options(body: NewOptions) -> None:  # type: ignore[valid-type]
        """Set the default ratio of requests; other options accept only their current value."""
        values: protocol.Options = body
        if values.token_merging_ratio is not None:
            options.token_merging_ratio = values.token_merging_ratio

    @router.get("/scripts")
    async def list_scripts() -> dict[str, list[str]]:
        return {"txt2img": [], "img2img": []}

    @router.get("/samplers")
    async def list_samplers() -> list[dict[str, Any]]:
        return [{"name": service.sampler, "aliases": _aliases(service.sampler), "options": {}}]

    @router.get("/schedulers")
    async def list_schedulers() -> list[dict[str, str]]:
        return [{"name": "automatic", "label": "Automatic"}]

    @router.get("/sd-models")
    async def list_models() -> list[dict[str, str | None]]:
        no_file = {"hash": None, "sha256": None, "filename": "", "config": None}
        return [{"title": service.name, "model_name": service.name, **no_file}]

    return router


def _aliases(sampler: str) -> list[str]:
    """stable-diffusion-webui's abbreviations: "dpmpp_2m" and "k_dpmpp_2m" for "DPM++ 2M"."""
    short = sampler.lower().replace("++", "pp").replace(" ", "_")
    return [short, f"k_{short}"]


def _info(values: protocol.TextRequest, jobs: list[Job], service: Service) -> dict[str, Any]:
    """The fields of stable-diffusion-webui's `info`; the sampler is the exported one."""
    first, seeds = jobs[0], [job.seed for job in jobs]
    method = service.methods.get(first.ratio, "")
    return {
        **{"prompt": first.prompt, "all_prompts": [job.prompt for job in jobs]},
        **{"negative_prompt": first.negative_prompt, "all_negative_prompts": [job.negative_prompt for job in jobs]},
        **{"seed": first.seed, "all_seeds": seeds, "subseed": first.seed, "all_subseeds": seeds},
        **{"subseed_strength": 0, "seed_resize_from_w": 0, "seed_resize_from_h": 0},
        **{"width": first.width, "height": first.height, "steps": first.steps, "cfg_scale": first.guidance_scale},
        **({} if first.strength is None else {"denoising_strength": first.strength}),
        **{"sampler_name": service.sampler, "sd_model_name": service.name, "sd_model_hash": None, "clip_skip": 1},
        **{"batch_size": values.batch_size or 1, "index_of_first_image": 0, "styles": [], "restore_faces": False},
        **{"face_restoration_model": None, "is_using_inpainting_conditioning": False},
        "extra_generation_params": {
            "Token merging ratio": first.ratio,
            **({"Token merging method": method} if method else {}),
        },
        "infotexts": [describe(job, service) for job in jobs],
        **{"job_timestamp": time.strftime("%Y%m%d%H%M%S"), "version": f"ppdiffusers_tome {__version__}"},
    }
