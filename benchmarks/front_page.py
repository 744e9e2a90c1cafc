"""Draw the image of the first page: two prompts, plain and merged by default, each with a detail four times as large.

    python benchmarks/front_page.py

The first prompt is the one whose change is the median of the committed result, the second the one that changes most.
The detail is where the two images differ most. It generates the four images, which takes minutes.
"""

import argparse
from pathlib import Path
from typing import Any

import ppdiffusers_tome  # noqa: F401 - before paddle

# isort: split
import numpy as np
from lab.result_files import read_json
from PIL import Image, ImageDraw, ImageFont
from samplers import DEFAULT, FOUR, PLAIN, RESULT, Arm, generate

OUTPUT = Path(__file__).parents[1] / "docs" / "pairs.jpg"
KEY = "dpm-7.5"  # of the setting
DETAIL, ENLARGED = 96, 4  # px of the image, and of the page for each of them
SIDE, GAP, LABEL = DETAIL * ENLARGED, 8, 48  # px of the page


def main() -> None:
    """Write the image."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    result = read_json(RESULT)
    page = Image.new("RGB", (4 * SIDE + 3 * GAP, 2 * (SIDE + LABEL)), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(26)
    for row, (number, psnr) in enumerate(chosen(result)):
        images = [image_of(arm, number) for arm in (PLAIN, DEFAULT)]
        box = detail(*images)
        parts = [image.resize((SIDE, SIDE), Image.Resampling.LANCZOS) for image in images]
        parts += [image.crop(box).resize((SIDE, SIDE), Image.Resampling.NEAREST) for image in images]
        labels = ["plain", f"merged, {psnr:.0f} dB", "plain, enlarged", "merged, enlarged"]
        y = row * (SIDE + LABEL)
        for column, (part, label) in enumerate(zip(parts, labels, strict=True)):
            x = column * (SIDE + GAP)
            page.paste(part, (x, y))
            draw.text((x + SIDE / 2, y + SIDE + LABEL / 2), label, fill="black", font=font, anchor="mm")
    page.save(OUTPUT, quality=88, subsampling=0, optimize=True)


def chosen(result: dict[str, Any]) -> list[tuple[int, float]]:
    """The numbers of the two prompts with their PSNR: the lower of the two in the middle, and the smallest."""
    (setting,) = [setting for setting in result["settings"] if setting["key"] == KEY]
    values = next(arm for arm in setting["arms"] if arm["name"] == DEFAULT.name)["psnr"]
    order = sorted(range(len(values)), key=values.__getitem__)
    return [(number, values[number]) for number in (order[(len(order) - 1) // 2], order[0])]


def image_of(arm: Arm, number: int) -> Image.Image:
    """The image of a prompt by an arm."""
    pixels = generate(FOUR[KEY], arm, number).clip(0, 1)
    return Image.fromarray((255 * pixels).round().astype("uint8"))


def detail(plain: Image.Image, merged: Image.Image) -> tuple[int, int, int, int]:
    """The square of DETAIL px in which two images differ most: left, top, right, bottom."""
    difference = np.abs(np.asarray(plain, "float64") - np.asarray(merged, "float64")).sum(2)
    sums = np.pad(difference.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    inside = sums[DETAIL:, DETAIL:] - sums[DETAIL:, :-DETAIL] - sums[:-DETAIL, DETAIL:] + sums[:-DETAIL, :-DETAIL]
    top, left = np.unravel_index(inside.argmax(), inside.shape)
    return int(left), int(top), int(left) + DETAIL, int(top) + DETAIL


if __name__ == "__main__":
    main()
