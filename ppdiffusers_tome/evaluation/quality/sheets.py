"""Pictures of pictures: contact sheets and difference maps, as PNGs that say of themselves how they were made."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from ...errors import ToMeConfigError

GAIN = 4  # of difference maps: a quarter of the range, 64 of 255, is white
_GAP, _LEAST_LEFT, _LINE = 4, 56, 16  # px: between pictures, left of them, a line of text

Picture = Image.Image | np.ndarray  # RGB; as an array uint8 [H, W, 3]
Row = tuple[str, str, Sequence[Picture]]  # label, caption, one picture for each column


def difference_map(
    a: np.ndarray,  # [H, W, 3] uint8
    b: np.ndarray,  # [H, W, 3] uint8
    gain: float = GAIN,
) -> np.ndarray:  # [H, W, 3] uint8
    """Where two pictures differ: |a - b| · gain in each channel, cut off at 255. Black where they are equal.

    Args:
        a, b: pictures of one shape.
        gain: how many times the differences are enlarged; `gain_label` says it in words, to stand beside the map.

    Raises:
        ToMeConfigError: a and b are no uint8 pictures of one shape, or gain is not above 0.

    Example:
        >>> difference_map(np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 10, np.uint8), gain=4)[0, 0].tolist()
        [40, 40, 40]
    """
    for picture in (a, b):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape != a.shape or picture.shape[2] != 3:
            raise ToMeConfigError(
                f"a difference map needs two uint8 pictures of one shape [H, W, 3], not {a.dtype} {list(a.shape)} "
                f"and {b.dtype} {list(b.shape)}."
            )
    if not gain > 0:
        raise ToMeConfigError(f"gain={gain!r} is not allowed: it must be above 0.")
    difference = np.abs(a.astype(np.int16) - b.astype(np.int16))
    return np.minimum(np.rint(difference * float(gain)), 255).astype(np.uint8)


def gain_label(gain: float = GAIN) -> str:
    """What a difference map shows, in words: its formula, and the difference from which on it is white."""
    return (
        f"Difference: {gain:g} times |merged - plain| in each channel; full brightness from {255 / gain:.0f} of 255."
    )


def make_sheet(rows: Sequence[Row], titles: Sequence[str], size: int, note: str = "") -> Image.Image:
    """A sheet of pictures: one row for each (label, caption, pictures), one column for each title.

    Args:
        rows: a label and a caption, both to the left, and the row's pictures, one for each title.
        titles: stand above the columns, e.g. the prompts; wrapped to their width.
        size: px, the side of each picture's place; a larger picture loses what is beyond it.
        note: stands below everything, e.g. the scale of difference maps.

    Returns:
        An RGB picture; without a note its lower right holds the pictures alone, 4 px beside each.

    Raises:
        ToMeConfigError: a row has another number of pictures than there are titles.
    """
    for label, _, pictures in rows:
        if len(pictures) != len(titles):
            raise ToMeConfigError(f"row {label!r} has {len(pictures)} pictures: there are {len(titles)} titles.")
    font, step = ImageFont.load_default(13), size + _GAP
    heads = ["\n".join(textwrap.wrap(title, max(size // 7, 8))) for title in titles]
    words = [f"{label}\n{caption}".rstrip() for label, caption, _ in rows]
    pen = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    left = max([_LEAST_LEFT, *(8 + int(pen.multiline_textbbox((0, 0), each, font)[2]) for each in words)])
    top = 8 + _LINE * max(head.count("\n") + 1 for head in heads)
    width, height = left + len(titles) * step, top + len(rows) * step
    notes = textwrap.wrap(note, max(width // 7, 8))
    sheet = Image.new("RGB", (width, height + (8 + _LINE * len(notes) if notes else 0)), "white")
    pen = ImageDraw.Draw(sheet)
    for x, head in enumerate(heads):
        pen.text((left + x * step, 4), head, "black", font)
    for y, (word, (_, _, pictures)) in enumerate(zip(words, rows, strict=True)):
        pen.text((4, top + y * step), word, "black", font)
        for x, picture in enumerate(pictures):
            place = as_image(picture).crop((0, 0, size, size)) if max(picture_size(picture)) > size else picture
            sheet.paste(as_image(place), (left + x * step, top + y * step))
    pen.text((4, height), "\n".join(notes), "black", font)
    return sheet


def contact_sheet(
    pictures: Mapping[str, Sequence[np.ndarray]],  # setting: pictures [H, W, 3] uint8, one for each title
    titles: Sequence[str],
    captions: Mapping[str, str] | None = None,
    gain: float | None = None,
    size: int | None = None,
) -> Image.Image:
    """Plain beside each setting: one row for each setting, plain first, one column for each prompt.

    Args:
        pictures: by setting, in the order of the rows; the first is what the others are compared with.
        titles: above the columns.
        captions: by setting, a second line for the label.
        gain: where given, a row of difference maps with this gain follows each row but the first, and a note says so.
        size: px, the side to show each picture at (default: its own).

    Raises:
        ToMeConfigError: a setting has another number of pictures than there are titles, there are no pictures, or as
            `difference_map`.
    """
    if not pictures or not titles:
        raise ToMeConfigError("a contact sheet needs at least one setting and one title.")
    plain, rows = next(iter(pictures.values())), []
    for setting, row in pictures.items():
        rows.append((setting, (captions or {}).get(setting, ""), row))
        if gain is not None and row is not plain:
            maps = [difference_map(a, b, gain) for a, b in zip(plain, row, strict=True)]
            rows.append(("", f"difference\nx {gain:g}", maps))
    side = size or max(picture_size(picture)[0] for picture in plain)
    shown = [(label, caption, [_fit(picture, side) for picture in row]) for label, caption, row in rows]
    return make_sheet(shown, titles, side, "" if gain is None else gain_label(gain))


def as_image(picture: Picture) -> Image.Image:
    """The picture as Pillow's."""
    return picture if isinstance(picture, Image.Image) else Image.fromarray(picture)


def picture_size(picture: Picture) -> tuple[int, int]:
    """Width and height in px."""
    return picture.size if isinstance(picture, Image.Image) else (picture.shape[1], picture.shape[0])


def metadata(**fields: Any) -> PngImagePlugin.PngInfo:
    """The fields as a PNG's text; what is not text as JSON."""
    info = PngImagePlugin.PngInfo()
    for key, value in fields.items():
        info.add_text(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return info


def save_png(picture: Picture, path: Path, **fields: Any) -> Path:
    """Write a picture with `metadata(**fields)` into it, making its folder; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    as_image(picture).save(path, pnginfo=metadata(**fields), optimize=True)
    return path


def _fit(picture: Picture, side: int) -> Image.Image:
    """The picture within a square of so many px; where it grows, pixels are repeated and nothing is smoothed."""
    image, longest = as_image(picture), max(picture_size(picture))
    if longest == side:
        return image
    width, height = (max(1, round(each * side / longest)) for each in image.size)
    return image.resize((width, height), Image.Resampling.NEAREST if side > longest else Image.Resampling.LANCZOS)
