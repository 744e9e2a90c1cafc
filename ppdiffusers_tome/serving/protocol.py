"""Requests and responses as pydantic models: OpenAI's images API and stable-diffusion-webui's ("A1111").

The schema contains all bounds; `narrow` adds those that depend on the export and the command line.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
)

from ..generation.jobs import LONGEST_SCHEDULE, Limits
from ..inference.manifest import STRICT
from .tickets import State


class Strict(BaseModel):
    """Numbers must be numbers, and unknown fields are refused."""

    model_config = STRICT


Request = TypeVar("Request", bound=BaseModel)


# In JSON Schema, 3.0 is an integer; true and "3" are not
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Integer = Annotated[int, WHOLE]


def one_of(kind: Any, choices: Callable[[], Sequence[Any]], reason: str) -> Any:
    """The type of an optional value that must be one of the choices, which may change; `reason` is the message."""

    def check(value: Any) -> Any:
        allowed = list(choices())
        if value not in allowed:
            raise ValueError(reason)
        return allowed[allowed.index(value)]  # -0.0 equals 0.0, but is written differently

    extra = Field(json_schema_extra=lambda schema: schema.update(enum=list(choices())))
    return Annotated[kind, AfterValidator(check), extra] | None


def only(kind: Any, *values: Any) -> Any:
    """The type of an optional field whose other values ask for features that do not exist here."""
    return one_of(kind, lambda: values, f"only {' or '.join(map(json.dumps, values))} is supported")


def bounds(limits: Limits) -> dict[str, Any]:
    """The types of fields by name. The schema shows the bounds of a job's fields, which `Limits.check` applies.

    Numbers of images, and sides, from which those of a second pass are computed, are checked here.
    """
    sizes = ", ".join(map(str, limits.sizes))

    def shown(kind: Any, **schema: Any) -> Any:
        return Annotated[kind, Field(json_schema_extra=schema)] | None

    def number(name: str, kind: Any) -> Any:
        low, high = limits.ranges[name]
        return shown(kind, minimum=low, maximum=high)

    def side(of_sizes: Iterable[int]) -> Any:
        choices = sorted({*of_sizes})

        def check(value: int) -> int:
            if value not in choices:
                raise ValueError(f"{value!s:.20} was not exported: width x height must be one of {sizes}")
            return value

        return Annotated[int, AfterValidator(check), Field(json_schema_extra={"enum": [*choices]})] | None

    return {
        "prompt": Annotated[str, Field(json_schema_extra={"maxLength": limits.prompt_characters})],
        "negative_prompt": shown(str, maxLength=limits.prompt_characters),
        "images": Annotated[int, Field(ge=1, le=limits.images), WHOLE] | None,
        "height": side(size.height for size in limits.sizes),
        "width": side(size.width for size in limits.sizes),
        "size": shown(str, enum=["auto", *map(str, limits.sizes)]),
        "ratio": shown(float, enum=list(limits.ratios)),
        "seed": number("seed", Integer),
        "steps": number("steps", Integer),
        "guidance_scale": number("guidance_scale", float),
    }


def narrow(model: type[Request], types: Mapping[str, Any]) -> type[Request]:
    """The model with other types for some fields, which keep default and description; new fields are optional."""
    fields = {name: (kind, copy(model.model_fields.get(name, Field(None)))) for name, kind in types.items()}
    return create_model(model.__name__, __base__=model, **fields)  # type: ignore[call-overload]


# OpenAI


class ImageRequest(Strict):
    """Images to generate."""

    prompt: str
    model: str | None = Field(None, max_length=500, description="the name in GET /v1/models")
    n: int | None = Field(None, description="images, 1 if absent; they get seed, seed + 1, …, modulo 2**32")
    size: str | None = Field(None, description='"WIDTHxHEIGHT" in pixels; "auto" or absent: the first exported')
    seed: int | None = Field(None, description="random if absent; the answer contains it")
    steps: int | None = Field(None, description="denoising steps")
    guidance_scale: float | None = Field(None, description="weight of classifier-free guidance; 1 or less: none")
    negative_prompt: str | None = Field(None, description="what the image should not show")
    tome_ratio: float | None = Field(None, description="share of tokens to merge away; an exported ratio")
    image: str | None = Field(None, description="to start from: PNG, JPEG or WEBP in base64 or a data URL")
    strength: float | None = Field(
        None, gt=0, le=1, description="share of the steps that run on the image; 0.75 if absent"
    )
    merge_map: bool | None = Field(None, description="with `stream`: also answer which tokens merged at the last step")
    stream: bool | None = Field(None, description="answer with server-sent events: progress, then the images")
    user: str | None = Field(None, max_length=500, description="accepted and ignored")
    # OpenAI's fields of which this server supports one value.
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto"] | None = None
    output_compression: only(Integer, 100) = None  # type: ignore[valid-type]
    output_format: Literal["png"] | None = None
    partial_images: only(Integer, 0) = None  # type: ignore[valid-type]
    quality: Literal["auto", "standard"] | None = None
    response_format: Literal["b64_json"] | None = Field(None, description="no url, because no image is stored")
    style: None = None


class Image(BaseModel):
    b64_json: str
    seed: int


class ImagesResponse(BaseModel):
    created: int
    data: list[Image]
    output_format: Literal["png"] = "png"
    size: str


class ProgressEvent(BaseModel):
    """Sent at most ten times a second. OpenAI has no such event; its client passes it on like any other."""

    type: Literal["image_generation.progress"] = "image_generation.progress"
    position: int  # of the last image in the queue; 0: none waits
    step: int
    steps: int  # 0: not known yet, or not known here


class MergeMap(BaseModel):
    """Which tokens the first merging block merged at the last step: those of one group are one token there."""

    width: int  # in tokens
    height: int
    groups: list[int]  # of each token, row by row


class CompletedEvent(BaseModel):
    """One image, with OpenAI's name and fields; from `seed` on they are additions."""

    type: Literal["image_generation.completed"] = "image_generation.completed"
    b64_json: str
    created_at: int
    size: str
    output_format: Literal["png"] = "png"
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"
    seed: int
    index: int  # of the request's images, from 0
    seconds: float  # of the pipeline calls that generated the request's images, without waiting
    batch: int  # images in the last of these calls; more than the request's if others shared it
    step_seconds: list[float]  # of each step of the last call, the first with the text encoder; empty if not known
    merge_map: MergeMap | None = None  # if the request asks for it; none of a single step


