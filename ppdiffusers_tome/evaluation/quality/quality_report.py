"""The quality report: one Markdown page with its tables, plots and example images, made from one result."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...config import ToMeConfig
from ..clock import quartiles
from ..markdown import NOT_MEASURED, figure, link, table
from ..results import check_result
from .quality_plots import OTHER_SEEDS, write_plots
from .sheets import GAIN, evenly_spaced, write_sheet

KID = {"to plain, other seeds": "kid_others", "to real": "kid_real"}  # reference → column of the frame
TABLE = {  # column of the frame → title and form of the table's
    "label": ("setting", "{label}"),
    "ratio": ("ratio", "{ratio:g}"),
    "psnr": ("PSNR, dB", "{psnr:.1f} ({psnr_low:.1f}–{psnr_high:.1f})"),
    "ssim": ("SSIM", "{ssim:.3f} ({ssim_low:.3f}–{ssim_high:.3f})"),
    "perceptual": ("perceptual distance", "{perceptual:.4f} ({perceptual_low:.4f}–{perceptual_high:.4f})"),
    "kid_others": ("KID × 1000 to plain, other seeds", "{kid_others:.2f} ± {kid_others_std:.2f}"),
    "kid_real": ("KID × 1000 to real", "{kid_real:.2f} ± {kid_real_std:.2f}"),
    "fid": ("FID to real", "{fid:.1f}"),
}
GROUPS = {
    "ratio": ("By ratio", "The method is *{method}*: random dst, the shallowest level alone."),
    "method": ("Methods", "Other ways to merge."),
    "use_rand": ("Random and fixed dst", "`use_rand=False` always chooses the first token of each cell as dst."),
    "max_downsample": ("Levels", "A higher `max_downsample` merges in deeper feature maps too."),
    "layers": ("Layers", "Tokens can also merge around cross-attention and the feed-forward layer (`mlp`)."),
    "tomesd": (
        "tomesd on PyTorch",
        "tomesd in diffusers, with the same weights and noise, compared with plain diffusers.",
    ),
    "precision": ("Precision", "Nothing merges; what differs from the plain images, in fp32, is the rounding."),
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
ABLATED = ["max_downsample", "layers"]  # groups of settings at one ratio, that of the ablations


def write_report(
    result: dict[str, Any],
    output: Path,
    result_file: Path,
    images: Path | None = None,
    merge_maps: Sequence[tuple[Path, str]] = (),
) -> str:
    """Write `quality.md` with its plots and, where images are given, its contact sheets; return its text.

    Args:
        result: a quality result, as `evaluate` writes it.
        output: the folder for the page, its plots and sheets; made if it does not exist.
        result_file: where the result was read from; the page links to it.
        images: the folder that `evaluate --output` wrote, with `images/<setting>/*.png`; None for a page without
            sheets.
        merge_maps: from `merge_maps.write_merge_maps`; the page shows them where they are.

    Raises:
        ToMeConfigError: result is no quality result, or an image is missing; nothing is written then.
    """
    check_result(result, "quality", result_file)
    frame = read_frame(result)
    sheets = [] if images is None else _write_sheets(result, frame, images, output)  # first, because it can fail
    plots = write_plots(frame, _ablation_ratio(frame), output)
    lines = ["# Image quality of merged images", "", *_about(result, result_file, output), ""]
    lines += ["## Summary", "", *(f"- {sentence}" for sentence in summarize(result)), ""]
    calibration = _table(frame[frame["group"] == "calibration"])
    lines += ["## What the measures mean", "", *CALIBRATION.splitlines(), "", *calibration, "", NOTES, ""]
    for group, (title, about) in GROUPS.items():
        if (frame["group"] == group).any():
            lines += [f"## {title}", "", about.format(method=_method(result)), ""]
            lines += [*_table(frame[frame["group"] == group]), ""]
    for title, figures in {"Plots": plots, "Images": sheets, "Merge maps": merge_maps}.items():
        lines += [f"## {title}", ""] if figures else []
        for path, caption in figures:
            lines += figure(path, caption, output)
    text = "\n".join(lines).rstrip() + "\n"
    (output / "quality.md").write_text(text, encoding="utf-8")
    return text


def read_frame(result: dict[str, Any]) -> pd.DataFrame:
    """One row for each setting, and one of group "calibration" for each known difference; by name.

    Columns are "group", "label", "ratio", "fid", and each measure with its ends as `_low` and `_high`. PSNR (infinite
    for equal images), SSIM and the perceptual distance are medians over the images between their quartiles; KID is
    multiplied by 1000, has its standard deviation as `_std`, and ends that far away. What was not measured is NaN, or
    no column.
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
    return pd.DataFrame(list(rows.values()), index=list(rows))


