"""Convert Paddle programs to ONNX."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ToMeExportError, install_command
from ..run.onnx_weights import EXTERNAL_SUFFIX
from ..run.runtime import error_summary

if TYPE_CHECKING:
    import onnx

OPSET = 17
DONE = "converted"  # the line that the process writes after each program
SCRIPT = f"""
import ctypes, json, sys, paddle2onnx
for line in sys.stdin:
    program, params, target = json.loads(line)
    options = {{"optimize_tool": "None"}} if program.endswith(".json") else {{}}
    options |= {{"opset_version": {OPSET}, "external_file": target + "{EXTERNAL_SUFFIX}"}}
    try:
        paddle2onnx.export(program, params, save_file=target, enable_onnx_checker=True, **options)
    except Exception as error:
        print("[ERROR]", type(error).__name__, error)
    library = ctypes.CDLL(None)
    library.fflush(None)  # output of C++
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    print("\\n{DONE}", flush=True)  # on a line of its own, also after text of C++ without a newline
"""
# Paddle 3 stores these attributes as float64. paddle2onnx 2.1 raises an error on the first, and misreads the rest.
FLOAT32 = {"1.nearest_interp": "scale", "1.group_norm": "epsilon", "1.pad3d": "pad_value"}


def check_converter() -> None:
    """Raise ToMeExportError unless the packages that convert and check programs are installed."""
    missing = [name for name in ("paddle2onnx", "onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ToMeExportError(
            f'an export as ONNX needs {", ".join(missing)}: {install_command("onnx")}, or choose the format "paddle".'
        )


class Converter(AbstractContextManager["Converter"]):
    """Converts programs in a separate process, because paddle2onnx aborts its process if it cannot convert a program.

    The process starts with the first program, which takes seconds, and ends with the context or `close()`.

    Example:
        >>> with Converter() as converter:
        ...     converter.convert(Path("inference.pdmodel"), Path("inference.pdiparams"), "UNet")
        PosixPath('inference.onnx')
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and self._process is not None:  # what it is converting is of no more use
            self._process.kill()
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def convert(self, program: Path, params: Path, label: str) -> Path:
        """Write a Paddle program as `.onnx` beside it; returns that file.

        The weights of a Paddle 3 program stay in `params`. Those of a Paddle 2 program are inside it, or above 2 GB
        beside it.

        Args:
            program, params: `.pdmodel` or `.json` file, and `.pdiparams` in the same folder.
            label: the program's name in messages.

        Raises:
            ToMeExportError: paddle2onnx cannot convert it, the result is not valid ONNX, or a node of it, which the
                message names, is not as expected.
        """
        import onnx  # imported here because onnx is optional

        from .onnx_fixes import fix_paddle2onnx

        target = program.with_suffix(".onnx")
        convert = self._convert_paddle3 if program.suffix == ".json" else self._convert
        try:
            model = convert(program, params, target, label)
            fix_paddle2onnx(model)
            onnx.save(model, str(target))
        except (ToMeExportError, OSError):
            raise
        except Exception as error:  # a program that paddle2onnx or this module does not expect
            raise ToMeExportError(f"the {label} cannot be converted to ONNX: {error_summary(error)}") from error
        return target

    def _convert_paddle3(self, program: Path, params: Path, target: Path, label: str) -> "onnx.ModelProto":
        """Convert a program without its weights, which the ONNX program then finds in `params`."""
        from .paddle_weights import inputs_to_weights, weights_to_inputs

        content = json.loads(program.read_text(encoding="utf-8"), object_hook=_in_float32)
        with tempfile.TemporaryDirectory(prefix="paddle2onnx_") as folder:
            rest = Path(folder) / params.name
            weights = weights_to_inputs(content, params, rest)
            program = Path(folder) / program.name
            program.write_text(json.dumps(content), encoding="utf-8")
            model = self._convert(program, rest, target, label)
        inputs_to_weights(model, weights, params)
        return model

    def _convert(self, program: Path, params: Path, target: Path, label: str) -> "onnx.ModelProto":
        """Let paddle2onnx write a program as `target`, or nothing; weights in a file of their own stay there."""
        import onnx

        status, lines = self._run([str(program), str(params), str(target)])
        is_written = target.is_file() and target.stat().st_size > 0
        if status or not is_written or any("[ERROR]" in line for line in lines):
            target.unlink(missing_ok=True)  # it writes wrong and empty files too
            raise ToMeExportError(f"paddle2onnx cannot convert the {label} to ONNX: {_reason(lines, status)}")
        return onnx.load(str(target), load_external_data=False)

    def _run(self, files: list[str]) -> tuple[int, list[str]]:
        """The exit status of the process, 0 if it goes on, and the lines that it wrote."""
        if self._process is None:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            command = [sys.executable, "-c", SCRIPT]
            one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as Paddle wants it, which warns otherwise
            self._process = subprocess.Popen(command, env=one_thread, text=True, errors="replace", **pipes)
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # its output shows why it ended
            self._process.stdin.write(json.dumps(files) + "\n")
            self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if line.strip() == DONE:
                return 0, lines
            lines.append(line.strip())
        status = self._process.wait()
        self.close()
        return status or 1, lines  # it ended before it wrote DONE


def _in_float32(part: dict[str, Any]) -> dict[str, Any]:
    """An object of a `.json` program, with the attributes of FLOAT32 as float32."""
    name = FLOAT32.get(str(part.get("#")))
    for attribute in part["A"] if name else []:
        if attribute.get("N") == name:
            attribute["AT"] = json.loads(json.dumps(attribute["AT"]).replace('"0.a_f64"', '"0.a_f32"'))
    return part


def _reason(lines: list[str], status: int) -> str:
    """The most informative line of the converter's output, or its exit status."""
    for words in ("not support", "Only support", "rror", "ailed"):  # the most informative first
        for line in lines:
            if words in line:
                return line[:300]
    return f"it ended with {f'signal {-status}' if status < 0 else f'exit status {status}'}"
