"""What the dataclasses that pydantic validates have in common: their strictness, and their errors in one line."""

from collections.abc import Iterable

from pydantic import ConfigDict, ValidationError

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def first_error(error: ValidationError, fields: Iterable[str] = ()) -> str:
    """The first of pydantic's errors in one line: field, reason and value; for an unknown field the known fields."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) + ": " if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return f"{where}there is no such field" + (f"; the fields are {', '.join(fields)}" if fields else "")
    value = "" if first["type"] in ("json_invalid", "missing", "value_error") else f", not {first['input']!r:.60}"
    return f"{where}{first['msg'].removeprefix('Value error, ')}{value}"
