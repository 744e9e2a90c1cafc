"""Prompt files: one job per line, all checked before the first image is generated."""

import hashlib
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from ..errors import ToMeConfigError
from ..run.sizes import Size, parse_size
from ..run.validation import STRICT, first_error
from .jobs import Job, seed_after
from .limits import Limits, bounded, text_type

MAX_CHARACTERS = 100_000  # of a prompt
MAX_NAME_BYTES = 200  # of a name in UTF-8
MAX_DIGITS = 4000  # of an integer; int() reads at most 4,300
PROMPTS = "prompts.txt"  # in a model's folder: what it can show
GENERAL_PROMPTS = Path(__file__).with_name("general_prompts.txt")
SizeText: TypeAlias = Annotated[Size, BeforeValidator(parse_size)]  # "WIDTHxHEIGHT", or a side, in pixels


class PromptFileError(ToMeConfigError):
    """A prompt file cannot be read, or a line is not allowed; the message names file, line and field."""


def _check_name(name: str) -> str:
    """A name that can be part of a file's name, of at most 255 bytes: in letters and digits of any script."""
    if not re.fullmatch(r"[^\W_][\w.-]*", name) or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(
            f"{name!r:.100} is not allowed: it must begin with a letter or digit, have only letters, digits, '.', '_' "
            f"and '-', and at most {MAX_NAME_BYTES} bytes in UTF-8"
        )
    return name


class Line(BaseModel):
    """A line of a `.jsonl` file. Fields that are absent or null have the defaults' values."""

    model_config = STRICT

    prompt: str
    negative_prompt: str | None = None
    seed: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    size: SizeText | None = None
    ratio: float | None = Field(None, alias="tome_ratio")
    name: Annotated[str, AfterValidator(_check_name)] = ""  # part of the file's name


@dataclass(frozen=True)
class Prompt:
    """One image of the list: its index from 0, its job, and the user's name for it, which may be empty."""

    index: int
    job: Job
    name: str = ""

    def file_name(self, model: str) -> str:
        """The name of the image's file: its index, its name, and a hash of everything that the image depends on.

        Args:
            model: hash of the model and of what runs it.
        """
        settings = json.dumps([self.job.settings(), model], sort_keys=True)
        parts = (f"{self.index:06}", self.name, hashlib.sha256(settings.encode()).hexdigest()[:16])
        return "-".join(part for part in parts if part) + ".png"


def read_prompts(path: Path, defaults: Job, limits: Limits) -> list[Prompt]:
    """Read a `.txt` file with a prompt per line, or a `.jsonl` file with a JSON object (see `Line`) per line.

    Args:
        path: UTF-8; blank lines are skipped.
        defaults: values of absent fields; in a `.txt` file of all fields but the prompt. The seed is the first
            prompt's; each further prompt has the next, modulo 2**32.
        limits: the jobs that are allowed.

    Raises:
        PromptFileError: the file cannot be read, has no prompt, or has a line that is not allowed.
    """
    line_model = bounded(Line, {**limits.types, "size": Annotated[SizeText, AfterValidator(limits.find_size)]})
    prompts = []
    for index, line in enumerate(_read_lines(path, line_model)):
        given = {name: value for name, value in line if value is not None}
        name = given.pop("name")
        job = replace(defaults, **{"seed": seed_after(defaults.seed, index), **given})
        prompts.append(Prompt(index, job, name))
    return prompts


def _read_lines(path: Path, line_model: type[Line]) -> list[Line]:
    """The lines of a file that are not blank, as this model; errors are those of `read_prompts`."""
    if path.suffix not in (".txt", ".jsonl"):
        raise PromptFileError(f"{path} is not allowed: the file name must end in .txt or .jsonl")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PromptFileError(f"{path} cannot be read: {error.strerror}") from error
    lines: list[Line] = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode("utf-8").strip()
            if text:
                fields = {"prompt": text} if path.suffix == ".txt" else _read_json(text)
                lines.append(line_model.model_validate(fields))
        except (ValueError, RecursionError) as error:
            raise PromptFileError(f"{path}, line {number}: {_describe(error)}") from error
    if not lines:
        raise PromptFileError(f"{path} has no prompt")
    return lines


def _read_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique, parse_int=_integer)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def read_texts(path: Path) -> list[str]:
    """The prompts in a file alone.

    Raises:
        PromptFileError: as `read_prompts`.
    """
    any_length = bounded(Line, {"prompt": text_type(MAX_CHARACTERS)})
    return [line.prompt for line in _read_lines(path, any_length)]


def model_prompts(model: str, option: str) -> list[str]:
    """The prompts in a model's folder, or GENERAL_PROMPTS if it has none, which a line on stderr reports.

    Args:
        model: folder or hub name.
        option: what names different prompts on the command line.

    Raises:
        PromptFileError: as `read_prompts`.
    """
    own = Path(model) / PROMPTS
    if own.is_file():
        return read_texts(own)
    print(f"{own} does not exist: general prompts are used; {option} names others", file=sys.stderr)
    return read_texts(GENERAL_PROMPTS)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"a field appears twice: {', '.join(name for name, _ in pairs):.200}")
    return fields


def _describe(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return first_error(error, [field.alias or name for name, field in Line.model_fields.items()])
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "it is not JSON that can be read: its brackets are nested too deeply"
    return str(error)
