"""The report on speed and memory: one table, from the template `speed.md`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..markdown import TEMPLATES, number, write_page
from .cases import MEASURED
from .frame import CASE, read_frame


def write_report(files: Sequence[Path], output: Path) -> str:
    """Write `speed.md` into a folder, which is made if it is missing; returns its text.

    Result files of other kinds are not used.

    Raises:
        ToMeConfigError: as `read_frame`; nothing is written.
    """
    frame = read_frame(files)
    merged = frame[frame["merges"]]
    missing = frame[frame["status"] != MEASURED]
    reasons = missing["status"] + ": " + missing["reason"].fillna("no reason given")
    sources = frame.drop_duplicates("file").to_dict("records")
    return write_page(
        TEMPLATES / "speed.md",
        output,
        merged=merged["time"].notna().sum(),
        slower=_slower(merged),
        repeats=_repeats(merged),
        parity=frame.dropna(subset="difference").sort_values("difference", ascending=False, kind="stable"),
        arms=_table(frame, {source["file"]: f"{nth}" for nth, source in enumerate(sources, start=1)}),
        by={arm.by for arm in frame["arm"]},
        missing=(missing["case_name"] + ", " + missing["arm"].map(lambda arm: arm.pass_name))
        .groupby(reasons, sort=False)
        .unique()
        .to_dict(),
        sources=sources,
    )


def _slower(merged: pd.DataFrame) -> list[dict[str, Any]]:
    """The merged arms that are slower than plain or the same attention unmerged, the slowest first."""
    rows = []
    for row in merged.to_dict("records"):
        gains = [gain for gain in (row["over_plain"], row["over_efficient"]) if gain and gain.is_difference]
        least = min((gain.factor for gain in gains), default=1.0)
        rows += [{**row, "least": least}] if least < 1 else []
    return sorted(rows, key=lambda row: row["least"])


def _repeats(merged: pd.DataFrame) -> dict[str, Any]:
    """How many gains over plain were measured in several runs, and the largest ratio of two of the same."""
    factors = merged["over_plain"].dropna().map(lambda gain: gain.factor)
    groups = factors.groupby([merged.loc[factors.index, name] for name in (*CASE, "machine", "name", "backend")])
    return {"count": (groups.count() > 1).sum(), "most": (groups.max() / groups.min()).max()}


def _table(frame: pd.DataFrame, numbers: dict[Path, str]) -> pd.DataFrame:
    """A row for each arm of each case, with the number of its result, and a column for each backend.

    Where several rows are of one case, only the first names it.
    """
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for arm in frame.to_dict("records"):
        row = (arm["case"], numbers[arm["file"]], arm["case_name"], arm["name"])
        rows.setdefault(row, {})[arm["backend"]] = _cell(arm)
    first = {key[0]: key for key in reversed(rows)}
    names = [key[1:] if first[key[0]] == key else ("", "", key[3]) for key in rows]
    index = pd.MultiIndex.from_tuples(names, names=["result", "case", "arm"])
    return pd.DataFrame(list(rows.values()), index, columns=list(frame["backend"].unique()))


def _cell(arm: dict[str, Any]) -> str:
    """Seconds, the gain over plain with the interval of its median, and peak memory; bold if it is slower."""
    if arm["status"] != MEASURED:
        return str(arm["status"])
    cell = f"{number(arm['time'])} s"
    if gain := arm["over_plain"]:
        bold = "**" if gain.is_difference and gain.factor < 1 else ""
        cell += f", {bold}{gain}{bold} [{gain.low:.2f}–{gain.high:.2f}]"
    return cell + ("" if pd.isna(arm["peak_memory_bytes"]) else f", {number(arm['peak_memory_bytes'] / 1e9)} GB")
