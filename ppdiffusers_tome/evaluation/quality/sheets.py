"""Sheets of images and difference maps, saved as PNGs that carry the settings they were made with."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops, ImageDraw, ImageFont, PngImagePlugin

GAIN = 4  # of difference maps
GAP, LEFT, LINE = 4, 56, 16  # px: between images, least width of the labels, a line of text


def difference_map(a: Image.Image, b: Image.Image) -> Image.Image:
    """Where two RGB images differ: |a - b| · GAIN in each channel, at most 255. Black where they are equal."""
    return ImageChops.difference(a, b).point(lambda value: min(GAIN * value, 255))


def make_sheet(rows: Sequence[tuple[str, Sequence[Image.Image]]], titles: Sequence[str], size: int) -> Image.Image:
    """A sheet of images, which are at its lower right, with 4 px to the right of and below each.

    Args:
        rows: label, shown to the left, and one RGB image for each title.
        titles: shown above the columns, e.g. the prompts; wrapped to their width.
        size: px, the side of each image's place; a larger image is scaled down to it.
    """
    font, step = ImageFont.load_default(13), size + GAP
    heads = ["\n".join(textwrap.wrap(title, max(size // 7, 8))) for title in titles]
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


def save_png(image: Image.Image, path: Path, /, **fields: Any) -> Path:
    """Write an image and make its folder. The fields become the PNG's text, those other than strings as JSON."""
    info = PngImagePlugin.PngInfo()
    for key, value in fields.items():
        info.add_text(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, pnginfo=info, optimize=True)
    return path
