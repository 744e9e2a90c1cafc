"""The plot of the quality report: measures against the ratio."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..plotting import add_legend, make_figure, plot_lines, set_title

BETTER = {"psnr": ": higher is better", "perceptual": ": lower is better"}
TITLES = {
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "perceptual": "Perceptual distance (ST-LPIPS)",
}
AGAINST_RATIO = ["ratio", "method", "tomesd"]  # groups whose settings differ in the ratio


def plot_against_ratio(frame: pd.DataFrame, columns: Sequence[str], title: str) -> Figure:
    """A panel for each column of TITLES: ways to merge as lines with bands, known differences as horizontal lines."""
    figure, panels = make_figure(len(columns), height=3.6)
    lines = frame[frame["group"].isin(AGAINST_RATIO)].sort_values("ratio", kind="stable")
    known = frame[frame["group"] == "calibration"]
    for axes, column in zip(panels, columns, strict=True):
        plot_lines(axes, lines, "ratio", column, by="method")
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
