"""The frontier page: distance from the plain image against measured time, for every way to merge."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...config import GRID, KV, TOMESD_SETTINGS, ToMeConfig
from ...errors import ToMeConfigError
from ..clock import quartiles, ratio_within_rounds
from ..markdown import NOT_MEASURED, change, figure, link, table
from ..plotting import save_figure
from ..results import check_result, read_json
from ..speed.cases import EAGER, MEASURED, PLAIN, PREDICTOR, TOME, Case, read_cases
from .quality_plots import plot_frontier
from .sheets import evenly_spaced, write_sheet

PAGE = "frontier.md"
TOMESD = ToMeConfig(**TOMESD_SETTINGS, merge_attn=True)
TIMES = ["size", "config", "backend", "seconds", "speed_up"]  # columns of what bench measured
RATIOS = (0.5, 0.7)  # of the default, compared with tomesd's method at 0.5
NOISE = 0.05  # by which a speed-up in the predictor differs if it is measured again in another run
BASES = {  # the methods of docs/methods.md, whose names are those of plots and tables
    "default": ToMeConfig(),
    "tomesd's": TOMESD,
    "keys and values": ToMeConfig(merge_attn=KV),
    "ToDo": replace(TOMESD, merge_attn=KV, match=GRID, ratio=0.75, blend=0, use_rand=False),
}
IMAGES = {"Prompts": "Prompts", "Photographs": "Image-to-image"}  # source → heading
INTRODUCTION = """\
Each point is one way to merge at one ratio. Its distance is between an image and the plain image of the same prompt
and noise: PSNR (higher is nearer) and ST-LPIPS (lower is nearer), medians over the images, of PSNR with the quartiles
in parentheses. Its speed-up is the time of one pass of the plain UNet over its own in the same backend, the median of
the ratios within rounds. Times are measured with fixed dst; random ones are constants of a program too.

Names: {names}. What follows a comma differs from that; *whole grid* is `window=None`.

A point is **on the frontier** (bold) if it is faster than plain in the predictor and no other point of its table is
nearer by PSNR and about as fast. Measured again in another run, a speed-up differs by up to {noise}, so a point that
is ahead of another by less than that is not faster.

Which method is best depends on the images. *Prompts* are images of prompts alone. The bundled models generate single
objects on white, and white tokens are so similar that merging them loses almost nothing, which flatters merging."""
IMAGE_TO_IMAGE = """\
*Image-to-image* starts from scikit-image's photographs, at strength {strengths}, with the same prompts, which do not
describe the photographs. These images have texture everywhere and rank the methods differently. Trust a method that is
on the frontier of both."""
DEFAULT = """\
The default, at ratios {ratios}, is compared with tomesd's method at ratio 0.5. The gain is the difference between the
median PSNRs. The quotient of ST-LPIPS is below 1 where the default is nearer, and the change of time, within rounds,
below 0 % where it is faster; changes below {noise} are noise. An image is nearer if its PSNR is higher than that of
the same image by tomesd's method."""
AS_NEAR = """\
The fastest point in the predictor that is at least as near to plain as tomesd's method at ratio 0.5 (of those that are
slower by less than {noise}, the nearest), and the share of plain's time that each saves."""


def write_report(
    files: Sequence[Path], output: Path, default: ToMeConfig | None = None, images: Path | None = None
) -> str:
    """Write `frontier.md` with a plot for each size and kind of image into a folder; return its text.

    Args:
        files: results of `evaluate`, and of `bench` with the same `--merging`; of one model for each size.
        output: the folder; made if it does not exist.
        default: compared with tomesd's method; None: the library's.
        images: folder with a folder for each result of `evaluate`, named like its file, which `evaluate --output`
            wrote; None for a page without images.

    Raises:
        ToMeConfigError: as `read_points`, or an image is missing; the page is not written.
    """
    results = [(file, read_json(file)) for file in files]
    frame, default = read_points(results), default or ToMeConfig()
    sheets = []
    if images is not None:  # first, because an image may be missing
        drawn = [(file, result) for file, result in results if result["kind"] == "quality"]
        sheets = [_write_sheet(result, images / file.stem, output, default) for file, result in drawn]
    names = ", ".join(f"*{name}* is *{config.method}*" for name, config in BASES.items())
    noise = f"{100 * NOISE:g} %"
    lines = ["# Distance from plain against time", "", INTRODUCTION.format(names=names, noise=noise)]
    strengths = {result["strength"] for _, result in results if result["kind"] == "quality"} - {None}
    if strengths:
        lines += [IMAGE_TO_IMAGE.format(strengths=", ".join(map("{:g}".format, sorted(strengths))))]
    lines += ["", *_sources(results, output), "", *_compare_default(frame, default, noise)]
    for (source, size), points in frame.groupby(["source", "size"], sort=False):
        title = _title(source, size, points)
        plot = output / f"frontier_{source.lower()}_{size}.png"
        save_figure(plot_frontier(points[points["backend"] == PREDICTOR], title), plot)
        caption = (
            f"{title}: distance from plain against speed-up in the predictor, with the ratio at each point. Grey: the "
            f"frontier by each measure. Speed-ups less than {noise} apart are equal within the noise."
        )
        lines += [f"## {title}", "", *figure(plot, caption, output), *_table(points), ""]
    lines += ["## Images", ""] if sheets else []
    for path, caption in sheets:
        lines += figure(path, caption, output)
    text = "\n".join(lines).rstrip() + "\n"
    (output / PAGE).write_text(text, encoding="utf-8")
    return text


