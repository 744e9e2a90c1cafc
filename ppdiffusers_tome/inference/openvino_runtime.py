"""Run programs that were exported as ONNX in OpenVINO."""

import importlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ..errors import ToMeConfigError
from .folder import ExportedFolder
from .manifest import Manifest, ProgramFile
from .onnx_weights import weight_offsets
from .runtime import Load, Program, Runtime, load_error, load_module

PRECISIONS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
INDEX = "index"  # the input that chooses a program
Lengths = tuple[tuple[str, int, int], ...]  # (input, axis, length) of each dynamic axis


@dataclass(frozen=True, kw_only=True)
class OpenVinoRuntime(Runtime):
    """OpenVINO.

    Args:
        device: one of OpenVINO's, such as "cpu", "gpu", "gpu.1", "npu". Only "cpu" has been tested.
        threads: as in `Runtime`.
        precision: "fp32"; "bf16" on a CPU that has AVX512-BF16 or AMX; "fp16" on a GPU.
        share_weights: compile all programs of a model, such as the UNet's sizes and ratios, into one when the first
            of them runs, so that its weights are in memory once. That takes as long as compiling each of them.

    Raises:
        ToMeConfigError: a value is not allowed, or this machine does not have the device or the precision.
        ToMeExportError: OpenVINO is not installed.
    """

    format = "onnx"
    share_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in PRECISIONS:
            raise ToMeConfigError(f"precision={self.precision!r} is not allowed: it must be one of {[*PRECISIONS]}.")
        core = load_module("openvino").Core()
        available = [device.lower() for device in core.available_devices]
        if str(self.device).lower() not in available:
            raise ToMeConfigError(f"device={self.device!r} is not allowed: OpenVINO finds {', '.join(available)}.")
        has = core.get_property(self.device.upper(), "OPTIMIZATION_CAPABILITIES")
        if self.precision != "fp32" and self.precision.upper() not in has:
            raise ToMeConfigError(
                f"precision={self.precision!r} is not in the hardware of device={self.device!r}: use fp32."
            )

    def load(self, folder: ExportedFolder, file: ProgramFile) -> "OpenVinoProgram":
        return OpenVinoProgram(Compiled(folder, [file], self), 0)

    def loader(self, folder: ExportedFolder, manifest: Manifest) -> Load:
        if not self.share_weights:
            return super().loader(folder, manifest)
        models: dict[str, Compiled] = {}

        def load(file: ProgramFile) -> OpenVinoProgram:
            files = manifest.programs_of(file.model)
            if file.model not in models:
                models[file.model] = Compiled(folder, files, self)
            return OpenVinoProgram(models[file.model], files.index(file))

        return load


class OpenVinoProgram(Program):
    """A program in OpenVINO. Calls from several threads run one after another.

    The first call compiles it for the shapes of its inputs, which is up to a quarter faster than for any shapes. The
    first call with other shapes compiles it for any shapes. So its weights are in memory once or twice. A call raises
    ToMeExportError if this version of OpenVINO cannot compile the program.
    """

    def __init__(self, compiled: "Compiled", nth: int) -> None:
        self.inputs = compiled.inputs
        self._compiled, self._nth = compiled, nth

    def __call__(self, **inputs: paddle.Tensor) -> list[paddle.Tensor]:
        arrays = {name: np.ascontiguousarray(inputs[name].numpy()) for name in self.inputs}
        return [paddle.to_tensor(output) for output in self._compiled.run(self._nth, arrays)]


