"""Markdown pages: a Jinja2 template filled in, tables, figures and links, and how pages write numbers."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

NOT_MEASURED = "–"
TEMPLATES = Path(__file__).with_name("templates")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table without the columns in which no row has a value; no lines where there are no rows."""
    if not rows:
        return []
    shown = [nth for nth in range(len(header)) if any(row[nth] != NOT_MEASURED for row in rows)]
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line[nth].replace("|", "\\|") for nth in shown) + " |" for line in lines]


def link(path: Path, page: Path | None) -> str:
    """A path as seen from the folder of a page."""
    return quote(Path(os.path.relpath(path, page) if page else path).as_posix())


def figure(path: Path, caption: str, page: Path) -> list[str]:
    """An image with its caption below it."""
    return [f"![{caption}]({link(path, page)})", "", f"*{caption}*", ""]


def number(value: float) -> str:
    """Seconds or GB in three to four digits: "0.0123", "0.456", "1.23", "45.6", "789"."""
    digits = 4 if value < 0.1 else 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def change(ratio: float, digits: int = 1) -> str:
    """How a quantity changed to `ratio` times its former value, as "−41.9 %" or "+24.8 %"; a decrease has a minus."""
    percent = round(100 * (ratio - 1), digits) + 0.0  # no "-0.0"
    return f"{percent:+.{digits}f} %".replace("-", "−")


def write_page(template: Path, output: Path, **values: Any) -> str:
    """Write a page, a template filled in, into a folder, which is made if it is missing; its text.

    Templates have the filters `table` (`frame_table`), `figure`, `link`, `number` and `change`. A tag on a line of its
    own leaves no line.

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
    filters = {"table": frame_table, "number": number, "change": change}
    environment.filters |= {**filters, "figure": partial(figure, page=output), "link": partial(link, page=output)}
    text: str = environment.get_template(template.name).render(values).rstrip() + "\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / template.name).write_text(text, encoding="utf-8")
    return text


def frame_table(cells: pd.DataFrame) -> str:
    """A Markdown table of the rows that have a value, after the names and values of the index; "" without rows."""
    cells = cells.dropna(how="all").reset_index().fillna(NOT_MEASURED).astype(str)
    return "\n".join(table(list(cells), cells.to_numpy().tolist()))
