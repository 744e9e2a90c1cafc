"""Time a UNet, with and without token merging, and report the results.

    python benchmarks/bench.py --architecture sd15 --size 512 --arms plain tome --output build/sd15.json
    python benchmarks/bench.py report build/sd15.json --output build

Beside merging, plain and memory-efficient attention, it times the apply_tome that ppdiffusers ships.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from lab.arm import EAGER, PLAIN, Arm
from lab.command import run_command, square
from lab.speed.architectures import ARCHITECTURES
from lab.speed.cases import (
    BACKENDS,
    BOTH,
    KINDS,
    MEASURED,
    MEMORY_EFFICIENT,
    PROGRAMS,
    TOME,
    Case,
    Timing,
    make_case,
    make_configs,
)
from lab.speed.catalog import make_arms
from lab.speed.runner import measure_all

from ppdiffusers_tome.commands.merge_options import add_merge_options, read_methods
from ppdiffusers_tome.comparison.clock import gain
from ppdiffusers_tome.comparison.option_defaults import ROUNDS
from ppdiffusers_tome.cores import usable_cores
from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.export.loading import require_model_folder
from ppdiffusers_tome.inference import choose_runtime
from ppdiffusers_tome.wording import command_line

PROGRAM = "python benchmarks/bench.py"
DEFAULT = " (default: %(default)s)"  # at the end of help texts


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or report; returns the exit status. It is 1 for a case in which nothing could be measured."""
    return run_command(_parser(), sys.argv[1:] if arguments is None else list(arguments))


def _parser() -> argparse.ArgumentParser:
    bench = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.splitlines()[0])
    _add_options(bench)
    bench.set_defaults(run=_speed)
    report = bench.add_subparsers(dest="what").add_parser("report", help="make tables and plots of results")
    report.add_argument("files", type=Path, nargs="+", metavar="FILE", help="results of bench")
    page = "folder for speed.md" + DEFAULT
    report.add_argument("--output", type=Path, metavar="DIR", default=Path("outputs"), help=page)
    report.set_defaults(run=_report)
    return bench


def _add_options(bench: argparse.ArgumentParser) -> None:
    group = bench.add_argument_group("what is measured (several values: all combinations)")
    model = group.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, metavar="DIR", help="folder of a pipeline")
    weights = "UNet with random weights" + DEFAULT
    model.add_argument("--architecture", choices=list(ARCHITECTURES), default="sd15", help=weights)
    option = group.add_argument
    option("--size", type=square, nargs="+", default=[512], help="squares, 512 or 512x512, in px" + DEFAULT)
    option("--batch", type=int, nargs="+", default=[2], help="rows of the UNet" + DEFAULT)
    option("--ratio", type=float, nargs="+", default=[0.75], help="share of tokens to leave out" + DEFAULT)
    about = "ways to merge (default: the default method), at each --ratio or at their own"
    add_merge_options(group, about)
    option("--backend", choices=BACKENDS, nargs="+", default=[EAGER], help="one or several" + DEFAULT)
    usual = [PLAIN, MEMORY_EFFICIENT, TOME, BOTH]
    option("--arms", choices=KINDS, nargs="+", default=usual, help="what is compared" + DEFAULT)
    option = bench.add_argument_group("how it is measured").add_argument
    option("--rounds", type=int, default=ROUNDS, help="timed passes of each arm; the arms take turns" + DEFAULT)
    option("--warm-up", type=int, default=1, help="passes of each arm before the timed ones" + DEFAULT)
    option("--threads", type=int, default=usable_cores(), help="of every arm" + DEFAULT)
    file = Path("outputs/bench.json")
    option("--output", type=Path, metavar="FILE", default=file, help="JSON file for the result" + DEFAULT)


def _speed(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    output = options.output
    if output.is_dir():
        raise ToMeConfigError(f"--output {output} is a folder: name a file, such as {output}/speed.json.")
    for backend in set(options.backend) & set(PROGRAMS):
        choose_runtime(**PROGRAMS[backend])  # raises if it is not installed
    timing = Timing(options.rounds, options.warm_up, options.threads)
    cases = _cases(options)
    configs = make_configs(options.ratio, read_methods(options))
    for case in cases:
        case.arms = make_arms(options.arms, options.backend, configs)
    command = command_line(arguments, PROGRAM)
    measured = measure_all(cases, timing, output, command)
    print("\n\n".join("\n".join(_lines(case)) for case in measured))
    print(f"written to {output}")
    return int(not all(case.with_status(MEASURED) for case in measured))


def _cases(options: argparse.Namespace) -> list[Case]:
    model = options.architecture
    if options.model is not None:
        require_model_folder(options.model)
        # "./" distinguishes a folder from the architecture of the same name.
        model = f"./{options.model}" if str(options.model) in ARCHITECTURES else str(options.model)
    return [make_case(model, size=size, batch=batch) for size, batch in product(options.size, options.batch)]


def _lines(case: Case) -> Iterator[str]:
    """Median seconds, gain over plain in the same backend, and peak memory; a line for each arm."""
    yield f"{case.name}: {case.tokens} tokens"
    width = max(len(measured.name) for measured in case.arms) + 2
    yield f"  {'arm':<{width}}{'seconds':>10}{'gain':>24}{'peak MB':>9}"
    seconds = {measured.arm: measured.seconds for measured in case.with_status(MEASURED)}
    for measured in case.arms:
        start = f"  {measured.name:<{width}}"
        if measured.status != MEASURED:
            yield f"{start}  {measured.status}: {measured.reason}"
            continue
        plain = Arm(backend=measured.arm.backend)
        gained = gain(seconds[plain], measured.seconds) if plain in seconds and plain != measured.arm else ""
        peak = "" if measured.peak_memory_bytes is None else f"{measured.peak_memory_bytes / 1e6:.1f}"
        yield f"{start}{statistics.median(measured.seconds):>10.4f}{gained!s:>24}{peak:>9}"


def _report(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    # Imported here because pandas and matplotlib take seconds to load.
    from lab.speed.speed_report import write_report

    print(write_report(options.files, options.output))
    print(f"written to {options.output / 'speed.md'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
