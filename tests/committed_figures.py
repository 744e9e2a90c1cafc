"""Figures of the committed results as the documents write them, each with the field that it comes from."""

import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ppdiffusers_tome.config import TOMESD_SETTINGS, ToMeConfig
from ppdiffusers_tome.evaluation import operations

ROOT = Path(__file__).parents[1]
SPEED_TABLE_FILES = ("sd15_unet", "sd15_block", "emoji_pipeline_256")
OTHER_SEEDS = "plain, other seeds"  # in quality.json: images of the same prompts with other seeds
LABELS = {  # of the two READMEs
    ("sd15_unet", "eager"): ("Stable Diffusion 1.5, one UNet pass", "Stable Diffusion 1.5，UNet 一次前向"),
    ("sd15_unet", "sliced"): ("the same, attention slicing", "同上，注意力切片"),
    ("sd15_block", "eager"): ("top-level block of Stable Diffusion 1.5", "Stable Diffusion 1.5 最上层的一个模块"),
    "emoji_unet": ("`emoji_sd`, one UNet pass", "`emoji_sd`，UNet 一次前向"),
    "emoji_pipeline_256": ("`emoji_sd_256`, whole images", "`emoji_sd_256`，完整生成"),
    "default": ("default", "默认"),
    OTHER_SEEDS: ("another seed", "换一个种子"),
    "eager": ("eager", "动态图"),
    "predictor": ("predictor", "预测器"),
    "onnxruntime": ("ONNX Runtime", "ONNX Runtime"),
}


class Figure(NamedTuple):
    """A figure as documents write it, and the field that it comes from."""

    text: str
    field: str


@lru_cache
def read(path: str) -> dict[str, Any]:
    """A result below benchmarks/."""
    return json.loads((ROOT / "benchmarks" / path).read_text(encoding="utf-8"))


# Speed ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One arm of one case of a speed result."""

    file: str
    case: dict[str, Any]
    values: dict[str, Any]

    @property
    def field(self) -> str:
        arm = f"{self.values['arm']}, {self.values['backend']}, {ratio_of(self.values)}"
        return f"{self.file}.json, {self.case['size']} px, batch {self.case['batch']}, {arm}"

    def seconds(self, form: str = ".1f", unit: float = 1.0) -> Figure:
        if not self.values["seconds"]:
            return Figure("–", f"{self.field}: reason")
        return Figure(f"{statistics.median(self.values['seconds']) / unit:{form}}", f"{self.field}: seconds")

    def gigabytes(self) -> Figure:
        measured = self.values["peak_memory_bytes"]
        return Figure("–" if measured is None else f"{measured / 1e9:.2f}", f"{self.field}: peak_memory_bytes")

    def times_faster(self, base: "Arm") -> float:
        """How many times as fast as another arm: the median of the ratios within a round."""
        rounds = zip(base.values["seconds"], self.values["seconds"], strict=True)
        return statistics.median(other / own for other, own in rounds)

    def speed_up(self, base: "Arm", form: str = ".2f", sign: str = "×") -> Figure:
        if not self.values["seconds"]:
            return Figure("–", f"{self.field}: reason")
        return Figure(f"{self.times_faster(base):{form}}{sign}", f"{self.field}: seconds; {base.field}: seconds")


def ratio_of(values: dict[str, Any]) -> float:
    return values["config"]["ratio"] if values["config"] else 0


def arm(file: str, name: str, backend: str = "eager", size: int = 128, batch: int = 2) -> Arm:
    """The arm of that name at ratio 0.5, or at ratio 0 if it does not merge; of several methods the first."""
    ratio = 0 if name in ("plain", "memory-efficient") else 0.5
    return next(
        Arm(file, case, values)
        for case in read(f"results/{file}.json")["cases"]
        for values in case["arms"]
        if (case["size"], case["batch"]) == (size, batch)
        and (values["arm"], values["backend"], ratio_of(values)) == (name, backend, ratio)
        and (values["config"] is None or values["config"]["max_downsample"] is None)
        and (name != "limit" or values["attention"] == "plain")
    )


PROGRAMS = ("predictor", "onnxruntime")


