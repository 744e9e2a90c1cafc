"""Write the figures of the committed results into the documents (`make figures`); `--check` only compares.

In a document, the function NAME in LOOKUPS computes

- a figure between two comments, `<!--= NAME ARGUMENT… -->1.29<!--/-->`. It does not begin a line, because Markdown
  takes such a line as HTML.
- the last cells of a table's row that ends in a comment, `| windows of 8 | 19.34 | 5.39 <!--: NAME ARGUMENT… --> |`.
  None leaves a cell as it is: it is a label in the document's language. The mark has no "|", which would end the cell.
"""

import argparse
import itertools
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import alternatives
import gpu_onnx

from ppdiffusers_tome.config import ToMeConfig, parse_settings
from ppdiffusers_tome.evaluation.clock import ratio_within_rounds
from ppdiffusers_tome.evaluation.markdown import NOT_MEASURED
from ppdiffusers_tome.evaluation.quality.quality_report import differs_by_kid, read_frame

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FOLDERS = (RESULTS, RESULTS.parent, ROOT / "examples" / "emoji_sd" / "controlnet")
DOCUMENTS = [
    *ROOT.glob("README*.md"),
    *sorted((ROOT / "docs").glob("**/*.md")),
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "examples" / model / "README.md" for model in ("emoji_sd", "scenes_sd")),
]
MARKED = re.compile(r"<!--= (.+?) -->(.*?)<!--/-->")
ROW = re.compile(r"^\| (.*) <!--: (.+?) --> \|$", re.MULTILINE)

PLACE = ("model", "scope", "size", "batch", "dtype", "backend")  # these fields identify the case of an arm


def update(text: str) -> str:
    """The text of a document with all figures and rows computed."""

    def row(match: re.Match) -> str:
        cells, computed = match[1].split(" | "), call(match[2])
        assert len(computed) <= len(cells), f"{match[0]}: it has fewer cells than {computed}"
        first = len(cells) - len(computed)
        cells[first:] = [old if new is None else new for old, new in zip(cells[first:], computed, strict=True)]
        return f"| {' | '.join(cells)} <!--: {match[2]} --> |"

    broken = re.search(r"^<!--= .*", text, re.MULTILINE)
    assert not broken, f"{broken and broken[0]}: a figure must not begin a line"
    ends = [len(re.findall(mark, text)) for mark in ("<!--= ", "<!--/")]
    assert [len(MARKED.findall(text))] * 2 == ends, "half a mark"
    assert len(ROW.findall(text)) == len(re.findall("<!--[:|]", text)), "a mark of a row is not at its end"
    return ROW.sub(row, MARKED.sub(lambda match: f"<!--= {match[1]} -->{call(match[1])}<!--/-->", text))


def call(words: str) -> Any:
    """Call the function of LOOKUPS that a mark names, with the arguments in the mark."""
    name, *arguments = words.split()
    if name not in LOOKUPS:
        raise KeyError(f"{words!r} names no function: choose from {', '.join(sorted(LOOKUPS))}")
    return LOOKUPS[name](*arguments)


@lru_cache
def read(file: str) -> dict[str, Any]:
    """A result of the project, by its file name without .json."""
    path = next(path for folder in FOLDERS if (path := folder / f"{file}.json").is_file())
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


def arms(file: str) -> list[dict[str, Any]]:
    """The arms of a speed result, each with the fields of its case."""
    return [{**case, **row} for case in read(file)["cases"] for row in case["arms"]]


def arm(file: str, name: str, backend: str = "eager", size: int | str = 128, batch: int | str = 2) -> dict[str, Any]:
    """The arm of that name at ratio 0.5, or without merging; of several methods the first."""

    def fits(row: dict[str, Any]) -> bool:
        config = row["config"] or {"ratio": 0.5, "max_downsample": None}
        return (
            (row["arm"], row["backend"], f"{row['size']}", f"{row['batch']}") == (name, backend, f"{size}", f"{batch}")
            and (config["ratio"], config["max_downsample"]) == (0.5, None)
            and (name != "limit" or row["attention"] == "plain")
        )

    return next(filter(fits, arms(file)))


