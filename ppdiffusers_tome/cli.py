"""`python -m ppdiffusers_tome`: the command line. It only dispatches to `commands`."""

import argparse
import io
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ._version import __version__
from .commands import compare_options, export, generate, merge_onnx, serve
from .errors import NoMergeableLayerError, ToMeConfigError, ToMeError
from .signals import ENDINGS, signals_as_errors
from .wording import PROGRAM, command_line, nearest

Command: TypeAlias = Callable[[argparse._SubParsersAction], None]  # adds a command to the command line
COMMANDS: tuple[Command, ...] = (compare_options.add, export.add, generate.add, serve.add, merge_onnx.add)
EXAMPLE = f"""\
example:
  {PROGRAM} compare --model examples/scenes_sd --size 256 --ratio 0.3 0.5
  {PROGRAM} export --model examples/scenes_sd --ratio 0.5 0 --img2img --output build/scenes
  {PROGRAM} serve --model build/scenes --open

{PROGRAM} COMMAND --help lists the options of a command."""
FAILED, USAGE = 1, 2  # exit statuses; docs/troubleshooting.md has all


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of the process; returns its exit status, as `run`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    return run(read_arguments(arguments), arguments)


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command, with the values of its options. Nothing here imports Paddle.

    Raises:
        SystemExit: --help or --version was printed, or the error of an option.
    """
    escape_unprintable()
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:  # the error of the command, with its usage; argparse's would have that of the program
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown, options.parser)}")
    return options


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run a command; returns its exit status, as `exit_status`.

    FAILED is also for a goal that is missed (`compare`) or an image that failed (`generate`).

    Args:
        options: of `read_arguments`.
        arguments: what they were read from.
    """
    remedy = {
        "generate": f": continue with {command_line(arguments)}",  # what it has generated is on the disk
        "export": ": nothing was written",
        "merge-onnx": ": nothing was written",
    }.get(options.command, "")
    return exit_status(lambda: options.run(options, arguments), remedy)


def _hint(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """A hint at the option that is written like the first unknown option; empty if none is."""
    known = [name for action in parser._actions for name in action.option_strings if action.help != argparse.SUPPRESS]
    meant = nearest(unknown[0].partition("=")[0], known)
    return f" (did you mean {meant}?)" if meant else ""


def escape_unprintable() -> None:
    """Let stdout print what its encoding lacks, such as a prompt in Chinese in a terminal without UTF-8, as escapes.

    Otherwise such a character would end a command before it has reported what it computed. stderr does this anyway.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def exit_status(run: Callable[[], int], remedy: str = "") -> int:
    """What `run` returns; USAGE for an argument that is not allowed, FAILED for all other expected errors.

    After Ctrl-C it is 130 and after SIGTERM 143, whatever error a library makes of it. Errors are one line on stderr,
    which names options of the command line.

    Args:
        run: the command.
        remedy: what a user can do after Ctrl-C or SIGTERM.
    """
    with signals_as_errors() as received:
        try:
            return run()
        except BaseException as error:
            if received or isinstance(error, KeyboardInterrupt):
                number = signal.Signals(received[0]) if received else signal.SIGINT
                print(f"{ENDINGS[number]}{remedy}", file=sys.stderr)
                return 128 + number
            if not isinstance(error, (ToMeError, OSError)):
                raise
            print(f"error: {error}", file=sys.stderr)
            return USAGE if isinstance(error, (ToMeConfigError, NoMergeableLayerError)) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Token merging for ppdiffusers.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for add in COMMANDS:
        add(subparsers)
    return parser
