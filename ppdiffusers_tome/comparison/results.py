"""Result files: one form for every kind of measurement, written completely or not at all."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..errors import ToMeConfigError
from ..files import write_file
from .environment import commit, describe_environment

# The current format of each kind.
FORMATS = {"speed": 4, "operations": 4, "quality": 4, "comparison": 5, "load": 2, "experiments": 1, "rehearsal": 1}


def make_result(kind: str, command: str, /, **content: Any) -> dict[str, Any]:
    """A result, ready for JSON: `kind`, `format`, `command`, `commit` and `environment`, then the content.

    Content may replace `commit` and `environment` if a run continues an earlier one.
    """
    about = {"kind": kind, "format": FORMATS[kind], "command": command}
    return {**about, "commit": commit(), "environment": describe_environment(), **content}


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON, and make its folder; an existing file is replaced once all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ToMeConfigError: the file cannot be read, or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ToMeConfigError(f"{path} cannot be read as a result: {error}.") from None
    if not isinstance(content, dict):
        raise ToMeConfigError(f"{path} is not a result: it holds a JSON {type(content).__name__}, not an object.")
    return content


def check_result(result: dict[str, Any], kind: str, source: Path | str, earlier: Collection[int] = ()) -> None:
    """Check the kind and the format of a result.

    Args:
        source: of the result, for the message.
        earlier: formats before the current one that can be read too.

    Raises:
        ToMeConfigError: it is of another kind, or in another format.
    """
    if result.get("kind") != kind:
        raise ToMeConfigError(f"{source} is not a {kind} result: its kind is {result.get('kind')!r}.")
    if result.get("format") not in (readable := (*earlier, FORMATS[kind])):
        raise ToMeConfigError(
            f"{source} has format {result.get('format')!r}, but this version reads only format "
            f"{' and '.join(map(str, readable))}: "
            "measure again with this version."
        )
