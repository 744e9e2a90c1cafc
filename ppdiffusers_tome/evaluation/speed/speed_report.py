"""The report on speed and memory: a page of tables and plots, from the template `speed.md`."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..markdown import TEMPLATES, change, number, write_page
from ..plotting import save_figure
from .cases import MEASURED, OUT_OF_MEMORY, PLAIN, TOME
from .frame import CASE, KEY, near_half, read_frame
from .speed_plots import against_ratio, against_size, by_method

PUBLISHED = "published_figures.md"
PLOTS = {"against_size": against_size, "against_ratio": against_ratio, "by_method": by_method}


def write_report(files: Sequence[Path], output: Path) -> str:
    """Write `speed.md` and its plots into a folder, which is made if it is missing; returns the text of `speed.md`.

    Result files of other kinds are listed on the page and not used.

    Raises:
        ToMeConfigError: as `read_frame`; nothing is written.
    """
    frame, others = read_frame(files)
    merged = frame[frame["merges"]]
    tome = merged[(merged["arm"] == TOME) & merged["over_plain"].notna()]
    least = merged[["over_plain", "over_efficient"]].min(axis=1)
    repeats = merged.groupby([*CASE, "machine", *KEY[1:]], dropna=False)["over_plain"]
    too_large = frame[(frame["arm"] == PLAIN) & (frame["status"] == OUT_OF_MEMORY)]
    measured = merged.loc[merged["time"].notna(), ["case", "backend"]]
    return write_page(
        TEMPLATES / "speed.md",
        output,
        frame=frame,
        methods=[
            {**arms.loc[arms["over_plain"].idxmax()], "range": _range(arms["over_plain"]), "count": len(arms)}
            for _, arms in tome.groupby("method", sort=False)
        ],
        merged=len(measured),
        slower=merged.assign(least=least)[least < 1].sort_values("least", kind="stable").to_dict("records"),
        repeats={"count": (repeats.count() > 1).sum(), "most": (repeats.max() / repeats.min()).max()},
        memory=merged.dropna(subset="memory_over_unmerged").sort_values("memory_over_unmerged"),
        fits=list(too_large.merge(measured, on=["case", "backend"])["case_name"].unique()),
        parity=frame.dropna(subset="difference").sort_values("difference", ascending=False, kind="stable"),
        summary=_summary(tome),
        others=others,
        has_published=(output / PUBLISHED).exists(),
        sections=[_section(index, *section, output) for index, section in enumerate(_sections(frame), start=1)],
    )


def _range(speed_ups: pd.Series) -> str:
    low, high = f"{speed_ups.min():.2f}×", f"{speed_ups.max():.2f}×"
    return low if low == high else f"{low} to {high}"


def _summary(tome: pd.DataFrame) -> pd.DataFrame:
    """The speed-ups of ToMe by model, size and method, at one ratio for each method and backend: a column for each."""
    arms = near_half(tome)
    keys = [arms["subject"].rename("model"), arms["size"].rename("px"), arms["label"].rename("arm"), arms["backend"]]
    return arms["over_plain"].groupby(keys, sort=False).agg(_range).unstack() if len(arms) else pd.DataFrame()


def _sections(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The title and the arms of each section; a case that was measured twice is in two sections."""
    by_case = frame.drop_duplicates("case").set_index("case")
    repeats = by_case.groupby([*CASE, "machine"], dropna=False, sort=False).cumcount()
    title_of = frame["subject"] + ", " + frame["dtype"] + _text(frame["steps"], ", {:g} steps".format, "")
    title_of += _text(frame["guidance_scale"], ", guidance scale {:g}".format, "")
    titles: set[str] = set()
    for (title, *_), arms in frame.groupby([title_of, "machine", frame["case"].map(repeats)], sort=False):
        title += f", {arms['file'].iloc[0].name}" if title in titles else ""
        titles.add(title)
        yield title, arms.sort_values(["size", "batch", "memory_limit_gb"], kind="stable", na_position="first")


def _section(index: int, title: str, arms: pd.DataFrame, output: Path) -> dict[str, Any]:
    """What the template shows of a section; writes its plots."""
    missing, first = arms[arms["status"] != MEASURED], arms.iloc[0]
    reasons = missing["status"] + ": " + missing["reason"].fillna("no reason given")
    words = f"speed {index} {Path(first['model']).name} {first['scope']} {first['dtype']}".lower()
    prefix = re.sub(r"[\W_]+", "_", words).strip("_")
    plots = {f"{prefix}_{name}.png": figure for name, plot in PLOTS.items() if (figure := plot(arms))}
    for name, figure in plots.items():
        save_figure(figure, output / name)
    return {
        "title": title,
        "sources": arms.drop_duplicates("file").to_dict("records"),
        "arms": _arm_table(arms),
        "plots": {name: figure.get_suptitle() for name, figure in plots.items()},
        "missing": missing["name"].groupby(reasons, sort=False).unique().to_dict(),
    }


def _arm_table(arms: pd.DataFrame) -> pd.DataFrame:
    """A row for each arm, with all that was measured."""
    status = arms["status"].map({OUT_OF_MEMORY: "OOM"}).fillna(arms["status"])
    memory = _text(arms["peak_memory_bytes"] / 1e9, number)
    cells = {
        "s": (_text(arms["time"], number) + _quartiles(arms, "time", number)).fillna(status),
        "over plain": _speed_up(arms, "plain"),
        "over memory-efficient": _speed_up(arms, "efficient"),
        "over eager plain": _speed_up(arms, "eager").mask(arms["backend"] == "eager"),
        "peak memory, GB": memory + _text(arms["memory_over_plain"], lambda ratio: f" ({change(ratio)})", ""),
        "GMACs": _text(arms["macs"] / 1e9, "{:.2f}".format),
        "parity": _text(arms["difference"], "{:.0e}".format),
    }
    index = pd.MultiIndex.from_frame(arms[["shape", "name"]], names=["case", "arm"])
    return pd.DataFrame(cells, arms.index).set_index(index)


def _speed_up(arms: pd.DataFrame, reference: str) -> pd.Series:
    """Medians and quartiles of the speed-up over a reference; those below 1 are bold."""
    column = f"over_{reference}"
    bold = arms[column].lt(1).map({True: "**", False: ""})
    return bold + _text(arms[column], "{:.2f}×".format) + bold + _quartiles(arms, column, "{:.2f}".format)


def _quartiles(arms: pd.DataFrame, column: str, write: Callable[[float], str]) -> pd.Series:
    low, high = (_text(arms[f"{column}_{end}"], write) for end in ("low", "high"))
    return " [" + low + "–" + high + "]"


def _text(values: pd.Series, write: Callable[[Any], str], missing: str | None = None) -> pd.Series:
    return pd.Series([missing if pd.isna(value) else write(value) for value in values], values.index, dtype=object)
