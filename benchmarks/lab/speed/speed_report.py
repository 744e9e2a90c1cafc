"""The report on speed and memory: one table, from the template `speed.md`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..markdown import TEMPLATES, number, write_page
from .cases import MEASURED
from .frame import CASE, KEY, read_frame


def write_report(files: Sequence[Path], output: Path) -> str:
    """Write `speed.md` into a folder, which is made if it is missing; returns its text.

    Result files of other kinds are not used.

    Raises:
        ToMeConfigError: as `read_frame`; nothing is written.
    """
    frame = read_frame(files)
    merged = frame[frame["merges"]]
    least = merged[["over_plain", "over_efficient"]].min(axis=1)
    repeats = merged.groupby([*CASE, "machine", *KEY[1:]], dropna=False)["over_plain"]
    missing = frame[frame["status"] != MEASURED]
    reasons = missing["status"] + ": " + missing["reason"].fillna("no reason given")
    sources = frame.drop_duplicates("file").to_dict("records")
    return write_page(
        TEMPLATES / "speed.md",
        output,
        merged=merged["time"].notna().sum(),
        slower=merged.assign(least=least)[least < 1].sort_values("least", kind="stable").to_dict("records"),
        repeats={"count": (repeats.count() > 1).sum(), "most": (repeats.max() / repeats.min()).max()},
        parity=frame.dropna(subset="difference").sort_values("difference", ascending=False, kind="stable"),
        arms=_table(frame, {source["file"]: f"{nth}" for nth, source in enumerate(sources, start=1)}),
        names=set(frame["arm"]) | set(frame["backend"]),
        missing=(missing["case_name"] + ", " + missing["name"]).groupby(reasons, sort=False).unique().to_dict(),
        sources=sources,
    )


def _table(frame: pd.DataFrame, numbers: dict[Path, str]) -> pd.DataFrame:
    """A row for each arm of each case, with the number of its result, and a column for each backend.

    Where several rows are of one case, only the first names it.
    """
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for arm in frame.to_dict("records"):
        name = arm["name"].removesuffix(f", {arm['backend']}")
        rows.setdefault((arm["case"], numbers[arm["file"]], arm["case_name"], name), {})[arm["backend"]] = _cell(arm)
    first = {key[0]: key for key in reversed(rows)}
    names = [key[1:] if first[key[0]] == key else ("", "", key[3]) for key in rows]
    index = pd.MultiIndex.from_tuples(names, names=["result", "case", "arm"])
    return pd.DataFrame(list(rows.values()), index, columns=list(frame["backend"].unique()))


def _cell(arm: dict[str, Any]) -> str:
    """Seconds, how many times as fast as plain, and peak memory; bold if it is slower."""
    if arm["status"] != MEASURED:
        return str(arm["status"])
    cell = f"{number(arm['time'])} s"
    if not pd.isna(arm["over_plain"]):
        bold = "**" if arm["over_plain"] < 1 else ""
        cell += f", {bold}{arm['over_plain']:.2f}×{bold} [{arm['over_plain_low']:.2f}–{arm['over_plain_high']:.2f}]"
    return cell + ("" if pd.isna(arm["peak_memory_bytes"]) else f", {number(arm['peak_memory_bytes'] / 1e9)} GB")
