"""The report on speed, held to figures that are worked out by hand."""

import json
import re

import pytest
from speed_results import arm, case, result

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.evaluation.speed.results import parse, spread, within_rounds
from ppdiffusers_tome.evaluation.speed.tables import write_report

PLAIN = [10.0, 20.0, 40.0]
SHARES = {"matching": 0.05, "merge": 0.02, "unmerge": 0.01}


def times(share, base=PLAIN):
    return [share * taken for taken in base]


def whole_case(**more):
    """All arms at ratios 0.5 and 0.75, with round factors."""
    return case(
        [
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
        ],
        **more,
    )


@pytest.fixture
def write(tmp_path):
    def write(data, name="speed.json"):
        path = tmp_path / "results" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return path

    return write


def table_under(report, heading):
    """The rows of the first table below a heading, as lists of cells."""
    after = report[report.index(f"{heading}\n") :]
    return [row.strip("| ").split(" | ") for row in re.search(r"(\|.*\|\n)+", after).group().strip().splitlines()]


def test_ratios_are_taken_within_rounds():
    # of the medians: 20 / 10 = 2; within rounds: 10/10, 20/4, 40/20 = 1, 5, 2
    assert within_rounds([10, 20, 40], [10, 4, 20]) == (2, 1.5, 3.5)
    assert within_rounds([10, 20, 60], [10, 4, 20]) == (3, 2, 4)
    assert spread([7.0]) == (7, 7, 7)


def test_diffusers_layout(write):
    report = write_report([write(result([whole_case()]))], None)
    assert table_under(report, "### Time by size and batch, ratio 0.5, eager") == [
        ["size, px", "batch", "plain, s a pass", "ToMe, s a pass", "memory-efficient attention, s a pass",
         "ToMe + memory-efficient, s a pass"],
        ["---"] * 6,
        ["512", "2", "20.0", "16.0 (−20.0 %)", "25.0 (+25.0 %)", "20.0 (+0.0 %)"],
    ]  # fmt: skip
    memory = table_under(report, "### Peak memory by size and batch, ratio 0.5, eager")
    assert memory[2] == ["512", "2", "8.00", "6.00 (−25.0 %)", "4.00 (−50.0 %)", "3.20 (−60.0 %)"]
    assert table_under(report, "### Time by size and batch, ratio 0.5, predictor")[2] == [
        "512", "2", "5.00", "4.00 (−20.0 %)",
    ]  # fmt: skip


def test_out_of_memory_is_told_as_such(write):
    arms = [
        arm("plain", [], status="out of memory"),
        arm("memory-efficient", [], status="error"),
        arm("tome", times(0.8), ratio=0.5),
    ]
    report = write_report([write(result([case(arms, memory_limit_gb=2.5)]))], None)
    row = table_under(report, "### Time by size and batch, ratio 0.5, eager")[2]
    assert row == ["512", "2", "2.5 GB", "OOM", "16.0", "error"]
    assert "merged arms fit where plain does not: sd15, one UNet pass, 512 px, batch 2, limit 2.5 GB" in report
    assert "out of memory: Allocator says no" in report


def test_ppdiffusers_layout(write):
    report = write_report([write(result([whole_case(), whole_case(batch=4)]))], None)
    rows = table_under(report, "### Time by batch, 512 px, ratio 0.5 / 0.75, eager")
    assert rows[2:] == [[batch, "20.0", "16.0 / 10.0", "25.0", "20.0 / 30.0"] for batch in ("2", "4")]


def test_tomesd_layout_with_their_figures_beside(write):
    report = write_report([write(result([whole_case()]))], None)
    rows = table_under(report, "### Time and memory by ratio, 512 px, batch 2, eager")
    assert rows[0][-2:] == [f"*theirs, RTX 4090, another machine*: {unit} a picture" for unit in ("s", "GB")]
    assert rows[2:] == [
        ["0", "20.0", "8.00", "25.0 (0.80×)", "4.00 (−50.0 %)", "–", "3.09", "3.41"],
        ["0.5", "16.0 (1.25×)", "6.00 (−25.0 %)", "20.0 (1.00×)", "3.20 (−60.0 %)", "15.6 (1.28×)", "1.65 (1.87×)",
         "0.89 (−73.9 %)"],
        ["0.75", "10.0 (2.00×)", "5.00 (−37.5 %)", "30.0 (0.67×)", "3.00 (−62.5 %)", "8.00 (2.50×)", "–", "–"],
    ]  # fmt: skip
    small = write_report([write(result([whole_case(size=128)]))], None)
    assert "theirs" not in str(table_under(small, "### Time and memory by ratio, 128 px, batch 2, eager"))


