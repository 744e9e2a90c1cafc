"""How a command ends: its exit statuses, and Ctrl-C and SIGTERM while Paddle traces and in imports."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import paddle
import pytest
from exporting import tracing
from paddle import nn

from ppdiffusers_tome.cli import FAILED, USAGE, exit_status
from ppdiffusers_tome.errors import (
    FolderError,
    NoMergeableLayerError,
    ParameterError,
    ToMeConfigError,
    ToMeExportError,
    ToMePassError,
)
from ppdiffusers_tome.export.programs import Input, Traceable
from ppdiffusers_tome.run.runtime import load_module
from ppdiffusers_tome.serving.offline import OutputError
from ppdiffusers_tome.serving.server import ServerFailedError
from ppdiffusers_tome.signals import INTERRUPTED, TERMINATED, signals_as_errors, signals_held_back

ENDS = pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
# A module that is interrupted while it is imported. Those in C++ report that as their own failure.
INTERRUPTED_IMPORT = """
import os, signal, time
try:
    os.kill(os.getpid(), {number})
    time.sleep({seconds})
except BaseException as error:
    raise ImportError("initialization failed") from error
"""


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ToMeConfigError("--size 5 is not allowed"), USAGE),
        (ParameterError("size", 5, "it must be 8"), USAGE),
        (FolderError("out exists and is not empty"), USAGE),
        (NoMergeableLayerError("there is nothing to merge"), USAGE),
        (ToMeExportError("tome.json is damaged"), FAILED),
        (ToMePassError("a block got 64 tokens"), FAILED),
        (ServerFailedError("the image thread has ended"), FAILED),
        (OutputError("out cannot be written"), FAILED),
        (FileNotFoundError("prompts.txt"), FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_usage_has_the_status_of_usage(error, status, capsys):
    """A supervisor that does not repeat what was called wrongly must start a dead server again."""

    def run():
        raise error

    assert exit_status(run) == status != 0
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize("page", ["troubleshooting.md", "zh/troubleshooting.md"])
def test_the_table_of_exit_statuses_is_complete(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| .+ \|$", text, re.MULTILINE)
    assert rows == [str(status) for status in (0, FAILED, USAGE, INTERRUPTED, TERMINATED)]


class Interrupted(nn.Layer):
    """A layer whose forward gets a signal."""

    def __init__(self, number):
        super().__init__()
        self.number, self.times = number, 0

    @paddle.jit.not_to_static
    def forward(self, x):
        os.kill(os.getpid(), self.number)
        self.times += 1  # Python handles the signal before this
        return x + 1


@ENDS
def test_a_signal_waits_until_a_program_is_traced(tmp_path, capfd, number, status, word):
    """An error in Python that Paddle's C++ calls is a crash, or a wrong error of Paddle."""
    layer = Interrupted(number)
    traceable = Traceable(layer, (Input("x", ("batch", 4)),))

    def export():
        tracing.write_program(traceable, tmp_path, {}, "unet")
        pytest.fail("the signal is lost")

    assert exit_status(export, ": nothing was written") == status
    written = {path.name for path in tmp_path.iterdir()}
    assert layer.times >= 1 and written & {"inference.json", "inference.pdmodel"}
    printed = capfd.readouterr().err.splitlines()
    assert printed[-1] == f"{word}: nothing was written"
    assert f"{number.name}: ending when the program is traced" in printed


@ENDS
def test_a_signal_decides_the_status_whatever_error_a_library_makes_of_it(capsys, number, status, word):
    def run():
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        except BaseException as error:
            raise ToMeExportError("Paddle cannot export the unet") from error

    assert exit_status(run) == status
    assert capsys.readouterr().err == f"{word}\n"


def test_ctrl_c_while_a_runtime_is_imported_is_not_a_missing_package(tmp_path, monkeypatch):
    (tmp_path / "interrupted_runtime.py").write_text(INTERRUPTED_IMPORT.format(number=2, seconds=0))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        load_module("interrupted_runtime")


@ENDS
@pytest.mark.parametrize("command", ["compare --model m", "export --model m --output o"])
def test_a_signal_in_the_imports_of_a_command_ends_it_at_once(tmp_path, monkeypatch, number, status, word, command):
    (tmp_path / "paddle.py").write_text(INTERRUPTED_IMPORT.format(number=number.value, seconds=600))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-m", "ppdiffusers_tome", *command.split()], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, f"{word}\n")


def test_handlers_are_those_of_before():
    """Also those of a program of its own, and none is set in other threads, where Python allows none."""
    calls = []
    own = signal.signal(signal.SIGTERM, lambda *_: calls.append("own"))
    try:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        with signals_as_errors() as received:
            os.kill(os.getpid(), signal.SIGTERM)
            assert calls == ["own"] and not received
            with signals_held_back("it is over"):
                os.kill(os.getpid(), signal.SIGTERM)
                assert calls == ["own"]
            assert calls == ["own", "own"]
        assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    finally:
        signal.signal(signal.SIGTERM, own)
    results = []
    thread = threading.Thread(target=lambda: results.append(exit_status(lambda: 7)))
    thread.start()
    thread.join()
    assert results == [7]
