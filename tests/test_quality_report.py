"""The quality report: sheets, links, refusals, and what the committed report does not show."""

import json
import re
from copy import deepcopy
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image
from quality_support import RATIOS, make_result, write_images

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.evaluation.quality.quality_report import default_setting, read_frame, write_quality_page
from ppdiffusers_tome.evaluation.quality.sheets import difference_map


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
    assert "../results/quality.json" in links and len(links) == 6  # the result, three plots, two sheets
    assert all((folder / unquote(link)).is_file() for link in links)
    assert "Prompts 0, 2, 4, 7, 9, 11 of the list, evenly spaced" in text
    with Image.open(folder / "quality_sheet.png") as image:
        assert [prompt["seed"] for prompt in json.loads(image.text["prompts"])] == [0, 2, 4, 7, 9, 11]
        assert json.loads(image.text["rows"]) == ["plain", *(f"{ratio:g}" for ratio in RATIOS)]


def test_fid_and_infinite_psnr_are_shown(tmp_path, empty_plots):
    result = make_result(count=4)
    result["settings"] = result["settings"][:1]
    result["settings"][0]["fid"] = 12.34
    result["settings"][0]["pairs"]["psnr"] = [None, None, None, 30.0]  # equal images
    text = write_quality_page(result, tmp_path, tmp_path / "quality.json")
    header, _, row = re.findall(r"^\|.*\|$", text.split("## By ratio\n")[1], re.M)[:3]
    assert header.endswith("| FID to real |") and row.endswith("| 12.3 |") and "| ∞ (∞–∞) |" in row
    assert "## Images" not in text


def test_examples_are_the_nearest_the_median_and_the_furthest(result, written):
    _, folder = written
    order = np.argsort(default(result)["pairs"]["perceptual"], kind="stable")
    chosen = (order[0], order[5], order[11])
    with Image.open(folder / "quality_examples.png") as image:
        sheet = np.asarray(image)
        assert [prompt["seed"] for prompt in json.loads(image.text["prompts"])] == [
            result["prompts"][n]["seed"] for n in chosen
        ]
    step = result["size"] + 4
    for column, number in enumerate(chosen):
        centre = sheet.shape[1] - (3 - column) * step + result["size"] // 2
        colours = {tuple(pixel) for pixel in sheet[:, centre].tolist()}
        names = [folder.parent / "images" / name / f"{number:04d}.png" for name in ("plain", "0.5")]
        plain, half = map(Image.open, names)
        for expected in (plain, half, difference_map(plain, half)):
            assert expected.getpixel((0, 0)) in colours


def test_missing_images_and_other_results_are_refused_and_nothing_is_written(result, tmp_path):
    write_images(result, tmp_path, names=("plain", "0.1", "0.25", "0.5"))
    (tmp_path / "images" / "0.25" / "0003.png").unlink()
    with pytest.raises(ToMeConfigError, match=r"0\.25 has 11 images, the result 12"):
        write_quality_page(result, tmp_path / "report", tmp_path / "quality.json", tmp_path)
    for other in ({"kind": "speed", "format": 2}, {"kind": "quality", "format": 2}):
        with pytest.raises(ToMeConfigError, match=r"quality\.json"):
            write_quality_page(other, tmp_path / "report", tmp_path / "quality.json")
    assert not (tmp_path / "report").exists()


def summary_of(result, folder):
    return write_quality_page(result, folder, folder / "quality.json").split("## Summary")[1].split("\n## ")[0]


def test_summary_has_small_changes_and_the_ratios_above_the_noise_floor(result, tmp_path, empty_plots):
    changed = deepcopy(result)
    other = changed["calibration"]["plain, other seeds"]
    for compared, distance in ((default(changed), 1e-4), (other, 2.5e-2)):
        compared["pairs"]["perceptual"] = [distance] * len(compared["pairs"]["perceptual"])
    assert "Another seed changes these images 250× as much:" in summary_of(changed, tmp_path)
    image_to_image = summary_of({**result, "strength": 0.4}, tmp_path)
    assert "texture" not in image_to_image and "Another seed changes these images" in image_to_image
    result = make_result(count=3)
    result["settings"] = result["settings"][:1]
    result["calibration"]["plain, other seeds"]["kid"] = {"mean": 0.010, "std": 0.003}
    for mean, ratios in ((0.0199, ""), (0.0201, "0.1"), (0.0, "")):
        result["settings"][0]["kid"]["to plain, other seeds"] = {"mean": mean, "std": 0.004}  # 2·√(3² + 4²) = 10
        assert (f"at ratio {ratios}." if ratios else "at any ratio.") in summary_of(result, tmp_path)


@pytest.mark.parametrize(("ratio", "name"), [(0.25, "0.25"), (0.3, "0.25"), (0.7, "0.75")])
def test_default_is_nearest_to_the_ratio_of_the_ablations(ratio, name, tmp_path, empty_plots):
    result = make_result()
    for setting in result["settings"]:
        if setting["group"] in ("max_downsample", "layers"):
            setting["config"]["ratio"] = ratio
    assert default(result)["name"] == name
    assert f"What merges, at ratio {ratio:g}" in write_quality_page(result, tmp_path, tmp_path / "quality.json")
