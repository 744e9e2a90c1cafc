"""The quality report: its tables and sentences have the result's figures, its links lead to files."""

import json
import re
from copy import deepcopy
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image
from quality_support import RATIOS, add_real, make_kid, make_result, write_images

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.evaluation.quality.quality_report import default_setting, read_frame, write_quality_page
from ppdiffusers_tome.evaluation.quality.sheets import difference_map


@pytest.fixture(scope="module")
def result():
    return add_real(make_result())


@pytest.fixture(scope="module")
def written(result, tmp_path_factory):
    """A report with everything in it: its text and folder."""
    folder = tmp_path_factory.mktemp("quality")
    write_images(result, folder)
    source, merge_map = folder / "results" / "quality.json", folder / "report" / "merge_map.png"
    source.parent.mkdir()
    source.touch()
    merge_map.parent.mkdir()
    Image.new("RGB", (8, 8)).save(merge_map)
    return write_quality_page(
        result, folder / "report", source, folder, (merge_map, "Which tokens merge")
    ), folder / "report"


def default(result):
    name = default_setting(read_frame(result))
    return next(setting for setting in result["settings"] if setting["name"] == name)


def read_table(text, title):
    """Header and rows of the table below a heading."""
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", section, re.M)]
    return rows[0], rows[2:]


def test_links_lead_to_files(written):
    text, folder = written
    assert (folder / "quality.md").read_text(encoding="utf-8") == text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert "../results/quality.json" in links and "merge_map.png" in links
    assert len(links) == 7  # the result, three plots, two sheets, the merge map
    for link in links:
        assert (folder / unquote(link)).is_file(), link


def test_table_by_ratio_has_the_figures_of_the_result(result, written):
    header, rows = read_table(written[0], "By ratio")
    kid = ["KID × 1000 to plain, other seeds", "KID × 1000 to real"]
    assert header == ["setting", "ratio", "PSNR, dB", "SSIM", "perceptual distance", *kid]
    assert [row[1] for row in rows] == [f"{ratio:g}" for ratio in RATIOS]
    for row, setting in zip(rows, result["settings"], strict=False):
        low, middle, high = np.percentile(setting["pairs"]["psnr"], [25, 50, 75])
        assert row[2] == f"{middle:.1f} ({low:.1f}–{high:.1f})"
        low, middle, high = np.percentile(setting["pairs"]["perceptual"], [25, 50, 75])
        assert row[4] == f"{middle:.4f} ({low:.4f}–{high:.4f})"
        assert row[5] == f"{1000 * setting['kid']['to plain, other seeds']['mean']:.2f} ± 2.00"
        assert row[6] == "30.00 ± 2.00"


def test_every_group_and_calibration_has_its_table(result, written):
    text, _ = written
    _, rows = read_table(text, "What the measures mean")
    assert [row[0] for row in rows] == list(result["calibration"])
    assert rows[0][4:] == ["1.00 ± 2.00", "–"]
    assert rows[2] == ["real halves", "–", "–", "–", "–", "0.20 ± 2.00"]
    labels = {title: [row[0] for row in read_table(text, title)[1]] for title in ("Levels", "Layers")}
    assert labels["Levels"] == [f"max_downsample={level}" for level in (2, 4, 8)]
    assert labels["Layers"] == ["layers: attn + crossattn", "layers: attn + mlp"]
    assert {row[0] for row in read_table(text, "Random and fixed dst")[1]} == {"use_rand=False"}
    assert len(read_table(text, "tomesd on PyTorch")[1]) == 1
    assert read_table(text, "Precision")[1][0][:2] == ["bfloat16", "0"]


def test_fid_and_infinite_psnr_are_shown(tmp_path):
    result = make_result(count=4)
    result["settings"] = result["settings"][:1]
    result["settings"][0]["fid"] = 12.34
    result["settings"][0]["pairs"]["psnr"] = [None, None, None, 30.0]  # equal images
    text = write_quality_page(result, tmp_path, tmp_path / "quality.json")
    header, ((*_, psnr, _, _, _, fid),) = read_table(text, "By ratio")
    assert header[-1] == "FID to real" and fid == "12.3"
    assert psnr == "∞ (∞–∞)"
    assert "## Images" not in text and "## Merge map" not in text


