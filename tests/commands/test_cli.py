import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ppdiffusers_tome import __version__
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.commands import compare, export, generate
from ppdiffusers_tome.errors import install_command


def test_python_m_runs():
    done = subprocess.run([sys.executable, "-m", "ppdiffusers_tome", "--version"], capture_output=True, text=True)
    assert done.stdout.strip().splitlines()[-1] == __version__
    assert "distutils" not in done.stderr, "a warning of setuptools on Python 3.10 and 3.11"


AGAIN = "continue with python -m ppdiffusers_tome"


@pytest.mark.parametrize(
    ("module", "function", "command", "remedy"),
    [
        (generate, "_generate", "generate --prompts p --model m --output o", f"{AGAIN} generate --prompts p"),
        (export, "_export", "export --model m --output o", "nothing was written"),
        (compare, "_compare", "compare --model m", ""),
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
    repository = Path(__file__).parents[2]
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path / "a wheel")]
    subprocess.run(build, cwd=repository, check=True, capture_output=True)
    installed = runpy.run_path(str(tmp_path / "a wheel" / "ppdiffusers_tome" / "errors.py"))["install_command"]
    for command in (install_command, installed):
        for feature in ("serve", "onnx", "ray"):
            *words, file = shlex.split(command(feature))
            assert words == ["pip", "install", "--no-deps", "-r"] and Path(file).is_file()
            assert Path(file).is_relative_to(tmp_path) == (command is installed)
    sources = [*(repository / "ppdiffusers_tome").rglob("*.py"), *(repository / "docs").glob("*.md")]
    assert not [path.name for path in sources if "ppdiffusers_tome[" in path.read_text(encoding="utf-8")]