class Compiled:
    """Programs of one model, compiled into one. OpenVINO shares weights within a compiled model, and nowhere else.

    Args:
        folder: the exported folder.
        files: programs of it, which differ in their nodes and in the fixed lengths of their inputs.
        runtime: device, threads and precision.

    Raises:
        ToMeExportError: this version of OpenVINO cannot read one.
    """

    def __init__(self, folder: ExportedFolder, files: Sequence[ProgramFile], runtime: OpenVinoRuntime) -> None:
        self._paths, self._device = [folder.path / str(file.onnx) for file in files], runtime.device.upper()
        self._reading = partial(folder.reading, [name for file in files for name in file.onnx_files])
        self._settings: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": PRECISIONS[runtime.precision],
        }
        if self._device == "CPU":
            self._settings["INFERENCE_NUM_THREADS"] = runtime.cores()
        self._openvino = load_module("openvino")
        self._core = self._openvino.Core()
        self._core.set_property({"ENABLE_MMAP": False})  # or a file that is overwritten would change what is computed
        with self._reading():
            parameters = _inputs(self._read(self._paths[0]))
        self.inputs = [*parameters]
        self._open = [
            (name, axis)
            for name, parameter in parameters.items()
            for axis, length in enumerate(parameter.get_partial_shape())
            if length.is_dynamic
        ]
        # By lengths; None: any.
        self._models: dict[Lengths | None, tuple[Any, list[np.ndarray], list[dict[str, int]]]] = {}
        self._lock = threading.Lock()

    def run(self, nth: int, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs of a program for its inputs by name."""
        lengths = tuple((name, axis, arrays[name].shape[axis]) for name, axis in self._open)
        with self._lock:
            key = lengths if lengths in self._models or not self._models else None
            if key not in self._models:
                with self._reading():
                    try:
                        self._models[key] = self._compile(key)
                    except Exception as error:
                        raise load_error(self._openvino, self._paths[nth], error) from error
            compiled, unused, positions = self._models[key]
            values = [*unused[:-1], np.array(nth, "int32")] if len(self._paths) > 1 else [*unused]
            for name, position in positions[nth].items():
                values[position] = arrays[name]
            outputs = compiled(values)
            return [outputs[output] for output in compiled.outputs]

    def _compile(self, lengths: Lengths | None) -> tuple[Any, list[np.ndarray], list[dict[str, int]]]:
        """The compiled programs, a value for each of its inputs, and the position of each program's inputs by name."""
        models = [self._read(path) for path in self._paths]
        for model in models:
            shapes = {name: parameter.get_partial_shape() for name, parameter in _inputs(model).items()}
            for name, axis, length in lengths or ():
                shapes[name][axis] = length
            model.reshape(dict(enumerate(shapes.values())))
            for name, parameter in _inputs(model).items():  # programs that differ in a fixed length have an input each
                parameter.set_friendly_name(f"{name} {parameter.get_partial_shape()}")
        _share_weights(models, [weight_offsets(path) for path in self._paths])
        names = [[*_inputs(model)] for model in models]
        joined = models[-1]
        for nth in reversed(range(len(models) - 1)):
            joined = _if_index_equals(nth, models[nth], joined)
        places = {name: place for place, name in enumerate(_inputs(joined))}
        unused = [_zeros(parameter) for parameter in _inputs(joined).values()]
        positions = [dict(zip(self.inputs, (places[name] for name in own), strict=True)) for own in names]
        return self._core.compile_model(joined, self._device, self._settings), unused, positions

    def _read(self, path: Path) -> Any:
        try:
            return self._core.read_model(path)
        except Exception as error:
            raise load_error(self._openvino, path, error) from error


def _inputs(model: Any) -> dict[str, Any]:
    """The inputs of a model by name. Their tensors have further names, of operations that OpenVINO has removed."""
    return {parameter.get_friendly_name(): parameter for parameter in model.get_parameters()}


def _zeros(parameter: Any) -> np.ndarray:
    shape = [1 if length.is_dynamic else length.get_length() for length in parameter.get_partial_shape()]
    return np.zeros(shape, parameter.get_element_type().to_dtype())


def _share_weights(models: Sequence[Any], offsets: Sequence[Mapping[str, int]]) -> None:
    """Let the operators of all models read equal weights from one constant.

    Args:
        offsets: for each model the offsets of its weights in their common file, by name.
    """
    constants: dict[tuple[int, str, str], Any] = {}  # equal bytes may have different shapes, such as zeros
    for model, places in zip(models, offsets, strict=True):
        for operator in model.get_ops():
            offset = places.get(operator.get_friendly_name())
            if operator.get_type_name() != "Constant" or offset is None:
                continue
            key = offset, str(operator.get_output_shape(0)), str(operator.get_output_element_type(0))
            shared = constants.setdefault(key, operator)
            for user in operator.output(0).get_target_inputs() if shared is not operator else ():
                user.replace_source_output(shared.output(0))


def _if_index_equals(n: int, then: Any, otherwise: Any) -> Any:
    """A model that computes `then` if its last input, an index, equals n, and `otherwise` if not.

    Its other inputs are those of both models, one for each name; only those of the chosen one are read.
    """
    openvino = load_module("openvino")
    ops = importlib.import_module("openvino.opset13")

    def parameter(name: str, shape: Any, dtype: Any) -> Any:
        made = ops.parameter(shape, dtype)
        made.set_friendly_name(name)
        return made

    index = parameter(INDEX, [], np.int32)
    choice = ops.if_op(ops.equal(index, ops.constant(np.int32(n))).output(0))
    choice.set_then_body(then)
    choice.set_else_body(otherwise)
    own, others = _inputs(then), _inputs(otherwise)
    if INDEX in others:
        choice.set_input(index.output(0), None, others.pop(INDEX))
    inputs = []
    for name, one in {**others, **own}.items():
        inputs.append(parameter(name, one.get_partial_shape(), one.get_element_type()))
        choice.set_input(inputs[-1].output(0), own.get(name), others.get(name))
    pairs = zip(then.get_results(), otherwise.get_results(), strict=True)
    results = [ops.result(choice.set_output(*pair)) for pair in pairs]
    return openvino.Model(results, [*inputs, index], then.get_friendly_name())
