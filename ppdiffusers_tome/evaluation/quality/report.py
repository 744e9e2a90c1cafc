"""The quality report: a Markdown page with its tables, plots and pictures, all of them made from one result."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...errors import ToMeConfigError
from ..speed.markdown import change
from .drawing import picture_paths
from .findings import (
    RANDOM,
    TO_OTHERS,
    TO_REAL,
    Setting,
    default_setting,
    lines,
    quartiles,
    ratio_of,
    studied_ratio,
    summarize,
    time_share,
)
from .plots import describe, write_plots
from .sheets import GAIN, contact_sheet, save_png

GROUPS = {
    "ratio": ("By ratio", "Random dst, self-attention, shallowest level: the defaults."),
    "use_rand": ("Random or fixed dst", "`use_rand=False` takes the first token of each cell as dst."),
    "max_downsample": ("Levels", "`max_downsample` lets deeper feature maps merge too."),
    "layers": ("Layers", "Around which layers tokens are merged: `merge_attn`, `merge_crossattn`, `merge_mlp`."),
    "tomesd": ("tomesd on PyTorch", "The same weights and noise in diffusers with tomesd, against plain diffusers."),
}
PLOTS = {
    "quality_pairs.png": "Distance from the plain picture of the same noise; bands from quartile to quartile",
    "quality_sets.png": "Distance from plain pictures with other seeds; dashed: what plain and blurred pictures have",
    "quality_sets_real.png": "Distance from real pictures; dashed: what plain, real and blurred pictures have",
    "quality_time.png": "Distance from the plain picture against measured time; the figures are ratios",
    "quality_ablations.png": "What merges, at ratio {ratio}; bars are medians, lines go from quartile to quartile",
}
MAPS = {
    "merge_map.png": "Which tokens were merged into which, in the first block that merges, halfway through the steps: "
    "one outline is one group, filled with its mean colour, the dot its dst",
    "merge_map_steps.png": "The same in every block that merges, at the first step, halfway and at the last",
}
CALIBRATION = """\
PSNR, SSIM and the perceptual distance (ST-LPIPS) compare each picture with the plain one of the same prompt and noise.
The set distances, KID and Fréchet distance, compare all pictures with a set of others, in features of
EfficientNet-Lite0, an ImageNet classifier: neither can be compared with figures from other networks' features. The
Fréchet distance also depends on how many pictures there are, so read it against this table alone.