class ModelResponse(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ppdiffusers_tome"
    sizes: list[str]
    tome_ratios: list[float]
    tome_methods: list[str]  # how tokens merge at each ratio, in words
    image_to_image: bool
    merge_map: bool  # whether requests may ask for one
    steps: int  # default
    guidance_scale: float  # default
    ranges: dict[str, tuple[float, float]]  # smallest and largest number of each field
    prompt_characters: int  # at most
    prompts: list[str]  # examples that the model knows


class ModelsResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelResponse]


class TokensRequest(Strict):
    """A prompt to count the tokens of."""

    prompt: str


class TokensResponse(BaseModel):
    tokens: int  # of the prompt, with the two that begin and end it
    most: int  # that the text encoder reads
    cut: str  # the end of the prompt, which it does not read; "" if the prompt fits


class OpenAIError(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorResponse(BaseModel):
    error: OpenAIError


class ErrorEvent(OpenAIErrorResponse):
    """Ends a stream that has already begun with status 200."""

    type: Literal["error"] = "error"


# stable-diffusion-webui, version 1.10. Most of its clients send all of its fields, whatever they use.
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
    "script_name": ("",),
    "sd_vae": ("", "Automatic", "None"),
    "styles": ([],),
    "subseed_strength": (0,),
    "tiling": (False,),
}


def _show_off(schema: dict[str, Any]) -> None:
    """Add the values of `OFF` to the JSON schema of a model."""
    for name in OFF.keys() & schema["properties"].keys():
        schema["properties"][name]["anyOf"][0]["enum"] = list(OFF[name])


