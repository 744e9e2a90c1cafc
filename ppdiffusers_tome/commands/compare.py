"""`compare`: a sheet and a table of plain and merged images of a model, from the same noise."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import ToMeConfig, method_name
from ..cores import usable_cores
from ..errors import ToMeConfigError
from ..evaluation.quality.image_sets import prompts_of
from ..evaluation.results import command_line, make_result, write_result
from ..generation.jobs import Limits
from ..inference.loading import load_for_export, read_defaults, require_model_folder
from ..inference.manifest import Size
from .image_options import OWN, add_step_options, naming_options
from .merge_options import add_merge_options, merge_configs

MULTIPLE, LARGEST = 8, 8192  # px: sizes are multiples of the first, up to the second


def add(commands: argparse._SubParsersAction) -> None:
    """Add `compare` to the command line."""
    command = commands.add_parser(
        "compare",
        help="show what merging does to a model's images and to the time of a step: a sheet and a table",
        description="Generate each prompt plain and merged from the same noise in Paddle's eager mode, time single "
        "steps, which take turns, write a sheet of the images and print a table.",
    )
    option, default = command.add_argument, "(default: %(default)s)"
    option("--model", required=True, help="ppdiffusers folder or hub name")
    option("--controlnet", metavar="DIR", help="a ControlNet, folder or hub name; needs --image")
    option("--image", type=Path, metavar="FILE", help="the ControlNet's input, such as edges; resized to a square")
    option("--prompt", nargs="+", metavar="TEXT", help="one column each (default: the model's first prompt)")
    option("--size", type=int, nargs="+", metavar="PX", help=f"height and width; a sheet and a table each {OWN}")
    option("--ratio", type=float, nargs="+", help="one row each (default: that of --merging or --config, or 0.5)")
    option("--seed", type=int, default=0, help=f"of the first prompt; each further one adds 1 {default}")
    add_step_options(command, OWN)
    option("--threads", type=int, default=usable_cores(), help=f"CPU threads {default}")
    option(
        "--output", type=Path, metavar="DIR", default=Path("outputs"), help=f"folder for sheets and results {default}"
    )
    add_merge_options(command, "how to merge", is_single=True)
    command.set_defaults(run=_compare)


def _compare(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    # Late: they import all that generates and measures images, which other commands do not need.
    import paddle
    from paddle.base import core

    from ..evaluation.quality.comparison import ROUNDS, Images, check_pipeline, compare, figures_of, sheet_of, table_of
    from ..evaluation.quality.image_generation import model_defaults
    from ..evaluation.quality.sheets import save_png

    configs = _checked(options)
    prompts = tuple(options.prompt or read_defaults(Path(options.model)).prompts[:1] or prompts_of(options.model)[:1])
    conditions = {size: _condition(options, size) for size in options.size or ()}
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # which results name
    core.set_num_threads(options.threads)  # of Paddle, which read the variable when it was imported
    dtype = "float32" if paddle.get_device() == "cpu" else "float16"  # as users run models there
    pipe = load_for_export(options.model, options.controlnet, safety_checker=False, dtype=dtype)
    check_pipeline(pipe, options.model, configs)
    own = model_defaults(options.model, pipe)
    steps = own.steps if options.steps is None else options.steps
    scale = own.guidance_scale if options.guidance_scale is None else options.guidance_scale
    assert own.size is not None and steps is not None and scale is not None
    conditions = conditions or {own.size: _condition(options, own.size)}
    for size, condition in conditions.items():
        images = Images(prompts, size, steps, scale, options.seed, condition)
        arms = compare(pipe, images, configs)
        figures, path = figures_of(arms), options.output / f"compare_{size}.png"
        about = {"model": options.model, "controlnet": options.controlnet, "prompts": prompts, "size": size}
        about |= {"dtype": dtype, "steps": steps, "guidance_scale": scale, "seed": options.seed}
        about |= {"configs": [asdict(config) for config in configs]}
        save_png(sheet_of(arms, images), path, **about)
        result = make_result("comparison", command_line(arguments), **about, arms=figures)
        write_result(path.with_suffix(".json"), result)
        print(f"\n{options.model}, {size} px, {steps} steps, seed {options.seed}, {method_name(configs[0])}")
        print(f"{table_of(figures)}\nSheet: {path}")
        if all(row["speed_up"] < 1 for row in figures[1:]):
            print(f"Merging does not pay at {size} px here: it saves more at larger sizes.")
    print(_explanation(options, ROUNDS, [*conditions][-1], configs[-1].ratio, "unet" in pipe.components))
    return 0


def _checked(options: argparse.Namespace) -> list[ToMeConfig]:
    """The ways to merge; ToMeConfigError for any option that is not allowed, before something is loaded or written."""
    configs = merge_configs(options)
    if not all(config.ratio for config in configs):
        raise ToMeConfigError("--ratio 0 is not allowed: plain is always generated, give ratios above 0")
    for name, values in (("ratio", [config.ratio for config in configs]), ("size", options.size or [])):
        if repeated := [value for value in values if values.count(value) > 1]:
            raise ToMeConfigError(f"--{name} {repeated[0]:g} is repeated: list each once")
    for size in options.size or ():
        if size % MULTIPLE or not MULTIPLE <= size <= LARGEST:
            rule = f"it must be a multiple of {MULTIPLE} px, up to {LARGEST}"
            raise ToMeConfigError(f"--size {size} is not allowed: {rule}")
    if options.threads < 1:
        raise ToMeConfigError(f"--threads {options.threads} is not allowed: it must be 1 or more")
    if (options.controlnet is None) != (options.image is None):
        given, missing = ("controlnet", "image") if options.image is None else ("image", "controlnet")
        raise ToMeConfigError(f"--{given} {getattr(options, given)} needs --{missing} too")
    if options.output.exists() and not options.output.is_dir():
        raise ToMeConfigError(f"--output {options.output} is a file: name a folder")
    require_model_folder(options.model, hub_names=True)
    limits = _limits()
    with naming_options():
        for name in ("seed", "steps", "guidance_scale"):
            if (value := getattr(options, name)) is not None:
                limits.check_range(name, value)
        for prompt in options.prompt or ():
            limits.check_text("prompt", prompt)
    _condition(options, MULTIPLE)  # raises if the image cannot be read
    return configs


def _limits() -> Limits:
    return Limits((Size(MULTIPLE, MULTIPLE),), (0.0,), prompt_characters=100_000, steps=1000, guidance_scale=100.0)


def _condition(options: argparse.Namespace, size: int) -> Any:
    """The image of --image as a square; None without the option. Raises ToMeConfigError if it cannot be read."""
    if options.image is None:
        return None
    from ..generation.png import load_image  # late: it imports Pillow, which commands without images do not need

    try:
        data = options.image.read_bytes()
    except OSError as error:
        raise ToMeConfigError(f"--image {options.image} cannot be read: {error.strerror}") from error
    with naming_options(image=f"--image {options.image}"):
        return load_image(data, (size, size), _limits())


def _explanation(options: argparse.Namespace, rounds: int, size: int, ratio: float, can_export: bool) -> str:
    """What the columns are, and what to do next."""
    lines = [
        "",
        f"s/step: median of {rounds} steps of each row, which took turns, in eager mode. Threads: {options.threads}.",
        "PSNR: against the plain image, median over the prompts. Merging is lossy: look at the sheet.",
        "",
    ]
    if can_export and options.controlnet is None:
        model = ["--model", options.model, "--size", str(size)]
        method = [*(("--config", str(options.config[0])) if options.config else ())]
        method += [*(("--merging", options.merging[0]) if options.merging else ())]
        folder = Path("build", Path(options.model).name)
        export = ["export", *model, *method, "--ratio", f"{ratio:g}", "0", "--output", str(folder)]
        lines += [
            "Exported programs are faster than eager mode, plain and merged. To find the settings that pay there:",
            f"  {command_line(['tune', *model, '--speed-up', '1.3'])}",
            "To write programs for the commands generate and serve:",
            f"  {command_line(export)}",
        ]
    return "\n".join([*lines, "Settings, limits and more: docs/usage.md"])
