"""Speed results as one pandas frame: a row per arm, with what it cost and how it compares with other arms."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ...errors import ToMeConfigError
from ..results import read_json
from .cases import (
    BOTH,
    BUILT_IN,
    EAGER,
    LIMIT,
    MEMORY_EFFICIENT,
    PLAIN,
    PREDICTOR,
    PROGRAMS,
    PYTORCH,
    SCOPES,
    TOME,
    Arm,
    method_of,
    read_cases,
    tomesd_config,
)

CASE = ["model", "scope", "size", "batch", "dtype", "steps", "guidance_scale", "memory_limit_gb"]  # equal if repeated
KEY = ["case", "arm", "backend", "ratio", "max_downsample", "method"]  # identifies an arm within a frame
LIMIT_KEY = ["case", "arm", "backend", "kept", "max_downsample", "layers"]  # what an arm and its limit have in common
MACHINE = ("machine", "device", "paddlepaddle", "paddlepaddle-gpu", "ppdiffusers")  # what seconds depend on
NUMBERS = ("steps", "guidance_scale", "memory_limit_gb", "max_downsample", "peak_memory_bytes", "macs")
UNMERGED: dict[str, Any] = {"ratio": 0.0, "max_downsample": 0, "method": ""}


def read_frame(files: Sequence[Path]) -> tuple[pd.DataFrame, list[tuple[Path, str]]]:
    """The arms of all speed results among the files, and the files of other kinds with their kind.

    The columns are the fields of the arm, its case and its file; missing numbers are NaN, and `max_downsample` is 0
    if the option was not used. In addition:

    - `case`: number of the case. In words: `case_name`, made of `subject` ("sd15, one UNet pass") and `shape`
      ("512 px, batch 2"), and `name`, of the arm.
    - `ratio`, `max_downsample`, `method` of the arm, and `tomesd`, the method of tomesd that removes as many tokens.
      `layers`: around which layers it merges. `label`: in words without level and backend; `label_at`: with ratio.
    - `machine`: what seconds depend on. `merges`: whether this package merges tokens in the arm.
    - `time`, `time_low`, `time_high`: median and quartiles of the seconds; NaN if the arm was not measured.
    - `faster_than_plain`, `…_efficient` (in the same backend), `…_pytorch`, `…_eager_plain`, of ToMe also
      `…_built_in`, of plain and ToMe in the predictor also `…_eager`: the time of that arm over that of this one, as
      medians and quartiles of the ratios within rounds; NaN unless both were measured and differ.
    - `over_limit`: the time of ToMe over that of its free-merge limit, in the same form.
    - `memory_over_plain`, `memory_over_unmerged`: peak memory over that of plain, and of the same attention unmerged.

    Raises:
        ToMeConfigError: a file cannot be read, no file is a speed result, there is no arm, or as `cases.read_cases`.
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
    cases = [(file, result, case) for file, result in results for case in read_cases(result, file)]
    rows: list[dict[str, Any]] = []
    for number, (file, result, case) in enumerate(cases):
        about = {name: result[name] for name in ("command", "commit", "environment", "rounds", "threads")}
        machine = ", ".join(str(value) for value in (result["threads"], *map(result["environment"].get, MACHINE)))
        subject = f"{case.model}, {SCOPES.get(case.scope, case.scope)}"
        words = {"case_name": case.name, "subject": subject, "shape": case.name.removeprefix(f"{subject}, ")}
        about |= {"file": file, "case": number, "machine": machine, **words, **vars(case)}
        rows += [{**about, **vars(arm), **_about(arm)} for arm in case.arms]
    if not rows:
        raise ToMeConfigError(f"{', '.join(str(file) for file, _ in results)}: no arm was measured. Measure again.")
    frame = pd.DataFrame(rows).astype(dict.fromkeys(NUMBERS, float))
    frame["max_downsample"] = frame["max_downsample"].fillna(0).astype(int)
    frame["merges"] = frame["arm"].isin([TOME, BOTH]) & ~frame["is_torch"]  # in PyTorch tomesd merges
    return _with_comparisons(frame), skipped


def _about(arm: Arm) -> dict[str, Any]:
    config = arm.config
    return {
        **{name: getattr(arm, name) for name in ("name", "ratio", "max_downsample", "method", "is_torch")},
        "label": arm.label(),
        "label_at": arm.label(f" {arm.ratio:g}"),
        "tomesd": method_of(tomesd_config(config)) if config else "",
        "layers": f"{config.merge_attn}, {config.merge_crossattn}, {config.merge_mlp}" if config else "",
    }


def _with_comparisons(frame: pd.DataFrame) -> pd.DataFrame:
    plain, efficient = (partners(frame, arm=arm, **UNMERGED) for arm in (PLAIN, MEMORY_EFFICIENT))
    is_tome, is_program = frame["arm"] == TOME, frame["backend"].isin(PROGRAMS) & (frame["arm"] != LIMIT)
    others = {
        "faster_than_plain": plain,
        "faster_than_efficient": efficient,
        "faster_than_built_in": partners(frame, arm=BUILT_IN, method=frame["tomesd"])[
            is_tome
        ],  # it has plain attention
        "faster_than_pytorch": partners(frame, backend=PYTORCH, method=frame["tomesd"]),
        "faster_than_eager": partners(frame, backend=EAGER)[is_program],
        "faster_than_predictor": partners(frame, backend=PREDICTOR)[is_program & (frame["backend"] != PREDICTOR)],
        "faster_than_eager_plain": partners(frame, arm=PLAIN, backend=EAGER, **UNMERGED),
    }
    seconds = rounds(frame)
    limit = rounds(partners(frame, LIMIT_KEY, arm=LIMIT)[is_tome])
    columns = [spread("time", seconds), spread("over_limit", seconds / limit)]
    for name, other in others.items():
        columns.append(spread(name, rounds(other[other["name"] != frame["name"][other.index]]) / seconds))
    memory, unmerged = (arms["peak_memory_bytes"] for arms in (frame, plain))
    frame = frame.assign(
        memory_over_plain=memory / unmerged,
        memory_over_unmerged=memory / unmerged.mask(frame["arm"] == BOTH, efficient["peak_memory_bytes"]),
    )
    return pd.concat([frame, *columns], axis=1)


def partners(frame: pd.DataFrame, key: Sequence[str] = KEY, **changes: Any) -> pd.DataFrame:
    """For each arm the arm of the same case whose key differs by `changes` alone; missing values if there is none."""
    key = list(key)
    return frame[key].assign(**changes).merge(frame.drop_duplicates(key), "left", key).set_axis(frame.index)


def rounds(arms: pd.DataFrame) -> pd.DataFrame:
    """The seconds of arms, a column per round; NaN where an arm was not measured."""
    return pd.DataFrame([s if isinstance(s, list) else [] for s in arms["seconds"]], arms.index, dtype=float)


def spread(name: str, values: pd.DataFrame) -> pd.DataFrame:
    """The median of each row, named `name`, and its quartiles, named `name_low` and `name_high`."""
    return values.quantile([0.5, 0.25, 0.75], axis=1).T.set_axis([name, f"{name}_low", f"{name}_high"], axis=1)


def at_ratio(arms: pd.DataFrame) -> pd.Series:
    """Whether each arm has the ratio that is nearest to 0.5 among those of its method and backend."""
    return arms["ratio"] == arms.groupby(["backend", "method"])["ratio"].transform(nearest, 0.5)


def nearest(values: Iterable[float], wanted: float) -> float:
    """The value that is nearest to the wanted one; of two the lower."""
    return min(values, key=lambda value: (abs(value - wanted), value))
