"""The test runner: a process that dies ends a run with the name of its test, and tests of the core import little."""

import ast
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


OF_OTHERS = {"matplotlib", "onnx", "openvino", "exporting", "lab"}  # of plots, exports and benchmarks


def imported_by(path):
    """The modules that a test file imports when it is collected, by their first names."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0] if node.module and not node.level else ""


def test_tests_of_the_core_import_nothing_of_the_others():
    """Nor do the modules of tests/ that they import."""
    waiting, seen = {ROOT / "tests" / "conftest.py", *(ROOT / "tests" / "core").glob("*.py")}, set()
    waiting |= {*(ROOT / "tests" / "zoo").glob("*.py")}
    names = set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        names |= (imported := set(imported_by(path)))
        beside = {ROOT / "tests" / folder / f"{name}.py" for folder in ("", "core") for name in imported}
        waiting |= {other for other in beside if other.exists()} - seen
    assert {"paddle", "conftest", "cuda_attention", "zoo"} <= names
    assert not names & OF_OTHERS
