"""The jobs that a server or a prompt file may ask for, and the types that pydantic models of requests have for them.

A type checks a value, and has the same bounds in the JSON schema of its model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic_core import CoreSchema

from ..errors import ParameterError, ToMeConfigError
from ..run.ratios import find_ratio
from ..run.sizes import Size
from .jobs import MAX_SEED, JobError

Model = TypeVar("Model", bound=BaseModel)
# In JSON Schema, 3.0 is an integer; true and "3" are not
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Integer: TypeAlias = Annotated[int, WHOLE]
NO_IMAGES = "image-to-image was not exported: export the model with --img2img"


@dataclass(frozen=True)
class Limits:
    """The jobs that are allowed.

    Args:
        sizes: the exported ones, in pixels; the first is the default.
        ratios: the exported ratios; the first is the default.
        image_to_image: whether jobs may start from an image.
        prompt_characters: length of the longest prompt or negative prompt.
        images: largest number of images in one request.
        steps: largest number of denoising steps.
        guidance_scale: largest guidance scale.
        image_pixels, image_side, image_aspect: limits of an image that a client sends: width times height, the longer
            side, and the ratio of the longer to the shorter side.

    Raises:
        ToMeConfigError: a limit is not positive, or there is no size or no ratio.
    """

    sizes: tuple[Size, ...]
    ratios: tuple[float, ...]
    image_to_image: bool = False
    prompt_characters: int = 2000
    images: int = 4
    steps: int = 100
    guidance_scale: float = 30.0
    image_pixels: int = 2**22
    image_side: int = 8192
    image_aspect: float = 16.0

    def __post_init__(self) -> None:
        if not self.sizes or not self.ratios:
            raise ToMeConfigError(f"sizes={self.sizes!r}, ratios={self.ratios!r}: at least one of each is required")
        for name in ("prompt_characters", "images", "steps", "guidance_scale", "image_pixels", "image_side"):
            if not getattr(self, name) > 0:
                raise ParameterError(name, getattr(self, name), "it must be positive")

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest value of a job's numbers, and of the number of images in one request."""
        return {
            "images": (1, self.images),
            "seed": (0, MAX_SEED),
            "steps": (1, self.steps),
            "guidance_scale": (0, self.guidance_scale),
        }

    @property
    def types(self) -> dict[str, Any]:
        """The types of a job's fields that depend on these limits, and of `images`, by name.

        Values that pass fit a `Job`. Without image-to-image, `image` is a type that allows only an empty value.
        """
        text = text_type(self.prompt_characters)
        kinds: dict[str, Any] = {"images": Integer, "seed": Integer, "steps": Integer, "guidance_scale": float}
        return {
            "prompt": text,
            "negative_prompt": text,
            "size": _size_type(self.sizes),
            "ratio": ratio_type(self.ratios),
            **({} if self.image_to_image else {"image": no_image_type(str)}),
            **{
                name: _checked(kinds[name], partial(self.check_number, name), minimum=low, maximum=high)
                for name, (low, high) in self.ranges.items()
            },
        }

    def check_number(self, name: str, value: float) -> float:
        """The value, which must be within the range of this name.

        Raises:
            JobError: it is not. The message does not name the field, which clients know by a different name.
        """
        low, high = self.ranges[name]
        if not low <= value <= high:
            raise JobError(name, f"{value!s:.60} is not allowed: it must be {low} to {high}")
        return value

    def checked(self, **values: Any) -> dict[str, Any]:
        """Values of a job's fields that come from options and not from a request's model, as a `Job` holds them.

        Raises:
            JobError: a value is not allowed.
        """
        types, allowed = self.types, {}
        for name, value in values.items():
            try:
                allowed[name] = TypeAdapter(types[name]).validate_python(value)
            except ValidationError as error:
                raise JobError(name, message_of(error)) from None
        return allowed

    def find_size(self, size: Size) -> Size:
        """The size, which must be an exported size.

        Raises:
            JobError: it was not exported.
        """
        if size not in self.sizes:
            raise JobError("size", f"{size} was not exported: {self.size_rule}")
        return size

    @property
    def size_rule(self) -> str:
        """The allowed sizes, for messages of interfaces that have a field for each side."""
        return f"width x height must be one of {', '.join(map(str, self.sizes))}"


