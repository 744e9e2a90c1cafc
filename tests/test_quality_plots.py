"""Plots show the result's own figures: line by line, bar by bar, beside the calibrations; each is small."""

import numpy as np
import pytest
from PIL import Image
from quality_support import RATIOS, make_result

from ppdiffusers_tome.evaluation.quality import plots
from ppdiffusers_tome.evaluation.quality.findings import at_ratio, lines, median, quartiles


@pytest.fixture(scope="module")
def result():
    return make_result(count=9)


def line(axes, label):
    """Ratios and values of the line with that label."""
    found = next(each for each in axes.get_lines() if each.get_label() == label)
    return found.get_xdata().tolist(), found.get_ydata().tolist()


def levels(axes):
    """The dashed lines' values and names."""
    values = [each.get_ydata()[0] for each in axes.get_lines() if each.get_label().startswith("_child")]
    return dict(zip([text.get_text() for text in axes.texts], values, strict=True))


def test_pairs_against_ratio(result):
    panels = plots.plot_pairs(result).axes
    assert [axes.get_title() for axes in panels] == ["PSNR, dB", "SSIM", "perceptual distance (ST-LPIPS)"]
    for axes, measure in zip(panels, ("psnr", "ssim", "perceptual"), strict=True):
        for name, group in (("random dst", "ratio"), ("fixed dst", "use_rand"), ("tomesd on PyTorch", "tomesd")):
            settings = [each for each in result["settings"] if each["group"] == group]
            ratios, values = line(axes, name)
            assert ratios == [each["config"]["ratio"] for each in settings]
            np.testing.assert_allclose(values, [np.median(each["pairs"][measure]) for each in settings])
        calibration = result["calibration"]
        expected = {
            "another seed": np.median(calibration["plain, other seeds"]["pairs"][measure]),
            "blurred": np.median(calibration["plain, blurred"]["pairs"][measure]),
        }
        assert levels(axes) == pytest.approx(expected)
        band = axes.collections[0].get_paths()[0].vertices
        low, high = np.percentile(lines(result)["random dst"][-1]["pairs"][measure], [25, 75])
        assert sorted(set(band[np.isclose(band[:, 0], 0.75), 1])) == pytest.approx([low, high])


def test_sets_against_ratio(result):
    kid, frechet = plots.plot_sets(result).axes
    settings = lines(result)["random dst"]
    to = "to plain, other seeds"
    ratios, values = line_of_container(kid, "random dst")
    assert ratios == list(RATIOS)
    np.testing.assert_allclose(values, [1000 * each["set"][to]["kid"]["mean"] for each in settings])
    np.testing.assert_allclose(
        line_of_container(frechet, "random dst")[1], [each["set"][to]["frechet"] for each in settings]
    )
    assert levels_of_sets(kid) == pytest.approx({"another seed": 1.0, "blurred": 50.0})
    assert levels_of_sets(frechet) == pytest.approx({"another seed": 31.0, "blurred": 90.0})


def line_of_container(axes, label):
    data = next(each for each in axes.containers if each.get_label() == label).lines[0]
    return data.get_xdata().tolist(), data.get_ydata().tolist()


def levels_of_sets(axes):
    dashed = [each for each in axes.get_lines() if len(each.get_xdata()) == 2 and each.get_xdata() == [0, 1]]
    return {text.get_text(): each.get_ydata()[0] for text, each in zip(axes.texts, dashed, strict=True)}


def test_sets_to_real_where_they_were_measured():
    result = make_result(count=3)
    for each in result["settings"]:
        each["set"]["to real"] = {"kid": {"mean": 0.03, "std": 0.001}, "frechet": 70.0}
    kid, _ = plots.plot_sets(result, "to real").axes
    assert levels_of_sets(kid) == pytest.approx({"plain, to real": 20.0, "real halves": 0.2, "real, blurred": 60.0})
    assert line_of_container(kid, "random dst")[1] == pytest.approx([30.0] * 4)
    assert plots.PLOTS["quality_sets_real.png"][1](result)
    assert not plots.PLOTS["quality_sets_real.png"][1](make_result(count=3))


def test_time_has_a_point_for_each_setting_that_was_timed(result):
    (axes,) = plots.plot_time(result).axes
    points = {each.get_label(): each.get_offsets().tolist() for each in axes.collections}
    assert set(points) == {"ratio", "use_rand", "max_downsample", "layers"}, "tomesd was not timed"
    expected = [[each["seconds"]["picture"] / 2, median(each, "perceptual")] for each in lines(result)["random dst"]]
    np.testing.assert_allclose(points["ratio"], expected)
    assert [text.get_text() for text in axes.texts] == [f"{ratio:g}" for ratio in RATIOS]


def test_ablations_stand_beside_the_default(result):
    (axes,) = plots.plot_ablations(result).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [
        "default (random dst)",
        "use_rand=False",
        "max_downsample=2",
        "max_downsample=4",
        "max_downsample=8",
        "layers: attn + crossattn",
        "layers: attn + mlp",
        "tomesd",
    ]
    widths = [bar.get_width() for bar in axes.patches]
    np.testing.assert_allclose(widths, [median(each, "perceptual") for each in plots.ablations(result)])
    assert widths[0] == median(at_ratio(lines(result)["random dst"], 0.5), "perceptual")


def test_plots_are_small_and_wide_enough_and_say_their_command(result, tmp_path):
    written = plots.write_plots(result, tmp_path)
    assert [path.name for path in written] == [name for name in plots.PLOTS if name != "quality_sets_real.png"]
    for path in written:
        assert path.stat().st_size <= 100_000
        with Image.open(path) as image:
            assert 800 <= image.width <= 1000
            assert image.text == {"command": result["command"]}


def test_what_was_not_measured_is_not_plotted(tmp_path):
    result = make_result(count=3)
    result["settings"] = [each for each in result["settings"] if each["name"] in ("0.25", "0.5")]
    result["calibration"] = {}
    for each in result["settings"]:
        each["set"], each["seconds"] = {}, None
    result["settings"][0]["pairs"]["psnr"] = [None, None, 30.0]  # equal pictures
    assert [path.name for path in plots.write_plots(result, tmp_path)] == ["quality_pairs.png"]
    result["settings"] = []
    assert plots.write_plots(result, tmp_path) == []


def test_quartiles_are_numpys_and_infinite_where_equal_pictures_are():
    values = np.random.RandomState(0).standard_normal(11).tolist()
    for count in (1, 2, 5, 8, 11):
        np.testing.assert_allclose(quartiles(values[:count]), np.percentile(values[:count], [25, 50, 75]))
    assert quartiles([None, 20.0, 30.0]) == (25.0, 30.0, float("inf"))
    assert quartiles([None, None]) == (float("inf"),) * 3


def test_groups_differ_in_marker_and_colour():
    for styles in (plots.GROUPS, plots.STYLES):
        colours, markers = zip(*(style[:2] for style in styles.values()), strict=True)
        assert len(set(colours)) == len(set(markers)) == len(styles)
