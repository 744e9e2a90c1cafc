"""The API of stable-diffusion-webui ("A1111"): txt2img, img2img, and the other paths that its clients use."""

import json
import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field

from .._version import __version__
from ..generation.jobs import LARGEST_SEED, Job, Limits, SecondPass
from ..generation.png import describe, describe_second_pass
from . import protocol
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
# webuiapi's defaults, which cannot be distinguished from a choice. `info` contains the sampler that was used.
DEFAULT_SAMPLERS = ("", "Euler a")


def make_router(queue: ImageQueue, config: AppConfig) -> APIRouter:
    """The routes of this interface."""
    router = APIRouter(prefix="/sdapi/v1", tags=["stable-diffusion-webui"], route_class=JsonRoute)
    limits, types = queue.limits, protocol.bounds(queue.limits)
    handler = RequestHandler(queue, config, NAMES)
    model = protocol.one_of(str, lambda: [queue.name], f"this server has one model: {queue.name}")
    sampler = protocol.one_of(
        str,
        lambda: [*DEFAULT_SAMPLERS, queue.sampler, *_aliases(queue.sampler)],
        "requests cannot change the exported scheduler: see /sdapi/v1/samplers",
    )
    ratio, ratio_hr = (
        protocol.one_of(float, partial(tuple, allowed), f"it must be one of {', '.join(map(str, allowed))}")
        for allowed in (limits.ratios, dict.fromkeys((0.0, *limits.ratios)))
    )
    new_options = {"sd_model_checkpoint": model, "token_merging_ratio": ratio, "token_merging_ratio_hr": ratio_hr}
    NewOptions = narrow(protocol.Options, new_options)
    fields = {
        **protocol.OFF,
        **{name: types[name] for name in ("prompt", "negative_prompt", "width", "height", "steps")},
        **dict.fromkeys(("batch_size", "n_iter"), types["images"]),
        **dict.fromkeys(("sampler_name", "sampler_index"), sampler),
        "cfg_scale": types["guidance_scale"],
        "override_settings": NewOptions | None,
        "seed": Annotated[int, Field(ge=-1, le=LARGEST_SEED), protocol.WHOLE] | None,
    }
    FromText = narrow(protocol.TwoPassRequest, fields)
    FromImage = narrow(protocol.ImageToImageRequest, fields)
    errors = partial(responses, protocol.WebuiErrorResponse, 413, 415, 422)
    options = protocol.Options(
        sd_model_checkpoint=queue.name,
        token_merging_ratio=limits.ratios[0],
        token_merging_ratio_hr=0.0,
        CLIP_stop_at_last_layers=1,
    )

    @router.post("/txt2img", responses=errors(409, 429, 500, 503, 504))
    async def text_to_image(body: FromText, request: Request) -> protocol.WebuiResponse:  # type: ignore[valid-type]
        return await answer(request, body)

    @router.post("/img2img", responses=errors(409, 429, 500, 503, 504))
    async def image_to_image(body: FromImage, request: Request) -> protocol.WebuiResponse:  # type: ignore[valid-type]
        return await answer(request, body)

    async def answer(request: Request, values: protocol.TextRequest) -> protocol.WebuiResponse:
        image = values.init_images[0] if isinstance(values, protocol.ImageToImageRequest) else None
        own = values.override_settings or protocol.Options()
        settings = options.model_dump() | own.model_dump(exclude_none=True)
        ratio, second_pass = settings["token_merging_ratio"], None
        if isinstance(values, protocol.TwoPassRequest) and values.enable_hr:
            second_pass = _second_pass(values, settings["token_merging_ratio_hr"] or ratio, limits, config.steps)
        jobs = handler.make_jobs(
            (values.batch_size or 1) * (values.n_iter or 1),
            None if values.seed == -1 else values.seed,
            **values.model_dump(include={"prompt", "negative_prompt", "width", "height", "steps"}),
            guidance_scale=values.cfg_scale,
            ratio=ratio,
            strength=None if image is None else values.denoising_strength or DEFAULT_STRENGTH,
            second_pass=second_pass,
        )
        images = await handler.generate(request, jobs, image, RequestProgress())
        parameters = values.model_dump(include=set(protocol.TextRequest.model_fields))
        info = json.dumps(_info(values, jobs, queue))
        return protocol.WebuiResponse(images=images, parameters=parameters, info=info)

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
        now = queue.progress()
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
        """Set the default ratios of requests; other options accept only their current value."""
        values: protocol.Options = body
        for name, value in values:
            if value is not None:
                setattr(options, name, value)

    @router.get("/scripts")
    async def list_scripts() -> dict[str, list[str]]:
        return {"txt2img": [], "img2img": []}

    @router.get("/samplers")
    async def list_samplers() -> list[dict[str, Any]]:
        return [{"name": queue.sampler, "aliases": _aliases(queue.sampler), "options": {}}]

    @router.get("/schedulers")
    async def list_schedulers() -> list[dict[str, str]]:
        return [{"name": "automatic", "label": "Automatic"}]

    @router.get("/sd-models")
    async def list_models() -> list[dict[str, str | None]]:
        no_file = {"hash": None, "sha256": None, "filename": "", "config": None}
        return [{"title": queue.name, "model_name": queue.name, **no_file}]

    return router


