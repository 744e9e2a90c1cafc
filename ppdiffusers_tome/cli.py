"""`python -m ppdiffusers_tome`: the command line. It only dispatches to `commands`."""

import argparse
import sys
from collections.abc import Sequence

from ._version import __version__
from .commands import bench, evaluate, export, families, generate, serve, tune
from .errors import ToMeError

COMMANDS = (bench, evaluate, tune, families, export, generate, serve)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 2 for an invalid argument.

    1 is for a file that cannot be used, an arm that became slower (`bench report`) or a goal that is missed (`tune`).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    try:
        return options.run(options, arguments)
    except ToMeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ppdiffusers_tome", description="Token merging for ppdiffusers.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser
