"""Result files: one form for every measurement, complete on the disk or not there at all."""

import json
import os
from pathlib import Path
from typing import Any

from ..errors import ToMeConfigError
from .environment import commit, describe_environment

FORMATS = {"speed": 2, "operations": 2, "quality": 2, "comparison": 2, "load": 2}  # kind → its current format


def make_result(kind: str, command: str, /, **content: Any) -> dict[str, Any]:
    """A result, ready for JSON: `kind`, `format`, `command`, `commit` and `environment`, then the content.

    Content may override `commit` and `environment`, for a run that was continued.
    """
    about = {"kind": kind, "format": FORMATS[kind], "command": command}
    return {**about, "commit": commit(), "environment": describe_environment(), **content}


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON, making its folder; a file that was there is replaced at once, when all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ToMeConfigError: it cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ToMeConfigError(f"{path} cannot be read as a result: {error}.") from None
    if not isinstance(content, dict):
        raise ToMeConfigError(f"{path} is not a result: it holds a JSON {type(content).__name__}, not an object.")
    return content


def check_result(result: dict[str, Any], kind: str, source: Path | str) -> None:
    """Raise ToMeConfigError unless this is a result of that kind in its current format."""
    if result.get("kind") != kind:
        raise ToMeConfigError(f"{source} is not a {kind} result: its kind is {result.get('kind')!r}.")
    if result.get("format") != FORMATS[kind]:
        raise ToMeConfigError(
            f"{source} has format {result.get('format')!r}, and only format {FORMATS[kind]} is read: measure again "
            "with this version."
        )
