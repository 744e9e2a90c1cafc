"""The quality report: what the committed one does not show, its sheets to the pixel, and the figures of its plots."""

import json
import re
from copy import deepcopy
from urllib.parse import unquote

import numpy as np
import pytest
from lab.plotting import looks_of
from lab.quality import quality_plots as plots
from lab.quality.quality_report import default_setting, read_frame, write_quality_page
from PIL import Image
from quality_support import RATIOS, make_result, write_images

from ppdiffusers_tome.comparison import sheets
from ppdiffusers_tome.comparison.sheets import difference_map, make_sheet, save_jpeg
from ppdiffusers_tome.errors import ToMeConfigError


@pytest.fixture(scope="module")
def result():
    return make_result()


@pytest.fixture(scope="module")
def written(result, tmp_path_factory):
    """A report with everything in it: its text and folder."""
    folder = tmp_path_factory.mktemp("quality")
    write_images(result, folder)
    source = folder / "results" / "quality.json"
    source.parent.mkdir()
    source.touch()
    return write_quality_page(result, folder / "report", source, folder), folder / "report"


def default(result):
    name = default_setting(read_frame(result))
    return next(setting for setting in result["settings"] if setting["name"] == name)


def test_links_lead_to_files_and_the_sheet_shows_evenly_spaced_prompts(written):
    text, folder = written
    assert (folder / "quality.md").read_text(encoding="utf-8") == text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert "../results/quality.json" in links and len(links) == 4  # the result, the plot, two sheets
    assert all((folder / unquote(link)).is_file() for link in links)
    assert "Prompts 0, 2, 4, 7, 9, 11 of the list, evenly spaced" in text
    with Image.open(folder / "quality_sheet.jpg") as image:
        about = json.loads(image.info["comment"])
    assert [prompt["seed"] for prompt in about["prompts"]] == [0, 2, 4, 7, 9, 11]
    assert about["rows"] == ["plain", *(f"{ratio:g}" for ratio in RATIOS)]


def test_infinite_psnr_are_shown(tmp_path, empty_plots):
    result = make_result(count=4)
    result["settings"] = result["settings"][:1]
    result["settings"][0]["pairs"]["psnr"] = [None, None, None, 30.0]  # equal images
    text = write_quality_page(result, tmp_path, tmp_path / "quality.json")
    _, _, row = re.findall(r"^\|.*\|$", text.split("## By ratio\n")[1], re.M)[:3]
    assert "| ∞ (∞–∞) |" in row
    assert "## Images" not in text


def test_examples_are_the_nearest_the_median_and_the_furthest(result, written):
    _, folder = written
    order = np.argsort(default(result)["pairs"]["perceptual"], kind="stable")
    chosen = (order[0], order[5], order[11])
    with Image.open(folder / "quality_examples.jpg") as image:
        sheet = np.asarray(image).astype(int)
        seeds = [prompt["seed"] for prompt in json.loads(image.info["comment"])["prompts"]]
    assert seeds == [result["prompts"][n]["seed"] for n in chosen]
    step = result["size"] + 4
    for column, number in enumerate(chosen):
        centre = sheet.shape[1] - (3 - column) * step + result["size"] // 2
        names = [folder.parent / "images" / name / f"{number:04d}.png" for name in ("plain", "0.5")]
        plain, half = map(Image.open, names)
        for expected in (plain, half, difference_map(plain, half)):
            distance = abs(sheet[:, centre] - expected.getpixel((0, 0))).max(1)
            assert distance.min() <= 4, "but for what a JPEG loses"


def test_missing_images_are_refused_and_nothing_is_written(result, tmp_path):
    write_images(result, tmp_path, names=("plain", "0.1", "0.25", "0.5"))
    (tmp_path / "images" / "0.25" / "0003.png").unlink()
    with pytest.raises(ToMeConfigError, match=r"0\.25 has 11 images, the result 12"):
        write_quality_page(result, tmp_path / "report", tmp_path / "quality.json", tmp_path)
    assert not (tmp_path / "report").exists()


def summary_of(result, folder):
    return write_quality_page(result, folder, folder / "quality.json").split("## Summary")[1].split("\n## ")[0]


def test_summary_has_small_changes_and_the_ratios_above_the_noise_floor(result, tmp_path, empty_plots):
    changed = deepcopy(result)
    other = changed["calibration"]["plain, other seeds"]
    for compared, distance in ((default(changed), 1e-4), (other, 2.5e-2)):
        compared["pairs"]["perceptual"] = [distance] * len(compared["pairs"]["perceptual"])
    assert "Another seed changes these images 250× as much:" in summary_of(changed, tmp_path)
    result = make_result(count=3)
    result["settings"] = result["settings"][:1]
    result["calibration"]["plain, other seeds"]["kid"] = {"mean": 0.010, "std": 0.003}
    for mean, ratios in ((0.0199, ""), (0.0201, "0.1"), (0.0, "")):
        result["settings"][0]["kid"]["to plain, other seeds"] = {"mean": mean, "std": 0.004}  # 2·√(3² + 4²) = 10
        assert (f"at ratio {ratios}." if ratios else "at any ratio.") in summary_of(result, tmp_path)


