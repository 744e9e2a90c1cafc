"""Convert Paddle programs to ONNX, and keep equal weights of several programs once."""

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ToMeExportError

if TYPE_CHECKING:
    import onnx

OPSET = 17
LARGE = ".data"  # suffix of the file with the weights of a model of more than 2 GB, which a `.onnx` file cannot hold
SHARED_BYTES = 1024  # smaller constants stay in the `.onnx` file
ALIGNMENT = 4096  # bytes: runtimes map weights into memory page by page
# Run in a process of its own, because the converter aborts its process on what it cannot convert.
SCRIPT = f"""
import sys, paddle2onnx
program, params, target = sys.argv[1:]
options = {{"optimize_tool": "None"}} if program.endswith(".json") else {{}}
options |= {{"opset_version": {OPSET}, "external_file": target + "{LARGE}"}}
paddle2onnx.export(program, params, save_file=target, enable_onnx_checker=True, **options)
"""
# Paddle 3 stores these attributes as float64. paddle2onnx 2.1 raises an error on the first, and misreads the others.
FLOAT32 = {"1.nearest_interp": "scale", "1.group_norm": "epsilon", "1.pad3d": "pad_value"}


def check_converter() -> None:
    """Raise ToMeExportError unless the packages that convert and check programs are installed."""
    missing = [name for name in ("paddle2onnx", "onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ToMeExportError(
            f"an export as ONNX needs {', '.join(missing)}: pip install 'ppdiffusers_tome[onnx]', or export with "
            'format="paddle".'
        )


def convert(program: Path, params: Path, label: str) -> Path:
    """Write a Paddle program as `.onnx` beside it, with its weights inside; returns that file.

    Args:
        program, params: `.pdmodel` or `.json` file, and `.pdiparams`.
        label: the program's name in messages.

    Raises:
        ToMeExportError: paddle2onnx cannot convert it, or the result is not valid ONNX.
    """
    import onnx

    target = program.with_suffix(".onnx")
    with tempfile.TemporaryDirectory(prefix="paddle2onnx_") as folder:
        if program.suffix == ".json":
            readable = Path(folder) / program.name
            _write_readable(program, readable)
            program = readable
        command = [sys.executable, "-c", SCRIPT, str(program), str(params), str(target)]
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    try:
        if process.returncode or "[ERROR]" in process.stdout or not target.is_file():  # it writes wrong files too
            raise ToMeExportError(_reason(process))
        onnx.checker.check_model(str(target))
    except (ToMeExportError, onnx.checker.ValidationError) as error:
        target.unlink(missing_ok=True)
        raise ToMeExportError(f"paddle2onnx cannot convert the {label} to ONNX: {error}") from error
    return target


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


def _reason(process: "subprocess.CompletedProcess[str]") -> str:
    """The converter's line about what it cannot convert, or how it ended."""
    lines = [line.strip() for line in (process.stdout + process.stderr).splitlines()]
    for words in ("not support", "Only support", "rror"):  # the most telling first
        for line in lines:
            if words in line:
                return line[:300]
    ended = f"signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"
    return f"it ended with {ended}"


class SharedWeights:
    """A file of weights for several `.onnx` files in the same folder, in which equal weights stand once.

    Args:
        path: of the file; it must not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[str, int] = {}  # by SHA-256
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)

    def move(self, source: Path, target: Path) -> None:
        """Write the `.onnx` file `source` as `target`, beside the shared weights and without its own; remove it."""
        import onnx

        model = onnx.load(str(source))
        graph = model.graph
        nodes = []
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                tensor = node.attribute[0].t
                if len(tensor.raw_data) >= SHARED_BYTES:
                    tensor.name = node.output[0]
                    graph.initializer.append(self._store(tensor))
                    continue
            nodes.append(node)
        del graph.node[:]
        graph.node.extend(nodes)
        target.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, str(target))
        onnx.checker.check_model(str(target))
        source.unlink()
        Path(f"{source}{LARGE}").unlink(missing_ok=True)

    def _store(self, tensor: "onnx.TensorProto") -> "onnx.TensorProto":
        """The tensor with a reference to the shared file in place of its data."""
        import onnx

        data = tensor.raw_data
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._offsets:
            with self._path.open("ab") as file:
                file.write(bytes(-file.tell() % ALIGNMENT))
                self._offsets[digest] = file.tell()
                file.write(data)
        stored = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        stored.data_location = onnx.TensorProto.EXTERNAL
        places = {"location": self._path.name, "offset": self._offsets[digest], "length": len(data)}
        for key, value in places.items():
            stored.external_data.add(key=key, value=str(value))
        return stored
