"""`compare`: plain and merged images of a model side by side, with a table of their times."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from ..comparison.results import command_line, make_result, write_result
from ..config import ToMeConfig
from ..cores import usable_cores
from ..errors import ToMeConfigError
from ..files import check_writable
from ..generation.jobs import MAX_SEED, MAX_STEPS
from ..generation.png import upright_rgb
from ..generation.prompt_file import model_prompts
from ..inference.loading import model_defaults, pipeline_class, require_model_folder
from ..inference.manifest import Size, parse_size
from .image_options import OWN, add_step_options, naming_options, step_settings
from .merge_options import add_merge_options, merge_configs

# Whose models a StableDiffusionControlNetPipeline takes.
WITH_CONTROLNET = ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionControlNetPipeline")


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
        "--image", type=Path, metavar="FILE", help="the input of the ControlNet, such as edges; cropped to the size"
    )
    option(
        "--prompt", nargs="+", metavar="TEXT", help="one or several (default: the first of the model's prompts.txt)"
    )
    option("--size", nargs="+", help=f"one or several, px or WIDTHxHEIGHT in px {OWN}")
    option("--ratio", type=float, nargs="+", help="one or several (default: the method's own, or 0.5)")
    option("--seed", type=int, default=0, help=f"of the noise of every image {default}")
    add_step_options(command, OWN)
    option("--threads", type=int, default=usable_cores(), help=f"CPU threads {default}")
    option("--output", type=Path, default=Path("outputs"), help=f"folder for the sheets {default}")
    add_merge_options(command, "how to merge", is_single=True)
    command.set_defaults(run=_compare)


def _compare(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    configs, sizes = _check(options)
    condition = None if options.image is None else _open(options.image)
    # Late: they import all that generates and measures images, which other commands do not need.
    import paddle
    import ppdiffusers
    from paddle.base import core
    from paddlenlp.utils.log import logger

    from ..comparison.arms import Scene, check_pipeline, compare, draw_sheet, make_table
    from ..comparison.sheets import save_jpeg
    from ..inference.loading import load_for_export

    if (pipeline := pipeline_class(options.model)) is not None:  # before all is loaded
        if options.controlnet is None:
            check_pipeline(pipeline)
        elif pipeline.__name__ not in WITH_CONTROLNET:
            raise ToMeConfigError(
                f"--controlnet {options.controlnet} cannot be used with {options.model}, a {pipeline.__name__}: "
                "compare generates images with a ControlNet of Stable Diffusion alone."
            )
    core.set_num_threads(options.threads)
    logger.set_level("WARNING")
    ppdiffusers.utils.logging.disable_progress_bar()
    dtype = "float32" if paddle.get_device() == "cpu" else "float16"  # as users run models there
    pipe = load_for_export(options.model, options.controlnet, safety_checker=False, dtype=dtype)
    own = model_defaults(options.model, pipe)
    pipe.set_progress_bar_config(disable=not sys.stderr.isatty(), leave=False)
    about: dict[str, Any] = {"model": options.model, "seed": options.seed, "threads": options.threads}
    about |= {"controlnet": options.controlnet, "dtype": dtype}
    about |= {"prompts": options.prompt or model_prompts(options.model, "--prompt")[:1]}
    about |= step_settings(options, own)
    if not sizes:
        if own.size is None:
            raise ToMeConfigError(f"{options.model} has no size of its own: pass --size.")
        sizes = [Size(own.size, own.size)]
    fastest, best = 0.0, configs[0]
    for size in sizes:
        name = size.width if size.width == size.height else size
        print(f"{name} px, {about['steps']} steps, prompts: {', '.join(about['prompts'])}", flush=True)
        inputs = {} if condition is None else {"image": ImageOps.fit(condition, (size.width, size.height))}
        scene = Scene(about["prompts"], size, about["steps"], about["guidance_scale"], options.seed, inputs)
        arms = compare(pipe, scene, configs, report=lambda line: print(f"  {line} …", file=sys.stderr, flush=True))
        rows = [arm.figures(arms[0]) for arm in arms]
        sheet = options.output / f"compare_{name}.jpg"
        save_jpeg(
            draw_sheet(arms, scene), sheet, **size._asdict(), merging=[str(config) for config in configs], **about
        )
        result = make_result("comparison", command_line(arguments), **size._asdict(), **about, arms=rows)
        write_result(sheet.with_suffix(".json"), result)
        print(f"{make_table(rows)}\nimages: {sheet}", flush=True)
        for config, row in zip(configs, rows[1:], strict=True):
            if row["speed_up"] > fastest:
                fastest, best = row["speed_up"], config
    print(_next_steps(options, best, fastest))
    return 0


def _check(options: argparse.Namespace) -> tuple[list[ToMeConfig], list[Size]]:
    """The ways to merge and the sizes; ToMeConfigError if an option is not allowed, before anything is loaded."""
    require_model_folder(options.model, hub_names=True)
    if (options.controlnet is None) != (options.image is None):
        raise ToMeConfigError("--controlnet and --image belong together: pass both or none.")
    for name, minimum, maximum in (("steps", 1, MAX_STEPS), ("threads", 1, 1024), ("seed", 0, MAX_SEED)):
        value = getattr(options, name)
        if value is not None and not minimum <= value <= maximum:
            raise ToMeConfigError(f"--{name} {value} is not allowed: it must be {minimum} to {maximum}.")
    with naming_options():
        sizes = [parse_size(text) for text in options.size or ()]
    for size, text in zip(sizes, options.size or (), strict=True):
        if any(side % 8 for side in size):
            raise ToMeConfigError(f"--size {text} is not allowed: it must be a multiple of 8 px.")
    configs = merge_configs(options)
    if not all(config.ratio for config in configs):
        raise ToMeConfigError("--ratio 0 is not allowed: plain images are always generated.")
    with naming_options():
        check_writable(options.output, "output")
    return configs, sizes


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return upright_rgb(image)
    except OSError as error:
        raise ToMeConfigError(f"--image {path} cannot be read: {error}.") from None


def _next_steps(options: argparse.Namespace, config: ToMeConfig, speed_up: float) -> str:
    """What a user can do after a comparison, with the fastest way to merge and its speed-up."""
    if speed_up <= 1:
        return "Merging is not faster here. It gains more in larger images."
    words = ["export", "--model", options.model, "--output", "build/export"]
    words += ["--controlnet", options.controlnet] if options.controlnet else []
    words += ["--size", *options.size] if options.size else []
    words += ["--merging", *options.merging] if options.merging else []
    words += ["--config", *map(str, options.config)] if options.config else []
    words += ["--ratio", f"{config.ratio:g}"]
    return "\n".join(
        [
            "Next:",
            f"  {command_line(words)}   # on a CPU: faster programs",
            f"  pipe.apply_tome({config.describe()})   # in your own code",
        ]
    )
