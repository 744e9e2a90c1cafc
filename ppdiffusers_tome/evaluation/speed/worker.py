"""The worker of `runner.py`: measures one case in its own process, which may die without the other cases.

Each action returns the case as it is then: `prepare` (build the model, check parity, warm up), `time_round` and
`finish` (overhead). Before every pass the event "begin" names the arm (None: no arm in particular) and the step; if
the process dies, it was there. The event "case" has the case after a step of `prepare`.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...inference.runtime import error_summary
from ..clock import order_of_round
from ..worker_loop import answer_requests
from .backends import BACKEND_CLASSES, Backend
from .cases import EAGER, ERROR, LIMIT, MEASURED, OUT_OF_MEMORY, PLANNED, TOME, Arm, Case
from .memory import is_out_of_memory, limited
from .overhead import measure_overhead
from .parity import check_parity
from .workloads import Workload, open_workload

SETTLE = 0.3  # seconds for which OpenMP's threads may go on spinning after a pass of PyTorch's process
Report = Callable[..., None]


class Worker:
    """A case with its workload and backends."""

    _case: Case
    _workload: Workload
    _options: tuple[int, Path, str | None]  # of its backends: threads, folder, torch_python

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._failed: set[str] = set()  # names of arms that must not run again, definitions included
        self._has_garbage = False

    def prepare(
        self,
        report: Report,
        case: dict[str, Any],
        warm_up: int,
        threads: int,
        torch_python: str | None,
        folder: str,
        skip: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Build the model, check the arms that were not checked before, and warm up; the first pass measures memory.

        `skip` are names of definitions whose passes ended an earlier worker.
        """
        self._case = Case.from_json(case)
        self._failed.update(skip, (arm.name for arm in self._case.with_status(OUT_OF_MEMORY, ERROR)))
        report("begin", arm=None, step="building the model")
        with limited(None, 0):
            self._workload = open_workload(self._case)
        self._options = threads, Path(folder), torch_python
        for arm in self._planned():
            arm.macs = self._workload.macs(arm.config, matching=arm.arm != LIMIT)
        unchecked = [arm for arm in self._planned() if arm.parity is None and not arm.seconds]
        check_parity(self._case, unchecked, self._workload.set_inputs, partial(self._output, report, "check"))
        report("case", case=asdict(self._case))
        for arm in self._planned():
            for index in range(warm_up):
                if index or arm.peak_memory_bytes is not None:
                    self._output(report, "warm-up", arm)
                    continue
                with self._attempt(report, "warm-up", arm):
                    arm.peak_memory_bytes = self._backend(arm).peak_memory(arm)
            report("case", case=asdict(self._case))
        return {"case": asdict(self._case)}

    def time_round(self, report: Report) -> dict[str, Any]:
        """Time one pass of every arm; the order of a round is the same whenever it is timed."""
        arms = self._planned()
        has_pytorch = any(arm.is_torch for arm in arms)
        seconds: dict[str, float] = {}
        for arm in order_of_round(arms, len(arms[0].seconds)):
            time.sleep(SETTLE if has_pytorch else 0)
            with self._attempt(report, f"round {len(arm.seconds) + 1}", arm):
                seconds[arm.name] = self._backend(arm).seconds(arm)
        for arm in self._planned():
            arm.seconds.append(seconds[arm.name])
        return {"case": asdict(self._case)}

    def finish(self, report: Report) -> dict[str, Any]:
        """Measure the overhead of merging in eager mode; the arms are MEASURED then."""
        for arm in self._planned():
            if arm.backend == EAGER and arm.arm == TOME:
                with self._attempt(report, "overhead", arm), self._backend(arm).prepared(arm) as run:
                    arm.shares = measure_overhead(partial(run, False))
        for arm in self._planned():
            arm.status = MEASURED
        for backend in self._backends.values():
            backend.close()
        return {"case": asdict(self._case)}

    def _planned(self) -> list[Arm]:
        return self._case.with_status(PLANNED)

    def _backend(self, arm: Arm) -> Backend:
        if arm.backend not in self._backends:
            self._backends[arm.backend] = BACKEND_CLASSES[arm.backend](self._workload, *self._options)
        return self._backends[arm.backend]

    def _output(self, report: Report, step: str, arm: Arm) -> np.ndarray | None:
        """What a pass of any arm computes; None if it fails, now or before."""
        if arm.name not in self._failed:
            with self._attempt(report, step, arm):
                return self._backend(arm).output(arm)
        return None

    @contextmanager
    def _attempt(self, report: Report, step: str, arm: Arm) -> Iterator[None]:
        """A context in which an arm may fail without the others."""
        if self._has_garbage:
            gc.collect()  # cycles of frames refer to what a failed pass allocated
            self._has_garbage = False
        report("begin", arm=arm.name, step=step)
        try:
            yield
        except Exception as error:
            is_memory = is_out_of_memory(error)
            lines = [line.strip() for line in str(error).splitlines() if is_out_of_memory(line)]
            reason = f"{step}: {type(error).__name__}: {lines[0] if lines else error_summary(error)}"
            self._failed.add(arm.name)
            for planned in self._planned():
                if planned.name == arm.name:  # a definition is another object than the arm of the case
                    planned.fail(OUT_OF_MEMORY if is_memory else ERROR, reason)
            if arm.backend in self._backends:
                self._backends[arm.backend].release(arm)
            self._has_garbage = True


def main() -> None:
    worker = Worker()
    answer_requests({"prepare": worker.prepare, "time_round": worker.time_round, "finish": worker.finish})


if __name__ == "__main__":
    main()
