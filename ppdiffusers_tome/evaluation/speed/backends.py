"""Eager Paddle, exported programs, and PyTorch: each computes and times the arms of a workload."""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn
from ppdiffusers.models.attention_processor import Attention, AttnProcessor, SlicedAttnProcessor
from ppdiffusers.patches import tomesd_patch_utils as builtin

from ...config import ToMeConfig
from ...inference import PaddleRuntime, choose_runtime, export_pipeline, load_pipeline
from ...inference.conversion import Converter
from ...inference.layout import share_weights
from ...inference.manifest import MANIFEST, ONNX_WEIGHTS
from ...inference.onnx_programs import SharedWeights
from ...inference.onnx_runtime import OnnxFileRuntime
from ...inference.paddle_runtime import Predictor
from ...inference.runtime import Program, is_accurate
from ...inference.tracing import Saved, save
from ...models import find_blocks
from ...patch import attach, chosen_blocks, detach
from ..cached_programs import CachedPrograms, program_key
from ..clock import seconds_of
from ..free_merge import attach_free_merge
from ..torch_unet import TorchProcess
from .cases import (
    BUILT_IN,
    EAGER,
    LIMIT,
    ONNX_RUNTIME,
    OPENVINO,
    OPENVINO_BF16,
    PLANNED,
    PREDICTOR,
    PROGRAM_FORMATS,
    PROGRAMS,
    PYTORCH,
    PYTORCH_BF16,
    Arm,
)
from .memory import available_bytes, current_bytes, limited, peak_bytes
from .workloads import PipelineWorkload, Workload, as_array

Run = Callable[[bool], Any]  # one pass; the argument is `is_short` of Workload.run
MEMORY_SHARE = 4  # predictors stay loaded if they need at most 1/4 of the available memory


@dataclass
class Backend(ABC):
    """Computes the arms of a workload. What `prepared` does is neither timed nor under the memory limit."""

    workload: Workload
    threads: int  # of predictors and PyTorch; eager Paddle reads OMP_NUM_THREADS
    folder: Path  # for the exchange with PyTorch; it exists
    torch_python: str | None  # interpreter that has torch, diffusers and tomesd
    programs: Path | None = None  # where exported programs are cached, also for others; None: in `folder`
    process: int = field(default=0, init=False)  # whose memory is limited; 0: this one

    @abstractmethod
    def prepared(self, arm: Arm) -> AbstractContextManager[Run]:
        """A context that yields a function which makes one pass of the arm."""

    def output(self, arm: Arm) -> np.ndarray:
        """What one (short) pass computes."""
        with self.prepared(arm) as run, self._limited():
            return as_array(run(True))

    def seconds(self, arm: Arm) -> float:
        """How long one pass takes."""
        with self.prepared(arm) as run, self._limited():
            return seconds_of(lambda: run(False))

    @abstractmethod
    def peak_memory(self, arm: Arm) -> int | None:
        """Bytes at the peak of one (short) pass with the weights, by Paddle's counter; None if it cannot tell."""

    def release(self, arm: Arm) -> None:  # noqa: B027 - not every backend keeps something
        """Free what is stored for an arm that will not run again."""

    def close(self) -> None:  # noqa: B027 - not every backend has a process
        """End processes."""

    def _limited(self) -> AbstractContextManager[None]:
        if not self.process and paddle.get_device() != "cpu":
            return nullcontext()
        gigabytes = self.workload.case.memory_limit_gb
        return limited(None if gigabytes is None else int(gigabytes * 1e9), self.workload.weights, self.process)


