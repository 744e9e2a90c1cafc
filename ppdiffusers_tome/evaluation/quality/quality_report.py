"""The quality report: one Markdown page with its tables, plots and example images, made from one result."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from ...errors import ToMeConfigError
from ..clock import quartiles
from ..markdown import NOT_MEASURED, figure, link, table
from ..results import check_result
from .quality_plots import MEASURES, OTHER_SEEDS, write_plots
from .sheets import GAIN, contact_sheet, save_png

DIGITS = {"psnr": 1, "ssim": 3, "perceptual": 4}
KID = {"to plain, other seeds": "kid_others", "to real": "kid_real"}  # reference → column of the frame
HEADER = [
    "setting",
    "ratio",
    "PSNR, dB",
    "SSIM",
    "perceptual distance",
    "KID × 1000 to plain, other seeds",
    "KID × 1000 to real",
    "FID to real",
]
COLUMNS = [
    *("group", "label", "ratio"),
    *(column for measure in MEASURES for column in (measure, f"{measure}_low", f"{measure}_high")),
    *(column for kid in KID.values() for column in (kid, f"{kid}_std")),
    "fid",
]
GROUPS = {
    "ratio": ("By ratio", "The defaults: random dst, self-attention alone, the shallowest level alone."),
    "use_rand": ("Random and fixed dst", "`use_rand=False` always chooses the first token of each cell as dst."),
    "max_downsample": ("Levels", "A higher `max_downsample` merges in deeper feature maps too."),
    "layers": ("Layers", "Tokens can also merge around cross-attention and the feed-forward layer (`mlp`)."),
    "tomesd": (
        "tomesd on PyTorch",
        "tomesd in diffusers, with the same weights and noise, compared with plain diffusers.",
    ),
}
CALIBRATION = """\
PSNR, SSIM and the perceptual distance (ST-LPIPS) compare each image with the plain image of the same prompt and noise:
they measure how much merging changes an image. KID compares all images of a setting with another set of images, in
features of EfficientNet-Lite0, an ImageNet classifier: it measures whether the images look different as a set. It
cannot be compared with KID in the features of another network.

