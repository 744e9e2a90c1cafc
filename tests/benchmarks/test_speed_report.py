"""The report on speed: a gain by hand, arms that failed, refused files. test_documents.py compares whole reports."""

import pytest
from lab.speed.speed_report import write_report
from speed_results import PLAIN, arm, case, result, write

from ppdiffusers_tome.errors import ToMeConfigError


@pytest.fixture
def report(tmp_path):
    """Makes the page of one result."""
    return lambda data: write_report([write(tmp_path / "a.json", data)], tmp_path)


def cells(page):
    """The cells of the table, row by row, with its header."""
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("|")]
    return [rows[0], *rows[2:]]


def test_the_gain_and_its_interval_are_of_the_ratios_within_the_rounds(report):
    """The quotient of the medians is 1.6."""
    page = report(result([case([arm([2.0, 9.0, 4.0]), arm([1.0, 3.0, 2.5], 0.5)])]))
    assert cells(page)[2][3] == "2.50 s, 2.00× [1.60–3.00]"


def test_arms_that_failed_have_their_reasons(report):
    failed = [arm(PLAIN), arm([], attention="slicing", status="error")]
    page = report(result([case([*failed, arm([], 0.5, status="error", reason="too slow")])]))
    assert [row[3:] for row in cells(page)[1:]] == [["20.0 s"], ["error"], ["error"]]
    reasons = {"memory-efficient, eager": "the allocator failed", "tomesd 0.5, eager": "too slow"}
    for arm_name, reason in reasons.items():
        assert any(arm_name in line and reason in line for line in page.splitlines())


@pytest.mark.parametrize(
    "data, message",
    [
        (result([], format=1), "format 1"),
        ("{not json", "cannot be read"),
        ({"kind": "quality"}, r"kind 'quality'"),
        ({"kind": "speed", "format": 4}, "cases"),
        (result([case([arm([1.0, 2.0, 3.0]), arm([1.0, 2.0], 0.5)])]), r"seconds=\[1.0, 2.0\]"),
        (result([case([arm([])])]), r"seconds=\[\]"),
        ({k: v for k, v in result([]).items() if k != "rounds"}, "KeyError.*rounds"),
        (result([case([arm(PLAIN, guess=1)])]), "guess"),
        (result([case([arm(PLAIN, status="error")])]), "'error'"),
        (result([case([arm([1.0, 0.0, 2.0])])]), r"seconds=\[1.0, 0.0, 2.0\]"),
        (result([]), "no arm was measured"),
    ],
)
def test_broken_and_other_files_are_refused(tmp_path, data, message):
    with pytest.raises(ToMeConfigError, match=rf"speed\.json.*{message}"):
        write_report([write(tmp_path / "speed.json", data)], tmp_path / "report")
    assert not (tmp_path / "report").exists()
