"""Generate images plain and merged from the same noise, and measure how much the images differ.

python benchmarks/evaluate.py --model examples/scenes_sd --size 256 --output build/evaluate
python benchmarks/evaluate.py report build/evaluate/quality.json --images build/evaluate --output build
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import run_command, square
from lab.quality.evaluation import evaluate
from lab.quality.image_generation import load_model
from lab.quality.image_sets import RATIOS, Evaluation, list_arms, prompts_of, with_seeds
from lab.quality.quality_report import write_quality_page

from ppdiffusers_tome.commands.image_options import MODEL_DEFAULT_HELP, add_step_options, step_settings
from ppdiffusers_tome.commands.merge_options import add_merge_options, read_methods
from ppdiffusers_tome.comparison.results import command_line, read_json, write_result
from ppdiffusers_tome.cores import usable_cores
from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.export.loading import model_defaults, require_model_folder

PROGRAM = "python benchmarks/evaluate.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate and measure, or report; returns the exit status."""
    return run_command(_parser(), sys.argv[1:] if arguments is None else list(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.splitlines()[0])
    option, default = parser.add_argument, "(default: %(default)s)"
    option("--model", help="folder of a ppdiffusers pipeline, or hub name")
    prompts = "the model's prompts.txt, or a few general ones"
    option("--prompts", type=Path, help=f".txt or .jsonl (default: {prompts})")
    option("--count", type=int, default=256, help=f"images of each arm; prompts repeat with other seeds {default}")
    option("--size", type=square, help=f"a square, 256 or 256x256, in px {MODEL_DEFAULT_HELP}")
    add_step_options(parser, MODEL_DEFAULT_HELP)
    option("--ratio", type=float, nargs="+", default=list(RATIOS), help=f"shares of tokens to merge {default}")
    add_merge_options(parser, "other ways to merge, at each --ratio or at their own")
    option("--real", type=Path, help="folder of real images (PNG), to measure KID to them too")
    option("--batch", type=int, default=4, help=f"most images in one pipeline call {default}")
    option("--threads", type=int, default=usable_cores(), help=f"CPU threads {default}")
    folder = Path("build/evaluate")
    option("--output", type=Path, default=folder, help=f"folder for images, result and report {default}")
    parser.set_defaults(run=_evaluate)
    report = parser.add_subparsers(dest="what").add_parser("report", help="write the report of a result again")
    report.add_argument("file", type=Path, help="quality.json of an evaluation")
    report.add_argument("--images", type=Path, help="the evaluation's --output, to show its images")
    report.add_argument("--output", type=Path, default=Path("benchmarks"), help=f"folder for the report {default}")
    report.set_defaults(run=_report)
    return parser


def _evaluate(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if options.model is None:
        raise ToMeConfigError("--model is required: name the folder of a pipeline, such as examples/scenes_sd.")
    if options.batch < 1:
        raise ToMeConfigError(f"--batch {options.batch} is not allowed: it must be 1 or more.")
    require_model_folder(options.model, hub_names=True)
    arms = list_arms(options.ratio, read_methods(options))
    prompts = with_seeds(prompts_of(options.model, options.prompts), options.count, 0)
    own = model_defaults(options.model, load_model(options.model))
    size = options.size or own.size
    if size is None:
        raise ToMeConfigError(f"{options.model} has no size of its own: pass --size.")
    settings = {"threads": options.threads, **step_settings(options, own)}
    result = evaluate(
        Evaluation(options.model, prompts, size, **settings),
        arms,
        options.output,
        batch=options.batch,
        real=options.real,
        command=command_line(arguments, PROGRAM),
    )
    file = options.output / "quality.json"
    write_result(file, result)
    print(write_quality_page(result, options.output, file, options.output))
    return 0


def _report(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    print(write_quality_page(read_json(options.file), options.output, options.file, options.images))
    return 0


if __name__ == "__main__":
    sys.exit(main())