def _measures(pairs: dict[str, list[float | None]], kid: dict[str, dict[str, float]]) -> dict[str, float]:
    columns: dict[str, float] = {}
    for measure, values in pairs.items():  # None is the PSNR of equal images
        middle, low, high = quartiles(math.inf if value is None else value for value in values)
        columns |= {measure: middle, f"{measure}_low": low, f"{measure}_high": high}
    for reference, value in kid.items():
        name, mean, std = KID[reference], 1000 * value["mean"], 1000 * value["std"]
        columns |= {name: mean, f"{name}_low": mean - std, f"{name}_high": mean + std, f"{name}_std": std}
    return columns


def _label(setting: dict[str, Any]) -> str:
    """How a setting differs from the others of its ratio."""
    config = setting["config"]
    layers = " + ".join(layer for layer in ("attn", "crossattn", "mlp") if config[f"merge_{layer}"])
    if setting["group"] == "method":
        return ToMeConfig(**config).method
    labels = {"ratio": "random dst", "layers": f"layers: {layers}", "tomesd": "tomesd", "precision": "bfloat16"}
    return labels.get(group := setting["group"]) or f"{group}={config[group]}"


def _method(result: dict[str, Any]) -> str:
    """The method that is measured at every ratio, in words."""
    return next(ToMeConfig(**s["config"]).method for s in result["settings"] if s["group"] == "ratio")


def default_setting(frame: pd.DataFrame) -> str:
    """The setting that differs from the defaults in the ratio alone and is nearest to the ratio of the ablations."""
    return (_ratios(frame) - _ablation_ratio(frame)).abs().idxmin()


def _ablation_ratio(frame: pd.DataFrame) -> float:
    """The ratio at which levels and layers vary; without them, the ratio nearest to 0.5."""
    ablated = frame.loc[frame["group"].isin(ABLATED), "ratio"]
    return float(min(_ratios(frame), key=lambda ratio: abs(ratio - 0.5)) if ablated.empty else ablated.iloc[0])


def _ratios(frame: pd.DataFrame) -> pd.Series:
    """The ratios of the settings that differ from the defaults in nothing else, in ascending order."""
    return frame.loc[frame["group"] == "ratio", "ratio"].sort_values()


def _distances(result: dict[str, Any]) -> pd.DataFrame:
    """The perceptual distance of each image, one column for each setting."""
    return pd.DataFrame({setting["name"]: setting["pairs"]["perceptual"] for setting in result["settings"]})


def _about(result: dict[str, Any], result_file: Path, output: Path) -> list[str]:
    """What was drawn, by which command, where."""
    seeds = [prompt["seed"] for prompt in result["prompts"]]
    distinct = len({prompt["prompt"] for prompt in result["prompts"]})
    strength = result["strength"]
    start = "" if strength is None else f" and scikit-image's photographs (image-to-image, strength {strength:g})"
    weights, machine = (
        ", ".join(f"{name} {version}" for name, version in result[part].items()) for part in ("weights", "environment")
    )
    return [
        f"- Model: {result['model']}, {result['size']} px, {result['steps']} steps of {result['scheduler']}, guidance "
        f"scale {result['guidance_scale']:g}",
        f"- Images: {len(seeds)} for each setting, from {distinct} prompts{start}, seeds {min(seeds)} to "
        f"{max(seeds)}; an image has the same noise in every setting",
        f"- Weights of the measures: {weights}",
        f"- Command: `{result['command']}`",
        f"- Commit: `{result['commit']}`",
        f"- Machine: {machine.removeprefix('machine ')}",
        f"- Result: [{result_file.name}]({link(result_file, output)})",
    ]


