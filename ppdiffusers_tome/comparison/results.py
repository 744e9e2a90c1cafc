"""Result files: the same form for every kind of measurement, written completely or not at all."""

import json
from pathlib import Path
from typing import Any

from ..files import write_file
from .environment import commit, describe_environment


def make_result(kind: str, format: int, command: str, /, **content: Any) -> dict[str, Any]:
    """A result, ready for JSON: `kind`, `format`, `command`, `commit` and `environment`, then the content.

    Content may replace `commit` and `environment` if a run continues an earlier run.
    """
    about = {"kind": kind, "format": format, "command": command}
    return {**about, "commit": commit(), "environment": describe_environment(), **content}


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON, and make its folder; an existing file is replaced once all is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
