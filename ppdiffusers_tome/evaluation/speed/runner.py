"""Runs a measurement: a worker process per case, started again where it dies, and one result file at the end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import ToMeConfigError
from ..environment import commit, describe_environment, sources, versions
from ..torch_arm import versions_of
from . import worker
from .cases import ArmPlan, Case
from .memory import is_out_of_memory
from .names import ERROR, FORMAT, KIND, MEASURED, NOT_MEASURED, OUT_OF_MEMORY
from .partial import Found, Partial
from .progress import Progress

WORKER = [sys.executable, "-W", "ignore", "-m", worker.__name__]


@dataclass(frozen=True)
class Settings:
    """How cases are measured.

    Args:
        rounds: timed passes of each arm.
        warm_up: passes of each arm before, the first of which tells its memory.
        threads: of every backend.
        memory_limit_gb: 10⁹ bytes for weights and one pass on the CPU; None: what the machine has.
        torch_python: interpreter of the backend PyTorch; None where it is not measured.
    """

    rounds: int = 5
    warm_up: int = 1
    threads: int = 1
    memory_limit_gb: float | None = None
    torch_python: str | None = None

    def __post_init__(self) -> None:
        for name, most in (("rounds", 10**6), ("warm_up", 10**6), ("threads", 1024)):
            if not 1 <= getattr(self, name) <= most:
                option = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise ToMeConfigError(f"{option} is not allowed: it must be from 1 to {most:,}.")
        if self.memory_limit_gb is not None and not 0 < self.memory_limit_gb <= 10**6:
            raise ToMeConfigError(
                f"--memory-limit {self.memory_limit_gb:g} is not allowed: it must be above 0 and at most 1,000,000 "
                "GB, or left out."
            )


Cases = Sequence[tuple[Case, Sequence[ArmPlan]]]


def measure_all(cases: Cases, settings: Settings, output: Path, command: str, restart: bool = False) -> dict[str, Any]:
    """Measure cases one after the other and write the result.

    Args:
        cases: each with its arms, of which those with a reason are not measured.
        settings: how.
        output: JSON file that is written at the end. Until then everything that was measured stands in the file
            `output` + ".partial.jsonl", and a run of the same plan goes on from there.
        command: for the result.
        restart: begin again.

    Returns:
        What was written.

    Raises:
        ToMeConfigError: there is a partial file of another plan.
    """
    plan = {
        "format": FORMAT,
        "cases": [{**case.describe(), "arms": [asdict(arm) for arm in arms]} for case, arms in cases],
        "settings": asdict(settings),
        "versions": versions(),
        "machine": describe_environment()["machine"],
        "sources": sources(),
    }
    about = {"commit": commit(), "command": command}
    partial = Partial(output.with_name(output.name + ".partial.jsonl"), plan, about, restart)
    passes = 1 + settings.warm_up + settings.rounds
    with Progress([passes * sum(not arm.reason for arm in arms) for _, arms in cases]) as progress:
        for index, (case, arms) in enumerate(cases):
            progress.enter(index, case.label)
            _measure(index, case, [arm for arm in arms if not arm.reason], settings, partial, progress)
    result = {
        "kind": KIND,
        "format": FORMAT,
        "command": partial.about["command"],
        "commit": partial.about["commit"],
        "environment": {**describe_environment(), "threads": str(settings.threads), **_torch(settings)},
        **{name: getattr(settings, name) for name in ("rounds", "warm_up", "threads")},
        "cases": [_case(*each, partial.case(index), settings) for index, each in enumerate(cases)],
    }
    _write(output, result)
    partial.remove()
    return result


def _measure(
    index: int, case: Case, arms: list[ArmPlan], settings: Settings, partial: Partial, progress: Progress
) -> None:
    """Run workers until every arm has every round or has failed."""
    folder = partial.path.with_name(f".{partial.path.name}.work")  # beside it, so that a next run finds and clears it
    found = partial.case(index)
    while not found.is_done and any(arm.label not in found.failed for arm in arms):
        request = {
            "case": case.describe(),
            "arms": [arm.describe() for arm in arms if arm.label not in found.failed],
            "rounds": [turn for turn in range(settings.rounds) if turn not in found.rounds],
            "warm_up": settings.warm_up,
            "threads": settings.threads,
            "memory_limit": settings.memory_limit_gb and int(settings.memory_limit_gb * 1e9),
            "torch_python": settings.torch_python,
            "failed": list(found.failed),
            "checked": list(found.parity),
            "weighed": list(found.memory),
            "shared": list(found.shares),
            "folder": str(folder),
        }
        at: dict[str, Any] = {"arm": None, "what": "starting"}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                WORKER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": str(settings.threads)},
                text=True,
            )
            assert process.stdin and process.stdout
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.close()
                for line in process.stdout:
                    event = json.loads(line)
                    if event["event"] == "begin":
                        at = event
                    progress.see(event)
                    partial.note(index, event)
                status = process.wait()
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
                shutil.rmtree(folder, ignore_errors=True)
            if status:
                errors.seek(0)
                _died(index, at, status, errors.read(), arms, partial)
            else:
                partial.note(index, {"event": "done"})


def _died(index: int, at: dict[str, Any], status: int, errors: str, arms: list[ArmPlan], partial: Partial) -> None:
    """Note what the worker was at when it ended; where it was at no arm in particular, no arm can be measured."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "Error" in line or "what()" in line), lines[-1] if lines else "")
    ended = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    is_memory = status == -signal.SIGKILL or is_out_of_memory(errors)
    failure = {
        "event": "failed",
        "status": OUT_OF_MEMORY if is_memory else ERROR,
        "reason": f"the process ended {ended} at {at['what']}{': ' + last[:300] if last else ''}",
    }
    left = [arm.label for arm in arms if arm.label not in partial.case(index).failed]
    for label in [at["arm"]] if at["arm"] else left:
        partial.note(index, {**failure, "arm": label})


def _case(case: Case, arms: Sequence[ArmPlan], found: Found, settings: Settings) -> dict[str, Any]:
    return {
        **case.describe(),
        "latent": list(case.architecture.latent(case.size)),
        "tokens": case.architecture.first_grid(case.size).tokens,
        "memory_limit_gb": settings.memory_limit_gb,
        "arms": [_arm(case, arm, found) for arm in arms],
    }


def _arm(case: Case, arm: ArmPlan, found: Found) -> dict[str, Any]:
    failure = {"status": NOT_MEASURED, "reason": arm.reason} if arm.reason else found.failed.get(arm.label)
    label = arm.label
    return {
        **arm.describe(),
        "attention": arm.attention,
        "kept": case.kept(arm.config),
        **(failure or {"status": MEASURED, "reason": None}),
        "seconds": [] if failure else found.seconds(label),
        "parity": found.parity.get(label),
        "peak_memory_bytes": found.memory.get(label),
        "macs": found.macs.get(label),
        "shares": found.shares.get(label),
    }


def _torch(settings: Settings) -> dict[str, str]:
    return versions_of(settings.torch_python) if settings.torch_python else {}


def _write(path: Path, result: dict[str, Any]) -> None:
    """Complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, path)
