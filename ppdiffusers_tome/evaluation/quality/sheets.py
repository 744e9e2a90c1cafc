"""Contact sheets and difference maps, saved as PNGs that carry the settings they were made with."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from ...errors import ToMeConfigError

GAIN = 4  # of difference maps
_GAP, _LEFT, _LINE = 4, 56, 16  # px: between images, least width of the labels, a line of text

Row = tuple[str, str, Sequence[Image.Image | np.ndarray]]  # label, caption, one RGB image for each column


def difference_map(
    a: np.ndarray,  # [H, W, 3] uint8
    b: np.ndarray,  # [H, W, 3] uint8
) -> np.ndarray:  # [H, W, 3] uint8
    """Where two images differ: |a - b| · GAIN in each channel, at most 255. Black where they are equal.

    Raises:
        ToMeConfigError: the images differ in size.
    """
    if a.shape != b.shape:
        raise ToMeConfigError(f"images of {list(a.shape)} and {list(b.shape)} cannot be compared: give one size.")
    return np.minimum(GAIN * np.abs(a.astype(np.int16) - b), 255).astype(np.uint8)


def make_sheet(rows: Sequence[Row], titles: Sequence[str], size: int, note: str = "") -> Image.Image:
    """A sheet of images: one row for each (label, caption, images), one column for each title.

    Args:
        rows: label and caption, shown to the left, and one image for each title.
        titles: shown above the columns, e.g. the prompts; wrapped to their width.
        size: px, the side of each image's place; a larger image is scaled down to it.
        note: shown below all rows.

    Returns:
        An RGB image. Without a note its lower right holds the images alone, 4 px to the right of and below each.

    Raises:
        ToMeConfigError: a row has another number of images than there are titles.
    """
    for label, _, images in rows:
        if len(images) != len(titles):
            raise ToMeConfigError(
                f"row {label!r} has {len(images)} images for {len(titles)} titles: give one for each."
            )
    font, step = ImageFont.load_default(13), size + _GAP
    heads = ["\n".join(textwrap.wrap(title, max(size // 7, 8))) for title in titles]
    labels = [f"{label}\n{caption}".rstrip() for label, caption, _ in rows]
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    indent = max([_LEFT, *(8 + int(pen.multiline_textbbox((0, 0), label, font)[2]) for label in labels)])
    top = 8 + _LINE * max(head.count("\n") + 1 for head in heads)
    width, height = indent + len(titles) * step, top + len(rows) * step
    notes = textwrap.wrap(note, max(width // 7, 8))
    sheet = Image.new("RGB", (width, height + (8 + _LINE * len(notes) if notes else 0)), "white")
    pen = ImageDraw.Draw(sheet)
    for x, head in enumerate(heads):
        pen.text((indent + x * step, 4), head, "black", font)
    for y, (label, (_, _, images)) in enumerate(zip(labels, rows, strict=True)):
        pen.text((4, top + y * step), label, "black", font)
        for x, image in enumerate(images):
            sheet.paste(_fit(image, size), (indent + x * step, top + y * step))
    pen.text((4, height), "\n".join(notes), "black", font)
    return sheet


def contact_sheet(
    images: Mapping[str, Sequence[np.ndarray]],  # setting → [H, W, 3] uint8, one for each title
    titles: Sequence[str],
    size: int,
    differences: bool = False,
) -> Image.Image:
    """A sheet with one row for each setting and one column for each prompt.

    Args:
        images: by setting, in the order of the rows; the first is plain.
        titles, size: as in `make_sheet`.
        differences: whether a row of difference maps to plain follows each row but the first.

    Raises:
        ToMeConfigError: as `make_sheet` and `difference_map`.
    """
    plain, rows = next(iter(images.values())), []
    for setting, row in images.items():
        rows.append((setting, "", row))
        if differences and row is not plain:
            rows.append(("", f"difference\nx {GAIN}", [difference_map(a, b) for a, b in zip(plain, row, strict=True)]))
    scale = f"{GAIN} times |merged - plain| in each channel; full brightness from {255 / GAIN:.0f} of 255."
    return make_sheet(rows, titles, size, f"Difference: {scale}" if differences else "")


def metadata(**fields: Any) -> PngImagePlugin.PngInfo:
    """The fields as a PNG's text; values other than strings as JSON."""
    info = PngImagePlugin.PngInfo()
    for key, value in fields.items():
        info.add_text(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return info


def save_png(image: Image.Image | np.ndarray, path: Path, **fields: Any) -> Path:
    """Write an image with `metadata(**fields)`, making its folder; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _as_image(image).save(path, pnginfo=metadata(**fields), optimize=True)
    return path


def _as_image(image: Image.Image | np.ndarray) -> Image.Image:
    return image if isinstance(image, Image.Image) else Image.fromarray(image)


def _fit(image: Image.Image | np.ndarray, size: int) -> Image.Image:
    fitted = _as_image(image).copy()
    fitted.thumbnail((size, size), Image.Resampling.LANCZOS)  # never enlarges
    return fitted
