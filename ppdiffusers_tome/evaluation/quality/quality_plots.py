"""The plots of the evaluation's frames: measures against the ratio, and distance against speed-up."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..plotting import add_legend, looks_of, make_figure, mix, plot_lines, set_title, use_log_scale

NEAR_PLAIN = 1.2  # speed-up from which on a plot has no line for plain
BETTER = {"psnr": ": higher is better", "perceptual": ": lower is better"}
TITLES = {
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "perceptual": "Perceptual distance (ST-LPIPS)",
}
AGAINST_RATIO = ["ratio", "method", "use_rand", "tomesd"]  # groups whose settings differ in the ratio


def plot_against_ratio(frame: pd.DataFrame, columns: Sequence[str], title: str) -> Figure:
    """A panel for each column of TITLES: ways to merge as lines with bands, known differences as horizontal lines."""
    figure, panels = make_figure(len(columns), height=3.6)
    lines = frame[frame["group"].isin(AGAINST_RATIO)].sort_values("ratio", kind="stable")
    known = frame[frame["group"] == "calibration"]
    for axes, column in zip(panels, columns, strict=True):
        plot_lines(axes, lines, "ratio", column, by="label")
        levels = known[column].dropna().items()
        for (name, level), style in zip(levels, ("--", ":", "-."), strict=False):
            axes.axhline(level, color="black", lw=0.9, ls=style, label=name)
        axes.set_title(TITLES[column], fontsize=9.5)
        axes.set_xlabel("ratio", fontsize=9)
        if column == "perceptual":
            # Blurred images are tens of times as far from plain as merged ones, and equal images have distance 0.
            axes.set_yscale("symlog", linthresh=1e-4, linscale=0.5)
            axes.set_ylim(bottom=0)
    set_title(figure, title)
    add_legend(figure, panels, columns=5)
    return figure


def is_on_frontier(speed_up: pd.Series, nearness: pd.Series) -> np.ndarray:
    """Whether each point is faster than plain, and no other point is nearer and faster."""
    points = list(zip(speed_up, nearness, strict=True))
    is_best = [s > 1 and not any(other > s and nearer > n for other, nearer in points) for s, n in points]
    return np.array(is_best, bool)


def plot_frontier(points: pd.DataFrame, title: str, backend: str) -> Figure:
    """PSNR and ST-LPIPS against speed-up: a line for each method over its ratios, and the frontier in grey.

    Each point has its ratio beside it, and the legend the methods.

    Args:
        points: columns "method", "ratio", "psnr", "perceptual", the speed-up as `backend` (that was timed), and for a
            mark "is_chosen".
    """
    points = points.sort_values("ratio", kind="stable")
    looks = looks_of(points["method"])
    figure, panels = make_figure(rows=2, height=8)
    nearness = {"psnr": points["psnr"], "perceptual": -points["perceptual"]}
    for axes, measure in zip(panels, nearness, strict=True):
        best = points[is_on_frontier(points[backend], nearness[measure])].sort_values(backend, kind="stable")
        axes.plot(best[backend], best[measure], "o-", color="#cccccc", lw=6, ms=11, mew=0, label="frontier")
        if points[backend].min() < NEAR_PLAIN:
            axes.axvline(1, color="black", lw=0.9, ls=":", label="plain")
        plot_lines(axes, points[["method", backend, measure]], backend, measure, by="method")
        if "is_chosen" in points and points["is_chosen"].any():
            chosen = points[points["is_chosen"]]
            axes.plot(chosen[backend], chosen[measure], "o", ms=13, mfc="none", mec="black", mew=1.5, label="chosen")
        axes.set_title(TITLES[measure] + BETTER[measure], fontsize=9.5)
        axes.set_xlabel(f"times as fast as plain, {backend} (further right is faster)", fontsize=9)
        axes.margins(0.08, 0.12)
    use_log_scale(panels[1])
    set_title(figure, title)
    add_legend(figure, panels, columns=2)
    texts = points["ratio"].map("{:g}".format)
    colours = points["method"].map(lambda method: mix(looks[method][0], "black", 0.25))
    for axes, measure in zip(panels, nearness, strict=True):
        rows = pd.DataFrame({"text": texts, "x": points[backend], "y": points[measure], "colour": colours})
        rows = rows[np.isfinite(rows["x"]) & np.isfinite(rows["y"]) & ((rows["y"] > 0) | (measure == "psnr"))]
        for row in rows.itertuples():
            axes.annotate(row.text, (row.x, row.y), (5, 4), textcoords="offset points", fontsize=8, color=row.colour)
    return figure