def read_points(results: Sequence[tuple[Path, dict[str, Any]]]) -> pd.DataFrame:
    """One row for each setting of the quality results and each backend, joined with its measured time.

    Columns: "source" ("Prompts" or "Photographs"), "size", "config" (without what does not affect the time), "method"
    (from `name_of`), "ratio", "psnr" with "psnr_low" and "psnr_high", "perceptual", "images" (PSNR of each),
    "backend", "seconds" (of each round), "speed_up" over plain (both NaN if not measured), and whether the point is on
    the frontier: "frontier" by PSNR, "frontier_perceptual" by ST-LPIPS.

    Raises:
        ToMeConfigError: a result is of another kind or format, two of one size are of several models or have the same
            images or times, or there are no images, or no times in the predictor at their size.
    """
    images: list[dict[str, Any]] = []
    cases: dict[int, Case] = {}
    for file, result in results:
        if result.get("kind") != "speed":
            check_result(result, "quality", file)
            images += _measured_images(result)
            continue
        for case in read_cases(result, file):
            if case.scope != "unet" or case.size in cases:
                raise ToMeConfigError(f"{file}: {case.name}: give one case of one UNet pass for each size.")
            cases[case.size] = case
    models: dict[int, set[str]] = {size: {case.model} for size, case in cases.items()}
    for row in images:
        models.setdefault(row["size"], set()).add(row["model"])
    for size, names in models.items():
        if len(names) > 1:
            raise ToMeConfigError(
                f"{size} px: the results are of several models, {', '.join(sorted(names))}: give those of one."
            )
    times = pd.DataFrame([row for case in cases.values() for row in _measured_times(case)], columns=TIMES)
    times = times.drop_duplicates(["size", "config", "backend"])  # of arms that differ in their dst alone
    frame = pd.DataFrame(images)
    timed = set(times["size"][times["backend"] == PREDICTOR])
    if frame.empty or not timed >= set(frame["size"]):
        raise ToMeConfigError(
            "The frontier needs results of evaluate, and of bench with the predictor at the same sizes: the sizes are "
            f"{sorted({row['size'] for row in images})} and {sorted(timed)}."
        )
    if (repeated := frame.duplicated(["source", "size", "method", "ratio"])).any():
        source, size, method, ratio = frame.loc[repeated.idxmax(), ["source", "size", "method", "ratio"]]
        raise ToMeConfigError(f"{source}, {size} px: {method} at ratio {ratio:g} is there twice: give each once.")
    backends = pd.DataFrame({"backend": [EAGER, PREDICTOR]})
    frame = frame.merge(backends, how="cross").merge(times, how="left", on=["size", "config", "backend"])
    for column, nearness in {"frontier": frame["psnr"], "frontier_perceptual": -frame["perceptual"]}.items():
        frame[column] = False
        for _, points in frame.groupby(["source", "size", "backend"]):
            frame.loc[points.index, column] = is_on_frontier(points["speed_up"], nearness[points.index], NOISE)
    return frame.sort_values(["source", "size"], ascending=[False, True], kind="stable", ignore_index=True)