def test_examples_are_the_nearest_the_median_and_the_furthest(result, written):
    _, folder = written
    order = np.argsort(default(result)["pairs"]["perceptual"])
    chosen = (order[0], order[5], order[11])
    with Image.open(folder / "quality_examples.png") as image:
        sheet = np.asarray(image)
        assert [prompt["seed"] for prompt in json.loads(image.text["prompts"])] == [100 + n for n in chosen]
    step = result["size"] + 4
    for column, number in enumerate(chosen):
        centre = sheet.shape[1] - (3 - column) * step + result["size"] // 2
        colours = {tuple(pixel) for pixel in sheet[:, centre].tolist()}
        names = [folder.parent / "images" / name / f"{number:04d}.png" for name in ("plain", "0.5")]
        plain, half = map(Image.open, names)
        for expected in (plain, half, difference_map(plain, half)):
            assert expected.getpixel((0, 0)) in colours


def test_contact_sheet_shows_evenly_spaced_prompts(written):
    text, folder = written
    assert "Prompts 0, 2, 4, 7, 9, 11 of the list, evenly spaced" in text
    with Image.open(folder / "quality_sheet.png") as image:
        assert [prompt["seed"] for prompt in json.loads(image.text["prompts"])] == [100, 102, 104, 107, 109, 111]
        assert json.loads(image.text["rows"]) == ["plain", *(f"{ratio:g}" for ratio in RATIOS)]


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


def test_small_change_is_not_summarized_as_none(result, tmp_path):
    changed = deepcopy(result)
    other = changed["calibration"]["plain, other seeds"]
    for compared, distance in ((default(changed), 1e-4), (other, 2.5e-2)):
        compared["pairs"]["perceptual"] = [distance] * len(compared["pairs"]["perceptual"])
    assert "Another seed changes these images 250× as much:" in summary_of(changed, tmp_path)


def test_summary_has_the_figures_of_the_result(result, tmp_path):
    text = summary_of(result, tmp_path)
    middle = np.median(default(result)["pairs"]["perceptual"])
    other = np.median(result["calibration"]["plain, other seeds"]["pairs"]["perceptual"])
    assert f"a perceptual distance of {middle:.4f} (quartiles" in text
    assert f"Another seed changes these images {other / middle:.0f}× as much: a plain image" in text
    assert "Images with texture everywhere" in text
    image_to_image = summary_of({**result, "strength": 0.4}, tmp_path)
    assert "texture" not in image_to_image and "Another seed changes these images" in image_to_image
    assert "KID finds a difference from plain images at ratio 0.5, 0.75." in text
    for ratio in RATIOS:
        changed = deepcopy(result)
        settings = {setting["name"]: setting for setting in changed["settings"]}
        settings[f"{ratio:g}"]["kid"]["to plain, other seeds"] = make_kid(0.2)
        assert f"{ratio:g}" in summary_of(changed, tmp_path).split("at ratio ")[-1].split(". ")[0]


def test_noise_floor_counts_the_uncertainty_of_both(tmp_path):
    result = make_result(count=3)
    result["settings"] = result["settings"][:1]
    result["calibration"]["plain, other seeds"]["kid"] = {"mean": 0.010, "std": 0.003}
    for mean, ratios in ((0.0199, ""), (0.0201, "0.1"), (0.0, "")):
        result["settings"][0]["kid"]["to plain, other seeds"] = {"mean": mean, "std": 0.004}  # 2·√(3² + 4²) = 10
        assert (f"at ratio {ratios}." if ratios else "at any ratio.") in summary_of(result, tmp_path)


@pytest.mark.parametrize(("ratio", "name"), [(0.25, "0.25"), (0.3, "0.25"), (0.7, "0.75")])
def test_default_is_nearest_to_the_ratio_of_the_ablations(ratio, name, tmp_path):
    result = make_result()
    for setting in result["settings"]:
        if setting["group"] in ("max_downsample", "layers"):
            setting["config"]["ratio"] = ratio
    assert default(result)["name"] == name
    assert f"What merges, at ratio {ratio:g}" in write_quality_page(result, tmp_path, tmp_path / "quality.json")
