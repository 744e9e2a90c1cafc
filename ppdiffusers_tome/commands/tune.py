"""`tune`: find the settings that reach a goal with one model, size and backend, and write them to a file."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..comparison.results import command_line
from ..config import ToMeConfig
from ..cores import usable_cores
from ..errors import ToMeConfigError, ToMeError
from ..evaluation.quality.image_sets import Evaluation
from ..evaluation.speed.cases import BACKENDS, ONNX_RUNTIME, PROGRAMS, TOME, Case, Timing, make_case
from ..evaluation.speed.catalog import make_arms
from ..evaluation.tuning.search import PERCEPTUAL, PSNR, SPEED_UP, Goal, known_candidates, make_stages, nearest, search
from ..inference import choose_runtime
from ..inference.loading import require_model_folder
from .evaluation_options import add_image_options, bundled_model, check_packages, image_settings
from .merge_options import add_merge_options, read_methods

NOT_REACHED = 1  # exit status


def add(commands: argparse._SubParsersAction) -> None:
    """Add `tune` to the command line."""
    command = commands.add_parser(
        "tune",
        help="find the settings that are fast enough, or near enough to plain, with your model on this machine",
        description="Measure time and distance from plain for several ways to merge: screen all, remeasure the best, "
        "and save the winner in a settings file. Exit status 1 if none reaches the goal.",
    )
    option, default = command.add_argument, "(default: %(default)s)"
    bundled = "(default: in the repository, examples/emoji_sd)"
    option("--model", type=Path, help=f"folder of a pipeline with a UNet {bundled}")
    option("--backend", choices=BACKENDS, default=ONNX_RUNTIME, help=f"exported programs, or the pipeline {default}")
    goals = command.add_argument_group("goal").add_mutually_exclusive_group(required=True)
    goals.add_argument("--speed-up", type=float, metavar="X", help="at least X times as fast as plain, and nearest")
    goals.add_argument("--psnr", type=float, metavar="DB", help="at least this PSNR against plain, and fastest")
    goals.add_argument("--perceptual", type=float, metavar="X", help="at most this ST-LPIPS from plain, and fastest")
    group = command.add_argument_group("what is measured")
    option = group.add_argument
    add_merge_options(group, "candidates in place of the known ones")
    add_image_options(group)
    option("--count", type=int, default=8, help=f"images of each finalist {default}")
    option("--rounds", type=int, default=9, help=f"timed UNet passes of each finalist; they take turns {default}")
    option("--threads", type=int, default=usable_cores(), help=f"of plain and of every candidate {default}")
    file = Path("build/tome_config.json")
    option("--output", type=Path, metavar="FILE", default=file, help=f"settings file; its plot is beside it {default}")
    option("--restart", action="store_true", help="forget the figures of an earlier run")
    command.set_defaults(run=_tune)


def _tune(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    check_packages("tune")
    # Late: they import all that measures images, which other commands do not need.
    from ..evaluation.tuning.measurement import Measurement
    from ..evaluation.tuning.outcome import describe, frame_of, table_of, write_plot, write_settings

    values = {SPEED_UP: options.speed_up, PSNR: options.psnr, PERCEPTUAL: options.perceptual}
    (goal,) = (Goal(name, value) for name, value in values.items() if value is not None)
    output: Path = options.output
    case, evaluation, configs = _checked(options)
    measurement = Measurement(case, evaluation, output.with_suffix(".tune"), command_line(arguments))
    if options.restart:
        shutil.rmtree(measurement.root, ignore_errors=True)
    stages = make_stages(options.rounds, options.count)
    report = partial(print, file=sys.stderr, flush=True)
    measured = measurement.time, measurement.compare, report
    chosen, candidates = search(configs, goal, stages, *measured, refines=not read_methods(options))
    for candidate in candidates:
        if candidate.failure:
            print(f"not measured: {candidate.config.describe()}: {candidate.failure}")
    if all(candidate.failure for candidate in candidates):
        raise ToMeError(f"No candidate can be measured with {evaluation.model} at {case.size} px.")
    frame, plot = frame_of(candidates, chosen), output.with_suffix(".png")
    print(f"{case.name}, {evaluation.backend}; goal: {goal}\n{table_of(frame)}")
    has_plot = write_plot(frame, goal, measurement, plot)
    if chosen is None and any(not c.failure and c.median(SPEED_UP) > 1 for c in candidates):
        near = nearest(candidates, goal)
        assert near is not None
        print(f"No candidate reaches the goal, {goal}. Nearest: {describe(near)}. No settings are written.")
        return NOT_REACHED
    if chosen is None:
        print(f"Nothing is faster than plain at {case.size} px in {evaluation.backend}: ratio 0 is written.")
    config, smallest = write_settings(chosen, candidates, goal, measurement, output)
    if smallest is not None and smallest < case.size:
        print(
            f"Images from {smallest} px on merge too, at the levels that have {config.min_tokens} tokens there, which "
            "is not measured: run tune at that size too if you use it."
        )
    print(f"written to {output}" + (f" and {plot}" if has_plot else ""))
    return 0


def _checked(options: argparse.Namespace) -> tuple[Case, Evaluation, list[ToMeConfig]]:
    """What is timed, which images are compared, and the candidates; ToMeConfigError before anything is measured."""
    from ..evaluation.quality.evaluation import model_levels  # late: it imports all that measures images

    output = options.output
    if output.suffix != ".json" or output.is_dir():
        raise ToMeConfigError(f"--output {output} is not allowed: name a .json file, such as build/tome_config.json.")
    if options.backend in PROGRAMS:
        choose_runtime(**PROGRAMS[options.backend])  # raises if it is not installed
    Timing(options.rounds, threads=options.threads)
    options.model = options.model or bundled_model("emoji_sd")
    require_model_folder(options.model)
    images = image_settings(options, str(options.model))
    # "./" distinguishes a folder from the architecture of the same name.
    model = str(options.model) if options.model.is_absolute() else f"./{options.model}"
    case = make_case(model, size=images["size"], batch=2 if images["guidance_scale"] > 1 else 1)
    evaluation = Evaluation(**images, backend=options.backend, threads=options.threads)
    given = [ToMeConfig(**method) for method in read_methods(options)]
    grid = case.architecture.first_grid(case.size)
    configs = given or known_candidates(grid, model_levels(evaluation.model))
    for config in given:
        if config.ratio == 0:
            raise ToMeConfigError("A candidate of ratio=0 is not allowed: plain is always measured.")
    if not configs:
        raise ToMeConfigError(f"--size {case.size} is not allowed: no token of {options.model} would merge; raise it.")
    make_arms(case, [TOME], [evaluation.backend], configs)  # raises if one merges nothing
    return case, evaluation, configs
