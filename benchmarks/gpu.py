"""The tables of diffusers' and ppdiffusers' ToMe pages, measured on your GPU: python benchmarks/gpu.py

A cell is one way to compute a batch: plain or merged, with or without xformers, one size, one number of images. Each
has a process of its own. Where a cell fails or runs out of memory, larger ones of the same kind are not tried. The
run ends after --minutes; the same command continues it. It writes gpu.json, and the page gpu.md, to --output.

On a CPU, where nothing runs in float16: python benchmarks/gpu.py --architecture tiny --size 128 --dtype float32
"""

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from ppdiffusers_tome import ToMeConfigError, ToMeError
from ppdiffusers_tome.evaluation import markdown
from ppdiffusers_tome.evaluation.environment import describe_environment
from ppdiffusers_tome.evaluation.markdown import NOT_MEASURED, number, table
from ppdiffusers_tome.evaluation.results import make_result, read_json, write_result
from ppdiffusers_tome.evaluation.speed.architectures import ARCHITECTURES
from ppdiffusers_tome.evaluation.speed.cases import (
    ARM_NAMES,
    BOTH,
    DTYPES,
    EAGER,
    ERROR,
    MEASURED,
    MEMORY_EFFICIENT,
    OUT_OF_MEMORY,
    PLAIN,
    PLANNED,
    TOME,
    Arm,
    Case,
    Timing,
    make_case,
    make_configs,
    read_cases,
)
from ppdiffusers_tome.evaluation.speed.catalog import make_arms
from ppdiffusers_tome.evaluation.speed.parity import reference_of
from ppdiffusers_tome.evaluation.speed.runner import WorkerEndedError, worker_messages
from ppdiffusers_tome.inference.runtime import error_summary

PASSES = 50  # denoising steps of an image on the published pages
GUIDED = 2  # rows of the UNet's batch for each image
PUBLISHED = Path(__file__).with_name("published_figures.md")
SOURCES = ("diffusers, A100", "diffusers, V100", "ppdiffusers, A100")


def plan(options: argparse.Namespace) -> list[Case]:
    """A case with one arm for each cell, in the order of measurement: the ratio nearest to 0.5 at all sizes first.

    Raises:
        ToMeConfigError: a value is not allowed, or cannot be measured on this machine.
    """
    first = min(options.ratio, key=lambda ratio: abs(ratio - 0.5))
    fields = {"dtype": options.dtype, "memory_limit_gb": options.memory_limit}
    cells = []
    for size, images in product(sorted(options.size), sorted(options.batch)):
        case = make_case(options.model or options.architecture, size=size, batch=GUIDED * images, **fields)
        arms = make_arms(case, options.arms, [EAGER], make_configs(options.ratio, [None]))
        cells += [replace(case, arms=[arm]) for arm in arms]
    return sorted(cells, key=lambda cell: cell.arms[0].ratio not in (0, first))


def measure(cells: Sequence[Case], rounds: int, path: Path, command: str, minutes: float, restart: bool) -> dict:
    """Measure the cells that the result file lacks, until the time is over, and write it after each one.

    Raises:
        ToMeConfigError: the file has other rounds, or was measured by another version or on another machine.
    """
    timing, end = Timing(rounds), time.monotonic() + 60 * minutes
    environment = {**describe_environment(), "threads": str(timing.threads)}
    result = make_result("speed", command, environment=environment, **asdict(timing), cases=[])
    done = {} if restart or not path.exists() else measured_cells(path, result)
    planned = [cell for cell in cells if key(cell) not in done]
    while True:
        result["cases"] = [asdict(cell) for cell in [*done.values(), *planned]]
        write_result(path, result)
        if not planned:
            return result
        cell, (arm,) = planned[0], planned[0].arms
        if smaller := next((case for case in done.values() if fails_like(case, cell)), None):
            arm.fail(smaller.arms[0].status, str(smaller.arms[0].reason))
        else:
            is_first = all(case.arms[0].name != arm.name for case in done.values())
            measured = measure_cell(cell, timing, end, is_first)
            if measured is None:
                return result
            cell = measured
            print(f"{cell.name}, {cell.dtype}, {arm.name}: {cell_text(cell, None)}", flush=True)
        done[key(cell)] = cell
        del planned[0]