def speed_table(language: int) -> Iterator[list[Figure]]:
    """What runs, size, batch and backend; both times, their ratio, and both peaks of memory."""
    rows = [("sd15_block", "eager", 1024, 1)]
    rows += [("emoji_unet", backend, size, 2) for size in (128, 256) for backend in ("eager", *PROGRAMS)]
    rows += [("sd15_unet", "eager", 512, 2), ("sd15_unet", "sliced", 512, 2)]
    rows += [("emoji_pipeline_256", backend, 256, 4) for backend in ("eager", *PROGRAMS)]
    for file, backend, size, batch in rows:
        names = ("memory-efficient", "both") if backend == "sliced" else ("plain", "tome")
        backend_label = "eager" if backend == "sliced" else backend
        plain, merged = (arm(file, name, backend_label, size, batch) for name in names)
        label = file if file.startswith("emoji") else (file, backend)
        if file.startswith("emoji"):
            assert f"`{Path(plain.case['model']).name}`" in LABELS[label][language], "the model that was measured"
        yield [
            Figure(LABELS[label][language], f"label of {plain.field}"),
            Figure(f"{size} px", f"{plain.field}: size"),
            Figure(f"{batch}", f"{plain.field}: batch"),
            Figure(LABELS[backend_label][language], f"{plain.field}: backend"),
            plain.seconds(".2f"),
            merged.seconds(".2f"),
            merged.speed_up(plain),
            plain.gigabytes(),
            merged.gigabytes(),
        ]


def predictor_table() -> Iterator[list[Figure]]:
    """One pass of the bundled UNet: milliseconds, speed-ups, and the merged predictor against plain."""
    for size in (128, 256):
        for backend in ("eager", *PROGRAMS, "openvino", "PyTorch"):
            plain, merged = (arm("emoji_unet", name, backend, size) for name in ("plain", "tome"))
            limit = None if backend == "PyTorch" else arm("emoji_unet", "limit", backend, size)
            none = Figure("–", f"{plain.field}: PyTorch has no limit")
            yield [
                Figure(f"{size} px", f"{plain.field}: size"),
                Figure(backend, f"{plain.field}: backend"),
                *(timed.seconds(".0f", 1e-3) if timed else none for timed in (plain, merged, limit)),
                merged.speed_up(plain),
                limit.speed_up(plain) if limit else none,
                arm("emoji_unet", "tome", "predictor", size).speed_up(plain),
            ]


def runtimes_table() -> Iterator[list[Figure]]:
    """Threads, size and batch; milliseconds of a plain pass, of merged ones, and of tomesd in bf16; their ratios."""
    for threads in (1, 2):
        file = f"unet_runtimes_{threads}"
        for size in (128, 256):
            for batch in (2, 8):
                plain = arm(file, "plain", "predictor", size, batch)
                tomesd = arm(file, "tome", "PyTorch-bf16", size, batch)
                names = (*PROGRAMS, "openvino", "openvino-bf16")
                predictor, onnxruntime, openvino, bf16 = (arm(file, "tome", name, size, batch) for name in names)
                yield [
                    Figure(f"{read(f'results/{file}.json')['threads']}", f"{file}.json: threads"),
                    Figure(f"{size} px", f"{file}.json: size"),
                    Figure(f"{batch}", f"{file}.json: batch"),
                    *(each.seconds(".0f", 1e-3) for each in (plain, predictor, onnxruntime, openvino, bf16, tomesd)),
                    onnxruntime.speed_up(predictor),
                    bf16.speed_up(plain),
                    bf16.speed_up(tomesd),
                ]


def against_tomesd(backend: str, size: int) -> Figure:
    """The speed-up of merged programs against PyTorch with tomesd."""
    return arm("emoji_unet", "tome", backend, size).speed_up(arm("emoji_unet", "tome", "PyTorch", size))


def bfloat16_speed_up(program: str) -> Figure:
    """Of a program by oneDNN's bfloat16, with the operations that Paddle chooses."""
    file = "experiments_bfloat16"
    (row,) = (
        row
        for row in read(f"results/{file}.json")["bfloat16"]["programs"]
        if row["program"] == program and not row["set_bfloat16_op"]
    )
    return Figure(f"{row['times_faster']:.2f}×", f"{file}.json, {program}: times_faster")


