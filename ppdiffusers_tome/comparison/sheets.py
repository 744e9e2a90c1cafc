"""Sheets of images, saved as JPEGs that carry the settings they were made with."""

import io
import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from ..files import write_file
from .fonts import Font, font_for, printable

MAX_BYTES = 400_000  # of a JPEG
QUALITIES = (85, 75, 65, 55)
GAP, LEFT, LINE = 4, 56, 16  # px: space between images, smallest width of the labels, height of a line of text


def _wrapped(text: str, font: Font, size: int) -> list[str]:
    """The lines of a text in a column of `size` px. Chinese characters are twice as wide as letters."""
    width = max(7, math.ceil(font.getlength(text) / max(len(text), 1)))
    return textwrap.wrap(text, max(size // width, 4 if width > 7 else 8))


def make_sheet(
    rows: Sequence[tuple[str, Sequence[Image.Image]]], titles: Sequence[str], size: int, font: Font | None = None
) -> Image.Image:
    """Draw a grid of images at the lower right of a sheet, each with 4 px of space to its right and below it.

    Args:
        rows: a label, to the left of the row, and an RGB image for each title.
        titles: texts above the columns, such as prompts; wrapped to the width of a column. What no installed font
            has is written as escapes, such as \\u7ea2.
        size: px, the width and height of a cell; a larger image is scaled down to it.
        font: of all texts; None: `font_for` them.
    """
    font, step = font or font_for("".join([*titles, *(label for label, _ in rows)])), size + GAP
    heads = ["\n".join(_wrapped(printable(font, title), font, size)) for title in titles]
    widths = [int(font.getlength(line)) for label, _ in rows for line in label.splitlines()]
    left = max(LEFT, 8 + max(widths, default=0))
    top = 8 + LINE * max(head.count("\n") + 1 for head in heads)
    sheet = Image.new("RGB", (left + len(titles) * step, top + len(rows) * step), "white")
    pen = ImageDraw.Draw(sheet)
    for x, head in enumerate(heads):
        pen.text((left + x * step, 4), head, "black", font)
    for y, (label, images) in enumerate(rows):
        pen.text((4, top + y * step), label, "black", font)
        for x, image in enumerate(images):
            fitted = image.copy()
            fitted.thumbnail((size, size), Image.Resampling.LANCZOS)  # never enlarges
            sheet.paste(fitted, (left + x * step, top + y * step))
    return sheet


def save_jpeg(image: Image.Image, path: Path, /, **fields: Any) -> Path:
    """Write an RGB image as a JPEG, and make its folder. Its comment has the fields, as JSON.

    Of QUALITIES it has the first with at most MAX_BYTES, or the last.
    """
    comment = json.dumps(fields, ensure_ascii=False).encode()
    for quality in QUALITIES:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality, optimize=True, progressive=True, comment=comment)
        if file.tell() <= MAX_BYTES:
            break
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, file.getvalue())
    return path
