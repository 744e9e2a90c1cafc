"""The frontier page: distance from the plain image against measured time, for every way to merge.

    python benchmarks/frontier.py benchmarks/results/frontier_*.json --images build --output benchmarks

Joins results of `evaluate` with those of `bench`, of the same model, sizes, `--ratio` and `--merging`; `make
pass-frontier` measures both.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from point_labels import label_points

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.config import GRID
from ppdiffusers_tome.evaluation.clock import ratio_within_rounds
from ppdiffusers_tome.evaluation.markdown import NOT_MEASURED, write_page
from ppdiffusers_tome.evaluation.plotting import save_figure
from ppdiffusers_tome.evaluation.quality.image_sets import BASES
from ppdiffusers_tome.evaluation.quality.quality_plots import is_on_frontier, plot_frontier
from ppdiffusers_tome.evaluation.quality.quality_report import cells_of, read_frame
from ppdiffusers_tome.evaluation.quality.sheets import evenly_spaced, write_sheet
from ppdiffusers_tome.evaluation.results import check_result, read_json
from ppdiffusers_tome.evaluation.speed.cases import EAGER, MEASURED, PLAIN, PREDICTOR, TOME, Case, read_cases

NOISE = 0.08  # by which a speed-up in the predictor has differed when it was measured again in another run
IMAGES = {"Prompts": "Prompts", "Photographs": "Image-to-image"}  # source → heading
TABLE = {  # column of the frame → title and form of the table's
    "method": ("method", "{method}"),
    "ratio": ("ratio", "{ratio:g}"),
    PREDICTOR: ("predictor", f"{{{PREDICTOR}:.2f}}×"),
    EAGER: ("eager", f"{{{EAGER}:.2f}}×"),
    "psnr": ("PSNR, dB", "{psnr:.1f} ({psnr_low:.1f}–{psnr_high:.1f})"),
    "perceptual": ("ST-LPIPS", "{perceptual:.4f}"),
}


def write_frontier_page(files: Sequence[Path], output: Path, images: Path | None = None) -> str:
    """Write `frontier.md` with a plot for each size and kind of image into a folder; return its text.

    Args:
        files: results of `evaluate`, and of `bench` with the same `--merging`; of one model for each size.
        output: the folder; made if it does not exist.
        images: folder with a folder for each result of `evaluate`, named like its file, which `evaluate --output`
            wrote; None for a page without images.

    Raises:
        ToMeConfigError: as `read_points`, or an image is missing; the page is not written.
    """
    results = [(file, read_json(file)) for file in files]
    frame = read_points(results)
    of_images = [(file, result) for file, result in results if result["kind"] == "quality"]
    # First, because an image may be missing.
    sheets = [] if images is None else [_write_sheet(result, images / file.stem, output) for file, result in of_images]
    sections = []
    for (source, size), points in frame.groupby(["source", "size"], sort=False):
        title = f"{IMAGES[source]}, {size} px, {points['images'].iloc[0]} images"
        plot = output / f"frontier_{source.lower()}_{size}.png"
        save_figure(plot_frontier(points, title, PREDICTOR, NOISE, label_points), plot)
        caption = (
            f"{title}: distance from plain against speed-up in the predictor, with the ratio at each point. Grey: the "
            f"frontier by each measure. Speed-ups less than {100 * NOISE:g} % apart are equal within the noise."
        )
        sections.append((title, plot, caption, _cells(points)))
    strengths = sorted({result["strength"] for _, result in of_images} - {None})
    return write_page(
        Path(__file__).with_name("templates") / "frontier.md",
        output,
        bases=BASES,
        noise=f"{100 * NOISE:g} %",
        strengths=[f"{strength:g}" for strength in strengths],
        results=results,
        sections=sections,
        sheets=sheets,
    )


def read_points(results: Sequence[tuple[Path, dict[str, Any]]]) -> pd.DataFrame:
    """One row for each setting of the quality results: the columns of `read_frame`, and its measured times.

    Further columns: "source" ("Prompts" or "Photographs"), "size", "model", "images" (how many), the speed-up over
    plain as "eager" and "predictor" (NaN if not measured), and "frontier": whether it is on that by PSNR.

    Raises:
        ToMeConfigError: a result is of another kind or format, two of one size are of several models or have the same
            images or times, or there are no images, or no times in the predictor at their size.
    """
    frames, cases = [], dict[int, Case]()
    for file, result in results:
        if result.get("kind") != "speed":
            check_result(result, "quality", file)
            frame = read_frame(result)
            frame = frame[(frame["framework"] == "Paddle") & (frame["ratio"] != 0)]
            about = {"source": _source(result), "images": len(result["prompts"])}
            frames.append(frame.assign(**about, size=result["size"], model=result["model"]))
            continue
        for case in read_cases(result, file):
            if case.scope != "unet" or case.size in cases:
                raise ToMeConfigError(f"{file}: {case.name}: give one case of one UNet pass for each size.")
            cases[case.size] = case
    frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"size": [], "model": []})
    for size, of_size in frame.groupby("size"):
        models = sorted({*of_size["model"], *([cases[size].model] if size in cases else [])})
        if len(models) > 1:
            several = ", ".join(models)
            raise ToMeConfigError(f"{size} px: the results are of several models, {several}: give those of one.")
    times = {(size, *key): value for size, case in cases.items() for key, value in _speed_ups(case).items()}
    timed = sorted({size for size, backend, _ in times if backend == PREDICTOR})
    if frame.empty or not set(timed) >= set(frame["size"]):
        raise ToMeConfigError(
            "The frontier needs results of evaluate, and of bench with the predictor at the same sizes: the sizes are "
            f"{sorted(set(frame['size']))} and {timed}."
        )
    if (repeated := frame.duplicated(["source", "size", "method", "ratio"])).any():
        source, size, method, ratio = frame.loc[repeated.idxmax(), ["source", "size", "method", "ratio"]]
        raise ToMeConfigError(f"{source}, {size} px: {method} at ratio {ratio:g} is there twice: give each once.")
    points = list(zip(frame["size"], frame["config"].map(_timed), strict=True))
    for backend in (EAGER, PREDICTOR):
        frame[backend] = [times.get((size, backend, config), math.nan) for size, config in points]
    frame["frontier"] = False
    for _, rows in frame.groupby(["source", "size"]):
        frame.loc[rows.index, "frontier"] = is_on_frontier(rows[PREDICTOR], rows["psnr"], NOISE)
    return frame.sort_values(["source", "size"], ascending=[False, True], kind="stable", ignore_index=True)


def _speed_ups(case: Case) -> dict[tuple[str, ToMeConfig], float]:
    """The speed-up over plain of each backend and config, the median of the ratios within rounds."""
    measured = case.with_status(MEASURED)
    plain = {arm.backend: arm.seconds for arm in measured if arm.arm == PLAIN}
    return {
        (arm.backend, _timed(arm.config)): ratio_within_rounds(plain[arm.backend], arm.seconds).median
        for arm in measured
        if arm.arm == TOME and arm.config is not None and arm.backend in plain
    }


def _timed(config: ToMeConfig) -> ToMeConfig:
    """The config without what does not affect the time: which tokens are dst, and a window that "grid" ignores."""
    return replace(config, use_rand=True, seed=0, window=None if config.match == GRID else config.window)


def _source(result: dict[str, Any]) -> str:
    return "Prompts" if result["strength"] is None else "Photographs"


def _cells(points: pd.DataFrame) -> pd.DataFrame:
    """The table of one size and kind of image, the fastest in the predictor first, the frontier in bold."""
    points = points.sort_values(PREDICTOR, ascending=False, kind="stable", ignore_index=True)
    cells = cells_of(points, TABLE).fillna(NOT_MEASURED)
    cells[points["frontier"]] = "**" + cells[points["frontier"]] + "**"
    return cells.set_index("method")


def _write_sheet(result: dict[str, Any], images: Path, output: Path) -> tuple[Path, str]:
    """A contact sheet of plain images, tomesd's method, the symmetric one and the default; its file and caption.

    Raises:
        ToMeConfigError: an image is missing.
    """
    frame, shown = read_frame(result), {"plain": "plain"}
    for method in ("tomesd's", "symmetric", "default"):
        ratios = frame.loc[frame["method"] == method, "ratio"].sort_values()
        shown |= {f"{method} {ratio:g}": name for name, ratio in ratios.items()}
    titles, source = evenly_spaced(result), _source(result)
    path = output / f"frontier_{source.lower()}_{result['size']}_sheet.png"
    write_sheet(path, result, images, shown, titles)
    return path, f"{IMAGES[source]}, {result['size']} px: {', '.join(shown)}; images {', '.join(map(str, titles))}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, images = parser.add_argument, "folder with the output of each evaluate, named like its result, to show images"
    add("files", type=Path, nargs="+", help="results of evaluate, and of bench with the same --merging")
    add("--images", type=Path, help=images)
    add("--output", type=Path, default=Path("benchmarks"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(write_frontier_page(options.files, options.output, options.images))


if __name__ == "__main__":
    main()