def key(cell: Case) -> tuple[str, str, str]:
    """The key of a cell: the names of case, dtype and arm."""
    return cell.name, cell.dtype, cell.arms[0].name


def measure_cell(cell: Case, timing: Timing, end: float, is_first: bool) -> Case | None:
    """The cell with its arm measured or failed, from a process of its own; None if `time.monotonic()` is past `end`.

    Only in the first cell of its ratio and attention, outputs are compared with plain and merged ones. In others the
    process runs nothing but the arm, so that the memory that it fills is the arm's.
    """
    (arm,), step = cell.arms, "starting"
    references = {other.name for other in (Arm(PLAIN), reference_of(arm)) if other}
    skip = [] if is_first else sorted(references - {arm.name})
    with tempfile.TemporaryDirectory() as folder:
        try:
            for message in worker_messages(cell, timing, Path(folder), skip):
                if time.monotonic() > end:
                    return None
                if isinstance(message, Case):
                    cell = message
                else:
                    step = message[1]
        except WorkerEndedError as error:
            cell.arms[0].fail(error.arm_status, f"{step}: {error_summary(error)}")
    return cell


def fails_like(smaller: Case, cell: Case) -> bool:
    """Whether a cell that is not larger, of the same kind, has failed or run out of memory."""
    same = (smaller.model, smaller.dtype, smaller.arms[0].name) == (cell.model, cell.dtype, cell.arms[0].name)
    is_larger = cell.size >= smaller.size and cell.batch >= smaller.batch
    return same and is_larger and bool(smaller.with_status(OUT_OF_MEMORY, ERROR))


def measured_cells(path: Path, about: dict[str, Any]) -> dict[tuple[str, str, str], Case]:
    """The cells of a result file that are not PLANNED, by their keys; raises as `measure`."""
    result = read_json(path)
    cells = read_cases(result, path)
    others = [name for name in ("rounds", "commit", "environment") if result[name] != about[name]]
    if others:
        raise ToMeConfigError(
            f"{path} was measured with other {', '.join(others)}: pass another --output, or --restart to lose it."
        )
    return {key(cell): cell for cell in cells if not cell.with_status(PLANNED)}


def write_page(result: dict[str, Any], path: Path) -> str:
    """Write the page of a result, a table for each ratio with the published figures beside; returns its text."""
    cells, reasons = read_cases(result, path), defaultdict(list)
    for cell in cells:
        if reason := cell.arms[0].reason:
            reasons[reason].append(f"{cell.size} px, batch {cell.batch}, {cell.arms[0].name}")
    ratios = sorted({cell.arms[0].ratio for cell in cells} - {0.0} or {0.0})
    return markdown.write_page(
        Path(__file__).with_name("templates") / "gpu.md",
        path.parent,
        result=result,
        first=cells[0],
        passes=PASSES,
        guided=GUIDED,
        planned=sum(bool(cell.with_status(PLANNED)) for cell in cells),
        tables=[(ratio, ratio_table(cells, ratio)) for ratio in ratios],
        reasons=reasons,
    )


