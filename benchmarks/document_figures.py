"""Write docs/results.md, and figures into other documents, from the committed results (`make figures`).

results.md comes from templates/results.md. In another document, the function NAME in LOOKUPS computes

- a figure between two comments, `<!--= NAME ARGUMENT… -->1.29×<!--/-->`, with its unit, since a gain may be "no
  difference". It does not begin a line, because Markdown takes such a line as HTML.
- the last cells of a table's row that ends in a comment, `| ONNX Runtime | 850 | 480 <!--: NAME ARGUMENT… --> |`.
  None leaves a cell as it is: it is a label in the document's language. The mark has no "|", which would end the cell.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import alternatives
import gpu_onnx
import samplers
from lab.arm import EAGER, OURS, PLAIN, Arm
from lab.markdown import NOT_MEASURED, frame_table, table, write_page
from lab.speed.cases import ONNX_RUNTIME, read_cases

from ppdiffusers_tome.comparison.clock import FEW_ROUNDS, NO_DIFFERENCE, TOO_FEW_ROUNDS, Gain, gain
from ppdiffusers_tome.comparison.option_defaults import ROUNDS

ROOT = Path(__file__).parents[1]
RESULTS_PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [
    *ROOT.glob("README*.md"),
    *sorted((ROOT / "docs").glob("**/*.md")),
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "examples" / model / "README.md" for model in ("emoji_sd", "scenes_sd")),
]
DOCUMENTS.remove(RESULTS_PAGE)
MARKED = re.compile(r"<!--= (.+?) -->(.*?)<!--/-->")
ROW = re.compile(r"^\| (.*) <!--: (.+?) --> \|$", re.MULTILINE)

PLACE = ("model", "scope", "size", "batch")  # these fields identify the case of an arm
SCENES, SD15 = "scenes_*unet.json", "sd15_*.json"  # results of passes on a CPU
DEFAULT, TODO = "interlace 0.75", "todo 0.75"  # todo keeps as many keys, and was timed where interlace was not
EVERY_STEP = samplers.ALL.name
IN_CHINESE = {NO_DIFFERENCE: "无明显差异", TOO_FEW_ROUNDS: "轮数太少，无法判断", " of ": "/"}


def update(text: str, is_chinese: bool = False) -> str:
    """The text of a document with all figures and rows computed."""

    def figure(match: re.Match) -> str:
        return f"<!--= {match[1]} -->{in_words(call(match[1]))}<!--/-->"

    def in_words(computed: str) -> str:
        for words, others in IN_CHINESE.items() if is_chinese else ():
            computed = computed.replace(words, others)
        return computed

    def row(match: re.Match) -> str:
        cells, computed = match[1].split(" | "), [cell and in_words(cell) for cell in call(match[2])]
        assert len(computed) <= len(cells), f"{match[0]}: it has fewer cells than {computed}"
        first = len(cells) - len(computed)
        cells[first:] = [old if new is None else new for old, new in zip(cells[first:], computed, strict=True)]
        return f"| {' | '.join(cells)} <!--: {match[2]} --> |"

    broken = re.search(r"^ *<!--= .*", text, re.MULTILINE)
    assert not broken, f"{broken and broken[0]}: a figure must not begin a line"
    ends = [len(re.findall(mark, text)) for mark in ("<!--= ", "<!--/")]
    assert [len(MARKED.findall(text))] * 2 == ends, "half a mark"
    assert not re.search("<!--/--> ?[×倍]", text), "the unit of a figure is part of it"
    assert len(ROW.findall(text)) == len(re.findall("<!--[:|]", text)), "a mark of a row is not at its end"
    return ROW.sub(row, MARKED.sub(figure, text))


def updated(path: Path) -> str:
    """The text of a document as it should be."""
    is_chinese = path.stem.endswith("_zh") or path.parent.name == "zh"
    return update(path.read_text(encoding="utf-8"), is_chinese)


def call(words: str) -> Any:
    """Call the function of LOOKUPS that a mark names, with the arguments in the mark."""
    name, *arguments = words.split()
    if name not in LOOKUPS:
        raise KeyError(f"{words!r} names no function: choose from {', '.join(sorted(LOOKUPS))}")
    return LOOKUPS[name](*arguments)


def read(file: str) -> dict[str, Any]:
    """A result of the project, by its file name without .json."""
    return _content(RESULTS / f"{file}.json")


@lru_cache
def _content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def fields(content: Any, path: str) -> list[Any]:
    """All values at a path such as `cases/size=128,batch=2/arms/*/seconds`.

    The parts are keys of objects; for lists they are `key=value,…`, which selects items, or `*`, which takes all.
    """
    key, _, rest = path.partition("/")
    if not key:
        return [content]
    if isinstance(content, dict):
        return fields(content[key], rest)
    wanted = [part.split("=", 1) for part in key.split(",") if key != "*"]
    items = [item for item in content if all(str(item[name]) == value for name, value in wanted)]
    return [field for item in items for field in fields(item, rest)]


# Figures -------------------------------------------------------------------------------------------------------------


def value(files: str, path: str, form: str = "") -> str:
    """A field that is equal in all `files` (FILE,…): the median of a list, a version without what follows its "+"."""
    found = [field for file in files.split(",") for field in fields(read(file), path)]
    (number,) = {statistics.median(field) if isinstance(field, list) else field for field in found}
    return f"{number:{form}}".partition("+")[0]


def count(file: str, path: str) -> str:
    """The length of a list."""
    (items,) = fields(read(file), path)
    return f"{len(items)}"


def results_like(files: str) -> list[str]:
    """The names of the results whose files match a pattern."""
    return sorted(path.stem for path in RESULTS.glob(files))


def arms(file: str) -> list[dict[str, Any]]:
    """The measurements of a speed result, each with the fields of its case; none where there is no such result."""
    if not (RESULTS / f"{file}.json").exists():
        return []
    return [{**vars(case), **vars(row)} for case in read_cases(read(file), file) for row in case.arms]


def arm(
    file: str, name: str, backend: str = EAGER, size: int | str = 512, scope: str = "unet"
) -> dict[str, Any] | None:
    """An arm of a speed result at batch 2, by its name, such as "interlace 0.75"; None if it was not measured."""
    wanted = (name, backend, f"{size}", 2, scope)
    for row in arms(file):
        if (row["arm"].name, row["arm"].backend, f"{row['size']}", row["batch"], row["scope"]) == wanted:
            return row
    return None


def plain_of(row: dict[str, Any], file: str) -> dict[str, Any]:
    """The plain arm of a case, in the same backend."""
    plain = Arm(backend=row["arm"].backend)
    (base,) = [base for base in arms(file) if base["arm"] == plain and all(row[key] == base[key] for key in PLACE)]
    return base


def over_plain(row: dict[str, Any], file: str) -> Gain:
    """The gain of an arm over the plain one of its case."""
    return gain(plain_of(row, file)["seconds"], row["seconds"])


def gain_of(row: dict[str, Any] | None, file: str) -> str:
    """The gain of an arm that may not have been measured."""
    return NOT_MEASURED if row is None else str(over_plain(row, file))


def macs_saved(file: str, size: str, backend: str = EAGER) -> str:
    """The share of the multiply-accumulates of a pass that merging by default saves."""
    row = arm(file, DEFAULT, backend, size)
    assert row is not None
    return f"{100 * (1 - row['macs'] / plain_of(row, file)['macs']):.0f} %"


def gpu_arms(name: str, size: str, batch: str) -> list[dict[str, Any]]:
    """An arm of the passes of Stable Diffusion 1.5's UNet on a GPU, in each turn that has it."""
    return [
        row
        for row in read("gpu_onnx")["rows"]
        if (row["arm"], f"{row['size']}", f"{row['batch']}") == (name, size, batch)
    ]


