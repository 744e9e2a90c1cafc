"""Contact sheets and difference maps: every image in its place, exact differences, settings in the PNG."""

import json

import numpy as np
import pytest
from PIL import Image

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.evaluation.quality import sheets

SIDE, GAP = 16, 4  # px


def flat(*rgb, side=SIDE):
    return np.full((side, side, 3), rgb, np.uint8)


IMAGES = {
    "plain": [flat(200, 10, 0), flat(0, 200, 10)],
    "0.25": [flat(201, 10, 0), flat(0, 190, 10)],
    "0.5": [flat(100, 10, 0), flat(0, 200, 10)],
}


def cells(sheet, rows, columns, top=24):
    """The centre pixel of each place, [rows][columns]; images are at the lower right."""
    pixels, step = np.asarray(sheet), SIDE + GAP
    start = sheet.width - columns * step
    return [
        [tuple(pixels[top + y * step + 8, start + x * step + 8].tolist()) for x in range(columns)] for y in range(rows)
    ]


def test_difference_is_absolute_enlarged_and_clipped():
    a, b = np.zeros((2, 3, 3), np.uint8), np.zeros((2, 3, 3), np.uint8)
    a[0, 0], b[0, 0] = (10, 0, 200), (0, 7, 0)
    b[1, 2] = 1
    expected = np.zeros((2, 3, 3), np.uint8)
    expected[0, 0], expected[1, 2] = (40, 28, 255), 4
    np.testing.assert_array_equal(sheets.difference_map(a, b), expected)
    np.testing.assert_array_equal(sheets.difference_map(b, a), expected)
    with pytest.raises(ToMeConfigError, match=r"\[2, 3, 3\] and \[8, 8, 3\]"):
        sheets.difference_map(a, flat(0, 0, 0, side=8))


def test_contact_sheet_has_a_row_for_each_setting_and_a_column_for_each_prompt():
    sheet = sheets.contact_sheet(IMAGES, ["fox", "owl"], SIDE)
    assert sheet.size == (56 + 2 * (SIDE + GAP), 24 + 3 * (SIDE + GAP))
    assert cells(sheet, 3, 2) == [[tuple(image[0, 0].tolist()) for image in row] for row in IMAGES.values()]


def test_differences_follow_each_row_but_the_first():
    sheet = sheets.contact_sheet(IMAGES, ["fox", "owl"], SIDE, differences=True)
    plain, quarter, quarter_map, half, half_map = cells(sheet, 5, 2)
    assert (plain[0], quarter[0], half[0]) == ((200, 10, 0), (201, 10, 0), (100, 10, 0))
    assert quarter_map == [(4, 0, 0), (0, 40, 0)]
    assert half_map == [(255, 0, 0), (0, 0, 0)]
    note = np.asarray(sheet)[24 + 5 * (SIDE + GAP) :]
    assert (note < 128).any(), "the scale is explained below"


def test_long_labels_widen_the_sheet():
    sheet = sheets.make_sheet([("a very long label indeed", "", IMAGES["plain"])], ["fox", "owl"], SIDE)
    assert sheet.width > 120 + 2 * (SIDE + GAP)
    assert cells(sheet, 1, 2) == [[(200, 10, 0), (0, 200, 10)]]


def test_a_larger_image_is_scaled_down_to_its_place():
    larger = Image.fromarray(np.concatenate([flat(9, 8, 7, side=40), flat(200, 200, 200, side=40)]))  # 40×80 px
    sheet = np.asarray(sheets.make_sheet([("", "", [larger])], ["fox"], SIDE))
    place = sheet[24:, -SIDE - GAP :]
    assert place[2, 2].tolist() == [9, 8, 7] and place[13, 2].tolist() == [200, 200, 200]
    assert place[SIDE:].min() == place[:, SIDE:].min() == 255


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ToMeConfigError, match=r"row 'plain' has 2 images for 1 titles"):
        sheets.contact_sheet(IMAGES, ["fox"], SIDE)


def test_png_carries_its_settings(tmp_path):
    path = sheets.save_png(flat(1, 2, 3), tmp_path / "new" / "a.png", prompt="狐", seed=3, ratios=[0.25, 0.5])
    with Image.open(path) as image:
        assert image.text["prompt"] == "狐"
        assert json.loads(image.text["seed"]) == 3 and json.loads(image.text["ratios"]) == [0.25, 0.5]
        np.testing.assert_array_equal(np.asarray(image), flat(1, 2, 3))