def agree(row: dict[str, Any], other: dict[str, Any], *keys: str) -> bool:
    return all(row[key] == other[key] for key in keys)


def plain_of(row: dict[str, Any], file: str) -> dict[str, Any]:
    """The plain arm of a case."""
    (plain,) = [base for base in arms(file) if base["arm"] == "plain" and agree(row, base, *PLACE)]
    return plain


def times(row: dict[str, Any], base: dict[str, Any]) -> float:
    """How many times as fast as another arm: the median of the ratios within a round."""
    return ratio_within_rounds(base["seconds"], row["seconds"]).median


def speed_up(file: str, backend: str, size: str, batch: str = "2", form: str = ".2f") -> str:
    """How many times as fast merging by the default at ratio 0.5 is as plain."""
    return f"{times(arm(file, 'tome', backend, size, batch), arm(file, 'plain', backend, size, batch)):{form}}"


def memory(file: str, name: str, size: str, batch: str = "2") -> str:
    """The peak of an arm at ratio 0.5 or without merging, in GB."""
    return f"{arm(file, name, 'eager', size, batch)['peak_memory_bytes'] / 1e9:.1f}"


def macs_saved(file: str, size: str, batch: str = "2") -> str:
    """The share of the multiply-accumulates of a pass that merging at ratio 0.5 saves."""
    plain, merged = (arm(file, name, "eager", size, batch) for name in ("plain", "tome"))
    return f"{100 * (1 - merged['macs'] / plain['macs']):.0f} %"


def gpu_arms(name: str, size: str, batch: str) -> list[dict[str, Any]]:
    """An arm of the passes of Stable Diffusion 1.5's UNet on a GPU, in each turn that has it."""
    return [
        row
        for row in read("gpu_onnx")["rows"]
        if (row["arm"], f"{row['size']}", f"{row['batch']}") == (name, size, batch)
    ]


def on_gpu(size: str, batch: str, *name: str) -> str:
    """How many times as fast an arm is on a GPU as plain in the same runtime and form."""
    merged = gpu_arms(" ".join(name), size, batch)[0]
    plain = gpu_onnx.reference_of(merged, read("gpu_onnx")["rows"])
    return f"{statistics.median(a / b for a, b in zip(plain['ms'], merged['ms'], strict=True)):.2f}"


def against_tomesd(backend: str, size: str) -> str:
    """How many times as fast a merged pass is as PyTorch with tomesd."""
    return f"{times(arm('emoji_unet', 'tome', backend, size), arm('emoji_unet', 'tome', 'PyTorch', size)):.2f}×"


def tomesd_against_eager() -> str:
    """How many times as fast PyTorch with tomesd is as a merged pass in eager mode, at 128 px."""
    return f"{times(arm('emoji_unet', 'tome', 'PyTorch'), arm('emoji_unet', 'tome')):.1f}"


def near_limit(which: str) -> str:
    """How many arms are within 3 % of the free-merge limit, of how many, or by how much one is below it.

    Some of those within 3 % are below the limit: the documents call that noise.
    """
    over = []  # the time of each arm, divided by that of its limit
    where = ("max_downsample", "merge_attn", "merge_crossattn", "merge_mlp")
    for row, limit in itertools.product(arms("emoji_unet"), repeat=2):
        is_pair = (row["arm"], limit["arm"]) == ("tome", "limit") and agree(row, limit, *PLACE, "attention", "kept")
        if is_pair and agree(row["config"], limit["config"], *where):
            over.append(times(limit, row))
    near = [ratio for ratio in over if ratio <= 1.03]
    assert min(near) < 1 < max(near)
    return {"count": f"{len(near)}", "of": f"{len(over)}", "below": f"{100 * (1 - min(over)):.1f} %"}[which]


