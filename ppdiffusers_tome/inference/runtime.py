"""One program in a Paddle Inference predictor: the settings of the machine, and a call."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import inference

from ..errors import ToMeConfigError, ToMeExportError

SHAPES = "shape_range_info.pbtxt"  # what tensorrt="tune" writes beside a program, as ppdiffusers' deploy/ does
MOST_THREADS = 1024  # of one predictor
PRECISIONS = {"fp32": "Float32", "fp16": "Half", "bf16": "Bfloat16"}
# What ppdiffusers' deploy/ takes out of every diffusion model on a GPU.
GPU_PASSES_OFF = (
    "trt_prompt_tuning_embedding_eltwise_layernorm_fuse_pass",
    "add_support_int8_pass",
    "auto_mixed_precision_pass",
    "elementwise_groupnorm_act_pass",
    "groupnorm_act_pass",
    "preln_elementwise_groupnorm_act_pass",
)


@dataclass(frozen=True)
class Runtime:
    """Where and how programs run.

    Args:
        device: "cpu", "gpu" or "gpu:1".
        threads: of one predictor on the CPU, 1 to 1024; None: as many as the machine has cores.
        onednn: oneDNN's kernels on the CPU, several times faster. None: on for `.pdmodel` programs whose export found
            it right, off for Paddle 3's `.json`, with which it crashes (Paddle #77340) or is inaccurate.
        tensorrt: run the UNet by TensorRT (GPU): "tune" notes the shapes that a first picture meets, True uses them.
        precision: "fp32", and on a GPU also "fp16" and "bf16".

    The GPU's settings follow ppdiffusers' deploy/ and Paddle's documentation; they have not been run by us.

    Raises:
        ToMeConfigError: a value is not allowed, or does not go with the device.
    """

    device: str = "cpu"
    threads: int | None = None
    onednn: bool | None = None
    tensorrt: bool | str = False
    precision: str = "fp32"

    def __post_init__(self) -> None:
        kind, _, index = str(self.device).partition(":")
        if kind not in ("cpu", "gpu") or (index and not (kind == "gpu" and index.isdecimal())):
            raise ToMeConfigError(f'device={self.device!r} is not allowed: it must be "cpu", "gpu" or "gpu:N".')
        is_count = isinstance(self.threads, int) and not isinstance(self.threads, bool)
        if self.threads is not None and not (is_count and 1 <= self.threads <= MOST_THREADS):
            raise ToMeConfigError(f"threads={self.threads!r} is not allowed: it must be 1 to {MOST_THREADS}, or None.")
        if self.precision not in PRECISIONS:
            raise ToMeConfigError(f"precision={self.precision!r} is not allowed: it must be one of {[*PRECISIONS]}.")
        if self.tensorrt not in (True, False, "tune"):
            raise ToMeConfigError(f'tensorrt={self.tensorrt!r} is not allowed: it must be True, False or "tune".')
        if kind == "cpu" and (self.tensorrt or self.precision != "fp32"):
            raise ToMeConfigError(
                f"tensorrt={self.tensorrt!r}, precision={self.precision!r} need device='gpu': CPUs compute in fp32."
            )
        if kind == "gpu" and self.onednn:
            raise ToMeConfigError("onednn=True needs device='cpu': it is the CPU's library.")
        gpus = paddle.device.cuda.device_count()
        if kind == "gpu" and int(index or 0) >= gpus:
            remedy = (
                "compare nvidia-smi and CUDA_VISIBLE_DEVICES"
                if paddle.is_compiled_with_cuda()
                else ("this is a CPU build of Paddle, install paddlepaddle-gpu in place of paddlepaddle")
            )
            raise ToMeConfigError(f"device={self.device!r} is not there, Paddle finds {gpus} GPUs: {remedy}.")

    @property
    def gpu(self) -> int | None:
        """The GPU's number; None on the CPU."""
        kind, _, index = self.device.partition(":")
        return int(index or 0) if kind == "gpu" else None

    def cores(self) -> int:
        """How many threads a predictor gets on the CPU."""
        return self.threads or len(os.sched_getaffinity(0))


