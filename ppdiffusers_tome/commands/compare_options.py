"""The options of `compare`. They stand apart from what it does, which imports Paddle."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..comparison.option_defaults import KNOWN_RATIOS, NOT_REACHED, PROMPT_COUNT, ROUNDS, STRENGTH
from ..cores import usable_cores
from .image_options import MODEL_DEFAULT_HELP, add_command, add_runtime_options, add_step_options
from .merge_options import add_merge_options

DESCRIPTION = """\
Generate each prompt plain and merged from the same noise. Write a sheet of the images and a JSON file
of the figures for each size, and print the table: seconds per step, gain (plain's time divided by that
of the method: the median over the rounds), PSNR and SSIM against plain (the median of the images, and
the worst), and peak memory. Steps are timed in turn, plain and merged, so that a busy machine slows all
of them down alike. A gain is printed where the rounds show one. The command begins with the number of
images and steps that it takes."""
EXAMPLE = """\
  python -m ppdiffusers_tome compare --model examples/scenes_sd --size 256 \\
      --method interlace todo --goal 1.4x --save build/tome.json"""


def add(commands: argparse._SubParsersAction) -> None:
    """Add `compare` to the command line."""
    about = "compare plain and merged images and their times, and choose the settings that reach a goal"
    command = add_command(commands, "compare", about, EXAMPLE, DESCRIPTION)
    option, default = command.add_argument, "(default: %(default)s)"
    option("--model", required=True, help="folder of a pipeline or hub name, or a folder that export wrote")
    option("--controlnet", metavar="DIR", help="a ControlNet, folder or hub name; an export has its own")
    image = "what image-to-image starts from, or the input of the ControlNet, such as edges; cropped to the size"
    option("--image", type=Path, metavar="FILE", help=image)
    option("--strength", type=float, help=f"of image-to-image: share of the steps that run (default: {STRENGTH})")
    prompts = f"the first {PROMPT_COUNT} of the model's prompts.txt, or of an export's defaults.json"
    option("--prompt", nargs="+", metavar="TEXT", help=f"one or several (default: {prompts})")
    option("--size", nargs="+", help=f"one or several, px or WIDTHxHEIGHT in px {MODEL_DEFAULT_HELP}")
    ratios = "one or several; a method runs at each that it allows, or at its own"
    option("--ratio", type=float, nargs="+", help=f"{ratios} (default: its own; of an export all)")
    option("--batch", type=int, default=1, help=f"images of each prompt, in one call of the pipeline {default}")
    option("--seed", type=int, default=0, help=f"of the noise of every prompt {default}")
    add_step_options(command, MODEL_DEFAULT_HELP)
    rounds = "timed steps of plain and of each method; too few show no gain"
    option("--rounds", type=int, default=ROUNDS, help=f"{rounds} {default}")
    option("--threads", type=int, default=usable_cores(), help=f"CPU threads {default}")
    option("--output", type=Path, default=Path("outputs"), help=f"folder for the sheets {default}")
    add_merge_options(command, "how to merge")
    option = command.add_argument_group("choose settings").add_argument
    option(
        "--goal",
        help="1.4x: of the settings that are so many times as fast as plain, the nearest to it; 35dB: of those with "
        f"this median PSNR, the fastest. Tries interlace at {', '.join(map(str, KNOWN_RATIOS))}; with --method each "
        "of these methods, all but interlace at its default ratio; with --ratio, --merging or --config only what "
        f"these name; of an export its ratios. Exit status {NOT_REACHED} if none reaches it",
    )
    option("--save", type=Path, metavar="FILE", help="write the chosen settings, for apply_tome and export --config")
    add_runtime_options(command)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from . import compare

    return compare.run(options, arguments)
