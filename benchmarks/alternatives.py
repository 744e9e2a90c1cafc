"""Compare merging with what a user would choose instead: fewer steps, another scheduler, cached features, and both.

    python benchmarks/alternatives.py --model examples/emoji_sd --size 128        # images; a repeated run continues
    python benchmarks/alternatives.py --model examples/emoji_sd --size 128 --time # time them: a quiet machine
    python benchmarks/alternatives.py report                                      # the page, from the results alone

Every arm generates the same prompts from the same noise, by programs in ONNX Runtime that were checked against eager
mode. Its distance is that to the plain image of all steps of the model's own scheduler. Its cost is the time of a
whole image, with text encoder and VAE, in ONNX Runtime and Paddle Inference: the sum of its passes of the UNet, each
timed in turns with all others, and of the rest, timed with a UNet that computes nothing.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pandas as pd
from filelock import FileLock
from lab.arm import PLAIN, Arm
from lab.cache import digest, model_files, sources
from lab.command import square
from lab.markdown import write_page
from lab.plotting import (
    BLUE,
    PURPLE,
    RED,
    add_legend,
    make_figure,
    save_figure,
    set_title,
    use_log_scale,
)
from lab.quality.image_sets import Evaluation, with_seeds
from lab.quality.networks import st_lpips
from lab.quality.sheets import evenly_spaced, write_sheet
from lab.result_files import make_result, read_json
from lab.timing import quartiles, time_in_turns
from matplotlib.figure import Figure
from paddle import nn
from paddle.utils import flatten, pack_sequence_as
from PIL import Image
from point_labels import label_points
from ppdiffusers import (
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.attach.attach import attach
from ppdiffusers_tome.comparison.clock import Gain, gain
from ppdiffusers_tome.comparison.environment import commit, describe_environment
from ppdiffusers_tome.comparison.results import write_result
from ppdiffusers_tome.comparison.similarity import psnr
from ppdiffusers_tome.export import programs, tracing
from ppdiffusers_tome.export.conversion import Converter
from ppdiffusers_tome.export.loading import load_eager_pipeline, model_defaults
from ppdiffusers_tome.families.models import text_tokens, vae_factor
from ppdiffusers_tome.inference import ProgramFile, Size, export_pipeline, load_pipeline
from ppdiffusers_tome.run.folder import ExportedFolder
from ppdiffusers_tome.run.manifest import PlannedProgram
from ppdiffusers_tome.run.pipeline import RUNTIMES
from ppdiffusers_tome.serving.engine import Engine
from ppdiffusers_tome.serving.prompt_file import model_prompts

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS, ALTERNATIVE, BOTH, CALIBRATION = "merging", "alternative", "both", "calibration"
COLOURS = {OURS: BLUE, ALTERNATIVE: RED, BOTH: PURPLE}
TIMED = {"onnxruntime": "ONNX Runtime", "paddle": "Paddle Inference"}  # the first one generates the images
TABLE = {  # column of the frame → title and form of the table's
    "name": ("arm", "{name}"),
    "group": ("kind", "{group}"),
    **{f"gain_{runtime}": (label, f"{{gain_{runtime}!s}}") for runtime, label in TIMED.items()},
    "psnr": ("PSNR, dB", "{psnr:.1f} ({low:.1f}–{high:.1f})"),
    "perceptual": ("ST-LPIPS", "{perceptual:.4f}"),
}
TITLES = {"psnr": "PSNR, dB: higher is better", "perceptual": "Perceptual distance (ST-LPIPS): lower is better"}
SHEET = (*(f"interlace {ratio}, merge_steps='all'" for ratio in (0.5, 0.75, 0.875)), "tomesd 0.5")


@lru_cache(maxsize=1)
def load_model(model: str) -> DiffusionPipeline:
    """A pipeline from a folder or the hub, in float32, which a process loads once; ToMeExportError if it cannot."""
    return load_eager_pipeline(model, safety_checker=False)


def group_of(arm: Arm) -> str:
    """What an arm is, in comparison with plain."""
    if arm.other_seed:
        return CALIBRATION
    is_alternative = arm.steps or arm.every > 1
    return (BOTH if is_alternative else OURS) if arm.config else ALTERNATIVE


def is_full(arm: Arm, number: int) -> bool:
    """Whether the step of this number computes everything."""
    return number % arm.every == 0


def reused_layers(arm: Arm, unet: nn.Layer) -> list[nn.Layer]:
    """The layers whose outputs are reused between full steps."""
    if arm.every == 1:
        return []
    first = unet.down_blocks[0]
    return [*first.downsamplers, *list(unet.down_blocks)[1:], unet.mid_block, *list(unet.up_blocks)[:-1]]


def arm_of(entry: dict[str, Any]) -> Arm:
    """The arm of a result's entry."""
    return Arm.from_json(entry["settings"])