def torch_speed_up() -> Figure:
    """Of PyTorch with tomesd against eager Paddle with ToMe."""
    return arm("emoji_unet", "tome", "PyTorch").speed_up(arm("emoji_unet", "tome"), ".1f", sign="")


def near_limit() -> tuple[Figure, Figure, Figure]:
    """How many of our arms are within 3 % of the free-merge limit, of how many, and how far one is below it.

    All that are near are below: the documents call that noise.
    """
    keys = ("backend", "attention", "kept")
    where = ("max_downsample", "merge_attn", "merge_crossattn", "merge_mlp")
    over = [
        Arm(file, case, limit).times_faster(Arm(file, case, values))  # the time of ours over that of the limit
        for file in ("emoji_unet", "sd15_block")
        for case in read(f"results/{file}.json")["cases"]
        for limit in case["arms"]
        for values in case["arms"]
        if (limit["arm"], values["arm"]) == ("limit", "tome")
        and all(limit[key] == values[key] for key in keys)
        and all(limit["config"][key] == values["config"][key] for key in where)
    ]
    field = "emoji_unet.json, sd15_block.json: seconds of tome against limit"
    near = [ratio for ratio in over if ratio <= 1.03]
    assert max(near) < 1
    counts = Figure(f"{len(near)}", field), Figure(f"{len(over)}", field)
    return *counts, Figure(f"{100 * (1 - min(over)):.1f} %", field)


def noise(*backends: str) -> Figure:
    """By how much a speed-up differs that was measured in several results; of these backends, or of all."""
    speed_ups: dict[tuple, list[float]] = {}
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    for name, result in ((path.stem, read(f"results/{path.name}")) for path in results):
        for case in result["cases"] if result["kind"] == "speed" else ():
            about = (case["model"], case["scope"], case["size"], case["batch"], case["dtype"], result["threads"])
            plain = {row["backend"]: row for row in case["arms"] if row["arm"] == "plain"}
            for row in case["arms"]:
                if row["arm"] == "tome" and row["seconds"] and (not backends or row["backend"] in backends):
                    config = replace(ToMeConfig(**row["config"]), use_rand=True)
                    if config.max_downsample == 1:  # the bundled models' shallowest level, which is the default
                        config = replace(config, max_downsample=None)
                    times = Arm(name, case, row).times_faster(Arm(name, case, plain[row["backend"]]))
                    speed_ups.setdefault((*about, row["backend"], config), []).append(times)
    repeated = [values for values in speed_ups.values() if len(values) > 1]
    assert len(repeated) >= 5
    return Figure(
        f"{100 * max(max(values) / min(values) - 1 for values in repeated):.0f} %", "results/*.json: seconds"
    )


def speed_up(file: str, backend: str = "eager", size: int = 128, batch: int = 2, form: str = ".2f") -> Figure:
    """Of ToMe at ratio 0.5 against plain."""
    plain, merged = (arm(file, name, backend, size, batch) for name in ("plain", "tome"))
    return merged.speed_up(plain, form)


def speed_up_of_sliced() -> Figure:
    """The same with attention slicing, of Stable Diffusion 1.5's UNet."""
    return arm("sd15_unet", "both", size=512).speed_up(arm("sd15_unet", "memory-efficient", size=512))


def level_speed_up(size: int, level: int) -> Figure:
    """Of ToMe at ratio 0.5 up to a level against plain, in unet_levels.json."""
    (case,) = (case for case in read("results/unet_levels.json")["cases"] if case["size"] == size)
    plain, merged = (
        next(
            Arm("unet_levels", case, values)
            for values in case["arms"]
            if (values["config"] or {}).get("max_downsample") == at
        )
        for at in (None, level)
    )
    return merged.speed_up(plain)


def speed_up_by_macs(file: str, size: int, batch: int, form: str = ".2f") -> Figure:
    """What multiply-accumulates allow at ratio 0.5."""
    plain, merged = (arm(file, name, "eager", size, batch) for name in ("plain", "tome"))
    field = f"{merged.field}: macs; {plain.field}: macs"
    return Figure(f"{plain.values['macs'] / merged.values['macs']:{form}}×", field)


