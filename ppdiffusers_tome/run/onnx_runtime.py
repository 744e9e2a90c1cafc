"""Run programs that were exported as ONNX in ONNX Runtime."""

import logging
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import paddle

from ..errors import ParameterError, ToMeError, ToMeExportError
from .folder import ExportedFolder
from .manifest import Files
from .onnx_weights import IN_MEMORY, OPTIMIZED, WEIGHTS_FOLDER, weight_files
from .runtime import Program, Runtime, error_summary, load_error, load_module

logger = logging.getLogger(__name__)
_memory_lock = threading.Lock()  # of `_share_memory`, which ONNX Runtime refuses the second time
PROVIDERS = {  # device → ONNX Runtime's name
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}


@dataclass(frozen=True, kw_only=True)
class OnnxRuntime(Runtime):
    """ONNX Runtime.

    Args:
        device: the execution provider: "cpu"; with different builds of ONNX Runtime "cuda" (or "cuda:1" for the
            second GPU) or "openvino". "cpu" is tested, and the programs of "cuda" have run on a GPU.
        threads: as in `Runtime`.
        precision: "fp32"; with device="cuda" also "fp16".

    Raises:
        ToMeConfigError: a value is not allowed, or this build of ONNX Runtime does not have the provider.
        ToMeExportError: ONNX Runtime is not installed.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, index = str(self.device).partition(":")
        if kind not in PROVIDERS or (index and not (kind == "cuda" and index.isdecimal())):
            raise ParameterError("device", self.device, f"it must be {', '.join(PROVIDERS)} or cuda:N.")
        if self.precision not in (("fp32", "fp16") if kind == "cuda" else ("fp32",)):
            rule = "ONNX Runtime computes in fp32 here, and with CUDA also in fp16."
            raise ParameterError("precision", self.precision, rule)
        available = load_module("onnxruntime").get_available_providers()
        if PROVIDERS[kind] not in available:
            remedy = "install the build that has it, such as onnxruntime-gpu in place of onnxruntime."
            rule = f"this build of ONNX Runtime has only {', '.join(available)}: {remedy}"
            raise ParameterError("device", self.device, rule)

    @property
    def kind(self) -> str:
        """The device without its number."""
        return str(self.device).partition(":")[0]

    @property
    def index(self) -> int:
        """The number of the GPU."""
        return int(str(self.device).partition(":")[2] or 0)

    def load(self, folder: ExportedFolder, files: Files) -> "OnnxProgram":
        return OnnxProgram(folder.path / files.program, self, folder, files.paths)


class OnnxProgram(Program):
    """A program in ONNX Runtime, whose sessions may run in several threads at once.

    On a CPU its attention is fused, and it shares its weights with all programs of its folder: see
    `onnx_cpu`. On a CUDA GPU its attention is fused too: see `onnx_gpu`.

    Args:
        folder: the exported folder that the file is in. None: the file is used once, so no optimized form of it is
            written.
        names: the files of the program in the folder.

    Raises:
        ToMeExportError: this version of ONNX Runtime cannot load it on the device.
    """

    def __init__(
        self, path: Path, runtime: OnnxRuntime, folder: ExportedFolder | None = None, names: Sequence[str] = ()
    ) -> None:
        with nullcontext() if folder is None else folder.reading(names):
            self._session = _open_session(path, runtime, folder)
        self.inputs = [value.name for value in self._session.get_inputs()]

    def __call__(self, **inputs: paddle.Tensor) -> list[paddle.Tensor]:
        arrays = {name: np.ascontiguousarray(inputs[name].numpy()) for name in self.inputs}
        return [paddle.to_tensor(output) for output in self._session.run(None, arrays)]


def _open_session(path: Path, runtime: OnnxRuntime, folder: ExportedFolder | None) -> Any:
    """A session of a program."""
    onnxruntime = load_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = runtime.cores()
    settings: dict[str, Any] = {"device_id": runtime.index} if runtime.index else {}
    if runtime.precision == "fp16":
        # Convolutions with channels last: 1.07 to 1.15 times as fast in float16 on an H100 (benchmarks/gpu_onnx.md).
        settings["prefer_nhwc"] = "1"
    provider = PROVIDERS[runtime.kind]
    try:
        program, weights = _program(path, runtime, folder, options)
        if weights:  # ONNX Runtime copies them while it makes the session
            contents = [*weights.values()]
            options.add_external_initializers_from_files_in_memory([*weights], contents, [*map(len, contents)])
        session = onnxruntime.InferenceSession(program, options, providers=[(provider, settings)])
    except ToMeError:
        raise
    except Exception as error:
        raise load_error(onnxruntime, path, error) from error
    if session.get_providers()[0] != provider:  # it falls back to the CPU with a warning
        raise ToMeExportError(
            f"ONNX Runtime {onnxruntime.__version__} cannot use the device {runtime.device}: check its driver and "
            "libraries."
        )
    return session


def _program(
    path: Path, runtime: OnnxRuntime, folder: ExportedFolder | None, options: Any
) -> tuple[str | bytes, dict[str, bytes]]:
    """The program of a file in the form that suits the device, and the files of its weights that are in memory.

    The program is a path, or the content of a file. Options are changed for it.
    """
    from . import onnx_cpu, onnx_gpu  # late: to run programs in Paddle, onnx need not be installed

    if runtime.kind not in ("cpu", "cuda"):
        return str(path), {}
    threads, is_half = runtime.cores(), runtime.precision == "fp16"
    write = partial(onnx_cpu.optimized, threads=threads) if runtime.kind == "cpu" else onnx_gpu.half_program
    if folder is not None and (is_half or runtime.kind == "cpu"):
        try:
            written = write(folder, path)
        except ToMeError:
            raise
        except Exception as error:  # if it is the program, to load it from memory fails too
            logger.warning(
                "%s cannot be written (%s), so each program has its own weights in memory: make room, or make the "
                "folder writable",
                path.parent / OPTIMIZED,
                error_summary(error),
            )
        else:
            if not is_half:
                _use_optimized(options)
            return str(written), {}
    if is_half:
        program, weights = onnx_gpu.half_in_memory(path)
        return program, {IN_MEMORY: weights}
    options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
    if runtime.kind == "cuda":
        return onnx_gpu.gpu_program(path), {}
    # ONNX Runtime would map the files into memory, and compute with what is written to them later.
    names = [] if folder is None else weight_files(path)
    return onnx_cpu.fused(path, threads), {name: (path.parent / name).read_bytes() for name in names}


def _use_optimized(options: Any) -> None:
    """Set the options for a program that `onnx_cpu.optimized` has written."""
    onnxruntime = load_module("onnxruntime")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is optimized already
    options.add_session_config_entry("session.use_env_allocators", "1")
    with _memory_lock:
        _share_memory(onnxruntime)


@lru_cache(maxsize=1)
def _share_memory(onnxruntime: ModuleType) -> None:
    """Let all sessions of this process share one pool of memory for activations."""
    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(place, None)
