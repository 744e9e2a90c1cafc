"""The plots of a quality report, drawn from its frame: change and KID against the ratio, and the ablations."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    add_legend,
    label_points,
    make_figure,
    mix,
    save_figure,
    set_title,
    use_log_scale,
)

OTHER_SEEDS, BLURRED = "plain, other seeds", "plain, blurred"  # calibrations that every result has
COLOURS = {"ratio": BLUE, "method": SKY, "use_rand": RED, "max_downsample": PURPLE, "layers": ORANGE, "tomesd": GREEN}
FAMILIES = {"default": BLUE, "tomesd's": RED, "keys and values": GREEN, "ToDo": PURPLE}  # of the methods of a frontier
METHOD_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LONGEST_LINE = 34  # characters of a method beside its point
NEAR_PLAIN = 1.2  # speed-up from which on a plot has no line for plain
BETTER = {"psnr": ": up and to the right is better", "perceptual": ": down and to the right is better"}
# The groups whose settings differ in the ratio alone: label, marker, line.
LINES = {
    "ratio": ("random dst", "o", "-"),
    "use_rand": ("fixed dst", "s", "--"),
    "tomesd": ("tomesd on PyTorch", "^", "none"),
}
PAIRS = {"psnr": "PSNR, dB", "ssim": "SSIM", "perceptual": "Perceptual distance (ST-LPIPS)"}
KID = {"kid_others": "KID × 1000 to plain images of other seeds", "kid_real": "KID × 1000 to real images"}
# The calibrations that a panel shows as horizontal lines: label, line.
PAIR_LEVELS = {OTHER_SEEDS: ("plain, another seed", "--"), BLURRED: ("plain, blurred", ":")}
KID_LEVELS = {
    "kid_others": {OTHER_SEEDS: ("plain images", "--"), BLURRED: ("blurred images", ":")},
    "kid_real": {
        "plain against real": ("plain images", "--"),
        "real, blurred": ("blurred images", ":"),
        "real halves": ("real images", "-."),
    },
}


def plot_pairs(frame: pd.DataFrame) -> Figure:
    """PSNR, SSIM and perceptual distance to plain against the ratio: medians, with bands between the quartiles."""
    title = "Change from the plain image of the same prompt and noise"
    figure = _plot_against_ratio(frame, list(PAIRS), title, legend_columns=5)
    # Blurred images are tens of times as far from plain as merged ones, and equal images have distance 0.
    figure.axes[-1].set_yscale("symlog", linthresh=1e-4, linscale=0.5)
    figure.axes[-1].set_ylim(bottom=0)
    return figure


def plot_kid(frame: pd.DataFrame) -> Figure:
    """KID against the ratio, one panel for each set of images it was measured to; bands are one standard deviation."""
    measured = [column for column in KID if column in frame]
    title = "KID between sets of images, in features of EfficientNet-Lite0"
    return _plot_against_ratio(frame, measured, title, legend_columns=3)


def _plot_against_ratio(frame: pd.DataFrame, columns: Sequence[str], title: str, legend_columns: int) -> Figure:
    """One panel for each column: a line with a band for each group, calibrations as levels."""
    figure, panels = make_figure(len(columns), height=3.6)
    for axes, column in zip(panels, columns, strict=True):
        for group, (label, marker, line) in LINES.items():
            rows = frame[(frame["group"] == group) & frame[column].notna()].sort_values("ratio", kind="stable")
            if rows.empty:
                continue
            axes.plot(rows["ratio"], rows[column], color=COLOURS[group], marker=marker, ls=line, ms=4, label=label)
            if line != "none":
                band = rows[f"{column}_low"], rows[f"{column}_high"]
                axes.fill_between(rows["ratio"], *band, color=COLOURS[group], alpha=0.15, lw=0)
        for name, (label, line) in KID_LEVELS.get(column, PAIR_LEVELS).items():
            if name in frame.index:
                axes.axhline(frame.loc[name, column], color="black", lw=0.9, ls=line, label=label)
        axes.set_title((PAIRS | KID)[column], fontsize=9.5)
        axes.set_xlabel("ratio", fontsize=9)
    set_title(figure, title)
    add_legend(figure, panels, columns=legend_columns)
    return figure


def plot_ablations(frame: pd.DataFrame, ratio: float) -> Figure:
    """Perceptual distance of the settings of one ratio, the default first: medians, lines between the quartiles."""
    rows = frame[frame["ratio"] == ratio].sort_values(
        "group", kind="stable", key=lambda group: group.map(list(COLOURS).index)
    )
    figure, (axes,) = make_figure(height=1.3 + 0.28 * len(rows))
    middle = rows["perceptual"]
    spread = [middle - rows["perceptual_low"], rows["perceptual_high"] - middle]
    colours = rows["group"].map(COLOURS)
    axes.barh(range(len(rows)), middle, xerr=spread, color=colours, ecolor=GREY, capsize=2)
    axes.set_yticks(range(len(rows)), rows["label"])
    axes.invert_yaxis()
    axes.set_xlabel("perceptual distance (ST-LPIPS) to plain", fontsize=9)
    other = frame.loc[OTHER_SEEDS, "perceptual"]
    axes.axvline(other, color="black", lw=0.9, ls="--", label="another seed of the same prompt")
    set_title(figure, f"What merges, at ratio {ratio:g}")
    add_legend(figure, [axes])
    return figure


def plot_frontier(
    points: pd.DataFrame, title: str, backend: str = "predictor", chosen: Sequence[float] | None = None
) -> Figure:
    """PSNR and ST-LPIPS against speed-up: a line for each method over its ratios, and the frontier in grey.

    The point of a method's lowest ratio has its name and ratio beside it, its other points their ratios.

    Args:
        points: from `frontier.read_points`, of one size, kind of image and backend.
        title: of the figure.
        backend: that was timed, for the labels.
        chosen: speed-up, PSNR and ST-LPIPS of a point to mark; None marks none.
    """
    points = points.sort_values("ratio", kind="stable")
    looks = _looks(list(dict.fromkeys(points["method"])))
    figure, panels = make_figure(rows=2, height=8)
    for axes, measure, frontier in zip(
        panels, ("psnr", "perceptual"), ("frontier", "frontier_perceptual"), strict=True
    ):
        best = points[points[frontier]].sort_values("speed_up", kind="stable")
        axes.plot(best["speed_up"], best[measure], "o-", color="#cccccc", lw=6, ms=11, mew=0, label="frontier")
        if points["speed_up"].min() < NEAR_PLAIN:
            axes.axvline(1, color="black", lw=0.9, ls=":", label="plain")
        for method, (colour, marker) in looks.items():
            line = points[points["method"] == method]
            axes.plot(line["speed_up"], line[measure], color=colour, marker=marker, ms=5, lw=1, label=method)
        if chosen is not None:
            speed_up, *distances = chosen
            place = [speed_up], [distances[measure == "perceptual"]]
            axes.plot(*place, "o", ms=13, mfc="none", mec="black", mew=1.5, label="chosen")
        axes.set_title(PAIRS[measure] + BETTER[measure], fontsize=9.5)
        axes.set_xlabel(f"times as fast as plain, {backend}", fontsize=9)
        axes.margins(0.08, 0.12)
    use_log_scale(panels[1])
    set_title(figure, title)
    add_legend(figure, panels, without=looks)
    is_first = ~points.duplicated("method")
    names = points["method"].map(lambda method: fill(method, LONGEST_LINE) + ": ").where(is_first, "")
    texts = names + points["ratio"].map("{:g}".format)
    colours = points["method"].map(lambda method: mix(looks[method][0], "black", 0.25))
    for axes, measure in zip(panels, ("psnr", "perceptual"), strict=True):
        rows = pd.DataFrame({"text": texts, "x": points["speed_up"], "y": points[measure], "colour": colours})
        rows = rows[np.isfinite(rows["x"]) & np.isfinite(rows["y"]) & ((rows["y"] > 0) | (measure == "psnr"))]
        label_points(figure, axes, list(rows.itertuples(index=False, name=None)))
    return figure


def _looks(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each method: variants of one, named "default, …", have shades of its colour."""
    families: dict[str, list[str]] = {}
    for method in methods:
        families.setdefault(method.partition(",")[0], []).append(method)
    for variants in families.values():
        variants.sort()  # the method without variation has the colour itself
    others = iter(cycle((ORANGE, SKY, GREY)))
    looks = {}
    for family, variants in families.items():
        colour = FAMILIES.get(family) or next(others)
        for nth, method in enumerate(variants):
            shade = mix(colour, "white" if nth % 2 else "black", 0.9 * (1 - 0.7 ** ((nth + 1) // 2)))
            looks[method] = shade, METHOD_MARKERS[nth % len(METHOD_MARKERS)]
    return looks


def write_plots(frame: pd.DataFrame, ratio: float, output: Path) -> list[tuple[Path, str]]:
    """Write each plot that the frame has data for into a folder; paths and captions.

    Args:
        frame: from `quality_report.read_frame`.
        ratio: of the ablations.
        output: the folder.
    """
    plots = {
        "quality_pairs.png": (plot_pairs(frame), "Lines are medians, bands are between the quartiles."),
        "quality_kid.png": (
            plot_kid(frame),
            "Bands are one standard deviation; horizontal lines are known differences.",
        ),
    }
    if (frame["ratio"] == ratio).sum() > 1:
        note = "Bars are medians, lines are between the quartiles."
        plots["quality_ablations.png"] = plot_ablations(frame, ratio), note
    for name, (figure, _) in plots.items():
        save_figure(figure, output / name)
    return [(output / name, f"{figure.get_suptitle()}. {note}") for name, (figure, note) in plots.items()]