def rounds_of_speed_table() -> Figure:
    (rounds,) = {read(f"results/{file}.json")["rounds"] for file in SPEED_TABLE_FILES}
    return Figure(f"{rounds}", f"{', '.join(SPEED_TABLE_FILES)}: rounds")


def steps_of_images(size: int) -> Figure:
    (steps,) = {case["steps"] for case in read(f"results/emoji_pipeline_{size}.json")["cases"]}
    return Figure(f"{steps}", f"emoji_pipeline_{size}.json: cases.steps")


# Quality -------------------------------------------------------------------------------------------------------------

IMAGES = {  # kind of images → result
    "128": "results/frontier_128.json",
    "256": "results/quality_256.json",
    "photographs_128": "results/frontier_photographs_128.json",
    "photographs_256": "results/frontier_photographs_256.json",
    "frontier_256": "results/frontier_256.json",
}
TIMES = {"128": "frontier_speed_128", "256": "emoji_256_unet"}
TOMESD = (ToMeConfig(ratio=0.5, **TOMESD_SETTINGS), ("tomesd's", "tomesd 的方法"))
METHODS = {  # of the READMEs' table, by size
    "128": [
        *((ToMeConfig(ratio=ratio), LABELS["default"]) for ratio in (0.5, 0.7)),
        (
            ToMeConfig(ratio=0.75, merge_attn="kv"),
            ('keys and values (`merge_attn="kv"`)', '只合并键和值（`merge_attn="kv"`）'),
        ),
        TOMESD,
    ],
    "256": [*((ToMeConfig(ratio=ratio), LABELS["default"]) for ratio in (0.25, 0.5, 0.75)), TOMESD],
}
DEFAULT = ToMeConfig(ratio=0.5)
TWO_LEVELS = ToMeConfig(ratio=0.45, max_downsample=2)
NONE = Figure("–", "not measured")


def quality_table(language: int) -> Iterator[list[Figure]]:
    """Each size and method: ratio, distance of prompts and photographs, and the time of one pass in the predictor.

    The last row of a size is another seed of the same prompt.
    """
    for size, methods in METHODS.items():
        photographs = f"photographs_{size}"
        about = Figure(f"{size} px", f"{IMAGES[size]}: size")
        for config, labels in methods:
            drawn, from_photograph = _drawn(size, config), _drawn(photographs, config)
            assert drawn is not None
            yield [
                about,
                Figure(labels[language], f"label of {config.method}"),
                Figure(f"{config.ratio:g}", f"{IMAGES[size]}: settings.config.ratio"),
                _median(size, drawn, "psnr", 1),
                _median(size, drawn, "perceptual", 4),
                _median(photographs, from_photograph, "psnr", 1) if from_photograph else NONE,
                *_pass_times(size, config),
            ]
        other, of_photographs = (read(IMAGES[kind])["calibration"][OTHER_SEEDS] for kind in (size, photographs))
        medians = [_median(size, other, "psnr", 1), _median(size, other, "perceptual", 4)]
        medians.append(_median(photographs, of_photographs, "psnr", 1))
        yield [about, Figure(LABELS[OTHER_SEEDS][language], "label"), NONE, *medians, NONE, NONE, NONE]


def _pass_times(size: str, config: ToMeConfig) -> list[Figure]:
    """Of one pass: plain and merged in milliseconds, and the speed-up."""
    (case,) = read(f"results/{TIMES[size]}.json")["cases"]
    arms = [Arm(TIMES[size], case, values) for values in case["arms"] if values["backend"] == "predictor"]
    (plain,) = (one for one in arms if one.values["arm"] == "plain")
    fixed = replace(config, use_rand=False)  # `bench` times fixed dst: random dst take the same time
    (merged,) = (one for one in arms if one.values["arm"] == "tome" and ToMeConfig(**one.values["config"]) == fixed)
    return [plain.seconds(".0f", 1e-3), merged.seconds(".0f", 1e-3), merged.speed_up(plain)]


def rounds_of_pass(size: str) -> Figure:
    return value(f"results/{TIMES[size]}.json", "rounds")


def _drawn(kind: str, config: ToMeConfig) -> dict[str, Any] | None:
    """The setting of a result that merges by this config in Paddle."""
    settings = [row for row in read(IMAGES[kind])["settings"] if row["framework"] == "Paddle"]
    return next((row for row in settings if ToMeConfig(**row["config"]) == config), None)


