"""Plots show the result's figures: point by point, bar by bar, with the calibrations as lines."""

import numpy as np
import pytest
from PIL import Image
from quality_support import RATIOS, add_real, make_result

from ppdiffusers_tome.evaluation.quality import quality_plots as plots
from ppdiffusers_tome.evaluation.quality.quality_report import read_frame, write_report

RESULT = make_result(count=9)
GROUPS = {"random dst": "ratio", "fixed dst": "use_rand", "tomesd on PyTorch": "tomesd"}


def lines(axes):
    """Label → (x, y) of each line."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_pairs_against_ratio():
    panels = plots.plot_pairs(read_frame(RESULT)).axes
    assert [axes.get_title() for axes in panels] == list(plots.PAIRS.values())
    for axes, measure in zip(panels, plots.PAIRS, strict=True):
        drawn = lines(axes)
        for label, group in GROUPS.items():
            settings = [setting for setting in RESULT["settings"] if setting["group"] == group]
            assert drawn[label][0] == [setting["config"]["ratio"] for setting in settings]
            np.testing.assert_allclose(drawn[label][1], [np.median(s["pairs"][measure]) for s in settings])
        for label, name in (("plain, another seed", "plain, other seeds"), ("plain, blurred", "plain, blurred")):
            values = RESULT["calibration"][name]["pairs"][measure]
            assert drawn[label][1] == pytest.approx([np.median(values)] * 2)
        band = axes.collections[0].get_paths()[0].vertices
        last = np.percentile(RESULT["settings"][3]["pairs"][measure], [25, 75])
        assert sorted(set(band[np.isclose(band[:, 0], 0.75), 1])) == pytest.approx(last)


def test_kid_has_a_panel_for_each_reference():
    (alone,) = plots.plot_kid(read_frame(RESULT)).axes
    others, real = plots.plot_kid(read_frame(add_real(make_result(count=3)))).axes
    expected = [1000 * setting["kid"]["to plain, other seeds"]["mean"] for setting in RESULT["settings"][:4]]
    for axes in (alone, others):
        drawn = lines(axes)
        assert drawn["random dst"][0] == list(RATIOS)
        np.testing.assert_allclose(drawn["random dst"][1], expected)
        assert {label: drawn[label][1][0] for label in ("plain images", "blurred images")} == pytest.approx(
            {"plain images": 1.0, "blurred images": 50.0}
        )
    drawn = lines(real)
    assert drawn["random dst"][1] == pytest.approx([30.0] * 4)
    levels = {label: drawn[label][1][0] for label in ("plain images", "blurred images", "real images")}
    assert levels == pytest.approx({"plain images": 20.0, "blurred images": 60.0, "real images": 0.2})
    assert set(real.collections[0].get_paths()[0].vertices[:, 1].round(6)) == {28.0, 32.0}, "one standard deviation"


def test_ablations_begin_with_the_default():
    (axes,) = plots.plot_ablations(read_frame(RESULT), 0.5).axes
    names = {
        "random dst": "0.5",
        "use_rand=False": "0.5-fixed",
        "max_downsample=2": "0.5-down2",
        "max_downsample=4": "0.5-down4",
        "max_downsample=8": "0.5-down8",
        "layers: attn + crossattn": "0.5-crossattn",
        "layers: attn + mlp": "0.5-mlp",
        "tomesd": "0.5-tomesd",
    }
    assert [label.get_text() for label in axes.get_yticklabels()] == list(names)
    medians = {s["name"]: np.median(s["pairs"]["perceptual"]) for s in RESULT["settings"]}
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], [medians[name] for name in names.values()])


def test_plots_are_small_and_readable(tmp_path):
    written = plots.write_plots(read_frame(RESULT), 0.5, tmp_path)
    assert [path.name for path, _ in written] == ["quality_pairs.png", "quality_kid.png", "quality_ablations.png"]
    for path, _ in written:
        assert path.stat().st_size <= 100_000
        with Image.open(path) as image:
            assert 800 <= image.width <= 1100


def test_infinite_psnr_and_zero_distance_are_plotted(tmp_path):
    result = make_result(count=3)
    result["settings"] = result["settings"][:2]
    result["settings"][0]["pairs"]["psnr"] = [None, None, 30.0]  # equal images
    result["settings"][1]["pairs"]["perceptual"] = [0.0] * 3
    write_report(result, tmp_path, tmp_path / "quality.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quality.md", "quality_kid.png", "quality_pairs.png"]


def test_lines_differ_in_marker_and_colour():
    colours, markers = {plots.COLOURS[group] for group in plots.LINES}, {line[1] for line in plots.LINES.values()}
    assert len(colours) == len(markers) == len(plots.LINES)