def list_arms() -> list[Arm]:
    """All arms but the plain one, those that matter most first: a run may be ended early.

    Their tokens merge in all steps, so that the time of an image is that of as many equal passes; `samplers.py`
    measures images whose first and last steps are plain.
    """
    fast = ToMeConfig(0.75, merge_steps="all")
    arms = [Arm(ToMeConfig(ratio, merge_steps="all")) for ratio in (0.5, 0.75, 0.875, 0.9375)]
    others = (("todo", 0.75), ("tomesd", 0.5), ("tomesd", 0.25))
    arms += [Arm(ToMeConfig(ratio, method)) for method, ratio in others]
    arms += [Arm(steps=10), Arm(fast, steps=10), Arm(every=2), Arm(fast, every=2)]
    return [*arms, Arm(other_seed=True)]


class Reused:
    """Replaces a layer's `forward`: returns its output, or one that was given."""

    def __init__(self, forward: Callable) -> None:
        self._forward = forward
        self.output: Any = None
        self.is_given = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_given:
            self.output = self._forward(*args, **kwargs)
        return self.output


class Pass(nn.Layer):
    """A pass of a UNet: its prediction and features, or with features of an earlier pass the prediction alone.

    Args:
        denoiser: around the UNet.
        layers: of the UNet; their outputs are the features.
        example: inputs of the UNet with a batch of two.
    """

    def __init__(self, denoiser: nn.Layer, layers: Sequence[nn.Layer], example: dict[str, paddle.Tensor]) -> None:
        super().__init__()
        self.denoiser = denoiser
        self._reused = [Reused(layer.forward) for layer in layers]
        for layer, reused in zip(layers, self._reused, strict=True):
            layer.forward = reused
        self._used: list[int] = []  # indices of the output tensors that a pass with features reads
        if layers:
            with paddle.no_grad():
                self(**example)
            self._structure = [reused.output for reused in self._reused]
            tensors = [tensor.detach() for tensor in flatten(self._structure)]
            for tensor in tensors:
                tensor.stop_gradient = False
            gradients = paddle.grad(self._continued(tensors, example).sum(), tensors, allow_unused=True)
            self._used = [number for number, gradient in enumerate(gradients) if gradient is not None]
            self._shapes = [tensor.shape[1:] for tensor in tensors]
        shapes = [self._shapes[number] for number in self._used]
        self.features = tuple(programs.Input(f"feature_{i}", ("batch", *shape)) for i, shape in enumerate(shapes))

    def _continued(self, tensors: Sequence[paddle.Tensor], inputs: dict[str, Any]) -> paddle.Tensor:
        for reused, output in zip(self._reused, pack_sequence_as(self._structure, tensors), strict=True):
            reused.output, reused.is_given = output, True
        try:
            return self.denoiser(**inputs)
        finally:
            for reused in self._reused:
                reused.is_given = False

    @paddle.jit.not_to_static
    def forward(self, sample: Any, timestep: Any, encoder_hidden_states: Any = None, **features: Any) -> Any:
        inputs = {"sample": sample, "timestep": timestep, "encoder_hidden_states": encoder_hidden_states}
        if features:
            batch = paddle.shape(sample)[0]
            tensors = [paddle.zeros([batch, *shape]) for shape in self._shapes]
            for i, number in enumerate(self._used):
                tensors[number] = features[f"feature_{i}"]
            return self._continued(tensors, inputs)
        prediction = self.denoiser(**inputs)
        tensors = flatten([reused.output for reused in self._reused])
        return (prediction, *(tensors[number] for number in self._used)) if self._used else prediction