def _median(kind: str, setting: dict[str, Any], measure: str, digits: int) -> Figure:
    return Figure(f"{statistics.median(setting['pairs'][measure]):.{digits}f}", f"{IMAGES[kind]}: pairs.{measure}")


def psnr(file: str, config: ToMeConfig) -> Figure:
    """The median of the setting of a result that merges by this config."""
    (drawn,) = [row for row in read(f"results/{file}.json")["settings"] if ToMeConfig(**row["config"]) == config]
    return Figure(f"{statistics.median(drawn['pairs']['psnr']):.1f}", f"{file}.json: pairs.psnr")


def gain(kind: str) -> Figure:
    """Of the default against tomesd's method, both at ratio 0.5, in dB."""
    ours, theirs = (statistics.median(_drawn(kind, config)["pairs"]["psnr"]) for config in (DEFAULT, TOMESD[0]))
    return Figure(f"{ours - theirs:.0f}", f"{IMAGES[kind]}: pairs.psnr")


def images_per_setting(kind: str) -> Figure:
    return Figure(f"{len(read(IMAGES[kind])['prompts'])}", f"{IMAGES[kind]}: prompts")


def steps_of_prompts() -> Figure:
    (steps,) = {read(IMAGES[size])["steps"] for size in METHODS}
    return Figure(f"{steps}", f"{IMAGES['128']}, {IMAGES['256']}: steps")


def change_against_seed(kind: str) -> Figure:
    """How far the default at ratio 0.5 moves an image, as a share of what another seed does."""
    other = read(IMAGES[kind])["calibration"][OTHER_SEEDS]["pairs"]["perceptual"]
    share = statistics.median(_drawn(kind, DEFAULT)["pairs"]["perceptual"]) / statistics.median(other)
    return Figure(f"{share:.0%}".replace("%", " %"), f"{IMAGES[kind]}: pairs.perceptual")


def strength_of_photographs() -> Figure:
    (strength,) = {read(IMAGES[f"photographs_{size}"])["strength"] for size in METHODS}
    return Figure(f"{strength:g}", "frontier_photographs_*.json: strength")


def methods_that_kid_separates(none: str) -> Figure:
    """The methods whose KID lies above that of plain images by more than two standard deviations of both."""
    above = []
    for size, methods in METHODS.items():
        floor = read(IMAGES[size])["calibration"][OTHER_SEEDS]["kid"]
        for config, _ in methods:
            kid = _drawn(size, config)["kid"][f"to {OTHER_SEEDS}"]
            if kid["mean"] - floor["mean"] > 2 * math.hypot(kid["std"], floor["std"]):
                above.append(f"{config.describe()} at {size} px")
    return Figure(", ".join(above) or none, f"{IMAGES['128']}, {IMAGES['256']}: settings.kid")


def setting(name: str) -> dict[str, Any]:
    (match,) = [setting for setting in read("results/quality.json")["settings"] if setting["name"] == name]
    return match


def perceptual(name: str) -> Figure:
    distance = statistics.median(setting(name)["pairs"]["perceptual"])
    return Figure(f"{distance:.4f}", f"quality.json, {name}: pairs.perceptual")


EXPERIMENTS = {  # name in the result → label in docs/methods.md
    "tomesd 0.5": "tomesd's method",
    "proportional 0.5": "proportional",
    "window 16 0.5": "windows of 16, the default",
    "window 8 0.5": "windows of 8",
    "laplacian 0.5": "dst of the least Laplacian in each cell (L-GTM of BiGain)",
    "fixed dst 0.5": "dst is the first token of each cell",
    "projection 0.5": "metric projected to 32 random channels",
    "first block's plan 0.5": "plan of the first block in all blocks",
    "plan kept for 2 steps 0.5": "plan kept for 2 steps",
    "plan kept for 5 steps 0.5": "plan kept for 5 steps",
    "every step 0.375": "windows of 16",
    "first half of the steps 0.75": "windows of 16, in the first half of the steps only",
    "second half of the steps 0.75": "windows of 16, in the second half of the steps only",
    "window 8 0.75": "windows of 8",
    "window 16 0.75": "windows of 16",
    "window 16, half shift 0.75": "windows of 16, shifted by half in every second block",
    "window 8, fall-back 0.75": "windows of 8, the worst pairs matched in the whole grid",
    "window 16, fall-back 0.75": "windows of 16, the worst pairs matched in the whole grid",
    "kv 0.75": "keys and values",
    "kv window 16 0.75": "keys and values, windows of 16",
    "queries 0.25, kv 0.75": "keys and values, and a quarter of the queries",
    "queries 0.5, kv 0.75": "keys and values, and half of the queries",
}


