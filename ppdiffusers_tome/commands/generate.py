"""`generate`: many pictures from a file of prompts."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..errors import ToMeConfigError, ToMeError
from ..inference.manifest import Manifest, parse_size, read_manifest
from ..serving.engine import load_engine
from ..serving.errors import JobError
from ..serving.jobs import Limits
from ..serving.offline import Drawer, draw_here, generate
from ..serving.prompts import Defaults, read_prompts

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
    command.add_argument("--threads", type=int, help="CPU threads; all cores if not given, divided among the actors")
    ray = command.add_argument_group("on several processes or machines (pip install 'ppdiffusers_tome[ray]')")
    ray.add_argument("--ray", action="store_true", help="draw on Ray actors; one that dies is replaced")
    ray.add_argument("--actors", type=int, default=2, help="how many; each loads the model")
    ray.add_argument("--ray-address", help="of a cluster; a Ray of this machine's own if not given")
    command.set_defaults(run=_generate)


def _generate(options: argparse.Namespace, given: Sequence[str]) -> int:
    for name in ("batch", "actors"):
        if getattr(options, name) < 1:
            raise ToMeConfigError(f"--{name} {getattr(options, name)} is not allowed: it must be 1 or more")
    model = options.model.resolve()
    defaults, limits = _defaults(read_manifest(model), options)
    prompts = read_prompts(options.prompts, defaults, limits)
    try:
        with _drawer(options, model) as draw:
            summary = generate(prompts, model, options.out, options.batch, draw)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return INTERRUPTED
    for prompt, failure in summary.failures:
        print(f"failed: picture {prompt.index} ({prompt.job.prompt!r:.60}): {failure.reason}", file=sys.stderr)
    print(f"{summary} of {len(prompts)}, in {options.out}")
    return 1 if summary.failures else 0


@contextmanager
def _drawer(options: argparse.Namespace, model: Path) -> Iterator[Drawer]:
    if not options.ray:
        yield draw_here(partial(load_engine, model, options.device, options.threads))
        return
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ToMeError(f"{error}. --ray needs: pip install 'ppdiffusers_tome[ray]'") from error
    from ..serving.actors import draw_on_actors
    from ..serving.ray_session import ray_session

    threads = options.threads or max(1, (os.cpu_count() or 1) // options.actors)
    gpus = 1.0 if options.device.startswith("gpu") else 0.0
    actors = options.actors
    with ray_session(options.ray_address, actors * threads, actors * gpus, shows_logs=False):
        yield draw_on_actors(partial(load_engine, model, options.device, threads), options.actors, threads, gpus)


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
