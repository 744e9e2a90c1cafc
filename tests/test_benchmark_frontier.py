"""The frontier page: images and times are joined, the best points are marked, the page has the results' figures."""

import json
import math
import re
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
from figure_checks import clipped_texts, overlapping_texts
from frontier import NOISE, main, read_points, write_frontier_page
from frontier_results import DEFAULT, POINTS, TOMESD, quality, speed
from PIL import Image
from point_labels import label_points
from quality_support import write_images
from speed_results import write

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.evaluation.quality.image_sets import name_of
from ppdiffusers_tome.evaluation.quality.quality_plots import is_on_frontier, plot_frontier

PHOTOGRAPHS = 0.4  # strength
RESULTS = {
    "frontier_128": quality(128),
    "frontier_256": quality(256),
    "frontier_photographs_128": quality(128, PHOTOGRAPHS),
    "frontier_speed": speed([128, 256]),
}
KV = replace(TOMESD, merge_attn="kv", ratio=0.5)


def points_of(*results):
    return read_points([(Path(f"{nth}.json"), result) for nth, result in enumerate(results)])


def write_all(folder, results=RESULTS):
    return [write(folder / "results" / f"{name}.json", result) for name, result in results.items()]


def rows_below(page, heading):
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", section, re.M)]


def test_command_writes_and_prints_the_page(tmp_path, capsys):
    files = [str(file) for file in write_all(tmp_path)]
    folder = tmp_path / "page"
    main([*files, "--output", str(folder)])
    page = (folder / "frontier.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page + "\n" and "(../results/frontier_speed.json)" in page
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) == 4 + 3 and all((folder / link).is_file() for link in links)


def test_frontier_leaves_out_what_is_slower_or_further():
    speed_up, nearness = pd.Series([1.2, 1.4, 1.3, 0.9, math.nan, 1.4]), pd.Series([50.0, 30, 29, 60, 99, 28])
    assert is_on_frontier(speed_up, nearness).tolist() == [True, True, False, False, False, True]
    frame = points_of(quality(128), speed([128]))
    best = frame[frame["frontier"]].set_index("ratio")["method"]
    assert best.to_dict() == {0.5: "default", 0.7: "default"}  # tomesd's at 0.75 is faster by 3 %, which is noise
    assert is_on_frontier(pd.Series([1.04, 1.00]), pd.Series([30.0, 40.0]), 0.05).tolist() == [False, False]
    assert is_on_frontier(pd.Series([1.06, 1.005]), pd.Series([30.0, 40.0]), 0.05).tolist() == [True, True]


def test_methods_have_the_names_of_the_documents():
    names = [name_of(config) for config in POINTS]
    assert names[::2] == ["tomesd's", "default", "keys and values, whole grid, not proportional", "ToDo, random dst"]
    assert names[5] == "ToDo" and name_of(ToMeConfig(seed=3)) == "default"
    other = ToMeConfig(ratio=0.8, sx=4, max_downsample=2, window=8, merge_mlp=True)
    assert name_of(other) == "default, up to level 2, 4×2 cells, windows of 8, merge_mlp=True"
    grid = ToMeConfig(merge_attn="kv", match="grid", blend=0.1, proportional=False, use_rand=False, ratio=0.75)
    assert name_of(grid) == "ToDo, blend 0.1" == name_of(replace(grid, window=None))


def test_equal_images_are_infinitely_near_and_what_was_not_timed_has_no_speed_up(tmp_path):
    result, timed = quality(128), {config: point for config, point in POINTS.items() if config != KV}
    result["settings"].append({**result["settings"][0], "name": "plain-bf16", "config": asdict(ToMeConfig(ratio=0))})
    result["settings"][4]["pairs"] |= {"psnr": [None] * 12, "perceptual": [0.0] * 12}
    page = write_frontier_page(write_all(tmp_path, {"images": result, "times": speed([128], timed)}), tmp_path)
    rows = rows_below(page, "Prompts, 128 px, 12 images")
    assert rows[-1] == [name_of(KV), "0.5", "–", "–", "∞ (∞–∞)", "0.0000"]
    assert len(rows) == 2 + len(POINTS), "plain images in another precision are no point"