class Passes:
    """Replaces a pipeline's UNet: runs an arm's programs, step by step."""

    dtype = paddle.float32

    def __init__(self, config: Any, arm: Arm, full: Callable, reusing: Callable | None = None) -> None:
        self.config, self._arm, self._full, self._reusing = config, arm, full, reusing
        self.number = 0  # index of the next step
        self._features: dict[str, paddle.Tensor] = {}

    def select(self, ratio: float) -> None:
        """Do nothing: the arm has one ratio."""

    def step(self, number: int, inputs: dict[str, Any]) -> tuple[paddle.Tensor]:
        """The step of a number."""
        self.number = number
        return self(**inputs)

    def __call__(self, sample: Any, timestep: Any, encoder_hidden_states: Any, **_: Any) -> tuple[paddle.Tensor]:
        timestep = timestep if paddle.is_tensor(timestep) else paddle.to_tensor(timestep)
        inputs = {"sample": sample, "timestep": timestep.reshape([1]).cast("float32")}
        inputs["encoder_hidden_states"] = encoder_hidden_states
        was_full = is_full(self._arm, self.number)
        self.number += 1
        if was_full:
            prediction, *features = self._full(**inputs)
            self._features = {f"feature_{number}": feature for number, feature in enumerate(features)}
            return (prediction,)
        assert self._reusing is not None
        return (self._reusing(**inputs, **self._features)[0],)


def programs_of(arm: Arm) -> list[tuple[Arm, bool]]:
    """The program of an arm's full steps, and that of those that reuse features: as equal programs of arms have it."""
    key = Arm(arm.config, every=min(arm.every, 2))
    return [(key, reuses) for reuses in ((False, True) if key.every > 1 else (False,))]


def pass_name(key: Arm, reuses: bool) -> str:
    """The name of a pass."""
    deep = " deep" if key.every > 1 else ""
    return f"{key.merging or PLAIN}{deep}{', reusing' if reuses else ''}"


class Programs:
    """The programs of a model at one size, in `build/`: each is traced when it is first needed, by one process.

    With `dpm_solver` DPM-Solver++ replaces the model's scheduler in all arms.
    """

    def __init__(self, evaluation: Evaluation, dpm_solver: bool) -> None:
        self._evaluation, self._dpm_solver = evaluation, dpm_solver
        decisive = [sources(), model_files(evaluation.model), evaluation.size]
        self._folder = ROOT / "build" / "alternatives" / digest(decisive)
        self._folder.mkdir(parents=True, exist_ok=True)  # for the locks
        self._pipeline = self._folder / "pipeline"

    def engine(self, arm: Arm, runtime: str, unet: Sequence[Callable] | None = None) -> tuple[Engine, Passes]:
        """The engine for an arm, and its UNet. Set the UNet's `number` to 0 before each image.

        `unet` replaces the programs of the arm's UNet.
        """
        with FileLock(f"{self._pipeline}.lock"):
            if not (self._pipeline / "tome.json").exists():
                pipe, size = load_model(self._evaluation.model), Size(self._evaluation.size, self._evaluation.size)
                export_pipeline(pipe, self._pipeline, (0,), [size], image_to_image=True, format="both", overwrite=True)
        pipe = load_pipeline(self._pipeline, runtime=runtime, threads=self._evaluation.threads)
        passes = Passes(pipe.unet.config, arm, *(unet or self.load_all(arm, runtime)))
        parts = {**pipe.components, "unet": passes}
        if self._dpm_solver:
            parts["scheduler"] = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
        kinds = (StableDiffusionPipeline, StableDiffusionImg2ImgPipeline)
        return Engine(*(kind(**parts, requires_safety_checker=False) for kind in kinds)), passes

    def load_all(self, arm: Arm, runtime: str) -> list[Any]:
        """The programs of an arm: see `programs_of`."""
        return [self._load(*key, runtime) for key in programs_of(arm)]

    def _load(self, key: Arm, reuses: bool, runtime: str) -> Any:
        folder = self._folder / pass_name(key, reuses)
        record = folder / "program.json"
        with FileLock(f"{folder}.lock"):
            if not record.exists():
                file = self._trace(key, reuses, folder)
                write_result(record, {name: getattr(file, name) for name in ("program", "params", "onnx")})
        file = ProgramFile("unet", **json.loads(record.read_text(encoding="utf-8")))
        return RUNTIMES[runtime](threads=self._evaluation.threads).load(ExportedFolder(folder), file)

    def inputs(self) -> dict[str, paddle.Tensor]:
        """Random inputs of a pass of the UNet, for an image with guidance."""
        random, dims = np.random.RandomState(0), {**self._dims(), "batch": 2}
        unet = load_model(self._evaluation.model).unet
        return {one.name: one.random(random, dims) for one in programs.unet_inputs(unet)}

    def _dims(self) -> dict[str, int]:
        """The values of the inputs' named dimensions but the batch."""
        pipe = load_model(self._evaluation.model)
        latent = self._evaluation.size // vae_factor(pipe)
        return {"latent_height": latent, "latent_width": latent, "tokens": text_tokens(pipe)}

    def _trace(self, key: Arm, reuses: bool, folder: Path) -> ProgramFile:
        side, traceable = self._evaluation.size, programs.denoiser(load_model(self._evaluation.model).unet, None)
        unet, inputs = traceable.layer.unet, traceable.inputs
        with Converter() as converter:
            if key.config:
                attach(unet, key.config, None)
            layer = Pass(traceable.layer, reused_layers(key, unet), self.inputs())
            layer.eval()
            if reuses:  # a program has no inputs that it does not read
                inputs = (*inputs, *layer.features)
            planned = PlannedProgram("unet", Size(side, side), key.ratio)
            traceable = programs.Traceable(layer, inputs)
            return tracing.save(traceable, planned, folder, "unet", self._dims(), self._evaluation.threads, converter)


