"""The arms: one model computed in several ways, each put on for its pass and taken off again."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ...inference import export_pipeline, load_pipeline
from ...inference.layout import share_weights
from ...inference.runtime import Predictor, Runtime
from ...inference.tracing import right_for_onednn, save
from ...patch import chosen_blocks
from ..torch_arm import TorchArm
from .cases import ArmPlan
from .memory import available_bytes, current_bytes, limited, peak_bytes
from .names import EAGER, PYTORCH
from .subjects import PARITY_STEPS, PipelineSubject, Subject, as_array
from .ways import attention, merging, put_on

Load = Callable[[], Callable[[bool], Any]]  # loads a program, whose passes may be short ones of a pipeline
SHARE_OF_MEMORY = 4  # predictors stay loaded while they take no more than 1/4 of what is available


class Arm(ABC):
    """One way to compute a subject. `ready` and what it makes are not timed, and not held to the memory limit."""

    def __init__(self, subject: Subject, plan: ArmPlan, limit: int | None) -> None:
        self._subject, self._plan, self._limit = subject, plan, limit

    @abstractmethod
    def ready(self, output: bool = False) -> Any:
        """A context that yields one pass, ready to be called; of a pipeline a short one where `output` is asked."""

    def output(self) -> np.ndarray:
        """What one pass computes."""
        with self.ready(output=True) as run, self._limited():
            return as_array(run())

    def seconds(self) -> float:
        """How long one pass takes."""
        with self.ready() as run, self._limited():
            _wait()
            start = time.perf_counter()
            run()
            _wait()
            return time.perf_counter() - start

    def peak_memory(self) -> int | None:
        """Bytes at the peak of one pass, weights included, by Paddle's counter; None where it cannot be told."""
        with self.ready(output=True) as run:
            before = current_bytes()
            peak = peak_bytes(run)
        return None if peak is None else peak - before + self._subject.weights

    def _limited(self) -> Any:
        return limited(self._limit, self._subject.weights) if paddle.get_device() == "cpu" else nullcontext()


class EagerArm(Arm):
    """Paddle's eager mode. All arms share one model."""

    @contextmanager
    def ready(self, output: bool = False) -> Iterator[Callable[[], Any]]:
        with merging(self._subject, self._plan), attention(self._subject, self._plan):
            yield self._subject.output if output else self._subject.run


class PredictorArm(Arm):
    """A predictor of Paddle Inference, loaded once, or for each pass where memory is short.

    Args:
        export: gives the function that loads the arm's program, after exporting it.
        keep: whether it stays loaded between passes.
    """

    def __init__(
        self, subject: Subject, plan: ArmPlan, limit: int | None, export: Callable[[ArmPlan], Load], keep: bool
    ) -> None:
        super().__init__(subject, plan, limit)
        self._export, self._keep = export, keep
        self._load: Load | None = None
        self._loaded: Callable[[bool], Any] | None = None

    @contextmanager
    def ready(self, output: bool = False) -> Iterator[Callable[[], Any]]:
        run = self._loaded
        if run is None:
            run = self._loader()()
            run(True)  # the first pass of a program prepares its kernels
        self._loaded = run if self._keep else None
        yield lambda: run(output)

    def peak_memory(self) -> int | None:
        """As of every arm; the weights are the predictor's own, and so is what it keeps between passes."""
        before, load = current_bytes(), self._loader()
        run = load()
        peak = peak_bytes(lambda: run(True))
        return None if peak is None else peak - before

    def _loader(self) -> Load:
        if self._load is None:
            self._load = self._export(self._plan)
        return self._load


class PyTorchArm(Arm):
    """PyTorch + diffusers, by tomesd where it merges, in a process of its own."""

    def __init__(self, subject: Subject, plan: ArmPlan, limit: int | None, worker: TorchArm) -> None:
        super().__init__(subject, plan, limit)
        self._worker = worker
        self._merging = None
        if plan.config:
            deepest = max(found.level for found in chosen_blocks(subject.denoiser, plan.config))
            self._merging = {"ratio": plan.ratio, "use_rand": False, "max_downsample": deepest}

    def ready(self, output: bool = False) -> Any:
        return nullcontext(lambda: self._worker.output(self._merging))

    def seconds(self) -> float:
        with self._limited():
            return self._worker.seconds(self._merging)

    def peak_memory(self) -> int | None:
        return None  # Paddle counts its own alone

    def _limited(self) -> Any:
        return limited(self._limit, self._subject.weights, self._worker.process)


