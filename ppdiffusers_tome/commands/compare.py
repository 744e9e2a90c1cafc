"""What `compare` does: plain and merged images of a model, their times and distances, and what reaches a goal."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle
import ppdiffusers
from paddle.base import core
from paddlenlp.utils.log import logger
from PIL import Image, ImageOps
from ppdiffusers import DiffusionPipeline

from ..comparison.arms import MIN_SIDE, Figures, Scene, compare, draw_sheet, make_table
from ..comparison.clock import FEW_ROUNDS, TOO_FEW_ROUNDS
from ..comparison.environment import commit, describe_environment
from ..comparison.fonts import font_for, missing
from ..comparison.goal import Goal, known_settings, merges_at, parse_goal
from ..comparison.option_defaults import NOT_REACHED, PROMPT_COUNT, ROUNDS, STRENGTH
from ..comparison.pipelines import CONTROLNET, as_class, class_to_compare
from ..comparison.results import make_result, write_result
from ..comparison.sheets import save_jpeg
from ..errors import ParameterError, ToMeConfigError
from ..export.loading import load_eager_pipeline, model_defaults, pipeline_class, require_model_folder
from ..families.schedules import most_steps
from ..files import check_writable
from ..methods import ToMeConfig
from ..progress import StepLines
from ..run.defaults import ModelDefaults
from ..run.manifest import MANIFEST, Manifest, ProgramMerging, read_manifest
from ..run.pipeline import load_pipeline
from ..run.ratios import ratio_name
from ..run.sizes import Size, parse_size
from ..serving.jobs import MAX_SEED, MAX_STEPS
from ..serving.png import upright_rgb
from ..serving.prompt_file import PROMPTS, model_prompts
from ..wording import command_line
from .image_options import naming_options, runtime_settings, step_settings
from .merge_options import all_configs

FORMAT = 7  # of the JSON files
MAX_BATCH = 64
MAX_ROUNDS = 50  # of a step of each arm, all in one image of at most 1000 steps
OF_EXPORTS = {
    "runtime": None,
    "device": "cpu",
    "precision": "fp32",
    "max_programs": None,
}  # options and their defaults


@dataclass(frozen=True)
class Plan:
    """What the options ask for, checked before anything is loaded.

    Args:
        configs: what is compared with plain; for a goal None for the known settings.
        sizes: empty for the model's own.
        image: what image-to-image starts from, or the input of the ControlNet.
        goal: what the chosen settings reach.
        manifest: of an exported folder; None for a pipeline.
    """

    configs: Sequence[ToMeConfig] | None
    sizes: Sequence[Size]
    image: Image.Image | None
    goal: Goal | None
    manifest: Manifest | None


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    plan = _check(options)
    core.set_num_threads(options.threads)
    logger.set_level("WARNING")
    ppdiffusers.utils.logging.disable_progress_bar()
    pipe = _load(options, plan)
    pipe.set_progress_bar_config(disable=not sys.stderr.isatty(), leave=False)
    own = model_defaults(options.model, pipe)
    sizes = plan.sizes
    if not sizes:
        if own.size is None:
            raise ToMeConfigError(f"{options.model} has no size of its own: pass --size.")
        sizes = [Size(own.size, own.size)] if plan.manifest is None else plan.manifest.sizes[:1]
    about = {name: getattr(options, name) for name in ("model", "controlnet", "seed", "batch", "threads")}
    about |= {"dtype": _dtype()} if plan.manifest is None else runtime_settings(plan.manifest, options)
    about |= {"prompts": options.prompt or _own_prompts(options.model, plan, own), **step_settings(options, own)}
    if plan.image is not None and type(pipe).__name__ != CONTROLNET:
        about["strength"] = _checked_strength(options.strength, about["steps"])
    if (steps := most_steps(pipe.scheduler, about["steps"])) < about["steps"]:
        rule = f"the scheduler, {type(pipe.scheduler).__name__}, has a schedule of at most {steps} steps."
        raise ToMeConfigError(f"--steps {about['steps']} is not allowed: {rule}")
    rows: list[Figures] = []
    for size in sizes:
        configs = plan.configs or _known_configs(options, pipe, size)
        rows += _compare_at(pipe, size, plan.image, configs, about, options, command_line(arguments))
    if plan.goal is not None:
        about = {**sizes[0]._asdict(), **about}
        return _choose(plan.goal, rows, options, plan.manifest is not None, command_line(arguments), about)
    print(_next_steps(options, rows, plan.manifest is not None))
    return 0


def _own_prompts(model: str, plan: Plan, own: ModelDefaults) -> list[str]:
    """The prompts of a model that has some, at most PROMPT_COUNT; else a general prompt."""
    if plan.manifest is not None and own.prompts:
        return list(own.prompts[:PROMPT_COUNT])
    count = PROMPT_COUNT if (Path(model) / PROMPTS).is_file() else 1
    return model_prompts(model, "--prompt")[:count]


def _check(options: argparse.Namespace) -> Plan:
    """What the options ask for; ToMeError if an option is not allowed, before anything is loaded."""
    folder, manifest = Path(options.model), None
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
    else:
        require_model_folder(options.model, hub_names=True)
    limits = {"steps": MAX_STEPS, "threads": 1024, "seed": MAX_SEED, "batch": MAX_BATCH, "rounds": MAX_ROUNDS}
    for name, maximum in limits.items():
        value, minimum = getattr(options, name), 0 if name == "seed" else 1
        if value is not None and not minimum <= value <= maximum:
            raise ToMeConfigError(f"--{name} {value} is not allowed: it must be {minimum} to {maximum}.")
    with naming_options():
        sizes = [parse_size(text) for text in options.size or ()]
        goal = None if options.goal is None else parse_goal(options.goal)
    for size, text in zip(sizes, options.size or (), strict=True):
        if any(side % 8 or side < MIN_SIDE for side in size):
            raise ToMeConfigError(
                f"--size {text} is not allowed: it must be a multiple of 8 px from {MIN_SIDE} px on."
            )
    if goal is not None and len(sizes) > 1:
        raise ToMeConfigError("--goal needs one --size, because the settings that reach it depend on the size.")
    if goal is not None and options.rounds < FEW_ROUNDS:
        raise ToMeConfigError(
            f"--rounds {options.rounds} is not allowed with --goal, because so few show no gain: pass {FEW_ROUNDS} or "
            f"more, or leave it out for {ROUNDS}."
        )
    if options.save is not None and goal is None:
        raise ToMeConfigError(f"--save {options.save} needs --goal, which chooses the settings.")
    image = _check_images(options, manifest)
    configs = _configs(options, goal) if manifest is None else _exported_configs(options, manifest, sizes)
    with naming_options():
        check_writable(options.output, "output")
        if options.save is not None:
            check_writable(options.save.parent, "save")
            if options.save.is_dir():
                raise ParameterError("save", str(options.save), "it is a folder: name a file, such as build/tome.json")
    return Plan(configs, sizes, image, goal, manifest)


def _check_images(options: argparse.Namespace, manifest: Manifest | None) -> Image.Image | None:
    """The image of --image; ToMeConfigError unless the model's pipeline can be compared with these options."""
    has_image = options.image is not None
    if options.controlnet is not None and not has_image:
        raise ToMeConfigError("--controlnet needs --image, the input of the ControlNet.")
    if manifest is not None and options.controlnet is not None:
        raise ToMeConfigError(
            f"--controlnet {options.controlnet} is not allowed for {options.model}, an exported folder: a ControlNet "
            "is part of its programs, if it was exported with --controlnet."
        )
    if options.strength is not None:
        if not has_image:
            raise ToMeConfigError(f"--strength {options.strength:g} needs --image, which image-to-image starts from.")
        _checked_strength(options.strength, options.steps or MAX_STEPS)
    own = pipeline_class(options.model) if manifest is None else getattr(ppdiffusers, manifest.pipeline)
    if own is not None:  # of a hub name it is not known yet
        cls = _class(own, options)
        if manifest is not None and has_image and cls.__name__ != CONTROLNET and not manifest.image_to_image:
            raise ToMeConfigError(f"--image {options.image} needs an export with --img2img; {options.model} has none.")
    if not has_image:
        return None
    try:
        with Image.open(options.image) as image:
            return upright_rgb(image)
    except OSError as error:
        raise ToMeConfigError(f"--image {options.image} cannot be read: {error}.") from None


