"""The quality report: its tables and sentences are the result's, its links lead somewhere, its claims have limits."""

import json
import re
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image
from quality_support import RATIOS, against, make_result, pairs, write_pictures

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.evaluation.quality.findings import is_within_floor, summarize
from ppdiffusers_tome.evaluation.quality.plots import ablations, plot_ablations
from ppdiffusers_tome.evaluation.quality.report import write_report
from ppdiffusers_tome.evaluation.quality.sheets import difference_map


@pytest.fixture(scope="module")
def result():
    return make_result()


@pytest.fixture(scope="module")
def written(result, tmp_path_factory):
    """The report with all that it can hold: its text and folder."""
    folder = tmp_path_factory.mktemp("quality")
    write_pictures(result, folder / "pictures")
    source, merge_map = folder / "results" / "quality.json", folder / "report" / "merge_map.png"
    source.parent.mkdir()
    source.touch()
    merge_map.parent.mkdir()
    Image.new("RGB", (8, 8)).save(merge_map)
    text = write_report(result, folder / "report", folder / "pictures", source, [merge_map])
    return text, folder / "report"


def table(text, title):
    """The rows of the table under a heading, by their first cells."""
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", section, re.M)]
    return rows[0], rows[2:]


def test_links_lead_to_files(written):
    text, folder = written
    assert (folder / "quality.md").read_text(encoding="utf-8") == text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert "../results/quality.json" in links and "merge_map.png" in links
    assert len(links) == 8  # the result, four plots, two sheets, the merge map
    for link in links:
        assert (folder / unquote(link)).is_file(), link


def test_says_what_was_drawn(result, written):
    text, _ = written
    for fact in (
        "examples/emoji_sd, 32 px, 20 steps of DDIMScheduler, guidance 2",
        "12 for each setting, of 12 prompts, seeds 100 to 111",
        "`python -m ppdiffusers_tome evaluate --quick`",
        "`0123456789abcdef`",
        "Some CPU, threads 1, paddlepaddle 2.6.2",
        "efficientnet-lite0 1.0, stlpips 0.1.2",
    ):
        assert fact in text
    assert "FID" not in text


def test_table_by_ratio_has_the_results_figures(result, written):
    heads, rows = table(written[0], "By ratio")
    to = "to plain, other seeds"
    assert heads[2:] == ["PSNR, dB", "SSIM", "perceptual", f"KID × 1000, {to}", f"Fréchet, {to}", "time"]
    assert [row[1] for row in rows] == [f"{ratio:g}" for ratio in RATIOS]
    for row, each in zip(rows, result["settings"], strict=False):
        low, middle, high = np.percentile(each["pairs"]["psnr"], [25, 50, 75])
        assert row[2] == f"{middle:.1f} ({low:.1f}–{high:.1f})"
        low, middle, high = np.percentile(each["pairs"]["perceptual"], [25, 50, 75])
        assert row[4] == f"{middle:.4f} ({low:.4f}–{high:.4f})"
        assert row[5] == f"{1000 * each['set'][to]['kid']['mean']:.2f} ± 2.00"
        assert row[6] == f"{each['set'][to]['frechet']:.1f}"
    assert rows[2][7] == "1.70 s, −15 %"


def test_every_group_and_calibration_has_its_table(result, written):
    text, _ = written
    _, rows = table(text, "How the measures are calibrated")
    assert [row[0] for row in rows] == list(result["calibration"])
    assert rows[2] == ["real halves", "—", "—", "—", "0.20 ± 2.00", "25.0"]
    assert [row[0] for row in table(text, "Levels")[1]] == [f"max_downsample={d}" for d in (2, 4, 8)]
    assert [row[0] for row in table(text, "Layers")[1]] == ["layers: attn + crossattn", "layers: attn + mlp"]
    assert {row[0] for row in table(text, "Random or fixed dst")[1]} == {"use_rand=False"}
    assert table(text, "tomesd on PyTorch")[1][0][-1] == "—", "its time was not measured"


