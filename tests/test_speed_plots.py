"""The plots have the data that they are made from, and there is no plot without it."""

import numpy as np
import pytest
from figure_checks import clipped_texts, overlapping_texts
from speed_results import PLAIN, arm, case, result, times, write

from ppdiffusers_tome.evaluation.speed import speed_plots as plots
from ppdiffusers_tome.evaluation.speed.frame import read_frame


@pytest.fixture
def frame(tmp_path):
    return lambda *cases: read_frame([write(tmp_path / "a.json", result(list(cases)))])[0]


def sized(size, share, batch=2):
    arms = [
        arm("plain", PLAIN, memory=8),
        arm("memory-efficient", times(1.1), memory=5),
        arm("tome", times(share), ratio=0.5, memory=6),
        arm("both", times(1.1 * share), ratio=0.5, memory=4),
    ]
    return case(arms, size=size, batch=batch)


def test_speed_up_by_size(frame):
    figure = plots.speed_up_by_size(frame(sized(1024, 0.5), sized(512, 0.8)), "eager")
    tome, both = figure.axes
    assert figure.get_suptitle() == "Speed-up against size, sd15, one UNet pass, eager\nToMe"
    assert [axes.get_title() for axes in figure.axes] == ["plain attention", "memory-efficient attention"]
    np.testing.assert_allclose(tome.lines[0].get_xydata(), [[512, 1.25], [1024, 2.0]])
    # over memory-efficient attention without merging: what that attention gains by itself is not merging's
    np.testing.assert_allclose(both.lines[0].get_xydata(), [[512, 1.25], [1024, 2.0]])
    assert tome.get_ylim() == both.get_ylim() and tome.get_ylim()[1] > 2.0
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ratio 0.5, batch 2"]


def test_batches_have_their_own_lines(frame):
    arms = frame(sized(512, 0.8), sized(1024, 0.5), sized(512, 0.9, batch=4), sized(1024, 0.6, batch=4))
    lines = plots.speed_up_by_size(arms, "eager").axes[0].lines[:2]
    assert len({line.get_marker() for line in lines}) == 2 and len({line.get_color() for line in lines}) == 1
    np.testing.assert_allclose(lines[1].get_ydata(), [1 / 0.9, 1 / 0.6])


def test_one_size_is_no_line(frame):
    assert plots.speed_up_by_size(frame(sized(512, 0.8)), "eager") is None
    assert plots.speed_up_by_size(frame(sized(512, 0.8), sized(1024, 0.5)), "predictor") is None


@pytest.mark.parametrize("memory, panels", [(8, 2), (None, 1)])
def test_time_and_memory_by_ratio(frame, memory, panels):
    arms = [
        arm("plain", PLAIN, memory=memory),
        arm("tome", times(0.8), ratio=0.25, max_downsample=2, memory=memory and 7),
        arm("tome", times(0.5), ratio=0.5, max_downsample=2, memory=memory and 6),
        arm("tome", times(0.3), ratio=0.5, max_downsample=4),  # not the lowest level
        arm("limit", times(0.7), ratio=0.25, max_downsample=2),
        arm("limit", times(0.4), ratio=0.5, max_downsample=2),
    ]
    figure = plots.time_and_memory_by_ratio(frame(sized(1024, 0.8), case(arms)), "eager")  # the first has one ratio
    assert figure.get_suptitle() == "sd15, one UNet pass, 512 px, batch 2, eager" and len(figure.axes) == panels
    tome, limit = figure.axes[0].lines
    np.testing.assert_allclose(tome.get_xydata(), [[0, 20], [0.25, 16], [0.5, 10]])
    np.testing.assert_allclose(limit.get_xydata(), [[0, 20], [0.25, 14], [0.5, 8]])
    for axes in figure.axes[1:]:
        np.testing.assert_allclose(axes.lines[0].get_xydata(), [[0, 8], [0.25, 7], [0.5, 6]])
    assert all(axes.get_ylim()[0] == 0 for axes in figure.axes)
    assert plots.time_and_memory_by_ratio(frame(sized(512, 0.8)), "eager") is None


