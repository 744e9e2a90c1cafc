"""How plots look and how they are saved: colours for colour-blind readers, small files, equal bytes each time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from PIL import Image

BLUE, RED, PURPLE = "#0072B2", "#D55E00", "#CC79A7"  # of the palette of Okabe and Ito
GREY = "#666666"
WIDTH, DPI = 8.0, 130  # inches, dots per inch: readable where a page shows a plot 800 px wide


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