def bounded(model: type[Model], types: Mapping[str, Any]) -> type[Model]:
    """A subclass of a request's model for an export: these types are those of its fields, by name.

    A field that may be null may still be null. Names, defaults and descriptions are the model's.
    """
    fields: dict[str, Any] = {}
    for name in types.keys() & model.model_fields.keys():
        field = model.model_fields[name]
        type_ = types[name] if field.is_required() else types[name] | None
        fields[name] = (type_, Field(field.default, alias=field.alias, description=field.description))
    return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields)


@dataclass(frozen=True)
class ReadAs:
    """In `Annotated[Request, ReadAs(model)]`: a value is read as `model`, which is `bounded` from `Request`.

    A type checker sees `Request`, and FastAPI and pydantic see the model.
    """

    model: type[BaseModel]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.model)


def message_of(error: ValidationError) -> str:
    """The first of pydantic's messages, without the value, which may be long, secret or not JSON."""
    return error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")


def _checked(kind: Any, check: Callable[[Any], Any], **keywords: Any) -> Any:
    """The type `kind` of values that `check` returns; `keywords` are those of its JSON schema."""
    return Annotated[kind, AfterValidator(check), Field(json_schema_extra=keywords)]


def text_type(characters: int) -> Any:
    """The type of a prompt, which can be encoded and is short enough."""

    def check(text: str) -> str:
        if len(text) > characters:
            raise ValueError(f"{len(text)} characters are too many: the limit is {characters}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("it contains an unpaired surrogate, which is not a character")
        return text

    return _checked(str, check, maxLength=characters)


def ratio_type(ratios: Sequence[float]) -> Any:
    """The type of a ratio that is one of these in six digits; the value is that one.

    The JSON schema has them as `examples`, because an `enum` would refuse 0.333333 for 1/3.
    """

    def check(ratio: float) -> float:
        try:
            return find_ratio(ratio, ratios)
        except ToMeConfigError:
            listed = ", ".join(map(str, ratios))
            raise ValueError(f"ratio {ratio} was not exported: it must be one of {listed}") from None

    return _checked(float, check, minimum=0, exclusiveMaximum=1, examples=list(ratios))


def choice_type(kind: type, values: Sequence[Any], reason: Callable[[Any], str]) -> Any:
    """The type of a value that is one of these; `reason` makes the message about a different value."""

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(reason(value))
        return value

    return _checked(kind, check, enum=[*values])


def _size_type(sizes: Sequence[Size]) -> Any:
    """The type of a text "WIDTHxHEIGHT" that is one of these sizes, or "auto" or empty for the first of them."""
    named = {"auto": sizes[0], **{str(size): size for size in sizes}}

    def check(name: Any) -> Size:
        if not isinstance(name, str):
            raise ValueError("Input should be a valid string")
        if name and name not in named:
            raise ValueError(f"{name[:60]!r} was not exported: it must be one of {', '.join(named)}")
        return named[name or "auto"]

    return Annotated[Any, PlainValidator(check), WithJsonSchema({"type": "string", "enum": [*named]})]


def check_strength(strength: float) -> float:
    """A strength above 0 and at most 1; otherwise ValueError."""
    if not 0 < strength <= 1:
        raise ValueError(f"{strength} is not allowed: it must be above 0 and at most 1")
    return strength


Strength: TypeAlias = Annotated[
    float, AfterValidator(check_strength), Field(json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
]


def no_image_type(kind: Any) -> Any:
    """The type of an image, or of several, where none is allowed: it must be empty."""

    def check(value: Any) -> Any:
        if value:
            raise ValueError(NO_IMAGES)
        return value

    return _checked(kind, check)
