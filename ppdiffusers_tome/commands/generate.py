"""`generate`: many images from a prompt file."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..errors import ToMeConfigError
from ..run.defaults import read_defaults
from ..run.formats import is_gpu
from ..run.manifest import Manifest, read_manifest
from ..run.sizes import parse_size
from ..serving.jobs import MAX_STEPS, Job
from ..serving.limits import Limits
from ..serving.prompt_file import MAX_CHARACTERS, read_prompts
from .image_options import (
    add_command,
    add_runtime_options,
    add_step_options,
    add_worker_options,
    check_runtime,
    naming_options,
    open_image_backend,
    runtime_settings,
    step_settings,
    threads_per_process,
)

EXAMPLE = """\
  python -m ppdiffusers_tome generate --model build/scenes \\
      --prompts examples/scenes_sd/prompts.txt --output build/images
  # build/scenes: the example of export --help"""


def add(commands: argparse._SubParsersAction) -> None:
    """Add `generate` to the command line."""
    about = "generate an image for each prompt of a file; run it again to resume"
    command = add_command(commands, "generate", about, EXAMPLE)
    option = command.add_argument
    option("--prompts", type=Path, required=True, help=".txt: a prompt per line; .jsonl: a JSON object per line")
    option("--output", type=Path, required=True, help="folder for the images")
    option("--model", type=Path, required=True, help="folder written by the command export")
    add_step_options(command)
    option("--size", help="px or WIDTHxHEIGHT in px, an exported one (default: the first)")
    option("--ratio", type=float, help="how much merging leaves out (default: the first exported)")
    option("--seed", type=int, default=0, help="of the first prompt; each further one adds 1 (default: %(default)s)")
    option("--negative-prompt", default="", help="what the images should not show")
    option("--batch", type=int, default=4, help="largest number of images in one pipeline call (default: %(default)s)")
    add_runtime_options(command)
    add_worker_options(command)
    command.set_defaults(run=_generate)


def _generate(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from ..serving.engine import load_engine
    from ..serving.offline import generate, model_hash

    if options.batch < 1:
        raise ToMeConfigError(f"--batch {options.batch} is not allowed: it must be 1 or more")
    load_threads = threads_per_process(options)
    model = options.model.resolve()
    manifest = read_manifest(model)
    check_runtime(manifest, options)
    defaults, limits = _defaults(manifest, options)
    ratio = defaults.ratio
    prompts = read_prompts(options.prompts, defaults, limits)
    merging = f": {manifest.methods[ratio]}" if manifest.methods[ratio] else ""
    print(f"{manifest.name}, ratio {ratio:g}{merging}, {defaults.steps} steps")
    print(f"{len(prompts)} images, to {options.output}; those that are already there stay", flush=True)
    with open_image_backend(options, gpu=is_gpu(options.device)) as make_backend:
        settings = runtime_settings(manifest, options)
        backend = make_backend(partial(load_engine, model, expected=manifest, threads=load_threads, **settings))
        identity = model_hash(model, {name: settings[name] for name in ("runtime", "device", "precision")})
        if options.ray:  # whose engines report no steps
            print(f"loading the model on {options.actors} engines", file=sys.stderr, flush=True)
        summary = generate(prompts, identity, options.output, options.batch, backend)
    for prompt, reason in summary.failures:
        print(f"failed: image {prompt.index} ({prompt.job.prompt!r:.60}): {reason}", file=sys.stderr)
    print(f"{summary} of {len(prompts)}, in {options.output}")
    return 1 if summary.failures else 0


def _defaults(manifest: Manifest, options: argparse.Namespace) -> tuple[Job, Limits]:
    """The job with the defaults of the prompt file's fields, and the jobs that are allowed, by options and export.

    Raises:
        ToMeConfigError: an option's value is not allowed, or was not exported.
    """
    limits = Limits(
        manifest.sizes, manifest.ratios, prompt_characters=MAX_CHARACTERS, steps=MAX_STEPS, guidance_scale=100.0
    )
    with naming_options():
        size = limits.find_size(parse_size(options.size)) if options.size else manifest.sizes[0]
        values = limits.checked(
            ratio=manifest.ratios[0] if options.ratio is None else options.ratio,
            seed=options.seed,
            negative_prompt=options.negative_prompt,
            **step_settings(options, read_defaults(options.model)),
        )
    return Job("", size, **values), limits
