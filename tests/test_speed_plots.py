"""The plots hold the data that they are made from, and are not drawn without it."""

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image
from speed_results import arm, case, result

from ppdiffusers_tome.evaluation.speed import plots
from ppdiffusers_tome.evaluation.speed.results import parse


def cases(*of_result):
    return parse(result(list(of_result)), "test").cases


def sized(size, share, batch=2):
    return case(
        [
            arm("plain", [10.0, 20.0, 40.0], memory=8),
            arm("memory-efficient", [11.0, 22.0, 44.0], memory=5),
            arm("tome", [10 * share, 20 * share, 40 * share], ratio=0.5, memory=6),
            arm("both", [11 * share, 22 * share, 44 * share], ratio=0.5, memory=4),
        ],
        size=size,
        batch=batch,
    )


def test_speed_up_against_size():
    figure = plots.speed_up_against_size(cases(sized(512, 0.8), sized(1024, 0.5)), "eager")
    tome, both = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["ToMe", "ToMe + memory-efficient"]
    np.testing.assert_allclose(tome.lines[0].get_xydata(), [[512, 1.25], [1024, 2.0]])
    np.testing.assert_allclose(both.lines[0].get_xydata(), [[512, 1 / 0.88], [1024, 1 / 0.55]])
    assert tome.get_xlabel() == "picture size (px, square)"
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ratio 0.5", "batch 2"]


def test_batches_are_lines_of_their_own():
    drawn = cases(sized(512, 0.8), sized(1024, 0.5), sized(512, 0.9, batch=4), sized(1024, 0.6, batch=4))
    lines = plots.speed_up_against_size(drawn, "eager").axes[0].lines[:2]
    assert len({line.get_marker() for line in lines}) == 2
    assert len({line.get_color() for line in lines}) == 1
    np.testing.assert_allclose(lines[1].get_ydata(), [1 / 0.9, 1 / 0.6])


def test_one_size_is_no_line():
    assert plots.speed_up_against_size(cases(sized(512, 0.8)), "eager") is None
    assert plots.speed_up_against_size(cases(sized(512, 0.8), sized(1024, 0.5)), "predictor") is None


def test_time_and_memory_against_ratio():
    merged = [
        arm("tome", [8.0, 16.0, 32.0], ratio=0.25, memory=7),
        arm("tome", [5.0, 10.0, 20.0], ratio=0.5, memory=6),
    ]
    limits = [arm("limit", [7.0, 14.0, 28.0], ratio=0.25), arm("limit", [4.0, 8.0, 16.0], ratio=0.5)]
    [drawn] = cases(case([arm("plain", [10.0, 20.0, 40.0], memory=8), *merged, *limits]))
    seconds, memory = plots.time_and_memory_against_ratio(drawn, "eager").axes
    np.testing.assert_allclose(seconds.lines[0].get_xydata(), [[0, 20], [0.25, 16], [0.5, 10]])
    np.testing.assert_allclose(seconds.lines[1].get_xydata(), [[0, 20], [0.25, 14], [0.5, 8]])
    np.testing.assert_allclose(memory.lines[0].get_xydata(), [[0, 8], [0.25, 7], [0.5, 6]])
    assert (seconds.get_ylabel(), memory.get_ylabel()) == ("seconds", "peak memory (GB)")
    assert seconds.get_ylim()[0] == memory.get_ylim()[0] == 0


def test_no_memory_no_panel_and_one_ratio_no_plot():
    merged = [arm("tome", [8.0, 16.0, 32.0], ratio=0.25), arm("tome", [5.0, 10.0, 20.0], ratio=0.5)]
    [drawn] = cases(case([arm("plain", [10.0, 20.0, 40.0]), *merged]))
    assert len(plots.time_and_memory_against_ratio(drawn, "eager").axes) == 1
    [single] = cases(sized(512, 0.8))
    assert plots.time_and_memory_against_ratio(single, "eager") is None


def test_distance_from_limit_takes_its_ratios_within_rounds():
    # 10 %, 2 %, 4 % above the limit: the median is 4 %; of the medians of the seconds it would be 2 %
    merged = arm("tome", [11.0, 20.4, 41.6], ratio=0.5)
    figure = plots.distance_from_limit(cases(case([merged, arm("limit", [10.0, 20.0, 40.0], ratio=0.5)])))
    [axes] = figure.axes
    [bar] = axes.patches
    assert bar.get_height() == pytest.approx(4)
    target = next(line for line in axes.lines if line.get_label() == "target, 3 %")
    assert target.get_ydata()[0] == pytest.approx(3)
    assert axes.get_xticklabels()[0].get_text() == "512 px\nbatch 2"
    assert plots.distance_from_limit(cases(sized(512, 0.8))) is None


def test_eager_against_predictor():
    arms = [arm("plain", [10.0, 20.0, 40.0]), arm("tome", [8.0, 16.0, 32.0], ratio=0.5)]
    predicted = [
        arm(each["arm"], [s / 4 for s in each["seconds"]], ratio=each["ratio"], backend="predictor") for each in arms
    ]
    [axes] = plots.eager_against_predictor(cases(case([*arms, *predicted]))).axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([1.25, 4, 5])
    others = [{**each, "ratio": 0.3} if each["arm"] == "tome" else each for each in (*arms, *predicted)]
    [axes] = plots.eager_against_predictor(cases(case(others))).axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([1.25, 4, 5]), "the ratio is the result's"
    assert plots.eager_against_predictor(cases(case(arms))) is None


def test_a_plot_is_a_small_picture_and_leaves_no_state(tmp_path):
    before = dict(mpl.rcParams)
    for name in ("a.png", "b.png"):
        figure = plots.speed_up_against_size(cases(sized(512, 0.8), sized(1024, 0.5)), "eager")
        plots.save(figure, tmp_path / name)
    assert dict(mpl.rcParams) == before
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").stat().st_size < 100_000
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width >= 800
        pixels = np.asarray(picture.convert("RGB"))
    assert (pixels[0, 0] >= 250).all()  # a light ground
    assert (pixels < 100).any()  # and something on it
