"""Speed results as one pandas frame: a row per arm, with what it cost and how it compares with other arms."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ...errors import ToMeConfigError
from ..clock import quartiles, ratio_within_rounds
from ..results import read_json
from .cases import BOTH, BUILT_IN, EAGER, LIMIT, MEMORY_EFFICIENT, PLAIN, PREDICTOR, PYTORCH, SCOPES, TOME, read_cases

CASE = ["model", "scope", "size", "batch", "dtype", "steps", "guidance_scale", "memory_limit_gb"]  # equal if repeated
KEY = ["case", "arm", "backend", "ratio", "max_downsample"]  # identifies an arm within a frame
MACHINE = ("machine", "device", "paddlepaddle", "paddlepaddle-gpu", "ppdiffusers")  # what seconds depend on
NUMBERS = ("steps", "guidance_scale", "memory_limit_gb", "max_downsample", "peak_memory_bytes", "macs")
UNMERGED = {"ratio": 0.0, "max_downsample": 0}


def read_frame(files: Iterable[Path]) -> tuple[pd.DataFrame, list[tuple[Path, str]]]:
    """The arms of all speed results among the files, and the files of other kinds with their kind.

    Raises:
        ToMeConfigError: a file cannot be read, no file is a speed result, or as `make_frame`.
    """
    results, skipped = [], []
    for file in files:
        result = read_json(file)
        if result.get("kind") == "speed":
            results.append((file, result))
        else:
            skipped.append((file, f"kind {result['kind']!r}" if "kind" in result else "no kind"))
    if not results:
        names = ", ".join(f"{file} ({kind})" for file, kind in skipped) or "no file"
        raise ToMeConfigError(f"There is no speed result in {names}: pass files that bench wrote.")
    return make_frame(results), skipped


def make_frame(results: Sequence[tuple[Path, dict[str, Any]]]) -> pd.DataFrame:
    """A row per arm, in the order of the results.

    The columns are the fields of the arm, its case and its file, except that missing numbers are NaN and
    `max_downsample` is 0 if the option was not used. In addition:

    - `case`: number of the case. In words: `case_name`, made of `subject` ("sd15, one UNet pass") and `shape`
      ("512 px, batch 2"), and `name`, of the arm.
    - `machine`: what seconds depend on. `merges`: whether this package merges tokens in the arm.
    - `time`: `Quartiles` of the seconds; None if the arm was not measured.
    - `faster_than_plain`, `…_efficient` (in the same backend), `…_pytorch`, `…_eager_plain`, of ToMe also
      `…_built_in`, of a predictor also `…_eager` (the same arm there): the time of that arm over the time of this one,
      as `Quartiles` of the ratios within rounds; None unless both were measured and differ.
    - `over_limit`: the time of ToMe over that of its free-merge limit, in the same form.
    - `memory_over_plain`, `memory_over_unmerged`: peak memory over that of plain, and of the same attention unmerged.

    Raises:
        ToMeConfigError: there is no arm, or as `cases.read_cases`.
    """
    cases = [(file, result, case) for file, result in results for case in read_cases(result, file)]
    rows: list[dict[str, Any]] = []
    for number, (file, result, case) in enumerate(cases):
        about = {name: result[name] for name in ("command", "commit", "environment", "rounds", "threads")}
        subject = f"{case.model}, {SCOPES.get(case.scope, case.scope)}"
        words = {"case": number, "case_name": case.name, "subject": subject}
        words["shape"] = case.name.removeprefix(f"{subject}, ")
        rows += [{"file": file, **about, **vars(case), **vars(arm), **words, "name": arm.name} for arm in case.arms]
    if not rows:
        raise ToMeConfigError(f"{', '.join(str(file) for file, _ in results)}: no arm was measured. Measure again.")
    frame = pd.DataFrame(rows).drop(columns="arms").astype(dict.fromkeys(NUMBERS, float)).fillna({"max_downsample": 0})
    frame = frame.drop_duplicates(KEY, ignore_index=True)  # a value may be repeated on the command line
    return _with_comparisons(
        frame.assign(
            max_downsample=frame["max_downsample"].astype(int),
            machine=[
                ", ".join(map(str, (threads, *(environment.get(name) for name in MACHINE))))
                for threads, environment in zip(frame["threads"], frame["environment"], strict=True)
            ],
            merges=frame["arm"].isin([TOME, BOTH]) & (frame["backend"] != PYTORCH),  # in PyTorch tomesd merges
            time=pd.Series([quartiles(seconds) if seconds else None for seconds in frame["seconds"]], dtype=object),
        )
    )


def _with_comparisons(frame: pd.DataFrame) -> pd.DataFrame:
    plain, efficient = (partners(frame, arm=arm, **UNMERGED) for arm in (PLAIN, MEMORY_EFFICIENT))
    others = {
        "faster_than_plain": plain,
        "faster_than_efficient": efficient,
        "faster_than_built_in": partners(frame, arm=BUILT_IN),
        "faster_than_pytorch": partners(frame, backend=PYTORCH),
        "faster_than_eager": partners(frame, backend=EAGER),
        "faster_than_eager_plain": partners(frame, arm=PLAIN, backend=EAGER, **UNMERGED),
    }
    columns = {
        name: ratios(other["seconds"], frame["seconds"]).mask(other["name"] == frame["name"], None)
        for name, other in others.items()
    }
    columns["over_limit"] = ratios(frame["seconds"], partners(frame, arm=LIMIT)["seconds"])
    columns["faster_than_eager"] = columns["faster_than_eager"].where(frame["backend"] == PREDICTOR, None)
    for name in ("faster_than_built_in", "over_limit"):  # which have plain attention
        columns[name] = columns[name].where(frame["arm"] == TOME, None)
    unmerged = plain["peak_memory_bytes"].mask(frame["arm"] == BOTH, efficient["peak_memory_bytes"])
    columns["memory_over_plain"] = frame["peak_memory_bytes"] / plain["peak_memory_bytes"]
    columns["memory_over_unmerged"] = frame["peak_memory_bytes"] / unmerged
    return frame.assign(**columns)


def partners(frame: pd.DataFrame, **changes: Any) -> pd.DataFrame:
    """For each arm the arm of the same case whose key differs by `changes` alone; missing values if there is none."""
    return frame[KEY].assign(**changes).merge(frame, on=KEY, how="left").set_axis(frame.index)


def ratios(numerators: pd.Series, denominators: pd.Series) -> pd.Series:
    """`Quartiles` of the ratios of two columns of seconds, within rounds; None where one was not measured."""
    pairs = zip(numerators, denominators, strict=True)
    values = [ratio_within_rounds(*pair) if all(isinstance(s, list) and s for s in pair) else None for pair in pairs]
    return pd.Series(values, index=numerators.index, dtype=object)


def medians(values: pd.Series) -> pd.Series:
    """The medians of a column of `Quartiles`; NaN where there are none."""
    return values.map(lambda value: value.median, na_action="ignore").astype(float)


def nearest(values: Iterable[float], wanted: float) -> float:
    """The value that is nearest to the wanted one; of two the lower."""
    return min(values, key=lambda value: (abs(value - wanted), value))
