"""How plots look and how they are saved: colours for colour-blind readers, small files, equal bytes each time."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from PIL import Image

# The palette of Okabe and Ito.
ORANGE, SKY, GREEN, BLUE, RED, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#666666"
WIDTH, DPI = 8.0, 130  # inches, dots per inch: readable where a page shows a plot 800 px wide
PALETTE = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def make_figure(columns: int = 1, rows: int = 1, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, row by row, all in one style."""
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)
        axes.grid(color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=9)
    return figure, panels


def set_title(figure: Figure, title: str) -> None:
    """The title, at the upper left."""
    figure.suptitle(title, fontsize=11.5, x=0.02, ha="left")


def use_log_scale(axes: Axes) -> None:
    """A logarithmic y axis with ticks at 1, 2 and 5, in ordinary numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def looks_of(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each name, in the order of their first places; no two have the same."""
    looks = {}
    for nth, name in enumerate(dict.fromkeys(names)):
        colour = mix(PALETTE[nth % len(PALETTE)], "black", min(0.3 * (nth // len(PALETTE)), 0.9))
        looks[name] = colour, MARKERS[nth % len(MARKERS)]
    return looks


def plot_lines(axes: Axes, frame: pd.DataFrame, x: str, y: str, by: str) -> None:
    """A line for each value of the column `by`, in the look of `looks_of`.

    Where the frame has the columns `{y}_low` and `{y}_high` and a line has several points, it has a band between them.
    """
    has_band = {f"{y}_low", f"{y}_high"} <= set(frame)
    for name, (colour, marker) in looks_of(frame[by]).items():
        rows = frame[(frame[by] == name) & frame[y].notna()]
        axes.plot(rows[x], rows[y], color=colour, marker=marker, ms=4.5, lw=1, label=name)
        if has_band:
            axes.fill_between(rows[x], rows[f"{y}_low"], rows[f"{y}_high"], color=colour, alpha=0.15, lw=0)


def mix(colour: str, other: str, share: float) -> str:
    """A colour with a share of another one."""
    return to_hex((1 - share) * np.array(to_rgb(colour)) + share * np.array(to_rgb(other)))


def add_legend(figure: Figure, panels: Sequence[Axes], columns: int = 4) -> None:
    """One legend below all panels: each label once, in at most so many columns, and in fewer if they are too wide."""
    pairs = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels]
    by_label = {label: handle for panel in pairs for handle, label in panel}
    look: dict[str, Any] = {"loc": "outside lower center", "fontsize": 9.5, "frameon": False}
    renderer = FigureCanvasAgg(figure).get_renderer()
    for count in range(columns, 0, -1):
        legend = figure.legend(by_label.values(), by_label, ncols=count, **look)
        if count == 1 or legend.get_window_extent(renderer).width <= figure.bbox.width:
            return
        legend.remove()


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG of 256 colours; equal figures give equal bytes."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
