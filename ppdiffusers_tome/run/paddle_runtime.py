"""Run programs in Paddle Inference predictors."""

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import inference

from ..errors import ParameterError, ToMeConfigError, ToMeError, ToMeExportError
from .folder import ExportedFolder
from .manifest import Files
from .runtime import Program, Runtime, error_summary, is_accurate

PRECISIONS = {"fp32": "Float32", "fp16": "Half", "bf16": "Bfloat16"}


@dataclass(frozen=True, kw_only=True)
class PaddleRuntime(Runtime):
    """Paddle Inference.

    Args:
        device: "cpu", "gpu" or "gpu:1".
        threads: as in `Runtime`.
        precision: "fp32"; on a GPU also "fp16" and "bf16".
        onednn: use oneDNN's kernels on the CPU, which are several times faster. None: on for `.pdmodel` programs that
            passed the export's oneDNN check, off for Paddle 3's `.json`, with which it crashes (Paddle #77340) or is
            inaccurate.
        optimize: let Paddle fuse operators. Without fusion a program on the CPU rounds as eager does, and is slower.

    The GPU settings follow ppdiffusers' deploy/ and Paddle's documentation and have not been tested.

    Raises:
        ToMeConfigError: a value is not allowed, or not on this device.
    """

    onednn: bool | None = None
    optimize: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, _, index = str(self.device).partition(":")
        if kind not in ("cpu", "gpu") or (index and not (kind == "gpu" and index.isdecimal())):
            raise ParameterError("device", self.device, 'it must be "cpu", "gpu" or "gpu:N".')
        if self.precision not in PRECISIONS:
            raise ParameterError("precision", self.precision, f"it must be one of {[*PRECISIONS]}.")
        if kind == "cpu" and self.precision != "fp32":
            rule = "on a CPU Paddle Inference runs in fp32. OpenVINO also has bf16 there."
            raise ParameterError("precision", self.precision, rule)
        if kind == "gpu" and self.onednn:
            raise ParameterError("onednn", True, "oneDNN has kernels for CPUs only.")
        gpus = paddle.device.cuda.device_count()
        if kind == "gpu" and int(index or 0) >= gpus:
            remedy = "this is a CPU build of Paddle, install paddlepaddle-gpu in place of paddlepaddle"
            if paddle.is_compiled_with_cuda():
                remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
            raise ParameterError("device", self.device, f"Paddle finds {gpus} GPUs: {remedy}.")

    @property
    def gpu(self) -> int | None:
        """The index of the GPU; None on the CPU."""
        kind, _, index = self.device.partition(":")
        return int(index or 0) if kind == "gpu" else None

    def load(self, folder: ExportedFolder, files: Files) -> "Predictor":
        is_unset = self.onednn is None and self.gpu is None
        onednn = is_accurate(files.onednn_parity) if is_unset else self.onednn
        return Predictor(folder, files, replace(self, onednn=onednn))


class Predictor(Program):
    """A program in Paddle Inference. Calls from several threads run one after another.

    Args:
        runtime: device and settings; `onednn` None means off here.

    Raises:
        ToMeExportError: this Paddle cannot load the program, or this process was forked from a process with
            predictors. A call raises that too.
    """

    _process: ClassVar[int | None] = None  # the process that has made predictors

    def __init__(self, folder: ExportedFolder, files: Files, runtime: PaddleRuntime) -> None:
        _check_process()
        program, params = (folder.path / path for path in files.paths)
        if program.suffix == ".json" and paddle.__version__.startswith("2."):
            raise ToMeExportError(
                f"{program} was exported by Paddle 3, which Paddle {paddle.__version__} cannot read: export it "
                "again with this Paddle."
            )
        if program.suffix == ".json" and runtime.onednn:
            raise ToMeConfigError(
                f"onednn=True is not allowed for {program.name}: with Paddle 3's .json programs oneDNN crashes "
                "(Paddle #77340) or is inaccurate. Leave it out, or export with Paddle 2.6."
            )
        self._gpu = runtime.gpu is not None
        self._lock = threading.Lock()
        with folder.reading(files.paths):
            try:
                config = inference.Config(str(program), str(params))
                _configure(config, runtime, program)
                self._predictor = inference.create_predictor(config)
            except ToMeError:
                raise
            except Exception as error:
                raise ToMeExportError(
                    f"Paddle {paddle.__version__} cannot load {program}: {error_summary(error)}"
                ) from error
        self.inputs = list(self._predictor.get_input_names())
        self.outputs = list(self._predictor.get_output_names())

    def __call__(self, **inputs: paddle.Tensor) -> list[paddle.Tensor]:
        _check_process()
        with self._lock:
            for name in self.inputs:
                handle = self._predictor.get_input_handle(name)
                if self._gpu:
                    handle.share_external_data(inputs[name])
                else:  # predictor.run([tensors]) crashes on the CPU of Paddle 2.6
                    value = np.ascontiguousarray(inputs[name].numpy())
                    handle.reshape(value.shape)
                    handle.copy_from_cpu(value)
            self._predictor.run()
            # On a GPU too: nothing else reads an output handle, and run([tensors]) has not been tried there.
            outputs = [self._predictor.get_output_handle(name).copy_to_cpu() for name in self.outputs]
        return [paddle.to_tensor(output) for output in outputs]


def _check_process() -> None:
    """Raise in a process that was forked after predictors were made: it has none of their threads."""
    if Predictor._process is None:
        Predictor._process = os.getpid()
    if Predictor._process != os.getpid():
        raise ToMeExportError(
            "this process was forked from one that has loaded Paddle programs, which crash or hang here: start it by "
            '"spawn" (multiprocessing.get_context("spawn")), or fork before the first image.'
        )


def _configure(config: Any, runtime: PaddleRuntime, program: Path) -> None:
    """Set what the runtime asks for."""
    config.disable_glog_info()
    config.switch_ir_optim(runtime.optimize)
    if program.suffix != ".json":  # it fails with Paddle 3's programs, on every device
        config.enable_memory_optim()
    if runtime.gpu is None:
        _for_cpu(config, runtime)
    else:
        _for_gpu(config, runtime)


def _for_cpu(config: Any, runtime: PaddleRuntime) -> None:
    config.disable_gpu()
    config.set_cpu_math_library_num_threads(runtime.cores())
    if runtime.onednn:
        config.enable_mkldnn()
        config.set_mkldnn_cache_capacity(10)  # shapes; without a limit memory grows with each new shape
    else:
        config.disable_mkldnn()  # on by default


def _for_gpu(config: Any, runtime: PaddleRuntime) -> None:
    precision = getattr(inference.PrecisionType, PRECISIONS[runtime.precision])
    config.enable_use_gpu(2000, runtime.gpu, precision)  # initial size of the memory pool, MB
    config.delete_pass("auto_mixed_precision_pass")  # as ppdiffusers' deploy/ does for every diffusion model
