"""`generate`: many pictures from a file of prompts."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..errors import ToMeConfigError
from ..generation.offline import generate
from ..generation.prompts import Defaults, read_prompts
from ..inference.manifest import Manifest, parse_size, read_manifest
from ..serving.engine import load_engine
from ..serving.errors import JobError
from ..serving.jobs import Limits
from .drawers import add_options, open_drawers, threads

INTERRUPTED = 130  # the exit status of what Ctrl-C ended, as shells have it
# What the options call a job's fields.
FLAGS = {"guidance_scale": "guidance", "negative_prompt": "negative"}


def add(commands: argparse._SubParsersAction) -> None:
    """Add `generate` to the command line."""
    command = commands.add_parser(
        "generate",
        help="draw a file of prompts; run it again to go on where it was interrupted",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("--prompts", type=Path, required=True, help=".txt: a prompt a line; .jsonl: an object a line")
    command.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    command.add_argument("--model", type=Path, required=True, help="folder that the command export wrote")
    command.add_argument("--steps", type=int, default=20, help="denoising steps")
    command.add_argument("--guidance", type=float, default=7.5, help="weight of classifier-free guidance")
    command.add_argument(
        "--size",
        help="WIDTHxHEIGHT in pixels, the first that was exported if not given. "
        "Of a model that was exported for any size: all that there are, with commas, the default first",
    )
    command.add_argument("--ratio", type=float, help="share of tokens to merge; the first exported if not given")
    command.add_argument("--seed", type=int, default=0, help="of the first prompt; the next has the next number")
    command.add_argument("--negative", default="", help="negative prompt")
    command.add_argument("--batch", type=int, default=4, help="most pictures in one pipeline call")
    command.add_argument("--device", default="cpu", help="cpu or gpu")
    command.add_argument(
        "--no-verify", dest="verify", action="store_false", help="do not compare the weights with their hashes"
    )
    add_options(command)
    command.set_defaults(run=_generate)


def _generate(options: argparse.Namespace, given: Sequence[str]) -> int:
    if options.batch < 1:
        raise ToMeConfigError(f"--batch {options.batch} is not allowed: it must be 1 or more")
    load_threads = threads(options)
    model = options.model.resolve()
    defaults, limits = _defaults(read_manifest(model), options)
    prompts = read_prompts(options.prompts, defaults, limits)
    try:
        with open_drawers(options, gpu=options.device.startswith("gpu")) as make_drawer:
            draw = make_drawer(partial(load_engine, model, options.device, load_threads, verify=options.verify))
            summary = generate(prompts, model, options.out, options.batch, draw)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return INTERRUPTED
    for prompt, failure in summary.failures:
        print(f"failed: picture {prompt.index} ({prompt.job.prompt!r:.60}): {failure.reason}", file=sys.stderr)
    print(f"{summary} of {len(prompts)}, in {options.out}")
    return 1 if summary.failures else 0


def _defaults(manifest: Manifest, options: argparse.Namespace) -> tuple[Defaults, Limits]:
    """What the command line and the export say of lines that leave things out, and which lines are allowed.

    Raises:
        ToMeConfigError: an option has a value that is not allowed, or was not exported.
    """
    given = tuple(parse_size(text) for text in options.size.split(",")) if options.size else ()
    sizes = manifest.sizes or given
    if not sizes:
        raise ToMeConfigError("the model was exported for any size: tell which ones there are, --size 512x512 for one")
    for size in sizes:
        if size.height % manifest.vae_factor or size.width % manifest.vae_factor:
            raise ToMeConfigError(f"--size {size} is not allowed: both must be multiples of {manifest.vae_factor}")
    default = (given or sizes)[0]
    ratio = manifest.ratios[0] if options.ratio is None else options.ratio
    limits = Limits(sizes, manifest.ratios, prompt_characters=100_000, steps=1000, guidance_scale=100.0)
    defaults = Defaults(*default, ratio, options.steps, options.guidance, options.negative, options.seed)
    try:
        limits.check(defaults.job("", 0))
    except JobError as error:
        raise ToMeConfigError(f"--{FLAGS.get(error.field, error.field)}: {error}") from error
    return defaults, limits
