"""Reports: a Jinja2 template of this package's folder `templates`, filled in with figures."""

from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from .markdown import NOT_MEASURED, change, number, table


def render(template: str, **values: Any) -> str:
    """The text of a template, filled in.

    Templates have the filters `table` (of a pandas frame, as `frame_table`), `number` and `change` (of
    `markdown.py`). A tag on a line of its own leaves no line.

    Args:
        template: file name in `templates`, such as "speed.md".
        values: the template's variables; one that it uses and does not get is an error.
    """
    environment = Environment(
        loader=PackageLoader(__package__),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown
    )
    environment.filters |= {"table": frame_table, "number": number, "change": change}
    return environment.get_template(template).render(values)


def frame_table(cells: pd.DataFrame) -> str:
    """A Markdown table of the rows that have a value, after the names and values of the index; "" without rows."""
    cells = cells.dropna(how="all").reset_index().fillna(NOT_MEASURED).astype(str)
    return "\n".join(table(list(cells), cells.to_numpy().tolist()))
