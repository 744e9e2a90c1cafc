"""Measures cases: one worker process per case, restarted if it dies, and one result file at the end."""

import multiprocessing
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ppdiffusers_tome.comparison.environment import describe_environment, versions
from ppdiffusers_tome.comparison.results import write_result
from ppdiffusers_tome.errors import ToMeError
from ppdiffusers_tome.run.runtime import error_summary

from ..cache import Cache, model_files, programs_of, sources
from ..result_files import make_result
from . import worker
from .cases import PLANNED, Case, Timing

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} passes, {elapsed} elapsed, {remaining} remaining"


class WorkerEndedError(ToMeError, RuntimeError):
    """A worker ended before it had measured its case: its exit status (negative for a signal), and what it printed."""

    def __init__(self, status: int, errors: str) -> None:
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if "Error" in line or "what()" in line), "".join(lines[-1:]))
        super().__init__(f"the worker ended {how}" + (f": {last[:300]}" if last else ""))


def measure_all(cases: Sequence[Case], timing: Timing, output: Path, command: str) -> list[Case]:
    """Measure the arms of cases that are PLANNED, write the result, and return the measured cases.

    Args:
        cases, timing, command: what, how, and the command for the result.
        output: JSON file, written at the end. Until then a folder beside it has what is measured, after every step,
            and the exported programs; another run with the same cases, models, settings, versions, machine and
            sources continues it.
    """
    beside = output.with_name(f".{output.name}.cache")
    cache, environment = Cache(beside), describe_environment()
    environment["threads"] = str(timing.threads)
    key = {
        "cases": [case.to_json() for case in cases],
        "models": [model_files(case.model) for case in cases],
        "settings": asdict(timing),
        "versions": versions(),
        "machine": environment["machine"],
        "sources": sources(),
    }
    result = cache.load(key)
    if result is None:
        if beside.exists():
            other = "an incomplete result of other cases, models, settings, versions or code, which is not continued"
            print(f"{beside} has {other}", file=sys.stderr)
        result = make_result("speed", command, environment=environment, **asdict(timing), cases=key["cases"])
        cache.store(result, key)
    cases = [Case.from_json(fields) for fields in result["cases"]]

    def save(index: int, case: Case) -> None:
        cases[index] = case
        result["cases"] = [case.to_json() for case in cases]
        cache.store(result, key)

    passes = [len(case.with_status(PLANNED)) * (1 + timing.warm_up + timing.rounds) for case in cases]
    with tqdm(total=sum(passes), bar_format=BAR, disable=None) as bar:
        for index, case in enumerate(cases):
            bar.set_description(case.name)
            folder, skip = programs_of(beside, case.model).folder, list[str]()
            folder.mkdir(parents=True, exist_ok=True)
            while cases[index].with_status(PLANNED):
                arm, step = None, "starting"
                try:
                    for message in worker_messages(cases[index], timing, folder, skip):
                        if isinstance(message, Case):
                            save(index, message)
                        else:
                            arm, step = message
                            bar.update()
                except WorkerEndedError as error:
                    skip += _fail(cases[index], arm, step, error, skip)
                    save(index, cases[index])
            bar.update(sum(passes[: index + 1]) - bar.n)
    write_result(output, result)
    shutil.rmtree(beside, ignore_errors=True)
    return cases


def worker_messages(case: Case, timing: Timing, programs: Path, skip: Sequence[str]) -> Iterator[Any]:
    """What `worker.measure_case` sends, from a process of its own, which ends with this iterator.

    Raises:
        WorkerEndedError: the process ended before the case was measured.
    """
    context = multiprocessing.get_context("spawn")  # a fork of Paddle's threads does not work
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile() as errors, receiver:
        arguments = (sender, errors.name, case, timing, programs, skip)
        process = context.Process(target=worker.run, args=arguments, daemon=True)
        process.start()
        sender.close()
        try:
            while True:
                yield receiver.recv()
        except EOFError:
            process.join()
        finally:
            process.kill()
            process.join()
        if process.exitcode:
            text = Path(errors.name).read_text(encoding="utf-8", errors="replace")
            raise WorkerEndedError(process.exitcode, text)


def _fail(case: Case, name: str | None, step: str, error: WorkerEndedError, skip: Sequence[str]) -> list[str]:
    """Fail the arm that the worker was at when it ended; all, if it was at none or at one of `skip`.

    If it was at a reference that is not an arm of the case, return its name, to be skipped from now on.
    """
    names = [arm.name for arm in case.arms]
    if name and name not in names and name not in skip:
        return [name]
    planned = case.with_status(PLANNED)
    for arm in [arm for arm in planned if arm.name == name] or planned:
        arm.fail(f"{step}: {error_summary(error)}")
    return []
