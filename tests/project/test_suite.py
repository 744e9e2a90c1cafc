"""The test runner: a process that dies ends a run with the name of its test, and tests of the core import little."""

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


OF_OTHERS = ("matplotlib", "onnx", "openvino", "exporting", "measuring", "lab")  # of plots, exports and benchmarks
COLLECT = """
import sys
import pytest

status = pytest.main(["tests/core", "--collect-only", "-q", "-q", "-n", "0", "-p", "no:cacheprovider"])
print("status", int(status), *[name for name in sys.argv[1:] if name in sys.modules])
"""


def test_tests_of_the_core_import_nothing_of_the_others():
    command = [sys.executable, "-c", COLLECT, *OF_OTHERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1:] == ["status 0"], done.stdout + done.stderr
