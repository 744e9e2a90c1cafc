"""Speed results as pictures: each function returns a figure, or None where the results do not hold what it shows."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from .names import BOTH, BUILT_IN, EAGER, LIMIT, MEMORY_EFFICIENT, PLAIN, PREDICTOR, TOME
from .results import OURS, Arm, Case, Spread, spread

TARGET = 0.03  # distance from the free-merge limit that is aimed for
# Okabe and Ito's palette: told apart by colour-blind readers too
ORANGE, SKY, GREEN, BLUE, RED = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00"
MARKERS = ("o", "s", "^", "D", "v", "P")
SHORT_NAMES = {TOME: "ToMe", BOTH: "ToMe + memory-efficient", BUILT_IN: "built-in ToMe", LIMIT: "free-merge limit"}
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "axes.edgecolor": "#666666",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": "white",
}
WIDTH, DPI = 8.0, 130  # inches, and dots to each


def save(figure: Figure, path: Path) -> None:
    """Write the figure as a small PNG of 256 colours, the same bytes every time."""
    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def speed_up_against_size(cases: Sequence[Case], backend: str) -> Figure | None:
    """Times faster than plain over picture size, a panel each for ToMe and for ToMe + memory-efficient attention.

    Colour is the ratio, marker the batch. At most three ratios are drawn, those nearest to 0.25, 0.5 and 0.75, and of
    several levels the shallowest. None where no line would have two sizes.
    """
    merged = [
        (case, arm, speed_up)
        for case in cases
        for arm in case.arms
        if arm.arm in OURS and arm.backend == backend and (speed_up := case.speed_up(arm))
    ]
    level = _shallowest(arm for _, arm, _ in merged)
    ratios = _three({arm.ratio for _, arm, _ in merged})
    lines: dict[str, dict[tuple[float, int], dict[int, float]]] = {}
    for case, arm, speed_up in merged:
        if arm.ratio in ratios and arm.max_downsample == level:
            points = lines.setdefault(arm.arm, {}).setdefault((arm.ratio, case.batch), {})
            points[case.size] = speed_up.median
    if not any(len(points) > 1 for of_arm in lines.values() for points in of_arm.values()):
        return None
    batches = sorted({batch for of_arm in lines.values() for _, batch in of_arm})
    colours = dict(zip(ratios, (SKY, BLUE, RED), strict=False))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        panels = figure.subplots(1, len(lines), squeeze=False, sharey=True)[0]
        for panel, (name, of_arm) in zip(panels, lines.items(), strict=True):
            for (ratio, batch), points in sorted(of_arm.items()):
                marker = MARKERS[batches.index(batch) % len(MARKERS)]
                panel.plot(
                    *zip(*sorted(points.items()), strict=True), color=colours[ratio], marker=marker, markersize=5
                )
            panel.axhline(1, color="#666666", linewidth=1)
            panel.set_xticks(sorted({case.size for case, _, _ in merged}))
            panel.set_xlabel("picture size (px, square)")
            panel.set_title(SHORT_NAMES[name], fontsize=11)
        panels[0].set_ylabel("times faster than plain")
        figure.suptitle(f"Speed-up against size, {_subject(cases[0])}, {backend}", fontsize=11.5, x=0.02, ha="left")
        keys = [Line2D([], [], color=colours[ratio], label=f"ratio {ratio:g}") for ratio in ratios]
        keys += [
            Line2D([], [], color="#666666", linestyle="", marker=MARKERS[nth % len(MARKERS)], label=f"batch {batch}")
            for nth, batch in enumerate(batches)
        ]
        figure.legend(handles=keys, loc="outside lower center", ncols=6)
    return figure


def time_and_memory_against_ratio(case: Case, backend: str) -> Figure | None:
    """Seconds and peak memory over the ratio, ratio 0 being the arm without merging.

    None where nothing was measured at two ratios or more.
    """
    level = _shallowest(arm for arm in case.arms if arm.arm == TOME)
    starts = {TOME: PLAIN, LIMIT: PLAIN, BUILT_IN: PLAIN, BOTH: MEMORY_EFFICIENT}
    looks = {TOME: (BLUE, "-", "o"), LIMIT: ("#777777", ":", ""), BUILT_IN: (RED, "-", "s"), BOTH: (GREEN, "--", "^")}
    curves: dict[str, list[Arm]] = {}
    for name in starts:
        arms = [
            arm
            for arm in case.arms
            if (arm.arm, arm.backend, arm.max_downsample) == (name, backend, level) and arm.is_measured
        ]
        arms = [arm for arm in arms if name != LIMIT or arm.attention == "plain"]
        if len({arm.ratio for arm in arms}) > 1:
            start = case.find(starts[name], backend)
            curves[name] = sorted(
                [*arms, *([start] if start and start.is_measured else [])], key=lambda arm: arm.ratio
            )
    if not curves:
        return None
    has_memory = any(arm.peak_memory_bytes for arms in curves.values() for arm in arms)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        panels = figure.subplots(1, 2 if has_memory else 1, squeeze=False)[0]
        for name, arms in curves.items():
            colour, line, marker = looks[name]
            look = {"color": colour, "linestyle": line, "marker": marker}
            ratios = [arm.ratio for arm in arms]
            _spread_line(panels[0], ratios, [spread(arm.seconds) for arm in arms], SHORT_NAMES[name], **look)
            if has_memory and name != LIMIT:
                counted = [(arm.ratio, arm.peak_memory_bytes / 1e9) for arm in arms if arm.peak_memory_bytes]
                panels[1].plot(*zip(*counted, strict=True), markersize=5, **look) if counted else None
        for panel, label in zip(panels, ("seconds", "peak memory (GB)"), strict=False):
            panel.set(xlabel="ratio (share of tokens merged away)", ylabel=label)
            panel.set_ylim(bottom=0)
        figure.suptitle(f"{case.name}, {backend}", fontsize=11.5, x=0.02, ha="left")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def distance_from_limit(cases: Sequence[Case]) -> Figure | None:
    """Bars: how much longer than the free-merge limit each case takes at each ratio, with the target as a line.

    A panel for each backend.
    """
    found: dict[str, dict[str, dict[float, Spread]]] = {}
    for case in cases:
        for arm in case.arms:
            distance = case.distance(arm) if arm.arm in OURS else None
            if distance:
                below = ("\nsliced" if arm.arm == BOTH else "") + _level(arm.max_downsample)
                place = case.shape.replace(", ", "\n") + below
                found.setdefault(arm.backend, {}).setdefault(place, {})[arm.ratio] = distance
    if not found:
        return None
    ratios = sorted({ratio for places in found.values() for bars in places.values() for ratio in bars})
    thick = 0.8 / len(ratios)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.2 + 2.8 * len(found)), layout="constrained")
        panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
        for panel, (backend, places) in zip(panels, found.items(), strict=True):
            for nth, ratio in enumerate(ratios):
                bars = {place: each[ratio] for place, each in enumerate(places.values()) if ratio in each}
                colour = mpl.colormaps["viridis"](0.9 - 0.8 * nth / max(len(ratios) - 1, 1))
                at = [place + (nth - (len(ratios) - 1) / 2) * thick for place in bars]
                _bars(panel, at, list(bars.values()), thick * 0.92, 100, color=colour, label=f"{ratio:g}")
            panel.axhline(100 * TARGET, color=RED, linewidth=1.2, linestyle="--", label=f"target, {100 * TARGET:g} %")
            panel.axhline(0, color="#666666", linewidth=1)
            panel.grid(axis="x", visible=False)
            panel.set_xticks(range(len(places)), list(places), fontsize=10 if len(places) <= 8 else 7)
            panel.set_title(backend, fontsize=11)
        figure.supylabel("time above the free-merge limit (%)", fontsize=11)
        figure.suptitle(f"Distance from the limit, {_subject(cases[0])}", fontsize=11.5, x=0.02, ha="left")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", title="ratio")
    return figure


def eager_against_predictor(cases: Sequence[Case]) -> Figure | None:
    """Bars: times faster than eager plain; ToMe in eager, and the predictor plain and with ToMe, at one ratio.

    Of several ratios it is the one nearest to 0.5.

    None where no case has plain arms in both backends.
    """
    both = [case for case in cases if case.find(PLAIN, EAGER) and case.find(PLAIN, PREDICTOR)]
    merged = [arm for case in both for arm in case.arms if arm.arm == TOME]
    level = _shallowest(merged)
    ratio = min((arm.ratio for arm in merged), key=lambda ratio: abs(ratio - 0.5), default=0.5)
    drawn = [
        (EAGER, TOME, f"eager, ToMe {ratio:g}", SKY),
        (PREDICTOR, PLAIN, "predictor, plain", ORANGE),
        (PREDICTOR, TOME, f"predictor, ToMe {ratio:g}", RED),
    ]
    bars: dict[str, dict[int, Spread]] = {}
    for place, case in enumerate(both):
        for backend, name, label, _ in drawn:
            arm = case.find(name, backend, ratio, level)
            faster = case.times_faster(arm, case.find(PLAIN, EAGER)) if arm else None
            if faster:
                bars.setdefault(label, {})[place] = faster
    if not bars:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        axes = figure.subplots()
        for nth, (_, _, label, colour) in enumerate(drawn):
            found = bars.get(label, {})
            at = [place + (nth - 1) * 0.28 for place in found]
            _bars(axes, at, list(found.values()), 0.26, 1, color=colour, label=label)
            for x, faster in zip(at, found.values(), strict=True):
                axes.text(x, faster.high, f"{faster.median:.2f}", ha="center", va="bottom", fontsize=8)
        axes.axhline(1, color="#666666", linewidth=1)
        axes.grid(axis="x", visible=False)
        axes.set_xticks(range(len(both)), [case.shape.replace(", ", "\n") for case in both], fontsize=10)
        axes.set_ylabel("times faster than eager, plain")
        axes.set_title(f"Eager and predictor, {_subject(cases[0])}", loc="left", fontsize=11.5)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _bars(axes: Axes, at: Sequence[float], found: Sequence[Spread], width: float, scale: float, **look: Any) -> None:
    """Medians as bars, quartiles as error bars."""
    heights = [scale * each.median for each in found]
    errors = [
        [scale * (each.median - each.low) for each in found],
        [scale * (each.high - each.median) for each in found],
    ]
    axes.bar(at, heights, width, yerr=errors, error_kw={"linewidth": 0.8, "ecolor": "#444444"}, **look)


def _spread_line(axes: Axes, xs: Sequence[float], ys: Sequence[Spread], label: str, **look: Any) -> None:
    axes.plot(xs, [each.median for each in ys], label=label, markersize=5, **look)
    axes.fill_between(xs, [each.low for each in ys], [each.high for each in ys], color=look["color"], alpha=0.12, lw=0)


def _three(ratios: set[float]) -> list[float]:
    """Those nearest to 0.25, 0.5 and 0.75."""
    return sorted({min(ratios, key=lambda ratio: abs(ratio - near)) for near in (0.25, 0.5, 0.75)}) if ratios else []


def _subject(case: Case) -> str:
    return case.name.rsplit(f", {case.shape}", 1)[0]


def _shallowest(arms: Iterable[Arm]) -> int | None:
    """The first of the levels that were asked for; None, the model's own, comes before all others."""
    return min((arm.max_downsample for arm in arms), key=lambda level: level or 0, default=None)


def _level(max_downsample: int | None) -> str:
    return "" if max_downsample is None else f"\nlevel ≤ {max_downsample}"
