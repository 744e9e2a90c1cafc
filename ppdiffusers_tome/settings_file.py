"""Settings files: the settings of a way to merge as JSON, for `apply_tome(config=…)` and `export --config`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ToMeConfigError
from .files import write_file

FORMAT, VERSION = "ppdiffusers_tome.config", 2


def write_settings(path: Path, settings: Mapping[str, Any], details: Mapping[str, Any]) -> None:
    """Write a settings file; `read_settings` ignores the details."""
    content = {"format": FORMAT, "version": VERSION, "settings": settings, **details}
    write_file(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a file, by name; their names and values are not checked.

    Raises:
        ToMeConfigError: the file is missing or damaged, or has a wrong format or version. The message names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
        raise ToMeConfigError(f"{path} cannot be read as a settings file: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ToMeConfigError(f'{path} is not a settings file: it must have "format": "{FORMAT}".')
    if (version := content.get("version")) != VERSION:
        raise ToMeConfigError(
            f"{path}: version {version!r:.50} of the format cannot be read, only {VERSION}: write the file again with "
            "this release."
        )
    settings = content.get("settings")
    if not isinstance(settings, dict):
        raise ToMeConfigError(f'{path} has no object "settings".')
    return settings
