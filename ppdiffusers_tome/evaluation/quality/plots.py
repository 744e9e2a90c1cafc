"""Plots of a quality result: distance against ratio and against time, and the ablations. Colours of Okabe and Ito."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .findings import (
    BLURRED,
    CALIBRATED_BY,
    FIXED,
    OTHER_SEEDS,
    PAIRS,
    RANDOM,
    TO_OTHERS,
    TO_REAL,
    TOMESD,
    Setting,
    lines,
    median,
    quartiles,
    ratio_of,
    studied_ratio,
    time_share,
)

STYLES = {RANDOM: ("#0072B2", "o", "-"), FIXED: ("#D55E00", "s", "--"), TOMESD: ("#009E73", "^", "none")}
GROUPS = {
    "ratio": ("#0072B2", "o"),
    "use_rand": ("#D55E00", "s"),
    "max_downsample": ("#CC79A7", "D"),
    "layers": ("#E69F00", "v"),
    "tomesd": ("#009E73", "^"),
}
SHORT = {OTHER_SEEDS: "another seed", BLURRED: "blurred", "plain against real": "plain, to real"}
SETS = {"kid": "KID × 1000", "frechet": "Fréchet distance"}
SCALES = {"kid": 1000.0, "frechet": 1.0}
FEATURES = "EfficientNet-Lite0 features"


def plot_pairs(result: dict[str, Any]) -> Figure:
    """PSNR, SSIM and perceptual distance from plain against the ratio: medians, bands between the quartiles."""
    figure, panels = _figure(len(PAIRS))
    for axes, (measure, label) in zip(panels, PAIRS.items(), strict=True):
        for name, settings in lines(result).items():
            colour, marker, style = STYLES[name]
            ratios = [ratio_of(each) for each in settings]
            low, middle, high = zip(*(quartiles(each["pairs"][measure]) for each in settings), strict=True)
            axes.plot(ratios, middle, color=colour, marker=marker, linestyle=style, markersize=4, label=name)
            if name != TOMESD:
                axes.fill_between(ratios, low, high, color=colour, alpha=0.15, linewidth=0)
        for name in (OTHER_SEEDS, BLURRED):
            if pairs := (result["calibration"].get(name) or {}).get("pairs"):
                _level(axes, quartiles(pairs[measure])[1], SHORT[name])
        axes.set_xlabel("ratio", fontsize=8)
        axes.set_title(label, fontsize=9)
    return _with_legend(figure, panels[0])


def plot_sets(result: dict[str, Any], to: str = TO_OTHERS) -> Figure:
    """KID (with its standard deviation) and Fréchet distance between sets of pictures against the ratio."""
    figure, panels = _figure(len(SETS))
    for axes, (measure, label) in zip(panels, SETS.items(), strict=True):
        for name, settings in lines(result).items():
            colour, marker, style = STYLES[name]
            there = [each for each in settings if each["set"].get(to)]
            values = [_value(each["set"][to], measure) for each in there]
            spread = [SCALES[measure] * each["set"][to]["kid"]["std"] for each in there] if measure == "kid" else None
            axes.errorbar(
                [ratio_of(each) for each in there],
                values,
                spread,
                color=colour,
                marker=marker,
                linestyle=style,
                markersize=4,
                capsize=2,
                elinewidth=0.8,
                label=name,
            )
        for name in CALIBRATED_BY[to]:
            if found := (result["calibration"].get(name) or {}).get("set"):
                _level(axes, _value(found, measure), SHORT.get(name, name))
        axes.set_xlabel("ratio", fontsize=8)
        axes.set_title(label, fontsize=9)
    figure.supylabel(f"{to}; {FEATURES}", fontsize=7)
    return _with_legend(figure, panels[0])


def plot_time(result: dict[str, Any]) -> Figure:
    """Median perceptual distance from plain against measured time, as a share of a plain picture's."""
    figure, (axes,) = _figure(1)
    for group, (colour, marker) in GROUPS.items():
        points = [
            (share, median(each, "perceptual"), f"{ratio_of(each):g}")
            for each in result["settings"]
            if each["group"] == group and (share := time_share(each)) is not None
        ]
        if not points:
            continue
        shares, distances, ratios = zip(*points, strict=True)
        axes.scatter(shares, distances, color=colour, marker=marker, s=22, label=group)
        if group == "ratio":
            for x, y, ratio in zip(shares, distances, ratios, strict=True):
                axes.annotate(ratio, (x, y), (4, 3), textcoords="offset points", fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":", label="plain")
    axes.set(xlabel="time of a picture / time of a plain picture, same framework", ylabel=PAIRS["perceptual"])
    axes.set_ylim(bottom=0)
    return _with_legend(figure, axes)