class EagerBackend(Backend):
    """Paddle's eager mode. All arms share one model."""

    @contextmanager
    def prepared(self, arm: Arm) -> Iterator[Run]:
        denoiser = self.workload.denoiser
        layers = [layer for layer in denoiser.sublayers() if isinstance(layer, Attention)]
        processors = [layer.processor for layer in layers]
        try:
            for layer in layers:
                if arm.attention == "xformers":
                    layer.set_use_memory_efficient_attention_xformers(True)
                elif arm.attention == "slicing":  # as `enable_attention_slicing("auto")`: half of the heads at once
                    layer.set_processor(SlicedAttnProcessor(max(1, layer.sliceable_head_dim // 2)))
                else:
                    layer.set_processor(AttnProcessor())
            if arm.config and arm.arm == BUILT_IN:
                _attach_built_in(denoiser, arm.config)
            else:
                _attach(denoiser, arm, self.workload)
            yield self.workload.run
        finally:
            detach(denoiser)
            for layer, processor in zip(layers, processors, strict=True):
                layer.set_processor(processor)

    def peak_memory(self, arm: Arm) -> int | None:
        with self.prepared(arm) as run:
            before = current_bytes()
            peak = peak_bytes(lambda: run(True))
        return None if peak is None else peak - before + self.workload.weights


@dataclass
class PredictorBackend(Backend):
    """Predictors of Paddle Inference, which are loaded once, or for each pass if memory is short."""

    backend: ClassVar[str] = PREDICTOR  # one of PROGRAMS

    def __post_init__(self) -> None:
        self._converter: Converter | None = None
        programs = sum(arm.backend in PROGRAMS for arm in self.workload.case.with_status(PLANNED))
        self._stays_loaded = programs * self.workload.weights * MEMORY_SHARE <= available_bytes()
        self._load: dict[str, Callable[[], Run]] = {}
        self._loaded: dict[str, Run] = {}
        self._peaks: dict[str, int | None] = {}
        self._cached = CachedPrograms(self.programs or self.folder)
        self._weights = sorted(self._cached.folder.glob("*/*.pdiparams"))
        self._others: Path | None = None

    @contextmanager
    def prepared(self, arm: Arm) -> Iterator[Run]:
        run = self._loaded.get(arm.name)
        if run is None:
            if arm.name not in self._load:
                is_pipeline = isinstance(self.workload, PipelineWorkload)
                self._load[arm.name] = self._export_pipeline(arm) if is_pipeline else self._export(arm)
            before = current_bytes()
            run = loaded = self._load[arm.name]()
            peak = peak_bytes(lambda: loaded(True))  # the first pass of a program prepares its kernels
            self._peaks[arm.name] = None if peak is None else peak - before  # the weights are the predictor's own
        if self._stays_loaded:
            self._loaded[arm.name] = run
        yield run

    def peak_memory(self, arm: Arm) -> int | None:
        self.output(arm)
        return self._peaks[arm.name]

    def release(self, arm: Arm) -> None:
        self._load.pop(arm.name, None)
        self._loaded.pop(arm.name, None)

    def _key(self, arm: Arm) -> str:
        case = self.workload.case
        return program_key(case.scope, case.size, arm.arm, arm.config, PROGRAM_FORMATS[self.backend])

    def _export(self, arm: Arm) -> Callable[[], Run]:
        workload, key = self.workload, self._key(arm)
        saved = self._cached.find(key)
        if saved is None:
            saved = self._store(self._save(arm, key), key)
            self._cached.store(key, saved)
        load_program = self._loader(saved)

        def load() -> Run:
            program = load_program()
            return lambda is_short: program(**workload.inputs)[0]

        return load

    def _save(self, arm: Arm, key: str) -> Saved:
        """Save an arm's program to the folder of programs."""
        workload, folder = self.workload, self._cached.folder / key
        shutil.rmtree(folder, ignore_errors=True)  # of a process that ended while it wrote
        traceable = workload.traceable()
        denoiser = getattr(traceable.layer, "unet", traceable.layer)
        _attach(denoiser, arm, workload)
        fixed = {name: size for name, size in workload.dims.items() if name != "tokens"}
        return save(traceable, folder, fixed, workload.dims, arm.name, self.threads, self._converter)

    def _store(self, saved: Saved, key: str) -> Saved:
        """The saved program with weights that stand once on the disk for all arms."""
        params = share_weights(saved.params, self._weights)
        if params == saved.params:
            self._weights.append(params)
        else:
            os.link(params, saved.params)
        return saved

    def _loader(self, saved: Saved) -> Callable[[], Program]:
        """A function that loads a saved program."""
        runtime = PaddleRuntime(threads=self.threads, onednn=is_accurate(saved.onednn_parity))
        return lambda: Predictor(saved.program, saved.params, runtime)

    def _export_pipeline(self, arm: Arm) -> Callable[[], Run]:
        workload = self.workload
        assert isinstance(workload, PipelineWorkload)
        folder = self._cached.folder / self._key(arm)
        sizes = [(workload.case.size, workload.case.size)]
        settings = asdict(arm.config) if arm.config else {"ratio": 0}
        ratio, form = settings.pop("ratio"), PROGRAM_FORMATS[self.backend]
        if not (folder / MANIFEST).is_file():
            settings |= {"format": form, "others": self._others, "progress": False}
            export_pipeline(workload.pipe, folder, ratio, sizes, **settings)
        self._others = folder

        def load() -> Run:
            pipe = load_pipeline(folder, threads=self.threads, **PROGRAMS[self.backend])
            pipe.set_progress_bar_config(disable=True)
            return lambda is_short: workload.run_pipeline(pipe, is_short)

        return load


class OnnxBackend(PredictorBackend):
    """Base class: the same programs as ONNX, in another runtime."""

    def __post_init__(self) -> None:
        super().__post_init__()
        runtime = choose_runtime(threads=self.threads, **PROGRAMS[self.backend])
        assert isinstance(runtime, OnnxFileRuntime)
        self._runtime = runtime
        self._converter = Converter()
        self._shared: SharedWeights | None = None

    def peak_memory(self, arm: Arm) -> int | None:
        self.output(arm)  # Paddle's counter does not see these runtimes
        return None

    def close(self) -> None:
        assert self._converter is not None
        self._converter.close()

    def _store(self, saved: Saved, key: str) -> Saved:
        folder = self._cached.folder
        assert saved.onnx is not None
        if self._shared is None:
            paths = (folder / f"{number}{ONNX_WEIGHTS}" for number in count())  # earlier processes have written some
            self._shared = SharedWeights(next(path for path in paths if not path.exists()))
        self._shared.move(saved.onnx, folder / f"{key}.onnx")
        shutil.rmtree(saved.onnx.parent)
        return replace(saved, onnx=folder / f"{key}.onnx")

    def _loader(self, saved: Saved) -> Callable[[], Program]:
        path = saved.onnx
        assert path is not None
        return lambda: self._runtime.load_file(path)


class OnnxRuntimeBackend(OnnxBackend):
    """ONNX Runtime."""

    backend = ONNX_RUNTIME


class OpenVinoBackend(OnnxBackend):
    """OpenVINO."""

    backend = OPENVINO


class OpenVinoBf16Backend(OnnxBackend):
    """OpenVINO in bfloat16."""

    backend = OPENVINO_BF16


@dataclass
class PyTorchBackend(Backend):
    """PyTorch with diffusers, in its own process; tomesd merges."""

    is_bf16: ClassVar[bool] = False

    def __post_init__(self) -> None:
        assert self.torch_python
        self._torch = TorchProcess(self.torch_python, self.folder, self.workload.denoiser, self.threads, self.is_bf16)
        self.process = self._torch.pid
        self._inputs: dict[str, paddle.Tensor] | None = None

    @contextmanager
    def prepared(self, arm: Arm) -> Iterator[Run]:
        if self._inputs is not self.workload.inputs:
            self._inputs = self.workload.inputs
            self._torch.set_inputs({name: as_array(x) for name, x in self._inputs.items()})
        merging = self._merging(arm)
        yield lambda is_short: self._torch.output(merging)

    def seconds(self, arm: Arm) -> float:
        with self.prepared(arm), self._limited():
            return self._torch.seconds(self._merging(arm))

    def peak_memory(self, arm: Arm) -> int | None:
        self.output(arm)  # Paddle's counter does not see PyTorch
        return None

    def close(self) -> None:
        self._torch.close()

    def _merging(self, arm: Arm) -> dict[str, Any] | None:
        return _tomesd_arguments(self.workload.denoiser, arm.config) if arm.config else None


class PyTorchBf16Backend(PyTorchBackend):
    """The same under autocast to bfloat16."""

    is_bf16 = True


BACKEND_CLASSES: dict[str, type[Backend]] = {
    EAGER: EagerBackend,
    PREDICTOR: PredictorBackend,
    ONNX_RUNTIME: OnnxRuntimeBackend,
    OPENVINO: OpenVinoBackend,
    OPENVINO_BF16: OpenVinoBf16Backend,
    PYTORCH: PyTorchBackend,
    PYTORCH_BF16: PyTorchBf16Backend,
}


def _attach(denoiser: nn.Layer, arm: Arm, workload: Workload) -> None:
    """Merge in a denoiser as the arm does, or cut tokens as its limit does."""
    if arm.config and arm.arm == LIMIT:
        attach_free_merge(denoiser, arm.config, workload.latent)
    elif arm.config:
        attach(denoiser, arm.config, None)


def _attach_built_in(denoiser: nn.Layer, config: ToMeConfig) -> None:
    """What ppdiffusers' apply_tome does, which this package replaces."""
    denoiser._tome_info = {"size": None, "hooks": [], "args": _tomesd_arguments(denoiser, config)}
    for block in find_blocks(denoiser):
        block.block.__class__ = builtin.make_tome_block(type(block.block))
        block.block._tome_info = denoiser._tome_info
    builtin.hook_tome_model(denoiser)


def _tomesd_arguments(denoiser: nn.Layer, config: ToMeConfig) -> dict[str, Any]:
    """Arguments of tomesd and of the built-in ToMe, to merge at the levels that the other arms merge at."""
    names = ("ratio", "sx", "sy", "use_rand", "merge_attn", "merge_crossattn", "merge_mlp")
    deepest = max(block.level for block in chosen_blocks(denoiser, config))
    return {**{name: getattr(config, name) for name in names}, "max_downsample": deepest}