def _checked_strength(strength: float | None, steps: int) -> float:
    """The strength, or its default; ToMeConfigError if it is out of range or no step is left."""
    strength = STRENGTH if strength is None else strength
    if not 0 < strength <= 1:
        raise ToMeConfigError(f"--strength {strength:g} is not allowed: it must be above 0 and at most 1.")
    if int(steps * strength) < 1:
        raise ToMeConfigError(f"--strength {strength:g} of {steps} steps is less than one step: raise one of them.")
    return strength


def _class(own: type[DiffusionPipeline], options: argparse.Namespace) -> type[DiffusionPipeline]:
    """The class that generates the images."""
    uses_controlnet = options.controlnet is not None or own.__name__ == CONTROLNET
    if uses_controlnet and options.strength is not None:
        raise ToMeConfigError(
            f"--strength {options.strength:g} is not allowed with a ControlNet, which is compared from text: leave it "
            "out."
        )
    return class_to_compare(own, uses_controlnet, options.image is not None)


def _configs(options: argparse.Namespace, goal: Goal | None) -> list[ToMeConfig] | None:
    """What is compared in a pipeline; for a goal None for the known settings."""
    for name, default in OF_EXPORTS.items():
        if (value := getattr(options, name)) != default:
            raise ToMeConfigError(
                f"--{name.replace('_', '-')} {value} is not allowed for {options.model}, a pipeline, which runs in "
                "eager mode: leave it out, or pass a folder that export wrote."
            )
    if goal is not None and not (options.ratio or options.merging or options.config):
        return None
    configs = all_configs(options)
    if not all(config.effective_ratio for config in configs):
        raise ToMeConfigError("--ratio 0 is not allowed: plain images are always generated.")
    return configs


