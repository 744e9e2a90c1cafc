"""Eager Paddle and exported programs: each computes and times the arms of a workload."""

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from paddle import nn
from ppdiffusers.models.attention_processor import Attention, AttnProcessor, SlicedAttnProcessor

from ppdiffusers_tome.attach.attach import attach, detach
from ppdiffusers_tome.export.conversion import Converter
from ppdiffusers_tome.export.export import share_weights
from ppdiffusers_tome.export.onnx_merging import prepare_edits
from ppdiffusers_tome.export.request import DenoiserMerging
from ppdiffusers_tome.export.tracing import TracedProgram, compare_in_onnx_runtime
from ppdiffusers_tome.families.kernels import attention_in_slices
from ppdiffusers_tome.files import write_file
from ppdiffusers_tome.inference import Size, choose_runtime
from ppdiffusers_tome.run.folder import ONNX_WEIGHTS, ExportedFolder
from ppdiffusers_tome.run.formats import RUNTIME_FORMATS
from ppdiffusers_tome.run.manifest import Files, PlannedProgram
from ppdiffusers_tome.run.onnx_weights import SharedWeights

from ..arm import BUILT_IN, EAGER, Arm
from ..cache import Cache, program_key
from ..timing import seconds_of
from .cases import ONNX_RUNTIME, PLANNED, PROGRAMS
from .memory import available_bytes, current_bytes, peak_bytes
from .others import attach_built_in
from .workloads import Workload

Run = Callable[[], Any]  # one pass
MARGIN = 1.25  # programs stay loaded if this many times their weights are available


class Backend(ABC):
    """Computes the arms of a workload. What `prepared` does is not timed.

    Args:
        name: of `cases.BACKENDS`.
        threads: of programs; those of eager Paddle are the process's.
        programs: the folder in which exported programs are cached; it may not exist yet.
    """

    def __init__(self, name: str, workload: Workload, threads: int, programs: Path) -> None:
        self.name, self.workload, self.threads, self.programs = name, workload, threads, programs

    @abstractmethod
    def prepared(self, arm: Arm) -> AbstractContextManager[Run]:
        """A context that yields a function which makes one pass of the arm."""

    def output(self, arm: Arm) -> np.ndarray:
        """What one pass computes."""
        with self.prepared(arm) as run:
            output = run()
            return output if isinstance(output, np.ndarray) else output.numpy()

    def seconds(self, arm: Arm) -> float:
        """How long one pass takes."""
        with self.prepared(arm) as run:
            return seconds_of(run)

    def peak_memory(self, arm: Arm) -> int | None:
        """Bytes at the peak of one pass with the weights, by Paddle's counter; None if it does not see it."""
        self.output(arm)
        return None

    def release(self, arm: Arm) -> None:  # noqa: B027 - not every backend stores something
        """Free what is stored for an arm that will not run again."""

    def close(self) -> None:  # noqa: B027 - not every backend has a process
        """End processes."""

    def attach(self, denoiser: nn.Layer, arm: Arm) -> None:
        """Change a denoiser as the arm does; nothing changes for an arm that does not merge."""
        if arm.config is None:
            return
        if arm.by == BUILT_IN:
            attach_built_in(denoiser, arm.config)
        else:
            attach(denoiser, arm.config, None)


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
            self.attach(denoiser, arm)
            yield self.workload.run
        finally:
            detach(denoiser)
            for layer, processor in zip(layers, processors, strict=True):
                layer.set_processor(processor)

    def output(self, arm: Arm) -> np.ndarray:
        # What other arms are compared with is computed in slices too: at 768 px ordinary attention of Stable Diffusion
        # 1.5 takes more memory than a program beside it leaves.
        with self.prepared(arm) as run, attention_in_slices(self.workload.denoiser):
            return run().numpy()

    def peak_memory(self, arm: Arm) -> int | None:
        with self.prepared(arm) as run:
            before = current_bytes()
            peak = peak_bytes(run)
        return None if peak is None else peak - before + self.workload.weights


