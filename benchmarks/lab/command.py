"""Runs the command lines of `bench.py` and `evaluate.py`."""

import argparse
from collections.abc import Sequence

from ppdiffusers_tome.cli import exit_status
from ppdiffusers_tome.comparison.results import command_line


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Run what the parser's `run` names, a function of options and arguments; returns the exit status.

    After Ctrl-C the error names the command that continues a measurement; a `report` has nothing to continue.
    """
    options = parser.parse_args(arguments)
    remedy = "" if options.what else f": continue with {command_line(arguments, parser.prog)}"
    return exit_status(lambda: options.run(options, arguments), remedy)
