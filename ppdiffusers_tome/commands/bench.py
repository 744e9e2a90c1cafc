"""`bench`: time things."""

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from ..evaluation.benchmark import OpsCase, format_ops, time_ops


def add(commands: argparse._SubParsersAction) -> None:
    """Add `bench` and what it times to the command line."""
    bench = commands.add_parser("bench", help="time things").add_subparsers(dest="what", required=True)
    ops = bench.add_parser(
        "ops",
        help="merge, unmerge and plan against the functions that ppdiffusers ships",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field, default in vars(OpsCase()).items():
        ops.add_argument(f"--{field}", type=type(default), default=default)
    ops.add_argument("--repeats", type=int, default=20, help="timed rounds")
    ops.add_argument("--output", type=Path, help="write the result, with machine and versions, to this JSON file")
    ops.set_defaults(run=_ops)


def _ops(options: argparse.Namespace, given: Sequence[str]) -> int:
    case = OpsCase(options.batch, options.height, options.width, options.channels, options.ratio)
    result = {"command": shlex.join(["python", "-m", "ppdiffusers_tome", *given]), **time_ops(case, options.repeats)}
    print(format_ops(result))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0
