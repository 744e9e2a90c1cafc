"""Plots show the result's figures: point by point, bar by bar, with the calibrations as lines."""

import numpy as np
import pytest
from PIL import Image
from quality_support import RATIOS, make_result

from ppdiffusers_tome.evaluation.plotting import looks_of
from ppdiffusers_tome.evaluation.quality import quality_plots as plots
from ppdiffusers_tome.evaluation.quality.quality_report import read_frame, write_quality_page

RESULT = make_result(count=9)
PAIRS = ["psnr", "ssim", "perceptual"]
LABELS = {"ratio": "random dst", "use_rand": "use_rand=False", "tomesd": "tomesd on PyTorch", "method": "tomesd's"}
KNOWN = {name: known for name, known in RESULT["calibration"].items() if known["pairs"]}


def lines(axes):
    """Label → (x, y) of each line."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_pairs_against_ratio():
    panels = plots.plot_against_ratio(read_frame(RESULT), PAIRS, "Pairs").axes
    assert [axes.get_title() for axes in panels] == [plots.TITLES[measure] for measure in PAIRS]
    for axes, measure in zip(panels, PAIRS, strict=True):
        shown = lines(axes)
        assert set(shown) == {*LABELS.values(), *KNOWN}
        for group, label in LABELS.items():
            settings = [setting for setting in RESULT["settings"] if setting["group"] == group]
            assert shown[label][0] == [setting["config"]["ratio"] for setting in settings]
            np.testing.assert_allclose(shown[label][1], [np.median(s["pairs"][measure]) for s in settings])
        for name, known in KNOWN.items():
            assert shown[name][1] == pytest.approx([np.median(known["pairs"][measure])] * 2)
        band = axes.collections[0].get_paths()[0].vertices
        last = np.percentile(RESULT["settings"][3]["pairs"][measure], [25, 75])
        assert sorted(set(band[np.isclose(band[:, 0], 0.75), 1])) == pytest.approx(last)


def test_kid_has_a_panel_for_each_reference():
    panels = plots.plot_against_ratio(read_frame(RESULT), ["kid_others", "kid_real"], "KID").axes
    for axes, reference, real in zip(panels, ("to plain, other seeds", "to real"), (False, True), strict=True):
        shown, by_ratio = lines(axes), [setting["kid"][reference] for setting in RESULT["settings"][:4]]
        assert shown["random dst"] == (list(RATIOS), pytest.approx([1000 * kid["mean"] for kid in by_ratio]))
        known = {name: known["kid"] for name, known in RESULT["calibration"].items() if ("real" in name) == real}
        assert {name: shown[name][1][0] for name in known} == pytest.approx(
            {name: 1000 * kid["mean"] for name, kid in known.items()}
        )
        band = axes.collections[0].get_paths()[0].vertices
        last = [1000 * (by_ratio[3]["mean"] + sign * by_ratio[3]["std"]) for sign in (-1, 1)]
        assert sorted(set(band[np.isclose(band[:, 0], 0.75), 1])) == pytest.approx(last), "one standard deviation"


def test_bars_are_medians():
    frame = read_frame(RESULT)
    at_half = frame[frame["ratio"] == 0.5]
    (axes,) = plots.plot_bars(at_half, "perceptual", 0.3, "Ablations").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == at_half["label"].tolist()
    medians = [np.median(s["pairs"]["perceptual"]) for s in RESULT["settings"] if s["name"] in at_half.index]
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], medians)
    assert lines(axes)["another seed of the same prompt"][0] == [0.3, 0.3]


def test_infinite_psnr_and_zero_distance_are_plotted_small_and_readable(tmp_path):
    result = make_result(count=3)
    result["settings"] = result["settings"][:2]
    result["settings"][0]["pairs"]["psnr"] = [None, None, 30.0]  # equal images
    result["settings"][1]["pairs"]["perceptual"] = [0.0] * 3
    write_quality_page(result, tmp_path, tmp_path / "quality.json")
    written = sorted(tmp_path.glob("*.png"))
    assert [path.name for path in written] == ["quality_kid.png", "quality_pairs.png"]
    for path in written:
        with Image.open(path) as image:
            assert 800 <= image.width <= 1100 and path.stat().st_size <= 100_000


def test_no_two_names_have_one_look():
    looks = looks_of(map(str, range(15)))
    assert len({colour for colour, _ in looks.values()}) == len(looks) == 15