def on_gpu(size: str, batch: str, *name: str) -> str:
    """The gain of an arm on a GPU over plain in the same runtime and form."""
    merged = gpu_arms(" ".join(name), size, batch)
    if not merged:
        return NOT_MEASURED
    plain = gpu_onnx.reference_of(merged[0], read("gpu_onnx")["rows"])
    return str(gain(plain["ms"], merged[0]["ms"]))


def predicted_on_gpu(size: str) -> str:
    """The gain that half of the keys should have on a GPU at batch 2, where it was not measured."""
    return gpu_onnx.predicted_gains(read("gpu_onnx")["rows"]).get((int(size), 2), NOT_MEASURED)


def least_gain(files: str, name: str, backend: str, size: int | str) -> tuple[dict[str, Any], str] | None:
    """An arm of a UNet on a CPU at batch 2, and the result that has it, of `files`; None if none has.

    Of several results it is the one with the lowest gain.
    """
    rows = [(arm(file, name, backend, size), file) for file in results_like(files)]
    measured = [(row, file) for row, file in rows if row is not None and row["seconds"]]  # it may have failed there
    return min(measured, key=lambda found: over_plain(*found).factor, default=None)


def on_cpu(backend: str, size: str, *name: str) -> str:
    """The gain of a pass of Stable Diffusion 1.5's UNet on a CPU by an arm, as `least_gain`."""
    found = least_gain(SD15, " ".join(name), backend, size)
    return NOT_MEASURED if found is None else str(over_plain(*found))


