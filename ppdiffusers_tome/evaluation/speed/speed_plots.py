"""Plots of speed results: each function returns a figure, or None if the arms lack what it shows."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..plotting import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, add_legend, make_figure, set_title
from .cases import BOTH, BUILT_IN, LIMIT, MEMORY_EFFICIENT, PLAIN, PREDICTOR, TOME
from .frame import at_ratio, nearest

TARGET = 0.03  # largest time above the free-merge limit that counts as reaching it, as a share
COLOURS = (SKY, ORANGE, RED, BLUE, GREEN, PURPLE, GREY)
ATTENTION = {TOME: "plain attention", BOTH: "memory-efficient attention"}  # in which an arm merges
MARKERS = ("o", "s", "^", "D", "v", "P")
LOOKS = {TOME: ("o-", BLUE), LIMIT: (":", GREY), BUILT_IN: ("s-", RED), BOTH: ("^--", GREEN)}  # of lines by ratio


def speed_up_by_size(arms: pd.DataFrame, backend: str) -> Figure | None:
    """Speed-up over the same attention without merging, against image size: a panel for each kind of attention.

    Of many ratios the plot has those nearest to 0.25, 0.5 and 0.75, of several values of `max_downsample` the lowest,
    and of several methods the first. None if no line has two sizes.
    """
    arms = _first_method(arms)
    arms = arms.assign(gain=arms["faster_than_plain"].mask(arms["arm"] == BOTH, arms["faster_than_efficient"]))
    arms = arms[arms["merges"] & (arms["backend"] == backend) & arms["gain"].notna()]
    arms = arms[arms["max_downsample"] == arms["max_downsample"].min()].sort_values("size", kind="stable")
    if arms.empty or arms.groupby(["arm", "ratio", "batch"])["size"].nunique().max() < 2:
        return None
    ratios = sorted({nearest(arms["ratio"], wanted) for wanted in (0.25, 0.5, 0.75)})
    batches = sorted(arms["batch"].unique())
    panels_of = arms[arms["ratio"].isin(ratios)].groupby("arm", sort=False)
    figure, panels = make_figure(columns=len(panels_of), height=4.4)
    for panel in panels[1:]:
        panel.sharey(panels[0])
    for panel, (name, of_panel) in zip(panels, panels_of, strict=True):
        for (ratio, batch), line in of_panel.groupby(["ratio", "batch"]):
            marker, colour = MARKERS[batches.index(batch) % len(MARKERS)], COLOURS[ratios.index(ratio)]
            label = f"ratio {ratio:g}, batch {batch}"
            panel.plot(line["size"], line["gain"], f"{marker}-", color=colour, ms=5, label=label)
        panel.axhline(1, color=GREY, lw=1)
        panel.set(xticks=sorted(arms["size"].unique()), xlabel="image size (px, square)")
        panel.set_title(ATTENTION[name], fontsize=11)
    panels[0].set_ylabel("times as fast as without merging")
    subject, method = arms[["subject", "method"]].iloc[0]
    set_title(figure, f"Speed-up against size, {subject}, {backend}\n{method}")
    add_legend(figure, panels)
    return figure


def time_and_memory_by_ratio(arms: pd.DataFrame, backend: str) -> Figure | None:
    """Seconds and peak memory of one case against the ratio; at ratio 0 is the same attention without merging.

    The case is the one measured at most ratios; of several the one with the largest image, then the smallest batch.
    Of several values of `max_downsample` it is the lowest, of several methods the first. None if no arm was measured
    at two ratios.
    """
    arms = _first_method(arms)
    arms = arms[(arms["backend"] == backend) & arms["time"].notna()]
    arms = arms.sort_values(["size", "batch"], ascending=[False, True], kind="stable")
    merged = arms[arms["arm"].isin(LOOKS)]
    if merged.empty:
        return None
    merged = merged[merged["case"] == merged.groupby("case", sort=False)["ratio"].nunique().idxmax()]
    level = merged["max_downsample"].min()
    arms = arms[(arms["case"] == merged["case"].iloc[0]) & arms["max_downsample"].isin([level, 0])]
    curves = {name: arms[arms["arm"].isin([name, MEMORY_EFFICIENT if name == BOTH else PLAIN])] for name in LOOKS}
    curves = {name: curve.sort_values("ratio") for name, curve in curves.items() if (curve["arm"] == name).sum() > 1}
    if not curves:
        return None
    has_memory = pd.concat(curves.values())["peak_memory_bytes"].notna().any()
    figure, panels = make_figure(columns=1 + has_memory)
    for name, curve in curves.items():
        line, colour = LOOKS[name]
        label = curve["label"].iloc[-1]
        panels[0].plot(curve["ratio"], curve["time"], line, color=colour, ms=5, label=label)
        panels[0].fill_between(curve["ratio"], curve["time_low"], curve["time_high"], color=colour, alpha=0.12, lw=0)
        if has_memory and name != LIMIT:
            panels[1].plot(curve["ratio"], curve["peak_memory_bytes"] / 1e9, line, color=colour, ms=5)
    for panel, label in zip(panels, ("seconds", "peak memory (GB)"), strict=False):
        panel.set(xlabel="ratio (share of tokens merged away)", ylabel=label)
        panel.set_ylim(bottom=0)
    set_title(figure, f"{arms['case_name'].iloc[0]}, {backend}")
    add_legend(figure, panels)
    return figure


def time_above_limit(arms: pd.DataFrame) -> Figure | None:
    """Bars: how much longer than its free-merge limit each case takes, by method and ratio; a panel per backend."""
    arms = arms[arms["over_limit"].notna()].sort_values("ratio", kind="stable")
    if arms.empty:
        return None
    above = 100 * (arms.filter(like="over_limit") - 1)
    labels = arms["label_at"] if arms["method"].nunique() > 1 else "ratio " + arms["ratio"].map("{:g}".format)
    figure, panels = _bars_by_backend(arms, labels, above, "{:+.1f}")
    for panel in panels:
        panel.axhline(100 * TARGET, color=RED, lw=1.2, ls="--", label=f"target, {100 * TARGET:g} %")
        panel.axhline(0, color=GREY, lw=1)
    figure.supylabel("time above the free-merge limit (%)", fontsize=11)
    set_title(figure, f"Time above the free-merge limit (below 0 %: noise), {arms['subject'].iloc[0]}")
    add_legend(figure, panels, columns=2 if labels is arms["label_at"] else 4)
    return figure


def speed_up_by_method(arms: pd.DataFrame) -> Figure | None:
    """Bars: speed-up over plain of each case by each method, at its ratio nearest to 0.5; a panel per backend.

    None if fewer than two methods were measured.
    """
    arms = arms[arms["merges"] & (arms["arm"] == TOME) & arms["faster_than_plain"].notna()]
    if arms["method"].nunique() < 2:
        return None
    arms = arms[at_ratio(arms)]
    figure, panels = _bars_by_backend(arms, arms["label_at"], arms.filter(like="faster_than_plain"), "{:.2f}")
    for panel in panels:
        panel.axhline(1, color=GREY, lw=1)
    figure.supylabel("times as fast as plain", fontsize=11)
    set_title(figure, f"Speed-up by method, {arms['subject'].iloc[0]}")
    add_legend(figure, panels, columns=2)
    return figure


def eager_against_predictor(arms: pd.DataFrame) -> Figure | None:
    """Bars: speed-up over eager plain, of ToMe in eager, and of the predictor plain and with ToMe.

    Of several ratios it is the one nearest to 0.5, of several values of `max_downsample` the lowest, of several
    methods the first. None if the predictor was not measured, or eager plain was not.
    """
    arms = _first_method(arms)
    arms = arms[arms["faster_than_eager_plain"].notna() & ~arms["is_torch"]]
    merged = arms[arms["arm"] == TOME]
    ratio = nearest(merged["ratio"], 0.5) if len(merged) else 0.5
    merged = merged[(merged["ratio"] == ratio) & (merged["max_downsample"] == merged["max_downsample"].min())]
    arms = arms[(arms["arm"] == PLAIN) | arms.index.isin(merged.index)]
    if PREDICTOR not in set(arms["backend"]):
        return None
    figure, [axes] = make_figure()
    labels = arms["backend"] + ", " + arms["label_at"]
    _bars(axes, arms.assign(max_downsample=0), labels, arms.filter(like="faster_than_eager_plain"), "{:.2f}")
    axes.axhline(1, color=GREY, lw=1)
    axes.set_ylabel("times as fast as eager, plain")
    set_title(figure, f"Eager and predictor, {arms['subject'].iloc[0]}")
    add_legend(figure, [axes])
    return figure


def plan_growth(plans: Sequence[dict[str, Any]]) -> Figure | None:
    """Milliseconds of the plans of `operations.time_growth` against tokens, a line per method; None if there are none.

    Both axes are logarithmic; a grey line shows what grows with the number of tokens.
    """
    timed = pd.DataFrame(plans).dropna() if plans else pd.DataFrame()
    if timed.empty:
        return None
    figure, [axes] = make_figure(height=4.6)
    timed["tokens"] = timed["side"] ** 2
    for index, (name, line) in enumerate(timed.groupby("method", sort=False)):
        marker, colour = MARKERS[index % len(MARKERS)], COLOURS[index % len(COLOURS)]
        axes.plot(line["tokens"], line["milliseconds"], f"{marker}-", color=colour, ms=5, label=name)
    largest = timed[timed["side"] == timed["side"].max()].nlargest(1, "milliseconds").iloc[0]
    sides = timed["side"].unique()
    linear = largest["milliseconds"] * sides**2 / largest["tokens"]
    axes.plot(sides**2, linear, ":", color=GREY, label="linear in tokens")
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds")
    axes.set_xticks(sides**2, [f"{side}×{side}" for side in sides])
    axes.minorticks_off()
    set_title(figure, "Time of one plan against the number of tokens")
    add_legend(figure, [axes])
    return figure


def _first_method(arms: pd.DataFrame) -> pd.DataFrame:
    """The arms without those of other merge methods than the first, and without the limits of those."""
    for first in arms[arms["merges"]].head(1).to_dict("records"):
        is_other = arms["merges"] & (arms["method"] != first["method"])
        arms = arms[~(is_other | (arms["arm"] == LIMIT) & (arms["layers"] != first["layers"]))]
    return arms


def _bars_by_backend(
    arms: pd.DataFrame, labels: pd.Series, heights: pd.DataFrame, write: str
) -> tuple[Figure, list[Axes]]:
    backends = arms.groupby("backend", sort=False)
    figure, panels = make_figure(rows=len(backends), height=1.4 + 2.8 * len(backends))
    for panel, (backend, bars) in zip(panels, backends, strict=True):
        _bars(panel, bars, labels[bars.index], heights.loc[bars.index], write)
        panel.set_title(backend, fontsize=11)
    return figure, panels


def _bars(axes: Axes, arms: pd.DataFrame, labels: pd.Series, heights: pd.DataFrame, write: str) -> None:
    """Medians as bars, grouped by case, with their values unless there are many; quartiles as error bars."""
    levels = arms["max_downsample"].map(lambda level: f"\nlevel ≤ {level}" if level else "")
    places = arms["shape"].str.replace(", ", "\n") + levels
    ticks = list(places[arms.sort_values(["size", "batch"], kind="stable").index].unique())
    names = list(labels.unique())
    width = min(0.8 / len(names), 0.4)
    for index, name in enumerate(names):
        bars = heights[labels == name].to_numpy().T  # medians, lower and upper quartiles
        positions = [ticks.index(place) + (index - (len(names) - 1) / 2) * width for place in places[labels == name]]
        look = {"color": COLOURS[index % len(COLOURS)], "label": name, "error_kw": {"linewidth": 0.8}}
        axes.bar(positions, bars[0], 0.92 * width, yerr=abs(bars[1:] - bars[0]).tolist(), **look)
        for position, height, top in zip(positions, bars[0], bars[2], strict=True) if len(arms) <= 30 else ():
            axes.text(position, max(top, 0), write.format(height), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(ticks)), ticks, fontsize=9 if len(ticks) <= 8 else 7)
    axes.set_xlim(-0.5, len(ticks) - 0.5)
    axes.grid(axis="x", visible=False)
