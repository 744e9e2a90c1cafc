"""Labels beside the points of a plot, where they cover no other label and no marker."""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MARKER = 6  # half the side of a marker, in dots
DISTANCES = (5, 9, 14, 20, 28, 38, 50, 64)  # candidates for the distance of a label from its point, in points
NEAR = 14  # a label that is further away has a line to its point
DIRECTIONS = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))  # right and up


def label_points(figure: Figure, axes: Axes, labels: Sequence[tuple[str, float, float, str]]) -> None:
    """Write a label beside each point, where it covers no other label and no marker, and as little else as possible.

    Args:
        figure: complete but for the labels, which are placed by its final layout.
        axes: one of its panels.
        labels: text, x, y and colour of each point, in the order in which they choose their places.
    """
    if layout := figure.get_layout_engine():
        layout.execute(figure)
    renderer = FigureCanvasAgg(figure).get_renderer()
    dots = figure.dpi / 72  # pixels per point
    marks = axes.transData.transform([(x, y) for _, x, y, _ in labels])
    taken = np.hstack([marks - MARKER, marks + MARKER])  # [K, 4]: left, bottom, right and top, in dots
    lines = [line.get_transform().transform(np.asarray(line.get_xydata())) for line in axes.lines]
    ends = [pair for line in lines for pair in pairwise(line)]
    on_lines = [p + share * (q - p) for p, q in ends for share in np.linspace(0, 1, 150)]
    dots_of_lines = np.array(on_lines).reshape([-1, 2])
    for (text, x, y, colour), mark in zip(labels, marks, strict=True):
        label = axes.annotate(text, (x, y), fontsize=9)
        size = np.array(label.get_window_extent(renderer).size)
        label.remove()
        places: list[tuple[Any, ...]] = []
        for distance, direction in product(DISTANCES, DIRECTIONS):
            towards = np.array(direction)
            corner = mark + dots * distance * towards / np.hypot(*towards) - size * (1 - towards) / 2
            box = np.concatenate([corner, corner + size])
            outside = size.prod() - _overlaps(box, np.array([axes.bbox.extents])).sum()
            covered = np.all((dots_of_lines >= box[:2]) & (dots_of_lines <= box[2:]), axis=1).sum()
            cost = 10 * (_overlaps(box, taken).sum() + outside) + covered + distance
            places.append((cost, len(places), distance, direction, box))
        *_, distance, (right, up), box = min(places)
        line = {"arrowstyle": "-", "color": colour, "lw": 0.7, "shrinkA": 0, "shrinkB": 3}
        line["relpos"] = (1 - right) / 2, (1 - up) / 2
        label = axes.annotate(
            text,
            (x, y),
            tuple((box[:2] - mark) / dots),
            textcoords="offset points",
            ha="left",
            va="bottom",
            fontsize=9,
            color=colour,
            arrowprops=line if distance > NEAR else None,
        )
        label.set_in_layout(False)
        taken = np.vstack([taken, box])


def _overlaps(box: np.ndarray, others: np.ndarray) -> np.ndarray:  # [4], [K, 4] → [K]
    """The area that a box has in common with each other one."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    return np.prod(np.maximum(sides, 0), axis=1)