def experiments_table() -> Iterator[list[Figure]]:
    """Each variant that docs/methods.md names: ratio and median PSNR of prompts and photographs."""
    variants = {row["name"]: row for row in read("results/experiments.json")["variants"]}
    for name, label in EXPERIMENTS.items():
        row = variants[name]
        field = f"experiments.json: {name}"
        psnr = [Figure(f"{row[kind]['psnr']:.1f}", f"{field}: {kind}.psnr") for kind in ("prompts", "photographs")]
        yield [Figure(label, field), Figure(f"{row['settings']['ratio']:g}", f"{field}: settings.ratio"), *psnr]


SCHEDULES_AND_LEVELS = {  # name in the result → label in docs/methods.md
    **{
        f"{method}, {ratios}": f"{label}, {ratios}"
        for method, label in (("default", "the default"), ("tomesd's", "tomesd's method"))
        for ratios in ("0.5", "0.6, then 0.4", "0.75, then 0.25", "0.4, then 0.6", "0.25, then 0.75")
    },
    "level 1 0.525": "the default, 0.525",
    "level 1 0.55": "the default, 0.55",
    "level 1 0.5, level 2 0.125": "the default, 0.5, and 0.125 at level 2",
    "level 1 0.5, level 2 0.25": "the default, 0.5, and 0.25 at level 2",
    "level 1 0.45, level 2 0.45": "the default, 0.45 at levels 1 and 2",
    "level 1 0.5, level 2 0.5": "the default, 0.5 at levels 1 and 2",
}


def schedules_table() -> Iterator[list[Figure]]:
    """Each schedule and ratio per level that docs/methods.md names: MACs saved and median PSNR of prompts."""
    variants = {row["name"]: row for row in read("results/experiments_ratios.json")["variants"]}
    for name, label in SCHEDULES_AND_LEVELS.items():
        row, field = variants[name], f"experiments_ratios.json: {name}"
        saved = Figure(f"{row['macs_saved']:.1%}".replace("%", " %"), f"{field}: macs_saved")
        yield [Figure(label, field), saved, Figure(f"{row['prompts']['psnr']:.1f}", f"{field}: prompts.psnr")]


ALTERNATIVES = {"128": "results/alternatives_emoji_sd_128.json"}
ARMS = {  # name in the results → label in docs/methods.md
    "default 0.5": "the default, 0.5",
    "default 0.7": "the default, 0.7",
    "kv 0.75": "keys and values, 0.75",
    "ToDo 0.75": "ToDo",
    "16 steps": "16 steps",
}


def alternatives_table() -> Iterator[list[Figure]]:
    """Each arm that docs/methods.md names: fewer MACs, PSNR and ST-LPIPS at each size."""
    for name, label in ARMS.items():
        row = [Figure(label, name)]
        for size in ALTERNATIVES:
            row += [alternative(size, name, measure) for measure in ("macs", "psnr", "perceptual")]
        yield row


def alternative(size: str, name: str, measure: str) -> Figure:
    """Of an arm: plain's MACs over its own, or the median distance."""
    (arm,) = [arm for arm in read(ALTERNATIVES[size])["arms"] if arm["name"] == name]
    forms = {"macs": f"{1 / arm['macs']:.2f}×", "psnr": f"{arm['psnr']:.1f}", "perceptual": f"{arm['perceptual']:.4f}"}
    return Figure(forms[measure], f"{ALTERNATIVES[size]}, {name}: {measure}")


def images_of_alternatives(size: str) -> Figure:
    return Figure(f"{len(read(ALTERNATIVES[size])['prompts'])}", f"{ALTERNATIVES[size]}: prompts")


# Operations, ControlNet, load ----------------------------------------------------------------------------------------


