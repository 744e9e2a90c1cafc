"""Write docs/results.md, and figures into other documents, from the committed results (`make figures`).

results.md comes from templates/results.md. In another document, the function NAME in LOOKUPS computes

- a figure between two comments, `<!--= NAME ARGUMENT… -->1.29×<!--/-->`, with its unit, since a gain may be "no
  difference". It does not begin a line, because Markdown takes such a line as HTML.
- the last cells of a table's row that ends in a comment, `| windows of 8 | 19.34 | 5.39 <!--: NAME ARGUMENT… --> |`.
  None leaves a cell as it is: it is a label in the document's language. The mark has no "|", which would end the cell.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import alternatives
import gpu_onnx
from lab.arm import EAGER, OURS, PLAIN, Arm
from lab.markdown import NOT_MEASURED, table, write_page
from lab.quality.quality_report import differs_by_kid, read_frame
from lab.speed.cases import SCOPES, read_cases

from ppdiffusers_tome.commands.merge_options import parse_settings
from ppdiffusers_tome.comparison.clock import NO_DIFFERENCE, Gain, gain
from ppdiffusers_tome.config import ToMeConfig

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
IN_CHINESE = {NO_DIFFERENCE: "无明显差异"}


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


@lru_cache
def read(file: str) -> dict[str, Any]:
    """A result of the project, by its file name without .json."""
    return json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))


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
    """The measurements of a speed result, each with the fields of its case; `arm` is an Arm."""
    return [{**vars(case), **vars(row)} for case in read_cases(read(file), file) for row in case.arms]


def arm(file: str, name: str, backend: str = EAGER, size: int | str = 128, batch: int | str = 2) -> dict[str, Any]:
    """The plain arm ("plain"), or that of the method "default" at ratio 0.5 ("tome")."""
    config = {"plain": None, "tome": ToMeConfig(0.5, "default", use_rand=False)}[name]
    place = (Arm(config, backend=backend), f"{size}", f"{batch}")
    return next(row for row in arms(file) if (row["arm"], f"{row['size']}", f"{row['batch']}") == place)


def plain_of(row: dict[str, Any], file: str) -> dict[str, Any]:
    """The plain arm of a case, in the same backend."""
    plain = Arm(backend=row["arm"].backend)
    (base,) = [base for base in arms(file) if base["arm"] == plain and all(row[key] == base[key] for key in PLACE)]
    return base


def over_plain(row: dict[str, Any], file: str) -> Gain:
    """The gain of an arm over the plain one of its case."""
    return gain(plain_of(row, file)["seconds"], row["seconds"])


def memory(file: str, name: str, size: str, batch: str = "2") -> str:
    """The peak of `arm`, in GB."""
    return f"{arm(file, name, EAGER, size, batch)['peak_memory_bytes'] / 1e9:.1f}"


def macs_saved(file: str, size: str, batch: str = "2") -> str:
    """The share of the multiply-accumulates of a pass that merging at ratio 0.5 saves."""
    plain, merged = (arm(file, name, EAGER, size, batch) for name in ("plain", "tome"))
    return f"{100 * (1 - merged['macs'] / plain['macs']):.0f} %"


def gpu_arms(name: str, size: str, batch: str) -> list[dict[str, Any]]:
    """An arm of the passes of Stable Diffusion 1.5's UNet on a GPU, in each turn that has it."""
    return [
        row
        for row in read("gpu_onnx")["rows"]
        if (row["arm"], f"{row['size']}", f"{row['batch']}") == (name, size, batch)
    ]


def on_gpu(size: str, batch: str, *name: str) -> str:
    """The gain of an arm on a GPU over plain in the same runtime and form."""
    merged = gpu_arms(" ".join(name), size, batch)[0]
    plain = gpu_onnx.reference_of(merged, read("gpu_onnx")["rows"])
    return str(gain(plain["ms"], merged["ms"]))


def predicted_on_gpu(size: str) -> str:
    """The gain that `todo` at 0.5 should have on a GPU at batch 2, where it was not measured."""
    return gpu_onnx.predicted_gains(read("gpu_onnx")["rows"]).get((int(size), 2), NOT_MEASURED)


def on_cpu(backend: str, size: str, method: str, ratio: str | None = None) -> str:
    """The gain of Stable Diffusion 1.5's UNet on a CPU at batch 2, by a method at a ratio."""
    config = ToMeConfig(method=method, use_rand=False, **({"ratio": float(ratio)} if ratio else {}))
    place = (Arm(config, backend=backend), size, 2)
    gains = [
        over_plain(row, file)
        for file in sorted(path.stem for path in RESULTS.glob("sd15_*.json"))
        for row in arms(file)
        if (row["arm"], f"{row['size']}", row["batch"]) == place
    ]
    return str(gains[0]) if gains else NOT_MEASURED


