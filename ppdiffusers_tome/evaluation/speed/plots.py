"""Speed results as pictures: each function returns a figure, or None where the results do not hold what it shows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from .results import BOTH, BUILT_IN, EAGER, EFFICIENT, LIMIT, PLAIN, PREDICTOR, TOME, Arm, Case, Spread, spread

TARGET = 0.03  # distance from the free-merge limit that is aimed for
# Okabe and Ito's palette: told apart by colour-blind readers too
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
RATIO_COLOURS = (SKY, BLUE, GREEN, ORANGE, RED, PURPLE, "#999999", BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = {TOME: "-", BOTH: "--"}
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
    """Times faster than plain over picture size: colour is the ratio, line the arm, marker the batch.

    At most three ratios are drawn: those nearest to 0.25, 0.5 and 0.75. None where no line would have two sizes.
    """
    merged = [
        (case, arm, speed_up)
        for case in cases
        for arm in case.arms
        if arm.arm in LINES and arm.backend == backend and (speed_up := case.speed_up(arm))
    ]
    ratios = _three({arm.ratio for _, arm, _ in merged})
    batches = sorted({case.batch for case, _, _ in merged})
    lines: dict[tuple, list[tuple[int, Spread]]] = {}
    for case, arm, speed_up in merged:
        if arm.ratio in ratios:
            lines.setdefault((arm.arm, arm.max_downsample, arm.ratio, case.batch), []).append((case.size, speed_up))
    if not any(len({size for size, _ in points}) > 1 for points in lines.values()):
        return None
    with mpl.rc_context(STYLE):
        figure, axes = _figure(4.6)
        for (name, level, ratio, batch), points in sorted(lines.items(), key=str):
            sizes, found = zip(*sorted(points), strict=True)
            label = f"{_plain_name(name)} {ratio:g}{_level(level)}" + (f", batch {batch}" if len(batches) > 1 else "")
            colour = RATIO_COLOURS[(1, 2, 4)[ratios.index(ratio)]]
            marker = MARKERS[batches.index(batch) % len(MARKERS)]
            _spread_line(axes, sizes, found, label, color=colour, linestyle=LINES[name], marker=marker)
        axes.axhline(1, color="#666666", linewidth=1)
        axes.set_xticks(sorted({case.size for case, _, _ in merged}))
        axes.set(xlabel="picture size (px, square)", ylabel="times faster than plain")
        axes.set_title(f"Speed-up against size, {_subject(cases[0])}, {backend}", loc="left", fontsize=11.5)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    return figure


def time_and_memory_against_ratio(case: Case, backend: str) -> Figure | None:
    """Seconds and peak memory over the ratio, ratio 0 being the arm without merging.

    None where nothing was measured at two ratios or more.
    """
    level = max((arm.max_downsample for arm in case.arms if arm.arm == TOME and arm.max_downsample), default=None)
    starts = {TOME: PLAIN, LIMIT: PLAIN, BUILT_IN: PLAIN, BOTH: EFFICIENT}
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
            label = {TOME: "ToMe", LIMIT: "free-merge limit", BUILT_IN: "built-in ToMe", BOTH: "ToMe + sliced"}[name]
            look = {"color": colour, "linestyle": line, "marker": marker}
            ratios = [arm.ratio for arm in arms]
            _spread_line(panels[0], ratios, [spread(arm.seconds) for arm in arms], label, **look)
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
    """Bars: how much longer than the free-merge limit each case takes at each ratio, with the target as a line."""
    found: dict[str, dict[float, Spread]] = {}
    for case in cases:
        for arm in case.arms:
            distance = case.distance(arm) if arm.arm in LINES else None
            if distance:
                sliced = "\nsliced" if arm.arm == BOTH else ""
                place = f"{case.size} px, batch {case.batch}\n{arm.backend}{_level(arm.max_downsample)}{sliced}"
                found.setdefault(place, {})[arm.ratio] = distance
    if not found:
        return None
    ratios = sorted({ratio for bars in found.values() for ratio in bars})
    with mpl.rc_context(STYLE):
        figure, axes = _figure(4.4)
        thick = 0.8 / len(ratios)
        for nth, ratio in enumerate(ratios):
            bars = [(place, each[ratio]) for place, each in enumerate(found.values()) if ratio in each]
            at = [place + (nth - (len(ratios) - 1) / 2) * thick for place, _ in bars]
            heights = [100 * each.median for _, each in bars]
            errors = [
                [100 * (each.median - each.low) for _, each in bars],
                [100 * (each.high - each.median) for _, each in bars],
            ]
            colour = RATIO_COLOURS[nth % len(RATIO_COLOURS)]
            axes.bar(at, heights, thick * 0.92, yerr=errors, color=colour, label=f"{ratio:g}",
                     error_kw={"linewidth": 0.8, "ecolor": "#444444"})  # fmt: skip
        axes.axhline(100 * TARGET, color=RED, linewidth=1.2, linestyle="--", label=f"target, {TARGET:.0%}")
        axes.axhline(0, color="#666666", linewidth=1)
        axes.grid(axis="x", visible=False)
        axes.set_xticks(range(len(found)), list(found), fontsize=10 if len(found) < 6 else 8)
        axes.set_ylabel("time above the free-merge limit (%)")
        axes.set_title(f"Distance from the limit, {_subject(cases[0])}", loc="left", fontsize=11.5)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", title="ratio")
    return figure


def eager_against_predictor(cases: Sequence[Case], ratio: float = 0.5) -> Figure | None:
    """Bars: times faster than eager plain; eager and predictor, each plain and merged at `ratio`."""
    wanted = [(EAGER, TOME, SKY), (PREDICTOR, PLAIN, ORANGE), (PREDICTOR, TOME, RED)]
    rows: list[tuple[Case, list[Spread | None]]] = []
    for case in cases:
        reference = case.find(PLAIN, EAGER)
        if reference is None or case.find(PLAIN, PREDICTOR) is None:
            continue
        arms = [next((a for a in case.arms if (a.arm, a.backend) == (name, backend) and a.ratio in (0, ratio)), None)
                for backend, name, _ in wanted]  # fmt: skip
        rows.append((case, [case.times_faster(arm, reference) if arm else None for arm in arms]))
    if not any(speed for _, speeds in rows for speed in speeds):
        return None
    with mpl.rc_context(STYLE):
        figure, axes = _figure(4.2)
        for nth, (backend, name, colour) in enumerate(wanted):
            bars = [(place + (nth - 1) * 0.27, speeds[nth]) for place, (_, speeds) in enumerate(rows) if speeds[nth]]
            heights = [each.median for _, each in bars if each]
            errors = [[each.median - each.low for _, each in bars if each],
                      [each.high - each.median for _, each in bars if each]]  # fmt: skip
            label = f"{backend}, {_plain_name(name)}" + (f" {ratio:g}" if name == TOME else "")
            drawn = axes.bar([at for at, _ in bars], heights, 0.25, yerr=errors, color=colour, label=label,
                             error_kw={"linewidth": 0.8, "ecolor": "#444444"})  # fmt: skip
            axes.bar_label(drawn, fmt="%.2f×", fontsize=9, padding=2)
        axes.axhline(1, color="#666666", linewidth=1)
        axes.grid(axis="x", visible=False)
        axes.set_xticks(range(len(rows)), [case.shape.replace(", ", "\n") for case, _ in rows], fontsize=10)
        axes.set_ylabel("times faster than eager, plain")
        axes.set_title(f"Eager and predictor, {_subject(cases[0])}", loc="left", fontsize=11.5)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _spread_line(axes: Axes, xs: Sequence[float], ys: Sequence[Spread], label: str, **look: Any) -> None:
    axes.plot(xs, [each.median for each in ys], label=label, markersize=5, **look)
    axes.fill_between(xs, [each.low for each in ys], [each.high for each in ys], color=look["color"], alpha=0.12, lw=0)


def _three(ratios: set[float]) -> list[float]:
    """Those nearest to 0.25, 0.5 and 0.75."""
    return sorted({min(ratios, key=lambda ratio: abs(ratio - near)) for near in (0.25, 0.5, 0.75)}) if ratios else []


def _subject(case: Case) -> str:
    return case.name.rsplit(f", {case.shape}", 1)[0]


def _plain_name(arm: str) -> str:
    return {PLAIN: "plain", TOME: "ToMe", BOTH: "ToMe + sliced"}[arm]


def _level(max_downsample: int | None) -> str:
    return "" if max_downsample is None else f", level ≤ {max_downsample}"