def operations_table() -> Iterator[list[Figure]]:
    """Each method with plan, merge, unmerge and their sum, as `bench ops` writes them."""
    rows = read("ops.json")["methods"]
    cells = operations.describe_operations({**read("ops.json"), "growth": {"plans": []}})[-len(rows) :]
    for row, line in zip(rows, cells, strict=True):
        yield [Figure(cell, f"ops.json: methods, {row['method']}") for cell in line.strip("| ").split(" | ")]


def operations_case() -> Figure:
    case = read("ops.json")["case"]
    grid = f"{case['height']}×{case['width']} tokens"
    return Figure(f"B={case['batch']}, {grid}, C={case['channels']}, ratio {case['ratio']}", "ops.json: case")


def edge_distance(row: str) -> Figure:
    distance = read("controlnet_canny_128.json")["edge_distances_px"][row]["input_to_output"]
    return Figure(f"{distance:.1f}", f"controlnet_canny_128.json: edge_distances_px.{row}.input_to_output")


def controlnet_speed_up() -> Figure:
    (merged,) = [arm for arm in read("controlnet_canny_128.json")["arms"] if arm["arm"] == "0.5"]
    return Figure(f"{merged['speed_up']:.2f}×", "controlnet_canny_128.json: arms, 0.5, speed_up")


def hires_speed_up() -> Figure:
    """Of both passes together, merged in the second."""
    seconds = read("hires_fix_256.json")["seconds_of_both_passes"]
    return Figure(f"{seconds['plain'] / seconds['0.5']:.2f}×", "hires_fix_256.json: seconds_of_both_passes")


def one_client_table() -> Iterator[list[Figure]]:
    for nth, row in enumerate(read("results/load.json")["one_client"]["images"]):
        field = f"load.json: one_client.images[{nth}]"
        yield [
            Figure(f"{row['size'].partition('x')[0]} px", f"{field}.size"),
            Figure(f"{row['ratio']:g}", f"{field}.ratio"),
            Figure(f"{row['seconds_per_image']:.2f}", f"{field}.seconds_per_image"),
            Figure(f"{row['images_per_hour']:,}", f"{field}.images_per_hour"),
        ]


def load_table() -> Iterator[list[Figure]]:
    for client, seconds in read("results/load.json")["seconds_to_images"].items():
        yield [
            Figure(text, f"load.json: seconds_to_images.{client}")
            for text in (client, f"{seconds['p50']:.1f}", f"{seconds['p95']:.1f}")
        ]


def value(file: str, path: str, form: str = "") -> Figure:
    """A field of a result; a version without what follows its "+"."""
    content: Any = read(file)
    for key in path.split("."):
        content = content[key]
    return Figure(f"{content:{form}}".partition("+")[0], f"{file}: {path}")


def load_option(name: str) -> Figure:
    """An option of the command, or of the server that it started."""
    result = read("results/load.json")
    words = [*result["command"].split(), *result["serve"]]
    return Figure(words[words.index(name) + 1], f"load.json: command, serve: {name}")


def answers(status: int, clients: Sequence[str]) -> Figure:
    counts = read("results/load.json")["answers"]
    total = sum(count for key, count in counts.items() if key.split() in [[client, f"{status}"] for client in clients])
    return Figure(f"{total}", f"load.json: answers, {status}")


def images_per_hour() -> Figure:
    """Of one core: the bundled model at 128 px, ratio 0.5."""
    rows = read("results/load.json")["one_client"]["images"]
    (row,) = [row for row in rows if (row["size"], row["ratio"]) == ("128x128", 0.5)]
    return Figure(f"{row['images_per_hour']}", "load.json: one_client.images, 128x128, ratio 0.5, images_per_hour")


def machines(cores: int) -> Figure:
    """How many machines generate a million images a day at a utilisation of 0.7."""
    per_core, field = images_per_hour()
    total = math.ceil(1_000_000 / (24 * int(per_core)) / 0.7)
    return Figure(f"{math.ceil(total / cores)}", field)


def pipeline_classes() -> Figure:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8").partition("## Added after")[0]
    return Figure(f"{len(re.findall(r'^[|] `', page, re.MULTILINE))}", "docs/families.md: rows of 0.29.0")
