"""`bench`: time models and operations, and report what was timed."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import ToMeConfigError
from ..evaluation.environment import usable_cores
from ..evaluation.operations import OpsCase, format_ops, time_ops
from ..evaluation.speed.cases import ARMS, BACKENDS, DTYPES, SCOPES, TORCH, ArmPlan, Case, plan_arms
from ..evaluation.speed.names import EAGER
from ..evaluation.speed.runner import Settings, measure_all
from ..evaluation.speed.summary import format_result
from ..evaluation.torch_arm import why_not
from ..published.architectures import ARCHITECTURES

BUNDLED = Path("examples/emoji_sd")
QUICK = {"architecture": None, "size": [128], "rounds": 2, "backend": list(BACKENDS)}  # defaults of --quick


def add(commands: argparse._SubParsersAction) -> None:
    """Add `bench` and what belongs to it to the command line."""
    about = "Time a UNet, one of its blocks or a pipeline: plain, merged, and what merging is measured against."
    bench = commands.add_parser(
        "bench", help="time things", description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    _add_options(bench)
    bench.set_defaults(run=partial(_speed, bench))
    others = bench.add_subparsers(dest="what")
    ops = others.add_parser(
        "ops",
        help="merge, unmerge and plan against the functions that ppdiffusers ships",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field, default in vars(OpsCase()).items():
        ops.add_argument(f"--{field}", type=type(default), default=default)
    ops.add_argument("--repeats", type=int, default=20, help="timed rounds")
    ops.add_argument("--output", type=Path, help="write the result, with machine and versions, to this JSON file")
    ops.set_defaults(run=_ops)
    report = others.add_parser("report", help="tables and plots of what `bench` wrote")
    report.add_argument("files", type=Path, nargs="+", metavar="FILE", help="result files")
    report.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        default=Path("outputs"),
        help="folder for speed.md and its plots (default: outputs)",
    )
    report.add_argument(
        "--compare",
        type=Path,
        metavar="OLD",
        help="an older result file: print what became slower; exit status 1 if any",
    )
    report.set_defaults(run=_report)


def _add_options(bench: argparse.ArgumentParser) -> None:
    what = bench.add_argument_group("what is timed; several values are measured each with each")
    model = what.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="a pipeline's folder")
    model.add_argument("--architecture", choices=list(ARCHITECTURES), default="sd15", help="a UNet of random weights")
    what.add_argument("--scope", choices=SCOPES, default="unet", help="of the model")
    what.add_argument("--size", type=int, nargs="+", default=[512], help="px, of square pictures")
    what.add_argument(
        "--batch", type=int, nargs="+", default=[2], help="rows of a UNet or block, pictures of a pipeline"
    )
    what.add_argument("--ratio", type=float, nargs="+", default=[0.5], help="share of tokens to merge: 0.1 … 0.75")
    what.add_argument(
        "--max-downsample", type=int, nargs="+", default=[None], help="deepest levels; none: the first with attention"
    )
    what.add_argument("--dtype", choices=DTYPES, nargs="+", default=["float32"], help="of weights and inputs")
    what.add_argument("--backend", choices=BACKENDS, nargs="+", default=[EAGER], help="Paddle's")
    what.add_argument("--arms", choices=ARMS, nargs="+", help="what is compared; none: all")
    what.add_argument("--steps", type=int, default=20, help="of a pipeline")
    what.add_argument("--guidance", type=float, default=7.5, help="of a pipeline")
    how = bench.add_argument_group("how")
    how.add_argument("--rounds", type=int, default=5, help="timed passes of each arm, taking turns")
    how.add_argument("--warm-up", type=int, default=1, help="passes of each arm before")
    how.add_argument("--threads", type=int, default=usable_cores(), help="of every arm")
    how.add_argument("--memory-limit", type=float, metavar="GB", help="for weights and a pass; none: what there is")
    how.add_argument("--torch-python", help="interpreter with torch, diffusers and tomesd; none: this one")
    how.add_argument(
        "--quick", action="store_true", help="other defaults, a tiny model in 2 rounds: shows that all works"
    )
    how.add_argument("--output", type=Path, default=Path("outputs/bench.json"), help="the result's file")
    how.add_argument("--restart", action="store_true", help="do not go on with a run that was killed")


def _speed(parser: argparse.ArgumentParser, options: argparse.Namespace, given: Sequence[str]) -> int:
    if options.quick:  # read again: what is given keeps its value
        parser.set_defaults(**QUICK)
        options = parser.parse_args(given[1:])
    if options.output.is_dir():
        raise ToMeConfigError(
            f"--output {options.output} is a folder: name a file, such as {options.output}/speed.json."
        )
    wanted = options.arms or list(ARMS)
    python, without_torch = _torch(options) if TORCH in wanted else (None, None)
    usable = None if without_torch else python
    settings = Settings(options.rounds, options.warm_up, options.threads, options.memory_limit, usable)
    planned: list[tuple[Case, list[ArmPlan]]] = []
    for case in _cases(options):
        case.check()
        arms = plan_arms(case, wanted, options.backend, options.ratio, options.max_downsample, without_torch)
        planned.append((case, arms))
    command = shlex.join(["python", "-m", "ppdiffusers_tome", *given])
    print(format_result(measure_all(planned, settings, options.output, command, options.restart)))
    print(f"written to {options.output}")
    return 0


def _cases(options: argparse.Namespace) -> list[Case]:
    if options.model is not None:
        # A folder that has an architecture's name is told from it by its path.
        models = [f"./{options.model}" if str(options.model) in ARCHITECTURES else str(options.model)]
    elif options.architecture is not None:
        models = [options.architecture]
    else:
        models = ["tiny", *([str(BUNDLED)] if BUNDLED.is_dir() else [])]
    drawing = {"steps": options.steps, "guidance": options.guidance} if options.scope == "pipeline" else {}
    return [
        Case(model, options.scope, size, batch, dtype, **drawing)
        for model, dtype, size, batch in product(models, options.dtype, options.size, options.batch)
    ]


def _torch(options: argparse.Namespace) -> tuple[str, str | None]:
    """The interpreter for the backend PyTorch, and why it is of no use; an error where it was asked for."""
    python = options.torch_python or sys.executable
    reason = why_not(python)
    if reason and (options.torch_python or options.arms):
        raise ToMeConfigError(f"--torch-python {python} is of no use: {reason}")
    return python, reason


def _report(options: argparse.Namespace, given: Sequence[str]) -> int:
    from ..evaluation.speed.compare import compare, is_slower
    from ..evaluation.speed.tables import write_report

    old = _read(options.compare) if options.compare else None
    results = [_read(file) for file in options.files]
    compared = [compare(old, new) for new in results] if old else []
    report = write_report(options.files, options.output)
    print("\n\n".join(compared) or report)
    print(f"written to {options.output / 'speed.md'}", file=sys.stderr)
    return int(old is not None and any(is_slower(old, new) for new in results))


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ToMeConfigError(f"{path} is no result file: {error}") from None


def _ops(options: argparse.Namespace, given: Sequence[str]) -> int:
    case = OpsCase(options.batch, options.height, options.width, options.channels, options.ratio)
    result = {"command": shlex.join(["python", "-m", "ppdiffusers_tome", *given]), **time_ops(case, options.repeats)}
    print(format_ops(result))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0
