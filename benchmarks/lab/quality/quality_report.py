"""The quality report: a page with tables, a plot and example images, made from one result."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ppdiffusers_tome.comparison.clock import quartiles
from ppdiffusers_tome.comparison.results import check_result
from ppdiffusers_tome.comparison.sheets import GAIN
from ppdiffusers_tome.config import ToMeConfig

from ..arm import PYTORCH, Arm
from ..markdown import TEMPLATES, write_page
from ..plotting import save_figure
from .quality_plots import plot_against_ratio
from .sheets import evenly_spaced, write_sheet

FORMAT_BEFORE = 3  # of results whose settings had a group and a framework in place of an arm
OTHER_SEEDS = "plain, other seeds"  # a calibration that every result has
KID = {"to plain, other seeds": "kid_others", "to real": "kid_real"}  # reference → column of the frame
TABLE = {  # column of the frame → title and form of the table's
    "label": ("setting", "{label}"),
    "psnr": ("PSNR, dB", "{psnr:.1f} ({psnr_low:.1f}–{psnr_high:.1f})"),
    "ssim": ("SSIM", "{ssim:.3f} ({ssim_low:.3f}–{ssim_high:.3f})"),
    "perceptual": ("perceptual distance", "{perceptual:.4f} ({perceptual_low:.4f}–{perceptual_high:.4f})"),
    "kid_others": ("KID × 1000 to plain, other seeds", "{kid_others:.2f} ± {kid_others_std:.2f}"),
    "kid_real": ("KID × 1000 to real", "{kid_real:.2f} ± {kid_real_std:.2f}"),
}


def write_quality_page(result: dict[str, Any], output: Path, result_file: Path, images: Path | None = None) -> str:
    """Write `quality.md` with its plot and, where images are given, its contact sheets; return its text.

    Args:
        result, result_file: as `evaluate` writes it, and where it was read from; the page links to that.
        output: the folder for the page, its plot and sheets; made if it does not exist.
        images: the folder that `evaluate --output` wrote; None for a page without sheets.

    Raises:
        ToMeConfigError: result is no quality result, or an image is missing; nothing is written then.
    """
    check_result(result, "quality", result_file, earlier=[FORMAT_BEFORE])
    frame = read_frame(result)
    sheets = [] if images is None else _write_sheets(result, frame, images, output)  # first, because it can fail
    differs = differs_by_kid(frame)
    return write_page(
        TEMPLATES / "quality.md",
        output,
        result=result,
        file=result_file,
        default=frame.loc[default_setting(frame)].to_dict(),
        other_seeds=frame.loc[OTHER_SEEDS].to_dict(),
        different=[f"{ratio:g}" for name, ratio in _ratios(frame).items() if differs[name]],
        tables={name: cells_of(rows, TABLE).set_index("setting") for name, rows in frame.groupby("group", sort=False)},
        figures={"Plot": _write_plot(frame, output), "Images": sheets},
    )


def read_frame(result: dict[str, Any]) -> pd.DataFrame:
    """One row for each setting, and one of group "calibration" for each known difference; by name.

    Columns are "group", "label", "method", "ratio", and each measure with its ends as
    `_low` and `_high`. PSNR (infinite for equal images), SSIM and the perceptual distance are medians over the images
    between their quartiles; KID is multiplied by 1000, has its standard deviation as `_std`, and ends that far away.
    What was not measured is NaN, or no column.
    """
    rows: dict[str, dict[str, Any]] = {}
    for setting in result["settings"]:
        arm = arm_of(setting)
        group = setting.get("group") or _group_of(arm)  # results of FORMAT_BEFORE have it
        method = arm.merging.replace(f" {arm.ratio:.15g}", "", 1)
        about = {"group": group, "label": arm.merging, "method": method, "ratio": arm.ratio}
        rows[setting["name"]] = about | _measures(setting["pairs"], setting["kid"])
    for name, known in result["calibration"].items():
        reference = "to real" if "real" in name else "to plain, other seeds"
        about = {"group": "calibration", "label": name}
        rows[name] = about | _measures(known["pairs"] or {}, {reference: known["kid"]})
    return pd.DataFrame(list(rows.values()), index=list(rows))


def arm_of(setting: dict[str, Any]) -> Arm:
    """The arm of a result's setting."""
    if "arm" in setting:
        return Arm.from_json(setting["arm"])
    if setting["framework"] == PYTORCH:  # the config was that of the default
        return Arm(ToMeConfig(setting["config"]["ratio"], "tomesd"), PYTORCH)
    return Arm.from_json({"config": setting["config"]})