def jobs_of(evaluation: Evaluation, arm: Arm) -> list[Any]:
    """The jobs of an arm's images. Its UNet merges by itself, so that they need no ratio."""
    return [prompt.job for prompt in evaluation.jobs(replace(arm, config=None))]


def generate(engine: tuple[Engine, Passes], job: Any) -> np.ndarray:
    """uint8 [H, W, 3]."""
    engine[1].number = 0
    return np.asarray(engine[0].generate([job])[0])


def generate_all(evaluation: Evaluation, saved: Programs, arm: Arm, folder: Path) -> np.ndarray:
    """uint8 [N, H, W, 3], as files in a folder: those that it lacks are generated."""
    paths = {folder / f"{number:04}.png": job for number, job in enumerate(jobs_of(evaluation, arm))}
    if lacking := [path for path in paths if not path.exists()]:
        folder.mkdir(parents=True, exist_ok=True)
        engine = saved.engine(arm, next(iter(TIMED)))
        for path in lacking:
            Image.fromarray(generate(engine, paths[path])).save(part := path.with_suffix(".part"), "PNG")
            part.rename(path)
    return np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])


def compare(images: np.ndarray, plain: np.ndarray) -> dict[str, Any]:
    """Compare images with plain ones, both uint8 [N, H, W, 3].

    Returns:
        The medians "psnr" (dB) and "perceptual" (ST-LPIPS), and in "images" the values of each image.
    """
    values = {
        "psnr": [round(psnr(image, other), 3) for image, other in zip(images, plain, strict=True)],
        "perceptual": np.round(st_lpips(images, plain).astype(float), 6).tolist(),
    }
    return summarized(values)


def summarized(values: dict[str, list[float]]) -> dict[str, Any]:
    """The medians of measures, and in "images" their values."""
    return {**{measure: float(np.median(of_images)) for measure, of_images in values.items()}, "images": values}


def earlier_result(file: Path, about: dict[str, Any], restarts: bool, times: bool) -> dict[str, Any]:
    """The result that a run continues, or {} if it begins one.

    The script ends if the result is about other images or other sources, unless it `restarts`, and if it `times` and
    there are no images.
    """
    result = read_json(file) if file.exists() else {}
    if times and not result:
        sys.exit(f"{file} does not exist: generate its images first, without --time.")
    if differing := [key for key, value in about.items() if result.get(key, value) != value]:
        if restarts and not times:
            return {}
        remedy = "generate its images again, without --time" if times else "pass --restart, or choose another --output"
        sys.exit(f"{file} has results of another {', '.join(differing)}: {remedy}.")
    return result


