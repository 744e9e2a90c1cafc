"""What clients of stable-diffusion-webui send: fields that count, that must say "off", and that have no effect."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .refusals import Refusal
from .service import Service

# Features that are not here: their fields are taken where they say that the feature is off, and refused otherwise.
OFF: dict[str, tuple[Any, ...]] = {
    "alwayson_scripts": (None, {}),
    **dict.fromkeys(("enable_hr", "restore_faces", "tiling", "include_init_images", "save_images"), (None, False)),
    **dict.fromkeys(("firstphase_width", "firstphase_height"), (None, 0)),
    **dict.fromkeys(("mask", "refiner_checkpoint", "refiner_switch_at", "script_name", "comments"), (None, "", {})),
    **dict.fromkeys(("resize_mode", "s_churn", "s_min_uncond", "s_tmax", "s_tmin", "subseed_strength"), (None, 0)),
    **dict.fromkeys(("script_args", "styles"), (None, [])),
    **dict.fromkeys(("initial_noise_multiplier", "s_noise"), (None, 1)),
    **dict.fromkeys(("send_images", "override_settings_restore_afterwards"), (None, True)),
    "eta": (None, 0, 1),  # webuiapi always sends 1; the samplers here take none
}
# Settings of features that are off, and of files that are never written. Clients send them always.
WITHOUT_EFFECT = frozenset(
    (
        *("hr_scale", "hr_upscaler", "hr_second_pass_steps", "hr_resize_x", "hr_resize_y", "hr_checkpoint_name"),
        *("hr_sampler_name", "hr_scheduler", "hr_prompt", "hr_negative_prompt"),
        *("mask_blur", "mask_blur_x", "mask_blur_y", "inpainting_fill", "inpaint_full_res"),
        *("inpaint_full_res_padding", "inpainting_mask_invert", "image_cfg_scale"),
        *("subseed", "seed_resize_from_h", "seed_resize_from_w"),
        *("do_not_save_samples", "do_not_save_grid", "disable_extra_networks"),
    )
)
# What webuiapi sends where its user did not choose. It cannot be told from a choice; `info` says what really drew.
DEFAULT_SAMPLERS = ("", "Euler a")
DEFAULT_SCHEDULES = ("", "automatic", "Automatic")


class TextRequest(BaseModel):
    """What to draw. Numbers must be numbers, and fields that do not exist are refused, not ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    prompt: str = ""
    negative_prompt: str | None = None
    seed: int | None = Field(None, description="-1 or absent: drawn at random and reported")
    batch_size: int = Field(1, description="pictures; they get seed, seed + 1, …")
    n_iter: int = Field(1, description="batch_size times this many pictures are drawn")
    steps: int | None = None
    cfg_scale: float | None = None
    width: int | None = None
    height: int | None = None
    sampler_name: str | None = None
    sampler_index: str | None = None
    scheduler: str | None = None
    override_settings: dict[str, Any] | None = Field(None, description="token_merging_ratio, sd_model_checkpoint")
    denoising_strength: float | None = None


class ImageRequest(TextRequest):
    """What to draw from a picture, which is resized to width and height."""

    init_images: list[str] = Field(description="one PNG, JPEG or WEBP file in base64, or as a data URL")


def check_rest(asked: TextRequest, service: Service) -> None:
    """Refuse what would change the picture and cannot be done."""
    for name, value in (asked.model_extra or {}).items():
        if name in OFF and value not in OFF[name]:
            allowed = ", ".join(json.dumps(one) for one in OFF[name] if one is not None)
            raise Refusal(422, f"{name}: only {allowed} is supported", name, "unsupported_value")
        if name not in OFF and name not in WITHOUT_EFFECT:
            raise Refusal(422, f"{name[:100]} is not a field of this request", name[:100], "unknown_parameter")
    samplers = (None, *DEFAULT_SAMPLERS, service.sampler)
    choices = {"sampler_name": samplers, "sampler_index": samplers, "scheduler": (None, *DEFAULT_SCHEDULES)}
    for name, choice in choices.items():
        if getattr(asked, name) not in choice:
            message = f"{name}: this model draws with {service.sampler}, which the request cannot change"
            raise Refusal(422, message, name, "unsupported_value")
    for name, value in (asked.override_settings or {}).items():
        field = f"override_settings.{name[:100]}"
        if name == "sd_model_checkpoint":
            if value != service.name:
                message = f"there is no such model here: this server has {service.name}"
                raise Refusal(422, message, field, "model_not_found")
        elif name != "token_merging_ratio":
            raise Refusal(422, f"{field} is not supported: token_merging_ratio is", field, "unknown_parameter")