class ProgramBackend(Backend):
    """Exported programs in one runtime, which are loaded once, or for each pass if memory is short."""

    def __init__(self, name: str, workload: Workload, threads: int, programs: Path) -> None:
        super().__init__(name, workload, threads, programs)
        self._runtime = choose_runtime(threads=threads, **PROGRAMS[name])
        self._format = RUNTIME_FORMATS[PROGRAMS[name]["runtime"]]
        self._converter = Converter() if self._format == "onnx" else None
        backends = Counter(measured.arm.backend for measured in workload.case.with_status(PLANNED))
        copies = sum(copies_of_weights(backend, arms) for backend, arms in backends.items())
        self._stays_loaded = copies * workload.weights * MARGIN <= available_bytes()
        self._loaded: dict[Arm, Run] = {}
        self._peaks: dict[Arm, int | None] = {}
        self._cache = Cache(programs)

    @contextmanager
    def prepared(self, arm: Arm) -> Iterator[Run]:
        run = self._loaded.get(arm)
        if run is None:
            files = self._export(arm)
            before = current_bytes()
            program = self._runtime.load(ExportedFolder(self.programs), files)
            run = loaded = lambda: program(**self.workload.inputs)[0]
            peak = peak_bytes(loaded)  # the first pass of a program prepares its kernels
            self._peaks[arm] = None if peak is None else peak - before  # the weights are the program's own
        if self._stays_loaded:
            self._loaded[arm] = run
        yield run

    def peak_memory(self, arm: Arm) -> int | None:
        self.output(arm)
        return self._peaks[arm] if self._format == "paddle" else None  # Paddle counts its own only

    def release(self, arm: Arm) -> None:
        self._loaded.pop(arm, None)

    def close(self) -> None:
        if self._converter:
            self._converter.close()

    def _export(self, arm: Arm) -> Files:
        """The program of an arm, which is made as `export` makes it unless it is cached."""
        key = self._key(arm)
        files = self._cache.load_files(key)
        if files is None:
            merging = DenoiserMerging(arm.config, None)
            is_edited = self._format == "onnx" and arm.by != BUILT_IN and merging.only_leaves_out_keys
            files = self._edit(arm, key, merging) if is_edited else self._trace(arm, key)
            self._cache.store_files(files, key)
        return files

    def _key(self, arm: Arm) -> str:
        return program_key(self.workload.case.size, arm.by, arm.config, self._format)

    def _trace(self, arm: Arm, key: str) -> Files:
        """The traced program of an arm."""
        workload = self.workload
        shutil.rmtree(self.programs / key, ignore_errors=True)  # of a process that ended while it wrote
        traceable = workload.traceable()
        self.attach(getattr(traceable.layer, "unet", traceable.layer), arm)
        traced = TracedProgram(traceable, self._planned(arm), self.programs, key, workload.dims, self.threads)
        if self._converter is None:
            return self._in_paddle(traced)
        with self._shared_weights() as weights:
            path = self.programs / f"{key}.onnx"
            weights.move(traced.convert(self._converter), path)
            parity = traced.compare_in_onnx_runtime(path)
        shutil.rmtree(self.programs / key)
        return Files(path.name, weights.path.name, parity)

    def _edit(self, arm: Arm, key: str, merging: DenoiserMerging) -> Files:
        """The program of an arm that leaves out keys, which is made from the plain one."""
        plain = self._export(Arm(backend=arm.backend))
        (edit,) = prepare_edits(self.workload.traceable(), self.workload.dims, [merging]).values()
        path = self.programs / f"{key}.onnx"
        with self._shared_weights() as weights:
            edit.write(self.programs / plain.program, path, weights)
        differences = edit.comparison.first_differences
        label = self._planned(arm).label
        parity = compare_in_onnx_runtime(path, label, self.threads, lambda run, _tolerance: differences(run))
        return Files(path.name, weights.path.name, parity)

    def _planned(self, arm: Arm) -> PlannedProgram:
        size = self.workload.case.size
        return PlannedProgram("unet", Size(size, size), arm.ratio)

    @contextmanager
    def _shared_weights(self) -> Iterator[SharedWeights]:
        """The weights of all ONNX programs, which are on the disk once; what is added in the context is recorded."""
        index = self.programs / "weights.json"
        places = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else {}
        weights = SharedWeights(self.programs / f"shared{ONNX_WEIGHTS}", places)
        yield weights
        write_file(index, json.dumps(weights.places))

    def _in_paddle(self, traced: TracedProgram) -> Files:
        """A program in Paddle's format, whose weights are on the disk once for all arms."""
        parities = traced.compare_in_paddle()
        own = self.programs / traced.files.weights
        params = share_weights(own, [path for path in self.programs.glob("*/*.pdiparams") if path != own])
        if params != own:
            os.link(params, own)
        return Files(*traced.files.paths, *parities)


def copies_of_weights(backend: str, arms: int) -> float:
    """How often the weights in float32 are in memory if the programs of so many arms of a backend are loaded."""
    if backend == EAGER:
        return 0  # those of the workload, which are there already
    if backend == ONNX_RUNTIME:
        return 1  # its programs share prepared weights
    return 1.7 * arms  # as measured in OpenVINO, in bf16 too: it keeps those of the file beside its own
