"""Files of prompts: one job a line, all of them checked before anything is drawn."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from ..errors import ToMeConfigError
from ..inference.manifest import STRICT, Size, first_error, parse_size
from ..serving.errors import JobError
from ..serving.jobs import LARGEST_SEED, Job, Limits


class PromptFileError(ToMeConfigError):
    """A file of prompts cannot be read, or a line of it is not allowed; the message names file, line and field."""


class Line(BaseModel):
    """A line of a `.jsonl` file. What it leaves out, or gives as null, comes from the defaults."""

    model_config = STRICT

    prompt: str
    negative_prompt: str | None = None
    seed: int | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    size: Annotated[Size, BeforeValidator(parse_size)] | None = None  # "WIDTHxHEIGHT" in pixels
    ratio: float | None = Field(None, alias="tome_ratio")
    name: str = Field("", pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")  # part of the file's name


@dataclass(frozen=True)
class Defaults:
    """What a line means that leaves things out.

    Args:
        height, width: pixels.
        ratio, steps, guidance_scale, negative_prompt: as in `Job`.
        seed: of the first prompt; the next has the next number, and so on.
    """

    height: int
    width: int
    ratio: float
    steps: int = 20
    guidance_scale: float = 7.5
    negative_prompt: str = ""
    seed: int = 0

    def job(self, prompt: str, index: int) -> Job:
        """The image at a place of the list, counted from 0, for which nothing but a prompt is given."""
        seed = (self.seed + index) % (LARGEST_SEED + 1) if 0 <= self.seed <= LARGEST_SEED else self.seed
        return Job(**{**vars(self), "prompt": prompt, "seed": seed})


@dataclass(frozen=True)
class Prompt:
    """One image of the list: its place, counted from 0, what to draw, and what the user calls it (may be empty)."""

    index: int
    job: Job
    name: str = ""

    def file_name(self, model: str) -> str:
        """The image's file: its place in the list, its name, and a hash of all that decides how it looks.

        Args:
            model: hash of the model that draws it.
        """
        decisive = json.dumps([self.job.settings(), model], sort_keys=True)
        parts = (f"{self.index:06}", self.name, hashlib.sha256(decisive.encode()).hexdigest()[:16])
        return "-".join(part for part in parts if part) + ".png"


def read_prompts(path: Path, defaults: Defaults, limits: Limits) -> list[Prompt]:
    """Read a `.txt` file, a prompt on each line, or a `.jsonl` file, a JSON object with `Line`'s fields on each line.

    Args:
        path: UTF-8; blank lines are skipped.
        defaults: for what a line leaves out, and for all but the prompt in a `.txt` file.
        limits: which jobs are allowed.

    Raises:
        PromptFileError: the file cannot be read, holds no prompt, or holds a line that is not allowed.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise PromptFileError(f"{path} is not allowed: the file's name must end in .txt or .jsonl")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise PromptFileError(f"{path} cannot be read: {error.strerror}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(text.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            words = line.decode("utf-8").strip()
            if words:
                fields = {"prompt": words} if path.suffix == ".txt" else json.loads(words, object_pairs_hook=_unique)
                prompts.append(_make_prompt(len(prompts), Line.model_validate(fields), defaults, limits))
        except (ValueError, RecursionError) as error:
            raise PromptFileError(f"{path}, line {number}: {_describe(error)}") from error
    if not prompts:
        raise PromptFileError(f"{path} holds no prompt")
    return prompts


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"a field is given twice: {', '.join(name for name, _ in pairs):.200}")
    return fields


def _make_prompt(index: int, line: Line, defaults: Defaults, limits: Limits) -> Prompt:
    changes = line.model_dump(exclude_none=True, exclude={"prompt", "size", "name"})
    size = {} if line.size is None else line.size._asdict()
    job = replace(defaults.job(line.prompt, index), **changes, **size)
    limits.check(job)
    return Prompt(index, job, line.name)


def _describe(error: Exception) -> str:
    if isinstance(error, JobError):
        return f"{'tome_ratio' if error.field == 'ratio' else error.field}: {error}"
    return first_error(error) if isinstance(error, ValidationError) else str(error)
