"""Files of prompts: one job a line, all of them checked before anything is drawn."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ToMeConfigError
from ..inference.manifest import parse_size
from .errors import JobError
from .jobs import LARGEST_SEED, Job, Limits

TYPES: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "negative_prompt": (str,),
    "seed": (int,),
    "steps": (int,),
    "guidance_scale": (int, float),
    "size": (str,),
    "tome_ratio": (int, float),
    "name": (str,),
}
JOB_NAMES = {"tome_ratio": "ratio"}  # what a job calls them, where it is not what a line calls them
LINE_NAMES = {job: line for line, job in JOB_NAMES.items()}
EXAMPLE = '{"prompt": "a fox"}'
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


class PromptFileError(ToMeConfigError):
    """A file of prompts cannot be read, or a line of it is not allowed; the message names file, line and field."""


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
        """The picture at a place of the list, counted from 0, for which nothing but a prompt is given."""
        seed = (self.seed + index) % (LARGEST_SEED + 1) if 0 <= self.seed <= LARGEST_SEED else self.seed
        return Job(
            prompt=prompt,
            negative_prompt=self.negative_prompt,
            height=self.height,
            width=self.width,
            ratio=self.ratio,
            seed=seed,
            steps=self.steps,
            guidance_scale=self.guidance_scale,
        )


@dataclass(frozen=True)
class Prompt:
    """One picture of the list: its place, counted from 0, what to draw, and what the user calls it (may be empty)."""

    index: int
    job: Job
    name: str = ""

    def file_name(self, model: str) -> str:
        """The picture's file: its place in the list, its name, and a hash of all that decides how it looks.

        Args:
            model: hash of the model that draws it.
        """
        decisive = json.dumps([self.job.settings(), model], sort_keys=True)
        parts = (f"{self.index:06}", self.name, hashlib.sha256(decisive.encode()).hexdigest()[:16])
        return "-".join(part for part in parts if part) + ".png"


def read_prompts(path: Path, defaults: Defaults, limits: Limits) -> list[Prompt]:
    """Read a `.txt` file, a prompt on each line, or a `.jsonl` file, a JSON object on each line.

    Args:
        path: UTF-8; blank lines are skipped. Fields of a JSON object: prompt, and optionally negative_prompt, seed,
            steps, guidance_scale, size ("WIDTHxHEIGHT" in pixels), tome_ratio and name (part of the file's name).
        defaults: for what a line leaves out, and for all but the prompt in a `.txt` file.
        limits: which jobs are allowed.

    Raises:
        PromptFileError: the file cannot be read, holds no prompt, or holds a line that is not allowed.
    """
    parse = {".txt": _parse_text, ".jsonl": _parse_json}.get(path.suffix)
    if parse is None:
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
                prompts.append(_make_prompt(len(prompts), parse(words), defaults, limits))
        except UnicodeDecodeError as error:
            raise PromptFileError(f"{path}, line {number}: it is not UTF-8, from byte {error.start + 1} on") from None
        except JobError as error:
            field = LINE_NAMES.get(error.field, error.field)
            raise PromptFileError(f"{path}, line {number}, {field}: {error}") from error
    if not prompts:
        raise PromptFileError(f"{path} holds no prompt")
    return prompts


def _parse_text(line: str) -> dict[str, Any]:
    return {"prompt": line}


def _parse_json(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line, object_pairs_hook=_unique)
    except JobError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        raise JobError("JSON", f"it cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise JobError(
            "JSON", f'{line[:40]!r} is not allowed: a line must be an object, such as {{"prompt": "a fox"}}'
        )
    for name, value in fields.items():
        if name not in TYPES:
            raise JobError(name, f"there is no such field: there are {', '.join(TYPES)}")
        if not isinstance(value, TYPES[name]) or isinstance(value, bool):
            wanted = " or ".join(each.__name__ for each in TYPES[name])
            raise JobError(name, f"{value!r:.60} is not allowed: it must be {wanted}")
    if "prompt" not in fields:
        raise JobError("prompt", "it is missing")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, _ in pairs:
        if sum(name == other for other, _ in pairs) > 1:
            raise JobError(name, "it is given twice")
    return dict(pairs)


def _make_prompt(index: int, fields: Mapping[str, Any], defaults: Defaults, limits: Limits) -> Prompt:
    name = fields.get("name", "")
    if "name" in fields and not NAME.fullmatch(name):
        allowed = "letters, digits, '.', '_' and '-', 1 to 80 of them, the first a letter or digit"
        raise JobError("name", f"{name!r:.90} is not allowed: it must be {allowed}")
    changes: dict[str, Any] = {
        JOB_NAMES.get(key, key): value for key, value in fields.items() if key not in ("prompt", "name", "size")
    }
    if "size" in fields:
        changes["height"], changes["width"] = _parse_size(fields["size"])
    for key in ("ratio", "guidance_scale"):
        if key in changes:
            changes[key] = _parse_float(key, changes[key])
    job = replace(defaults.job(fields["prompt"], index), **changes)
    for field in ("prompt", "negative_prompt"):
        if any("\ud800" <= letter <= "\udfff" for letter in getattr(job, field)):
            raise JobError(field, "it holds half of a surrogate pair, which is no character")
    limits.check(job)
    return Prompt(index, job, name)


def _parse_size(text: str) -> tuple[int, int]:
    try:
        return parse_size(text)
    except ToMeConfigError as error:
        raise JobError("size", str(error)) from None


def _parse_float(field: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        raise JobError(field, "the number is too large") from None