This table shows what each measure gives for known differences. `plain, other seeds` has the same prompts and other
noise: the noise floor of KID (it can be below 0, because both sets have the same prompts) and, image by image, what a
different image of the same prompt has. `blurred` is a blur of 1 px, which anyone notices."""
NOTES = "Medians over the images, with the quartiles in parentheses; ± is one standard deviation."
MERGE_MAPS = {
    "merge_map.png": "Which tokens merge into which, in the first block that merges, halfway through the steps. One "
    "outline colour is one group, filled with its mean colour; the dot marks its dst.",
    "merge_map_steps.png": "The same in every block that merges, at the first step, halfway and at the last step.",
}
ABLATED = ["max_downsample", "layers"]  # groups of settings at one ratio, that of the ablations
SHOWN = 6  # prompts on the contact sheet


def write_report(
    result: dict[str, Any],
    output: Path,
    result_file: Path,
    images: Path | None = None,
    merge_maps: Sequence[Path] = (),
) -> str:
    """Write `quality.md` with its plots and, where images are given, its contact sheets.

    Args:
        result: a quality result, as `evaluate` writes it.
        output: the folder for the page, its plots and sheets; made if it does not exist.
        result_file: where the result was read from; the page links to it.
        images: the folder that `evaluate --output` wrote, with `images/<setting>/*.png`; None for a page without
            sheets.
        merge_maps: from `merge_maps.write_merge_maps`; the page shows them where they are.

    Returns:
        The Markdown.

    Raises:
        ToMeConfigError: result is no quality result, or an image is missing; nothing is written then.
    """
    check_result(result, "quality", result_file)
    frame = read_frame(result)
    sheets = [] if images is None else _write_sheets(result, images, output)
    lines = ["# Image quality of merged images", "", *_about(result, result_file, output), ""]
    lines += ["## Summary", "", *(f"- {sentence}" for sentence in summarize(result)), ""]
    calibration = _table(frame[frame["group"] == "calibration"])
    lines += ["## What the measures mean", "", *CALIBRATION.splitlines(), "", *calibration, "", NOTES, ""]
    for group, (title, about) in GROUPS.items():
        if (frame["group"] == group).any():
            lines += [f"## {title}", "", about, "", *_table(frame[frame["group"] == group]), ""]
    lines += ["## Plots", ""]
    for path, caption in write_plots(frame, _ablation_ratio(frame), output):
        lines += figure(path, caption, output)
    if sheets:
        lines += ["## Images", "", *sheets]
    if merge_maps:
        lines += ["## Merge maps", ""]
        for path in merge_maps:
            lines += figure(path, MERGE_MAPS[path.name], output)
    text = "\n".join(lines).rstrip() + "\n"
    (output / "quality.md").write_text(text, encoding="utf-8")
    return text


def read_frame(result: dict[str, Any]) -> pd.DataFrame:
    """One row for each setting, and one of group "calibration" for each known difference; by name, columns COLUMNS.

    A measure has its median over the images, infinite where those are equal, and the quartiles as `_low` and `_high`;
    KID is multiplied by 1000 and has its standard deviation as `_std`. NaN is not measured.
    """
    rows: dict[str, dict[str, Any]] = {}
    for setting in result["settings"]:
        about = {"group": setting["group"], "label": _label(setting), "ratio": setting["config"]["ratio"]}
        about["fid"] = setting.get("fid", math.nan)
        rows[setting["name"]] = about | _measures(setting["pairs"], setting["kid"])
    for name, known in result["calibration"].items():
        reference = "to real" if "real" in name else "to plain, other seeds"
        about = {"group": "calibration", "label": name}
        rows[name] = about | _measures(known["pairs"] or {}, {reference: known["kid"]})
    return pd.DataFrame(list(rows.values()), index=list(rows), columns=COLUMNS)


def _measures(pairs: dict[str, list[float | None]], kid: dict[str, dict[str, float]]) -> dict[str, float]:
    columns: dict[str, float] = {}
    for measure, values in pairs.items():  # None is the PSNR of equal images
        middle, low, high = quartiles(math.inf if value is None else value for value in values)
        columns |= {measure: middle, f"{measure}_low": low, f"{measure}_high": high}
    for reference, value in kid.items():
        columns |= {KID[reference]: 1000 * value["mean"], f"{KID[reference]}_std": 1000 * value["std"]}
    return columns


def _label(setting: dict[str, Any]) -> str:
    """How a setting differs from the others of its ratio."""
    config = setting["config"]
    layers = " + ".join(layer for layer in ("attn", "crossattn", "mlp") if config[f"merge_{layer}"])
    return {
        "ratio": "default (random dst)",
        "use_rand": f"use_rand={config['use_rand']}",
        "max_downsample": f"max_downsample={config['max_downsample']}",
        "layers": f"layers: {layers}",
        "tomesd": "tomesd",
    }[setting["group"]]


def default_setting(result: dict[str, Any]) -> dict[str, Any]:
    """The setting that differs from the defaults in the ratio alone and is nearest to the ratio of the ablations."""
    name = _default(read_frame(result))
    return next(setting for setting in result["settings"] if setting["name"] == name)


def _default(frame: pd.DataFrame) -> str:
    ratios = frame.loc[frame["group"] == "ratio", "ratio"]
    return (ratios - _ablation_ratio(frame)).abs().idxmin()


def _ablation_ratio(frame: pd.DataFrame) -> float:
    """The ratio at which levels and layers vary; without them, the ratio nearest to 0.5."""
    ablated = frame.loc[frame["group"].isin(ABLATED), "ratio"]
    ratios = frame.loc[frame["group"] == "ratio", "ratio"]
    return float(ratios[(ratios - 0.5).abs().idxmin()] if ablated.empty else ablated.iloc[0])


def _about(result: dict[str, Any], result_file: Path, output: Path) -> list[str]:
    """What was drawn, by which command, where."""
    seeds = [prompt["seed"] for prompt in result["prompts"]]
    distinct = len({prompt["prompt"] for prompt in result["prompts"]})
    facts = {
        "Model": f"{result['model']}, {result['size']} px, {result['steps']} steps of {result['scheduler']}, guidance "
        f"scale {result['guidance_scale']:g}",
        "Images": f"{len(seeds)} for each setting, from {distinct} prompts, seeds {min(seeds)} to {max(seeds)}; an "
        "image has the same noise in every setting",
        "Weights of the measures": _versions(result["weights"]),
        "Command": f"`{result['command']}`",
        "Commit": f"`{result['commit']}`",
        "Machine": _versions(result["environment"]).removeprefix("machine "),
        "Result": f"[{result_file.name}]({link(result_file, output)})",
    }
    return [f"- {name}: {fact}" for name, fact in facts.items()]


def _versions(versions: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def summarize(result: dict[str, Any]) -> list[str]:
    """The page's summary: at most ten points, computed from the result; what it did not measure is left out."""
    frame = read_frame(result)
    by_ratio = frame[frame["group"] == "ratio"].sort_values("ratio")
    distances = pd.DataFrame({setting["name"]: setting["pairs"]["perceptual"] for setting in result["settings"]})
    default, other = frame.loc[_default(frame)], frame.loc[OTHER_SEEDS]
    points = [
        f"At ratio {default['ratio']:g} the median perceptual distance between a merged image and the plain image of "
        f"the same prompt and noise is {default['perceptual']:.4f} (quartiles {default['perceptual_low']:.4f} to "
        f"{default['perceptual_high']:.4f}). The median PSNR is {default['psnr']:.1f} dB, the median SSIM "
        f"{default['ssim']:.3f}.",
        f"A plain image from another seed is at a distance of {other['perceptual']:.4f}. So merging "
        f"{default['ratio']:.0%} of the tokens changes an image {default['perceptual'] / other['perceptual']:.0%} as "
        "much as another seed does.",
    ]
    if len(by_ratio) > 1:
        points.append(_growth(by_ratio, distances))
    points.append(_kid_verdict(by_ratio, other, len(distances)))
    if fixed := [
        f"{(distances[row.name_y] < distances[row.name_x]).mean():.0%} at ratio {row.ratio:g}"
        for row in _beside_default(frame, "use_rand")
    ]:
        points.append(f"Images that fixed dst (`use_rand=False`) change less than random dst: {', '.join(fixed)}.")
    ablated = frame[frame["group"].isin(ABLATED)].sort_values("perceptual")
    if not ablated.empty:
        least, most = ablated.iloc[0], ablated.iloc[-1]
        points.append(
            f"Merging at more levels or around more layers, at ratio {least['ratio']:g}: the median distance is from "
            f"{least['perceptual']:.4f} ({least['label']}) to {most['perceptual']:.4f} ({most['label']}). The default "
            f"at ratio {default['ratio']:g} has {default['perceptual']:.4f}."
        )
    if torch := [
        f"{row.perceptual_y:.4f} at ratio {row.ratio:g}, where this library has {row.perceptual_x:.4f}"
        for row in _beside_default(frame, "tomesd")
    ]:
        points.append(f"tomesd on PyTorch, with the same weights, has a median distance of {'; '.join(torch)}.")
    points.append(
        "A large distance is not low quality: PSNR, SSIM and the perceptual distance measure change, and another good "
        "image of the same prompt is far from the plain one too. KID measures whether the images look worse as a set."
    )
    return points


