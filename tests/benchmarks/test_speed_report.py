"""The report on speed, checked against figures worked out by hand."""

import pytest
from lab.speed.speed_report import write_report
from speed_results import PLAIN, arm, case, result, times, write

from ppdiffusers_tome.errors import ToMeConfigError


def full_case(**fields):
    """Arms of two backends, and two ratios."""
    arms = [
        arm(PLAIN, memory=8),
        arm(times(1.25), attention="slicing", memory=4),
        arm(times(0.8), 0.5, memory=6),
        arm(times(0.5), 0.75, memory=5),
        arm(times(1.0), 0.5, attention="slicing", memory=3.2),
        arm(times(0.25), backend="predictor"),
        arm(times(0.2), 0.5, backend="predictor"),
    ]
    return case(arms, **fields)


@pytest.fixture
def report(tmp_path):
    """Makes the page from the contents of results."""

    def report(*results):
        files = [write(tmp_path / f"{name}.json", data) for name, data in zip("abc", results, strict=False)]
        return write_report(files, tmp_path)

    return report


def cells(page):
    """The cells of the table, row by row, with its header."""
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("|")]
    return [rows[0], *rows[2:]]


def test_repetitions_show_the_noise(report):
    one, again = ([arm(PLAIN), arm(times(share), 0.5)] for share in (0.5, 0.55))
    page = report(result([case(one)]), result([case(again)]))
    assert "+10.0 %" in page
    slower = report(result([case([*one, arm(times(1.5), 0.5, attention="slicing")])]))
    assert "+10.0 %" not in slower and "1.50 times" in slower and "1.50 times" not in page


def test_table_has_each_arm_in_each_backend(report):
    header, *rows = cells(report(result([full_case()]), result([full_case(size=768)], machine="Another")))
    assert header == ["result", "case", "arm", "eager", "predictor"]
    plain, efficient, half, most, both, again, *_ = rows
    assert plain == ["1", "sd15, one UNet pass, 512 px, batch 2", "plain", "20.0 s, 8.00 GB", "5.00 s"]
    assert efficient[2:] == ["memory-efficient", "25.0 s, **0.80×** [0.80–0.80], 4.00 GB", "–"]
    assert half[2:] == ["tomesd 0.5", "16.0 s, 1.25× [1.25–1.25], 6.00 GB", "4.00 s, 1.25× [1.25–1.25]"]
    assert both[3] == "20.0 s, no difference [1.00–1.00], 3.20 GB"
    assert (most[2], both[2]) == ("tomesd 0.75", "tomesd 0.5 + memory-efficient")
    assert again[:3] == ["2", "sd15, one UNet pass, 768 px, batch 2", "plain"] and len(rows) == 10


def test_the_gain_and_its_quartiles_are_of_the_ratios_within_the_rounds(report):
    """The quotient of the medians, 1.6, is not even between these quartiles."""
    page = report(result([case([arm([2.0, 9.0, 4.0]), arm([1.0, 3.0, 2.5], 0.5)])]))
    assert cells(page)[2][3] == "2.50 s, 2.00× [1.80–2.50]"


def test_arms_that_failed_have_their_reasons(report):
    failed = [arm(PLAIN), arm([], attention="slicing", status="error")]
    page = report(result([case([*failed, arm([], 0.5, status="error", reason="too slow")])]))
    assert [row[3:] for row in cells(page)[1:]] == [["20.0 s"], ["error"], ["error"]]
    reasons = {"memory-efficient, eager": "the allocator failed", "tomesd 0.5, eager": "too slow"}
    for arm_name, reason in reasons.items():
        assert any(arm_name in line and reason in line for line in page.splitlines())


def test_cases_are_not_mixed(report):
    one = result([full_case(), full_case(model="sdxl"), full_case(scope="one block")])
    page = report(one, result([full_case(), full_case()], threads=2))
    rows = [row for row in cells(page)[1:] if row[0]]
    sizes = "512 px, batch 2"
    assert rows == [
        ["1", f"sd15, one UNet pass, {sizes}", *rows[0][2:]],
        ["1", f"sdxl, one UNet pass, {sizes}", *rows[0][2:]],
        ["1", f"sd15, one block, {sizes}", *rows[0][2:]],
        *[["2", f"sd15, one UNet pass, {sizes}", *rows[0][2:]]] * 2,
    ]
    assert "threads: 2" in page.splitlines()[-1]


def test_page_is_written_with_links_to_results(tmp_path):
    contents = {"one half": result([full_case()]), "quality": {"kind": "quality"}}
    files = [write(tmp_path / "results" / f"{name}.json", data) for name, data in contents.items()]
    output = tmp_path / "reports" / "speed"
    page = write_report(files, output)
    assert (output / "speed.md").read_text(encoding="utf-8") == page
    assert "1. [one half.json](../../results/one%20half.json): Test CPU" in page and "quality.json" not in page


@pytest.mark.parametrize(
    "data, message",
    [
        (result([], format=1), "has format 1"),
        ("{not json", "cannot be read"),
        ({"kind": "quality"}, r" \(kind 'quality'\): pass files that bench wrote"),
        ({"kind": "speed", "format": 4}, r"not a complete speed result.*cases"),
        (result([case([arm([1.0, 2.0, 3.0]), arm([1.0, 2.0], 0.5)])]), r"seconds=\[1.0, 2.0\]"),
        (result([case([arm([])])]), r"seconds=\[\]"),
        ({k: v for k, v in result([]).items() if k != "rounds"}, "KeyError.*rounds"),
        (result([case([arm(PLAIN, guess=1)])]), "is not a complete speed result"),
        (result([case([arm(PLAIN, status="error")])]), "is 'error'"),
        (result([case([arm([1.0, 0.0, 2.0])])]), r"seconds=\[1.0, 0.0, 2.0\]"),
        (result([]), "no arm was measured"),
    ],
)
def test_broken_and_other_files_are_refused(tmp_path, data, message):
    with pytest.raises(ToMeConfigError, match=rf"speed\.json.*{message}"):
        write_report([write(tmp_path / "speed.json", data)], tmp_path / "report")
    assert not (tmp_path / "report").exists()