class Lenient(BaseModel):
    """Read as stable-diffusion-webui reads it: "1.0" is a number, and unknown fields are ignored.

    pydantic keeps the unknown fields, so that the log can name them.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, json_schema_extra=_show_off)

    @field_validator("*")
    @classmethod
    def _refuse_unsupported(cls, value: Any, info: ValidationInfo) -> Any:
        allowed = OFF.get(info.field_name or "")
        if allowed is not None and value is not None and value not in allowed:
            raise ValueError(f"only {' or '.join(map(json.dumps, allowed))} is supported")
        return value


class Options(Lenient):
    """Options of the server, or of one request."""

    sd_model_checkpoint: str | None = None
    sd_vae: str | None = None
    token_merging_ratio: float | None = None
    token_merging_ratio_hr: Annotated[float | None, Field(description="0: token_merging_ratio")] = None
    token_merging_ratio_img2img: Annotated[float | None, Field(description="0: token_merging_ratio")] = None
    CLIP_stop_at_last_layers: int | None = None


Integer64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Pixels = Annotated[int, Field(ge=0, le=8192)]
OnlyOff = Annotated[int, Field(ge=-(2**63), le=0)]  # a number that switches a feature on where it is positive


class TextRequest(Lenient):
    """The fields that txt2img and img2img share, with stable-diffusion-webui's defaults; None: the server's."""

    prompt: str | None = ""
    negative_prompt: str | None = ""
    styles: list[str] | None = []
    seed: int | None = Field(-1, description="-1 or null: random; the answer contains it")
    subseed: Integer64 | None = Field(-1, description="ignored, because subseed_strength is 0")
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
    denoising_strength: float | None = Field(
        None,
        description="of img2img and of a second pass, above 0; 0.75 if null",
        json_schema_extra={"minimum": 0, "maximum": 1},
    )
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
    alwayson_scripts: dict[str, Any] | None = {}
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


def second_pass_one_of(choices: Callable[[], Sequence[str]]) -> Any:
    """The type of a text that may be anything without a second pass.

    With one, it must be absent, empty, one of the choices, or the first pass's: `hr_prompt` equal to `prompt`.
    """

    def check(text: str, info: ValidationInfo) -> str:
        allowed = ["", *choices()]
        of_first_pass = info.data.get((info.field_name or "").removeprefix("hr_"))
        if info.data.get("enable_hr") and text not in (*allowed, of_first_pass):
            raise ValueError(f"the second pass supports only {' or '.join(map(json.dumps, allowed))}")
        return text

    return Annotated[str, AfterValidator(check)] | None


class TwoPassRequest(TextRequest):
    """Images to generate from text, and to enlarge and denoise again if `enable_hr` is true."""

    enable_hr: bool | None = Field(False, description="a second pass at a larger exported size; see docs/serving.md")
    firstpass_image: str | None = None
    firstphase_height: int | None = 0
    firstphase_width: int | None = 0
    hr_scale: float | None = Field(2.0, ge=0, le=16, description="of width and height; 0 or null: 2")
    hr_resize_x: Pixels | None = Field(0, description="width instead of hr_scale, 0: from hr_resize_y")
    hr_resize_y: Pixels | None = Field(0, description="height instead of hr_scale, 0: from hr_resize_x")
    hr_second_pass_steps: Annotated[int, Field(ge=0, le=LONGEST_SCHEDULE)] | None = Field(
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

    init_images: list[str] = Field(min_length=1, max_length=1, description="PNG, JPEG or WEBP in base64 or a data URL")
    firstpass_image: str | None = Field(None, description="ignored, because there is no second pass")
    include_init_images: bool | None = Field(False, description="true: the answer's parameters contain init_images")
    initial_noise_multiplier: float | None = None
    resize_mode: int | None = 0
    image_cfg_scale: float | None = Field(None, description="ignored: only InstructPix2Pix has it")
    mask: str | None = None
    # These change no image without a mask.
    latent_mask: str | None = None
    mask_blur: Integer64 | None = None
    mask_blur_x: Integer64 | None = 4
    mask_blur_y: Integer64 | None = 4
    mask_round: bool | None = True
    inpaint_full_res: bool | None = True
    inpaint_full_res_padding: Integer64 | None = 0
    inpainting_fill: Integer64 | None = 0
    inpainting_mask_invert: Integer64 | None = 0


class GenerationInfo(BaseModel):
    """What stable-diffusion-webui always writes into `info`."""

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
    sampler_name: str  # the exported one
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


class WebuiErrorResponse(BaseModel):
    """A message; for an invalid field a list with one entry, in FastAPI's format."""

    detail: str | list[dict[str, str | list[str]]]


class Health(BaseModel):
    state: State
    reason: str | None = None  # why the process should be replaced