def _beside_default(frame: pd.DataFrame, group: str) -> Iterable[Any]:
    """The settings of a group, columns `…_y`, with the defaults of the same ratio, columns `…_x`."""
    named = frame.reset_index(names="name")
    both = named[named["group"] == "ratio"].merge(named[named["group"] == group], on="ratio")
    return both.sort_values("ratio").itertuples()


def _growth(by_ratio: pd.DataFrame, distances: pd.DataFrame) -> str:
    """How surely a higher ratio changes an image more."""
    ratios = by_ratio["ratio"]
    share, step = min(
        (1 - (distances[high] < distances[low]).mean(), f"{ratios[low]:g} to {ratios[high]:g}")
        for low, high in pairwise(by_ratio.index)
    )
    first, last = by_ratio.iloc[0], by_ratio.iloc[-1]
    return (
        f"The median distance is {first['perceptual']:.4f} at ratio {first['ratio']:g} and {last['perceptual']:.4f} "
        f"at ratio {last['ratio']:g}. From one ratio to the next, at least {share:.0%} of the images do not come "
        f"nearer to plain (fewest from {step})."
    )


def _kid_verdict(by_ratio: pd.DataFrame, floor: pd.Series, count: int) -> str:
    """Which ratios KID separates from plain images: two standard deviations (of both) above the noise floor."""
    threshold = floor["kid_others"] + 2 * np.hypot(by_ratio["kid_others_std"], floor["kid_others_std"])
    differs = by_ratio["kid_others"] > threshold
    verdicts = [
        f"{verdict} at ratio {', '.join(f'{ratio:g}' for ratio in by_ratio.loc[rows, 'ratio'])}"
        for verdict, rows in (("no difference", ~differs), ("a difference", differs))
        if rows.any()
    ]
    point = (
        f"KID between the {count} images of a setting and plain images of other seeds shows {' and '.join(verdicts)}. "
        "A difference is an excess over the noise floor of more than two standard deviations."
    )
    return f"{point} Below that, KID cannot rank ratios." if (~differs).sum() > 1 else point


