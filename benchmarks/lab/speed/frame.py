"""Speed results as one pandas frame: a row per arm, with what it cost and how it compares with other arms."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ppdiffusers_tome.comparison.results import read_json
from ppdiffusers_tome.errors import ToMeConfigError

from .cases import ARM_NAMES, BOTH, MEMORY_EFFICIENT, PLAIN, TOME, read_cases

CASE = ["model", "scope", "size", "batch"]  # equal if repeated
KEY = ["case", "arm", "backend", "ratio", "max_downsample", "method"]  # identifies an arm within a frame
MACHINE = ("machine", "device", "paddlepaddle", "paddlepaddle-gpu", "ppdiffusers")  # what seconds depend on
NUMBERS = ("max_downsample", "peak_memory_bytes", "macs")
UNMERGED: dict[str, Any] = {"ratio": 0.0, "max_downsample": 0, "method": ""}


def read_frame(files: Sequence[Path]) -> pd.DataFrame:
    """The arms of all speed results among the files; files of other kinds are left out.

    The columns are the fields and properties of the arm, its case and its file; missing numbers are NaN, and
    `max_downsample` is 0 if it was not set. In addition:

    - `case`: its number. `case_name`: in words, such as "sd15, one UNet pass, 512 px, batch 2".
    - `machine`: what seconds depend on.
    - `is_ours`: whether the arm is not one of others.py; `merges`: whether it merges tokens too.
    - `time`, `time_low`, `time_high`: median and quartiles of the seconds; NaN if the arm was not measured.
    - `over_plain` (in the same backend), `over_efficient` (memory-efficient attention): the time of that arm over that
      of this one, as medians and quartiles of the ratios within rounds; NaN unless both were measured and differ.
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
            about["case_name"] = case.name
            for arm in case.arms:
                own = {name: getattr(arm, name) for name in ("name", "ratio", "max_downsample", "method")}
                own |= {"is_ours": arm.arm in ARM_NAMES}
                rows.append({**vars(case), **about, **vars(arm), **own})
    if len(others) == len(files):
        names = ", ".join(f"{file} ({kind})" for file, kind in others) or "no file"
        raise ToMeConfigError(f"There is no speed result in {names}: pass files that bench wrote.")
    if not rows:
        raise ToMeConfigError(f"{', '.join(map(str, files))}: no arm was measured. Measure again.")
    frame = pd.DataFrame(rows).astype(dict.fromkeys(NUMBERS, float))
    frame["max_downsample"] = frame["max_downsample"].fillna(0).astype(int)
    frame["merges"] = frame["is_ours"] & frame["arm"].isin([TOME, BOTH])
    plain, efficient = (rows_with(frame, arm=arm, **UNMERGED) for arm in (PLAIN, MEMORY_EFFICIENT))
    references = {"plain": plain, "efficient": efficient[frame["arm"] == BOTH]}
    seconds = rounds(frame)
    columns = [spread("time", seconds)]
    for name, other in references.items():
        columns.append(spread(f"over_{name}", rounds(other[other["name"] != frame["name"][other.index]]) / seconds))
    frame = frame.assign(difference=frame["parity"].str["difference"].astype(float))
    return pd.concat([frame, *columns], axis=1)


def rows_with(frame: pd.DataFrame, **changes: Any) -> pd.DataFrame:
    """For each arm, the arm of the same case whose key differs by `changes` alone; missing values if there is none."""
    return frame[KEY].assign(**changes).merge(frame.drop_duplicates(KEY), "left", KEY).set_axis(frame.index)


def rounds(arms: pd.DataFrame) -> pd.DataFrame:
    """The seconds of arms, a column per round; NaN where an arm was not measured."""
    return pd.DataFrame([s if isinstance(s, list) else [] for s in arms["seconds"]], arms.index, dtype=float)


def spread(name: str, values: pd.DataFrame) -> pd.DataFrame:
    """The median of each row, named `name`, and its quartiles, named `name_low` and `name_high`."""
    return values.quantile([0.5, 0.25, 0.75], axis=1).T.set_axis([name, f"{name}_low", f"{name}_high"], axis=1)
