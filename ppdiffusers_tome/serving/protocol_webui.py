"""Requests and responses of stable-diffusion-webui's API ("A1111"), version 1.10, as pydantic models."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from .image_engine import ServedModel
from .jobs import MAX_SEED, MAX_STEPS
from .limits import Strength, bounded, choice_type, no_image_type, ratio_type

# Most clients send all fields of the schema, also those that they do not use.
# These fields ask for features that do not exist here, unless they have one of these values, or null.
OFF: dict[str, tuple[Any, ...]] = {
    "CLIP_stop_at_last_layers": (1,),
    "alwayson_scripts": ({},),
    "clip_skip": (1,),
    "eta": (0, 1),  # webuiapi always sends 1. No sampler here takes it, or s_noise
    "firstphase_height": (0,),
    "firstphase_width": (0,),
    "infotext": ("",),
    "initial_noise_multiplier": (0, 1),  # Dify always sends 0, which would start without noise
    "mask": ("",),
    "refiner_checkpoint": ("", "None"),
    "resize_mode": (0,),
    "restore_faces": (False,),
    "s_churn": (0,),
    "s_min_uncond": (0,),
    "s_noise": (0, 1),
    "scheduler": ("", "automatic", "Automatic", "normal", "Normal"),  # some clients send "normal" by default
    "script_name": ("", "None"),
    "sd_vae": ("", "Automatic", "None"),
    "styles": ([],),
    "subseed_strength": (0,),
    "tiling": (False,),
}
UNIT_SWITCHES = ("enabled", "enable", "is_enabled", "ad_tab_enable")  # of ControlNet, AnimateDiff and ADetailer


def _show_off(schema: dict[str, Any], model: "type[Lenient]") -> None:
    """Add the values of a model's `off` to its JSON schema."""
    for name in model.off.keys() & schema["properties"].keys():
        schema["properties"][name]["anyOf"][0]["enum"] = list(model.off[name])


class Lenient(BaseModel):
    """Read as stable-diffusion-webui reads it: "1.0" is a number, and unknown fields are ignored.

    pydantic keeps the unknown fields, so that the log can name them.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, json_schema_extra=_show_off)
    off: ClassVar[Mapping[str, tuple[Any, ...]]] = OFF

    @field_validator("*")
    @classmethod
    def _refuse_unsupported(cls, value: Any, info: ValidationInfo) -> Any:
        allowed = cls.off.get(info.field_name or "")
        if allowed is not None and value is not None and value not in allowed:
            those = f", and {', '.join(value)[:100]} is on" if isinstance(value, dict) else ""
            raise ValueError(f"only {' or '.join(map(json.dumps, allowed))} is supported{those}")
        return value


class Options(Lenient):
    """Options of the server, or of a request."""

    sd_model_checkpoint: str | None = None
    sd_vae: str | None = None
    token_merging_ratio: float | None = None
    token_merging_ratio_hr: float | None = Field(default=None, description="0: token_merging_ratio")
    token_merging_ratio_img2img: float | None = Field(default=None, description="0: token_merging_ratio")
    CLIP_stop_at_last_layers: int | None = None


class ServerOptions(Options):
    """The server's options, with those that cannot change."""

    samples_format: Literal["png"] = "png"  # KoboldAI Lite uses no server whose options lack it


def _is_off(script: Any) -> bool:
    """Whether a script does nothing with the arguments that a client sends for it.

    By a convention of such scripts, the first boolean among them switches it on, and an object is a unit with a switch
    of its own. Without arguments a script has the defaults of its user interface, in which it is off.
    """
    arguments = script.get("args") if isinstance(script, dict) else script
    if not isinstance(arguments, list):
        return not arguments
    given = [argument for argument in arguments if argument is not None]
    if not given or next((argument for argument in given if isinstance(argument, bool)), True) is False:
        return True
    units = [argument for argument in given if isinstance(argument, dict)]
    return bool(units) and all(map(_is_unit_off, units))


def _is_unit_off(unit: dict[str, Any]) -> bool:
    return unit.get("ad_model") == "None" or any(unit.get(name) is False for name in UNIT_SWITCHES)


# Clients send the entries of a user interface that are off. What is left of them must be empty, see `OFF`.
Styles = Annotated[list[str], AfterValidator(lambda styles: [name for name in styles if name not in ("", "None")])]
Scripts = Annotated[
    dict[str, Any],
    AfterValidator(lambda scripts: {name: script for name, script in scripts.items() if not _is_off(script)}),
]
Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]  # as large as JSON's readers agree on
Pixels = Annotated[int, Field(ge=0, le=8192)]
OnlyOff = Annotated[int, Field(ge=-(2**53), le=0)]  # a number that switches a feature on where it is positive