def test_original_figures_stand_below_ours_and_are_marked(write):
    report = write_report([write(result([whole_case()]))], None)
    theirs = table_under(report, "#### Theirs, on an A100 and a V100: another machine, never ours")
    assert theirs[2] == ["A100", "512", "10", "6.88", "5.26 (−23.55 %)", "4.69 (−31.83 %)"]
    assert {row[1] for row in theirs[2:]} == {"512"}
    originals = report[report.index("## The original figures: theirs") :]
    assert "2.1 (−57.92 %)" in originals and "prints the time saved, as +23.55 %, and" in originals
    headings = {re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in report.splitlines()
                if line.startswith("#")}  # fmt: skip
    linked = set(re.findall(r"\]\(#(.*?)\)", report))
    assert linked and linked <= headings


def test_distance_shares_and_peers(write):
    report = write_report([write(result([whole_case()]))], None)
    distances = table_under(report, "### Distance from the free-merge limit, target 3 %")
    assert distances[2] == ["512 px, batch 2", "ToMe, eager", "+2.6 %, reached", "+25.0 %, **not reached**"]
    assert table_under(report, "### Share of the merging blocks' time")[2:] == [
        ["512 px, batch 2", "ToMe 0.5, eager", "5.0 %", "2.0 %", "1.0 %", "8.0 %"]
    ]
    assert table_under(report, "### Against ppdiffusers' built-in ToMe")[2] == [
        "512 px, batch 2", "ToMe 0.5, eager", "16.0", "32.0", "0.62×", "2.00× [2.00–2.00]",
    ]  # fmt: skip
    assert table_under(report, "### Against PyTorch with diffusers and tomesd")[3] == [
        "512 px, batch 2", "tomesd 0.5", "12.0", "16.0", "0.75× [0.75–0.75]", "4.00", "3.00× [3.00–3.00]",
    ]  # fmt: skip
    assert table_under(report, "### Predictor against eager")[3] == [
        "512 px, batch 2", "ToMe 0.5", "16.0", "4.00", "4.00× [4.00–4.00]", "1.25×",
    ]  # fmt: skip


def test_what_is_slower_is_listed_and_summed_up(write):
    report = write_report([write(result([whole_case()]))], None)
    listed = report[report.index("### Slower than without merging") :].split("###")[1]
    assert re.findall(r"- (.*)", listed) == [
        "512 px, batch 2: ToMe + memory-efficient 0.75, eager takes 1.50 times as long as plain",
        "512 px, batch 2: ToMe + memory-efficient 0.75, eager takes 1.20 times as long as memory-efficient",
    ]
    assert "**Where merging loses:** 1 of 5 merged arms are slower" in report
    good = result([case([arm("plain", PLAIN), arm("tome", times(0.8), ratio=0.5)])])
    report = write_report([write(good)], None)
    assert "None: no merged arm took longer" in report
    assert "No merged arm of 1 is slower" in report


def test_a_slow_arm_within_the_spread_is_said_to_be_so(write):
    arms = [arm("plain", PLAIN), arm("tome", [9.0, 20.4, 41.0], ratio=0.5)]
    assert "takes 1.02 times as long as plain (within the spread" in write_report([write(result([case(arms)]))], None)


def test_the_summary_is_computed_and_short(write):
    report = write_report([write(result([whole_case(), whole_case(size=1024)]))], None)
    summary = report.split("\n\n")[1].splitlines()
    assert len(summary) <= 10
    assert summary[0].startswith("- ToMe against plain: 1.25× to 2.00× over 6 merged arms; most in sd15")
    assert "- Within 3 % of the free-merge limit: 2 of 4 merged arms; furthest is" in "\n".join(summary)
    assert "By size at ratio 0.5, eager: sd15 (unet) 512 px 1.25×, 1024 px 1.25×." in "\n".join(summary)


def test_every_figure_has_spread_memory_and_parity(write):
    seconds = [9.0, 20.0, 42.0]
    arms = [arm("plain", PLAIN), arm("tome", seconds, ratio=0.5, memory=6)]
    report = write_report([write(result([case(arms)]))], None)
    row = table_under(
        report, "<details><summary>Every figure: spread, memory, multiply-accumulates, parity</summary>"
    )[3]
    # plain over merged: 10/9, 1, 40/42
    assert row == ["512 px, batch 2", "ToMe 0.5, eager", "2048 of 4096", "20 [14.5–31]", "1.00× [0.98–1.06]", "6.00",
                   "1.00", "2.0e-06, its definition"]  # fmt: skip


def test_it_is_written_with_its_plots_and_links_that_lead_somewhere(write, tmp_path):
    first = write(result([whole_case()]), "one half.json")
    second = write(result([whole_case(size=1024)]), "other.json")
    output = tmp_path / "reports" / "speed"
    report = write_report([first, second], output)
    assert (output / "speed.md").read_text(encoding="utf-8") == report
    assert (
        "[one half.json](../../results/one%20half.json): Test CPU, cpu, threads: 1, cores: 2; paddlepaddle 2.6.2"
        in report
    )
    assert "commit abc1234; 3 rounds; `python -m ppdiffusers_tome bench --quick`" in report
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", report)
    assert sorted(pictures) == sorted(path.name for path in output.glob("*.png"))
    assert {re.sub("speed_1_sd15_unet_float32_|.png", "", name) for name in pictures} == {
        "distance_from_limit", "eager_against_predictor", "speed_up_against_size_eager",
        "speed_up_against_size_predictor", "against_ratio_eager",
    }  # fmt: skip
    assert report.count("## sd15, one UNet pass, float32") == 1  # one machine, one section