def plot_ablations(result: dict[str, Any]) -> Figure:
    """Perceptual distance at one ratio: dst choice, levels and layers, each beside the default; quartiles as lines."""
    settings = ablations(result)
    figure, (axes,) = _figure(1, height=0.9 + 0.26 * len(settings))
    for place, each in enumerate(settings):
        low, middle, high = quartiles(each["pairs"]["perceptual"])
        colour, _ = GROUPS[each["group"]]
        axes.barh(place, middle, color=colour, xerr=[[middle - low], [high - middle]], ecolor="black", capsize=2)
    axes.set_yticks(range(len(settings)), [describe(each) for each in settings])
    axes.invert_yaxis()
    axes.set(xlabel=f"{PAIRS['perceptual']} from plain at ratio {studied_ratio(result):g}")
    if pairs := (result["calibration"].get(OTHER_SEEDS) or {}).get("pairs"):
        axes.axvline(quartiles(pairs["perceptual"])[1], color="black", linewidth=0.8, linestyle="--")
        axes.set_title("dashed: another seed of the same prompt", fontsize=7, loc="right")
    return figure


def ablations(result: dict[str, Any]) -> list[Setting]:
    """The settings at the ratio of the ablations, the default first, then by group."""
    ratio = studied_ratio(result)
    return sorted(
        (each for each in result["settings"] if ratio_of(each) == ratio and each["group"] in GROUPS),
        key=lambda each: list(GROUPS).index(each["group"]),
    )


def describe(setting: Setting) -> str:
    """What makes a setting other than the default of its ratio, in its group's terms."""
    config = setting["config"]
    if setting["group"] == "layers":
        merged = [name for name in ("attn", "crossattn", "mlp") if config[f"merge_{name}"]]
        return f"layers: {' + '.join(merged)}"
    return {
        "ratio": "default (random dst)",
        "use_rand": f"use_rand={config['use_rand']}",
        "max_downsample": f"max_downsample={config['max_downsample']}",
        "tomesd": f"tomesd{'' if config['use_rand'] else ', fixed dst'}",
    }[setting["group"]]


def has_sets(result: dict[str, Any], to: str) -> bool:
    """Whether a setting on one of the lines was compared with those pictures."""
    return any(each["set"].get(to) for settings in lines(result).values() for each in settings)


PLOTS: dict[str, tuple[Callable[[dict[str, Any]], Figure], Callable[[dict[str, Any]], Any]]] = {
    "quality_pairs.png": (plot_pairs, lines),
    "quality_sets.png": (plot_sets, partial(has_sets, to=TO_OTHERS)),
    "quality_sets_real.png": (partial(plot_sets, to=TO_REAL), partial(has_sets, to=TO_REAL)),
    "quality_time.png": (plot_time, lambda result: any(time_share(s) is not None for s in result["settings"])),
    "quality_ablations.png": (plot_ablations, lambda result: len(ablations(result)) > 1),
}


def write_plots(result: dict[str, Any], output: Path) -> list[Path]:
    """Write each plot that the result has data for into a folder; the paths, in the order of `PLOTS`."""
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (plot, has_data) in PLOTS.items():
        if has_data(result):
            # Without matplotlib's version in it the file changes only when the plot does.
            plot(result).savefig(output / name, metadata={"Software": None, "command": result["command"]})
            written.append(output / name)
    return written


def _value(measured: dict[str, Any], measure: str) -> float:
    value = measured[measure]
    return SCALES[measure] * float(value["mean"] if isinstance(value, dict) else value)


def _figure(panels: int, height: float = 3.2) -> tuple[Figure, Sequence[Axes]]:
    """Eight inches wide at 110 dots each: readable where a page shows it at 800 px."""
    figure = Figure(figsize=(8, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for each in axes:
        each.tick_params(labelsize=8)
        each.grid(alpha=0.25, linewidth=0.5)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
        each.xaxis.label.set_size(8)
        each.yaxis.label.set_size(8)
    return figure, axes


def _level(axes: Axes, value: float, label: str) -> None:
    """A dashed line at a calibration's value, named at its right end."""
    axes.axhline(value, color="black", linewidth=0.8, linestyle="--")
    axes.annotate(
        label,
        (1, value),
        (0, 2),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        ha="right",
        fontsize=7,
    )


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    return figure
