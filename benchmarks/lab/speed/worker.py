"""Measures one case, in its own process: Paddle may end it without the other cases."""

import ctypes
import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from paddle.base import core

from ppdiffusers_tome.comparison.clock import order_of_round
from ppdiffusers_tome.run.runtime import error_summary

from ..arm import EAGER, OURS, Arm
from .backends import Backend, EagerBackend, ProgramBackend
from .cases import ERROR, MEASURED, PLANNED, Case, Measurement, Timing
from .parity import check_parity
from .workloads import Workload

PR_SET_PDEATHSIG = 1  # from Linux' sys/prctl.h
Send = Callable[[Case | tuple[str | None, str]], None]


def run(
    connection: Connection,
    errors: str,
    case: Case,
    timing: Timing,
    programs: Path,
    skip: Sequence[str],
) -> None:
    """The worker process: `measure_case` with a connection to send to, and a file for what is printed."""
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the parent
    with suppress(OSError):  # where memory runs out, the system ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = str(timing.threads)  # of the processes that backends start
    core.set_num_threads(timing.threads)  # of Paddle here, which read the variable when it was imported
    measure_case(connection.send, case, timing, programs, skip)


def measure_case(
    send: Send,
    case: Case,
    timing: Timing,
    programs: Path,
    skip: Sequence[str] = (),
) -> None:
    """Build the model, check parity, warm up and time all rounds of the arms that are PLANNED.

    Before each pass, send the name of its arm (None: no arm in particular) and the step, so that the parent can name
    them if this process ends. Send the case after each step.

    Args:
        timing: how; rounds that were timed before are not timed again.
        programs: as `Backend`.
        skip: names of references whose passes ended an earlier worker.
    """
    send((None, "building the model"))
    workload = Workload(case)

    def make_backend(name: str) -> Backend:
        return (EagerBackend if name == EAGER else ProgramBackend)(name, workload, timing.threads, programs)

    worker = _Worker(send, case, skip, make_backend)
    for measured in worker.planned:
        measured.macs = workload.macs(measured.arm.config) if measured.arm.by == OURS else None
    unchecked = [measured for measured in worker.planned if measured.parity is None and not measured.seconds]
    check_parity(unchecked, workload.set_inputs, partial(worker.output, "check"))
    send(case)
    for measured in worker.planned:  # the first pass measures memory
        for index in range(timing.warm_up):
            if index or measured.peak_memory_bytes is not None:
                worker.output("warm-up", measured.arm)
                continue
            with worker.attempt("warm-up", measured.arm):
                measured.peak_memory_bytes = worker.backend(measured.arm).peak_memory(measured.arm)
        send(case)
    while worker.planned and len(worker.planned[0].seconds) < timing.rounds:
        worker.time_round()
        send(case)
    for measured in worker.planned:
        measured.status = MEASURED
    worker.close()
    send(case)


class _Worker:
    """A case with its backends. An arm that fails once is not run again, and neither is a reference."""

    def __init__(self, send: Send, case: Case, skip: Sequence[str], make_backend: Callable[[str], Backend]) -> None:
        self._send, self._case, self._make_backend = send, case, make_backend
        self._backends: dict[str, Backend] = {}
        self._failed = {*skip, *(measured.name for measured in case.with_status(ERROR))}
        self._has_garbage = False

    @property
    def planned(self) -> list[Measurement]:
        """The arms that have not failed."""
        return self._case.with_status(PLANNED)

    def backend(self, arm: Arm) -> Backend:
        """The backend of an arm, which is made when it is first used."""
        if arm.backend not in self._backends:
            self._backends[arm.backend] = self._make_backend(arm.backend)
        return self._backends[arm.backend]

    def output(self, step: str, arm: Arm) -> np.ndarray | None:
        """What a pass of any arm computes; None if it fails, now or before."""
        if arm.pass_name not in self._failed:
            with self.attempt(step, arm):
                return self.backend(arm).output(arm)
        return None

    def time_round(self) -> None:
        """Time one pass of every arm; the order of a round is the same whenever it is timed."""
        seconds: dict[str, float] = {}
        for measured in order_of_round(self.planned, len(self.planned[0].seconds)):
            with self.attempt(f"round {len(measured.seconds) + 1}", measured.arm):
                seconds[measured.name] = self.backend(measured.arm).seconds(measured.arm)
        for measured in self.planned:
            measured.seconds.append(seconds[measured.name])

    def close(self) -> None:
        """End the processes of the backends."""
        for backend in self._backends.values():
            backend.close()

    @contextmanager
    def attempt(self, step: str, arm: Arm) -> Iterator[None]:
        """A context in which an arm may fail without the others."""
        if self._has_garbage:
            gc.collect()  # cycles of frames refer to what a failed pass allocated
            self._has_garbage = False
        self._send((arm.pass_name, step))
        try:
            yield
        except Exception as error:
            reason = f"{step}: {type(error).__name__}: {error_summary(error)}"
            self._failed.add(arm.pass_name)
            for measured in self.planned:
                if measured.arm == arm:  # not where it is a reference alone
                    measured.fail(reason)
            if arm.backend in self._backends:
                self._backends[arm.backend].release(arm)
            self._has_garbage = True
