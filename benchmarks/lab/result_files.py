"""Result files of these scripts: their formats, and how they are read."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ppdiffusers_tome.comparison import results
from ppdiffusers_tome.errors import ToMeConfigError

FORMATS = {
    "speed": 4,
    "experiments": 1,
    "rehearsal": 2,
    "export_cost": 1,
    "image_check": 1,
    "joint_attention": 1,
    "gain_rule": 1,
}  # the current format of each kind


def make_result(kind: str, command: str, /, **content: Any) -> dict[str, Any]:
    """A result in the current format of its kind."""
    return results.make_result(kind, FORMATS[kind], command, **content)


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