def test_examples_are_the_nearest_the_median_and_the_furthest(result, written):
    _, folder = written
    distances = next(each for each in result["settings"] if each["name"] == "0.5")["pairs"]["perceptual"]
    order = np.argsort(distances)
    with Image.open(folder / "quality_examples.png") as image:
        sheet = np.asarray(image)
        assert [each["seed"] for each in json.loads(image.text["prompts"])] == [
            100 + n for n in (order[0], order[5], order[11])
        ]
    side, gap = 32, 4
    left = sheet.shape[1] - 3 * (side + gap)
    pictures = folder.parent / "pictures"
    for column, number in enumerate((order[0], order[5], order[11])):
        found = {tuple(each) for each in sheet[:, left + column * (side + gap) + side // 2].tolist()}
        plain, half = (np.array(Image.open(pictures / name / f"{number:04d}.png")) for name in ("plain", "0.5"))
        for expected in (plain, half, difference_map(plain, half, 4)):
            assert tuple(expected[0, 0].tolist()) in found


def test_contact_sheet_shows_evenly_spaced_prompts(written):
    text, folder = written
    assert "Prompts number 0, 2, 4, 7, 9, 11: evenly spaced" in text
    with Image.open(folder / "quality_sheet.png") as image:
        assert [each["seed"] for each in json.loads(image.text["prompts"])] == [100, 102, 104, 107, 109, 111]
        assert json.loads(image.text["ratios"]) == list(RATIOS)


def test_without_pictures_there_are_none(tmp_path):
    result = make_result(count=4)
    result["settings"] = [each | {"set": {}, "seconds": None} for each in result["settings"][:1]]  # one plot
    result["settings"][0]["pairs"]["psnr"] = [None] * 4  # equal pictures
    text = write_report(result, tmp_path, None)
    assert "## Pictures" not in text and "## Merge maps" not in text and "## Plots" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quality.md", "quality_pairs.png"]
    _, rows = table(text, "By ratio")
    assert rows[0][2] == "∞ (∞–∞)"


def test_missing_pictures_and_other_files_are_refused_and_nothing_is_written(result, tmp_path):
    write_pictures(result, tmp_path / "pictures", names=("plain", "0.1"))
    with pytest.raises(ToMeConfigError, match=r"0\.25 has no PNG files"):
        write_report(result, tmp_path / "report", tmp_path / "pictures")
    with pytest.raises(ToMeConfigError, match=r"no quality result .* 'speed'"):
        write_report({"kind": "speed", "format": 1}, tmp_path / "report", None)
    assert not (tmp_path / "report").exists()


def test_summary_is_short_and_follows_the_figures(result):
    said = summarize(result)
    assert len(said) <= 10
    text = "\n".join(said)
    half = next(each for each in result["settings"] if each["name"] == "0.5")
    middle = np.median(half["pairs"]["perceptual"])
    other = np.median(result["calibration"]["plain, other seeds"]["pairs"]["perceptual"])
    assert (
        f"distance of {middle:.4f}" in text
        and f"merging 50% of the tokens moves an image {middle / other:.0%} as far" in text
    )
    assert "ratio 0.1 cannot be told" not in text and "ratio 0.1, 0.25 cannot be told from plain pictures" in text
    assert "0.5, 0.75 can." in text and "cannot rank ratios" in text
    assert "15% less time" in text
    assert "not quality" in said[-1]


def test_summary_turns_where_the_figures_turn():
    result = make_result()
    by_name = {each["name"]: each for each in result["settings"]}
    by_name["0.5"]["seconds"]["picture"] = 2.2
    by_name["fixed-0.5"]["pairs"] = pairs(0.01, 12)
    for name in ("0.1", "0.25", "0.5", "0.75"):
        by_name[name]["set"] = {"to plain, other seeds": against(0.2, 99.0)}
    by_name["0.75"]["pairs"] = pairs(0.01, 12)
    text = "\n".join(summarize(result))
    assert "10% more time" in text
    assert "0.5: 100%" in text
    assert "every ratio is beyond the noise floor" in text and "cannot rank" not in text
    assert "at least 0% of the pictures come no nearer to plain (fewest from 0.5 to 0.75)" in text


@pytest.mark.parametrize(("ratio", "default"), [(0.25, "0.25"), (0.3, "0.25")])
def test_ablations_at_another_ratio_lose_nothing(ratio, default, tmp_path):
    """Also where the default was not drawn at their ratio: then the nearest stands for it."""
    result = make_result()
    for each in result["settings"]:
        if each["group"] in ("max_downsample", "layers"):
            each["config"]["ratio"] = ratio
    said = summarize(result)
    assert len(said) == len(summarize(make_result()))
    assert said[0].startswith(f"At ratio {default} the median image")
    assert any(f"Among other layers and levels at {ratio}, with-crossattn is nearest" in each for each in said)
    assert any(f"the default at {default} has " in each for each in said)
    assert {each["name"] for each in ablations(result)} >= {"level-2", "level-4", "level-8", "with-mlp"}
    text = write_report(result, tmp_path)
    assert f"What merges, at ratio {ratio}; bars" in text and (tmp_path / "quality_ablations.png").exists()
    assert plot_ablations(result).axes[0].get_xlabel().endswith(f"from plain at ratio {ratio}")


def test_summary_is_silent_about_what_is_not_there():
    result = make_result(count=3)
    result["settings"] = [each for each in result["settings"] if each["name"] == "0.25"]
    result["calibration"] = {}
    said = "\n".join(summarize(result))
    assert len(summarize(result)) == 3 and "KID" not in said and "Another seed" not in said and "layers" not in said
    assert is_within_floor(result["settings"][0], result) is None
    result["settings"] = []
    assert len(summarize(result)) == 1


def test_floor_counts_the_uncertainty_of_both():
    result = make_result(count=3)
    setting = result["settings"][0]
    floor = result["calibration"]["plain, other seeds"]["set"]["kid"]
    floor.update(mean=0.010, std=0.003)
    for mean, within in ((0.0199, True), (0.0201, False), (0.0, True)):
        setting["set"]["to plain, other seeds"]["kid"] = {"mean": mean, "std": 0.004}  # 2·sqrt(3² + 4²) = 10
        assert is_within_floor(setting, result) is within