class Predictor:
    """A program in Paddle Inference. Calls from several threads take turns.

    Args:
        program: `.pdmodel` or `.json` file.
        params: `.pdiparams` file.
        runtime: where it runs; `onednn` None means off here.
        tensorrt: whether this program is one that TensorRT takes, given that the runtime asks for it.

    Raises:
        ToMeExportError: this Paddle cannot load the program.
    """

    def __init__(self, program: Path, params: Path, runtime: Runtime, tensorrt: bool = False) -> None:
        if program.suffix == ".json" and paddle.__version__.startswith("2."):
            raise ToMeExportError(
                f"{program} was exported by Paddle 3, which Paddle {paddle.__version__} cannot read: export it again."
            )
        if program.suffix == ".json" and runtime.onednn:
            raise ToMeConfigError(
                f"onednn=True is not allowed for {program.name}: with Paddle 3's .json programs oneDNN crashes "
                "(Paddle #77340) or is inaccurate. Leave it out, or export with Paddle 2.6."
            )
        config = inference.Config(str(program), str(params))
        config.disable_glog_info()
        if runtime.gpu is None:
            _for_cpu(config, runtime, program.suffix == ".json")
        else:
            _for_gpu(config, runtime, program.parent if tensorrt else None)
        self._gpu = runtime.gpu is not None
        self._turn = threading.Lock()
        try:
            self._predictor = inference.create_predictor(config)
        except Exception as error:
            raise ToMeExportError(f"Paddle {paddle.__version__} cannot load {program}: {gist(error)}") from error
        self.inputs = list(self._predictor.get_input_names())
        self.outputs = list(self._predictor.get_output_names())

    def __call__(self, **given: paddle.Tensor) -> list[paddle.Tensor]:
        """Run the program on inputs by name; returns its outputs in their order."""
        with self._turn:
            for name in self.inputs:
                handle = self._predictor.get_input_handle(name)
                if self._gpu:
                    handle.share_external_data(given[name])
                else:  # predictor.run([tensors]) crashes on the CPU of Paddle 2.6
                    value = np.ascontiguousarray(given[name].numpy())
                    handle.reshape(value.shape)
                    handle.copy_from_cpu(value)
            self._predictor.run()
            found = [self._predictor.get_output_handle(name).copy_to_cpu() for name in self.outputs]
        return [paddle.to_tensor(each) for each in found]


def _for_cpu(config: Any, runtime: Runtime, is_pir: bool) -> None:
    config.disable_gpu()
    config.set_cpu_math_library_num_threads(runtime.cores())
    if runtime.onednn:
        config.enable_mkldnn()
        config.set_mkldnn_cache_capacity(10)  # shapes that stay compiled; without a limit memory grows with every one
    else:
        config.disable_mkldnn()  # it is on by default
    if not is_pir:  # fails on Paddle 3's .json programs
        config.enable_memory_optim()


def _for_gpu(config: Any, runtime: Runtime, tensorrt_folder: Path | None) -> None:
    precision = getattr(inference.PrecisionType, PRECISIONS[runtime.precision])
    config.enable_memory_optim()
    config.enable_use_gpu(2000, runtime.gpu, precision)  # MB that the memory pool begins with
    for name in GPU_PASSES_OFF:
        config.delete_pass(name)
    if tensorrt_folder is None or not runtime.tensorrt:
        return
    shapes = tensorrt_folder / SHAPES
    if runtime.tensorrt == "tune":
        config.collect_shape_range_info(str(shapes))
        config.switch_ir_optim(False)
        return
    if not shapes.is_file():
        raise ToMeExportError(
            f'{shapes} is not there: load once with tensorrt="tune" and draw a picture at each size and batch that '
            "you will use."
        )
    config.enable_tensorrt_engine(
        workspace_size=24 << 30, max_batch_size=1, min_subgraph_size=3, precision_mode=precision, use_static=True
    )
    config.enable_tensorrt_memory_optim()
    config.enable_tuned_tensorrt_dynamic_shape(str(shapes), True)
    config.set_optim_cache_dir(str(tensorrt_folder / "_opt_cache"))


def gist(error: Exception) -> str:
    """The line of Paddle's long messages that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "not " in line] or lines or [type(error).__name__]
    return telling[-1][:300]
