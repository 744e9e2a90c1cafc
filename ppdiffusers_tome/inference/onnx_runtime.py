"""Run programs that were exported as ONNX in ONNX Runtime."""

import logging
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import paddle

from ..errors import ToMeConfigError, ToMeExportError
from .cuda_graph import CudaGraphs
from .manifest import ProgramFile
from .onnx_weights import OPTIMIZED, WEIGHTS_FOLDER
from .runtime import Program, Runtime, load_error, load_module

logger = logging.getLogger(__name__)
PROVIDERS = {  # device → ONNX Runtime's name
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}


@dataclass(frozen=True, kw_only=True)
class OnnxRuntime(Runtime):
    """ONNX Runtime.

    Args:
        device: the execution provider: "cpu"; with another build of ONNX Runtime "cuda", "tensorrt" (or "cuda:1" for
            the second GPU) or "openvino". "cpu" is tested, and the programs of "cuda" have run on a GPU.
        threads: as in `Runtime`.
        precision: "fp32"; with device="cuda" also "fp16".
        cuda_graph: with device="cuda", launch all kernels of a pass at once: faster for small images, in more memory.
            Passes of one program wait for one another. Each size of batch has its own copy of the weights.

    Raises:
        ToMeConfigError: a value is not allowed, or this build of ONNX Runtime does not have the provider.
        ToMeExportError: ONNX Runtime is not installed.
    """

    format = "onnx"
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, index = str(self.device).partition(":")
        if kind not in PROVIDERS or (index and not (kind in ("cuda", "tensorrt") and index.isdecimal())):
            names = ", ".join(PROVIDERS)
            raise ToMeConfigError(f"device={self.device!r} is not allowed: it must be {names}, cuda:N or tensorrt:N.")
        if self.precision not in (("fp32", "fp16") if kind == "cuda" else ("fp32",)):
            raise ToMeConfigError(
                f"precision={self.precision!r} is not allowed: ONNX Runtime computes in fp32 here, and on "
                "device='cuda' also in fp16."
            )
        if self.cuda_graph and kind != "cuda":
            raise ToMeConfigError(f"cuda_graph=True needs device='cuda', not {self.device!r}: leave it out.")
        available = load_module("onnxruntime").get_available_providers()
        if PROVIDERS[kind] not in available:
            raise ToMeConfigError(
                f"device={self.device!r} is not in this build of ONNX Runtime, which has {', '.join(available)}: "
                "install the build that has it, such as onnxruntime-gpu in place of onnxruntime."
            )

    @property
    def kind(self) -> str:
        """The device without its number."""
        return str(self.device).partition(":")[0]

    @property
    def index(self) -> int:
        """The number of the GPU."""
        return int(str(self.device).partition(":")[2] or 0)

    def load(self, folder: Path, file: ProgramFile) -> "OnnxProgram":
        return OnnxProgram(folder / str(file.onnx), self)


class OnnxProgram(Program):
    """A program in ONNX Runtime, whose sessions may run in several threads at once.

    On a CPU its attention is fused, and it shares its weights with the other programs of its folder: see
    `onnx_programs`. On a CUDA GPU its attention is fused too: see `onnx_gpu`.

    Args:
        is_temporary: the file is used once, so no optimized form of it is written.

    Raises:
        ToMeExportError: this version of ONNX Runtime cannot load it on the device.
    """

    def __init__(self, path: Path, runtime: OnnxRuntime, is_temporary: bool = False) -> None:
        self._graphs: CudaGraphs | None = None
        if runtime.cuda_graph:
            shapes = _input_shapes(path)
            open_session = partial(_open_session, path, runtime, is_temporary)
            self._graphs = CudaGraphs(load_module("onnxruntime"), open_session, shapes, runtime.index)
            self.inputs = [*shapes]
        else:
            self._session = _open_session(path, runtime, is_temporary, {})
            self.inputs = [value.name for value in self._session.get_inputs()]

    def __call__(self, **inputs: paddle.Tensor) -> list[paddle.Tensor]:
        arrays = {name: np.ascontiguousarray(inputs[name].numpy()) for name in self.inputs}
        outputs = self._session.run(None, arrays) if self._graphs is None else self._graphs(arrays)
        return [paddle.to_tensor(output) for output in outputs]


def _open_session(path: Path, runtime: OnnxRuntime, is_temporary: bool, sizes: dict[str, int]) -> Any:
    """A session of a program, with sizes for some of its open dimensions."""
    onnxruntime = load_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = runtime.cores()
    for name, size in sizes.items():
        options.add_free_dimension_override_by_name(name, size)
    settings: dict[str, Any] = {"device_id": runtime.index} if runtime.index else {}
    if runtime.kind == "cuda":
        settings |= {"enable_cuda_graph": "1"} if runtime.cuda_graph else {}
        # Convolutions with channels last: 1.07 to 1.15 times as fast in float16 on an H100 (benchmarks/gpu_onnx.md).
        settings |= {"prefer_nhwc": "1"} if runtime.precision == "fp16" else {}
    provider = PROVIDERS[runtime.kind]
    try:
        program = _program(path, runtime.kind, runtime, options, is_temporary)
        if isinstance(program, bytes):
            options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
        session = onnxruntime.InferenceSession(program, options, providers=[(provider, settings)])
    except Exception as error:
        raise load_error(onnxruntime, path, error) from error
    if session.get_providers()[0] != provider:  # it falls back to the CPU with a warning
        raise ToMeExportError(
            f"ONNX Runtime {onnxruntime.__version__} cannot use device={runtime.device!r}: check its driver and "
            "libraries."
        )
    return session


def _input_shapes(path: Path) -> dict[str, list[int | str]]:
    """The shapes of a program's inputs, with the names of dimensions that it leaves open."""
    onnx = load_module("onnx")
    inputs = onnx.load(str(path), load_external_data=False).graph.input
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in inputs
    }


def _program(path: Path, kind: str, runtime: OnnxRuntime, options: Any, is_temporary: bool) -> str | bytes:
    """The program of a file in the form that suits the device: a path, or the content. Options are changed for it."""
    from . import onnx_gpu, onnx_programs  # late: to run programs in Paddle, onnx need not be installed

    if kind == "cuda":
        return str(onnx_gpu.half_program(path)) if runtime.precision == "fp16" else onnx_gpu.gpu_program(path)
    if kind != "cpu":
        return str(path)
    threads, onnxruntime = runtime.cores(), load_module("onnxruntime")
    if is_temporary:
        return onnx_programs.fused(path, threads)
    try:
        program = str(onnx_programs.optimized(path, threads))
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s), so each program has its own weights in memory: make the folder writable",
            path.parent / OPTIMIZED,
            error.strerror or error,
        )
        return onnx_programs.fused(path, threads)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is optimized already
    options.add_session_config_entry("session.use_env_allocators", "1")
    _share_memory(onnxruntime)
    return program


@lru_cache(maxsize=1)
def _share_memory(onnxruntime: ModuleType) -> None:
    """Let all sessions of this process share one pool of memory for activations."""
    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(place, None)