class TextRequest(Lenient):
    """The fields that txt2img and img2img share, with stable-diffusion-webui's defaults; None: the server's."""

    prompt: str | None = ""
    negative_prompt: str | None = ""
    styles: Styles | None = []
    seed: int | None = Field(-1, ge=-1, le=MAX_SEED, description="-1 or null: random; the answer contains it")
    subseed: Integer | None = Field(-1, description="ignored, because subseed_strength is 0")
    subseed_strength: float | None = 0
    seed_resize_from_h: OnlyOff | None = -1
    seed_resize_from_w: OnlyOff | None = -1
    sampler_name: str | None = None
    sampler_index: str | None = "Euler"
    scheduler: str | None = None
    batch_size: int | None = Field(1, description="images; they get seed, seed + 1, …, modulo 2**32")
    n_iter: int | None = Field(1, description="the number of images is batch_size times n_iter")
    steps: int | None = None
    cfg_scale: float | None = None
    width: int | None = None
    height: int | None = None
    denoising_strength: float | None = Field(None, description="of a second pass, above 0 and at most 1; 0.75 if null")
    restore_faces: bool | None = None
    tiling: bool | None = None
    clip_skip: int | None = Field(None, description="a field of SD.Next")
    eta: float | None = None
    s_churn: float | None = None
    s_min_uncond: float | None = None
    s_noise: float | None = None
    s_tmax: float | None = Field(None, description="ignored, because s_churn is 0")
    s_tmin: float | None = Field(None, description="ignored, because s_churn is 0")
    refiner_checkpoint: str | None = None
    refiner_switch_at: float | None = Field(None, description="ignored, because there is no refiner")
    script_name: str | None = None
    script_args: list[Any] | None = Field([], description="ignored, because there is no script")
    alwayson_scripts: Scripts | None = {}
    infotext: str | None = None
    override_settings: Options | None = None
    override_settings_restore_afterwards: bool | None = Field(True, description="false: they become the server's")
    send_images: bool | None = Field(True, description="false: the answer has no images")
    # These change no image.
    comments: dict[str, Any] | None = None
    disable_extra_networks: bool | None = False
    do_not_save_grid: bool | None = False
    do_not_save_samples: bool | None = False
    force_task_id: str | None = None
    save_images: bool | None = Field(False, description="ignored: the server stores no image")


class TwoPassRequest(TextRequest):
    """Images to generate from text, and to enlarge and denoise again if `enable_hr` is true."""

    enable_hr: bool | None = Field(False, description="a second pass at a larger exported size; see docs/serve.md")
    firstpass_image: str | None = None
    firstphase_height: int | None = 0
    firstphase_width: int | None = 0
    hr_scale: float | None = Field(2.0, ge=0, le=16, description="of width and height; 0 or null: 2")
    hr_resize_x: Pixels | None = Field(0, description="width instead of hr_scale, 0: from hr_resize_y")
    hr_resize_y: Pixels | None = Field(0, description="height instead of hr_scale, 0: from hr_resize_x")
    hr_second_pass_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] | None = Field(
        0, description="that run; 0 or null: steps"
    )
    hr_upscaler: str | None = Field(None, description="Lanczos, whatever a client sends by default")
    hr_checkpoint_name: str | None = None
    hr_sampler_name: str | None = None
    hr_scheduler: str | None = None
    hr_prompt: str | None = ""
    hr_negative_prompt: str | None = ""


class ImageToImageRequest(TextRequest):
    """Images to generate from an image, which is resized to width and height."""

    off = OFF | {"enable_hr": (False,)}

    init_images: list[str] = Field(min_length=1, max_length=1, description="PNG, JPEG or WEBP in base64 or a data URL")
    firstpass_image: str | None = Field(None, description="ignored, because there is no second pass")
    denoising_strength: Strength | None = Field(None, description="0.75 if null")
    include_init_images: bool | None = Field(False, description="true: the answer's parameters contain init_images")
    initial_noise_multiplier: float | None = None
    resize_mode: int | None = 0
    image_cfg_scale: float | None = Field(None, description="ignored: only InstructPix2Pix has it")
    mask: str | None = None
    # These change no image without a mask.
    latent_mask: str | None = None
    mask_blur: Integer | None = None
    mask_blur_x: Integer | None = 4
    mask_blur_y: Integer | None = 4
    mask_round: bool | None = True
    inpaint_full_res: bool | None = True
    inpaint_full_res_padding: Integer | None = 0
    inpainting_fill: Integer | None = 0
    inpainting_mask_invert: Integer | None = 0
    enable_hr: bool | None = None  # a second pass follows only an image from text


@dataclass(frozen=True)
class WebuiRequests:
    """The models of requests for an export."""

    text: type[TwoPassRequest]
    image: type[ImageToImageRequest]
    options: type[Options]


# Defaults of stable-diffusion-webui and webuiapi, which cannot be distinguished from a choice. `info` contains the
# sampler that was used.
DEFAULT_SAMPLERS = ("", "Euler", "Euler a")


def aliases_of(sampler: str) -> list[str]:
    """stable-diffusion-webui's abbreviations: "dpmpp_2m" and "k_dpmpp_2m" for "DPM++ 2M"."""
    short = sampler.lower().replace("++", "pp").replace(" ", "_")
    return [short, f"k_{short}"]


