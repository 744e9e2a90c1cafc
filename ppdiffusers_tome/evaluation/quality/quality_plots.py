"""The plots of a quality report, drawn from its frame: change and KID against the ratio, and the ablations."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..plotting import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, add_legend, make_figure, save_figure, set_title

OTHER_SEEDS, BLURRED = "plain, other seeds", "plain, blurred"  # calibrations that every result has
MEASURES = {"psnr": "PSNR, dB", "ssim": "SSIM", "perceptual": "Perceptual distance (ST-LPIPS)"}
COLOURS = {"ratio": BLUE, "use_rand": RED, "max_downsample": PURPLE, "layers": ORANGE, "tomesd": GREEN}
# The groups whose settings differ in the ratio alone: label, marker, line.
LINES = {
    "ratio": ("random dst", "o", "-"),
    "use_rand": ("fixed dst", "s", "--"),
    "tomesd": ("tomesd on PyTorch", "^", "none"),
}
# Calibrations as horizontal lines: label, line.
Levels = dict[str, tuple[str, str]]
PAIR_LEVELS: Levels = {OTHER_SEEDS: ("plain, another seed", "--"), BLURRED: ("plain, blurred", ":")}
KID_PANELS: dict[str, tuple[str, Levels]] = {
    "kid_others": (
        "KID × 1000 to plain images of other seeds",
        {OTHER_SEEDS: ("plain images", "--"), BLURRED: ("blurred images", ":")},
    ),
    "kid_real": (
        "KID × 1000 to real images",
        {
            "plain against real": ("plain images", "--"),
            "real, blurred": ("blurred images", ":"),
            "real halves": ("real images", "-."),
        },
    ),
}


def plot_pairs(frame: pd.DataFrame) -> Figure:
    """PSNR, SSIM and perceptual distance to plain against the ratio: medians, with bands between the quartiles."""
    figure, panels = make_figure(len(MEASURES), height=3.6)
    for axes, (measure, title) in zip(panels, MEASURES.items(), strict=True):
        _draw_panel(axes, title, frame, measure, frame[f"{measure}_low"], frame[f"{measure}_high"], PAIR_LEVELS)
    # Blurred images are tens of times as far from plain as merged ones, and equal images have distance 0.
    panels[-1].set_yscale("symlog", linthresh=1e-4, linscale=0.5)
    panels[-1].set_ylim(bottom=0)
    set_title(figure, "Change from the plain image of the same prompt and noise")
    add_legend(figure, panels, columns=5)
    return figure


def plot_kid(frame: pd.DataFrame) -> Figure:
    """KID against the ratio, one panel for each set of images it was measured to; bands are one standard deviation."""
    measured = [column for column in KID_PANELS if frame[column].notna().any()]
    figure, panels = make_figure(len(measured), height=3.6)
    for axes, column in zip(panels, measured, strict=True):
        title, levels = KID_PANELS[column]
        kid, std = frame[column], frame[f"{column}_std"]
        _draw_panel(axes, title, frame, column, kid - std, kid + std, levels)
    set_title(figure, "KID between sets of images, in features of EfficientNet-Lite0")
    add_legend(figure, panels, columns=3)
    return figure


def plot_ablations(frame: pd.DataFrame, ratio: float) -> Figure:
    """Perceptual distance of the settings of one ratio: medians, with lines between the quartiles."""
    rows = ablations(frame, ratio)
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


def ablations(frame: pd.DataFrame, ratio: float) -> pd.DataFrame:
    """The settings of one ratio, the default first, then by group."""
    return frame[frame["ratio"] == ratio].sort_values("group", key=lambda group: group.map(list(COLOURS).index))


def write_plots(frame: pd.DataFrame, ratio: float, output: Path) -> list[tuple[Path, str]]:
    """Write each plot that the frame has data for into a folder; paths and captions.

    Args:
        frame: from `report.read_frame`.
        ratio: of the ablations.
        output: the folder.
    """
    change = (
        "Change from the plain image of the same prompt and noise. Lines are medians, bands are between the quartiles."
    )
    kid = "KID to other sets of images. Bands are one standard deviation; horizontal lines are known differences."
    merges = f"What merges, at ratio {ratio:g}. Bars are medians, lines are between the quartiles."
    plots = {
        output / "quality_pairs.png": (plot_pairs(frame), change),
        output / "quality_kid.png": (plot_kid(frame), kid),
    }
    if len(ablations(frame, ratio)) > 1:
        plots[output / "quality_ablations.png"] = plot_ablations(frame, ratio), merges
    for path, (figure, _) in plots.items():
        save_figure(figure, path)
    return [(path, caption) for path, (_, caption) in plots.items()]


def _draw_panel(
    axes: Axes, title: str, frame: pd.DataFrame, column: str, low: pd.Series, high: pd.Series, levels: Levels
) -> None:
    """A column against the ratio, one line for each group, with bands from low to high and calibrations as levels."""
    for group, (label, marker, line) in LINES.items():
        rows = frame[(frame["group"] == group) & frame[column].notna()].sort_values("ratio")
        if rows.empty:
            continue
        axes.plot(rows["ratio"], rows[column], color=COLOURS[group], marker=marker, ls=line, ms=4, label=label)
        if line != "none":
            band = low[rows.index], high[rows.index]
            axes.fill_between(rows["ratio"], *band, color=COLOURS[group], alpha=0.15, lw=0)
    for name, (label, line) in levels.items():
        if name in frame.index:
            axes.axhline(frame.loc[name, column], color="black", lw=0.9, ls=line, label=label)
    axes.set_title(title, fontsize=9.5)
    axes.set_xlabel("ratio", fontsize=9)