def _exported_configs(options: argparse.Namespace, manifest: Manifest, sizes: Sequence[Size]) -> list[ToMeConfig]:
    """How the UNet of an exported folder merges, at each ratio that is compared."""
    for name in ("method", "merging", "config"):
        if getattr(options, name):
            raise ToMeConfigError(
                f"--{name} is not allowed for {options.model}, an exported folder: its programs merge as they were "
                "exported. Leave it out."
            )
    for size in sizes:
        if size not in manifest.sizes:
            exported = ", ".join(map(str, manifest.sizes))
            raise ToMeConfigError(f"--size {size} was not exported, only {exported} (width x height).")
    if 0 not in manifest.ratios:
        raise ToMeConfigError(f"{options.model} has no plain program: export it again with 0 in --ratio.")
    ratios = [ratio for ratio in manifest.ratios if ratio]
    names = [ratio_name(ratio) for ratio in manifest.ratios]
    for ratio in options.ratio or ():
        if ratio_name(ratio) not in names:
            raise ToMeConfigError(f"--ratio {ratio:g} was not exported, only {', '.join(names)}.")
    if options.ratio is not None:
        ratios = list(dict.fromkeys(manifest.find_ratio(ratio) for ratio in options.ratio))
        if 0 in ratios:
            raise ToMeConfigError("--ratio 0 is not allowed: plain images are always generated.")
    if not ratios:
        raise ToMeConfigError(f"{options.model} was exported with ratio 0 alone: there is nothing to compare with it.")
    merging = {way.ratio: way for way in manifest.merging}
    return [_config_of(merging[ratio], options.model) for ratio in ratios]


def _config_of(merging: ProgramMerging, folder: str) -> ToMeConfig:
    """The config that programs were exported with; ToMeConfigError if it is not one of this release."""
    try:
        return ToMeConfig(**merging.settings or {})
    except ToMeConfigError as error:
        raise ToMeConfigError(
            f"{folder} merges in a way that this release does not have, {merging.words} ({error}). Compare it in the "
            "release that has exported it."
        ) from None


def _dtype() -> str:
    """The type of the weights in eager mode, as users run models there."""
    return "float32" if paddle.get_device() == "cpu" else "float16"


def _load(options: argparse.Namespace, plan: Plan) -> DiffusionPipeline:
    """The pipeline that generates the images, plain."""
    if plan.manifest is not None:
        cls = _class(getattr(ppdiffusers, plan.manifest.pipeline), options)
        with naming_options():
            settings = runtime_settings(plan.manifest, options)
            return load_pipeline(options.model, cls, ratio=0, threads=options.threads, **settings)
    pipe = load_eager_pipeline(options.model, options.controlnet, safety_checker=False, dtype=_dtype())
    return as_class(pipe, _class(type(pipe), options))


def _known_configs(options: argparse.Namespace, pipe: DiffusionPipeline, size: Size) -> list[ToMeConfig]:
    """The known settings that merge something at a size, each in its own way."""
    configs = [config for config in known_settings(options.method) if merges_at(pipe, config, size)]
    if not configs:
        raise ToMeConfigError(f"--size {size} is not allowed: no token of {options.model} would merge. Raise it.")
    return configs