def sdxl_block(level: str, size: str, *name: str) -> str:
    """The gain of an exported block of SDXL at a level, by an arm."""
    row = arm("sdxl_blocks", " ".join(name), ONNX_RUNTIME, size, f"one block at level {level}")
    return gain_of(row, "sdxl_blocks")


def transformer_block(*scope: str) -> str:
    """The gain of a block of FLUX or Wan by default, in eager mode."""
    rows = [row for row in arms("flux_blocks") if row["scope"] == " ".join(scope)]
    (merged,) = [row for row in rows if row["arm"].name == DEFAULT]
    return gain_of(merged, "flux_blocks")


def noise() -> str:
    """By how much a gain differs that was measured in several results; "" where fewer than 5 were."""
    repeated = defaultdict(list)
    for file in [name for name in results_like("*.json") if read(name)["kind"] == "speed"]:
        for row in arms(file):
            if row["arm"].config and (row["arm"].by, row["arm"].attention) == (OURS, PLAIN) and row["seconds"]:
                case = tuple(row[key] for key in PLACE)
                repeated[case, read(file)["threads"], row["arm"]].append(over_plain(row, file).factor)
    spreads = [max(factors) / min(factors) - 1 for factors in repeated.values() if len(factors) > 1]
    return f"{100 * max(spreads):.0f} %" if len(spreads) >= 5 else ""


def nearer_than_tomesd(images: str) -> str:
    """By how many dB interlace at 0.75 in all steps is nearer to plain than tomesd's method at 0.5."""
    interlace, tomesd = (arm_of(images, name)["psnr"] for name in (EVERY_STEP, "tomesd 0.5"))
    return f"{interlace - tomesd:.0f}"


def quality_mean(key: str, *name: str) -> str:
    """The mean PSNR of an arm of samplers.json, in dB."""
    return f"{statistics.mean(quality_of(key, ' '.join(name))[1]['psnr']):.1f}"


def quality_worst(key: str, *name: str) -> str:
    """The PSNR of the image that is furthest from plain."""
    return f"{min(quality_of(key, ' '.join(name))[1]['psnr']):.0f}"


def quality_gain(key: str, *name: str) -> str:
    """The gain of an image of an arm of samplers.json."""
    setting, arm = quality_of(key, " ".join(name))
    return f"{samplers.image_gain(read('samplers')['timing'], setting, arm):.2f}×"


def of_image(pass_gain: str) -> str:
    """The gain of an image of 20 steps of DPM-Solver++ by default, from that of a pass that merges; as text."""
    if not pass_gain.endswith("×"):
        return pass_gain
    _, arm = quality_of("dpm-7.5", samplers.DEFAULT.name)
    share = arm["plain"] / arm["passes"]
    return f"{samplers.gain_with_plain_steps(float(pass_gain[:-1]), share):.2f}×"


