"""What a reader of a plot would see: text that leaves the figure, and text that covers other text."""

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def clipped_texts(figure: Figure) -> list[str]:
    """Texts that lie outside the figure, all or in part, after its layout."""
    boxes = _boxes(figure)
    inside = figure.bbox.padded(0.5)
    return [text for text, box in boxes if not (inside.contains(*box.min) and inside.contains(*box.max))]


def overlapping_texts(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other."""
    pairs = combinations(_boxes(figure), 2)
    return [(a, b) for (a, box), (b, other) in pairs if box.padded(-1).overlaps(other.padded(-1))]


def _boxes(figure):
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    outside = {id(label) for axes in figure.axes for label in _outside_labels(axes)}
    return [(text.get_text(), Text.get_window_extent(text, renderer)) for text in texts if id(text) not in outside]


def _outside_labels(axes):
    """Labels of ticks beyond the limits of their axis, which are not shown."""
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        for tick in axis.get_major_ticks() + axis.get_minor_ticks():
            if not min(low, high) <= tick.get_loc() <= max(low, high):
                yield tick.label1
            yield tick.label2
