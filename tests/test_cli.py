import json
import subprocess
import sys
from pathlib import Path

import pytest

from ppdiffusers_tome import ToMeConfigError, ToMeError, __version__
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.commands import bench, evaluate, export, generate, tune
from ppdiffusers_tome.errors import install_command
from ppdiffusers_tome.evaluation import operations
from ppdiffusers_tome.evaluation.operations import OpsCase, time_operations

SMALL = ["--batch", "1", "--height", "6", "--width", "8", "--channels", "5", "--rounds", "2"]
GROWTH = ["--growth", "4", "16", "--memory-limit", "2e-5"]


def test_bench_ops_prints_a_table_and_writes_what_was_measured(tmp_path, capsys):
    out = tmp_path / "new" / "ops.json"
    assert main(["bench", "ops", *SMALL, *GROWTH, "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert "B=1, 6×8 tokens, C=5, ratio 0.5 (cells: 0.75)" in printed
    assert (result["kind"], result["format"], result["rounds"]) == ("operations", 3, 2)
    assert result["command"] == f"python -m ppdiffusers_tome bench ops {' '.join([*SMALL, *GROWTH])} --output {out}"
    assert [row["method"] for row in result["methods"]] == [*operations.METHODS, "built-in"]
    for row in result["methods"]:
        assert list(row["milliseconds"]) == ["plan", "merge", "unmerge", "merge + unmerge"]
        assert min(row["milliseconds"].values()) > 0 and min(row["times_faster"].values()) > 0
    assert set(result["methods"][-1]["times_faster"].values()) == {1.0}
    plans = {(plan["method"], plan["side"]): plan for plan in result["growth"]["plans"]}
    assert [key for key, plan in plans.items() if plan["milliseconds"] is None] == [
        ("global", 16),
        ("windows of 16", 16),
    ]
    assert plans["global", 16]["scores_gb"] == pytest.approx(192 * 64 * 4e-9)  # src × dst, in float32
    assert plans["windows of 8", 16]["scores_gb"] == pytest.approx(4 * 48 * 16 * 4e-9)
    assert "does not fit: 4.92e-05 GB" in printed
    assert result["environment"]["ppdiffusers_tome"] == __version__
    assert result["environment"]["machine"] and result["environment"]["ppdiffusers"] == "0.29.0"
    assert main(["bench", "report", str(out), "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == (tmp_path / "ops.md").read_text().strip()
    assert f"written to {tmp_path / 'ops.md'}" in printed.err and (tmp_path / "ops_growth.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "0.9"], "ratio=0.9 is not allowed"),
        (["--ratio", "0"], "ratio=0.0 merges none"),
        (["--batch", "0"], "batch=0 is not allowed"),
        (["--height", "9" * 30], "their product must be at most"),
        (["--rounds", "0"], "rounds=0 is not allowed"),
        (["--growth", "1"], "merges none of 1×1 tokens"),
        (["--growth", "8", "--memory-limit", "0"], "--memory-limit 0 is not allowed"),
    ],
)
def test_bad_option_is_reported_in_one_line(options, message, capsys):
    assert main(["bench", "ops", *SMALL, "--growth", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_unwritable_file_is_reported_in_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["bench", "ops", *SMALL, "--growth", "--output", str(tmp_path / "file" / "ops.json")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and str(tmp_path / "file") in error and error.count("\n") == 1


def test_nothing_is_timed_where_results_differ(monkeypatch):
    monkeypatch.setattr(operations, "merge", lambda x, plan, blend: x[:, : plan.kept] * 2)
    with pytest.raises(ToMeError, match="they are not timed"):
        time_operations(OpsCase(1, 6, 8, 5), rounds=1)


def test_case_is_checked():
    with pytest.raises(ToMeConfigError, match="channels=0"):
        OpsCase(channels=0)


def test_python_m_runs():
    done = subprocess.run([sys.executable, "-m", "ppdiffusers_tome", "--version"], capture_output=True, text=True)
    assert done.stdout.strip().splitlines()[-1] == __version__
    assert "distutils" not in done.stderr, "a warning of setuptools on Python 3.10 and 3.11"


@pytest.mark.parametrize("command", [["bench"], ["evaluate"], ["tune", "--psnr", "30"]])
def test_a_folder_that_is_no_model_is_an_error_of_one_line(command, exported_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, reason in (exported_folder, "is already an export"), ("nosuch", "a folder"), (".", "no model_index"):
        assert main([*command, "--model", str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {folder} ") and reason in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_ctrl_c_is_one_line_that_names_how_to_continue(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    model, again = ["--model", "m", "--output", "o"], "continue with python -m ppdiffusers_tome"
    for module, function, arguments, remedy in (
        (bench, "_speed", ["bench", *model], f"{again} bench --model m --output o"),
        (
            tune,
            "_tune",
            ["tune", "--restart", "--psnr", "3", *model],
            f"{again} tune --psnr 3 --model",
        ),
        (evaluate, "_evaluate", ["evaluate", *model], f"{again} evaluate --model m"),
        (
            generate,
            "_generate",
            ["generate", "--prompts", "p", *model],
            f"{again} generate --prompts p",
        ),
        (export, "_export", ["export", *model], "nothing was written"),
        (bench, "_operations", ["bench", "ops"], ""),
    ):
        monkeypatch.setattr(module, function, interrupt)
        assert main(arguments) == 130
        error = capsys.readouterr().err
        assert error.startswith(f"interrupted: {remedy}" if remedy else "interrupted\n") and error.count("\n") == 1


def test_errors_name_the_locked_versions_of_missing_packages():
    """What pip chooses for an extra replaces locked packages, and ppdiffusers no longer imports."""
    repository = Path(__file__).parents[1]
    for feature in ("serve", "onnx", "ray", "eval"):
        assert (repository / install_command(feature).rpartition(" ")[2]).is_file()
    sources = [*(repository / "ppdiffusers_tome").rglob("*.py"), *(repository / "docs").glob("*.md")]
    assert not [path.name for path in sources if "ppdiffusers_tome[" in path.read_text(encoding="utf-8")]