def _compare_at(
    pipe: DiffusionPipeline,
    size: Size,
    image: Image.Image | None,
    configs: Sequence[ToMeConfig],
    about: dict[str, Any],
    options: argparse.Namespace,
    command: str,
) -> list[Figures]:
    """The figures of plain and of each config at a size, plain first; writes and prints them."""
    name = str(size.width) if size.width == size.height else str(size)
    print(f"{name} px, {about['steps']} steps, prompts: {', '.join(about['prompts'])}", flush=True)
    arm_count = len(configs) + 1
    steps = int(about["steps"] * about.get("strength", 1))
    print(
        f"  takes {arm_count * len(about['prompts'])} × {steps} steps for images, and "
        f"{arm_count * (options.rounds + 1)} for the times beside those that keep all tokens: "
        "fewer with --prompt, --steps and --rounds",
        flush=True,
    )
    inputs = {} if image is None else {"image": ImageOps.fit(image, (size.width, size.height))}
    inputs |= {"strength": about["strength"]} if "strength" in about else {}
    scene = Scene(about["prompts"], size, about["steps"], about["guidance_scale"], options.seed, options.batch, inputs)
    lines = StepLines()

    def report(line: str) -> None:
        print(f"  {line} …", file=sys.stderr, flush=True)

    def after_step(done: int, total: int) -> None:
        if not sys.stderr.isatty():  # where the pipeline has a bar
            lines.report("    step", done, total)

    arms = compare(pipe, scene, configs, options.rounds, report, after_step)
    rows = [arm.figures(arms[0]) for arm in arms]
    sheet = options.output / f"compare_{name}.jpg"
    font = font_for(text := "".join(about["prompts"]))
    if lacking := missing(font, text):
        print(
            f"no installed font has {lacking}: the sheet shows escapes in their place. Install one, such as Debian's "
            "fonts-noto-cjk for Chinese, Japanese and Korean.",
            file=sys.stderr,
        )
    merging = [config.describe() for config in configs]
    save_jpeg(draw_sheet(arms, scene, font), sheet, **size._asdict(), merging=merging, **about)
    content = {**size._asdict(), **about, "goal": options.goal, "arms": [row.content() for row in rows]}
    write_result(sheet.with_suffix(".json"), make_result("comparison", FORMAT, command, **content))
    print(f"{make_table(rows)}\nimages: {sheet}", flush=True)
    return rows


def _choose(
    goal: Goal,
    rows: Sequence[Figures],
    options: argparse.Namespace,
    is_exported: bool,
    command: str,
    about: dict[str, Any],
) -> int:
    """Report, and save, the settings that reach the goal best; the exit status."""
    chosen = goal.choose(rows)
    if chosen is None or chosen.config is None:
        best = goal.nearest(rows)
        reason = f". {_why_no_gain(rows)}" if best is None else f": the best is {best.summary}."
        print(f"No settings reach the goal, {goal}{reason}" + (" Nothing is saved." if options.save else ""))
        return NOT_REACHED
    print(f"Goal, {goal}: {chosen.summary}\n  {_in_code(chosen.config, options, is_exported)}")
    if options.save is not None:
        details = {"command": command, "commit": commit(), "environment": describe_environment(), **about}
        figures = {"goal": str(goal), "figures": chosen.content(), "compared": [row.content() for row in rows]}
        options.save.parent.mkdir(parents=True, exist_ok=True)
        chosen.config.save(options.save, **details, **figures)
        print(f"saved: {options.save}, for pipe.apply_tome(config=…) and export --config")
    return 0


def _next_steps(options: argparse.Namespace, rows: Sequence[Figures], is_exported: bool) -> str:
    """What a user can do after a comparison, with the fastest way to merge."""
    faster = [(row.gain, row.config) for row in rows if row.config is not None and row.gain is not None]
    gain, config = max(faster, key=lambda pair: pair[0], default=(0.0, ToMeConfig()))
    if gain <= 1:
        return _why_no_gain(rows)
    in_code = f"  {_in_code(config, options, is_exported)}   # in your own code"
    if is_exported:
        return f"Next:\n{in_code}"
    words = ["export", "--model", options.model, "--output", "build/export"]
    words += ["--controlnet", options.controlnet] if options.controlnet else []
    words += ["--img2img"] if options.image and not options.controlnet else []
    words += ["--size", *options.size] if options.size else []
    settings = {name: value for name, value in config.changed_settings().items() if name != "ratio"}
    words += ["--merging", ",".join(f"{name}={value}" for name, value in settings.items())] if settings else []
    words += [
        "--ratio",
        repr(config.effective_ratio),
        "0",
    ]  # and plain programs, for compare and clients that ask for 0
    export = f"  {command_line(words)}   # on a CPU: faster programs"
    return "\n".join(["Next:", export, in_code])


def _why_no_gain(rows: Sequence[Figures]) -> str:
    """What the figures say where none shows a gain."""
    if any(row.gain_in_words == TOO_FEW_ROUNDS for row in rows):
        return f"So few rounds do not tell whether merging is faster here: pass --rounds {ROUNDS} or more."
    return "Merging is not faster here, as far as these rounds show. It gains more in larger images."


def _in_code(config: ToMeConfig, options: argparse.Namespace, is_exported: bool) -> str:
    """The call that merges this way, in a program of the user's own."""
    if is_exported:
        return f"load_pipeline({options.model!r}, ratio={config.effective_ratio:g})"
    return f"pipe.apply_tome({config.describe()})"
