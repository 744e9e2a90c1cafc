"""The report on speed and memory: a page of tables and plots, from the template `speed.md`."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ..markdown import TEMPLATES, change, number, write_page
from ..plotting import GREY, add_legend, looks_of, make_figure, plot_lines, save_figure, set_title
from .cases import BOTH, MEASURED, OUT_OF_MEMORY, PLAIN, TOME
from .frame import CASE, KEY, near_half, read_frame

PUBLISHED = "published_figures.md"
MIN_POINTS = 3  # points of a line, or bars, of a plot


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
    """Speed-ups by model, size and method, at one ratio for each method and backend; a column for each backend."""
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


# The plots of a section: a figure, or None if there are fewer than MIN_POINTS points to show.


def against_size(arms: pd.DataFrame) -> Figure | None:
    """Speed-up over plain against image size, a line for each merging arm and batch."""
    arms = arms[arms["merges"]]
    keys = [arms["label"], arms["backend"], "batch " + arms["batch"].astype(str)]
    return _lines(arms, keys, "size", "image size (px, square)", "Speed-up against size")


def against_ratio(arms: pd.DataFrame) -> Figure | None:
    """Speed-up over plain and peak memory against the ratio, for each backend and arm; plain is at ratio 0.

    Of several cases it is the one with the largest image and the smallest batch, of several methods the first.
    """
    arms = arms.sort_values(["size", "batch"], ascending=[False, True], kind="stable")
    arms = arms[(arms["case"] == arms["case"].iloc[0]) & arms["arm"].isin([PLAIN, TOME, BOTH]) & arms["is_ours"]]
    merged = arms[arms["merges"]]
    if merged.empty:
        return None
    at = merged[["method", "max_downsample"]].eq(merged[["method", "max_downsample"]].iloc[0]).all(axis=1)
    merged = merged[at]
    starts = [
        arms[(arms["arm"] == PLAIN) & (arms["backend"] == backend)].assign(arm=arm, over_plain=1.0)
        for arm, backend in merged[["arm", "backend"]].drop_duplicates().itertuples(index=False)
    ]
    curves = pd.concat([*starts, merged], ignore_index=True)
    words = curves["arm"].map({TOME: "", BOTH: ", memory-efficient"})
    return _lines(curves, [curves["backend"] + words], "ratio", "ratio (share of tokens merged)", "Against the ratio")


def by_method(arms: pd.DataFrame) -> Figure | None:
    """Bars: speed-up over plain of ToMe by each method in each backend, at its ratio nearest to 0.5; by case."""
    arms = near_half(arms[arms["merges"] & (arms["arm"] == TOME) & arms["over_plain"].notna()])
    if len(arms) < MIN_POINTS:
        return None
    figure, [axes] = make_figure()
    level = arms["max_downsample"].map(lambda level: f"\nlevel ≤ {level}" if level else "")
    places = arms["shape"].str.replace(", ", "\n") + level
    labels, ticks = arms["label"] + ", " + arms["backend"], list(places.unique())
    names = list(labels.unique())
    width = min(0.8 / len(names), 0.4)
    for index, (name, (colour, _)) in enumerate(looks_of(names).items()):
        bars = arms[labels == name]
        positions = [ticks.index(place) + (index - (len(names) - 1) / 2) * width for place in places[bars.index]]
        spread = abs(bars[["over_plain_low", "over_plain_high"]].sub(bars["over_plain"], axis=0)).to_numpy().T.tolist()
        look: dict[str, Any] = {"color": colour, "error_kw": {"linewidth": 0.8}}
        axes.bar(positions, bars["over_plain"], 0.92 * width, yerr=spread, label=name, **look)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_ylabel("times as fast as plain")
    axes.axhline(1, color=GREY, lw=1)
    axes.grid(axis="x", visible=False)
    set_title(figure, f"Speed-up by method, {arms['subject'].iloc[0]}")
    add_legend(figure, [axes], columns=2)
    return figure


def _lines(arms: pd.DataFrame, keys: Sequence[pd.Series], x: str, x_label: str, title: str) -> Figure | None:
    """A line for each value of the keys with MIN_POINTS points: speed-up over plain, and peak memory if known."""
    names = pd.Series([", ".join(words) for words in zip(*keys, strict=True)], arms.index)
    arms = arms.assign(line=pd.Categorical(names, names.unique()), memory=arms["peak_memory_bytes"] / 1e9)
    arms = arms[arms["over_plain"].notna()].sort_values(["line", x], kind="stable")
    arms = arms[arms.groupby("line", observed=True)[x].transform("nunique") >= MIN_POINTS]
    if arms.empty:
        return None
    has_memory = arms["memory"].notna().groupby(arms["line"], observed=True).all().any()
    columns = {"over_plain": "times as fast as plain"} | ({"memory": "peak memory (GB)"} if has_memory else {})
    figure, panels = make_figure(len(columns))
    for panel, (column, label) in zip(panels, columns.items(), strict=True):
        plot_lines(panel, arms[[x, column, "line"]], x, column, by="line")
        panel.set(xlabel=x_label, ylabel=label)
        panel.set_ylim(bottom=0)
    panels[0].axhline(1, color=GREY, lw=1)
    first = arms.iloc[0]
    set_title(figure, f"{title}, {first['subject'] if x == 'size' else first['case_name']}")
    add_legend(figure, panels, columns=2)
    return figure


PLOTS = {"against_size": against_size, "against_ratio": against_ratio, "by_method": by_method}