def _group_of(arm: Arm) -> str:
    """The section of the page that an arm belongs to."""
    is_default = arm == Arm(ToMeConfig(arm.ratio, "default"))
    return "tomesd" if arm.by == PYTORCH else "ratio" if is_default else "method"


def differs_by_kid(frame: pd.DataFrame) -> pd.Series:
    """Mask of the rows whose KID is above that of plain images by over two standard deviations of the difference."""
    floor = frame.loc[OTHER_SEEDS]
    deviation = np.hypot(frame["kid_others_std"], floor["kid_others_std"])
    return frame["kid_others"] - floor["kid_others"] > 2 * deviation


def _measures(pairs: dict[str, list[float | None]], kid: dict[str, dict[str, float]]) -> dict[str, float]:
    columns: dict[str, float] = {}
    for measure, values in pairs.items():  # None is the PSNR of equal images
        middle, low, high = quartiles(math.inf if value is None else value for value in values)
        columns |= {measure: middle, f"{measure}_low": low, f"{measure}_high": high}
    for reference, value in kid.items():
        name, mean, std = KID[reference], 1000 * value["mean"], 1000 * value["std"]
        columns |= {name: mean, f"{name}_low": mean - std, f"{name}_high": mean + std, f"{name}_std": std}
    return columns


def default_setting(frame: pd.DataFrame) -> str:
    """The setting that differs from the defaults in the ratio alone and is nearest to 0.5."""
    return (_ratios(frame) - 0.5).abs().idxmin()


def _ratios(frame: pd.DataFrame) -> pd.Series:
    """The ratios of the settings that differ from the defaults in nothing else, in ascending order."""
    return frame.loc[frame["group"] == "ratio", "ratio"].sort_values()


def cells_of(rows: pd.DataFrame, columns: Mapping[str, tuple[str, str]]) -> pd.DataFrame:
    """A page's table of some rows of a frame; None where nothing was measured.

    `columns` has title and form of the table's columns; the form has the names of the frame's.
    """
    records = rows.to_dict("records")
    cells = {
        title: [None if pd.isna(row[name]) else form.format(**row).replace("inf", "∞") for row in records]
        for name, (title, form) in columns.items()
        if name in rows
    }
    return pd.DataFrame(cells)


def _write_plot(frame: pd.DataFrame, output: Path) -> list[tuple[Path, str]]:
    """The plot of the measures of pairs, with its caption."""
    title = "Change from the plain image of the same prompt and noise"
    path = output / "quality_pairs.png"
    save_figure(plot_against_ratio(frame, ["psnr", "ssim", "perceptual"], title), path)
    return [(path, f"{title}. Lines are medians, bands are between the quartiles.")]


def _write_sheets(result: dict[str, Any], frame: pd.DataFrame, images: Path, output: Path) -> list[tuple[Path, str]]:
    """Two contact sheets with their captions: evenly spaced prompts, and examples chosen by their distance."""
    prompts, ratios = result["prompts"], _ratios(frame)
    folders = {"plain": "plain", **{f"{ratio:g}": name for name, ratio in ratios.items()}}
    spread, default = evenly_spaced(result), default_setting(frame)
    distances = next(s["pairs"]["perceptual"] for s in result["settings"] if s["name"] == default)
    order = np.argsort(distances, kind="stable").tolist()
    examples = {"nearest": order[0], "median": order[(len(order) - 1) // 2], "furthest": order[-1]}
    titles = {n: f"{which} ({distances[n]:.4f}): {prompts[n]['prompt']}" for which, n in examples.items()}
    sheet, pairs = output / "quality_sheet.jpg", output / "quality_examples.jpg"
    write_sheet(sheet, result, images, folders, spread)
    write_sheet(pairs, result, images, folders, titles, with_differences=True)
    numbers = ", ".join(map(str, spread))
    of_sheet = f"Plain images in the first row, then each ratio. Prompts {numbers} of the list, evenly spaced."
    of_pairs = (
        f"Of all {len(prompts)} images at ratio {ratios[default]:g}, the one nearest to plain, the median and the "
        f"furthest, by the perceptual distance. Below each image: its difference from plain, {GAIN} times enlarged."
    )
    return [(sheet, of_sheet), (pairs, of_pairs)]
