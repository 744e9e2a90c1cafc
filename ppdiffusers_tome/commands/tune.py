"""`tune`: find the settings that reach a goal with one model, size and backend, and write them to a file."""

import argparse
import hashlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config import ToMeConfig, parse_settings
from ..errors import ToMeConfigError, ToMeError
from ..evaluation.cached_programs import CachedPrograms, folder_of_programs
from ..evaluation.clock import quartiles
from ..evaluation.environment import describe_environment, model_files, sources, usable_cores, versions
from ..evaluation.quality.settings import PLAIN as PLAIN_IMAGES
from ..evaluation.quality.settings import Evaluation, Setting
from ..evaluation.results import command_line, make_result
from ..evaluation.speed.cases import (
    BACKENDS,
    MEASURED,
    PLAIN,
    PREDICTOR,
    PROGRAMS,
    TOME,
    Case,
    make_arms,
    make_case,
)
from ..evaluation.speed.runner import Settings, measure_all
from ..evaluation.tuning import (
    PERCEPTUAL,
    PSNR,
    SPEED_UP,
    Candidate,
    Figures,
    Goal,
    is_faster_than_plain,
    known_candidates,
    make_stages,
    nearest,
    search,
)
from ..generation.offline import generate_here
from ..inference import choose_runtime
from ..inference.loading import require_model_folder
from ..levels import grid_at
from .image_options import add_image_options, image_settings

NOT_REACHED = 1  # exit status
UNETS = "unets"  # folder of the programs that are timed, from which images are generated too


def add(commands: argparse._SubParsersAction) -> None:
    """Add `tune` to the command line."""
    command = commands.add_parser(
        "tune",
        help="find the settings that are fast enough, or near enough to plain, with your model on this machine",
        description="Measure time and distance from plain for several ways to merge, few figures for all and more for "
        "the best, and write the one that reaches the goal to a settings file. Exit status 1 if none does.",
    )
    option, default = command.add_argument, "(default: %(default)s)"
    option("--model", type=Path, default=Path("examples/emoji_sd"), help=f"folder of a pipeline with a UNet {default}")
    option("--backend", choices=BACKENDS, default=PREDICTOR, help=f"exported programs, or the pipeline {default}")
    goals = command.add_argument_group("goal").add_mutually_exclusive_group(required=True)
    goals.add_argument("--speed-up", type=float, metavar="X", help="at least X times as fast as plain, and nearest")
    goals.add_argument("--psnr", type=float, metavar="DB", help="at least this PSNR against plain, and fastest")
    goals.add_argument("--perceptual", type=float, metavar="X", help="at most this ST-LPIPS from plain, and fastest")
    group = command.add_argument_group("what is measured")
    option = group.add_argument
    option(
        "--merging",
        nargs="+",
        default=[],
        metavar="SETTINGS",
        help="candidates in place of the known ones: ratio=0.5 merge_attn=kv,match=grid,ratio=0.75 …",
    )
    add_image_options(group)
    option("--count", type=int, default=8, help=f"images of each finalist {default}")
    option("--rounds", type=int, default=9, help=f"timed UNet passes of each finalist; they take turns {default}")
    option("--threads", type=int, default=usable_cores(), help=f"of plain and of every candidate {default}")
    file = Path("build/tome_config.json")
    option("--output", type=Path, metavar="FILE", default=file, help=f"settings file; its plot is beside it {default}")
    option("--restart", action="store_true", help="forget the figures of an earlier run")
    command.set_defaults(run=_tune)


