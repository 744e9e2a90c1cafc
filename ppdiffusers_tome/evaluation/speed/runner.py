"""Measures cases: one worker process per case, restarted if it dies, and one result file at the end."""

import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ...errors import ToMeConfigError
from ...inference.runtime import error_summary
from ..cached_programs import folder_of_programs
from ..environment import describe_environment, model_files, sources, versions
from ..results import make_result, read_json, write_result
from ..torch_unet import torch_versions
from ..worker_process import WorkerEndedError, WorkerError, WorkerProcess
from . import worker
from .cases import ERROR, OUT_OF_MEMORY, PLANNED, Case
from .memory import count_ended_processes, is_out_of_memory

WORKER = [sys.executable, "-W", "ignore", "-m", worker.__name__]
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} passes, {elapsed} elapsed, {remaining} remaining"


@dataclass(frozen=True)
class Settings:
    """How cases are measured."""

    rounds: int = 5  # timed passes of each arm
    warm_up: int = 1  # passes of each arm before the timed ones
    threads: int = 1  # of every backend
    torch_python: str | None = None  # interpreter of the backend PyTorch; None if it is not measured

    def __post_init__(self) -> None:
        for name, most in (("rounds", 10**6), ("warm_up", 10**6), ("threads", 1024)):
            if not 1 <= getattr(self, name) <= most:
                option = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise ToMeConfigError(f"{option} is not allowed: it must be from 1 to {most:,}.")


def measure_all(
    cases: Sequence[Case],
    settings: Settings,
    output: Path,
    command: str,
    restart: bool = False,
    programs: Path | None = None,
) -> list[Case]:
    """Measure the arms of cases that are PLANNED, write the result, and return the measured cases.

    Args:
        cases, settings, command: what, how, and the command for the result.
        output: JSON file, written at the end. Until then the incomplete result is in `output` + ".partial", after
            every step, and another run with the same cases, models, settings, versions, machine and sources
            continues it.
        restart: ignore an incomplete result.
        programs: folder in which exported programs are kept for other calls; None: one beside `output`, until that is
            written.

    Raises:
        ToMeConfigError: the incomplete result belongs to other cases, models, settings, versions or sources, or to
            another machine.
    """
    result = IncompleteResult(output, cases, settings, command, restart)
    folder, beside = (output.with_name(f".{output.name}.{name}") for name in ("work", "programs"))
    if restart:
        shutil.rmtree(beside, ignore_errors=True)
    passes = [len(case.with_status(PLANNED)) * (1 + settings.warm_up + settings.rounds) for case in cases]
    with tqdm(total=sum(passes), bar_format=BAR, disable=None) as bar:
        for index, case in enumerate(cases):
            bar.set_description(case.name)
            skip: list[str] = []
            while result.cases[index].with_status(PLANNED):
                at: dict[str, Any] = {"arm": None, "step": "starting"}

                def see(event: dict[str, Any], index: int = index, at: dict[str, Any] = at) -> None:
                    if event["event"] == "case":
                        result.save(index, event["case"])
                    else:
                        bar.update()
                        at.update(event)

                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                arguments = {name: getattr(settings, name) for name in ("warm_up", "threads", "torch_python")}
                kept = folder_of_programs(programs or beside, case.model)
                start = {**arguments, "case": asdict(result.cases[index]), "folder": str(folder), "skip": skip}
                start["programs"] = str(kept)
                ended_before = count_ended_processes()
                try:
                    with WorkerProcess(WORKER, "the worker", settings.threads) as process:
                        result.save(index, process.ask("prepare", see, **start)["case"])
                        while arms := result.cases[index].with_status(PLANNED):
                            is_done = len(arms[0].seconds) == settings.rounds
                            action = "finish" if is_done else "time_round"
                            result.save(index, process.ask(action, see)["case"])
                except (WorkerError, WorkerEndedError) as error:
                    skip += _fail(result.cases[index], at["arm"], at["step"], error, skip, ended_before)
                    result.save(index, asdict(result.cases[index]))
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
            bar.update(sum(passes[: index + 1]) - bar.n)
    result.complete()
    shutil.rmtree(beside, ignore_errors=True)
    return result.cases


class IncompleteResult:
    """The cases as far as they are measured, on disk after every step."""

    def __init__(self, output: Path, cases: Sequence[Case], settings: Settings, command: str, restart: bool) -> None:
        self._output, self._path = output, output.with_name(f"{output.name}.partial")
        environment = {**describe_environment(), "threads": str(settings.threads)}
        torch = torch_versions(settings.torch_python) if settings.torch_python else {}
        self._belongs_to = {
            "cases": [asdict(case) for case in cases],
            "models": {case.model: model_files(case.model) for case in cases},
            "settings": asdict(settings),
            "versions": {**versions(), **torch},
            "machine": environment["machine"],
            "sources": sources(),
        }
        if self._path.exists() and not restart:
            self._result = read_json(self._path)
            stored = self._result.pop("belongs_to", {})
            others = [name for name, value in self._belongs_to.items() if stored.get(name) != value]
            if others:
                raise ToMeConfigError(
                    f"{self._path} is an incomplete result with other {', '.join(others)}: repeat its command to "
                    "continue it, or pass --restart to start again and lose it."
                )
        else:
            content = {**asdict(settings), "cases": self._belongs_to["cases"]}
            del content["torch_python"]
            self._result = make_result("speed", command, environment={**environment, **torch}, **content)
        self.cases = [Case.from_json(fields) for fields in self._result["cases"]]

    def save(self, index: int, case: dict[str, Any]) -> None:
        """Store a case."""
        self.cases[index] = Case.from_json(case)
        self._result = {**self._result, "cases": [asdict(case) for case in self.cases]}
        write_result(self._path, {**self._result, "belongs_to": self._belongs_to})

    def complete(self) -> None:
        """Write the result; the incomplete one is deleted."""
        write_result(self._output, self._result)
        self._path.unlink(missing_ok=True)


def _fail(
    case: Case,
    name: str | None,
    step: str,
    error: WorkerError | WorkerEndedError,
    skip: Sequence[str],
    ended_before: int | None,
) -> list[str]:
    """Fail the arm that the worker was at when it failed or ended; all, if it was at none or at one of `skip`.

    If it was at a definition that is not an arm of the case, return its name, to be skipped from now on. The system
    ends a process by SIGKILL where memory runs out, and then counts more of them than `ended_before`.
    """
    is_memory = is_out_of_memory(getattr(error, "errors", "") + str(error))
    if getattr(error, "status", 0) == -signal.SIGKILL:
        is_memory = is_memory or count_ended_processes() != ended_before
    names = [arm.name for arm in case.arms]
    if name and name not in names and name not in skip:
        return [name]
    planned = case.with_status(PLANNED)
    for arm in [arm for arm in planned if arm.name == name] or planned:
        arm.fail(OUT_OF_MEMORY if is_memory else ERROR, f"{step}: {error_summary(error)}")
    return []