def _table(rows: pd.DataFrame) -> list[str]:
    """One row for each row of the frame, without the columns that were not measured."""
    cells = []
    for _, row in rows.iterrows():
        pairs = [_median_cell(row, measure) for measure in MEASURES]
        kid = [_kid_cell(row[column], row[f"{column}_std"]) for column in KID.values()]
        cells.append([row["label"], _cell(row["ratio"], "g"), *pairs, *kid, _cell(row["fid"], ".1f")])
    return table(HEADER, cells)


def _median_cell(row: pd.Series, measure: str) -> str:
    middle, low, high = (_cell(row[measure + part], f".{DIGITS[measure]}f") for part in ("", "_low", "_high"))
    return NOT_MEASURED if middle == NOT_MEASURED else f"{middle} ({low}–{high})"


def _kid_cell(mean: float, std: float) -> str:
    return NOT_MEASURED if math.isnan(mean) else f"{mean:.2f} ± {std:.2f}"


def _cell(value: float, form: str) -> str:
    return NOT_MEASURED if math.isnan(value) else f"{value:{form}}".replace("inf", "∞")


def _write_sheets(result: dict[str, Any], images: Path, output: Path) -> list[str]:
    """Two contact sheets, in Markdown: evenly spaced prompts, and examples chosen by their distance."""
    prompts, default = result["prompts"], default_setting(result)
    by_ratio = sorted((s for s in result["settings"] if s["group"] == "ratio"), key=lambda s: s["config"]["ratio"])
    folders = {"plain": "plain", **{f"{setting['config']['ratio']:g}": setting["name"] for setting in by_ratio}}
    files = {row: _image_files(images / "images" / folder, len(prompts)) for row, folder in folders.items()}
    spread = sorted({round(n) for n in np.linspace(0, len(prompts) - 1, SHOWN).tolist()})
    distances = default["pairs"]["perceptual"]
    order = sorted(range(len(prompts)), key=distances.__getitem__)
    examples = {"nearest": order[0], "median": order[(len(order) - 1) // 2], "furthest": order[-1]}
    sheets = (  # file, (number, title) of each column, whether with differences, caption
        (
            "quality_sheet.png",
            [(n, prompts[n]["prompt"]) for n in spread],
            False,
            f"Plain images in the first row, then each ratio. Prompts {', '.join(map(str, spread))} of the list, "
            "evenly spaced.",
        ),
        (
            "quality_examples.png",
            [(n, f"{which} ({distances[n]:.4f}): {prompts[n]['prompt']}") for which, n in examples.items()],
            True,
            f"Of all {len(prompts)} images at ratio {default['config']['ratio']:g}, the one nearest to plain, the "
            "median and the furthest, by the perceptual distance. Below each image: its difference from plain, "
            f"{GAIN} times enlarged.",
        ),
    )
    about = {key: result[key] for key in ("model", "steps", "guidance_scale", "command", "commit")}
    lines = []
    for name, columns, differences, caption in sheets:
        numbers, titles = zip(*columns, strict=True)
        rows = {row: [np.array(Image.open(paths[n]).convert("RGB")) for n in numbers] for row, paths in files.items()}
        sheet = contact_sheet(rows, titles, min(result["size"], 256), differences)
        path = save_png(sheet, output / name, prompts=[prompts[n] for n in numbers], rows=list(files), **about)
        lines += figure(path, caption, output)
    return lines


def _image_files(folder: Path, count: int) -> list[Path]:
    """The images of one setting, in the order of the prompts."""
    files = sorted(folder.glob("[!.]*.png"))
    if len(files) != count:
        raise ToMeConfigError(
            f"{folder} has {len(files)} images, the result {count}: give the folder that `evaluate --output` wrote, "
            "or none for a report without images."
        )
    return files