def sdxl_block(level: str, size: str, *name: str) -> str:
    """The gain of an exported block of SDXL at a level, by an arm."""
    (row,) = [
        row
        for row in arms("sdxl_blocks")
        if (row["scope"], f"{row['size']}", row["arm"].name) == (f"one block at level {level}", size, " ".join(name))
    ]
    return str(over_plain(row, "sdxl_blocks"))


def noise() -> str:
    """By how much a gain differs that was measured in several results."""
    repeated = defaultdict(list)
    for file in [path.stem for path in RESULTS.glob("*.json") if read(path.stem)["kind"] == "speed"]:
        for row in arms(file):
            if row["arm"].config and (row["arm"].by, row["arm"].attention) == (OURS, PLAIN) and row["seconds"]:
                case = tuple(row[key] for key in PLACE)
                repeated[case, read(file)["threads"], row["arm"]].append(over_plain(row, file).factor)
    spreads = [max(factors) / min(factors) - 1 for factors in repeated.values() if len(factors) > 1]
    assert len(spreads) >= 5
    return f"{100 * max(spreads):.0f} %"


def nearer_than_tomesd(images: str) -> str:
    """By how many dB interlace at 0.75 is nearer to plain than tomesd's method at 0.5."""
    interlace, tomesd = (arm_of(images, name)["psnr"] for name in ("interlace 0.75", "tomesd 0.5"))
    return f"{interlace - tomesd:.0f}"


def separated_by_kid() -> str:
    """The settings of scenes whose KID is above that of plain images by more than two standard deviations of both."""
    frame = read_frame(read("quality_scenes"))
    above = frame.index[differs_by_kid(frame) & (frame["group"] != "calibration")]
    return f"a difference in {', '.join(above)}" if len(above) else "no difference"


# Rows of tables ------------------------------------------------------------------------------------------------------


def milliseconds(row: dict[str, Any]) -> str:
    return f"{1e3 * statistics.median(row['seconds']):.0f}"


def gpu_row(size: str) -> list[str]:
    """Milliseconds on a GPU at batch 2, in ONNX Runtime and in PyTorch: plain, and merged in several ways."""
    merged = [f"onnxruntime {name}" for name in ("todo 0.75", "kv 0.75", "default 0.5")]
    cells = []
    for name in ("onnxruntime plain", *merged, "torch plain", "torch tomesd 0.5"):
        rows = gpu_arms(name, size, "2")
        if not rows:
            cells.append(NOT_MEASURED)
            continue
        milliseconds = f"{statistics.median(rows[0]['ms']):.1f}"
        is_plain = name.endswith("plain")
        cells.append(milliseconds if is_plain else f"{milliseconds} ({on_gpu(size, '2', *name.split())})")
    return cells


def choice(*name: str) -> list[str]:
    """A way to merge: the gain of a whole scene, and the PSNR of scenes and of photographs."""
    speed, psnr, _ = alternative("scenes_sd_256", *name)
    return [speed, psnr, alternative("scenes_sd_256_photographs", *name)[1]]


def by_runtime(backend: str) -> list[str]:
    """The bundled UNet at 256 px in a runtime: milliseconds of plain and merged, and the gain."""
    plain, merged = (arm("emoji_unet", name, backend, 256) for name in ("plain", "tome"))
    return [milliseconds(plain), milliseconds(merged), str(over_plain(merged, "emoji_unet"))]


def gpu_gain(size: str) -> list[str]:
    """On a GPU at batch 2: the gain of todo, and of the default."""
    return [on_gpu(size, "2", "onnxruntime", *name.split()) for name in ("todo 0.75", "default 0.5")]


def cpu_gain(backend: str, size: str) -> list[str]:
    """Stable Diffusion 1.5's UNet on a CPU at batch 2, as `gpu_gain`."""
    return [on_cpu(backend, size, method) for method in ("todo", "default")]


def loader_gain(loader: str) -> list[str]:
    """The gain of an image of `scenes_sd` at 0.5 in a library that loads exports."""
    (row,) = [row for row in read("loaders")["results"] if row["loader"] == loader]
    return [str(gain(row["seconds"]["plain"], row["seconds"]["merged"]))]


def block(name: str, settings: str) -> list[str]:
    """The gain of a transformer block, and that which its MACs allow. `name` is a word of its name."""
    rows = [row for row in arms("flux_blocks") if name in f"{row['model']} {row['scope']}".split()]
    config = ToMeConfig(**parse_settings(settings))
    (row,) = [row for row in rows if row["arm"] == Arm(config)]
    allowed = plain_of(row, "flux_blocks")["macs"] / row["macs"]
    return [str(over_plain(row, "flux_blocks")), f"{allowed:.2f}×"]