def test_plot_has_a_line_for_each_method_and_the_frontier():
    points = points_of(quality(128), speed([128])).assign(is_chosen=[True] + [False] * (len(POINTS) - 1))
    figure = plot_frontier(points, "Prompts", "predictor", NOISE)
    [legend] = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {"frontier", "plain", "chosen", *points["method"]}
    for axes, measure in zip(figure.axes, ("psnr", "perceptual"), strict=True):
        assert Counter(text.get_text() for text in axes.texts) == Counter(points["ratio"].map("{:g}".format))
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
        assert set(lines) == {"frontier", "plain", "chosen", *points["method"]}
        for method, rows in points.groupby("method"):
            rows = rows.sort_values("ratio")
            assert lines[method] == rows[["predictor", measure]].to_numpy().tolist()
        assert lines["chosen"] == points[["predictor", measure]][:1].to_numpy().tolist()
    assert [speed_up for speed_up, _ in lines["frontier"]] == pytest.approx([1 / 0.69, 1 / 0.62])


RESULT_FILES = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("frontier_*.json"))


def test_points_of_the_committed_results_are_labelled_readably():
    frame = read_points([(file, json.loads(file.read_text(encoding="utf-8"))) for file in RESULT_FILES])
    for (source, size), points in frame.groupby(["source", "size"]):
        figure = plot_frontier(points, f"{source}, {size} px", "predictor", NOISE, label_points)
        assert clipped_texts(figure) == [] and overlapping_texts(figure) == []
        [legend] = figure.legends
        assert {text.get_text() for text in legend.get_texts()} <= {"frontier", "plain"}
        for axes in figure.axes:
            labels = Counter(text.get_text().replace("\n", " ") for text in axes.texts)
            first = points.sort_values("ratio").drop_duplicates("method").index
            names = points["method"].where(points.index.isin(first), "").map(lambda name: f"{name}: " if name else "")
            assert labels == Counter(names + points["ratio"].map("{:g}".format))
            lines = [line for line in axes.get_lines() if line.get_label() in set(points["method"])]
            assert len({line.get_color() for line in lines}) == points["method"].nunique() == len(lines)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([quality(128)], r"the sizes are \[128\] and \[\]"),
        ([speed([128])], r"the sizes are \[\] and \[128\]"),
        ([quality(128), speed([256])], r"the sizes are \[128\] and \[256\]"),
        ([quality(128), quality(128), speed([128])], r"Prompts, 128 px: tomesd's at ratio 0\.5 is there twice"),
        ([quality(128), speed([128]), speed([128])], "give one case of one UNet pass for each size"),
        ([{**quality(128), "model": "other"}, speed([128])], "128 px: .* several models, examples/emoji_sd, other"),
        ([{"kind": "load", "format": 2}], r"0\.json is not a quality result"),
    ],
)
def test_results_that_do_not_belong_together_are_refused(results, message):
    with pytest.raises(ToMeConfigError, match=message):
        points_of(*results)


def test_sheet_shows_plain_tomesd_and_the_default(tmp_path):
    larger_cells = {**POINTS, replace(DEFAULT, ratio=0.8, sx=4): (0.05, 0.9)}  # a ratio that cells of 2×2 do not allow
    results = RESULTS | {"frontier_256": quality(256, points=larger_cells)}
    files = write_all(tmp_path, results)
    for name, result in results.items():
        if result["kind"] == "quality":
            write_images(result, tmp_path / "images" / name, ["plain", *(row["name"] for row in result["settings"])])
    page = write_frontier_page(files, tmp_path, tmp_path / "images")
    shown = "plain, tomesd's 0.5, tomesd's 0.75, default 0.5, default 0.7; images 0, 2, 4, 7, 9, 11."
    assert f"![Prompts, 128 px: {shown}](frontier_prompts_128_sheet.png)" in page
    assert page.startswith(write_frontier_page(files, tmp_path))
    with Image.open(tmp_path / "frontier_photographs_128_sheet.png") as sheet:
        assert json.loads(sheet.text["strength"]) == PHOTOGRAPHS
    (tmp_path / "images" / "frontier_256" / "images" / "plain" / "0000.png").unlink()
    with pytest.raises(ToMeConfigError, match="has 11 images, the result 12"):
        write_frontier_page(files, tmp_path / "third", tmp_path / "images")
    assert not (tmp_path / "third" / "frontier.md").exists()
