"""`python -m ppdiffusers_tome`: the command line. It only dispatches to `commands`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ._version import __version__
from .commands import bench, compare, evaluate, export, generate, serve, tune
from .comparison.results import PROGRAM, command_line
from .errors import ToMeError

Command: TypeAlias = Callable[[argparse._SubParsersAction], None]  # adds a command to the command line
COMMANDS: tuple[Command, ...] = (
    compare.add,
    bench.add,
    evaluate.add,
    tune.add,
    export.add,
    generate.add,
    serve.add,
)
RESUMABLE = ("bench", "evaluate", "tune", "generate")  # what they have measured or generated is on the disk
INTERRUPTED = 130  # exit status after Ctrl-C, as in shells


def main(arguments: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run one command; returns its exit status: 0, 2 for an invalid argument, 130 after Ctrl-C.

    1 is for a file that cannot be used, a case in which nothing could be measured (`bench`), a goal that is missed
    (`compare`, `tune`) or an image that failed (`generate`).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser(commands).parse_args(arguments)
    try:
        return options.run(options, arguments)
    except ToMeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted{_remedy(options, arguments)}", file=sys.stderr)
        return INTERRUPTED


def _remedy(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """What a user can do after Ctrl-C."""
    if options.command in RESUMABLE and not getattr(options, "what", None):
        again = [argument for argument in arguments[1:] if argument != "--restart"]  # which would forget what is there
        program = getattr(options, "program", f"{PROGRAM} {options.command}")
        return f": continue with {command_line(again, program)}"
    return ": nothing was written" if options.command == "export" else ""


def _parser(commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ppdiffusers_tome", description="Token merging for ppdiffusers.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for add in commands:
        add(subparsers)
    return parser
