"""Trace and save one program, load it again and compare it with its layer."""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.base.proto import framework_pb2

from ..errors import ToMeExportError
from ..run.folder import ExportedFolder
from ..run.manifest import Files, PlannedProgram
from ..run.onnx_runtime import OnnxProgram, OnnxRuntime
from ..run.paddle_runtime import PaddleRuntime
from ..run.runtime import FUSED_TOLERANCE, Program, error_summary, return_memory
from ..signals import signals_held_back
from .comparison import TOLERANCE, Comparison, check
from .conversion import Converter
from .programs import Traceable

STEM = "inference"  # the file name that ppdiffusers expects
MIN_THREADS = 2  # for the compared programs, so that data races become visible
CALL_STACK = "op_callstack"  # attribute of an operator in a `.pdmodel` file


class _ByName(nn.Layer):
    """A layer with one argument, a dictionary, because `paddle.jit` cannot export `**kwargs`."""

    def __init__(self, layer: nn.Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: dict[str, paddle.Tensor]) -> Any:
        return self.layer(**inputs)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make the CPU Paddle's current device: a GPU rounds differently, with TF32 to ten bits."""
    before = paddle.get_device()
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(before)


class TracedProgram:
    """The program of a layer, saved as root/folder/inference.*, and what its forms are compared with.

    Args:
        traceable: the layer; hooks on it become part of the program. It must not be used afterwards.
        planned: the program's model, size and ratio. If it has a size, height and width are fixed in the program.
        root: the folder that the paths of its files start from.
        folder: a folder in `root`; it is created if it does not exist.
        dims: values of all named dimensions except the batch, for the comparison.
        threads: number of threads of the compared programs; at least MIN_THREADS are used.

    Raises:
        ToMeExportError: Paddle cannot trace the layer. Methods raise it if paddle2onnx cannot convert the program, or
            if it differs from eager, or from run to run, by more than TOLERANCE, or FUSED_TOLERANCE in ONNX Runtime.
    """

    @on_cpu()
    def __init__(
        self,
        traceable: Traceable,
        planned: PlannedProgram,
        root: Path,
        folder: str,
        dims: Mapping[str, int],
        threads: int,
    ) -> None:
        return_memory()  # free the previous program's memory
        self._comparison = Comparison(traceable, dims)
        self._root, self._label, self._threads = root, planned.label, threads
        paths = write_program(traceable, root / folder, fixed_dims(planned, dims), planned.label)
        program, weights = (path.relative_to(root).as_posix() for path in paths)
        self.files = Files(program, weights)
        self._runtime = PaddleRuntime(threads=max(MIN_THREADS, threads), onednn=False)
        self._unfused: Program | None = None

    @on_cpu()
    def compare_in_paddle(self) -> tuple[dict[str, float], dict[str, float]]:
        """Its differences from eager with Paddle's own kernels and, if they can run it, with oneDNN's.

        oneDNN's may exceed the tolerance: see `is_accurate`.
        """
        return_memory()  # each predictor has its own copy of the weights
        parity = self._comparison.differences(self._load(self._runtime), TOLERANCE, self._load_unfused)
        check(parity, TOLERANCE, f"exported {self._label}")
        if self.files.program.endswith(".json"):
            return parity, {}
        return_memory()
        onednn = self._load(replace(self._runtime, onednn=True))
        return parity, self._comparison.differences(onednn, FUSED_TOLERANCE, self._load_unfused)

    def convert(self, converter: Converter) -> Path:
        """Write it as ONNX beside its files; returns the `.onnx` file."""
        self._unfused = None
        return_memory()  # with Paddle 2.6 the conversion needs three times that of the weights
        program, weights = (self._root / path for path in self.files.paths)
        return converter.convert(program, weights, self._label)

    @on_cpu()
    def compare_in_onnx_runtime(self, path: Path) -> dict[str, float]:
        """The differences of an `.onnx` file of the program from eager."""
        differences = partial(self._comparison.differences, unfused=self._load_unfused)
        return compare_in_onnx_runtime(path, self._label, self._threads, differences)

    def _load(self, runtime: PaddleRuntime) -> Program:
        return runtime.load(ExportedFolder(self._root), self.files)

    def _load_unfused(self) -> Program:
        """The program without fused operators, which rounds as eager does: eager itself cannot run any more."""
        if self._unfused is None:
            self._unfused = self._load(replace(self._runtime, optimize=False))
            check(self._comparison.first_differences(self._unfused), TOLERANCE, f"exported {self._label}")
        return self._unfused


@on_cpu()
def convert(
    traceable: Traceable, planned: PlannedProgram, folder: Path, dims: Mapping[str, int], converter: Converter
) -> Path:
    """Write a program as folder/inference.onnx, and compare nothing: the programs that are made from it are compared.

    Arguments and errors are those of `TracedProgram`.
    """
    return_memory()
    paths = write_program(traceable, folder, fixed_dims(planned, dims), planned.label)
    return converter.convert(*paths, planned.label)


