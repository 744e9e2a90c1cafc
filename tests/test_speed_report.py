"""The report on speed, checked against figures worked out by hand."""

import re

import numpy as np
import pytest
from figure_checks import clipped_texts, overlapping_texts
from speed_results import PLAIN, arm, case, result, times, write

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.evaluation.speed import speed_report
from ppdiffusers_tome.evaluation.speed.frame import read_frame
from ppdiffusers_tome.evaluation.speed.speed_report import against_ratio, against_size, by_method, write_report


def full_case(**fields):
    """Arms of two backends, and two ratios."""
    arms = [
        arm("plain", PLAIN, memory=8),
        arm("memory-efficient", times(1.25), memory=4),
        arm("tome", times(0.8), ratio=0.5, memory=6),
        arm("tome", times(0.5), ratio=0.75, memory=5),
        arm("both", times(1.0), ratio=0.5, memory=3.2),
        arm("plain", times(0.25), backend="predictor"),
        arm("tome", times(0.2), ratio=0.5, backend="predictor"),
    ]
    return case(arms, **fields)


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Makes the page, without plots, from the contents of results."""
    monkeypatch.setattr(speed_report, "PLOTS", {})

    def report(*results):
        files = [write(tmp_path / f"{name}.json", data) for name, data in zip("abc", results, strict=False)]
        return write_report(files, tmp_path)

    return report


def table_under(page, line):
    """The cells of the first table after a line, row by row, without its header."""
    rows = re.search(r"--- \|\n((\|.*\|\n)+)", page[page.index(line) :]).group(1)
    return [row.strip("| ").split(" | ") for row in rows.splitlines()]


def test_repetitions_show_the_noise(report):
    one, again = ([arm("plain", PLAIN), arm("tome", times(share), ratio=0.5)] for share in (0.5, 0.55))
    page = report(result([case(one)]), result([case(again)]))
    assert "\n- 1 speed-ups were measured in several runs, and differ between runs by up to +10.0 %:" in page
    assert "None of 2 merged arms is slower" in page
    slower = report(result([case([*one, arm("both", times(1.5), ratio=0.5)])]))
    assert "several runs" not in slower and "eager, which takes 1.50 times as long" in slower


def test_out_of_memory_and_other_reasons(report):
    failed = [arm("plain", [], status="out of memory"), arm("memory-efficient", [], status="error")]
    absent = arm("tome", [], ratio=0.5, backend="predictor", status="not measured", reason="in float32 only")
    page = report(result([case([*failed, arm("tome", times(0.8), ratio=0.5), absent], memory_limit_gb=2.5)]))
    assert [row[2] for row in table_under(page, "## sd15")] == ["OOM", "error", "16.0 [12.0–24.0]", "not measured"]
    assert "fit in memory where plain does not: sd15, one UNet pass, 512 px, batch 2, limit 2.5 GB." in page
    assert "- out of memory: the allocator failed: plain, eager\n" in page
    assert "- not measured: in float32 only: tomesd 0.5, predictor\n" in page
    assert "published" not in page  # there is no such page beside it


def test_sections_do_not_mix_models_settings_machines_or_repetitions(report):
    pipelines = [full_case(steps=steps, scope="pipeline", guidance_scale=2.0) for steps in (4, 20)]
    one, another = result([full_case(), full_case(model="sdxl"), *pipelines]), result([full_case()], machine="Another")
    page = report(one, another, result([full_case(), full_case()], threads=2))
    unet = "sd15, one UNet pass, float32"
    assert re.findall("^## (.*)", page, re.M) == [
        unet, "sdxl, one UNet pass, float32", "sd15, whole images, float32, 4 steps, guidance scale 2",
        "sd15, whole images, float32, 20 steps, guidance scale 2", f"{unet}, b.json", *[f"{unet}, c.json"] * 2,
    ]  # fmt: skip


def test_page_and_plots_are_written(tmp_path):
    contents = {"one half": result([full_case()]), "quality": {"kind": "quality"}}
    contents["b"] = result([full_case(size=size) for size in (768, 1024)])
    files = [write(tmp_path / "results" / f"{name}.json", data) for name, data in contents.items()]
    output = tmp_path / "reports" / "speed"
    page = write_report(files, output)
    assert (output / "speed.md").read_text(encoding="utf-8") == page
    assert "[one half.json](../../results/one%20half.json): Test CPU, cpu, threads: 1, cores: 2; paddlepaddle" in page
    assert "not speed results: [quality.json](../../results/quality.json) (kind 'quality')." in page
    images = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert sorted(images) == sorted(path.name for path in output.glob("*.png"))
    plots = ["against_size", "against_ratio", "by_method"]  # of one section, because there is one machine
    assert images == [f"speed_1_sd15_unet_float32_{plot}.png" for plot in plots]


@pytest.fixture
def frame(tmp_path):
    return lambda *cases: read_frame([write(tmp_path / "a.json", result(list(cases)))])[0]


def sized(size, share, batch=2):
    return case(
        [arm("plain", PLAIN, memory=8), arm("tome", times(share), ratio=0.5, memory=6)], size=size, batch=batch
    )


def test_plot_against_size(frame):
    arms = frame(sized(1024, 0.5), sized(512, 0.8), sized(768, 0.6), sized(512, 0.9, batch=4))
    figure = against_size(arms)
    time, memory = figure.axes
    assert figure.get_suptitle() == "Speed-up against size, sd15, one UNet pass"
    np.testing.assert_allclose(time.lines[0].get_xydata(), [[512, 1.25], [768, 1 / 0.6], [1024, 2.0]])
    np.testing.assert_allclose(memory.lines[0].get_ydata(), [6, 6, 6])
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["tomesd 0.5, eager, batch 2"]
    assert against_size(frame(sized(1024, 0.5), sized(512, 0.8))) is None, "two points"


@pytest.mark.parametrize(("memory", "panels"), [(8, 2), (None, 1)])
def test_plot_against_ratio(frame, memory, panels):
    arms = [
        arm("plain", PLAIN, memory=memory),
        arm("tome", times(0.8), ratio=0.25, max_downsample=2, memory=memory and 7),
        arm("tome", times(0.5), ratio=0.5, max_downsample=2, memory=memory and 6),
        arm("tome", times(0.3), ratio=0.5, max_downsample=4),  # another level
        arm("limit", times(0.4), ratio=0.5, max_downsample=2),
    ]
    figure = against_ratio(frame(case(arms)))
    assert figure.get_suptitle().endswith("sd15, one UNet pass, 512 px, batch 2") and len(figure.axes) == panels
    np.testing.assert_allclose(figure.axes[0].lines[0].get_xydata(), [[0, 1], [0.25, 1.25], [0.5, 2]])
    for axes in figure.axes[1:]:
        np.testing.assert_allclose(axes.lines[0].get_xydata(), [[0, 8], [0.25, 7], [0.5, 6]])
    assert against_ratio(frame(sized(512, 0.8))) is None


def test_plot_by_method(frame):
    windows, cells = {"window": 8}, {"merge_attn": "kv", "match": "grid"}

    def methods(size):
        eager = [arm("plain", PLAIN), arm("tome", times(0.5), ratio=0.5, merging=windows)]
        eager += [arm("tome", times(0.8), ratio=0.5), arm("tome", times(0.25), ratio=0.75, merging=cells)]
        return case([*eager, arm("limit", times(0.4), ratio=0.5)], size=size)

    [axes] = by_method(frame(methods(512), methods(1024))).axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([2, 2, 1.25, 1.25, 4, 4])
    names = ["tomesd 0.5, windows of 8", "tomesd 0.5", "ToDo 0.75, random dst"]
    assert axes.get_legend_handles_labels()[1] == [f"{name}, eager" for name in names]
    assert axes.get_xticklabels()[0].get_text() == "512 px\nbatch 2"
    assert by_method(frame(sized(512, 0.8), sized(1024, 0.5))) is None


def test_nothing_is_clipped_however_long_the_names_are(frame):
    windows = {"window": 16, "proportional": True}

    def long_names(size):
        arms = [arm("memory-efficient", times(1.1)), arm("both", times(0.6), ratio=0.5, merging=windows)]
        for nth, backend in enumerate(("eager", "predictor", "onnxruntime", "openvino")):
            arms.append(arm("plain", times(1 / (1 + nth)), backend=backend))
            for ratio in (0.5, 0.75):
                arms.append(arm("tome", times(0.8 / (1 + nth)), ratio=ratio, merging=windows, backend=backend))
        return case(arms, size=size)

    arms = frame(long_names(512), long_names(768), long_names(1024))
    for plot in (against_size, against_ratio, by_method):
        figure = plot(arms)
        assert clipped_texts(figure) == [] and overlapping_texts(figure) == []


@pytest.mark.parametrize(
    "data, message",
    [
        (result([], format=1), "has format 1"),
        ("{not json", "cannot be read"),
        ({"kind": "quality"}, r" \(kind 'quality'\): pass files that bench wrote"),
        ({"kind": "speed", "format": 3}, r"not a complete speed result.*cases"),
        (result([case([arm("plain", [1.0, 2.0, 3.0]), arm("tome", [1.0, 2.0], ratio=0.5)])]), r"seconds=\[1.0, 2.0\]"),
        (result([case([arm("plain", [])])]), r"seconds=\[\]"),
        ({k: v for k, v in result([]).items() if k != "rounds"}, "KeyError.*rounds"),
        (result([case([arm("plain", PLAIN, guess=1)])]), "is not a complete speed result"),
        (result([case([arm("plain", PLAIN, status="error")])]), "is 'error'"),
        (result([case([arm("plain", [1.0, 0.0, 2.0])])]), r"seconds=\[1.0, 0.0, 2.0\]"),
        (result([]), "no arm was measured"),
    ],
)
def test_broken_and_other_files_are_refused(tmp_path, data, message):
    with pytest.raises(ToMeConfigError, match=rf"speed\.json.*{message}"):
        write_report([write(tmp_path / "speed.json", data)], tmp_path / "report")
    assert not (tmp_path / "report").exists()
