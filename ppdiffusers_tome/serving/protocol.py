"""Requests and responses as pydantic models: what both interfaces share, and OpenAI's images API.

The models check types and constant bounds. What depends on the export and the command line is checked by `Limits`, and
added to /openapi.json by `app.App.openapi`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from ..run.manifest import STRICT
from .jobs import Limits
from .tickets import State


class Strict(BaseModel):
    """Numbers must be numbers, and unknown fields are refused."""

    model_config = STRICT


# In JSON Schema, 3.0 is an integer; true and "3" are not
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Integer = Annotated[int, WHOLE]


def schema_keywords(limits: Limits) -> dict[str, dict[str, Any]]:
    """Keywords of JSON Schema that /openapi.json has for the fields of a job, which `Limits.check` checks."""
    text = {"maxLength": limits.prompt_characters}
    keywords: dict[str, dict[str, Any]] = {
        "prompt": text,
        "negative_prompt": text,
        "size": {"enum": ["auto", *map(str, limits.sizes)]},
        "ratio": ratio_keywords(limits.ratios),
    }
    for name, (low, high) in limits.ranges.items():
        keywords[name] = {"minimum": low, "maximum": high}
    return keywords


def ratio_keywords(ratios: Sequence[float]) -> dict[str, Any]:
    """Keywords of JSON Schema for a ratio that is one of these.

    They are `examples`, because an `enum` would refuse what `find_ratio` accepts: 0.333333 for 1/3.
    """
    return {"minimum": 0, "exclusiveMaximum": 1, "examples": list(ratios)}


def add_keywords(model: dict[str, Any], keywords: Mapping[str, Mapping[str, Any]]) -> None:
    """Add keywords to the fields of these names in a model's JSON schema."""
    for name in keywords.keys() & model.get("properties", {}).keys():
        field = model["properties"][name]
        value = field["anyOf"][0] if "anyOf" in field else field  # the other one is null
        value.update(keywords[name])


# OpenAI


class ImageFields(Strict):
    """The fields that all requests for images share."""

    prompt: str
    model: str | None = Field(None, max_length=500, description="the name in GET /v1/models; empty: that one")
    n: Integer | None = Field(None, description="images, 1 if absent; they get seed, seed + 1, …, modulo 2**32")
    size: str | None = Field(None, description='"WIDTHxHEIGHT" in pixels; "auto" or absent: the first exported')
    seed: Integer | None = Field(None, description="random if absent; the answer contains it")
    steps: Integer | None = Field(None, description="denoising steps")
    guidance_scale: float | None = Field(None, description="weight of classifier-free guidance; 1 or less: none")
    negative_prompt: str | None = Field(None, description="what the image should not show")
    tome_ratio: float | None = Field(None, description="how much merging leaves out; an exported ratio, in six digits")
    strength: float | None = Field(
        None, gt=0, le=1, description="share of the steps that run on the image; 0.75 if absent"
    )
    stream: bool | None = Field(None, description="answer with server-sent events: progress, then the images")
    user: str | None = Field(None, max_length=500, description="accepted and ignored")
    response_format: Literal["b64_json", "url", ""] | None = Field(
        None, description="url: a data URL, because no image is stored. b64_json if absent, except for DALL-E's names"
    )
    # OpenAI's fields of which this server supports one value. Clients send an empty text for none.
    output_format: Literal["png", ""] | None = None
    partial_images: Annotated[Integer, Field(json_schema_extra={"enum": [0]})] | None = None
    # OpenAI's fields that are ignored, because an image without what they ask for is still useful: see `IGNORED`.
    background: str | None = Field(None, max_length=100, description="ignored")
    moderation: str | None = Field(None, max_length=100, description="ignored")
    output_compression: Annotated[int, Field(ge=0, le=100), WHOLE] | None = Field(None, description="ignored")
    quality: str | None = Field(None, max_length=100, description="ignored")
    style: str | None = Field(None, max_length=100, description="ignored")

    @field_validator("partial_images")
    @classmethod
    def _refuse_partial_images(cls, count: int | None) -> int | None:
        if count:
            raise ValueError("only 0 is supported")
        return count


class ImageRequest(ImageFields):
    """Images to generate."""

    image: str | None = Field(
        None, description="to start from: PNG, JPEG or WEBP in base64 or a data URL; empty: none"
    )


class EditRequest(ImageFields):
    """Images to generate from one image, which the same form holds as a file."""

    input_fidelity: str | None = Field(None, max_length=100, description="ignored")


def form_of(model: type[EditRequest]) -> dict[str, Any]:
    """OpenAPI's description of a form with the model's fields and an image."""
    schema = model.model_json_schema()
    schema["properties"]["image"] = {"type": "string", "format": "binary", "description": "a PNG, JPEG or WEBP file"}
    schema["required"].append("image")
    return {"content": {"multipart/form-data": {"schema": schema}}, "required": True}


# The ignored fields, each with the values that ask for what this server does anyway.
IGNORED: dict[str, tuple[str | int, ...]] = {
    "background": ("auto", "opaque"),
    "input_fidelity": (),
    "moderation": ("auto",),
    "output_compression": (100,),
    "quality": ("auto", "standard"),
    "style": (),
}


class Image(BaseModel):
    """One of the two texts is there, and the other one is left out."""

    b64_json: str | None = None
    url: str | None = None
    seed: int


class ImagesResponse(BaseModel):
    created: int
    data: list[Image]
    output_format: Literal["png"] = "png"
    size: str


class ProgressEvent(BaseModel):
    """Sent at most ten times a second. OpenAI has no such event; its client passes it on like any other."""

    type: str  # "image_generation.progress" or "image_edit.progress"
    position: int  # of the last image in the queue; 0: none waits
    step: int
    steps: int  # 0: not known yet, or not known here


class CompletedEvent(BaseModel):
    """One image, with OpenAI's name and fields; from `seed` on they are additions."""

    type: str  # "image_generation.completed" or "image_edit.completed"
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


class ModelResponse(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ppdiffusers_tome"
    sizes: list[str]
    tome_ratios: list[float]
    tome_methods: list[str]  # how tokens merge at each ratio, in words
    image_to_image: bool
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
    max_tokens: int  # that the text encoder reads
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


class WebuiErrorResponse(BaseModel):
    """A message; for an invalid field a list with one entry, in FastAPI's format."""

    detail: str | list[dict[str, str | list[str]]]


class Health(BaseModel):
    state: State
    reason: str | None = None  # why the process should be replaced
