"""Contact sheets and difference maps: every picture in its place, differences to the value, settings in the PNG."""

import doctest
import json

import numpy as np
import pytest
from PIL import Image

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.evaluation.quality import sheets

SIDE, GAP = 16, 4  # px


def flat(*rgb, side=SIDE):
    return np.full((side, side, 3), rgb, np.uint8)


PICTURES = {
    "plain": [flat(200, 10, 0), flat(0, 200, 10)],
    "0.25": [flat(201, 10, 0), flat(0, 190, 10)],
    "0.5": [flat(100, 10, 0), flat(0, 200, 10)],
}


def cells(sheet, rows, columns, left=56, top=24):
    """The centre pixel of each place, [rows][columns]."""
    at = np.asarray(sheet)
    step = SIDE + GAP
    return [[tuple(at[top + y * step + 8, left + x * step + 8].tolist()) for x in range(columns)] for y in range(rows)]


def test_difference_is_absolute_enlarged_and_cut_off():
    a, b = np.zeros((2, 3, 3), np.uint8), np.zeros((2, 3, 3), np.uint8)
    a[0, 0], b[0, 0] = (10, 0, 200), (0, 7, 0)
    b[1, 2] = 1
    expected = np.zeros((2, 3, 3), np.uint8)
    expected[0, 0], expected[1, 2] = (40, 28, 255), 4
    for first, second in ((a, b), (b, a)):
        found = sheets.difference_map(first, second, gain=4)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, expected)
    assert not sheets.difference_map(a, a).any()
    assert sheets.difference_map(a, b, gain=0.5)[0, 0].tolist() == [5, 4, 100]  # halves to the even, as NumPy rounds


def test_difference_refuses_what_it_cannot_compare():
    a = flat(0, 0, 0)
    for b in (flat(0, 0, 0, side=8), a.astype(np.float32), a[..., :1]):
        with pytest.raises(ToMeConfigError, match=r"one shape \[H, W, 3\]"):
            sheets.difference_map(a, b)
    with pytest.raises(ToMeConfigError, match=r"gain=0"):
        sheets.difference_map(a, a, gain=0)


def test_legend_tells_the_scale_that_the_map_has():
    label = sheets.gain_label(4)
    assert "4 times |merged - plain|" in label and "from 64 of 255" in label
    assert sheets.difference_map(flat(64, 0, 0), flat(0, 63, 0), gain=4)[0, 0].tolist() == [255, 252, 0]


def test_contact_sheet_has_a_row_for_each_setting_and_a_column_for_each_prompt():
    sheet = sheets.contact_sheet(PICTURES, ["fox", "owl"])
    assert sheet.size == (56 + 2 * (SIDE + GAP), 24 + 3 * (SIDE + GAP))
    expected = [[tuple(picture[0, 0].tolist()) for picture in row] for row in PICTURES.values()]
    assert cells(sheet, 3, 2) == expected


def test_difference_rows_follow_each_row_but_the_first():
    sheet = sheets.contact_sheet(PICTURES, ["fox", "owl"], gain=4)
    plain, quarter, quarter_map, half, half_map = cells(sheet, 5, 2, left=sheet.width - 2 * (SIDE + GAP))
    assert (plain[0], quarter[0], half[0]) == ((200, 10, 0), (201, 10, 0), (100, 10, 0))
    assert quarter_map == [(4, 0, 0), (0, 40, 0)]
    assert half_map == [(255, 0, 0), (0, 0, 0)]
    bare = sheets.contact_sheet(PICTURES, ["fox", "owl"])
    assert sheet.height > bare.height + 2 * (SIDE + GAP)  # the note on the scale stands below
    assert (np.asarray(sheet)[24 + 5 * (SIDE + GAP) :] < 128).any()


def test_labels_find_room_whatever_their_length():
    rows = [("a very long label indeed", "", PICTURES["plain"])]
    sheet = sheets.make_sheet(rows, ["fox", "owl"], SIDE)
    left = sheet.width - 2 * (SIDE + GAP)
    assert left > 120
    assert cells(sheet, 1, 2, left=left) == [[(200, 10, 0), (0, 200, 10)]]


def test_pictures_are_shown_at_the_size_asked_for():
    sheet = sheets.contact_sheet({"plain": [flat(9, 8, 7, side=8)]}, ["fox"], size=SIDE)
    assert cells(sheet, 1, 1) == [[(9, 8, 7)]]
    cut = sheets.make_sheet([("", "", [flat(9, 8, 7, side=40)])], ["fox"], SIDE)
    assert np.asarray(cut)[-2:, :].min() == 255, "a picture too large for its place stays within it"


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ToMeConfigError, match=r"row 'plain' has 2 pictures: there are 1 titles"):
        sheets.contact_sheet(PICTURES, ["fox"])
    with pytest.raises(ToMeConfigError, match="at least one setting"):
        sheets.contact_sheet({}, ["fox"])


def test_png_says_what_it_is(tmp_path):
    path = sheets.save_png(flat(1, 2, 3), tmp_path / "new" / "a.png", prompt="狐", seed=3, ratios=[0.25, 0.5])
    with Image.open(path) as image:
        assert image.text["prompt"] == "狐"
        assert json.loads(image.text["seed"]) == 3 and json.loads(image.text["ratios"]) == [0.25, 0.5]
        np.testing.assert_array_equal(np.asarray(image), flat(1, 2, 3))


def test_examples_of_the_docstrings():
    tests = [test for test in doctest.DocTestFinder().find(sheets, extraglobs={"np": np}) if test.examples]
    assert tests
    assert all(doctest.DocTestRunner().run(test).failed == 0 for test in tests)