def _second_pass(values: protocol.TwoPassRequest, ratio: float, limits: Limits, default_steps: int) -> SecondPass:
    """The second pass of a request; sizes as stable-diffusion-webui computes them."""
    height, width = limits.sizes[0]
    height, width = values.height or height, values.width or width
    x, y = values.hr_resize_x or 0, values.hr_resize_y or 0
    scale = 2.0 if values.hr_scale is None else values.hr_scale
    if not x and not y:
        x, y = int(width * scale), int(height * scale)
    return SecondPass(
        height=y or x * height // width,
        width=x or y * width // height,
        ratio=ratio,
        steps=values.hr_second_pass_steps or values.steps or default_steps,
        strength=values.denoising_strength or DEFAULT_STRENGTH,
    )


def _aliases(sampler: str) -> list[str]:
    """stable-diffusion-webui's abbreviations: "dpmpp_2m" and "k_dpmpp_2m" for "DPM++ 2M"."""
    short = sampler.lower().replace("++", "pp").replace(" ", "_")
    return [short, f"k_{short}"]


def _info(values: protocol.TextRequest, jobs: list[Job], queue: ImageQueue) -> dict[str, Any]:
    """The fields of stable-diffusion-webui's `info`; the sampler is the exported one."""
    first, seeds, second = jobs[0], [job.seed for job in jobs], jobs[0].second_pass
    method = queue.methods.get(first.ratio, "")
    return {
        **{"prompt": first.prompt, "all_prompts": [job.prompt for job in jobs]},
        **{"negative_prompt": first.negative_prompt, "all_negative_prompts": [job.negative_prompt for job in jobs]},
        **{"seed": first.seed, "all_seeds": seeds, "subseed": first.seed, "all_subseeds": seeds},
        **{"subseed_strength": 0, "seed_resize_from_w": 0, "seed_resize_from_h": 0},
        **{"width": first.width, "height": first.height, "steps": first.steps, "cfg_scale": first.guidance_scale},
        **({} if first.strength is None else {"denoising_strength": first.strength}),
        **({} if second is None else {"denoising_strength": second.strength}),
        **{"sampler_name": queue.sampler, "sd_model_name": queue.name, "sd_model_hash": None, "clip_skip": 1},
        **{"batch_size": values.batch_size or 1, "index_of_first_image": 0, "styles": [], "restore_faces": False},
        **{"face_restoration_model": None, "is_using_inpainting_conditioning": False},
        "extra_generation_params": {
            "Token merging ratio": first.ratio,
            **({"Token merging method": method} if method else {}),
            **({} if second is None else describe_second_pass(second)),
        },
        "infotexts": [describe(job, queue) for job in jobs],
        **{"job_timestamp": time.strftime("%Y%m%d%H%M%S"), "version": f"ppdiffusers_tome {__version__}"},
    }
