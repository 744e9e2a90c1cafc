"""Measures one case, in a process of its own: a case in one JSON object on stdin, what is found in lines on stdout.

Every line is a JSON object with "event", and with "arm", the label of an arm, where it is about one:
    begin: a pass of an arm begins now; `what` says which. Should the process end, that is where it ended.
    about: the case's `macs`, by the labels of its arms.
    checked, weighed, shares: `parity`, `peak_memory_bytes`, `shares` of an arm.
    failed: `status` ("out of memory" or "error") and `reason`; the arm is not asked again.
    round: `index`, and `seconds` of every arm that did not fail.
"""

import ctypes
import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...inference.runtime import gist
from .agreement import agree
from .arms import Arms
from .cases import ArmPlan, Case, arms_from
from .memory import is_out_of_memory, limited, offer_to_the_system
from .names import EAGER, ERROR, LIMIT, OUT_OF_MEMORY, PREDICTOR, PYTORCH, TOME
from .shares import measure_shares
from .subjects import Subject, open_subject

PR_SET_PDEATHSIG = 1  # of Linux
SETTLE = 0.3  # seconds for which OpenMP's threads may go on spinning after the work of another process
Tell = Callable[..., None]


class Attempts:
    """Passes of arms, any of which may fail without the others."""

    def __init__(self, arms: Arms, failed: set[str], tell: Tell) -> None:
        self._arms, self._failed, self._tell = arms, failed, tell

    def make(self, plan: ArmPlan, what: str, action: Callable[[], Any]) -> Any:
        """The result of an action on an arm; None where the arm fails, now or before."""
        if plan.label in self._failed:
            return None
        self._tell("begin", arm=plan.label, what=what)
        try:
            return action()
        except Exception as error:
            status = OUT_OF_MEMORY if is_out_of_memory(error) else ERROR
            told = next((line for line in str(error).splitlines() if is_out_of_memory(line)), gist(error))
            self.fail(plan, status, f"{what}: {type(error).__name__}: {told.strip()}")
        self._arms.drop(plan)
        gc.collect()  # what the failed pass had allocated hangs on cycles of frames
        return None

    def fail(self, plan: ArmPlan, status: str, reason: str) -> None:
        """Ask an arm no more."""
        self._failed.add(plan.label)
        self._tell("failed", arm=plan.label, status=status, reason=reason)

    def left(self, plans: list[ArmPlan]) -> list[ArmPlan]:
        """Those that have not failed."""
        return [plan for plan in plans if plan.label not in self._failed]


def measure(request: dict[str, Any], tell: Tell) -> None:
    """Measure a case.

    Args:
        request: `case` and `arms` as their `describe` has them; `rounds`, the indices of those to time; `warm_up`;
            `threads`; `memory_limit` in bytes or None; `torch_python`; a `folder` to work in; and what is known from
            before, as labels of arms: `failed`, `checked`, `weighed`, `shared`.
        tell: is called with an event's name and its fields.
    """
    case, plans = Case(**request["case"]), list(arms_from(request["arms"]))
    tell("begin", arm=None, what="building the model")
    with limited(None, 0):
        subject = open_subject(case)
    tell("about", **_about(subject, plans))
    predictors = sum(plan.backend == PREDICTOR for plan in plans)
    limit, python, folder = request["memory_limit"], request["torch_python"], Path(request["folder"])
    with Arms(subject, limit, request["threads"], python, predictors, folder) as arms:
        attempts = Attempts(arms, set(request["failed"]), tell)
        unchecked = [plan for plan in attempts.left(plans) if plan.label not in request["checked"]]
        _check(case, unchecked, arms, attempts, tell)
        for plan in attempts.left(plans):
            _warm_up(plan, request, arms, attempts, tell)
        settle = SETTLE if any(plan.backend == PYTORCH for plan in plans) else 0.0
        for index in request["rounds"]:
            seconds = take_turn(index, attempts.left(plans), arms, attempts, settle)
            tell("round", index=index, seconds=seconds)
        for plan in attempts.left(plans):
            if plan.backend == EAGER and plan.arm == TOME and plan.label not in request["shared"]:
                with arms[plan].ready() as run:
                    tell("shares", arm=plan.label, shares=measure_shares(subject.denoiser, run))


def take_turn(index: int, plans: list[ArmPlan], arms: Any, attempts: Attempts, settle: float) -> dict[str, float]:
    """Seconds of each arm in one round; the order is another in each round, and the same whenever it is timed."""
    order = list(plans)
    random.Random(index).shuffle(order)
    seconds: dict[str, float] = {}
    for plan in order:
        time.sleep(settle)
        taken = attempts.make(plan, f"round {index + 1}", arms[plan].seconds)
        if taken is not None:
            seconds[plan.label] = taken
    return seconds


def _about(subject: Subject, plans: list[ArmPlan]) -> dict[str, Any]:
    macs = {plan.label: subject.macs(plan.config, matching=plan.arm != LIMIT) for plan in plans}
    return {"macs": macs}


def _check(case: Case, plans: list[ArmPlan], arms: Arms, attempts: Attempts, tell: Tell) -> None:
    def output(plan: ArmPlan) -> np.ndarray | None:
        return attempts.make(plan, "check", lambda: arms[plan].output())

    parity, wrong = agree(case, plans, arms.take, output)
    for plan, found in parity.items():
        tell("checked", arm=plan.label, parity=found)
    for plan, reason in wrong.items():
        attempts.fail(plan, ERROR, f"not timed, for {reason}")


def _warm_up(plan: ArmPlan, request: dict[str, Any], arms: Arms, attempts: Attempts, tell: Tell) -> None:
    for turn in range(request["warm_up"]):
        if turn == 0 and plan.label not in request["weighed"]:
            weighed = attempts.make(plan, "warm-up", lambda: [arms[plan].peak_memory()])
            if weighed is not None:
                tell("weighed", arm=plan.label, peak_memory_bytes=weighed[0])
        else:
            attempts.make(plan, "warm-up", lambda: arms[plan].output())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print does not get between the answers
    offer_to_the_system()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # do not go on when the parent is killed

    def tell(event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=answers, flush=True)

    measure(json.loads(sys.stdin.readline()), tell)


if __name__ == "__main__":
    main()