def test_models_and_machines_are_not_mixed(write):
    files = [
        write(result([whole_case(), whole_case(scope="block"), whole_case(model="sdxl")]), "a.json"),
        write(result([whole_case()], machine="Another CPU"), "b.json"),
        write(result([whole_case()], threads=2), "c.json"),
    ]
    headings = re.findall("^## (.*)", write_report(files, None), re.M)
    assert headings[:5] == [
        "sd15, one UNet pass, float32", "sd15, one top-level block, float32", "sdxl, one UNet pass, float32",
        "sd15, one UNet pass, float32, b.json", "sd15, one UNet pass, float32, c.json",
    ]  # fmt: skip


def test_what_was_measured_twice_stands_in_two_sections(write):
    files = [write(result([whole_case()]), name) for name in ("a.json", "b.json")]
    headings = re.findall("^## (.*)", write_report(files, None), re.M)
    assert headings[:2] == ["sd15, one UNet pass, float32", "sd15, one UNet pass, float32, b.json"]


def test_what_was_not_measured_is_told_with_its_reason(write):
    absent = arm("plain", [], backend="PyTorch", status="not measured", reason="no torch here")
    report = write_report([write(result([case([arm("plain", PLAIN), absent])]))], None)
    assert "### Not measured\n\n- not measured: no torch here: plain, PyTorch\n" in report
    assert "### Against PyTorch" not in report
    assert "### Slower" not in report  # nothing was merged


def test_levels_are_tables_of_their_own(write):
    deep = [
        arm("tome", times(0.4), ratio=0.5, max_downsample=2),
        arm("limit", times(0.38), ratio=0.5, max_downsample=2),
    ]
    given = case([arm("plain", PLAIN), arm("tome", times(0.8), ratio=0.5, max_downsample=1), *deep])
    report = write_report([write(result([given]))], None)
    for level, cell in ((1, "16.0 (−20.0 %)"), (2, "8.00 (−60.0 %)")):
        heading = f"### Time by size and batch, ratio 0.5, eager, max_downsample {level}"
        assert table_under(report, heading)[2] == ["512", "2", "20.0", cell]


def test_other_kinds_are_skipped_by_name(write):
    files = [write(result([whole_case()])), write({"kind": "quality"}, "q.json"), write([1], "list.json")]
    report = write_report(files, None)
    assert re.search(
        r"no speed results:\n\[q\.json\]\(.*\) \(kind 'quality'\), \[list\.json\]\(.*\) \(no kind\)", report
    )


def test_no_speed_result_is_an_error_and_writes_nothing(write, tmp_path):
    with pytest.raises(ToMeConfigError, match=r"No speed result.*q\.json \(kind 'quality'\)"):
        write_report([write({"kind": "quality"}, "q.json")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "data, named",
    [
        (result([], format=7), r"format=7 is not known, only 1"),
        ("{not json", r"no result can be read"),
        ({"kind": "speed", "format": 1}, r"not a whole speed result, KeyError\('cases'\)"),
        (
            result([case([arm("plain", [1.0, 2.0, 3.0]), arm("tome", [1.0, 2.0], ratio=0.5)])]),
            r"ToMe 0.5, eager is 'measured' and has seconds=\[1.0, 2.0\]: 3 of them",
        ),
        (result([case([arm("plain", [])])]), r"seconds=\[\]: a number of them"),
        (result([case([arm("plain", PLAIN), arm("tome", PLAIN, ratio=0.5, status="error")])]), r"is 'error' and has"),
        (result([case([arm("plain", [1.0, 0.0, 2.0])])]), r"each above 0"),
    ],
)
def test_broken_files_are_refused(write, data, named):
    with pytest.raises(ToMeConfigError, match=rf"speed\.json: .*{named}"):
        write_report([write(data)], None)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ToMeConfigError, match=r"nowhere\.json: no result can be read"):
        write_report([tmp_path / "nowhere.json"], None)


def test_identity_of_case_and_arm():
    [parsed] = parse(result([whole_case()]), "test").cases
    assert len({each.identity for each in parsed.arms}) == len(parsed.arms)
    limit = next(each for each in parsed.arms if each.arm == "limit")
    assert parsed.limit(parsed.find("tome", "eager", 0.5)) is limit
    assert parsed.limit(parsed.find("both", "eager", 0.5)) is None  # the limit was measured in plain attention
