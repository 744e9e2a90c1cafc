"""Sheets of images and difference maps, saved as JPEGs or PNGs that carry the settings they were made with."""

import io
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

from ..errors import ToMeConfigError

SHOWN = 6  # images of each setting on a sheet
GAIN = 4  # factor that makes difference maps brighter
MAX_BYTES = 400_000  # of a JPEG
QUALITIES = (85, 75, 65, 55)
GAP, LEFT, LINE = 4, 56, 16  # px: space between images, smallest width of the labels, height of a line of text


def write_sheet(
    path: Path,
    result: dict[str, Any],
    images: Path,
    folders: dict[str, str],
    titles: dict[int, str],
    with_differences: bool = False,
) -> Path:
    """Write a sheet of images that `evaluate` generated, a row for each setting, as a JPEG.

    Args:
        path: the JPEG to write.
        result: what `evaluate` returned.
        images: the output folder of `evaluate`.
        folders: the label of each row → the name of its setting. The first row has the plain images.
        titles: the number of each image → the title of its column.
        with_differences: add a row of differences from the first row below each other row.

    Raises:
        ToMeConfigError: a setting has more or fewer images than the result.
    """
    rows: list[tuple[str, list[Image.Image]]] = []
    for label, name in folders.items():
        folder, count = images / "images" / name, len(result["prompts"])
        files = image_paths(folder)
        if len(files) != count:
            raise ToMeConfigError(
                f"{folder} has {len(files)} images, the result {count}: give the folder that `evaluate --output` "
                "wrote, or none for a report without images."
            )
        rows.append((label, [Image.open(files[n]).convert("RGB") for n in titles]))
        if with_differences and len(rows) > 1:
            differences = [difference_map(*pair) for pair in zip(rows[0][1], rows[-1][1], strict=True)]
            rows.append((f"difference\nx {GAIN}", differences))
    sheet = make_sheet(rows, list(titles.values()), min(result["size"], 256))
    about = {key: result[key] for key in ("model", "steps", "guidance_scale", "strength", "command", "commit")}
    return save_jpeg(sheet, path, prompts=[result["prompts"][n] for n in titles], rows=list(folders), **about)


def evenly_spaced(result: dict[str, Any]) -> dict[int, str]:
    """The numbers of the images of a result that a sheet shows, each with its prompt."""
    prompts = result["prompts"]
    numbers = sorted({round(n) for n in np.linspace(0, len(prompts) - 1, SHOWN).tolist()})
    return {n: prompts[n]["prompt"] for n in numbers}


def image_paths(folder: Path) -> list[Path]:
    """The PNG files of a folder in the order of their names, without unfinished ones."""
    return sorted(folder.glob("[!.]*.png"))


def difference_map(a: Image.Image, b: Image.Image) -> Image.Image:
    """Where two RGB images differ: |a - b| · GAIN in each channel, at most 255. Black where they are equal."""
    return ImageChops.difference(a, b).point(lambda value: min(GAIN * value, 255))


def make_sheet(rows: Sequence[tuple[str, Sequence[Image.Image]]], titles: Sequence[str], size: int) -> Image.Image:
    """Draw a grid of images at the lower right of a sheet, each with 4 px of space to its right and below it.

    Args:
        rows: a label, to the left of the row, and one RGB image for each title.
        titles: texts above the columns, such as prompts; wrapped to the width of a column.
        size: px, the width and height of a cell; a larger image is scaled down to it.
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
    path.write_bytes(file.getvalue())
    return path
