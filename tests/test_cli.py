import json
import subprocess
import sys

import pytest

from ppdiffusers_tome import ToMeConfigError, ToMeError, __version__
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.evaluation import operations
from ppdiffusers_tome.evaluation.operations import OpsCase, time_operations

SMALL = ["--batch", "1", "--height", "6", "--width", "8", "--channels", "5", "--rounds", "2"]


def test_bench_ops_prints_a_table_and_writes_what_was_measured(tmp_path, capsys):
    out = tmp_path / "new" / "ops.json"
    assert main(["bench", "ops", *SMALL, "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert "B=1, 6×8 tokens, C=5, ratio 0.5 (r=24)" in printed
    assert (result["kind"], result["format"], result["rounds"]) == ("operations", 2, 2)
    assert result["command"] == f"python -m ppdiffusers_tome bench ops {' '.join(SMALL)} --output {out}"
    assert list(result["milliseconds"]) == ["plan", "merge", "unmerge", "merge + unmerge"]
    for row in result["milliseconds"].values():
        assert row["ours"] > 0 and row["times faster"] == pytest.approx(row["built-in"] / row["ours"])
    assert result["environment"]["ppdiffusers_tome"] == __version__
    assert result["environment"]["machine"] and result["environment"]["ppdiffusers"] == "0.29.0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "0.9"], "ratio=0.9 is not allowed"),
        (["--ratio", "0"], "ratio=0.0 merges none"),
        (["--batch", "0"], "batch=0 is not allowed"),
        (["--height", "9" * 30], "their product must be at most"),
        (["--rounds", "0"], "rounds=0 is not allowed"),
    ],
)
def test_bad_option_is_reported_in_one_line(options, message, capsys):
    assert main(["bench", "ops", *SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_unwritable_file_is_reported_in_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["bench", "ops", *SMALL, "--output", str(tmp_path / "file" / "ops.json")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and str(tmp_path / "file") in error and error.count("\n") == 1


def test_nothing_is_timed_where_results_differ(monkeypatch):
    monkeypatch.setattr(operations, "merge", lambda x, plan: x[:, : plan.kept] * 2)
    with pytest.raises(ToMeError, match="they are not timed"):
        time_operations(OpsCase(1, 6, 8, 5), rounds=1)


def test_case_is_checked():
    with pytest.raises(ToMeConfigError, match="channels=0"):
        OpsCase(channels=0)


def test_python_m_runs():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "ppdiffusers_tome", "--version"], capture_output=True, text=True
    )
    assert done.stdout.strip().splitlines()[-1] == __version__