def summarize(result: dict[str, Any]) -> list[str]:
    """The page's summary: at most ten points, computed from the result; what it did not measure is left out."""
    frame, distances = read_frame(result), _distances(result)
    ratios = _ratios(frame)
    default, floor = frame.loc[default_setting(frame)], frame.loc[OTHER_SEEDS]
    share = default["perceptual"] / floor["perceptual"]
    points = [
        "Medians of *{method}* at ratio {ratio:g}, against the plain image of the same prompt and noise: a perceptual "
        "distance of {perceptual:.4f} (quartiles {perceptual_low:.4f} to {perceptual_high:.4f}), a PSNR of {psnr:.1f} "
        "dB and an SSIM of {ssim:.3f}.".format(method=_method(result), **default),
        f"A plain image from another seed is at a distance of {floor['perceptual']:.4f}: merging changes these images "
        f"{share:.{0 if share >= 0.01 else 1}%} as much."
        + " Images with texture everywhere change more: `--strength` compares them."
        * (result["strength"] is None),
    ]
    if growth := [
        f"{(distances[high] > distances[low]).mean():.0%} from {ratios[low]:g} to {ratios[high]:g}"
        for low, high in pairwise(ratios.index)
    ]:
        points.append(f"Images that the next higher ratio changes more: {', '.join(growth)}.")
    deviation = np.hypot(frame["kid_others_std"], floor["kid_others_std"])  # of a difference
    differs = frame["kid_others"] - floor["kid_others"] > 2 * deviation
    different = ", ".join(f"{ratio:g}" for ratio in ratios[differs[ratios.index]])
    points.append(
        "Ratios at which KID to plain images of other seeds is more than two standard deviations above the noise "
        f"floor: {different or 'none'}."
    )
    if fixed := [
        f"{(distances[row.name_y] < distances[row.name_x]).mean():.0%} at ratio {row.ratio:g}"
        for row in _beside_default(frame, "use_rand")
    ]:
        points.append(f"Images that fixed dst (`use_rand=False`) change less than random dst: {', '.join(fixed)}.")
    ablated = frame[frame["group"].isin(ABLATED)].sort_values("perceptual", kind="stable")
    if not ablated.empty:
        ends = (f"{row['perceptual']:.4f} ({row['label']})" for row in (ablated.iloc[0], ablated.iloc[-1]))
        ratio = ablated["ratio"].iloc[0]
        points.append(f"More levels or layers, at ratio {ratio:g}: median distances from {' to '.join(ends)}.")
    if torch := [
        f"{row.perceptual_y:.4f} at ratio {row.ratio:g} (this library: {row.perceptual_x:.4f})"
        for row in _beside_default(frame, "tomesd")
    ]:
        points.append(f"tomesd on PyTorch, with the same weights, has a median distance of {', '.join(torch)}.")
    points.append(
        "A large distance is not low quality: another good image of the same prompt is far from the plain one too. "
        "KID measures whether the images look worse as a set."
    )
    return points


def _beside_default(frame: pd.DataFrame, group: str) -> Iterable[Any]:
    """The settings of a group, columns `…_y`, with the defaults of the same ratio, columns `…_x`."""
    named = frame.reset_index(names="name")
    both = named[named["group"] == "ratio"].merge(named[named["group"] == group], on="ratio")
    return both.sort_values("ratio", kind="stable").itertuples()


def _table(rows: pd.DataFrame) -> list[str]:
    """One row for each row of the frame, without the columns that were not measured."""
    titles, forms = zip(*(TABLE[column] for column in TABLE if column in rows), strict=True)
    cells = [[form.format(**row).replace("inf", "∞") for form in forms] for row in rows.to_dict("records")]
    return table(titles, [[NOT_MEASURED if cell.startswith("nan") else cell for cell in row] for row in cells])


def _write_sheets(result: dict[str, Any], frame: pd.DataFrame, images: Path, output: Path) -> list[tuple[Path, str]]:
    """Two contact sheets with their captions: evenly spaced prompts, and examples chosen by their distance."""
    prompts = result["prompts"]
    ratios = _ratios(frame)
    folders = {"plain": "plain", **{f"{ratio:g}": name for name, ratio in ratios.items()}}
    spread = evenly_spaced(result)
    default = default_setting(frame)
    distances = _distances(result)[default]
    order = distances.argsort(kind="stable").tolist()
    examples = {"nearest": order[0], "median": order[(len(order) - 1) // 2], "furthest": order[-1]}
    titles = {n: f"{which} ({distances[n]:.4f}): {prompts[n]['prompt']}" for which, n in examples.items()}
    return [
        (
            write_sheet(output / "quality_sheet.png", result, images, folders, spread),
            f"Plain images in the first row, then each ratio. Prompts {', '.join(map(str, spread))} of the list, "
            "evenly spaced.",
        ),
        (
            write_sheet(output / "quality_examples.png", result, images, folders, titles, with_differences=True),
            f"Of all {len(prompts)} images at ratio {ratios[default]:g}, the one nearest to plain, the median and the "
            "furthest, by the perceptual distance. Below each image: its difference from plain, "
            f"{GAIN} times enlarged.",
        ),
    ]
