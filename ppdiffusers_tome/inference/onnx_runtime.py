"""Run programs that were exported as ONNX: in ONNX Runtime, or in OpenVINO."""

import importlib
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import paddle

from ..errors import ToMeConfigError, ToMeExportError, install_command
from .manifest import ProgramFile
from .onnx_programs import OPTIMIZED, WEIGHTS_FOLDER, fused, optimized
from .runtime import Program, Runtime, error_summary

logger = logging.getLogger(__name__)
PROVIDERS = {  # device → ONNX Runtime's name
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}
OPENVINO_PRECISIONS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class OnnxRuntime(Runtime):
    """ONNX Runtime.

    Args:
        device: the execution provider: "cpu"; with another build of ONNX Runtime "cuda", "tensorrt" (or "cuda:1" for
            the second GPU) or "openvino". Only "cpu" has been tested.
        threads: as in `Runtime`.
        precision: "fp32".

    Raises:
        ToMeConfigError: a value is not allowed, or this build of ONNX Runtime does not have the provider.
        ToMeExportError: ONNX Runtime is not installed.
    """

    format = "onnx"

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, index = str(self.device).partition(":")
        if kind not in PROVIDERS or (index and not (kind in ("cuda", "tensorrt") and index.isdecimal())):
            names = ", ".join(PROVIDERS)
            raise ToMeConfigError(f"device={self.device!r} is not allowed: it must be {names}, cuda:N or tensorrt:N.")
        if self.precision != "fp32":
            raise ToMeConfigError(f"precision={self.precision!r} is not allowed: ONNX Runtime computes in fp32 here.")
        available = _load_module("onnxruntime").get_available_providers()
        if PROVIDERS[kind] not in available:
            raise ToMeConfigError(
                f"device={self.device!r} is not in this build of ONNX Runtime, which has {', '.join(available)}: "
                "install the build that has it, such as onnxruntime-gpu in place of onnxruntime."
            )

    def load(self, folder: Path, file: ProgramFile) -> "OnnxProgram":
        return OnnxProgram(folder / str(file.onnx), self)


class OnnxProgram(Program):
    """A program in ONNX Runtime, whose sessions may run in several threads at once.

    On a CPU its attention is fused, and it shares its weights with the other programs of its folder: see
    `onnx_programs`.

    Args:
        path: `.onnx` file.
        runtime: device and threads.
        is_temporary: the file is used once, so it is not written in its optimized form.

    Raises:
        ToMeExportError: this version of ONNX Runtime cannot load it on the device.
    """

    def __init__(self, path: Path, runtime: OnnxRuntime, is_temporary: bool = False) -> None:
        onnxruntime = _load_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = threads = runtime.cores()
        kind, _, index = runtime.device.partition(":")
        provider = (PROVIDERS[kind], {"device_id": int(index)} if index else {})
        program: str | bytes = str(path)
        try:
            if kind == "cpu":
                program = fused(path, threads) if is_temporary else _optimized(path, threads, options, onnxruntime)
            if isinstance(program, bytes):
                options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
            self._session = onnxruntime.InferenceSession(program, options, providers=[provider])
        except Exception as error:
            raise _load_error(onnxruntime, path, error) from error
        if self._session.get_providers()[0] != PROVIDERS[kind]:  # it falls back to the CPU with a warning
            raise ToMeExportError(
                f"ONNX Runtime {onnxruntime.__version__} cannot use device={runtime.device!r}: check its driver and "
                "libraries."
            )
        self.inputs = [value.name for value in self._session.get_inputs()]

    def __call__(self, **inputs: paddle.Tensor) -> list[paddle.Tensor]:
        arrays = {name: np.ascontiguousarray(inputs[name].numpy()) for name in self.inputs}
        return [paddle.to_tensor(output) for output in self._session.run(None, arrays)]


def _optimized(path: Path, threads: int, options: Any, onnxruntime: ModuleType) -> str | bytes:
    """The optimized program of a file, with options to run it; where it cannot be written, the program itself."""
    try:
        program = str(optimized(path, threads))
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s), so each program has weights in memory of its own: make the folder writable",
            path.parent / OPTIMIZED,
            error.strerror or error,
        )
        return fused(path, threads)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is done
    options.add_session_config_entry("session.use_env_allocators", "1")
    _share_memory(onnxruntime)
    return program


