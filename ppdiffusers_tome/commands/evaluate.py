"""`evaluate`: how much merged images differ from plain ones."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..comparison.results import command_line, read_json, write_result
from ..cores import usable_cores
from ..errors import ToMeConfigError
from ..evaluation.quality.image_sets import ABLATIONS, PLAIN_BF16, RATIOS, Evaluation, list_image_sets
from ..evaluation.speed.cases import BACKENDS, IN_FP32, ONNX_RUNTIME, PROGRAMS
from ..inference import choose_runtime
from ..inference.loading import require_model_folder
from .evaluation_options import add_image_options, bundled_model, check_packages, image_settings
from .image_options import add_options, open_image_backend, threads
from .merge_options import add_merge_options, read_methods

QUICK = {"ratio": [0.5], "ablations": [], "count": 2, "steps": 2, "size": 64, "batch": 2}  # defaults of --quick


def add(commands: argparse._SubParsersAction) -> None:
    """Add `evaluate` to the command line."""
    about = "generate images plain and merged from the same noise, and measure how much the images differ"
    command = commands.add_parser("evaluate", help=about)
    option = command.add_argument
    default = "(default: %(default)s)"
    bundled = "in the repository, the bundled model that was trained at this size, examples/emoji_sd or scenes_sd"
    option("--model", help=f"ppdiffusers folder, or hub name (default: {bundled})")
    add_image_options(command)
    option("--count", type=int, default=256, help=f"images in each set; prompts repeat with other seeds {default}")
    option("--ratio", type=float, nargs="+", default=list(RATIOS), help=f"shares of tokens to merge {default}")
    add_merge_options(command, "other ways to merge, at each --ratio or at their own")
    option("--ablations", nargs="*", default=list(ABLATIONS), metavar="NAME", help=f"what else to vary {default}")
    option("--ablation-ratio", type=float, default=0.5, help=f"ratio of max_downsample and layers {default}")
    option("--strength", type=float, help="image-to-image of this strength from scikit-image's photographs")
    option("--real", type=Path, help="folder of real images (PNG), to measure KID to them too")
    option("--features", choices=("efficientnet", "inception"), default="efficientnet", help="inception: FID as well")
    option("--backend", choices=BACKENDS, default=ONNX_RUNTIME, help=f"exported programs, or the pipeline {default}")
    option("--batch", type=int, default=4, help=f"most images in one pipeline call {default}")
    folder = Path("build/evaluate")
    option("--output", type=Path, default=folder, help=f"folder for images, result and report {default}")
    option("--quick", action="store_true", help="other defaults, two small images in two steps: shows that all works")
    add_options(command)
    command.set_defaults(run=partial(_evaluate, command))
    others = command.add_subparsers(dest="what")
    report = others.add_parser("report", help="write the report of a result again")
    report.add_argument("file", type=Path, help="quality.json of an evaluation")
    report.add_argument("--images", type=Path, help="the evaluation's --output, to show its images")
    report.add_argument("--output", type=Path, default=Path("benchmarks"), help=f"folder for the report {default}")
    report.set_defaults(run=_report)


def _evaluate(parser: argparse.ArgumentParser, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    check_packages("evaluate")
    # Late: it imports all that measures, which other commands do not need.
    from ..evaluation.quality.evaluation import evaluate, model_levels

    if options.quick:  # parsed again: an option on the command line keeps its value
        parser.set_defaults(**QUICK)
        options = parser.parse_args(arguments[1:])
    threads_per_process = threads(options) or usable_cores()
    if options.batch < 1:
        raise ToMeConfigError(f"--batch {options.batch} is not allowed: it must be 1 or more")
    if options.backend in PROGRAMS:  # raises if the runtime is not installed
        choose_runtime(**PROGRAMS[options.backend])
    model = options.model or str(bundled_model("scenes_sd" if (options.size or 0) > 128 else "emoji_sd"))
    require_model_folder(model, hub_names=options.model is not None)
    evaluation = Evaluation(
        **image_settings(options, model),
        backend=options.backend,
        threads=threads_per_process,
        strength=options.strength,
    )
    levels = model_levels(model)
    methods = read_methods(options)
    image_sets = list_image_sets(options.ratio, options.ablations, options.ablation_ratio, levels, methods)
    image_sets += [PLAIN_BF16] if options.backend in IN_FP32 else []
    with open_image_backend(options, gpu=False) as make_backend:
        result = evaluate(
            evaluation,
            image_sets,
            options.output,
            make_backend,
            batch=options.batch,
            real=options.real,
            with_inception=options.features == "inception",
            command=command_line(arguments),
        )
    write_result(options.output / "quality.json", result)
    return _write_page(result, options.output / "quality.json", options.output, options.output)


def _report(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    return _write_page(read_json(options.file), options.file, options.output, options.images)


def _write_page(result: dict[str, Any], file: Path, output: Path, images: Path | None) -> int:
    """Write and print the page, with sheets if the folder of the evaluation is known."""
    from ..evaluation.quality.quality_report import write_quality_page

    print(write_quality_page(result, output, file, images))
    return 0
