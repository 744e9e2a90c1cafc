"""The interface of stable-diffusion-webui ("A1111"): POST /sdapi/v1/txt2img, img2img, and what clients ask first."""

import asyncio
import base64
import json
import time
from typing import Any

from fastapi import APIRouter, FastAPI, Request

from .._version import __version__
from .drawing import choose_seed, draw
from .errors import JobError
from .jobs import Job, Limits
from .pictures import decode_image, describe
from .refusals import Refusal, refuse_job
from .service import Service
from .settings import Settings
from .webui_request import ImageRequest, TextRequest, check_rest

NAMES = {
    "images": "batch_size",
    "guidance_scale": "cfg_scale",
    "ratio": "override_settings.token_merging_ratio",
    "image": "init_images",
    "strength": "denoising_strength",
}


def add_routes(app: FastAPI, service: Service, settings: Settings) -> None:
    """Add the interface to the app."""
    router = APIRouter(prefix="/sdapi/v1")

    @router.post("/txt2img")
    async def text_to_image(asked: TextRequest, request: Request) -> dict[str, Any]:
        return await answer(request, asked, to_jobs(asked, service, settings))

    @router.post("/img2img")
    async def image_to_image(asked: ImageRequest, request: Request) -> dict[str, Any]:
        if len(asked.init_images) != 1:
            raise Refusal(422, "exactly one picture is supported", "init_images", "unsupported_value")
        try:
            image = await asyncio.to_thread(decode_image, asked.init_images[0], service.limits.image_pixels)
        except JobError as error:
            raise refuse_job(error, NAMES) from None
        return await answer(request, asked, to_jobs(asked, service, settings, image))

    async def answer(request: Request, asked: TextRequest, jobs: list[Job]) -> dict[str, Any]:
        files = await draw(request, service, settings, jobs, _names(jobs[0], service.limits))
        echoed = asked.model_dump(include=set(TextRequest.model_fields))
        images = [base64.b64encode(file).decode() for file in files]
        return {"images": images, "parameters": echoed, "info": json.dumps(_info(asked, jobs, service))}

    @router.get("/scripts")
    async def list_scripts() -> dict[str, list[str]]:
        return {"txt2img": [], "img2img": []}

    @router.get("/samplers")
    async def list_samplers() -> list[dict[str, Any]]:
        return [{"name": service.sampler, "aliases": [], "options": {}}]

    @router.get("/schedulers")
    async def list_schedulers() -> list[dict[str, Any]]:
        return [{"name": "automatic", "label": "Automatic"}]

    @router.get("/sd-models")
    async def list_models() -> list[dict[str, Any]]:
        no_file = {"hash": None, "sha256": None, "filename": "", "config": None}
        return [{"title": service.name, "model_name": service.name, **no_file}]

    @router.get("/options")
    async def list_options() -> dict[str, Any]:
        return {"sd_model_checkpoint": service.name, "token_merging_ratio": service.limits.ratios[0]}

    app.include_router(router)


def to_jobs(asked: TextRequest, service: Service, settings: Settings, image: Any | None = None) -> list[Job]:
    """The pictures of a request, not yet checked but for their number."""
    check_rest(asked, service)
    limits = service.limits
    images = asked.batch_size * asked.n_iter if asked.batch_size > 0 else asked.batch_size
    try:
        limits.check_count(images)
    except JobError as error:
        raise refuse_job(error, NAMES) from None
    ratio = (asked.override_settings or {}).get("token_merging_ratio")
    if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float)):
        raise Refusal(422, "it must be a number", NAMES["ratio"], "invalid_value")
    strength = 0.75 if asked.denoising_strength is None else asked.denoising_strength
    seed = choose_seed(images) if asked.seed is None or asked.seed == -1 else asked.seed
    return [
        Job(
            prompt=asked.prompt,
            negative_prompt=asked.negative_prompt or "",
            height=limits.sizes[0][0] if asked.height is None else asked.height,
            width=limits.sizes[0][1] if asked.width is None else asked.width,
            ratio=limits.ratios[0] if ratio is None else ratio,
            seed=seed + index,
            steps=settings.steps if asked.steps is None else asked.steps,
            guidance_scale=settings.guidance_scale if asked.cfg_scale is None else asked.cfg_scale,
            image=image,
            strength=None if image is None else strength,
        )
        for index in range(images)
    ]


def _names(job: Job, limits: Limits) -> dict[str, str]:
    """What this interface calls a job's fields; a size that was not exported is the width's fault, or the height's."""
    is_width_known = any(job.width == width for _, width in limits.sizes)
    return {**NAMES, "size": "height" if is_width_known else "width"}


def _info(asked: TextRequest, jobs: list[Job], service: Service) -> dict[str, Any]:
    """What stable-diffusion-webui writes into `info`; the sampler is the one that drew."""
    first = jobs[0]
    strength = {} if first.strength is None else {"denoising_strength": first.strength}
    return {
        "prompt": first.prompt,
        "all_prompts": [job.prompt for job in jobs],
        "negative_prompt": first.negative_prompt,
        "all_negative_prompts": [job.negative_prompt for job in jobs],
        "seed": first.seed,
        "all_seeds": [job.seed for job in jobs],
        "subseed": first.seed,
        "all_subseeds": [job.seed for job in jobs],
        "subseed_strength": 0,
        "width": first.width,
        "height": first.height,
        "sampler_name": service.sampler,
        "cfg_scale": first.guidance_scale,
        "steps": first.steps,
        "batch_size": asked.batch_size,
        "restore_faces": False,
        "face_restoration_model": None,
        "sd_model_name": service.name,
        "sd_model_hash": None,
        "seed_resize_from_w": 0,
        "seed_resize_from_h": 0,
        **strength,
        "extra_generation_params": {"Token merging ratio": first.ratio},
        "index_of_first_image": 0,
        "infotexts": [describe(job, service.name, service.sampler) for job in jobs],
        "styles": [],
        "job_timestamp": time.strftime("%Y%m%d%H%M%S"),
        "clip_skip": 1,
        "is_using_inpainting_conditioning": False,
        "version": f"ppdiffusers_tome {__version__}",
    }
