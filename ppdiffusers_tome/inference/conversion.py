"""Convert Paddle programs to ONNX."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from ..errors import ToMeExportError, install_command
from .onnx_programs import LARGE, add_in_order

if TYPE_CHECKING:
    import onnx

OPSET = 17
DONE = "converted"  # what the process writes after each program
SCRIPT = f"""
import ctypes, json, sys, paddle2onnx
for line in sys.stdin:
    program, params, target = json.loads(line)
    options = {{"optimize_tool": "None"}} if program.endswith(".json") else {{}}
    options |= {{"opset_version": {OPSET}, "external_file": target + "{LARGE}"}}
    try:
        paddle2onnx.export(program, params, save_file=target, enable_onnx_checker=True, **options)
    except Exception as error:
        print("[ERROR]", type(error).__name__, error)
    library = ctypes.CDLL(None)
    library.fflush(None)  # what C++ has written
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    print("{DONE}", flush=True)
"""
# Paddle 3 stores these attributes as float64. paddle2onnx 2.1 raises an error on the first, and misreads the others.
FLOAT32 = {"1.nearest_interp": "scale", "1.group_norm": "epsilon", "1.pad3d": "pad_value"}


def check_converter() -> None:
    """Raise ToMeExportError unless the packages that convert and check programs are installed."""
    missing = [name for name in ("paddle2onnx", "onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ToMeExportError(
            f'an export as ONNX needs {", ".join(missing)}: {install_command("onnx")}, or export with format="paddle".'
        )


class Converter:
    """Converts programs in a process of its own, because paddle2onnx aborts its process on what it cannot convert.

    The process starts with the first program, which takes seconds, and ends with the context or `close()`.

    Example:
        >>> with Converter() as converter:
        ...     converter.convert(Path("inference.pdmodel"), Path("inference.pdiparams"), "UNet")
        PosixPath('inference.onnx')
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Converter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def convert(self, program: Path, params: Path, label: str) -> Path:
        """Write a Paddle program as `.onnx` beside it, with its weights inside; returns that file.

        Args:
            program, params: `.pdmodel` or `.json` file, and `.pdiparams`.
            label: the program's name in messages.

        Raises:
            ToMeExportError: paddle2onnx cannot convert it, or the result is not valid ONNX.
        """
        target = program.with_suffix(".onnx")
        with tempfile.TemporaryDirectory(prefix="paddle2onnx_") as folder:
            if program.suffix == ".json":
                readable = Path(folder) / program.name
                _write_readable(program, readable)
                program = readable
            status, lines = self._run([str(program), str(params), str(target)])
        is_written = target.is_file() and target.stat().st_size > 0
        if status or not is_written or any("[ERROR]" in line for line in lines):
            target.unlink(missing_ok=True)  # it writes wrong and empty files too
            raise ToMeExportError(f"paddle2onnx cannot convert the {label} to ONNX: {_reason(lines, status)}")
        _correct(target)
        return target

    def _run(self, files: list[str]) -> tuple[int, list[str]]:
        """The exit status of the process, 0 if it goes on, and the lines that it wrote."""
        if self._process is None:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            command = [sys.executable, "-c", SCRIPT]
            self._process = subprocess.Popen(command, text=True, errors="replace", **pipes)
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
        return status or 1, lines  # it ended without a result


def _correct(path: Path) -> None:
    """Replace in an `.onnx` file what runtimes compute wrongly."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)  # weights in a file of their own stay there
    _keep_integers(model)
    add_in_order(model)
    onnx.save(model, str(path))


def _keep_integers(model: "onnx.ModelProto") -> None:
    """Let a program compute `integers * 2 + 3` in int64, for which paddle2onnx casts to float32 and back.

    A runtime that computes floats in bf16 rounds those above 256, and then gathers from rows that do not exist.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    dtypes = {
        value.name: value.type.tensor_type.elem_type
        for value in onnx.shape_inference.infer_shapes(model).graph.value_info
    }
    makers = {name: node for node in graph.node for name in node.output}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        steps: list[tuple[onnx.NodeProto, np.ndarray]] = []
        maker = makers.get(node.input[0]) if _casts(node, TensorProto.INT64) else None
        while maker is not None and (number := _whole_number(maker, makers)) is not None:
            steps.insert(0, (maker, number))
            maker = makers.get(maker.input[0])
        if not steps or not _casts(maker, TensorProto.FLOAT) or dtypes.get(maker.input[0]) != TensorProto.INT64:
            nodes.append(node)
            continue
        value = maker.input[0]
        for step, number in steps:
            result = node.output[0] if step is steps[-1][0] else f"{step.output[0]}.int64"
            constant = numpy_helper.from_array(number)
            nodes.append(helper.make_node("Constant", [], [f"{result}.number"], value=constant))
            nodes.append(helper.make_node(step.op_type, [value, f"{result}.number"], [result]))
            value = result
    del graph.node[:]
    graph.node.extend(nodes)  # nothing uses the casts to float32 any more, and a runtime drops them


def _casts(node: "onnx.NodeProto | None", dtype: int) -> "TypeGuard[onnx.NodeProto]":
    return node is not None and node.op_type == "Cast" and node.attribute[0].i == dtype


def _whole_number(node: "onnx.NodeProto", makers: dict[str, "onnx.NodeProto"]) -> np.ndarray | None:
    """The number without a fraction that a node adds to its input or multiplies it by, if it does so, as int64."""
    from onnx import numpy_helper

    number = makers.get(node.input[1]) if node.op_type in ("Add", "Mul") else None
    while number is not None and number.op_type == "Identity":
        number = makers.get(number.input[0])
    if number is None or number.op_type != "Constant" or number.attribute[0].name != "value":
        return None
    value = numpy_helper.to_array(number.attribute[0].t)
    return value.astype("int64") if value.size == 1 and (value == value.round()).all() else None


def _write_readable(program: Path, target: Path) -> None:
    """Write a `.json` program as paddle2onnx reads it: with float32 in the attributes of FLOAT32."""
    content = json.loads(program.read_text(encoding="utf-8"))
    for operator in _dicts(content):
        name = FLOAT32.get(str(operator.get("#")))
        for attribute in operator["A"] if name else []:
            for value in _dicts(attribute if attribute.get("N") == name else None):
                if value.get("#") == "0.a_f64":
                    value["#"] = "0.a_f32"
    target.write_text(json.dumps(content), encoding="utf-8")


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """All objects within a part of a JSON document, itself included."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else []:
        yield from _dicts(item)


def _reason(lines: list[str], status: int) -> str:
    """The converter's line about what it cannot convert, or how it ended."""
    for words in ("not support", "Only support", "rror", "ailed"):  # the most telling first
        for line in lines:
            if words in line:
                return line[:300]
    return f"it ended with {f'signal {-status}' if status < 0 else f'exit status {status}'}"
