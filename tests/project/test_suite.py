"""The settings of the test runner: a process that dies ends a run, with the name of its test and a failing status."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DYING = "import os\n\ndef test_before(): pass\n\ndef test_that_dies(): os._exit(9)\n\ndef test_after(): pass\n"


def test_a_run_ends_when_a_process_dies(tmp_path):
    (tmp_path / "test_dying.py").write_text(DYING)
    (tmp_path / "test_other.py").write_text("def test_passes(): pass\n")
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running 'test_dying.py::test_that_dies'" in done.stdout
    assert "= 1 failed, " in done.stdout, done.stdout  # no second worker ran it and died again