@lru_cache(maxsize=1)
def _share_memory(onnxruntime: ModuleType) -> None:
    """Let the sessions of this process take the memory of activations from one pool, instead of one each."""
    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(place, None)


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

    format = "onnx"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in OPENVINO_PRECISIONS:
            raise ToMeConfigError(
                f"precision={self.precision!r} is not allowed: it must be one of {[*OPENVINO_PRECISIONS]}."
            )
        core = _load_module("openvino").Core()
        available = [device.lower() for device in core.available_devices]
        if str(self.device).lower() not in available:
            raise ToMeConfigError(f"device={self.device!r} is not allowed: OpenVINO finds {', '.join(available)}.")
        has = core.get_property(self.device.upper(), "OPTIMIZATION_CAPABILITIES")
        if self.precision != "fp32" and self.precision.upper() not in has:
            raise ToMeConfigError(
                f"precision={self.precision!r} is not in the hardware of device={self.device!r}: use fp32."
            )

    def load(self, folder: Path, file: ProgramFile) -> "OpenVinoProgram":
        return OpenVinoProgram(folder / str(file.onnx), self)


class OpenVinoProgram(Program):
    """A program in OpenVINO. Calls from several threads run one after another.

    The first call compiles it for the shapes of its inputs, which is up to a quarter faster than for any shapes. The
    first call with other shapes compiles it for any. So it holds its weights once or twice.

    Args:
        path: `.onnx` file.
        runtime: device, threads and precision.

    Raises:
        ToMeExportError: this version of OpenVINO cannot read it or, when it is called, cannot compile it.
    """

    def __init__(self, path: Path, runtime: OpenVinoRuntime) -> None:
        self._openvino = _load_module("openvino")
        self._path, self._device = path, runtime.device.upper()
        self._settings: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": OPENVINO_PRECISIONS[runtime.precision],
        }
        if self._device == "CPU":
            self._settings["INFERENCE_NUM_THREADS"] = runtime.cores()
        self._core = self._openvino.Core()
        try:
            self._model = self._core.read_model(path)
        except Exception as error:
            raise _load_error(self._openvino, path, error) from error
        # Tensors have further names, of operations that OpenVINO has removed.
        self.inputs = [parameter.get_friendly_name() for parameter in self._model.get_parameters()]
        self._compiled: dict[tuple[tuple[int, ...], ...] | None, Any] = {}  # by the inputs' shapes; None is any
        self._lock = threading.Lock()

    def __call__(self, **inputs: paddle.Tensor) -> list[paddle.Tensor]:
        arrays = [np.ascontiguousarray(inputs[name].numpy()) for name in self.inputs]
        shapes = tuple(array.shape for array in arrays)
        with self._lock:
            key = shapes if shapes in self._compiled or not self._compiled else None
            if key not in self._compiled:
                self._compiled[key] = self._compile(key)
            outputs = self._compiled[key](arrays)
            return [paddle.to_tensor(outputs[value]) for value in self._compiled[key].outputs]

    def _compile(self, shapes: tuple[tuple[int, ...], ...] | None) -> Any:
        try:
            model = self._model.clone()  # weights are shared
            if shapes is not None:
                model.reshape(dict(enumerate(shapes)))
            return self._core.compile_model(model, self._device, self._settings)
        except Exception as error:
            raise _load_error(self._openvino, self._path, error) from error


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """OpenVINO reports its import to its makers over the network, unless the package that does so is missing."""
    name = "openvino_telemetry"
    is_imported = name in sys.modules
    if not is_imported:
        sys.modules[name] = None  # type: ignore[assignment] # Python's way to say that it cannot be imported
    try:
        yield
    finally:
        if not is_imported:
            del sys.modules[name]


def _load_error(module: ModuleType, path: Path, error: Exception) -> ToMeExportError:
    return ToMeExportError(f"{module.__name__} {module.__version__} cannot load {path}: {error_summary(error)}")


def _load_module(name: str) -> ModuleType:
    try:
        with _no_telemetry():
            return importlib.import_module(name)
    except ImportError as error:
        raise ToMeExportError(f"{error}. runtime={name!r} needs: {install_command('onnx')}") from error