def noise() -> str:
    """By how much a speed-up differs that was measured in several results."""
    repeated = defaultdict(list)
    for file in [path.stem for path in RESULTS.glob("*.json") if read(path.stem)["kind"] == "speed"]:
        for row in arms(file):
            if row["arm"] == "tome" and row["seconds"]:
                case = tuple(row[key] for key in PLACE)
                repeated[case, read(file)["threads"], ToMeConfig(**row["config"])].append(
                    times(row, plain_of(row, file))
                )
    spreads = [max(speed_ups) / min(speed_ups) - 1 for speed_ups in repeated.values() if len(speed_ups) > 1]
    assert len(spreads) >= 5
    return f"{100 * max(spreads):.0f} %"


def gain(images: str) -> str:
    """By how many dB the default is nearer to plain than tomesd's method, both at ratio 0.5."""
    default, tomesd = (arm_of(images, f"{method} 0.5")["psnr"] for method in ("default", "tomesd"))
    return f"{default - tomesd:.0f}"


def seed_against_change(images: str) -> str:
    """How many times as much another seed changes an image as the default at ratio 0.5, by ST-LPIPS."""
    seed, default = (arm_of(images, name)["perceptual"] for name in ("another seed", "default 0.5"))
    return f"{seed / default:.0f}"


def separated_by_kid(none: str, *words: str) -> str:
    """The settings of scenes whose KID is above that of plain images by more than two standard deviations of both."""
    frame = read_frame(read("quality_scenes"))
    above = frame.index[differs_by_kid(frame) & (frame["group"] != "calibration")]
    return f"a difference in {', '.join(above)}" if len(above) else " ".join([none, *words])


def edges_near(direction: str, arm: str, *name: str) -> str:
    """The share of inner edges that have one of the other image within 2 px, with the bundled ControlNet."""
    return f"{100 * read('edges')['sets'][' '.join(name)][arm][direction]['inner']['within_2_px']:.0f} %"


def operations_case() -> str:
    return "B={batch}, {height}×{width} tokens, C={channels}, ratio {ratio}".format(**read("ops")["case"])


def load_option(name: str) -> str:
    """An option of the load test, or of the server that it started."""
    words = [*read("load")["command"].split(), *read("load")["serve"]]
    return words[words.index(name) + 1]


def load_responses(status: str, *clients: str) -> str:
    answers = read("load")["answers"]
    return f"{sum(answers.get(f'{client} {status}', 0) for client in clients)}"


def machines(cores: str) -> str:
    """How many machines generate a million images a day at a utilisation of 0.7."""
    per_hour = int(value("load", "one_client/images/size=128x128,ratio=0.5/images_per_hour"))
    return f"{math.ceil(math.ceil(1_000_000 / (24 * per_hour) / 0.7) / int(cores))}"


# Rows of tables ------------------------------------------------------------------------------------------------------


def milliseconds(row: dict[str, Any]) -> str:
    return f"{1e3 * statistics.median(row['seconds']):.0f}"


def run(file: str, backend: str, size: str, batch: str) -> list[str | None]:
    """Size, batch and backend; seconds of plain and merged, their ratio, and peaks of memory in GB."""
    pair = [arm(file, name, backend, size, batch) for name in ("plain", "tome")]
    memory = ["–" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 1e9:.2f}" for row in pair]
    seconds = [f"{statistics.median(row['seconds']):.2f}" for row in pair]
    return [f"{size} px", batch, None, *seconds, f"{speed_up(file, backend, size, batch)}×", *memory]


def gpu_row(size: str) -> list[str]:
    """Milliseconds on a GPU at batch 2, in ONNX Runtime and in PyTorch: plain, and merged in several ways."""
    merged = [f"onnxruntime {name}" for name in ("ToDo 0.75", "kv 0.75", "default 0.5")]
    cells = []
    for name in ("onnxruntime plain", *merged, "torch plain", "torch tomesd 0.5"):
        rows = gpu_arms(name, size, "2")
        if not rows:
            cells.append(NOT_MEASURED)
            continue
        milliseconds = f"{statistics.median(rows[0]['ms']):.1f}"
        is_plain = name.endswith("plain")
        cells.append(milliseconds if is_plain else f"{milliseconds} ({on_gpu(size, '2', *name.split())}×)")
    return cells