def image_on_gpu(size: str) -> str:
    """The gain of an image on a GPU, from that of a pass."""
    return gpu_gain(size)[-1]


# Rows of tables ------------------------------------------------------------------------------------------------------


def milliseconds(row: dict[str, Any]) -> str:
    return f"{1e3 * statistics.median(row['seconds']):.0f}"


def gpu_row(size: str) -> list[str]:
    """Milliseconds on a GPU at batch 2, in ONNX Runtime and in PyTorch: plain, and merged."""
    cells = []
    for name in ("onnxruntime plain", "onnxruntime todo 0.75", "torch plain", "torch tomesd 0.5"):
        rows = gpu_arms(name, size, "2")
        if not rows:
            cells.append(NOT_MEASURED)
            continue
        milliseconds = f"{statistics.median(rows[0]['ms']):.1f}"
        is_plain = name.endswith("plain")
        cells.append(milliseconds if is_plain else f"{milliseconds} ({on_gpu(size, '2', *name.split())})")
    return cells


def quality_of(key: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A setting of samplers.json, and an arm of it."""
    (setting,) = [setting for setting in read("samplers")["settings"] if setting["key"] == key]
    (arm,) = [arm for arm in setting["arms"] if arm["name"] == name]
    return setting, arm


def mean_and_worst(key: str, name: str) -> str:
    return f"{quality_mean(key, name)} ({quality_worst(key, name)})"


def quality(key: str) -> list[str]:
    """A setting: the gain of an image by default, the PSNR of it and of other arms, and images with another thing."""
    name, arm = samplers.DEFAULT.name, quality_of(key, samplers.DEFAULT.name)[1]
    others = (samplers.HALF.name, samplers.ALL.name, samplers.FEWER.name)
    changed = sum(value > samplers.CHANGED for value in arm["largest_change"])
    first = [quality_gain(key, name), mean_and_worst(key, name), f"{changed} of {len(arm['psnr'])}"]
    return [*first, *(mean_and_worst(key, other) for other in others)]


def choice(*name: str) -> list[str]:
    """A way to merge, at the settings of `dpm-7.5`: the gain of an image, its mean PSNR and the worst."""
    key, arm = "dpm-7.5", " ".join(name)
    return [quality_gain(key, arm), quality_mean(key, arm), quality_worst(key, arm)]


def by_runtime(backend: str) -> list[str]:
    """The UNet of `scenes_sd` at 256 px in a runtime: milliseconds of plain and merged by default, and the gain."""
    found = least_gain(SCENES, DEFAULT, backend, 256)
    if found is None:
        return [NOT_MEASURED] * 3
    return [milliseconds(plain_of(*found)), milliseconds(found[0]), gain_of(*found)]


def gpu_gain(size: str, batch: str = "2") -> list[str]:
    """On a GPU: the gain of a pass by the default and by todo, which keeps as many keys, and of an image."""
    return with_image([on_gpu(size, batch, "onnxruntime", name) for name in (DEFAULT, TODO)])


def cpu_gain(backend: str, size: str) -> list[str]:
    """Stable Diffusion 1.5's UNet on a CPU at batch 2, as `gpu_gain`."""
    return with_image([on_cpu(backend, size, name) for name in (DEFAULT, TODO)])


def seconds_on_cpu(backend: str, size: str, *name: str) -> list[str]:
    """A pass of Stable Diffusion 1.5's UNet on a CPU: seconds plain and of an arm, and the gains of pass and image."""
    found = least_gain(SD15, " ".join(name), backend, size)
    if found is None:
        return [NOT_MEASURED] * 4
    seconds = [f"{statistics.median(one['seconds']):.1f} s" for one in (plain_of(*found), found[0])]
    gained = str(over_plain(*found))
    return [*seconds, gained, of_image(gained)]


def milliseconds_on_gpu(size: str) -> list[str]:
    """A pass on a GPU at batch 2: milliseconds plain and by todo, and the gains of pass and image."""
    names = [f"onnxruntime {name}" for name in (PLAIN, TODO)]
    times = [f"{statistics.median(gpu_arms(name, size, '2')[0]['ms']):.0f} ms" for name in names]
    gained = on_gpu(size, "2", names[1])
    return [*times, gained, of_image(gained)]


def with_image(gains: list[str]) -> list[str]:
    """The gains of a pass by the default and by todo, and of an image by the first of them that was measured."""
    return [*gains, of_image(next((gain for gain in gains if gain != NOT_MEASURED), NOT_MEASURED))]


def eager(*words: str) -> list[str]:
    """A pass in eager mode by an arm: GB with `scenes_sd` at 256 px, and with Stable Diffusion 1.5 at 512 px; there
    also its seconds.
    """
    name = " ".join(words)
    rows = [arm("scenes_unet", name, size=256), arm("sd15_eager", name)]
    peaks = [NOT_MEASURED if row is None else f"{row['peak_memory_bytes'] / 1e9:.1f}" for row in rows]
    return [*peaks, NOT_MEASURED if rows[1] is None else f"{statistics.median(rows[1]['seconds']):.0f}"]


def small_image_gain() -> list[str]:
    """As `gpu_gain`, of `emoji_sd` at 128 px, where whole images were timed that merge in all steps."""
    names = (EVERY_STEP, TODO)
    return with_image([image_speed_up("emoji_sd_128", ONNX_RUNTIME, name) for name in names])


def demo(*name: str) -> list[str]:
    """What `make demo` prints of an arm."""
    (row,) = [row for row in read("demo")["arms"] if row["arm"] == " ".join(name)]
    seconds, peak = f"{row['step_seconds']:.2f}", f"{row['peak_bytes'] / 1e6:.0f}"
    if row["config"] is None:
        return [NOT_MEASURED, seconds, *[NOT_MEASURED] * 5, peak, NOT_MEASURED]
    decibels = [f"{row[name]:.1f}" for name in ("psnr", "worst_psnr")]
    similarities = [f"{row[name]:.3f}" for name in ("ssim", "worst_ssim")]
    plain, saved = f"{100 * row['plain_share']:.0f} %", f"{100 * row['macs_saved']:.1f} %"
    return [plain, seconds, row["gain_in_words"], *decibels, *similarities, peak, saved]


def exported_pass(size: str) -> str:
    """Seconds of a plain pass of Stable Diffusion 1.5 that is exported, in ONNX Runtime."""
    found = least_gain(SD15, PLAIN, ONNX_RUNTIME, size)
    assert found is not None
    return f"{statistics.median(found[0]['seconds']):.1f} s"


def rehearsed(command: str, unit: str) -> str:
    """What a command of README took with Stable Diffusion 1.5, in "min", or its peak of memory in "GB"."""
    figures = read("rehearsal_sd15")["measured"][command]
    number = figures["seconds"] / 60 if unit == "min" else figures["peak_bytes"] / 1e9
    return f"{number:.1f} {unit}"


def served(ratio: str) -> list[str]:
    """Of `serve` with Stable Diffusion 1.5: seconds of an image, and images per hour."""
    seconds = statistics.median(read("rehearsal_sd15")["measured"]["serve"]["image_seconds"][ratio])
    return [f"{seconds:.0f}", f"{3600 / seconds:.0f}"]


def claims(factor: float, **wanted: Any) -> list[float]:
    """The shares of simulated comparisons in which a gain is claimed, of the rows with these values."""
    rows = [row for row in read("gain_rule")["rows"] if all(row[name] == value for name, value in wanted.items())]
    return [row["claims"][f"{factor}"] for row in rows]


def gain_rule(noise: str) -> list[str]:
    """False claims and gains that are found in a noise, at each spread: with 9 and 3 rounds, and on the page."""

    def cell(factor: float, **wanted: Any) -> str:
        return ", ".join(f"{100 * share:.0f}" for share in claims(factor, noise=noise, **wanted)) + " %"

    usual, few = {"rule": "compare", "count": ROUNDS}, {"rule": "compare", "count": FEW_ROUNDS}
    of_compare = cell(1.0, **usual), cell(1.1, **usual), cell(1.0, **few), cell(1.3, **few)
    return [*of_compare, cell(1.0, rule="page", count=9), cell(1.0, rule="page", count=19)]


def false_claims(rule: str = "compare", *words: str) -> str:
    """The largest share of simulated comparisons in which a gain is claimed where nothing differs."""
    return f"{100 * max(claims(1.0, rule=' '.join((rule, *words)))):.0f} %"


def gains_found(spread: str) -> str:
    """The smallest and the largest share, over the noises, in which a gain of 10 % is found by default."""
    shares = claims(1.1, rule="compare", count=ROUNDS, spread=float(spread))
    return f"{100 * min(shares):.0f}–{100 * max(shares):.0f} %"


def loader(name: str, made_by: str = "export") -> list[str]:
    """Of images of `scenes_sd` by default in a library: their gain, and their mean PSNR with the worst.

    Args:
        name: of the library.
        made_by: "export", or "merge-onnx" of an export by Optimum.
    """
    of_optimum = "optimum_merged"
    rows = [row for row in read("loaders")["results"] if row["loader"] == name]
    (row,) = [row for row in rows if (row["folder"] == of_optimum) == (made_by == "merge-onnx")]
    return gain_and_nearness(row)


def int8(folder: str, plain: str) -> list[str]:
    """As `loader`, of a folder that may be quantized, beside the images of another one."""
    rows = [row for file in ("loaders_int8", "loaders_int8_weights") for row in read(file)["results"]]
    (row,) = [row for row in rows if (row["folder"], row["plain"]) == (folder, plain)]
    return gain_and_nearness(row)


def gain_and_nearness(row: dict[str, Any]) -> list[str]:
    """Of the images of a result of loaders.py: their gain, and their mean PSNR with the worst."""
    decibels = row["psnr"]
    gained = str(gain(row["seconds"]["plain"], row["seconds"]["merged"]))
    return [gained, f"{statistics.mean(decibels):.1f} ({min(decibels):.0f})"]


def joint(*words: str) -> list[str]:
    """Mean PSNR, and the worst, of a way of joint_attention.json in each of its settings."""
    cells = []
    for setting in read("joint_attention")["settings"]:
        (decibels,) = [row["psnr"] for row in setting["ways"] if row["name"] == " ".join(words)]
        cells.append(f"{statistics.mean(decibels):.1f} ({min(decibels):.0f})")
    return cells


def joint_time(shape: str, way: str) -> str:
    """The time of attention with the constant over that without it, at a shape of joint_attention.json."""
    (seconds,) = [times for name, times in read("joint_attention")["timing"].items() if name.startswith(shape)]
    return f"{seconds[way] / seconds['without']:.2f}×"


def row_of_export(result: str, words: Iterable[str]) -> dict[str, Any]:
    """The figures of the export in RESULT.json whose name begins with these words."""
    exports = read(result)["exports"]
    (row,) = [row for name, row in exports.items() if name.replace("`", "").startswith(" ".join(words))]
    return row


def export_cost(*words: str) -> list[str]:
    """Seconds of an export and GB of its UNets, before and now, and GB in all."""
    row = row_of_export("export_cost", words)
    return [
        *(f"{row[code]['seconds']:.0f}" for code in ("before", "after")),
        *(f"{row[code]['unet_peak_bytes'] / 1e9:.1f}" for code in ("before", "after")),
        f"{row['after']['peak_bytes'] / 1e9:.1f}",
    ]


def image_check(*words: str) -> list[str]:
    """Minutes of an export that compares images, those of the comparison, GB in all, and GB on the disk."""
    row = row_of_export("image_check", words)
    times = [f"{row[name] / 60:.1f}" for name in ("seconds", "image_check_seconds")]
    return [*times, *(f"{row[name] / 1e9:.1f}" for name in ("peak_bytes", "disk_bytes"))]


def arm_of(images: str, name: str) -> dict[str, Any]:
    """An arm of alternatives_IMAGES.json."""
    (row,) = [row for row in read(f"alternatives_{images}")["arms"] if row["name"] == name]
    return row


def image_speed_up(images: str, runtime: str, *name: str) -> str:
    """The gain of whole images of an arm in a runtime."""
    arm = alternatives.arm_of(arm_of(images, " ".join(name)))
    gained = alternatives.image_gain(read(f"alternatives_{images}"), arm, runtime)
    return NOT_MEASURED if gained is None else str(gained)


def arm_psnr(images: str, *name: str) -> str:
    """The median PSNR of an arm, in dB."""
    return f"{arm_of(images, ' '.join(name))['psnr']:.1f}"


# The functions that a document may name.
LOOKUPS: dict[str, Callable[..., Any]] = {
    "on_gpu": on_gpu,
    "predicted_on_gpu": predicted_on_gpu,
    "gpu_row": gpu_row,
    "loader": loader,
    "int8": int8,
    "export_cost": export_cost,
    "image_check": image_check,
    "joint": joint,
    "joint_time": joint_time,
    "gpu_gain": gpu_gain,
    "cpu_gain": cpu_gain,
    "on_cpu": on_cpu,
    "seconds_on_cpu": seconds_on_cpu,
    "milliseconds_on_gpu": milliseconds_on_gpu,
    "eager": eager,
    "small_image_gain": small_image_gain,
    "demo": demo,
    "exported_pass": exported_pass,
    "rehearsed": rehearsed,
    "served": served,
    "gain_rule": gain_rule,
    "false_claims": false_claims,
    "gains_found": gains_found,
    "sdxl_block": sdxl_block,
    "transformer_block": transformer_block,
    "choice": choice,
    "by_runtime": by_runtime,
    "arm_psnr": arm_psnr,
    "image_on_gpu": image_on_gpu,
    "quality": quality,
    "quality_gain": quality_gain,
    "quality_mean": quality_mean,
}


# results.md ----------------------------------------------------------------------------------------------------------

SETS = {"scenes_sd_256": "scenes", "scenes_sd_256_photographs": "photographs", "emoji_sd_128": "simple images"}
ARMS = (  # of alternatives_*.json on the page, where a result has them
    *(f"interlace {ratio}, merge_steps='all'" for ratio in (0.5, 0.75, 0.875, 0.9375)),
    "todo 0.75",
    "tomesd 0.25",
    "tomesd 0.5",
    "10 steps",
    f"10 steps + {EVERY_STEP}",
    "DeepCache 2",
    f"DeepCache 2 + {EVERY_STEP}",
    "another seed",
)


def write_results(output: Path) -> str:
    """Write results.md into a folder; returns its text."""
    functions = (value, count, macs_saved, noise, nearer_than_tomesd)
    template = Path(__file__).with_name("templates") / "results.md"
    return write_page(
        template,
        output,
        sets=SETS,
        passes=table_of_passes(),
        sizes=table_of_sizes(),
        images=table_of_images(),
        **quality_parts(),
        **{function.__name__: function for function in functions},
    )


def quality_parts() -> dict[str, Any]:
    """The tables of samplers.json, and what the page says of them."""
    result = read("samplers")
    timing, settings = result["timing"], result["settings"]
    gains = [
        [name, *(f"{samplers.pass_gain(timing, name, runtime):.2f}×" for runtime in samplers.RUNTIMES)]
        for name in timing["passes"][samplers.RUNTIMES[0]]
        if name != PLAIN
    ]
    plain, merged = (statistics.median(timing["images"][name]) for name in (PLAIN, samplers.DEFAULT.name))
    _, arm = quality_of("dpm-7.5", samplers.DEFAULT.name)
    of_runtime = timing["passes"][samplers.RUNTIMES[0]]
    seconds = {name: statistics.median(times) for name, times in of_runtime.items()}
    of_passes = arm["plain"] * seconds[PLAIN] + (arm["passes"] - arm["plain"]) * seconds[samplers.DEFAULT.name]
    counts = {len(arm["psnr"]) for setting in settings for arm in setting["arms"]}
    return {
        "quality_count": "{}".format(*counts),
        "quality_tables": [(samplers.title_of(one), frame_table(samplers.rows_of(result, one))) for one in settings],
        "pass_gains": "\n".join(table(["a pass", "ONNX Runtime", "OpenVINO"], gains)),
        "image_of_passes": f"{100 * merged / of_passes:.0f} %",
        "image_gain": f"{plain / merged:.2f}×",
    }


def table_of_passes() -> str:
    """Passes of UNets on a CPU at batch 2, plain and merged: a row for each run."""
    of_pair = [f"{arm}, {unit}" for unit in ("s", "GB") for arm in ("plain", "merged")]
    head = ["UNet", "px", "threads", "backend", *of_pair[:2], "gain", *of_pair[2:]]
    rows = []
    for file in results_like(SCENES) + results_like(SD15):
        for row in arms(file):
            if (row["arm"].name, row["scope"], row["batch"]) != (DEFAULT, "unet", 2):
                continue
            pair = [plain_of(row, file), row]
            seconds = [f"{statistics.median(one['seconds']):#.3g}" for one in pair]
            memory = [gigabytes(one) for one in pair]
            place = [Path(row["model"]).name, str(row["size"]), str(read(file)["threads"]), row["arm"].backend]
            rows.append([*place, *seconds, str(over_plain(row, file)), *memory])
    return "\n".join(table(head, rows))


def gigabytes(row: dict[str, Any]) -> str:
    """The peak of the memory of a pass."""
    peak = row["peak_memory_bytes"]
    return NOT_MEASURED if peak is None else f"{peak / 1e9:.2f}"


def table_of_sizes() -> str:
    """Seconds, gain and memory of `scenes_sd` in eager mode, by size, batch and ratio; "" if it was not measured."""
    cells: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    for row in arms("scenes_sizes"):
        seconds = f"{statistics.median(row['seconds']):.2f} s"
        gained = f" ({over_plain(row, 'scenes_sizes')})" if row["arm"].config else ""
        cells[row["size"], row["batch"]][row["arm"].name] = f"{seconds}{gained}, {gigabytes(row)} GB"
    names = list(dict.fromkeys(name for of_place in cells.values() for name in of_place))
    rows = [[f"{size}", f"{batch}", *of_place.values()] for (size, batch), of_place in cells.items()]
    return "\n".join(table(["px", "batch", *names], rows))


def table_of_images() -> str:
    """Each of ARMS: the gain over plain in scenes, and PSNR and ST-LPIPS in all sets."""
    runtimes = {"onnxruntime": "ONNX Runtime", "paddle": "Paddle Inference"}
    head = ["arm", *runtimes.values()] + [
        f"{words}, {measure}" for words in SETS.values() for measure in ("dB", "ST-LPIPS")
    ]
    rows = []
    for name in ARMS:
        found = [{row["name"]: row for row in read(f"alternatives_{images}")["arms"]}.get(name) for images in SETS]
        if not any(found):
            continue
        is_timed = found[0] and name != "another seed"
        cells = [image_speed_up("scenes_sd_256", runtime, name) if is_timed else NOT_MEASURED for runtime in runtimes]
        for row in found:
            cells += [f"{row['psnr']:.1f}", f"{row['perceptual']:.4f}"] if row else [NOT_MEASURED] * 2
        rows.append([name, *cells])
    return "\n".join(table(head, rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a document differs")
    is_check, different = parser.parse_args().check, False
    with tempfile.TemporaryDirectory() as folder:
        documents = {RESULTS_PAGE: write_results(Path(folder))}
    documents |= {path: updated(path) for path in DOCUMENTS}
    for path, text in documents.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        changed = [line for line in text.splitlines() if line not in lines]
        different |= text != path.read_text(encoding="utf-8")
        print(*(f"{path.relative_to(ROOT)}: {line}" for line in changed), sep="\n", end="\n" if changed else "")
        if not is_check:
            path.write_text(text, encoding="utf-8")
    return int(is_check and different)


if __name__ == "__main__":
    sys.exit(main())