def _tune(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    values = {SPEED_UP: options.speed_up, PSNR: options.psnr, PERCEPTUAL: options.perceptual}
    ((measure, value),) = ((name, value) for name, value in values.items() if value is not None)
    goal, output = Goal(measure, value), options.output
    command = command_line(arguments)
    case, evaluation, configs = _checked(options)
    folder = output.with_suffix(".tune")
    belongs_to = {
        **{name: value for name, value in asdict(evaluation).items() if name not in ("torch_python", "strength")},
        "prompts": [list(prompt) for prompt in evaluation.prompts],
        "content of the model": model_files(evaluation.model),
        "machine": describe_environment()["machine"],
        "versions": versions(),
        "sources": sources(),
    }
    figures = Figures(folder / "figures.json", configs, belongs_to, command, options.restart)
    if options.restart:
        shutil.rmtree(folder, ignore_errors=True)
    figures.save()
    timer = partial(time_candidates, case, evaluation, folder, command)
    comparer = partial(compare_candidates, evaluation, folder)
    stages = make_stages(options.rounds, options.count)
    report = partial(print, file=sys.stderr, flush=True)
    chosen = search(figures, goal, stages, timer, comparer, report, refines=not options.merging)
    candidates = figures.candidates
    if failures := [candidate for candidate in candidates if candidate.failure]:
        print("\n".join(f"not measured: {failed.config.describe()}: {failed.failure}" for failed in failures))
    if len(failures) == len(candidates):
        raise ToMeError(f"No candidate can be measured with {evaluation.model} at {case.size} px.")
    print(f"{case.name}, {evaluation.backend}; goal: {goal}")
    print("\n".join(_table(candidates, chosen)))
    plot = _write_plot(candidates, chosen, goal, case, evaluation.backend, output)
    if chosen is None and any(map(is_faster_than_plain, candidates)):
        near = nearest(candidates, goal)
        assert near is not None
        print(f"No candidate reaches the goal, {goal}. Nearest: {_describe(near)}. No settings are written.")
        return NOT_REACHED
    if chosen is None:
        print(f"Nothing is faster than plain at {case.size} px in {evaluation.backend}: ratio 0 is written.")
    config = ToMeConfig(ratio=0) if chosen is None else _gated(chosen.config, case)
    smallest = None if chosen is None else _smallest_size(config, case)
    about = make_result("tuning", command)
    config.save(
        output,
        **{name: about[name] for name in ("command", "commit", "environment")},
        model=evaluation.model,
        size=case.size,
        sizes={"measured": [case.size], "merges_from": smallest},
        backend=evaluation.backend,
        threads=evaluation.threads,
        goal={"measure": goal.measure, "value": goal.value},
        images={
            "count": len(evaluation.prompts),
            "steps": evaluation.steps,
            "guidance_scale": evaluation.guidance_scale,
        },
        figures=None if chosen is None else _figures(chosen),
        candidates=[{"settings": asdict(candidate.config), **_figures(candidate)} for candidate in candidates],
    )
    if smallest is not None and smallest < case.size:
        print(
            f"Images from {smallest} px on merge too, at the levels that have {config.min_tokens} tokens there, which "
            "is not measured: run tune at that size too if you use it."
        )
    print(f"written to {output}" + (f" and {plot}" if plot else ""))
    return 0


def _checked(options: argparse.Namespace) -> tuple[Case, Evaluation, list[ToMeConfig]]:
    """What is timed, which images are compared, and the candidates; ToMeConfigError before anything is measured."""
    from ..evaluation.quality.evaluation import model_levels  # late: it imports all that measures images

    output = options.output
    if output.suffix != ".json" or output.is_dir():
        raise ToMeConfigError(f"--output {output} is not allowed: name a .json file, such as build/tome_config.json.")
    if options.backend in PROGRAMS:
        choose_runtime(**PROGRAMS[options.backend])  # raises if it is not installed
    Settings(options.rounds, threads=options.threads)
    require_model_folder(options.model)
    images = image_settings(options, str(options.model))
    # "./" distinguishes a folder from the architecture of the same name.
    model = str(options.model) if options.model.is_absolute() else f"./{options.model}"
    case = make_case(model, size=images["size"], batch=2 if images["guidance_scale"] > 1 else 1)
    evaluation = Evaluation(**images, backend=options.backend, threads=options.threads, torch_python="")
    given = [ToMeConfig(**parse_settings(text)) for text in options.merging]
    grid = case.architecture.first_grid(case.size)
    configs = given or known_candidates(grid, model_levels(evaluation.model))
    for config in given:
        if config.ratio == 0:
            raise ToMeConfigError("--merging ratio=0 is not allowed: plain is always measured.")
    if not configs:
        raise ToMeConfigError(f"--size {case.size} is not allowed: no token of {options.model} would merge; raise it.")
    make_arms(case, [TOME], [evaluation.backend], configs)  # raises if one merges nothing
    return case, evaluation, configs


def time_candidates(
    case: Case, evaluation: Evaluation, folder: Path, command: str, configs: Sequence[ToMeConfig], rounds: int
) -> Iterator[tuple[ToMeConfig, list[float] | str]]:
    """Each candidate with its speed-ups over plain in rounds of one UNet pass, or why it cannot be timed.

    All take turns with plain in one run of `bench`, which a repeated call continues. Programs are those that generate
    the images. In eager, dst is fixed: random dst take the same time, and the built-in ToMe samples others.
    """
    has_own_dst = evaluation.backend in PROGRAMS
    timed = {c: c if has_own_dst and c.seed is not None else replace(c, use_rand=False) for c in configs}
    arms = make_arms(case, [PLAIN, TOME], [evaluation.backend], list(timed.values()))
    key = hashlib.sha256(repr(sorted(map(repr, timed.values()))).encode()).hexdigest()[:8]
    settings = Settings(rounds=rounds, threads=evaluation.threads)
    output = folder / f"speed_{rounds}_{key}.json"
    (measured,) = measure_all([replace(case, arms=arms)], settings, output, command, programs=folder / UNETS)
    by_config = {arm.config: arm for arm in measured.arms}
    plain = next(arm for arm in measured.arms if arm.arm == PLAIN)
    if plain.status != MEASURED:
        raise ToMeError(f"Plain cannot be timed: {plain.status}: {plain.reason}")
    for config in configs:
        arm = by_config[timed[config]]
        if arm.status == MEASURED:
            yield config, [a / b for a, b in zip(plain.seconds, arm.seconds, strict=True)]
        else:
            yield config, f"{arm.status}: {arm.reason}"


def compare_candidates(
    evaluation: Evaluation, folder: Path, configs: Sequence[ToMeConfig], count: int
) -> Iterator[tuple[ToMeConfig, list[float], list[float]]]:
    """Each candidate with PSNR and perceptual distance of its first images from the plain ones.

    `evaluate` generates and measures them, one image per call of the pipeline, so that later ones do not change them.
    """
    from ..evaluation.quality.evaluation import Measurer
    from ..evaluation.quality.image_generation import (
        claim_folder,
        export_programs,
        generate_images,
        image_folder,
        image_paths,
    )

    claim_folder(evaluation, folder)
    first = replace(evaluation, prompts=evaluation.prompts[:count])
    settings = {config: Setting(_name(config), "method", config) for config in configs}
    if evaluation.backend in PROGRAMS:  # all now: settings that differ in the ratio alone share a program
        cached = CachedPrograms(folder_of_programs(folder / UNETS, evaluation.model))
        export_programs(first, [PLAIN_IMAGES, *settings.values()], folder, cached)
    measurer = Measurer(folder, evaluation.size)
    for config, setting in settings.items():
        generate_images(first, [PLAIN_IMAGES, setting], folder, generate_here, batch=1)
        images, plain = (image_paths(image_folder(one, folder))[:count] for one in (setting, PLAIN_IMAGES))
        measured = measurer.measure(images, plain)
        yield config, measured["psnr"].tolist(), measured["perceptual"].tolist()


def _name(config: ToMeConfig) -> str:
    return config.describe().removeprefix("ratio=").replace(", ", "_").replace("'", "")


def _gated(config: ToMeConfig, case: Case) -> ToMeConfig:
    """The config with a gate: grids with fewer tokens than the smallest measured one stay plain.

    Smaller images then stay plain, unless several levels merge: a shallower one has as many tokens in a smaller image
    as the deepest one at the measured size.
    """
    if config.min_tokens:
        return config
    level = config.max_downsample or case.architecture.first_level
    return replace(config, min_tokens=int(grid_at(case.architecture.latent(case.size), level).tokens))


def _smallest_size(config: ToMeConfig, case: Case) -> int:
    """The smallest square image in which any grid merges, px."""
    factor = case.architecture.factor
    sizes = range(factor, case.size + 1, factor)
    return next(size for size in sizes if int(case.architecture.first_grid(size).tokens) >= config.min_tokens)


def _figures(candidate: Candidate) -> dict[str, Any]:
    """Medians, with the quartiles of the speed-up, for the settings file."""
    if candidate.failure:
        return {"failure": candidate.failure}
    speed_up = quartiles(candidate.speed_ups)
    figures: dict[str, Any] = {"speed_up": speed_up._asdict(), "rounds": len(candidate.speed_ups)}
    for measure in (PSNR, PERCEPTUAL) if candidate.psnr else ():
        value = candidate.median(measure)
        figures[measure] = None if value == float("inf") else value
    return {**figures, "images": len(candidate.psnr)}


def _describe(candidate: Candidate) -> str:
    cells = [f"{candidate.config.method}, ratio {candidate.config.ratio:g}"]
    cells += [f"{candidate.median(SPEED_UP):.2f} times as fast as plain"]
    if candidate.psnr:
        cells += [f"PSNR {candidate.median(PSNR):.1f} dB", f"ST-LPIPS {candidate.median(PERCEPTUAL):.4f}"]
    return ", ".join(cells)


def _points(candidates: Sequence[Candidate]) -> Any:
    """A pandas frame of the candidates that have been timed, the fastest first, as the frontier's plot reads it."""
    import pandas as pd

    from ..evaluation.quality.frontier import is_on_frontier

    timed = sorted((c for c in candidates if c.speed_ups), key=lambda c: -c.median(SPEED_UP))
    rows = [
        {
            "candidate": candidate,
            "method": candidate.config.method,
            "ratio": candidate.config.ratio,
            **{measure: candidate.median(measure) for measure in (SPEED_UP, PSNR, PERCEPTUAL)},
        }
        for candidate in timed
    ]
    points = pd.DataFrame(rows)
    for column, nearness in {"frontier": points[PSNR], "frontier_perceptual": -points[PERCEPTUAL]}.items():
        points[column] = is_on_frontier(points[SPEED_UP], nearness) & nearness.notna()
    return points


def _table(candidates: Sequence[Candidate], chosen: Candidate | None) -> Iterator[str]:
    """A line for each candidate that has been timed, the fastest first."""
    points = _points(candidates)
    width = max(map(len, points["method"])) + 2
    heads = f"{'speed-up':>10}{'rounds':>8}{'PSNR, dB':>10}{'ST-LPIPS':>10}{'images':>8}"
    yield f"    {'method':<{width}}{'ratio':>6}{heads}"
    for point in points.to_dict("records"):
        candidate = point["candidate"]
        mark = "→" if candidate is chosen else " "
        mark += " *" if point["frontier"] else "  "
        drawn = f"{point['psnr']:>10.1f}{point['perceptual']:>10.4f}" if candidate.psnr else f"{'–':>10}{'–':>10}"
        yield (
            f"{mark} {point['method']:<{width}}{point['ratio']:>6g}{point['speed_up']:>9.2f}×"
            f"{len(candidate.speed_ups):>8}{drawn}{len(candidate.psnr):>8}"
        )
    yield "→ chosen; * on the frontier: faster than plain, and no other is both faster and nearer by PSNR"


def _write_plot(
    candidates: Sequence[Candidate], chosen: Candidate | None, goal: Goal, case: Case, backend: str, output: Path
) -> Path | None:
    """Write the plot of the candidates that have images, beside the output; None if there are none."""
    from ..evaluation.plotting import save_figure
    from ..evaluation.quality.quality_plots import plot_frontier

    drawn = [candidate for candidate in candidates if candidate.psnr]
    if not drawn:
        return None
    marked = None if chosen is None else tuple(chosen.median(measure) for measure in (SPEED_UP, PSNR, PERCEPTUAL))
    title = f"{Path(case.model).name}, {case.size} px: {goal}"
    path = output.with_suffix(".png")
    save_figure(plot_frontier(_points(drawn), title, backend, marked), path)
    return path