def kept_arms(file: Path, about: dict[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """The named arms of a result by other sources, for the first images of it: each has the commit of its own images.

    The script ends if the result is about another model or other images, or lacks an arm.
    """
    result, count = read_json(file), len(about["prompts"])
    same = {key: value for key, value in about.items() if key not in ("sources", "prompts")}
    differing = [key for key, value in same.items() if result[key] != value]
    if result["prompts"][:count] != about["prompts"]:
        differing.append("prompts")
    entries = {entry["name"]: entry for entry in result["arms"]}
    if differing or not entries.keys() >= set(names):
        sys.exit(f"--keep: {file} has another {', '.join(differing) or 'list of arms'}: leave --keep out.")
    kept = []
    for entry in map(entries.get, names):
        values = {measure: of_images[:count] for measure, of_images in entry["images"].items()}
        kept.append({**entry, **summarized(values), "commit": entry.get("commit", result["commit"])})
    return kept


def measure(
    evaluation: Evaluation, saved: Programs, content: dict[str, Any], names: Sequence[str], folder: Path
) -> Iterator[str]:
    """Generate and compare the named arms, or all, that the content lacks; yields a line when one is in it."""
    plain = generate_all(evaluation, saved, Arm(), folder / "images" / "plain")
    done = {entry["name"] for entry in content["arms"]}
    for arm in list_arms():
        if arm.name in done or (names and arm.name not in names):
            continue
        images = generate_all(evaluation, saved, arm, folder / "images" / arm.name)
        entry = {"name": arm.name, "group": group_of(arm), "settings": arm.to_json()}
        content["arms"].append({**entry, **compare(images, plain)})
        yield "{name}: {psnr:.1f} dB, {perceptual:.4f}".format(**content["arms"][-1])


def time_passes(evaluation: Evaluation, saved: Programs, arms: Sequence[Arm], rounds: int) -> dict[str, Any]:
    """Seconds of each pass of the arms in turns, and of the rest of an image, in each runtime."""
    seconds, job = {}, jobs_of(evaluation, Arm())[0]
    inputs = saved.inputs()
    for runtime in TIMED:
        nothing = saved.engine(Arm(), runtime, [lambda sample, **_: [sample]])
        turns: dict[str, Callable] = {"rest": partial(generate, nothing, job)}
        for arm in (Arm(), *arms):
            keys = programs_of(arm)
            if pass_name(*keys[0]) not in turns:
                passes = Passes(nothing[1].config, keys[0][0], *saved.load_all(arm, runtime))
                passes(**inputs)  # a full step fills the features
                turns |= {pass_name(*key): partial(passes.step, number, inputs) for number, key in enumerate(keys)}
        seconds[runtime] = time_in_turns(turns, rounds, warm_up=1)
    return seconds


def image_seconds(arm: Arm, steps: int, seconds: dict[str, list[float]]) -> list[float]:
    """Seconds of a whole image of an arm, in each round, from those of its passes."""
    names = [pass_name(*key) for key in programs_of(arm)]
    passes = [names[0 if is_full(arm, number) else 1] for number in range(arm.steps or steps)]
    return [sum(each) for each in zip(seconds["rest"], *(seconds[name] for name in passes), strict=True)]


def image_gain(result: dict[str, Any], arm: Arm, runtime: str) -> Gain | None:
    """The gain of an arm's images over plain; None if a pass of it was not timed."""
    steps = round(result["steps"] * (result["strength"] or 1))
    try:
        plain, own = (image_seconds(one, steps, result["timing"]["seconds"][runtime]) for one in (Arm(), arm))
    except (KeyError, TypeError):
        return None
    return gain(plain, own)


def is_on_frontier(speed_up: pd.Series, nearness: pd.Series) -> np.ndarray:
    """Whether each point is faster than plain, and no other point is nearer and faster."""
    points = list(zip(speed_up, nearness, strict=True))
    is_best = [s > 1 and not any(other > s and nearer > n for other, nearer in points) for s, n in points]
    return np.array(is_best, bool)


def read_frame(result: dict[str, Any]) -> pd.DataFrame:
    """One row for each arm but other seeds, the fastest first.

    The column of a runtime has the factors of the gains, NaN where a pass was not timed; `gain_…` has the gains, and
    `on_…` whether no other arm is faster and nearer.
    """
    frame = pd.DataFrame([entry for entry in result["arms"] if entry["group"] != CALIBRATION])
    for runtime in TIMED:
        gains = [image_gain(result, arm_of(entry), runtime) for entry in frame.to_dict("records")]
        frame[f"gain_{runtime}"] = pd.Series(gains, frame.index, dtype=object)
        frame[runtime] = [np.nan if gain is None else gain.factor for gain in gains]
        differing = [np.nan if gain is None else gain.factor if gain.is_difference else 1 for gain in gains]
        frame[f"on_{runtime}"] = is_on_frontier(pd.Series(differing, frame.index), frame["psnr"])
    return frame.sort_values(next(iter(TIMED)), ascending=False, kind="stable", ignore_index=True)


def cells_of(rows: pd.DataFrame, columns: Mapping[str, tuple[str, str]]) -> pd.DataFrame:
    """A page's table of some rows of a frame; None where nothing was measured.

    `columns` has title and form of the table's columns; the form has the names of the frame's.
    """
    records = rows.to_dict("records")
    cells = {
        title: [None if pd.isna(row[name]) else form.format(**row).replace("inf", "∞") for row in records]
        for name, (title, form) in columns.items()
        if name in rows
    }
    return pd.DataFrame(cells)


def plot(frame: pd.DataFrame, about: str, x: str, label: str) -> Figure:
    """PSNR and ST-LPIPS against a cost, with the name of each arm beside its point and the frontier in grey."""
    plotted, panels = make_figure(rows=2, height=13)
    for axes, (measure, title) in zip(panels, TITLES.items(), strict=True):
        nearness = frame["psnr"] if measure == "psnr" else -frame["perceptual"]
        best = frame[is_on_frontier(frame[x], nearness)].sort_values(x, kind="stable")
        axes.plot(best[x], best[measure], "-", color="#cccccc", lw=6, label="frontier")
        for group, colour in COLOURS.items():
            points = frame[frame["group"] == group]
            axes.plot(points[x], points[measure], "o", color=colour, ms=5, label=group)
        axes.set_title(title, fontsize=9.5)
        axes.set_xlabel(label, fontsize=9)
        axes.margins(0.1, 0.08)
    use_log_scale(panels[1])
    set_title(plotted, about)
    add_legend(plotted, panels)
    for axes, measure in zip(panels, TITLES, strict=True):
        rows = frame.assign(text=frame["name"], colour=frame["group"].map(COLOURS))[["text", x, measure, "colour"]]
        label_points(plotted, axes, list(rows.itertuples(index=False, name=None)))
    return plotted


def write_report(files: Sequence[Path], output: Path) -> str:
    """Write `alternatives.md`, with a plot for each result, from results alone; return its text."""
    sections = []
    for file in files:
        result = read_json(file)
        frame, figures = read_frame(result), []
        title = f"{Path(result['model']).name}, {result['size']} px, {len(result['prompts'])} images"
        title = ", ".join([title, *result["variant"]])
        frame[["low", "high"]] = [quartiles(images["psnr"])[1:] for images in frame["images"]]
        cells = cells_of(frame, TABLE).set_index("arm")
        for runtime, name in TIMED.items():
            is_best = frame[f"on_{runtime}"].to_numpy()
            cells.loc[is_best, name] = "**" + cells.loc[is_best, name] + "**"
        runtime, name = next(iter(TIMED.items()))
        if frame[runtime].notna().any():
            path, label = output / f"{file.stem}.png", f"gain over plain, whole image, {name}"
            save_figure(plot(frame[frame[runtime].notna()], title, runtime, label), path)
            figures.append((path, f"{title}: distance from plain against {label}. Grey: the frontier."))
        sheet = output / f"{file.stem}_sheet.jpg"
        if sheet.exists():
            figures.append((sheet, f"{title}: plain, {', '.join(SHEET)}."))
        kept: dict[str, list[str]] = {}
        for entry in result["arms"]:
            if "commit" in entry:
                kept.setdefault(entry["commit"], []).append(entry["name"])
        sections.append((title, file, result, figures, cells, kept))
    return write_page(Path(__file__).with_name("templates") / "alternatives.md", output, sections=sections)


def variant_of(options: argparse.Namespace) -> dict[str, str]:
    """What makes a result one of its own: as part of its file's name, and in words."""
    variant = {}
    if options.strength is not None:
        variant["photographs"] = f"strength {options.strength:g}"
    if options.dpm_solver:
        variant["dpm_solver"] = "DPM-Solver++"
    if options.steps is not None:
        variant[f"{options.steps}_steps"] = f"{options.steps} steps"
    if options.guidance_scale is not None:
        variant[f"guidance_{options.guidance_scale:g}"] = f"guidance {options.guidance_scale:g}"
    if options.more:
        variant["more"] = "more images of some arms"
    return variant


def main() -> None:
    """Generate or time what the result lacks, and write it after each arm; or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", nargs="?", choices=("measure", "report"), default="measure")
    parser.add_argument("--model", default="examples/emoji_sd", help="folder of a pipeline (default: %(default)s)")
    parser.add_argument("--size", type=square, help="a square, 256 or 256x256, in px (default: the model's)")
    parser.add_argument("--count", type=int, default=8, help="images of each arm (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="of plain images (default: the model's)")
    parser.add_argument("--guidance-scale", type=float, help="(default: the model's)")
    parser.add_argument("--dpm-solver", action="store_true", help="DPM-Solver++ for all arms (default: the model's)")
    parser.add_argument("--strength", type=float, help="image-to-image from photographs (default: from noise)")
    parser.add_argument("--only", nargs="*", default=[], metavar="ARM", help="arms to measure (default: all)")
    parser.add_argument("--more", action="store_true", help="a result of its own, for more images of --only some arms")
    parser.add_argument("--restart", action="store_true", help="replace a result of other images or other sources")
    keeps = "with --restart: arms of that result to keep, whose code has not changed since"
    parser.add_argument("--keep", nargs="*", default=[], metavar="ARM", help=keeps)
    parser.add_argument("--time", action="store_true", help="time the arms that have images, on a quiet machine")
    parser.add_argument("--rounds", type=int, default=5, help="of --time (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of results (default: %(default)s)")
    options = parser.parse_args()
    if options.mode == "report":
        write_report(sorted(options.output.glob("alternatives_*.json")), options.output.parent)
        return
    if unknown := set(options.only) - {arm.name for arm in list_arms()}:
        parser.error(f"--only: {min(unknown)!r} is no arm: choose from {', '.join(arm.name for arm in list_arms())}")
    defaults = model_defaults(options.model, load_model(options.model))
    guidance = defaults.guidance_scale if options.guidance_scale is None else options.guidance_scale
    steps = round((options.steps or defaults.steps) / (options.strength or 1))
    texts = model_prompts(options.model, "--model")
    prompts = with_seeds(texts, options.count, 0)
    size, threads = options.size or defaults.size, options.threads
    evaluation = Evaluation(options.model, prompts, size, steps, guidance, threads, options.strength)
    about = {"model": options.model, "model_files": model_files(options.model), "sources": sources(), "size": size}
    about |= {"steps": steps, "guidance_scale": guidance, "strength": options.strength}
    scheduler = DPMSolverMultistepScheduler if options.dpm_solver else type(load_model(options.model).scheduler)
    variant = variant_of(options)
    about |= {"scheduler": scheduler.__name__, "variant": [*variant.values()]}
    about |= {"prompts": [{"prompt": text, "seed": seed} for text, seed in prompts]}
    file = options.output / f"{'_'.join(['alternatives', Path(options.model).name, str(size), *variant])}.json"
    saved = Programs(evaluation, options.dpm_solver)
    result = earlier_result(file, about, options.restart, options.time)
    content = {key: result.get(key, default) for key, default in {"timing": None, "arms": []}.items()}
    if options.restart and options.keep and not result:
        content["arms"] = kept_arms(file, about, options.keep)
    command, made = shlex.join(["python", "benchmarks/alternatives.py", *sys.argv[1:]]), {}
    decisive = {**about, "prompts": texts}  # a larger --count continues with the same images
    folder = ROOT / "build" / file.stem / digest(decisive)
    if options.time:
        made = {key: result[key] for key in ("command", "commit", "environment", "threads")}  # of the images
        about_timing = {"command": command, "commit": commit(), "environment": describe_environment()}
        timed = [arm_of(entry) for entry in content["arms"] if entry["group"] != CALIBRATION]
        seconds = time_passes(evaluation, saved, timed, options.rounds)
        content["timing"] = {**about_timing, "threads": threads, "seconds": seconds}
    for line in ["timed"] if options.time else measure(evaluation, saved, content, options.only, folder):
        write_result(file, make_result("experiments", command, **{"threads": threads, **about, **content, **made}))
        print(line, flush=True)
    shown = {"plain": "plain", **{name: name for name in SHEET}}
    if all((folder / "images" / name).exists() for name in shown):
        result = read_json(file)
        write_sheet(options.output.parent / f"{file.stem}_sheet.jpg", result, folder, shown, evenly_spaced(result))


if __name__ == "__main__":
    main()
