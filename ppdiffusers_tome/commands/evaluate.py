"""`evaluate`: how far merged pictures are from plain ones."""

import argparse
import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ToMeConfigError
from ..evaluation.environment import usable_cores
from ..evaluation.quality.drawing import BACKENDS, Plan
from ..evaluation.quality.prompts import choose, read_texts
from ..evaluation.quality.settings import ABLATIONS, RATIOS, study
from ..evaluation.torch_arm import why_not
from .drawers import add_options, open_drawers, threads

# Defaults of --quick.
QUICK = {"ratio": [0.5], "ablations": [], "count": 2, "steps": 2, "size": 64, "rounds": 1, "batch": 2}


def add(commands: argparse._SubParsersAction) -> None:
    """Add `evaluate` to the command line."""
    command = commands.add_parser(
        "evaluate",
        help="draw prompts plain and merged from the same noise, and measure how far apart they are",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = command.add_argument
    option("--model", default="examples/emoji_sd", help="ppdiffusers folder, or hub name")
    option("--prompts", type=Path, help=".txt, .jsonl or .tsv (PartiPrompts); the model's prompts.txt if not given")
    option("--count", type=int, default=256, help="pictures of each setting; prompts repeat with other seeds")
    option("--seed", type=int, default=0, help="of the first picture; the next has the next number")
    option("--size", type=int, default=128, help="px, height and width")
    option("--steps", type=int, default=10, help="denoising steps")
    option("--guidance", type=float, default=2.0, help="weight of classifier-free guidance")
    option("--ratio", type=float, nargs="+", default=list(RATIOS), help="shares of tokens to merge")
    option("--ablations", nargs="*", default=list(ABLATIONS), metavar="NAME", help="what else is varied")
    option("--ablation-ratio", type=float, default=0.5, help="at which layers and max_downsample are varied")
    option("--tomesd-ratio", type=float, nargs="*", default=[], help="ratios to draw with tomesd on PyTorch too")
    option("--torch-python", help="interpreter that has torch, diffusers and tomesd")
    option("--real", type=Path, help="folder of real pictures (PNG), for distances to them")
    option("--features", choices=("efficientnet", "inception"), default="efficientnet", help="inception: FID as well")
    option("--backend", choices=BACKENDS, default="predictor", help="who draws: exported programs, or the pipeline")
    option("--batch", type=int, default=4, help="most pictures in one pipeline call")
    option("--rounds", type=int, default=5, help="of timing one picture of each setting in turn; 0 for none")
    option("--out", type=Path, default=Path("build/evaluate"), help="folder for pictures; a killed run goes on there")
    option("--json", type=Path, help="write the result to this file; OUT/quality.json if not given")
    option("--report", type=Path, help="folder for the report; --out if not given")
    option("--quick", action="store_true", help="other defaults, two small images in two steps: shows that all works")
    add_options(command)
    command.set_defaults(run=partial(_evaluate, command))
    report = command.add_subparsers(dest="what").add_parser("report", help="write the report of a result again")
    report.add_argument("file", type=Path, help="what --json wrote")
    report.add_argument("--pictures", type=Path, help="what --out was, for sheets of pictures")
    report.add_argument("--output", type=Path, default=Path("benchmarks"), help="folder for the report")
    report.set_defaults(run=_report)


def _evaluate(parser: argparse.ArgumentParser, options: argparse.Namespace, given: Sequence[str]) -> int:
    # Late: it imports all that measures, and the command line is asked for other things too.
    from ..evaluation.quality.evaluation import evaluate, read_model

    if options.quick:  # read again: what is given keeps its value
        parser.set_defaults(**QUICK)
        options = parser.parse_args(given[1:])
    each_threads = threads(options) or usable_cores()
    for name, least in (("batch", 1), ("rounds", 0)):
        if getattr(options, name) < least:
            raise ToMeConfigError(f"--{name} {getattr(options, name)} is not allowed: it must be {least} or more")
    if options.tomesd_ratio and options.torch_python is None:
        raise ToMeConfigError("--tomesd-ratio needs PyTorch: name an interpreter that has it with --torch-python")
    if options.torch_python and (reason := why_not(options.torch_python)):
        raise ToMeConfigError(f"--torch-python {options.torch_python} is of no use: {reason}")
    prompts = options.prompts or Path(options.model) / "prompts.txt"
    plan = Plan(
        model=options.model,
        prompts=choose(read_texts(prompts), options.count, options.seed),
        size=options.size,
        steps=options.steps,
        guidance=options.guidance,
        backend=options.backend,
        threads=each_threads,
        torch_python=options.torch_python,
    )
    model = read_model(options.model)
    settings = study(options.ratio, options.ablations, options.ablation_ratio, model.levels, options.tomesd_ratio)
    with open_drawers(options, gpu=False) as make_drawer:
        result = evaluate(
            plan,
            settings,
            model.scheduler,
            options.out,
            make_drawer,
            batch=options.batch,
            rounds=options.rounds,
            real=options.real,
            with_inception=options.features == "inception",
        )
    result = {"command": shlex.join(["python", "-m", "ppdiffusers_tome", *given]), **result}
    path = options.json or options.out / "quality.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(_written(result, path, options.report or options.out, options.out))
    return 0


def _report(options: argparse.Namespace, given: Sequence[str]) -> int:
    try:
        result = json.loads(options.file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ToMeConfigError(f"{options.file} cannot be read: {error}") from error
    print(_written(result, options.file, options.output, options.pictures))
    return 0


def _written(result: dict[str, Any], file: Path, output: Path, out: Path | None) -> str:
    """Write the report, with sheets and merge maps where the folder of an evaluation is there; its Markdown."""
    from ..evaluation.quality.evaluation import draw_merge_maps
    from ..evaluation.quality.report import write_report

    maps = [] if out is None else draw_merge_maps(result, output)
    return write_report(result, output, None if out is None else out / "pictures", file, maps)