class Arms:
    """All arms of a subject, made when they are first asked for. Use as a context, which ends PyTorch's process.

    Args:
        subject: what they compute.
        limit: bytes for weights and one pass; None: what the machine has.
        threads: of predictors and of PyTorch; eager Paddle took its own from OMP_NUM_THREADS.
        torch_python: interpreter for the backend PyTorch.
        predictors: how many there will be.
        folder: for programs and what is exchanged with PyTorch; exists.
    """

    def __init__(
        self,
        subject: Subject,
        limit: int | None,
        threads: int,
        torch_python: str | None,
        predictors: int,
        folder: Path,
    ) -> None:
        self._subject, self._limit, self._threads, self._python = subject, limit, threads, torch_python
        self._folder = folder
        self._keep = predictors * subject.weights * SHARE_OF_MEMORY <= available_bytes()
        self._made: dict[ArmPlan, Arm] = {}
        self._weights: list[Path] = []
        self._worker: TorchArm | None = None
        self._seed = 0

    def __enter__(self) -> "Arms":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._worker:
            self._worker.close()

    def take(self, seed: int) -> None:
        """Draw the inputs of the passes to come, of all arms."""
        self._seed = seed
        self._subject.take(seed)
        if self._worker:
            self._worker.take({name: as_array(x) for name, x in self._subject.inputs.items()})

    def __getitem__(self, plan: ArmPlan) -> Arm:
        if plan not in self._made:
            self._made[plan] = self._make(plan)
        return self._made[plan]

    def drop(self, plan: ArmPlan) -> None:
        """An arm that failed is not asked again: let go of what it holds."""
        self._made.pop(plan, None)

    def _make(self, plan: ArmPlan) -> Arm:
        if plan.backend == EAGER:
            return EagerArm(self._subject, plan, self._limit)
        if plan.backend != PYTORCH:
            export = self._export_pipeline if isinstance(self._subject, PipelineSubject) else self._export
            return PredictorArm(self._subject, plan, self._limit, export, self._keep)
        if self._worker is None:
            assert self._python
            self._worker = TorchArm(self._python, self._folder, self._subject.denoiser, self._threads)
            self.take(self._seed)
        return PyTorchArm(self._subject, plan, self._limit, self._worker)

    def _export(self, plan: ArmPlan) -> Load:
        subject = self._subject
        traceable = subject.traceable()
        model = getattr(traceable.layer, "unet", traceable.layer)
        if plan.config:
            put_on(model, plan, subject)
        fixed = {name: size for name, size in subject.dims.items() if name != "tokens"}
        folder = self._folder / f"program_{len(self._weights)}"
        saved = save(traceable, folder, fixed, subject.dims, plan.label, self._threads)
        params = share_weights(saved.params, self._weights)
        self._weights.append(params)
        runtime = Runtime(threads=self._threads, onednn=right_for_onednn(saved.onednn_parity))

        def load() -> Callable[[bool], Any]:
            predictor = Predictor(saved.program, params, runtime)
            return lambda output: predictor(**subject.inputs)[0]

        return load

    def _export_pipeline(self, plan: ArmPlan) -> Load:
        subject = self._subject
        assert isinstance(subject, PipelineSubject)
        folder = self._folder / plan.label.replace(" ", "_")
        settings: dict[str, Any] = {"use_rand": False, "max_downsample": plan.max_downsample}
        sizes = [(subject.case.size, subject.case.size)]
        export_pipeline(subject.pipe, folder, plan.ratio, sizes, progress=False, **settings)

        def load() -> Callable[[bool], Any]:
            pipe = load_pipeline(folder, threads=self._threads)
            pipe.set_progress_bar_config(disable=True)
            return lambda output: subject.draw(pipe, PARITY_STEPS if output else subject.steps)

        return load


def _wait() -> None:
    """Let a GPU finish what it was given; the CPU computes at once."""
    if paddle.get_device() != "cpu":
        paddle.device.synchronize()