def arm_of(images: str, name: str) -> dict[str, Any]:
    """An arm of alternatives_IMAGES.json."""
    (row,) = [row for row in read(f"alternatives_{images}")["arms"] if row["name"] == name]
    return row


def alternative(images: str, *name: str) -> list[str]:
    """An arm: gain of whole images in ONNX Runtime, PSNR and ST-LPIPS."""
    row = arm_of(images, " ".join(name))
    return [image_speed_up(images, "onnxruntime", *name), f"{row['psnr']:.1f}", f"{row['perceptual']:.4f}"]


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
    "memory": memory,
    "on_gpu": on_gpu,
    "predicted_on_gpu": predicted_on_gpu,
    "on_cpu": on_cpu,
    "gpu_row": gpu_row,
    "loader_gain": loader_gain,
    "gpu_gain": gpu_gain,
    "cpu_gain": cpu_gain,
    "sdxl_block": sdxl_block,
    "choice": choice,
    "by_runtime": by_runtime,
    "block": block,
    "image_speed_up": image_speed_up,
    "arm_psnr": arm_psnr,
}


# results.md ----------------------------------------------------------------------------------------------------------

SETS = {"scenes_sd_256": "scenes", "scenes_sd_256_photographs": "photographs", "emoji_sd_128": "simple images"}
ARMS = (  # of alternatives_*.json on the page, where a result has them
    "interlace 0.5",
    "interlace 0.75",
    "interlace 0.875",
    "interlace 0.9375",
    "default 0.25",
    "default 0.5",
    "default 0.7",
    "todo 0.75",
    "tomesd 0.25",
    "tomesd 0.5",
    "10 steps",
    "10 steps + interlace 0.75",
    "DeepCache 2",
    "DeepCache 2 + interlace 0.75",
    "another seed",
)


def write_results(output: Path) -> str:
    """Write results.md into a folder; returns its text."""
    functions = (value, count, macs_saved, on_gpu, noise, nearer_than_tomesd, separated_by_kid)
    template = Path(__file__).with_name("templates") / "results.md"
    return write_page(
        template,
        output,
        sets=SETS,
        passes=table_of_passes(),
        gpu=table_of_gpu(),
        images=table_of_images(),
        **{function.__name__: function for function in functions},
    )


def table_of_passes() -> str:
    """The method "default" at 0.5 on a CPU, in each speed result: each model, size, backend and number of threads."""
    head = [
        "what runs",
        "px",
        "batch",
        "threads",
        "backend",
        "plain, s",
        "merged, s",
        "gain",
        "plain, GB",
        "merged, GB",
    ]
    rows, default = [], ToMeConfig(0.5, "default", use_rand=False)
    for file in sorted(path.stem for path in RESULTS.glob("*.json") if read(path.stem)["kind"] == "speed"):
        for row in arms(file) if not file.endswith("_again") else []:
            backend = row["arm"].backend
            if row["arm"] != Arm(default, backend=backend) or not row["seconds"] or row["batch"] > 2:
                continue
            pair = [plain_of(row, file), row]
            what = f"{Path(row['model']).name}, {SCOPES.get(row['scope'], row['scope'])}"
            seconds = [f"{statistics.median(one['seconds']):.2f}" for one in pair]
            peaks = [one["peak_memory_bytes"] for one in pair]
            memory = [NOT_MEASURED if peak is None else f"{peak / 1e9:.2f}" for peak in peaks]
            place = [f"{row['size']}", f"{row['batch']}", f"{read(file)['threads']}", backend]
            rows.append([what, *place, *seconds, str(over_plain(row, file)), *memory])
    return "\n".join(table(head, rows))


def table_of_gpu() -> str:
    """Milliseconds of a pass on a GPU, by size, and the gain over plain."""
    head = ["px", "plain", "todo 0.75", "kv 0.75", "default 0.5", "PyTorch, plain", "tomesd 0.5"]
    sizes = dict.fromkeys(f"{row['size']}" for row in read("gpu_onnx")["rows"] if row["batch"] == 2)
    return "\n".join(table(head, [[size, *gpu_row(size)] for size in sizes]))


def table_of_images() -> str:
    """Each of ARMS: the gain over plain in scenes, and PSNR and ST-LPIPS in all sets."""
    runtimes = {"onnxruntime": "ONNX Runtime", "paddle": "Paddle Inference"}
    head = ["arm", *runtimes.values()] + [
        f"{words}, {measure}" for words in SETS.values() for measure in ("dB", "LPIPS")
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
