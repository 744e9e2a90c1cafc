"""Requests and responses as pydantic models: what both interfaces share, and OpenAI's images API.

The models of requests have the bounds that are the same for all exports. `requests_for` makes the models for an
export, which have all bounds, and so does /openapi.json.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, field_validator
from pydantic_core import PydanticCustomError

from ..run.sizes import Size
from ..run.validation import STRICT
from .image_engine import ServedModel
from .limits import WHOLE, Integer, Strength, bounded
from .tickets import State


class Strict(BaseModel):
    """Numbers must be numbers, and unknown fields are refused."""

    model_config = STRICT


# OpenAI


class ImageFields(Strict):
    """The fields that all requests for images share."""

    # First, because an unknown model is a 404, whatever else is wrong.
    model: str | None = Field(None, max_length=500, description="the name in GET /v1/models; empty: that one")
    prompt: str
    n: Integer | None = Field(None, description="images, 1 if absent; they get seed, seed + 1, …, modulo 2**32")
    size: Size | None = Field(None, description='"WIDTHxHEIGHT" in pixels; "auto" or absent: the first exported')
    seed: Integer | None = Field(None, description="random if absent; the answer contains it")
    steps: Integer | None = Field(None, description="denoising steps")
    guidance_scale: float | None = Field(None, description="weight of classifier-free guidance; 1 or less: none")
    negative_prompt: str | None = Field(None, description="what the image should not show")
    tome_ratio: float | None = Field(None, description="how much merging leaves out; an exported ratio, in six digits")
    strength: Strength | None = Field(None, description="share of the steps that run on the image; 0.75 if absent")
    stream: bool | None = Field(None, description="answer with server-sent events: progress, then the images")
    user: str | None = Field(None, max_length=500, description="accepted and ignored")
    response_format: Literal["b64_json", "url", ""] | None = Field(
        None, description="url: a data URL, because no image is stored. b64_json if absent, except for DALL-E's names"
    )
    # OpenAI's fields of which this server supports a single value. Clients send an empty text for none.
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
    """Images to generate from an image, which the same form holds as a file."""

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


class ImageData(BaseModel):
    """An image as `b64_json` or as `url`. The field that is None is left out."""

    b64_json: str | None = None
    url: str | None = None
    seed: int


class ImagesResponse(BaseModel):
    created: int
    data: list[ImageData]
    output_format: Literal["png"] = "png"
    size: str


class ProgressEvent(BaseModel):
    """Sent at most ten times a second. OpenAI has no such event; its client passes it on as it does all events."""

    type: str  # "image_generation.progress" or "image_edit.progress"
    position: int  # of the last image in the queue; 0: none waits
    step: int
    steps: int  # 0: no image has begun


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
    batch: int  # images in the call of the request's last image, which several requests may share
    step_seconds: list[float]  # of each step of that call, the first with the text encoder; empty if not known


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


@dataclass(frozen=True)
class Requests:
    """The models of requests for an export."""

    image: type[ImageRequest]
    edit: type[EditRequest]
    tokens: type[TokensRequest]


# Where the names of this interface and of a job differ.
NAMES = {"images": "n", "ratio": "tome_ratio"}


def requests_for(model: ServedModel, any_model: bool) -> Requests:
    """The models of requests for an export; `any_model`: they may name any model."""
    types = {NAMES.get(name, name): type_ for name, type_ in model.limits.types.items()}
    if not any_model:
        types["model"] = _own_name_type(model.name)
    return Requests(bounded(ImageRequest, types), bounded(EditRequest, types), bounded(TokensRequest, types))


def unknown_model(name: str, own: str) -> str:
    """The message about a model that is not the server's own."""
    return f"there is no model {name[:60]!r}: this server has {own}; --any-model accepts any name"


def _own_name_type(own: str) -> Any:
    """The type of a model's name that is the server's own, or empty."""

    def check(name: str) -> str:
        if name not in ("", own):
            raise PydanticCustomError("model_not_found", "{message}", {"message": unknown_model(name, own)})
        return name

    return Annotated[str, Field(max_length=500), AfterValidator(check)]


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
    engines: int  # that are loaded
    reason: str | None = None  # why the process should be replaced
