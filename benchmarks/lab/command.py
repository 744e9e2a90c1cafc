"""The command line of `bench.py`."""

import argparse
from collections.abc import Sequence

from ppdiffusers_tome.cli import escape_unprintable, exit_status
from ppdiffusers_tome.wording import command_line


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Run what the parser's `run` names, a function of options and arguments; returns the exit status.

    After Ctrl-C the error names the command that continues a measurement; a `report` has nothing to continue.
    """
    escape_unprintable()
    options = parser.parse_args(arguments)
    remedy = "" if options.what else f": continue with {command_line(arguments, parser.prog)}"
    return exit_status(lambda: options.run(options, arguments), remedy)


def square(text: str) -> int:
    """The side of a square in px, of "512" or "512x512": the type of --size, because benchmarks measure squares.

    Raises:
        ValueError: the text is no size.
        argparse.ArgumentTypeError: the size is no square.
    """
    width, _, height = text.lower().partition("x")
    if height and int(height) != int(width):
        raise argparse.ArgumentTypeError(f"{text} is not a square, and only squares are measured")
    return int(width)