def choice(*name: str) -> list[str]:
    """A way to merge: the speed-up of a whole scene, and the PSNR of scenes and of photographs."""
    speed, psnr, _ = alternative("scenes_sd_256", *name)
    return [speed, psnr, alternative("scenes_sd_256_photographs", *name)[1]]


def distances(*name: str) -> list[str]:
    """A way to merge, or another seed: PSNR and ST-LPIPS of scenes, of photographs, and of simple images."""
    sets = ("scenes_sd_256", "scenes_sd_256_photographs", "emoji_sd_128")
    return [cell for images in sets for cell in alternative(images, *name)[-2:]]


def by_model(file: str, backend: str, size: str, batch: str) -> list[str]:
    """The default at ratio 0.5: the speed-up, and the peaks of memory without and with merging in GB."""
    *_, speed, plain, merged = run(file, backend, size, batch)
    return [f"{speed}", f"{plain} → {merged}"]


def by_runtime(backend: str) -> list[str]:
    """The bundled UNet at 256 px in a runtime: milliseconds of plain and merged, and the speed-up."""
    _, _, plain, merged, _, speed, *_ = one_pass("256", backend)
    return [plain, merged, speed]


def one_pass(size: str, backend: str) -> list[str]:
    """The bundled UNet in a runtime: milliseconds, and speed-ups; the last one is of merging in Paddle Inference."""
    plain, merged = (arm("emoji_unet", name, backend, size) for name in ("plain", "tome"))
    limit = None if backend == "PyTorch" else arm("emoji_unet", "limit", backend, size)
    predictor = arm("emoji_unet", "tome", "predictor", size)
    ratios = [f"{times(row, plain):.2f}×" if row else "–" for row in (merged, limit, predictor)]
    return [f"{size} px", backend, *(milliseconds(row) if row else "–" for row in (plain, merged, limit)), *ratios]


def runtimes(threads: str, size: str, batch: str) -> list[str]:
    """Milliseconds of a plain pass, of merged ones, and of tomesd in bf16; their ratios."""
    file, names = f"unet_runtimes_{threads}", ("predictor", "onnxruntime", "openvino", "openvino-bf16", "PyTorch-bf16")
    assert value(file, "threads") == threads
    plain = arm(file, "plain", "predictor", size, batch)
    predictor, onnxruntime, openvino, bf16, tomesd = (arm(file, "tome", name, size, batch) for name in names)
    ratios = [times(onnxruntime, predictor), times(bf16, plain), times(bf16, tomesd)]
    passed = [milliseconds(row) for row in (plain, predictor, onnxruntime, openvino, bf16, tomesd)]
    return [threads, f"{size} px", batch, *passed, *(f"{ratio:.2f}×" for ratio in ratios)]


def block(name: str, settings: str) -> list[str]:
    """The speed-up of a transformer block, and the speed-up that its MACs allow. `name` is a word of its name."""
    rows = [row for row in arms("flux_blocks") if name in f"{row['model']} {row['scope']}".split()]
    config = ToMeConfig(**parse_settings(settings))
    (row,) = [row for row in rows if row["config"] and ToMeConfig(**row["config"]) == config]
    plain = plain_of(row, "flux_blocks")
    return [f"{times(row, plain):.2f}×", f"{plain['macs'] / row['macs']:.2f}×"]


def arm_of(images: str, name: str) -> dict[str, Any]:
    """An arm of alternatives_IMAGES.json."""
    (row,) = [row for row in read(f"alternatives_{images}")["arms"] if row["name"] == name]
    return row


def alternative(images: str, *name: str) -> list[str]:
    """An arm: speed-up of whole images in ONNX Runtime, PSNR and ST-LPIPS."""
    row = arm_of(images, " ".join(name))
    return [f"{image_speed_up(images, 'onnxruntime', *name)}×", f"{row['psnr']:.1f}", f"{row['perceptual']:.4f}"]


def in_both(images: str, *name: str) -> list[str]:
    """An arm: speed-up of whole images in ONNX Runtime and in Paddle Inference, PSNR and ST-LPIPS."""
    speed, *distances = alternative(images, *name)
    return [speed, f"{image_speed_up(images, 'paddle', *name)}×", *distances]


def image_speed_up(images: str, runtime: str, *name: str) -> str:
    """How many times as fast whole images of an arm are as plain ones in a runtime."""
    result, arm = read(f"alternatives_{images}"), alternatives.Variant(**arm_of(images, " ".join(name))["settings"])
    return f"{alternatives.speed_up(result, arm, runtime):.2f}"


def arm_psnr(images: str, *name: str) -> str:
    """The median PSNR of an arm, in dB."""
    return f"{arm_of(images, ' '.join(name))['psnr']:.1f}"


def arm_perceptual(images: str, *name: str) -> str:
    """The median ST-LPIPS of an arm."""
    return f"{arm_of(images, ' '.join(name))['perceptual']:.4f}"


def operations(*method: str) -> list[str]:
    """Milliseconds of plan, merge, unmerge and their sum, and how many times as fast as the built-in."""
    (row,) = [row for row in read("ops")["methods"] if row["method"] == " ".join(method)]
    factors = {name: f" ({factor:.1f}×)" for name, factor in row["times_faster"].items()}
    is_base = "built-in" in method
    return [f"{time:.2f}" + ("" if is_base else factors[name]) for name, time in row["milliseconds"].items()]


def edges(arm: str, *name: str) -> list[str]:
    """Mean distances between edges in px, in both directions: all, of the outline, inner."""
    figures = read("edges")["sets"][" ".join(name)][arm]
    directions, of = ("input_to_output", "output_to_input"), ("all", "outline", "inner")
    return [f"{figures[direction][part]['mean']:.1f}" for direction in directions for part in of]


def one_client(size: str, ratio: str) -> list[str]:
    """Seconds for an image, and images in an hour, of a client alone."""
    images = read("load")["one_client"]["images"]
    (row,) = [row for row in images if (row["size"], f"{row['ratio']:g}") == (f"{size}x{size}", ratio)]
    return [f"{size} px", ratio, f"{row['seconds_per_image']:.2f}", f"{row['images_per_hour']:,}"]


def seconds_to_images(client: str) -> list[str]:
    """Median and 95th percentile."""
    seconds = read("load")["seconds_to_images"][client]
    return [client, f"{seconds['p50']:.1f}", f"{seconds['p95']:.1f}"]


# The functions that a document may name.
LOOKUPS: dict[str, Callable[..., Any]] = {
    "value": value,
    "count": count,
    "speed_up": speed_up,
    "memory": memory,
    "macs_saved": macs_saved,
    "on_gpu": on_gpu,
    "against_tomesd": against_tomesd,
    "tomesd_against_eager": tomesd_against_eager,
    "near_limit": near_limit,
    "noise": noise,
    "gain": gain,
    "seed_against_change": seed_against_change,
    "separated_by_kid": separated_by_kid,
    "edges_near": edges_near,
    "operations_case": operations_case,
    "load_option": load_option,
    "load_responses": load_responses,
    "machines": machines,
    "run": run,
    "gpu_row": gpu_row,
    "choice": choice,
    "distances": distances,
    "by_model": by_model,
    "by_runtime": by_runtime,
    "one_pass": one_pass,
    "runtimes": runtimes,
    "block": block,
    "alternative": alternative,
    "in_both": in_both,
    "image_speed_up": image_speed_up,
    "arm_psnr": arm_psnr,
    "arm_perceptual": arm_perceptual,
    "operations": operations,
    "edges": edges,
    "one_client": one_client,
    "seconds_to_images": seconds_to_images,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a figure differs")
    is_check, different = parser.parse_args().check, False
    for path in DOCUMENTS:
        before = path.read_text(encoding="utf-8")
        after = update(before)
        for old, new in zip(before.splitlines(), after.splitlines(), strict=True):
            if old != new:
                different = True
                print(f"{path.relative_to(ROOT)}:\n- {old}\n+ {new}")
        if not is_check:
            path.write_text(after, encoding="utf-8")
    return int(is_check and different)


if __name__ == "__main__":
    sys.exit(main())