# Sheets and difference maps

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
    np.testing.assert_array_equal(difference_map(a, b), expected)
    np.testing.assert_array_equal(difference_map(b, a), expected)


def test_sheet_has_a_place_for_each_row_and_title():
    sheet = make_sheet(ROWS, ["fox", "owl"], SIDE)
    assert sheet.size == (56 + 2 * (SIDE + GAP), 24 + 2 * (SIDE + GAP))
    assert cells(sheet, 2, 2) == [[image.getpixel((0, 0)) for image in images] for _, images in ROWS]
    long = make_sheet([("a\na very long label indeed", ROWS[0][1])], ["fox", "owl"], SIDE)
    assert long.width > 120 + 2 * (SIDE + GAP) and cells(long, 1, 2) == [[(200, 10, 0), (0, 200, 10)]]


def test_a_larger_image_is_scaled_down_to_its_place():
    larger = flat(9, 8, 7, size=(40, 80))
    larger.paste((200, 200, 200), (0, 40, 40, 80))
    sheet = np.asarray(make_sheet([("", [larger])], ["fox"], SIDE))
    place = sheet[24:, -SIDE - GAP :]
    assert place[2, 2].tolist() == [9, 8, 7] and place[13, 2].tolist() == [200, 200, 200]
    assert place[SIDE:].min() == place[:, SIDE:].min() == 255


def test_jpeg_is_small_and_carries_its_settings(tmp_path, monkeypatch):
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 255, (64, 64, 3), "uint8"))
    large = save_jpeg(noise, tmp_path / "new" / "a.jpg", prompt="狐", ratios=[0.25, 0.5])
    with Image.open(large) as image:
        assert json.loads(image.info["comment"]) == {"prompt": "狐", "ratios": [0.25, 0.5]}
    limit = large.stat().st_size - 1
    monkeypatch.setattr(sheets, "MAX_BYTES", limit)
    assert save_jpeg(noise, tmp_path / "b.jpg").stat().st_size <= limit


# The plot: point by point, with the calibrations as lines

NINE = make_result(count=9)
PAIRS = ["psnr", "ssim", "perceptual"]
LABELS = {"ratio": "symmetric", "tomesd": "tomesd (PyTorch)", "method": "tomesd"}
KNOWN = {name: known for name, known in NINE["calibration"].items() if known["pairs"]}


def lines(axes):
    """Label → (x, y) of each line."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_pairs_against_ratio():
    panels = plots.plot_against_ratio(read_frame(NINE), PAIRS, "Pairs").axes
    assert [axes.get_title() for axes in panels] == [plots.TITLES[measure] for measure in PAIRS]
    for axes, measure in zip(panels, PAIRS, strict=True):
        shown = lines(axes)
        assert set(shown) == {*LABELS.values(), *KNOWN}
        for group, label in LABELS.items():
            settings = [setting for setting in NINE["settings"] if setting["group"] == group]
            assert shown[label][0] == [setting["config"]["ratio"] for setting in settings]
            np.testing.assert_allclose(shown[label][1], [np.median(s["pairs"][measure]) for s in settings])
        for name, known in KNOWN.items():
            assert shown[name][1] == pytest.approx([np.median(known["pairs"][measure])] * 2)
        band = axes.collections[0].get_paths()[0].vertices
        last = np.percentile(NINE["settings"][3]["pairs"][measure], [25, 75])
        assert sorted(set(band[np.isclose(band[:, 0], 0.75), 1])) == pytest.approx(last)


def test_infinite_psnr_and_zero_distance_are_plotted_small_and_readable(tmp_path):
    result = make_result(count=3)
    result["settings"] = result["settings"][:2]
    result["settings"][0]["pairs"]["psnr"] = [None, None, 30.0]  # equal images
    result["settings"][1]["pairs"]["perceptual"] = [0.0] * 3
    write_quality_page(result, tmp_path, tmp_path / "quality.json")
    written = sorted(tmp_path.glob("*.png"))
    assert [path.name for path in written] == ["quality_pairs.png"]
    for path in written:
        with Image.open(path) as image:
            assert 800 <= image.width <= 1100 and path.stat().st_size <= 100_000


def test_no_two_names_have_one_look():
    looks = looks_of(map(str, range(15)))
    assert len({colour for colour, _ in looks.values()}) == len(looks) == 15
