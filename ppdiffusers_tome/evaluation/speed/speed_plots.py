"""Plots of speed results: each function returns a figure, or None if there are fewer than three points to show."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ..plotting import GREY, add_legend, looks_of, make_figure, plot_lines, set_title
from .cases import BOTH, PLAIN, TOME
from .frame import near_half

LEAST = 3  # points of a line, or bars


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
    if len(arms) < LEAST:
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
    """A line for each value of the keys that has LEAST points: the speed-up over plain, and peak memory if known."""
    names = pd.Series([", ".join(words) for words in zip(*keys, strict=True)], arms.index)
    arms = arms.assign(line=pd.Categorical(names, names.unique()), memory=arms["peak_memory_bytes"] / 1e9)
    arms = arms[arms["over_plain"].notna()].sort_values(["line", x], kind="stable")
    arms = arms[arms.groupby("line", observed=True)[x].transform("nunique") >= LEAST]
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