def ratio_table(cells: Sequence[Case], ratio: float) -> list[str]:
    """A row for each size and number of images."""
    efficient = next((cell.arms[0].attention for cell in cells if cell.arms[0].arm in (MEMORY_EFFICIENT, BOTH)), "")
    names = {PLAIN: "plain", MEMORY_EFFICIENT: efficient, TOME: "ToMe", BOTH: f"ToMe + {efficient}"}
    rows = []
    for size, batch in sorted({(cell.size, cell.batch) for cell in cells}):
        here = [cell for cell in cells if (cell.size, cell.batch) == (size, batch)]
        by_arm = {cell.arms[0].arm: cell for cell in here if cell.arms[0].ratio in (0, ratio)}
        own = [cell_text(by_arm.get(arm), by_arm.get(PLAIN)) for arm in names]
        theirs = [published().get((source, size, batch // GUIDED, ratio), NOT_MEASURED) for source in SOURCES]
        rows.append([str(size), str(batch // GUIDED), *own, *theirs])
    return table(["size, px", "images", *names.values(), *SOURCES], rows)


def cell_text(cell: Case | None, plain: Case | None) -> str:
    """A cell in words, such as "5.26 (1.31×, 9.1 GB)" or "OOM"."""
    if cell is None or cell.with_status(PLANNED):
        return NOT_MEASURED
    (arm,) = cell.arms
    if arm.status != MEASURED:
        return "OOM" if arm.status == OUT_OF_MEMORY else arm.status
    seconds, details = statistics.median(arm.seconds), []
    if plain is not None and plain is not cell and plain.with_status(MEASURED):
        details.append(f"{statistics.median(plain.arms[0].seconds) / seconds:.2f}×")
    if arm.peak_memory_bytes is not None:
        details.append(f"{number(arm.peak_memory_bytes / 1e9)} GB")
    return number(PASSES * seconds) + (f" ({', '.join(details)})" if details else "")


def published() -> dict[tuple[str, int, int, float], str]:
    """The published seconds by source, size, images and ratio, as "plain / ToMe / ToMe + xFormers"."""
    sections = PUBLISHED.read_text(encoding="utf-8").split("\n## ")
    diffusers, ppdiffusers = ([row.strip("| ").split(" | ") for row in s.splitlines()] for s in sections[1:3])
    figures = {}
    for row in diffusers:
        if row[0] in ("A100", "V100"):
            seconds = [text.partition(" (")[0] for text in row[3:]]
            figures[f"diffusers, {row[0]}", int(row[1]), int(row[2]), 0.5] = " / ".join(seconds)
    for row in ppdiffusers:
        if row[0].isdigit():  # its ratios are 0.5 / 0.749
            for place, ratio in ((0, 0.5), (-1, 0.75)):
                seconds = [text.split(" / ")[place] for text in row[1:]]
                figures["ppdiffusers, A100", 512, int(row[0]), ratio] = " / ".join(seconds)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default, option = " (default: %(default)s)", parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--architecture", choices=list(ARCHITECTURES), default="sd15", help="random weights" + default)
    model.add_argument("--model", metavar="DIR", help="folder of a pipeline, whose UNet is measured")
    option("--size", type=int, nargs="+", default=[512, 768, 1024], help="px" + default)
    option("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 10, 16, 32], help="images" + default)
    option("--ratio", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="share of tokens to merge" + default)
    option("--arms", nargs="+", choices=list(ARM_NAMES), default=list(ARM_NAMES), help="as of bench" + default)
    option("--dtype", choices=DTYPES, default="float16", help="of weights and inputs" + default)
    option("--rounds", type=int, default=3, help="timed passes of each cell" + default)
    option("--memory-limit", type=float, metavar="GB", help="on a CPU, for weights and one pass")
    option("--minutes", type=float, default=20, help="at most; what is not measured then is left" + default)
    option("--output", type=Path, metavar="DIR", default=Path("outputs/gpu"), help="of gpu.json, gpu.md" + default)
    option("--restart", action="store_true", help="measure again what is in the folder")
    options = parser.parse_args()
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    path = options.output / "gpu.json"
    try:
        result = measure(plan(options), options.rounds, path, command, options.minutes, options.restart)
        print(f"\n{write_page(result, path.with_suffix('.md'))}")
    except ToMeError as error:
        parser.error(str(error))
    print(f"written to {path.with_suffix('.md')}: paste it into an issue with the form “First run”")
    return int(not any(arm["status"] == MEASURED for case in result["cases"] for arm in case["arms"]))


if __name__ == "__main__":
    sys.exit(main())
