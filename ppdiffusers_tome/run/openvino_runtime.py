"""Run programs that were exported as ONNX in OpenVINO."""

import threading
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import paddle

from ..errors import ParameterError
from .folder import ExportedFolder
from .manifest import Files
from .runtime import Program, Runtime, load_error, load_module

PRECISIONS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
Lengths = tuple[tuple[str, int, int], ...]  # (input, axis, length) of each dynamic axis


@cache
def core() -> Any:
    """OpenVINO's core, one for the process.

    On a CPU with AMX, each core that compiles gives its thread a stack for signal handlers. When the second of two
    ends, the stack is gone, and Ctrl-C crashes the process (openvino 2026.4.1).

    Raises:
        ToMeExportError: OpenVINO is not installed.
    """
    core = load_module("openvino").Core()
    core.set_property({"ENABLE_MMAP": False})  # or a file that is overwritten would change what is computed
    return core


@dataclass(frozen=True, kw_only=True)
class OpenVinoRuntime(Runtime):
    """OpenVINO.

    Args:
        device: one of OpenVINO's, such as "cpu", "gpu", "gpu.1", "npu". Only "cpu" has been tested.
        threads: as in `Runtime`.
        precision: "fp32"; "bf16" on a CPU that has AVX512-BF16 or AMX; "fp16" on a GPU.

    Raises:
        ToMeConfigError: a value is not allowed, or this machine does not have the device or the precision.
        ToMeExportError: OpenVINO is not installed.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in PRECISIONS:
            raise ParameterError("precision", self.precision, f"it must be one of {[*PRECISIONS]}.")
        available = [device.lower() for device in core().available_devices]
        if str(self.device).lower() not in available:
            raise ParameterError("device", self.device, f"OpenVINO finds {', '.join(available)}.")
        has = core().get_property(self.device.upper(), "OPTIMIZATION_CAPABILITIES")
        if self.precision != "fp32" and self.precision.upper() not in has:
            raise ParameterError("precision", self.precision, f"the device {self.device} does not have it: use fp32.")

    def load(self, folder: ExportedFolder, files: Files) -> "OpenVinoProgram":
        return OpenVinoProgram(folder, files, self)


class OpenVinoProgram(Program):
    """A program in OpenVINO. Calls from several threads run one after another.

    The first call compiles it for the shapes of its inputs, which is up to a quarter faster than for any shapes. The
    first call with different shapes compiles it for any shapes. So its weights are in memory once or twice. A call
    raises ToMeExportError if this version of OpenVINO cannot compile the program.

    Raises:
        ToMeExportError: this version of OpenVINO cannot read it.
    """

    def __init__(self, folder: ExportedFolder, files: Files, runtime: OpenVinoRuntime) -> None:
        self._path, self._device = folder.path / files.program, runtime.device.upper()
        self._reading = partial(folder.reading, files.paths)
        self._settings: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": PRECISIONS[runtime.precision],
        }
        if self._device == "CPU":
            self._settings["INFERENCE_NUM_THREADS"] = runtime.cores()
        with self._reading():
            shapes = _input_shapes(self._read())
        self.inputs = [*shapes]
        self._open = [
            (name, axis) for name, shape in shapes.items() for axis, length in enumerate(shape) if length.is_dynamic
        ]
        self._compiled: dict[Lengths | None, Any] = {}  # by lengths; None: any
        self._lock = threading.Lock()

    def __call__(self, **inputs: paddle.Tensor) -> list[paddle.Tensor]:
        arrays = {name: np.ascontiguousarray(inputs[name].numpy()) for name in self.inputs}
        lengths = tuple((name, axis, arrays[name].shape[axis]) for name, axis in self._open)
        with self._lock:
            key = lengths if lengths in self._compiled or not self._compiled else None
            if key not in self._compiled:
                with self._reading():
                    try:
                        self._compiled[key] = self._compile(key)
                    except Exception as error:
                        raise load_error(load_module("openvino"), self._path, error) from error
            compiled = self._compiled[key]
            outputs = compiled([*arrays.values()])
            return [paddle.to_tensor(outputs[output]) for output in compiled.outputs]

    def _compile(self, lengths: Lengths | None) -> Any:
        model = self._read()
        shapes = _input_shapes(model)
        for name, axis, length in lengths or ():
            shapes[name][axis] = length
        model.reshape(dict(enumerate(shapes.values())))
        return core().compile_model(model, self._device, self._settings)

    def _read(self) -> Any:
        try:
            return core().read_model(self._path)
        except Exception as error:
            raise load_error(load_module("openvino"), self._path, error) from error


def _input_shapes(model: Any) -> dict[str, Any]:
    """The shape of each input by name. Their tensors have further names, of operations that OpenVINO has removed."""
    return {input_.get_friendly_name(): input_.get_partial_shape() for input_ in model.get_parameters()}
