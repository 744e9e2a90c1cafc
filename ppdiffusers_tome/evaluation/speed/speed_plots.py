"""Plots of speed results: each function returns a figure, or None if the arms lack what it shows."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..clock import Quartiles
from ..plotting import BLUE, GREEN, GREY, ORANGE, RED, SKY, add_legend, make_figure, set_title
from .cases import BOTH, BUILT_IN, EAGER, LIMIT, MEMORY_EFFICIENT, PLAIN, PREDICTOR, SCOPES, TOME
from .frame import nearest

TARGET = 0.03  # largest time above the free-merge limit that counts as reaching it, as a share
COLOURS = (SKY, BLUE, RED, ORANGE, GREEN)
MARKERS = ("o", "s", "^", "D", "v", "P")
TITLES = {TOME: "ToMe", BOTH: "ToMe + memory-efficient", BUILT_IN: "built-in ToMe", LIMIT: "free-merge limit"}
LOOKS: dict[str, dict[str, Any]] = {
    TOME: {"color": BLUE, "linestyle": "-", "marker": "o"},
    LIMIT: {"color": GREY, "linestyle": ":", "marker": ""},
    BUILT_IN: {"color": RED, "linestyle": "-", "marker": "s"},
    BOTH: {"color": GREEN, "linestyle": "--", "marker": "^"},
}


def speed_up_by_size(arms: pd.DataFrame, backend: str) -> Figure | None:
    """Speed-up over plain against image size: a panel for ToMe, and one for ToMe + memory-efficient attention.

    The colour is the ratio, the marker the batch. Of many ratios the plot has those nearest to 0.25, 0.5 and 0.75, of
    several values of `max_downsample` the lowest. None if no line has two sizes.
    """
    arms = arms[(arms["backend"] == backend) & arms["arm"].isin([TOME, BOTH]) & arms["faster_than_plain"].notna()]
    arms = arms[arms["max_downsample"] == arms["max_downsample"].min()]
    lines = arms.groupby(["arm", "ratio", "batch"])
    if arms.empty or lines["size"].nunique().max() < 2:
        return None
    ratios = sorted({nearest(arms["ratio"], wanted) for wanted in (0.25, 0.5, 0.75)})
    colours = dict(zip(ratios, COLOURS, strict=False))
    batches = sorted(arms["batch"].unique())
    markers = {batch: MARKERS[index % len(MARKERS)] for index, batch in enumerate(batches)}
    names = [name for name in (TOME, BOTH) if name in set(arms["arm"])]
    figure, panels = make_figure(columns=len(names), height=4.4)
    panel_of = dict(zip(names, panels, strict=True))
    for (name, ratio, batch), line in lines:
        if ratio in ratios:
            line = line.drop_duplicates("size", keep="last").sort_values("size")
            medians = [times.median for times in line["faster_than_plain"]]
            panel_of[name].plot(line["size"], medians, color=colours[ratio], marker=markers[batch], markersize=5)
    for name, panel in panel_of.items():
        panel.axhline(1, color=GREY, linewidth=1)
        panel.set(xticks=sorted(arms["size"].unique()), xlabel="image size (px, square)")
        panel.set_title(TITLES[name], fontsize=11)
    for panel in panels[1:]:
        panel.sharey(panels[0])
    panels[0].set_ylabel("times faster than plain")
    for ratio in ratios:
        panels[0].plot([], [], color=colours[ratio], label=f"ratio {ratio:g}")
    for batch, marker in markers.items():
        panels[0].plot([], [], color=GREY, linestyle="", marker=marker, label=f"batch {batch}")
    set_title(figure, f"Speed-up against size, {_subject(arms)}, {backend}")
    add_legend(figure, panels, columns=6)
    return figure


def time_and_memory_by_ratio(arms: pd.DataFrame, backend: str) -> Figure | None:
    """Seconds and peak memory of one case against the ratio; at ratio 0 is the same attention without merging.

    The case is the one measured at most ratios; of several the one with the largest image, then the smallest batch.
    None if no arm was measured at two ratios.
    """
    arms = arms[(arms["backend"] == backend) & arms["time"].notna()]
    arms = arms.sort_values(["size", "batch"], ascending=[False, True], kind="stable")
    merged = arms[arms["arm"].isin(LOOKS)]
    if merged.empty:
        return None
    arms = arms[arms["case"] == merged.groupby("case", sort=False)["ratio"].nunique().idxmax()]
    curves = {}
    for name in LOOKS:
        of_name = arms[(arms["arm"] == name) & (arms["max_downsample"] == merged["max_downsample"].min())]
        unmerged = arms[arms["arm"] == (MEMORY_EFFICIENT if name == BOTH else PLAIN)]
        if of_name["ratio"].nunique() > 1:
            curves[name] = pd.concat([unmerged, of_name]).sort_values("ratio")
    if not curves:
        return None
    has_memory = any(curve["peak_memory_bytes"].notna().any() for curve in curves.values())
    figure, panels = make_figure(columns=1 + has_memory)
    for name, curve in curves.items():
        look = LOOKS[name]
        times = pd.DataFrame([*curve["time"]], columns=Quartiles._fields)
        panels[0].plot(curve["ratio"], times["median"], label=TITLES[name], markersize=5, **look)
        panels[0].fill_between(curve["ratio"], times["low"], times["high"], color=look["color"], alpha=0.12, lw=0)
        counted = curve[curve["peak_memory_bytes"].notna()]
        if name != LIMIT and len(counted):
            panels[1].plot(counted["ratio"], counted["peak_memory_bytes"] / 1e9, markersize=5, **look)
    for panel, label in zip(panels, ("seconds", "peak memory (GB)"), strict=False):
        panel.set(xlabel="ratio (share of tokens merged away)", ylabel=label)
        panel.set_ylim(bottom=0)
    set_title(figure, f"{arms['case_name'].iloc[0]}, {backend}")
    add_legend(figure, panels)
    return figure


def time_above_limit(arms: pd.DataFrame) -> Figure | None:
    """Bars: how much longer than its free-merge limit each case takes at each ratio; a panel for each backend."""
    arms = arms[arms["over_limit"].notna()]
    if arms.empty:
        return None
    ratios = sorted(arms["ratio"].unique())
    width = min(0.8 / len(ratios), 0.3)
    backends = list(dict.fromkeys(arms["backend"]))
    figure, panels = make_figure(rows=len(backends), height=1.4 + 2.8 * len(backends))
    for panel, backend in zip(panels, backends, strict=True):
        bars = arms[arms["backend"] == backend]
        levels = ["" if level == 0 else f", max_downsample {level}" for level in bars["max_downsample"]]
        bars = bars.assign(place=bars["shape"] + levels)
        places = list(dict.fromkeys(bars["place"]))
        for ratio, of_ratio in bars.groupby("ratio"):
            index = ratios.index(ratio)
            offset = (index - (len(ratios) - 1) / 2) * width
            heights = [Quartiles(*(100 * (value - 1) for value in above)) for above in of_ratio["over_limit"]]
            positions = [places.index(place) + offset for place in of_ratio["place"]]
            colour = COLOURS[index % len(COLOURS)]
            _bars(panel, positions, heights, 0.92 * width, color=colour, label=f"ratio {ratio:g}")
        panel.axhline(100 * TARGET, color=RED, linewidth=1.2, linestyle="--", label=f"target, {100 * TARGET:g} %")
        panel.axhline(0, color=GREY, linewidth=1)
        panel.grid(axis="x", visible=False)
        panel.set_xticks(range(len(places)), [place.replace(", ", "\n") for place in places])
        panel.set_title(backend, fontsize=11)
    figure.supylabel("time above the free-merge limit (%)", fontsize=11)
    set_title(figure, f"Time above the free-merge limit, {_subject(arms)}")
    add_legend(figure, panels)
    return figure


def eager_against_predictor(arms: pd.DataFrame) -> Figure | None:
    """Bars: times faster than eager plain, for ToMe in eager, and for the predictor plain and with ToMe.

    Of several ratios it is the one nearest to 0.5. None if no case has plain arms in both backends.
    """
    arms = arms[arms["faster_than_eager_plain"].notna()]
    arms = arms[arms["case"].isin(arms.loc[arms["backend"] == PREDICTOR, "case"])]
    merged = arms[arms["arm"] == TOME]
    ratio = nearest(merged["ratio"], 0.5) if len(merged) else 0.5
    merged = merged[(merged["ratio"] == ratio) & (merged["max_downsample"] == merged["max_downsample"].min())]
    bars = {
        f"eager, ToMe {ratio:g}": (merged[merged["backend"] == EAGER], SKY),
        "predictor, plain": (arms[(arms["backend"] == PREDICTOR) & (arms["arm"] == PLAIN)], ORANGE),
        f"predictor, ToMe {ratio:g}": (merged[merged["backend"] == PREDICTOR], RED),
    }
    shapes = dict(zip(arms["case"], arms["shape"], strict=True))
    if not shapes:
        return None
    figure, [axes] = make_figure()
    for index, (label, (shown, colour)) in enumerate(bars.items()):
        positions = [list(shapes).index(case) + 0.28 * (index - 1) for case in shown["case"]]
        _bars(axes, positions, list(shown["faster_than_eager_plain"]), 0.26, color=colour, label=label)
        for x, times in zip(positions, shown["faster_than_eager_plain"], strict=True):
            axes.text(x, times.high, f"{times.median:.2f}", ha="center", va="bottom", fontsize=8)
    axes.axhline(1, color=GREY, linewidth=1)
    axes.grid(axis="x", visible=False)
    axes.set_xticks(range(len(shapes)), [shape.replace(", ", "\n") for shape in shapes.values()])
    axes.set_ylabel("times faster than eager, plain")
    set_title(figure, f"Eager and predictor, {_subject(arms)}")
    add_legend(figure, [axes], columns=3)
    return figure


def _bars(axes: Axes, positions: Sequence[float], heights: Sequence[Quartiles], width: float, **look: Any) -> None:
    """Medians as bars, quartiles as error bars."""
    errors = [[bar.median - bar.low for bar in heights], [bar.high - bar.median for bar in heights]]
    medians = [bar.median for bar in heights]
    axes.bar(positions, medians, width, yerr=errors, error_kw={"linewidth": 0.8, "ecolor": "#444444"}, **look)


def _subject(arms: pd.DataFrame) -> str:
    first = arms.iloc[0]
    return f"{first['model']}, {SCOPES[first['scope']]}"