def samplers_of(sampler: str) -> list[str]:
    """Names of samplers that requests may have, where this sampler was exported."""
    return [*DEFAULT_SAMPLERS, sampler, *aliases_of(sampler)]


def requests_for(model: ServedModel) -> WebuiRequests:
    """The models of requests for an export."""
    limits, allowed = model.limits, model.limits.types
    fixed_sampler = "requests cannot change the exported scheduler: see /sdapi/v1/samplers"
    sampler = choice_type(str, samplers_of(model.sampler), lambda value: fixed_sampler)
    one_model = f"this server has one model: {model.name}"
    zero_or_ratio = ratio_type(tuple(dict.fromkeys((0.0, *limits.ratios))))  # 0: token_merging_ratio
    options = bounded(
        Options,
        {
            "sd_model_checkpoint": choice_type(str, ("", model.name), lambda value: one_model),
            "token_merging_ratio": allowed["ratio"],
            "token_merging_ratio_hr": zero_or_ratio,
            "token_merging_ratio_img2img": zero_or_ratio,
        },
    )

    def side_type(sides: Iterable[int]) -> Any:
        reason = f"was not exported: {limits.size_rule}"
        return choice_type(int, sorted({*sides}), lambda value: f"{value!s:.20} {reason}")

    types = {
        **{name: allowed[name] for name in ("prompt", "negative_prompt", "steps")},
        "cfg_scale": allowed["guidance_scale"],
        "batch_size": allowed["images"],
        "n_iter": allowed["images"],
        "width": side_type(size.width for size in limits.sizes),
        "height": side_type(size.height for size in limits.sizes),
        "sampler_name": sampler,
        "sampler_index": sampler,
        "override_settings": options,
    }
    images = types if limits.image_to_image else {**types, "init_images": no_image_type(list[str])}
    return WebuiRequests(bounded(TwoPassRequest, types), bounded(ImageToImageRequest, images), options)


class GenerationInfo(BaseModel):
    """The fields that stable-diffusion-webui always writes into `info`."""

    prompt: str
    all_prompts: list[str]
    negative_prompt: str
    all_negative_prompts: list[str]
    seed: int
    all_seeds: list[int]
    subseed: int
    all_subseeds: list[int]
    subseed_strength: float = 0
    width: int
    height: int
    sampler_name: str  # the exported sampler
    cfg_scale: float
    steps: int
    batch_size: int
    restore_faces: bool = False
    face_restoration_model: None = None
    sd_model_name: str
    sd_model_hash: str = ""  # an exported model has several files
    sd_vae_name: None = None  # the model's own
    sd_vae_hash: None = None
    seed_resize_from_w: int = -1
    seed_resize_from_h: int = -1
    denoising_strength: float | None
    extra_generation_params: dict[str, Any]
    index_of_first_image: int = 0
    infotexts: list[str]
    styles: list[str] = []
    job_timestamp: str
    clip_skip: int = 1
    is_using_inpainting_conditioning: bool = False
    version: str


class WebuiResponse(BaseModel):
    images: list[str]
    parameters: dict[str, Any]  # the request, with defaults
    info: str  # a GenerationInfo as JSON


class ProgressState(BaseModel):
    skipped: bool = False
    interrupted: bool = False
    stopping_generation: bool = False
    job: str = ""
    job_count: int
    job_timestamp: str = ""
    job_no: int = 0
    sampling_step: int
    sampling_steps: int


class ProgressResponse(BaseModel):
    progress: float
    eta_relative: float
    state: ProgressState
    current_image: None = None
    textinfo: None = None


class PngInfoRequest(BaseModel):
    image: str = Field(description="PNG, JPEG or WEBP in base64 or a data URL")


class PngInfoResponse(BaseModel):
    """How an image was made; empty if it does not say so."""

    info: str  # the text chunk `parameters`
    items: dict[str, str]  # all further texts
    parameters: dict[str, str]  # those in `info`


class QueueStatus(BaseModel):
    """Gradio's `Estimation`. `rank` and the averages are of events of its own pages, which are not here.

    Waiting times are not estimated, so the field that must be a number is 0.
    """

    msg: Literal["estimation"] = "estimation"
    rank: None = None
    queue_size: int  # images that wait
    avg_event_process_time: None = None
    avg_event_concurrent_process_time: None = None
    rank_eta: None = None
    queue_eta: float = 0


class EmbeddingsResponse(BaseModel):
    """An exported folder has none."""

    loaded: dict[str, Any] = {}
    skipped: dict[str, Any] = {}


class FlagsResponse(BaseModel):
    """The flags of stable-diffusion-webui's command line that mean something here."""

    api: bool = True
    nowebui: bool


class MemoryResponse(BaseModel):
    """Bytes, or an `error` where they are not known."""

    ram: dict[str, float | str]  # free, used by this process, total
    cuda: dict[str, str] = {"error": "unavailable"}