def _write_sheet(result: dict[str, Any], images: Path, output: Path, default: ToMeConfig) -> tuple[Path, str]:
    """A contact sheet of plain images, tomesd's method and the default, evenly spaced prompts; its file and caption.

    Raises:
        ToMeConfigError: an image is missing.
    """
    shown = {"plain": "plain"}
    for label, config in {"tomesd's": TOMESD, "default": default}.items():
        for setting in sorted(result["settings"], key=lambda setting: setting["config"]["ratio"]):
            ratio = setting["config"]["ratio"]
            if replace(ToMeConfig(**setting["config"]), ratio=0) == replace(config, ratio=0):
                shown[f"{label} {ratio:g}"] = setting["name"]
    titles = evenly_spaced(result)
    source = _source(result)
    path = output / f"frontier_{source.lower()}_{result['size']}_sheet.png"
    write_sheet(path, result, images, shown, titles)
    kind = f"{IMAGES[source]}, {result['size']} px"
    return path, f"{kind}: {', '.join(shown)}; images {', '.join(map(str, titles))}."


def name_of(config: ToMeConfig) -> str:
    """A way to merge by the name of its method in the documents and what differs from that; without ratio and seed."""
    is_tomesd = not config.proportional and config.merge_attn is True
    name = "ToDo" if config.match == GRID else "keys and values" if config.merge_attn == KV else "default"
    name = "tomesd's" if name == "default" and is_tomesd else name
    values, base = asdict(config), asdict(BASES[name])
    words = {
        "sx": f"{config.sx}×{config.sy} cells",
        "sy": f"{config.sx}×{config.sy} cells",
        "window": f"windows of {config.window}" if config.window else "whole grid",
        "use_rand": "random dst" if config.use_rand else "fixed dst",
        "max_downsample": f"up to level {config.max_downsample}",
        "blend": f"blend {config.blend:g}",
        "proportional": "proportional" if config.proportional else "not proportional",
    }
    ignored = {"ratio", "seed"} | ({"window"} if config.match == GRID else set())
    differing = [field for field, value in values.items() if value != base[field] and field not in ignored]
    return ", ".join([name, *dict.fromkeys(words.get(field, f"{field}={values[field]!r}") for field in differing)])


def is_on_frontier(speed_up: pd.Series, nearness: pd.Series, noise: float = 0) -> np.ndarray:
    """Whether each point is faster than plain, and no other point is nearer and faster.

    Another point counts as faster unless it is slower by the share `noise` or more.
    """
    points = list(zip(speed_up, nearness, strict=True))
    return np.array(
        [s > 1 and not any(other * (1 + noise) > s and nearer > n for other, nearer in points) for s, n in points]
    )


def _title(source: str, size: int, points: pd.DataFrame) -> str:
    """As "Prompts, 128 px, 256 images"."""
    return f"{IMAGES[source]}, {size} px, {len(points['images'].iloc[0])} images"


