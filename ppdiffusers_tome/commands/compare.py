"""`compare`: plain and merged images of a model side by side, with a table of their times."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from ..config import ToMeConfig
from ..cores import usable_cores
from ..errors import ToMeConfigError
from ..evaluation.quality.image_sets import prompts_of
from ..evaluation.results import PROGRAM, command_line, make_result, write_result
from ..generation.jobs import MAX_SEED, MAX_STEPS
from ..generation.png import upright_rgb
from ..inference.loading import require_model_folder
from .image_options import OWN, add_step_options, step_settings
from .merge_options import add_merge_options, merge_configs


def add(commands: argparse._SubParsersAction) -> None:
    """Add `compare` to the command line."""
    command = commands.add_parser(
        "compare",
        help="generate prompts plain and merged, and write a sheet and a table of them",
        description="Generate each prompt plain and merged from the same noise, without an export. Write a sheet of "
        "the images and a JSON file of the figures for each size, and print the table. "
        "Steps are timed in turn, plain and merged, so that a busy machine slows all of them down alike.",
    )
    option, default = command.add_argument, "(default: %(default)s)"
    option("--model", required=True, help="folder of a pipeline, or hub name")
    option("--controlnet", metavar="DIR", help="a ControlNet, folder or hub name; needs --image")
    option(
        "--image", type=Path, metavar="FILE", help="the input of the ControlNet, such as edges; cropped to a square"
    )
    option(
        "--prompt", nargs="+", metavar="TEXT", help="one or several (default: the first of the model's prompts.txt)"
    )
    option("--size", type=int, nargs="+", help=f"px, height and width; one or several {OWN}")
    option("--ratio", type=float, nargs="+", help="one or several (default: the method's own, or 0.5)")
    option("--seed", type=int, default=0, help=f"of the noise of every image {default}")
    add_step_options(command, OWN)
    option("--threads", type=int, default=usable_cores(), help=f"CPU threads {default}")
    option("--output", type=Path, default=Path("outputs"), help=f"folder for the sheets {default}")
    add_merge_options(command, "how to merge", is_single=True)
    command.set_defaults(run=_compare)


def _compare(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    configs = _check(options)
    condition = None if options.image is None else _open(options.image)
    # Late: they import all that generates and measures images, which other commands do not need.
    import paddle
    import ppdiffusers
    from paddle.base import core
    from paddlenlp.utils.log import logger

    from ..evaluation.comparison import Scene, compare, draw_sheet, make_table
    from ..evaluation.quality.image_generation import model_defaults
    from ..evaluation.quality.sheets import save_jpeg
    from ..inference.loading import load_for_export

    core.set_num_threads(options.threads)
    logger.set_level("WARNING")
    ppdiffusers.utils.logging.disable_progress_bar()
    dtype = "float32" if paddle.get_device() == "cpu" else "float16"  # as users run models there
    pipe = load_for_export(options.model, options.controlnet, safety_checker=False, dtype=dtype)
    own = model_defaults(options.model, pipe)
    pipe.set_progress_bar_config(disable=not sys.stderr.isatty(), leave=False)
    about: dict[str, Any] = {"model": options.model, "seed": options.seed, "threads": options.threads}
    about |= {"controlnet": options.controlnet, "dtype": dtype}
    about |= {"prompts": options.prompt or prompts_of(options.model)[:1]}
    about |= step_settings(options, own)
    fastest = 0.0
    for size in options.size or [own.size]:
        print(f"{size} px, {about['steps']} steps, prompts: {', '.join(about['prompts'])}", flush=True)
        inputs = {} if condition is None else {"image": ImageOps.fit(condition, (size, size))}
        scene = Scene(about["prompts"], size, about["steps"], about["guidance_scale"], options.seed, inputs)
        arms = compare(pipe, scene, configs, report=lambda line: print(f"  {line} …", file=sys.stderr, flush=True))
        rows = [arm.figures(arms[0]) for arm in arms]
        sheet = options.output / f"compare_{size}.jpg"
        save_jpeg(draw_sheet(arms, scene), sheet, size=size, merging=[str(config) for config in configs], **about)
        result = make_result("comparison", command_line(arguments), size=size, **about, arms=rows)
        write_result(sheet.with_suffix(".json"), result)
        print(f"{make_table(rows)}\nimages: {sheet}", flush=True)
        fastest = max(fastest, *(row["speed_up"] for row in rows[1:]))
    print(_next_steps(options.model, fastest))
    return 0


def _check(options: argparse.Namespace) -> list[ToMeConfig]:
    """The ways to merge; ToMeConfigError if an option is not allowed, before anything is loaded."""
    require_model_folder(options.model, hub_names=True)
    if (options.controlnet is None) != (options.image is None):
        raise ToMeConfigError("--controlnet and --image belong together: pass both or none.")
    for name, minimum, maximum in (("steps", 1, MAX_STEPS), ("threads", 1, 1024), ("seed", 0, MAX_SEED)):
        value = getattr(options, name)
        if value is not None and not minimum <= value <= maximum:
            raise ToMeConfigError(f"--{name} {value} is not allowed: it must be {minimum} to {maximum}.")
    for size in options.size or ():
        if size < 8 or size % 8:
            raise ToMeConfigError(f"--size {size} is not allowed: it must be a multiple of 8 px.")
    if options.output.exists() and not options.output.is_dir():
        raise ToMeConfigError(f"--output {options.output} is a file: name a folder.")
    configs = merge_configs(options)
    if not all(config.ratio for config in configs):
        raise ToMeConfigError("--ratio 0 is not allowed: plain images are always generated.")
    return configs


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return upright_rgb(image)
    except OSError as error:
        raise ToMeConfigError(f"--image {path} cannot be read: {error}.") from None


def _next_steps(model: str, speed_up: float) -> str:
    """What a user can do after a comparison."""
    if speed_up <= 1:
        return "Merging does not pay here. docs/usage.md has a table of where it does: larger images gain more."
    lines = ["Next:", f"  {PROGRAM} export --model {model} --output build/export   # on a CPU: faster programs"]
    lines += [f"  {PROGRAM} tune --model {model} --speed-up 1.5   # settings that suit this model"]
    return "\n".join([*lines, "  pipe.apply_tome(ratio=0.5)   # in your own code; docs/usage.md has more"])
