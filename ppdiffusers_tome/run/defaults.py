"""The recommended settings of a model, which its export keeps."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..errors import ToMeConfigError
from .validation import STRICT, first_error

DEFAULTS = "defaults.json"  # in a model's folder, and copied to its export


@dataclass(frozen=True, config=STRICT)
class ModelDefaults:
    """Recommended settings of a model, from its `defaults.json`; None where that has no value."""

    size: int | None = None  # px, height and width; an export's default is its first size
    steps: int | None = None
    guidance_scale: float | None = None
    prompts: tuple[str, ...] = ()  # examples, for the page of `serve`


def read_defaults(folder: Path) -> ModelDefaults:
    """Recommended settings of the model in a folder, exported or not.

    Raises:
        ToMeConfigError: DEFAULTS has a field that is not known, or a value that is not allowed.
    """
    file = folder / DEFAULTS
    try:
        return TypeAdapter(ModelDefaults).validate_json(file.read_bytes()) if file.is_file() else ModelDefaults()
    except ValidationError as error:
        raise ToMeConfigError(f"{file}: {first_error(error)}") from None
