"""Every figure in the documents is the one in the committed result that it comes from, at its place in the text."""

import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SPEED_FILES = ("sd15_unet", "sd15_block", "emoji_unet", "emoji_pipeline_128", "emoji_pipeline_256")
MODEL_LABELS = {  # the first column of the speed table: result file, attention → English, Chinese
    ("sd15_unet", "plain"): ("Stable Diffusion 1.5, one UNet pass", "Stable Diffusion 1.5，UNet 一次前向"),
    ("sd15_unet", "sliced"): ("the same, attention slicing", "同上，注意力切片"),
    ("sd15_block", "plain"): ("its top-level block alone", "仅其最上层的一个模块"),
    ("emoji_pipeline", "plain"): ("bundled model, whole images", "自带模型，完整生成"),
}
BACKEND_LABELS = {"eager": ("eager", "动态图"), "predictor": ("predictor", "预测器"), "PyTorch": ("PyTorch", "PyTorch")}


class Figure(NamedTuple):
    """A figure as a document writes it, and the field of a result that it comes from."""

    text: str
    field: str


@lru_cache
def read(path: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / path).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Arm:
    """One arm of one case of a speed result."""

    file: str
    case: dict[str, Any]
    values: dict[str, Any]

    @property
    def field(self) -> str:
        arm = " ".join(str(self.values[key]) for key in ("arm", "backend", "ratio", "attention"))
        return f"results/{self.file}.json, {self.case['size']} px, batch {self.case['batch']}, {arm}"

    def seconds(self, form: str = ".1f", unit: float = 1.0) -> Figure:
        return Figure(f"{statistics.median(self.values['seconds']) / unit:{form}}", f"{self.field}: seconds")

    def gigabytes(self) -> Figure:
        return Figure(f"{self.values['peak_memory_bytes'] / 1e9:.2f}", f"{self.field}: peak_memory_bytes")

    def relative_time(self, base: "Arm") -> float:
        """The median over the rounds of this arm's seconds divided by the base's."""
        pairs = zip(self.values["seconds"], base.values["seconds"], strict=True)
        return statistics.median(own / other for own, other in pairs)

    def speed_up(self, base: "Arm", form: str = ".2f") -> Figure:
        pairs = zip(base.values["seconds"], self.values["seconds"], strict=True)
        ratio = statistics.median(other / own for other, own in pairs)
        return Figure(f"{ratio:{form}}×", f"{self.field}: seconds, against {base.values['arm']}'s")

    def macs_allow(self, base: "Arm", form: str) -> Figure:
        return Figure(f"{base.values['macs'] / self.values['macs']:{form}}×", f"{self.field}: macs, against plain's")


def cases(file: str) -> Iterator[dict[str, Any]]:
    yield from read(f"results/{file}.json")["cases"]


def arm(file: str, name: str, backend: str = "eager", ratio: float = 0.5, size: int = 128, batch: int = 2) -> Arm:
    """The only arm of that name; arms that do not merge have ratio 0."""
    merges = name not in ("plain", "memory-efficient")
    (match,) = [
        Arm(file, case, values)
        for case in cases(file)
        for values in case["arms"]
        if (case["size"], case["batch"], values["arm"], values["backend"]) == (size, batch, name, backend)
        and values["ratio"] == (ratio if merges else 0)
        and values["max_downsample"] is None
    ]
    return match


def quality_setting(name: str) -> dict[str, Any]:
    (setting,) = [setting for setting in read("results/quality.json")["settings"] if setting["name"] == name]
    return setting


def perceptual(name: str) -> Figure:
    median = statistics.median(quality_setting(name)["pairs"]["perceptual"])
    return Figure(f"{median:.4f}", f"results/quality.json: setting {name}, pairs.perceptual")


def within_limit() -> tuple[Figure, Figure]:
    """How many arms are within 3 % of the free-merge limit, and of how many."""
    near = [
        Arm(file, case, values).relative_time(Arm(file, case, limit)) <= 1.03
        for file in SPEED_FILES
        for case in cases(file)
        for limit in case["arms"]
        for values in case["arms"]
        if limit["arm"] == "limit"
        and values["arm"] == "tome"
        and all(values[key] == limit[key] for key in ("backend", "attention", "ratio", "max_downsample"))
    ]
    field = f"results/{{{','.join(SPEED_FILES)}}}.json: seconds of tome against limit"
    return Figure(str(sum(near)), field), Figure(str(len(near)), field)


# Tables --------------------------------------------------------------------------------------------------------------