def test_time_above_the_limit_is_taken_within_rounds(frame):
    # 10 %, 2 %, 4 % above the limit: the median is 4 %; of the medians of the seconds it would be 2 %
    arms = [arm("tome", [11.0, 20.4, 41.6], ratio=0.5), arm("limit", PLAIN, ratio=0.5)]
    [axes] = plots.time_above_limit(frame(case(arms))).axes
    [bar] = axes.patches
    assert bar.get_height() == pytest.approx(4)
    target = next(line for line in axes.lines if line.get_label() == "target, 3 %")
    assert target.get_ydata()[0] == pytest.approx(3)
    assert axes.get_xticklabels()[0].get_text() == "512 px\nbatch 2"
    assert plots.time_above_limit(frame(sized(512, 0.8))) is None


@pytest.mark.parametrize("ratio", [0.3, 0.5])
def test_eager_against_predictor(frame, ratio):
    eager = [arm("plain", PLAIN), arm("tome", times(0.8), ratio=ratio)]
    predictor = [
        arm("plain", times(0.25), backend="predictor"),
        arm("tome", times(0.2), ratio=ratio, backend="predictor"),
    ]
    [axes] = plots.eager_against_predictor(frame(case([*eager, *predictor]))).axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([1.25, 4, 5])
    assert axes.get_legend_handles_labels()[1][0] == f"eager, ToMe {ratio:g}"
    assert plots.eager_against_predictor(frame(case(eager))) is None


def test_methods_have_bars_of_their_own_and_other_plots_show_the_first(frame):
    windows, cells = {"window": 8}, {"merge_attn": "kv", "match": "grid"}

    def methods(size):
        eager = [arm("plain", PLAIN), arm("tome", times(0.5), ratio=0.5, merging=windows)]
        eager += [arm("tome", times(0.8), ratio=0.5), arm("tome", times(0.25), ratio=0.75, merging=cells)]
        eager += [arm("limit", times(0.4), ratio=0.5), arm("limit", times(0.2), ratio=0.75, merging=cells)]
        return case([*eager, arm("plain", times(0.2), backend="predictor")], size=size)

    arms = frame(methods(512), methods(1024))
    [axes] = plots.speed_up_by_method(arms).axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([2, 2, 1.25, 1.25, 4, 4])
    labels = ["ToMe 0.5, windows of 8", "ToMe 0.5", "keys and values 0.75, 2×2 cells"]
    assert axes.get_legend_handles_labels()[1] == labels
    [axes] = plots.time_above_limit(arms).axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([25, 25, 100, 100, 25, 25])
    [axes] = plots.speed_up_by_size(arms, "eager").axes
    assert axes.figure.get_suptitle().endswith("\nToMe, windows of 8")
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [2, 2])
    [axes] = plots.eager_against_predictor(arms).axes
    assert axes.get_legend_handles_labels()[1] == ["eager, ToMe 0.5, windows of 8", "predictor, plain"]
    assert plots.speed_up_by_method(frame(sized(512, 0.8), sized(1024, 0.5))) is None


def test_nothing_is_clipped_however_long_the_names_are(frame):
    windows = {"window": 16, "proportional": True}

    def long_names(size):
        arms = [arm("memory-efficient", times(1.1)), arm("both", times(0.6), ratio=0.5, merging=windows)]
        for nth, backend in enumerate(("eager", "predictor", "onnxruntime", "openvino")):
            arms.append(arm("plain", times(1 / (1 + nth)), backend=backend))
            arms.append(arm("tome", times(0.8 / (1 + nth)), ratio=0.5, merging=windows, backend=backend))
            arms.append(arm("limit", times(0.7 / (1 + nth)), ratio=0.5, merging=windows, backend=backend))
        return case(arms, size=size)

    arms = frame(long_names(512), long_names(1024))
    figures = [
        plots.speed_up_by_size(arms, "eager"),
        plots.eager_against_predictor(arms),
        plots.time_above_limit(arms),
    ]
    for figure in figures:
        assert clipped_texts(figure) == [] and overlapping_texts(figure) == []
    [legend] = figures[1].legends
    assert len(legend.get_texts()) == 7


def test_growth_of_plans():
    plans = [
        {"method": name, "side": side, "scores_gb": 0.0, "milliseconds": milliseconds}
        for name, side, milliseconds in (("global", 4, 2.0), ("global", 8, None), ("cells", 4, 1.0), ("cells", 8, 3.0))
    ]
    [axes] = plots.plan_growth(plans).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["global"] == [[16, 2.0]] and lines["cells"] == [[16, 1.0], [64, 3.0]]
    assert lines["linear in tokens"] == [[16, 0.75], [64, 3.0]] and axes.get_xscale() == axes.get_yscale() == "log"
    assert plots.plan_growth([]) is None
