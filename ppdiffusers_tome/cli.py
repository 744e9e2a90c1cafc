"""`python -m ppdiffusers_tome`: the command line. No logic of its own."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ._version import __version__
from .errors import ToMeError
from .evaluation.benchmark import OpsCase, format_ops, time_ops
from .evaluation.families import format_markdown, format_text, verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 for an argument that is not allowed."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    try:
        return options.run(options, given)
    except ToMeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _bench_ops(options: argparse.Namespace, given: Sequence[str]) -> int:
    case = OpsCase(options.batch, options.height, options.width, options.channels, options.ratio)
    result = {"command": shlex.join(["python", "-m", "ppdiffusers_tome", *given]), **time_ops(case, options.repeats)}
    print(format_ops(result))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _families(options: argparse.Namespace, given: Sequence[str]) -> int:
    found = verdicts()
    print(format_text(found))
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(format_markdown(found), encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ppdiffusers_tome", description="Token merging for ppdiffusers.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
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
    ops.set_defaults(run=_bench_ops)
    families = commands.add_parser("families", help="which of ppdiffusers' pipelines merge, and why the others do not")
    page = Path("docs/families.md")
    families.add_argument("--markdown", type=Path, nargs="?", const=page, help=f"also write the table to {page}")
    families.set_defaults(run=_families)
    return parser
