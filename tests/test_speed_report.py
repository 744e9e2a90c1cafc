"""The report on speed, checked against figures worked out by hand."""

import re

import pytest
from speed_results import PLAIN, arm, case, result, times, write

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.evaluation.speed import speed_report as report_module
from ppdiffusers_tome.evaluation.speed.speed_report import write_report

SHARES = {"matching": 0.05, "merge": 0.02, "unmerge": 0.01}


def full_case(**fields):
    """All kinds of arms at ratios 0.5 and 0.75."""
    arms = [
        arm("plain", PLAIN, memory=8),
        arm("memory-efficient", times(1.25), memory=4),
        arm("tome", times(0.8), ratio=0.5, memory=6, shares=SHARES),
        arm("tome", times(0.5), ratio=0.75, memory=5),
        arm("both", times(1.0), ratio=0.5, memory=3.2),
        arm("both", times(1.5), ratio=0.75, memory=3),
        arm("limit", times(0.78), ratio=0.5),
        arm("limit", times(0.4), ratio=0.75),
        arm("built-in", times(1.6), ratio=0.5),
        arm("plain", times(0.25), backend="predictor"),
        arm("tome", times(0.2), ratio=0.5, backend="predictor"),
        arm("plain", times(0.75), backend="PyTorch"),
        arm("tome", times(0.6), ratio=0.5, backend="PyTorch"),
    ]
    return case(arms, **fields)


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Makes the page, without plots, from the contents of results."""
    monkeypatch.setattr(report_module, "_plots", lambda arms, index: [])

    def report(*results):
        files = [write(tmp_path / f"{name}.json", data) for name, data in zip("abc", results, strict=False)]
        return write_report(files, tmp_path)

    return report


def table_under(page, line):
    """The cells of the first table after a line, row by row, without its header."""
    rows = re.search(r"--- \|\n((\|.*\|\n)+)", page[page.index(f"{line}\n") :]).group(1)
    return [row.strip("| ").split(" | ") for row in rows.splitlines()]


def test_time_and_memory_by_size_and_batch(report):
    page = report(result([full_case(), full_case(size=1024)]))
    row = ["20.0", "16.0 (−20.0 %)", "25.0 (+25.0 %)", "20.0 (+0.0 %)"]
    rows = table_under(page, "### Time by size and batch, ratio 0.5, eager")
    assert rows == [["512", "2", *row], ["1024", "2", *row]]
    assert "| size, px | batch | plain, s a pass | ToMe, s a pass | memory-efficient, s a pass | ToMe + " in page
    memory = table_under(page, "### Peak memory by size and batch, ratio 0.5, eager")
    assert memory[0] == ["512", "2", "8.00", "6.00 (−25.0 %)", "4.00 (−50.0 %)", "3.20 (−60.0 %)"]
    rows = table_under(page, "### Time by size and batch, ratio 0.5, predictor")
    assert rows[0] == ["512", "2", "5.00", "4.00 (−20.0 %)"]


def test_time_and_memory_by_ratio(report):
    page = report(result([full_case(batch=1), full_case(batch=10)]))
    # size, batch, ratio; seconds of ToMe, ToMe + memory-efficient and the limit; GB of the first two
    one_case = [
        ["0", "20.0", "25.0 (0.80×)", "–", "8.00", "4.00 (−50.0 %)"],
        ["0.5", "16.0 (1.25×)", "20.0 (1.00×)", "15.6 (1.28×)", "6.00 (−25.0 %)", "3.20 (−60.0 %)"],
        ["0.75", "10.0 (2.00×)", "30.0 (0.67×)", "8.00 (2.50×)", "5.00 (−37.5 %)", "3.00 (−62.5 %)"],
    ]
    rows = [["512", batch, *row] for batch in ("1", "10") for row in one_case]
    assert table_under(page, "### Time and memory by ratio, eager") == rows


def test_ratios_are_medians_within_rounds(report):
    # plain over merged: 10/9, 20/20, 40/42; of the medians it would be 20/20
    page = report(result([case([arm("plain", PLAIN), arm("tome", [9.0, 20.0, 42.0], ratio=0.5, memory=6)])]))
    assert table_under(page, "parity</summary>")[1] == [
        "512 px, batch 2", "ToMe 0.5, eager", "2048 of 4096", "20 [14.5–31]", "1.00× [0.98–1.06]", "6.00", "1.00",
        "2.0e-06, its definition",
    ]  # fmt: skip


def test_out_of_memory(report):
    failed = [arm("plain", [], status="out of memory"), arm("memory-efficient", [], status="error")]
    page = report(result([case([*failed, arm("tome", times(0.8), ratio=0.5)], memory_limit_gb=2.5)]))
    rows = table_under(page, "### Time by size and batch, ratio 0.5, eager")
    assert rows == [["512", "2", "2.5 GB", "OOM", "16.0", "error"]]
    assert "published" not in page  # there is no such page beside it
    assert "fit in memory where plain does not: sd15, one UNet pass, 512 px, batch 2, limit 2.5 GB." in page
    assert "- out of memory: the allocator failed: plain, eager\n" in page


def test_limit_shares_and_peers(report):
    page = report(result([full_case()]))
    name = ["512 px, batch 2", "ToMe 0.5, eager"]
    assert table_under(page, "### Time above the free-merge limit, target 3 %") == [
        [*name, "+2.6 %", "reached"],
        ["512 px, batch 2", "ToMe 0.75, eager", "+25.0 %", "**not reached**"],
    ]
    assert table_under(page, "### Share of the merging blocks' time") == [[*name, "5.0 %", "2.0 %", "1.0 %", "8.0 %"]]
    assert "sizes" not in page  # an older result has no such share
    built_in = table_under(page, "### Against ppdiffusers' built-in ToMe")
    assert built_in == [[*name, "32.0", "16.0", "2.00× [2.00–2.00]"]]
    assert [row[1:] for row in table_under(page, "### Against PyTorch with diffusers and tomesd")] == [
        ["plain, eager", "15.0", "20.0", "0.75× [0.75–0.75]"],
        ["ToMe 0.5, eager", "12.0", "16.0", "0.75× [0.75–0.75]"],
        ["plain, predictor", "15.0", "5.00", "3.00× [3.00–3.00]"],
        ["ToMe 0.5, predictor", "12.0", "4.00", "3.00× [3.00–3.00]"],
    ]
    assert [row[1:] for row in table_under(page, "### Predictor against eager")] == [
        ["plain, predictor", "20.0", "5.00", "4.00× [4.00–4.00]"],
        ["ToMe 0.5, predictor", "16.0", "4.00", "4.00× [4.00–4.00]"],
    ]


def test_slower_arms_are_listed(report):
    page = report(result([full_case()]))
    listed = page[page.index("### Slower than without merging") :].split("###")[1]
    assert re.findall(r"- (.*)", listed) == [
        "512 px, batch 2: ToMe + memory-efficient 0.75, eager takes 1.50 times as long as plain",
        "512 px, batch 2: ToMe + memory-efficient 0.75, eager takes 1.20 times as long as memory-efficient attention",
    ]
    assert "**Where merging is slower** than plain or the same attention unmerged: 1 of 5 merged arms" in page
    page = report(result([case([arm("plain", PLAIN), arm("tome", times(0.8), ratio=0.5)])]))
    assert "None: no merged arm" in page and "None of 1 merged arms is slower" in page
    page = report(result([case([arm("plain", PLAIN), arm("tome", [9.0, 20.4, 41.0], ratio=0.5)])]))
    assert "takes 1.02 times as long as plain (within the noise" in page


def test_summary(report):
    page = report(result([full_case(), full_case(size=1024)]))
    assert "- ToMe is 1.25× to 2.00× as fast as plain in 6 arms; the fastest is sd15, one UNet pass, 512 px" in page
    assert "- 2 of 4 merged arms take at most 3 % longer than the free-merge limit" in page and "+25.0 %" in page
    assert "- Merging changes peak memory by −20 % to −38 % against the same attention unmerged" in page
    comparisons = table_under(page, "| speed-up of | backend | over all cases | slower in |")
    assert ["ToMe over plain", "eager", "1.25× to 2.00×", "0 of 4 arms"] in comparisons


def test_noise_is_called_noise(report):
    faster = [arm("plain", PLAIN), arm("tome", times(0.5), ratio=0.5), arm("limit", times(0.625), ratio=0.5)]
    again = [arm("plain", PLAIN), arm("tome", times(0.55), ratio=0.5)]
    page = report(result([case(faster)]), result([case(again)]))
    assert (
        "the most is −20.0 %, in sd15, one UNet pass, 512 px, batch 2, ToMe 0.5, eager. 1 are below it by noise"
        in page
    )
    assert "\n- 1 speed-ups were measured in several runs, and differ between runs by up to +10.0 %:" in page
    assert "no merging can be faster" not in page
    assert "several runs" not in report(result([case(again)])) and "by noise" not in report(result([full_case()]))


def test_sections_do_not_mix_models_settings_machines_or_repetitions(report):
    drawn = [full_case(steps=steps, scope="pipeline", guidance_scale=2.0) for steps in (4, 20)]
    one, another = result([full_case(), full_case(model="sdxl"), *drawn]), result([full_case()], machine="Another CPU")
    page = report(one, another, result([full_case(), full_case()], threads=2))
    unet = "sd15, one UNet pass, float32"
    assert re.findall("^## (.*)", page, re.M) == [
        unet, "sdxl, one UNet pass, float32", "sd15, whole images, float32, 4 steps, guidance scale 2",
        "sd15, whole images, float32, 20 steps, guidance scale 2", f"{unet}, b.json", *[f"{unet}, c.json"] * 2,
    ]  # fmt: skip


def test_reasons_of_arms_that_were_not_measured(report):
    absent = arm("plain", [], backend="PyTorch", status="not measured", reason="torch is not installed")
    page = report(result([case([arm("plain", PLAIN), absent]), case([absent], size=64)]))
    assert "### Not measured\n\n- not measured: torch is not installed: plain, PyTorch\n" in page
    assert table_under(page, "### Time by size and batch, ratio 0.5, eager") == [["512", "2", "20.0"]]
    assert "### Against PyTorch" not in page and "### Slower" not in page  # nothing was merged


def test_levels_have_their_own_tables(report):
    levels = [("tome", 0.8, 1), ("tome", 0.4, 2), ("limit", 0.32, 2)]
    arms = [arm(name, times(share), ratio=0.5, max_downsample=level) for name, share, level in levels]
    page = report(result([case([arm("plain", PLAIN), *arms])]))
    for level, cell in ((1, "16.0 (−20.0 %)"), (2, "8.00 (−60.0 %)")):
        heading = f"### Time by size and batch, ratio 0.5, eager, max_downsample {level}"
        assert table_under(page, heading) == [["512", "2", "20.0", cell]]
    [limit] = table_under(page, "### Time above the free-merge limit, target 3 %")
    assert limit[1:] == ["ToMe 0.5, max_downsample 2, eager", "+25.0 %", "**not reached**"]


def test_methods(report):
    """Each has its own rows, its own limit, and the built-in ToMe and tomesd at the same ratio beside it."""
    cells, windows = {"merge_attn": "kv", "match": "grid"}, {"window": 16}
    shares = {**SHARES, "sizes": 0.03}
    arms = [
        arm("plain", PLAIN, memory=8),
        arm("tome", times(0.8), ratio=0.5, memory=6),
        arm("tome", times(0.5), ratio=0.5, merging=windows, memory=6, shares=shares),
        arm("tome", times(0.4), ratio=0.75, merging=cells, memory=5),
        arm("built-in", times(1.6), ratio=0.5),
        arm("limit", times(0.49), ratio=0.5),
        arm("limit", times(0.2), ratio=0.75),
        arm("limit", times(0.32), ratio=0.75, merging={"merge_attn": "kv"}),
        arm("plain", times(0.75), backend="PyTorch"),
        arm("tome", times(0.6), ratio=0.5, backend="PyTorch"),
    ]
    page = report(result([case(arms)]))
    assert "*windows of 16* compare tokens" in page and "*windows of 16* compare" not in report(result([full_case()]))
    names = ["ToMe 0.5, eager", "ToMe 0.5, windows of 16, eager", "keys and values 0.75, 2×2 cells, eager"]
    rows = table_under(page, "### Time and memory by method, eager")
    assert [row[1:] for row in rows[:4]] == [
        ["plain, eager", "20.0", "8.00"],
        [names[0], "16.0 (1.25×)", "6.00 (−25.0 %)"],
        [names[1], "10.0 (2.00×)", "6.00 (−25.0 %)"],
        [names[2], "8.00 (2.50×)", "5.00 (−37.5 %)"],
    ]
    assert "### Time by size and batch" not in page
    above = [row[1:] for row in table_under(page, "### Time above the free-merge limit, target 3 %")]
    assert above == [
        [names[0], "+63.3 %", "**not reached**"],
        [names[1], "+2.0 %", "reached"],
        [names[2], "+25.0 %", "**not reached**"],
    ]
    assert table_under(page, "### Share of the merging blocks' time")[0][1:] == [
        names[1], "5.0 %", "2.0 %", "1.0 %", "3.0 %", "11.0 %",
    ]  # fmt: skip
    built_in = [row[1:] for row in table_under(page, "### Against ppdiffusers' built-in ToMe")]
    assert [(row[0], row[-1]) for row in built_in] == [
        (names[0], "2.00× [2.00–2.00]"),
        (names[1], "3.20× [3.20–3.20]"),
    ]
    torch = [row[1] for row in table_under(page, "### Against PyTorch with diffusers and tomesd")]
    assert torch == ["plain, eager", *names[:2]]
    assert "- ToMe, windows of 16 is 2.00× as fast as plain in 1 arms" in page
    comparisons = table_under(page, "| speed-up of | method | backend | over all cases | slower in |")
    assert ["ToMe over plain", "keys and values, 2×2 cells", "eager", "2.50×", "0 of 1 arms"] in comparisons
    sizes = table_under(page, "| model | size, px | method | speed-up over plain, eager |")
    assert sizes[1] == ["sd15, one UNet pass", "512", "ToMe 0.5, windows of 16", "2.00×"]


def test_one_method_other_than_tomesd_is_named(report):
    arms = [arm("tome", times(0.5), ratio=0.5, merging={"proportional": True}), arm("limit", times(0.4), ratio=0.5)]
    page = report(result([case([arm("plain", PLAIN), *arms])]))
    assert "| size, px | batch | plain, s a pass | ToMe, proportional, s a pass |" in page
    [limit] = table_under(page, "### Time above the free-merge limit, target 3 %")
    assert limit[1:3] == ["ToMe 0.5, proportional, eager", "+25.0 %"]


def test_page_and_plots_are_written(tmp_path):
    contents = {"one half": result([full_case()]), "b": result([full_case(size=1024)]), "quality": {"kind": "quality"}}
    files = [write(tmp_path / "results" / f"{name}.json", data) for name, data in contents.items()]
    output = tmp_path / "reports" / "speed"
    write(output / "published_figures.md", "")
    page = write_report(files, output)
    assert (output / "speed.md").read_text(encoding="utf-8") == page
    assert "[one half.json](../../results/one%20half.json): Test CPU, cpu, threads: 1, cores: 2; paddlepaddle" in page
    assert "commit abc1234; 3 rounds; `python -m ppdiffusers_tome bench --quick`" in page
    assert "not speed results: [quality.json](../../results/quality.json) (kind 'quality')." in page
    images = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert sorted(images) == sorted(path.name for path in output.glob("*.png"))
    assert {re.sub("speed_1_sd15_unet_float32_|.png", "", name) for name in images} == {
        "distance_from_limit", "eager_against_predictor", "speed_up_against_size_eager",
        "speed_up_against_size_predictor", "against_ratio_eager",
    }  # fmt: skip
    assert page.count("\n## ") == 1  # one machine, one section
    assert "hardware: [published_figures.md](published_figures.md)." in page


def test_without_a_speed_result_nothing_is_written(tmp_path):
    other = write(tmp_path / "quality.json", {"kind": "quality"})
    with pytest.raises(ToMeConfigError, match=r"no speed result in .*quality\.json \(kind 'quality'\)"):
        write_report([other], tmp_path / "report")
    with pytest.raises(ToMeConfigError, match=r"nowhere\.json cannot be read"):
        write_report([tmp_path / "nowhere.json"], tmp_path / "report")
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    "data, message",
    [
        (result([], format=1), "has format 1"),
        ("{not json", "cannot be read"),
        ({"kind": "speed", "format": 3}, r"not a complete speed result.*cases"),
        (result([case([arm("plain", [1.0, 2.0, 3.0]), arm("tome", [1.0, 2.0], ratio=0.5)])]), r"seconds=\[1.0, 2.0\]"),
        (result([case([arm("plain", [])])]), r"seconds=\[\]"),
        (result([case([arm("plain", PLAIN, status="error")])]), "is 'error'"),
        (result([case([arm("plain", [1.0, 0.0, 2.0])])]), r"seconds=\[1.0, 0.0, 2.0\]"),
        (result([]), "no arm was measured"),
    ],
)
def test_broken_files_are_refused(tmp_path, data, message):
    with pytest.raises(ToMeConfigError, match=rf"speed\.json.*{message}"):
        write_report([write(tmp_path / "speed.json", data)], tmp_path / "report")
    assert not (tmp_path / "report").exists()


def operations(**fields):
    """A result of `bench ops`."""
    methods = [
        {
            "method": name,
            "ratio": 0.5,
            "milliseconds": dict.fromkeys(("plan", "merge", "unmerge", "merge + unmerge"), milliseconds),
            "times_faster": dict.fromkeys(("plan", "merge", "unmerge", "merge + unmerge"), 30.0 / milliseconds),
        }
        for name, milliseconds in (("global", 20.0), ("windows of 8", 3.0), ("built-in", 30.0))
    ]
    plans = [
        {"method": name, "side": side, "scores_gb": gigabytes, "milliseconds": milliseconds}
        for name, side, gigabytes, milliseconds in (
            ("global", 64, 0.05, 40.0), ("global", 512, 51.5, None),
            ("windows of 8", 64, 0.001, 4.096), ("windows of 8", 512, 0.1, 262.144),
        )
    ]  # fmt: skip
    growth = {"channels": 320, "rounds": 5, "limit_gb": 8.0, "plans": plans}
    about = {"kind": "operations", "format": 3, "command": "bench ops", "commit": "abc1234", "rounds": 20}
    environment = {"machine": "Test CPU", "threads": "1"}
    case = {"batch": 2, "height": 64, "width": 64, "channels": 320, "ratio": 0.5}
    return {**about, "environment": environment, "case": case, "difference": 1e-7, "methods": methods,
            "growth": growth, **fields}  # fmt: skip


def test_page_of_operations(tmp_path):
    file, output = write(tmp_path / "results" / "ops.json", operations()), tmp_path / "report"
    page = report_module.write_operations(file, output)
    assert (output / "ops.md").read_text(encoding="utf-8") == page
    assert "- [ops.json](../results/ops.json): Test CPU" in page and "B=2, 64×64 tokens, C=320, ratio 0.5" in page
    rows = table_under(page, "| method | plan | merge | unmerge | merge + unmerge |")
    assert rows == [
        ["global", *["20.00 (1.5×)"] * 4],
        ["windows of 8", *["3.00 (10.0×)"] * 4],
        ["built-in", *["30.00"] * 4],
    ]
    growth = table_under(page, "| tokens | global | windows of 8 |")
    assert growth == [
        ["64×64", "40.00 (9.766)", "4.10 (1.000)"],
        ["512×512", "does not fit: 51.5 GB", "262.14 (1.000)"],
    ]
    assert "](ops_growth.png)" in page and (output / "ops_growth.png").exists()
    without = operations(growth={"channels": 320, "rounds": 5, "limit_gb": 8.0, "plans": []})
    page = report_module.write_operations(write(tmp_path / "small.json", without), output)
    assert "small_growth" not in page and "microseconds" not in page
    with pytest.raises(ToMeConfigError, match=r"old\.json has format 2"):
        report_module.write_operations(write(tmp_path / "old.json", operations(format=2)), output)