The table tells what each measure gives where the answer is known. `plain, other seeds` is the noise floor of the sets
and, in pairs, what a wholly other picture of the same prompt has; `blurred` is damage that anyone sees."""
NOTES = """\
Medians over the images, in parentheses the quartiles; ± one standard deviation; the time of one image, and its change
against plain; — is not measured."""
SHOWN = 6  # prompts on the contact sheet


def write_report(
    result: dict[str, Any],
    output: Path,
    pictures: Path | None = None,
    result_file: Path | None = None,
    merge_maps: Sequence[Path] = (),
) -> str:
    """Write `quality.md` and its plots, and where pictures are given its sheets, into a folder.

    Args:
        result: a quality result, as `evaluate` writes it.
        output: the folder; made where there is none.
        pictures: folder with one folder of PNG files, in the order of the prompts, for plain and each setting of group
            "ratio".
        result_file: where the result was read from; the page links to it.
        merge_maps: pictures to show as merge maps, from `merge_maps.write_merge_maps`; linked where they lie.

    Returns:
        The Markdown.

    Raises:
        ToMeConfigError: result is no quality result, or a picture that is to be shown is missing.
    """
    if result.get("kind") != "quality" or result.get("format") != 1:
        raise ToMeConfigError(
            f"this is no quality result of format 1 but {result.get('kind')!r} of format {result.get('format')!r}: "
            "give a file that `python -m ppdiffusers_tome evaluate` wrote."
        )
    shown = [] if pictures is None else _pictures(result, output, pictures)
    plots, ratio = write_plots(result, output), studied_ratio(result)
    parts = ["# Quality of merged pictures", _drawn(result, result_file, output), "## Summary"]
    parts += ["\n".join(f"- {line}" for line in summarize(result))]
    parts += ["## How the measures are calibrated", CALIBRATION, _calibration(result)]
    for group, (title, about) in GROUPS.items():
        if settings := [each for each in result["settings"] if each["group"] == group]:
            parts += [f"## {title}", about, _table(settings)]
    parts += [NOTES]
    parts += (
        ["## Plots", *(_figure(path, PLOTS[path.name].format(ratio=ratio), output) for path in plots)] if plots else []
    )
    parts += ["## Pictures", *shown] if shown else []
    if merge_maps:
        parts += ["## Merge maps", *(_figure(path, MAPS.get(path.name, path.stem), output) for path in merge_maps)]
    text = "\n\n".join(parts) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / "quality.md").write_text(text, encoding="utf-8")
    return text


def _drawn(result: dict[str, Any], result_file: Path | None, output: Path) -> str:
    """What was drawn, by which command, where."""
    seeds = [each["seed"] for each in result["prompts"]]
    versions = {key: value for key, value in result["environment"].items() if key != "machine"}
    where = [result["environment"]["machine"], *(f"{key} {value}" for key, value in versions.items())]
    distinct = len({each["prompt"] for each in result["prompts"]})
    features = ", ".join(f"{name} {version}" for name, version in result["features"].items())
    facts = {
        "Model": f"{result['model']}, {result['size']} px, {result['steps']} steps of {result['scheduler']}, "
        f"guidance {result['guidance']:g}",
        "Pictures": f"{len(seeds)} for each setting, of {distinct} prompts, seeds {min(seeds)} to {max(seeds)}; a "
        "picture has the same noise in every setting",
        "Measured with": features,
        "Command": f"`{result['command']}`",
        "Commit": f"`{result['commit']}`",
        "Machine": ", ".join(where),
    }
    if result_file is not None:
        facts["Result"] = f"[{result_file.name}]({_link(result_file, output)})"
    return "\n".join(f"- {name}: {fact}" for name, fact in facts.items())


def _calibration(result: dict[str, Any]) -> str:
    rows = [
        [name, *_pairs(found.get("pairs")), *_set(found.get("set"))] for name, found in result["calibration"].items()
    ]
    return _markdown(["", *PAIR_HEADS, *SET_HEADS], rows)


PAIR_HEADS = ["PSNR, dB", "SSIM", "perceptual"]
SET_HEADS = ["KID × 1000", "Fréchet"]


def _table(settings: list[Setting]) -> str:
    """One row for each setting; a set distance has columns where any setting has it."""
    references = [to for to in (TO_OTHERS, TO_REAL) if any(each["set"].get(to) for each in settings)]
    heads = ["setting", "ratio", *PAIR_HEADS, *(f"{head}, {to}" for to in references for head in SET_HEADS), "time"]
    rows = []
    for each in settings:
        share = time_share(each)
        sets = [cell for to in references for cell in _set(each["set"].get(to))]
        time = "—" if share is None else f"{each['seconds']['picture']:.2f} s, {change(share, 0)}"
        rows.append([describe(each), f"{ratio_of(each):g}", *_pairs(each["pairs"]), *sets, time])
    return _markdown(heads, rows)


def _pairs(pairs: dict[str, Sequence[float | None]] | None) -> list[str]:
    if pairs is None:
        return ["—"] * 3
    cells = []
    for measure, digits in (("psnr", 1), ("ssim", 3), ("perceptual", 4)):
        low, middle, high = (f"{value:.{digits}f}".replace("inf", "∞") for value in quartiles(pairs[measure]))
        cells.append(f"{middle} ({low}–{high})")
    return cells


def _set(measured: dict[str, Any] | None) -> list[str]:
    if not measured:
        return ["—"] * 2
    kid = measured["kid"]
    return [f"{1000 * kid['mean']:.2f} ± {1000 * kid['std']:.2f}", f"{measured['frechet']:.1f}"]


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    table = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _pictures(result: dict[str, Any], output: Path, pictures: Path) -> list[str]:
    """The contact sheet, and three examples chosen by their distance; both by rule, not by eye."""
    settings = lines(result).get(RANDOM, [])
    count = len(result["prompts"])
    about = {key: result[key] for key in ("model", "steps", "guidance", "command", "commit")}

    def sheet(name: str, indices: list[int], titles: list[str], gain: float | None) -> Path:
        rows = {"plain": [_read(pictures, "plain", n) for n in indices]}
        rows |= {f"{ratio_of(each):g}": [_read(pictures, each["name"], n) for n in indices] for each in settings}
        prompts = [result["prompts"][n] for n in indices]
        drawn = contact_sheet(rows, titles, gain=gain, size=min(result["size"], 256))
        return save_png(drawn, output / name, prompts=prompts, ratios=list(map(ratio_of, settings)), **about)

    spread = sorted({round(n) for n in np.linspace(0, count - 1, min(SHOWN, count)).tolist()})
    path = sheet("quality_sheet.png", spread, [result["prompts"][n]["prompt"] for n in spread], None)
    told = f"Plain, then each ratio. Prompts number {', '.join(str(n) for n in spread)}: evenly spaced in the list."
    parts = [_figure(path, told, output)]
    if default := default_setting(result):
        distances = default["pairs"]["perceptual"]
        order = sorted(range(count), key=distances.__getitem__)
        chosen = {"nearest": order[0], "median": order[(count - 1) // 2], "furthest": order[-1]}
        titles = [f"{why} ({distances[n]:.4f}): {result['prompts'][n]['prompt']}" for why, n in chosen.items()]
        path = sheet("quality_examples.png", list(chosen.values()), titles, GAIN)
        told = f"Of all {count} pictures the nearest to plain at ratio {ratio_of(default):g}, the median and the "
        told += "furthest, by the perceptual distance alone. Below each: the difference from plain, "
        told += f"{GAIN} times enlarged."
        parts.append(_figure(path, told, output))
    return parts


def _read(pictures: Path, name: str, number: int) -> np.ndarray:
    paths = picture_paths(pictures / name)
    if number >= len(paths):
        raise ToMeConfigError(
            f"{pictures / name} has {len(paths)} pictures: give the folder `evaluate` wrote, or none."
        )
    with Image.open(paths[number]) as image:
        return np.array(image.convert("RGB"))


def _figure(path: Path, caption: str, output: Path) -> str:
    return f"![{caption}]({_link(path, output)})\n\n*{caption}*"


def _link(path: Path, output: Path) -> str:
    """The path as seen from the page."""
    return Path(os.path.relpath(path.resolve(), output.resolve())).as_posix()
