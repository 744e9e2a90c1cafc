"""Tables, figures and links in Markdown, and how reports write numbers."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

NOT_MEASURED = "–"


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
