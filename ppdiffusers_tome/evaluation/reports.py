"""Reports: a Jinja2 template of this package's folder `templates`, filled in with figures."""

from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .markdown import NOT_MEASURED, change, number, table

TEMPLATES = Path(__file__).with_name("templates")


def write_page(template: Path, output: Path, **values: Any) -> str:
    """Write a page, a template filled in, into a folder, which is made if it is missing; its text.

    Templates have the filters `table` (of a pandas frame, as `frame_table`), `number` and `change` (of
    `markdown.py`). A tag on a line of its own leaves no line.

    Args:
        template: its file, whose name the page gets, such as TEMPLATES / "speed.md".
        output: the folder.
        values: the template's variables; one that it uses and does not get is an error.
    """
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown
    )
    environment.filters |= {"table": frame_table, "number": number, "change": change}
    text: str = environment.get_template(template.name).render(values).rstrip() + "\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / template.name).write_text(text, encoding="utf-8")
    return text


def frame_table(cells: pd.DataFrame) -> str:
    """A Markdown table of the rows that have a value, after the names and values of the index; "" without rows."""
    cells = cells.dropna(how="all").reset_index().fillna(NOT_MEASURED).astype(str)
    return "\n".join(table(list(cells), cells.to_numpy().tolist()))
