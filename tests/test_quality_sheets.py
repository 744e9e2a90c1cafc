"""Sheets and difference maps: every image in its place, exact differences, settings in the PNG."""

import json

import numpy as np
from PIL import Image

from ppdiffusers_tome.evaluation.quality import sheets

SIDE, GAP = 16, 4  # px


def flat(*rgb, size=(SIDE, SIDE)):
    return Image.new("RGB", size, rgb)


ROWS = [("plain", [flat(200, 10, 0), flat(0, 200, 10)]), ("0.5\n1.2 s", [flat(201, 10, 0), flat(0, 190, 10)])]


def cells(sheet, rows, columns, top=24):
    """The centre pixel of each place, [rows][columns]; images are at the lower right."""
    step = SIDE + GAP
    start = sheet.width - columns * step
    return [[sheet.getpixel((start + x * step + 8, top + y * step + 8)) for x in range(columns)] for y in range(rows)]


def test_difference_is_absolute_enlarged_and_clipped():
    a, b, expected = np.zeros((3, 2, 3, 3), np.uint8)
    a[0, 0], b[0, 0], expected[0, 0] = (10, 0, 200), (0, 7, 0), (40, 28, 255)
    b[1, 2], expected[1, 2] = 1, 4
    a, b = Image.fromarray(a), Image.fromarray(b)
    np.testing.assert_array_equal(sheets.difference_map(a, b), expected)
    np.testing.assert_array_equal(sheets.difference_map(b, a), expected)


def test_sheet_has_a_place_for_each_row_and_title():
    sheet = sheets.make_sheet(ROWS, ["fox", "owl"], SIDE)
    assert sheet.size == (56 + 2 * (SIDE + GAP), 24 + 2 * (SIDE + GAP))
    assert cells(sheet, 2, 2) == [[image.getpixel((0, 0)) for image in images] for _, images in ROWS]
    long = sheets.make_sheet([("a\na very long label indeed", ROWS[0][1])], ["fox", "owl"], SIDE)
    assert long.width > 120 + 2 * (SIDE + GAP) and cells(long, 1, 2) == [[(200, 10, 0), (0, 200, 10)]]


def test_a_larger_image_is_scaled_down_to_its_place():
    larger = flat(9, 8, 7, size=(40, 80))
    larger.paste((200, 200, 200), (0, 40, 40, 80))
    sheet = np.asarray(sheets.make_sheet([("", [larger])], ["fox"], SIDE))
    place = sheet[24:, -SIDE - GAP :]
    assert place[2, 2].tolist() == [9, 8, 7] and place[13, 2].tolist() == [200, 200, 200]
    assert place[SIDE:].min() == place[:, SIDE:].min() == 255


def test_png_carries_its_settings(tmp_path):
    path = sheets.save_png(flat(1, 2, 3), tmp_path / "new" / "a.png", prompt="狐", image="fox", ratios=[0.25, 0.5])
    with Image.open(path) as image:
        assert image.text["prompt"] == "狐" and image.text["image"] == "fox"
        assert json.loads(image.text["ratios"]) == [0.25, 0.5]
        np.testing.assert_array_equal(np.asarray(image), flat(1, 2, 3))