def _measured_images(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    about = {"model": result["model"], "size": result["size"]}
    about["source"] = _source(result)
    for setting in result["settings"]:
        if setting["framework"] != "Paddle" or not setting["config"]["ratio"]:
            continue
        config = ToMeConfig(**setting["config"])
        psnr = [math.inf if value is None else value for value in setting["pairs"]["psnr"]]  # None: equal images
        spread = dict(zip(("psnr", "psnr_low", "psnr_high"), quartiles(psnr), strict=True))
        distance = quartiles(setting["pairs"]["perceptual"]).median
        columns = {"config": _timed(config), "method": name_of(config), "ratio": config.ratio, "images": psnr}
        yield {**about, **columns, **spread, "perceptual": distance}


def _source(result: dict[str, Any]) -> str:
    return "Prompts" if result["strength"] is None else "Photographs"


def _measured_times(case: Case) -> Iterator[dict[str, Any]]:
    measured = case.with_status(MEASURED)
    plain = {arm.backend: arm.seconds for arm in measured if arm.arm == PLAIN}
    for arm in measured:
        if arm.arm == TOME and arm.config is not None and arm.backend in plain:
            speed_up = ratio_within_rounds(plain[arm.backend], arm.seconds).median
            row = (case.size, _timed(arm.config), arm.backend, arm.seconds, speed_up)
            yield dict(zip(TIMES, row, strict=True))


def _timed(config: ToMeConfig) -> ToMeConfig:
    """The config without what does not affect the time: which tokens are dst, and a window that "grid" ignores."""
    return replace(config, use_rand=True, seed=0, window=None if config.match == GRID else config.window)


def _sources(results: Sequence[tuple[Path, dict[str, Any]]], output: Path) -> Iterator[str]:
    for file, result in results:
        machine = result["environment"]
        if result["kind"] == "quality":
            counted = f"{len(result['prompts'])} images of {result['model']}"
        else:
            counted = f"{result['rounds']} rounds"
        yield (
            f"- [{file.name}]({link(file, output)}): {counted}, {machine['machine']}, paddlepaddle "
            f"{machine['paddlepaddle']}, commit `{result['commit']}`, `{result['command']}`"
        )


def _table(points: pd.DataFrame) -> list[str]:
    """The points of one size and kind of image, the fastest in the predictor first."""
    eager = points[points["backend"] == EAGER].set_index(["method", "ratio"])["speed_up"]
    rows = []
    ordered = points[points["backend"] == PREDICTOR].sort_values("speed_up", ascending=False, kind="stable")
    for point in ordered.to_dict("records"):
        speed_ups = [point["speed_up"], eager[point["method"], point["ratio"]]]
        cells = [point["method"], f"{point['ratio']:g}"]
        cells += [NOT_MEASURED if math.isnan(value) else f"{value:.2f}×" for value in speed_ups]
        cells += ["{psnr:.1f} ({psnr_low:.1f}–{psnr_high:.1f})".format(**point).replace("inf", "∞")]
        cells += [f"{point['perceptual']:.4f}"]
        rows.append([f"**{cell}**" if point["frontier"] else cell for cell in cells])
    return table(["method", "ratio", "predictor", "eager", "PSNR, dB", "ST-LPIPS"], rows)


def _compare_default(frame: pd.DataFrame, default: ToMeConfig, noise: str) -> list[str]:
    """Two tables: the default against tomesd's method, and what is as near as tomesd's method."""
    gains, as_near = [], []
    for (source, size), points in frame.groupby(["source", "size"], sort=False):
        tomesd = _find(points, TOMESD)
        if tomesd.empty or math.isnan(tomesd.at[PREDICTOR, "speed_up"]):
            continue
        for ratio in RATIOS:
            rows = _find(points, replace(default, ratio=ratio))
            if not rows.empty:
                gains.append([_title(source, size, points), f"{ratio:g}", *_gains(rows, tomesd)])
        theirs = tomesd.loc[PREDICTOR]
        near = points[(points["backend"] == PREDICTOR) & (points["psnr"] >= theirs["psnr"])]
        fastest = near.loc[near["psnr"].where(near["speed_up"] * (1 + NOISE) > near["speed_up"].max()).idxmax()]
        saved, theirs_saved = 1 - 1 / fastest["speed_up"], 1 - 1 / theirs["speed_up"]
        cells = [f"{theirs['psnr']:.1f}", f"{theirs_saved:.1%}", fastest["method"], f"{fastest['ratio']:g}"]
        cells += [
            f"{fastest['psnr']:.1f}",
            f"{saved:.1%}",
            f"{saved / theirs_saved:.2f}×" if theirs_saved > 0 else NOT_MEASURED,
        ]
        as_near.append([_title(source, size, points), *(cell.replace("%", " %") for cell in cells)])
    if not as_near:
        return []
    heads = [
        "images",
        "ratio",
        "PSNR, dB",
        "gain, dB",
        "ST-LPIPS quotient",
        "time, predictor",
        "time, eager",
        "nearer",
    ]
    lines = [
        "## The default",
        "",
        DEFAULT.format(ratios=" and ".join(map("{:g}".format, RATIOS)), noise=noise),
        "",
        *table(heads, gains),
        "",
    ]
    heads = ["images", "tomesd's PSNR", "saves", "fastest as near", "ratio", "PSNR", "saves", "against tomesd's"]
    return [*lines, AS_NEAR.format(noise=noise), "", *table(heads, as_near), ""]


def _find(points: pd.DataFrame, config: ToMeConfig) -> pd.DataFrame:
    """The rows of a config by backend, with the dst that it chooses; empty if it was not drawn."""
    is_config = (points["config"] == _timed(config)) & (points["method"] == name_of(config))
    return points[is_config].set_index("backend")


def _gains(rows: pd.DataFrame, tomesd: pd.DataFrame) -> list[str]:
    ours, theirs = rows.loc[PREDICTOR], tomesd.loc[PREDICTOR]
    nearer = sum(a > b for a, b in zip(ours["images"], theirs["images"], strict=True))
    times = []
    for backend in (PREDICTOR, EAGER):
        both = rows.at[backend, "seconds"], tomesd.at[backend, "seconds"]
        is_measured = all(isinstance(seconds, list) for seconds in both)
        times.append(change(ratio_within_rounds(*both).median) if is_measured else NOT_MEASURED)
    quotient = ours["perceptual"] / theirs["perceptual"] if theirs["perceptual"] else math.nan
    return [
        f"{ours['psnr']:.1f}",
        f"{ours['psnr'] - theirs['psnr']:+.1f}".replace("-", "−"),
        f"{quotient:.2f}",
        *times,
        f"{nearer} of {len(ours['images'])}",
    ]