def fixed_dims(planned: PlannedProgram, dims: Mapping[str, int]) -> dict[str, int]:
    """The dimensions that have one size in a program: in a program of a size all but the text's length."""
    return {name: size for name, size in dims.items() if name != "tokens"} if planned.size else {}


def compare_in_onnx_runtime(
    path: Path, label: str, threads: int, differences: Callable[[Program, float], dict[str, float]]
) -> dict[str, float]:
    """The differences of an `.onnx` file from eager, which are within FUSED_TOLERANCE.

    Args:
        label: the program's name in messages.
        threads: as in `TracedProgram`.
        differences: of a `Comparison`, given the program and the tolerance.

    Raises:
        ToMeExportError: ONNX Runtime cannot run it, or it differs by more.
    """
    try:
        program = OnnxProgram(path, OnnxRuntime(threads=max(MIN_THREADS, threads)))
        parity = differences(program, FUSED_TOLERANCE)
    except ToMeExportError:
        raise
    except Exception as error:  # of ONNX Runtime, which names the node
        raise ToMeExportError(
            f"the {label} was converted to ONNX, but ONNX Runtime cannot run it: {error_summary(error)}"
        ) from error
    check(parity, FUSED_TOLERANCE, f"{label} in ONNX Runtime")
    return parity


def write_program(traceable: Traceable, folder: Path, fixed: Mapping[str, int], label: str) -> tuple[Path, Path]:
    """Write the program of a layer as folder/inference.*, without comparing it with the layer: see `TracedProgram`.

    Args:
        traceable: the layer, which must not be used afterwards.
        folder: it is created if it does not exist.
        fixed: dimensions that have one size in the program; all other named dimensions are dynamic.
        label: what the layer is, for errors.

    Returns:
        The program, and its weights.

    Raises:
        ToMeExportError: Paddle cannot trace the layer.
    """
    spec = [{field.name: field.spec(fixed) for field in traceable.inputs}]
    try:
        with warnings.catch_warnings(), _without_auto_cast(), signals_held_back("the program is traced"):
            warnings.simplefilter("ignore")  # Paddle's tracer warns about code of Paddle and ppdiffusers
            layer = _ByName(traceable.layer)
            layer.eval()
            static = paddle.jit.to_static(layer, input_spec=spec, full_graph=True)
            paddle.jit.save(static, str(folder / STEM))
    except Exception as error:
        raise ToMeExportError(
            f"Paddle {paddle.__version__} cannot export the {label}: {error_summary(error)}"
        ) from error
    finally:
        forget_traces()
    # Only needed to continue training; contains pickled objects.
    (folder / f"{STEM}.pdiparams.info").unlink(missing_ok=True)
    params = folder / f"{STEM}.pdiparams"
    program = folder / f"{STEM}.json"
    if program.is_file():  # Paddle 3
        return program, params
    program = folder / f"{STEM}.pdmodel"
    _remove_call_stacks(program)
    return program, params


def _remove_call_stacks(path: Path) -> None:
    """Empty the call stacks that Paddle 2.6 stores in operators: four fifths of a file, with paths of this machine."""
    program = framework_pb2.ProgramDesc.FromString(path.read_bytes())
    for block in program.blocks:
        for operator in block.ops:
            for attribute in operator.attrs:
                if attribute.name == CALL_STACK:
                    attribute.ClearField("strings")
    path.write_bytes(program.SerializeToString())


@contextmanager
def _without_auto_cast() -> Iterator[None]:
    """Trace in float32, as outside of `paddle.amp.auto_cast`.

    A static program that used `auto_cast` leaves its record set for the whole process. With that record, ppdiffusers'
    VAE checks for infinity, which does not convert to ONNX.
    """
    module: Any = importlib.import_module("paddle.amp.auto_cast")
    record = module._g_amp_state_
    module._g_amp_state_ = None
    try:
        yield
    finally:
        module._g_amp_state_ = record


def forget_traces() -> None:
    """Empty Paddle's records of the parameters of programs that are being traced.

    They are under the `id` of the program, and stay if tracing fails: so do the parameters, and a later program at the
    same address gets them as its own (Paddle 2.6), or crashes (Paddle 3).
    """
    translator = importlib.import_module("paddle.jit.dy2static.program_translator").ProgramTranslator.get_instance()
    records = [translator._params_recorder.params_dict, translator._inplace_map.params_dict]
    if importlib.util.find_spec("paddle.jit.dy2static.parameter_recorder"):  # Paddle 3
        recorder = importlib.import_module("paddle.jit.dy2static.parameter_recorder")
        parameters = recorder._global_parameter_recorder
        records += [parameters.params_dict, parameters.tensor2value, recorder._global_inplace_map.params_dict]
    for record in records:
        record.clear()
