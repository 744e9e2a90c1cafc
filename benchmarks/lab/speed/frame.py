"""Speed results as one pandas frame: a row per arm, with what it cost and how it compares with other arms."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from ppdiffusers_tome.comparison.clock import gain
from ppdiffusers_tome.errors import ToMeConfigError

from ..arm import OURS, PLAIN, Arm
from ..result_files import read_json
from ..timing import quartiles
from .cases import MEASURED, Case, Measurement, read_cases

CASE = ["model", "scope", "size", "batch"]  # equal if repeated
MACHINE = ("machine", "device", "paddlepaddle", "paddlepaddle-gpu", "ppdiffusers")  # what seconds depend on


def read_frame(files: Sequence[Path]) -> pd.DataFrame:
    """The arms of all speed results among the files; files of other kinds are left out.

    The columns are the fields of the measurement, its case and its file; missing numbers are NaN. In addition:

    - `name`, `backend`: of the arm, without and with which "interlace 0.75, eager" is one.
    - `case`: its number. `case_name`: in words, such as "sd15, one UNet pass, 512 px, batch 2".
    - `machine`: what seconds depend on.
    - `merges`: whether tokens merge by this package.
    - `time`: the median of the seconds; NaN if the arm was not measured.
    - `over_plain` (in the same backend), `over_efficient` (of the same attention, unmerged): the `clock.Gain` over
      that arm; None unless both were measured and differ.
    - `difference`: of the parity.

    Raises:
        ToMeConfigError: a file cannot be read, no file is a speed result, there is no arm, or as `cases.read_cases`.
    """
    rows: list[dict[str, Any]] = []
    others: list[tuple[Path, str]] = []
    for file in files:
        result = read_json(file)
        if result.get("kind") != "speed":
            others.append((file, f"kind {result['kind']!r}" if "kind" in result else "no kind"))
            continue
        for case in read_cases(result, file):
            about = {name: result[name] for name in ("command", "commit", "environment", "rounds", "threads")}
            machine = ", ".join(str(value) for value in (result["threads"], *map(result["environment"].get, MACHINE)))
            about |= {"file": file, "case": rows[-1]["case"] + 1 if rows else 0, "machine": machine}
            rows += [{**vars(case), "case_name": case.name, **about, **row} for row in _rows_of(case)]
    if len(others) == len(files):
        names = ", ".join(f"{file} ({kind})" for file, kind in others) or "no file"
        raise ToMeConfigError(f"There is no speed result in {names}: pass files that bench wrote.")
    if not rows:
        raise ToMeConfigError(f"{', '.join(map(str, files))}: no arm was measured. Measure again.")
    return pd.DataFrame(rows).astype({"peak_memory_bytes": float, "difference": float})


def _rows_of(case: Case) -> Iterator[dict[str, Any]]:
    """The columns of each arm of a case that no other case decides."""
    measured_arms = {measured.arm: measured for measured in case.with_status(MEASURED)}

    def over(other: Arm, measured: Measurement) -> Any:
        both = measured.arm in measured_arms and other in measured_arms and other != measured.arm
        return gain(measured_arms[other].seconds, measured.seconds) if both else None

    for measured in case.arms:
        arm = measured.arm
        yield {
            **vars(measured),
            "name": measured.name.removesuffix(f", {arm.backend}"),
            "backend": arm.backend,
            "merges": arm.by == OURS and arm.config is not None,
            "time": quartiles(measured.seconds).median if measured.seconds else None,
            "over_plain": over(Arm(backend=arm.backend), measured),
            "over_efficient": None if arm.attention == PLAIN else over(replace(arm, config=None), measured),
            "difference": measured.parity and measured.parity["difference"],
        }