def speed_table(language: int) -> Iterator[list[Figure]]:
    """Ratio 0.5: what runs, size, batch and backend; plain's and ToMe's seconds, their ratio, and both peaks."""
    rows = [("sd15_unet", "plain", "eager", 512, 2), ("sd15_unet", "sliced", "eager", 512, 2)]
    rows += [("sd15_block", "plain", "eager", size, 1) for size in (1024,)]
    rows += [
        (f"emoji_pipeline_{size}", "plain", backend, size, batch)
        for size, batch in ((128, 1), (128, 8), (256, 1), (256, 8))
        for backend in ("eager", "predictor")
    ]
    for file, attention, backend, size, batch in rows:
        names = ("plain", "tome") if attention == "plain" else ("memory-efficient", "both")
        plain, merged = (arm(file, name, backend, size=size, batch=batch) for name in names)
        label = MODEL_LABELS[re.sub(r"_(128|256)$", "", file), attention]
        yield [
            Figure(label[language], f"tests: the label of {file}"),
            Figure(f"{size} px", f"{plain.field}: size"),
            Figure(str(batch), f"{plain.field}: batch"),
            Figure(BACKEND_LABELS[backend][language], f"{plain.field}: backend"),
            plain.seconds(),
            merged.seconds(),
            merged.speed_up(plain),
            plain.gigabytes(),
            merged.gigabytes(),
        ]


def quality_table(language: int) -> Iterator[list[Figure]]:
    """Each ratio, then another seed of the same prompt."""
    result = read("results/quality.json")
    for setting in result["settings"]:
        if setting["group"] == "ratio":
            label = Figure(f"{setting['config']['ratio']:g}", "results/quality.json: settings.config.ratio")
            yield [label, *quality_cells(setting["name"], setting["pairs"], setting["kid"][OTHER_SEEDS])]
    other = result["calibration"][OTHER_SEEDS]
    label = Figure(("another seed", "换一个种子")[language], "tests: the label of the last row")
    yield [label, *quality_cells(OTHER_SEEDS, other["pairs"], other["kid"])]


OTHER_SEEDS = "plain, other seeds"


def quality_cells(name: str, pairs: dict[str, list[float]], kid: dict[str, float]) -> list[Figure]:
    cells = [
        Figure(f"{statistics.median(pairs[measure]):.{digits}f}", f"results/quality.json: {name}, pairs.{measure}")
        for measure, digits in (("psnr", 1), ("ssim", 3), ("perceptual", 4))
    ]
    text = f"{1000 * kid['mean']:.1f} ± {1000 * kid['std']:.1f}"
    return [*cells, Figure(text, f"results/quality.json: {name}, kid {OTHER_SEEDS}")]


def operations_table() -> Iterator[list[Figure]]:
    for name, row in read("ops.json")["milliseconds"].items():
        yield [Figure(name, "ops.json: milliseconds")] + [
            Figure(text, f"ops.json: milliseconds.{name}")
            for text in (f"{row['ours']:.2f}", f"{row['built-in']:.2f}", f"{row['times faster']:.1f}×")
        ]


def predictor_table() -> Iterator[list[Figure]]:
    """One pass of the bundled UNet: milliseconds, speed-ups, and the merged predictor against plain here."""
    for size in (128, 256):
        for backend in ("eager", "predictor", "PyTorch"):
            plain = arm("emoji_unet", "plain", backend, size=size)
            merged = arm("emoji_unet", "tome", backend, size=size)
            limit = None if backend == "PyTorch" else arm("emoji_unet", "limit", backend, size=size)
            none = Figure("–", f"results/emoji_unet.json: no limit in {backend}")
            yield [
                Figure(f"{size} px", f"{plain.field}: size"),
                Figure(backend, f"{plain.field}: backend"),
                *(one.seconds(".0f", 1e-3) if one else none for one in (plain, merged, limit)),
                merged.speed_up(plain),
                limit.speed_up(plain) if limit else none,
                arm("emoji_unet", "tome", "predictor", size=size).speed_up(plain),
            ]


# Chosen by place: the document, the heading above the table, and the rows below its header.
TABLES = {
    ("README.md", "Speed"): lambda: speed_table(0),
    ("README_zh.md", "速度"): lambda: speed_table(1),
    ("README.md", "Image quality"): lambda: quality_table(0),
    ("README_zh.md", "图像质量"): lambda: quality_table(1),
    ("docs/comparison.md", "The operations"): operations_table,
    ("docs/inference.md", "Speed"): predictor_table,
}


if __name__ == "__main__":
    for key, rows in TABLES.items():
        print(key)
        for row in rows():
            print("| " + " | ".join(cell.text for cell in row) + " |")
    print(within_limit())
