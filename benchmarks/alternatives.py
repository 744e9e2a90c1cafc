"""Compare merging with what a user would choose instead: fewer steps, another scheduler, cached features, and both.

    python benchmarks/alternatives.py --model examples/emoji_sd --size 128        # draw; a repeated run continues
    python benchmarks/alternatives.py --model examples/emoji_sd --size 128 --time # time whole images: a quiet machine
    python benchmarks/alternatives.py report                                      # the page, from the results alone

Every arm draws the same prompts in eager mode from the same noise. Its distance is that to the plain image of all
steps of the model's own scheduler. Its cost is the multiply-accumulates of a whole image, with text encoder and VAE,
counted while it is drawn.
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pandas as pd
from experiments import compare
from matplotlib.figure import Figure
from merge_prototypes import merging_queries
from paddle import nn
from PIL import Image
from point_labels import label_points
from ppdiffusers import DPMSolverMultistepScheduler
from ppdiffusers.models.attention_processor import Attention

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.evaluation.clock import quartiles, ratio_within_rounds, time_in_turns
from ppdiffusers_tome.evaluation.environment import commit, describe_environment, model_files, sources
from ppdiffusers_tome.evaluation.markdown import NOT_MEASURED, figure, link, table
from ppdiffusers_tome.evaluation.plotting import (
    BLUE,
    PURPLE,
    RED,
    add_legend,
    make_figure,
    save_figure,
    set_title,
    use_log_scale,
)
from ppdiffusers_tome.evaluation.quality.image_generation import (
    EagerEngine,
    image_paths,
    load_model,
    model_defaults,
    read_images,
)
from ppdiffusers_tome.evaluation.quality.quality_plots import BETTER, TITLES, is_on_frontier
from ppdiffusers_tome.evaluation.quality.settings import OTHER_SEEDS, PLAIN_IMAGES, Evaluation, prompts_of, with_seeds
from ppdiffusers_tome.evaluation.quality.sheets import evenly_spaced, write_sheet
from ppdiffusers_tome.evaluation.results import make_result, read_json, write_result

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS, ALTERNATIVE, BOTH, CALIBRATION = "merging", "alternative", "both", "calibration"
COLOURS = {OURS: BLUE, ALTERNATIVE: RED, BOTH: PURPLE}
TODO = {"merge_attn": "kv", "match": "grid", "blend": 0.0, "proportional": False, "use_rand": False, "ratio": 0.75}
SHEET = ("default 0.5", "kv 0.75", "10 steps", "DPM-Solver++, 10 steps", "DeepCache 2", "DeepCache 2 + default 0.5")


@dataclass(frozen=True)
class Arm:
    """One way to draw an image; without arguments the plain one."""

    steps: int | None = None  # of the images; None: all
    dpm_solver: bool = False  # DPM-Solver++ (Lu et al. 2022, arXiv:2211.01095) in place of the model's scheduler
    every: int = (
        1  # DeepCache (Ma et al. 2023, arXiv:2312.00858): the n-th steps compute everything, from the first on
    )
    last_layer: bool = (
        False  # the others compute the last layer alone, as its code does by default, not the whole level
    )
    gate: int | None = None  # steps after which the outputs of cross-attention are reused
    guided: bool = True  # after the gate; False as in T-GATE (Zhang et al. 2024, arXiv:2404.02747)
    merging: dict[str, Any] = field(default_factory=dict, hash=False)  # of ToMeConfig
    queries: float = 0.0  # ratio of queries; `merging` then has that of keys and values
    other_seed: bool = False

    @property
    def name(self) -> str:
        steps = f"{self.steps} steps" if self.steps else ""
        caches = f"DeepCache {self.every}{', last layer' if self.last_layer else ''}" if self.every > 1 else ""
        gate = f"{'cross-attention' if self.guided else 'T-GATE'} {self.gate}" if self.gate else ""
        ratio = self.merging.get("ratio", 0)
        method = "ToDo" if self.merging == TODO else "kv" if self.merging.get("merge_attn") == "kv" else "default"
        merging = f"{method} {ratio:g}" if self.merging else ""
        if self.queries:
            merging = f"q {self.queries:g}, kv {ratio:g}"
        seed = "another seed" if self.other_seed else ""
        scheduler = ", ".join(filter(None, ["DPM-Solver++" if self.dpm_solver else "", steps]))
        return " + ".join(filter(None, [scheduler, caches, gate, merging, seed])) or "plain"

    @property
    def group(self) -> str:
        if self.other_seed:
            return CALIBRATION
        is_alternative = self.steps or self.dpm_solver or self.every > 1 or self.gate
        return (BOTH if is_alternative else OURS) if self.merging else ALTERNATIVE

    @property
    def config(self) -> ToMeConfig:
        return ToMeConfig(**{"ratio": 0, **self.merging})

    @contextmanager
    def open(self, pipe: Any) -> Iterator[None]:
        """While it is open, the pipeline draws in this way but for the number of steps and `config`."""
        with ExitStack() as stack:
            if self.dpm_solver:
                scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
                stack.enter_context(mock.patch.object(pipe, "scheduler", scheduler))
            if self.every > 1:
                stack.enter_context(deep_cache(pipe.unet, self.every, self.last_layer))
            if self.gate:
                stack.enter_context(gated(pipe.unet, self.gate, self.guided))
            if self.queries:
                stack.enter_context(merging_queries(self.queries)())
            yield


def list_arms() -> list[Arm]:
    """All arms but the plain one, those that matter most first: a run may be ended early."""
    half, seven, kv = {"ratio": 0.5}, {"ratio": 0.7}, {"merge_attn": "kv", "ratio": 0.75}
    arms = [Arm(merging=half), Arm(merging=seven), Arm(merging=kv), Arm(merging=TODO)]
    arms += [Arm(steps=steps) for steps in (16, 14, 12, 10)]
    arms += [Arm(every=2), Arm(every=3), Arm(every=2, merging=half), Arm(steps=14, merging=half)]
    arms += [Arm(steps=10, dpm_solver=True), Arm(gate=10, guided=False), Arm(other_seed=True)]
    arms += [Arm(queries=q, merging={**kv, "ratio": k}) for q, k in ((0.375, 0.6), (0.25, 0.667), (0.25, 0.5))]
    arms += [Arm(steps=10, merging=half), Arm(steps=10, dpm_solver=True, merging=half), Arm(every=3, merging=half)]
    arms += [Arm(every=2, merging=seven), Arm(every=2, merging=kv), Arm(gate=10, guided=False, merging=half)]
    arms += [Arm(every=2, last_layer=True), Arm(every=3, last_layer=True), Arm(gate=10)]
    arms += [Arm(steps=steps, dpm_solver=True) for steps in (20, 14, 12, 8)]
    return [*arms, Arm(steps=8), Arm(merging={"ratio": 0.25}), Arm(every=2, last_layer=True, merging=half)]


class Reused:
    """In place of a layer's `forward`: in passes that are not full, return what the last full one returned."""

    def __init__(self, forward: Callable, is_full: Callable[[], bool], store: Callable[[Any], Any]) -> None:
        self._forward, self._is_full, self._store = forward, is_full, store
        self.output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_full():
            return self.output
        output = self._forward(*args, **kwargs)
        self.output = self._store(output)
        return output


@contextmanager
def reusing(
    layers: Sequence[nn.Layer], is_full: Callable[[], bool], store: Callable[[Any], Any] = lambda output: output
) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(mock.patch.object(layer, "forward", Reused(layer.forward, is_full, store)))
        yield


@contextmanager
def counting_passes(unet: nn.Layer) -> Iterator[Callable[[], int]]:
    """The number of the pass that runs, from 0."""
    number, forward = [-1], unet.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        number[0] += 1
        return forward(*args, **kwargs)

    with mock.patch.object(unet, "forward", counted):
        yield lambda: number[0]


@contextmanager
def deep_cache(unet: nn.Layer, every: int, last_layer: bool = False) -> Iterator[None]:
    """Passes other than every n-th reuse all features but those of the first level, or of its last layer."""
    first, last = unet.down_blocks[0], unet.up_blocks[-1]
    deep = [*first.downsamplers, *list(unet.down_blocks)[1:], unet.mid_block, *list(unet.up_blocks)[:-1]]
    if last_layer:
        deep += [*first.resnets, *getattr(first, "attentions", [])]
        deep += [*list(last.resnets)[:-1], *list(getattr(last, "attentions", []))[:-1]]
    with counting_passes(unet) as number, reusing(deep, lambda: number() % every == 0):
        yield


@contextmanager
def gated(unet: nn.Layer, gate: int, guided: bool = True) -> Iterator[None]:
    """Passes from the number `gate` on reuse the outputs of cross-attention of the pass before.

    Without guidance, as in T-GATE, they compute the conditional half of the batch alone, with the mean of both halves'
    outputs.
    """
    layers = [
        layer for path, layer in unet.named_sublayers() if path.endswith("attn2") and isinstance(layer, Attention)
    ]
    halves = lambda output: output.chunk(2)  # noqa: E731
    store = (lambda output: output) if guided else (lambda output: sum(halves(output)) / 2)
    with counting_passes(unet) as number:
        forward = unet.forward

        def conditional(sample: Any, timestep: Any, encoder_hidden_states: Any, **kwargs: Any) -> Any:
            if number() + 1 < gate:
                return forward(sample, timestep, encoder_hidden_states=encoder_hidden_states, **kwargs)
            text = halves(encoder_hidden_states)[1]
            (output,) = forward(halves(sample)[1], timestep, encoder_hidden_states=text, **kwargs)
            return (paddle.concat([output, output]),)

        unguided = nullcontext() if guided else mock.patch.object(unet, "forward", conditional)
        with reusing(layers, lambda: number() < gate, store), unguided:
            yield


@contextmanager
def counting_macs() -> Iterator[Callable[[], int]]:
    """Multiply-accumulates of all convolutions, linear layers and matrix products since it was opened."""
    total, call, matmul = [0], nn.Layer.__call__, paddle.matmul

    def counted_call(layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        output = call(layer, *args, **kwargs)
        if isinstance(layer, nn.Conv2D | nn.Linear):
            channels = layer.weight.shape[0 if isinstance(layer, nn.Conv2D) else 1]
            total[0] += output.size * layer.weight.size // channels
        return output

    def counted_matmul(x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False, name: Any = None) -> Any:
        output = matmul(x, y, transpose_x, transpose_y)
        total[0] += output.size * x.shape[-2 if transpose_x else -1]
        return output

    with mock.patch.object(nn.Layer, "__call__", counted_call), mock.patch.object(paddle, "matmul", counted_matmul):
        yield lambda: total[0]


def draw(evaluation: Evaluation, arm: Arm, number: int) -> np.ndarray:
    """uint8 [H, W, 3]: an image of an arm."""
    steps = arm.steps and round(arm.steps / (evaluation.strength or 1))
    evaluation = evaluation if steps is None else Evaluation(**{**vars(evaluation), "steps": steps})
    job = evaluation.jobs(OTHER_SEEDS if arm.other_seed else PLAIN_IMAGES)[number].job
    with arm.open(load_model(evaluation.model)):
        return np.asarray(EagerEngine(evaluation.model, arm.config).generate([job])[0])


def draw_all(evaluation: Evaluation, arm: Arm, folder: Path) -> tuple[np.ndarray, int]:
    """uint8 [N, H, W, 3], also as files in a folder; and the multiply-accumulates of one image."""
    with counting_macs() as macs:
        images = [draw(evaluation, arm, 0)]
    images += [draw(evaluation, arm, number) for number in range(1, len(evaluation.prompts))]
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:04}.png")
    return np.stack(images), macs()


def measure(evaluation: Evaluation, content: dict[str, Any], names: Sequence[str], folder: Path) -> Iterator[str]:
    """Draw and compare the named arms, or all, that the content lacks; yields a line for each, which is then in it."""
    plain_folder = folder / "images" / "plain"
    if not content["plain_macs"]:
        shutil.rmtree(folder, ignore_errors=True)
    if not plain_folder.exists():
        content["plain_macs"] = draw_all(evaluation, Arm(), plain_folder)[1]
    plain = read_images(image_paths(plain_folder), evaluation.size)
    done = {entry["name"] for entry in content["arms"]}
    for arm in list_arms():
        if arm.name in done or (names and arm.name not in names):
            continue
        images, macs = draw_all(evaluation, arm, folder / "images" / arm.name)
        entry = {"name": arm.name, "group": arm.group, "settings": asdict(arm)}
        entry["macs"] = round(macs / content["plain_macs"], 4)
        content["arms"].append({**entry, **compare({"": images}, {"": plain})[""], "seconds": None})
        yield "{name}: MACs {macs:.3f}, {psnr:.1f} dB, {perceptual:.4f}".format(**content["arms"][-1])


def time_arms(evaluation: Evaluation, content: dict[str, Any], names: Sequence[str], rounds: int) -> Iterator[str]:
    """Time one whole image of each arm that was drawn and has no time, in turns with a plain one."""
    arms = {arm.name: arm for arm in list_arms() if not arm.other_seed}
    for entry in content["arms"]:
        arm = arms.get(entry["name"])
        if arm is None or entry["seconds"] or (names and entry["name"] not in names):
            continue
        turns = {"plain": lambda: draw(evaluation, Arm(), 0), "arm": lambda arm=arm: draw(evaluation, arm, 0)}
        entry["seconds"] = time_in_turns(turns, rounds, warm_up=1)
        yield f"{entry['name']}: {ratio_within_rounds(*entry['seconds'].values()).median:.2f}×"


def read_frame(result: dict[str, Any]) -> pd.DataFrame:
    """One row for each arm but other seeds: "fewer" and "speed_up" are plain's MACs and time over those of the arm."""
    frame = pd.DataFrame([arm for arm in result["arms"] if arm["group"] != CALIBRATION])
    frame["fewer"] = 1 / frame["macs"]
    pairs = frame["seconds"].map(lambda seconds: seconds and ratio_within_rounds(seconds["plain"], seconds["arm"]))
    frame["speed_up"] = pairs.map(lambda ratio: ratio.median if ratio else np.nan)
    for measure, nearness in {"psnr": frame["psnr"], "perceptual": -frame["perceptual"]}.items():
        frame[f"on_{measure}"] = is_on_frontier(frame["fewer"], nearness)
    return frame.sort_values("fewer", ascending=False, kind="stable", ignore_index=True)


def plot(frame: pd.DataFrame, title: str, x: str, label: str) -> Figure:
    """PSNR and ST-LPIPS against a cost, with the name of each arm beside its point and the frontier in grey."""
    panels_of = {"psnr": "PSNR", "perceptual": "ST-LPIPS"}
    plotted, panels = make_figure(rows=2, height=13)
    for axes, measure in zip(panels, panels_of, strict=True):
        nearness = frame["psnr"] if measure == "psnr" else -frame["perceptual"]
        best = frame[is_on_frontier(frame[x], nearness)].sort_values(x, kind="stable")
        axes.plot(best[x], best[measure], "-", color="#cccccc", lw=6, label="frontier")
        for group, colour in COLOURS.items():
            points = frame[frame["group"] == group]
            axes.plot(points[x], points[measure], "o", color=colour, ms=5, label=group)
        axes.set_title(TITLES[measure] + BETTER[measure], fontsize=9.5)
        axes.set_xlabel(label, fontsize=9)
        axes.margins(0.1, 0.08)
    use_log_scale(panels[1])
    set_title(plotted, title)
    add_legend(plotted, panels)
    for axes, measure in zip(panels, panels_of, strict=True):
        rows = frame.assign(text=frame["name"], colour=frame["group"].map(COLOURS))[["text", x, measure, "colour"]]
        label_points(plotted, axes, list(rows.itertuples(index=False, name=None)))
    return plotted


INTRODUCTION = """\
How far images are from the plain ones (all steps, the model's own scheduler, the same noise), and what an image costs:
merging, what a user would choose instead, and both. Costs are multiply-accumulates (MACs) of the whole image, with
text encoder and VAE, counted while it was drawn, and where measured the time of a whole image in eager mode, in turns
with plain. *Fewer MACs* is plain's number over that of the arm: what the time would be if every operation took time by
its MACs. It does not contain what merging adds (sorting, gathering) nor the softmax that it saves.

- **n steps**: the model's own scheduler. **DPM-Solver++** (arXiv:2211.01095) is compared with the model's own
  scheduler too, so a part of its distance is that the two do not draw the same image in any number of steps.
- **DeepCache n** (arXiv:2312.00858): each n-th step, from the first on, computes everything; the others compute the
  first level and reuse the features of the deeper ones. With **last layer** they compute the last layer of the UNet
  alone, as DeepCache's code does by default.
- **T-GATE n** (arXiv:2404.02747): after n steps, cross-attention is its mean over both halves of guidance in step n,
  and the unconditional half is not computed. **cross-attention n** only reuses the outputs of cross-attention.
- **default**, **kv**, **ToDo**: ways to merge ([methods.md](../docs/methods.md)), with their ratio. **q a, kv b**:
  queries merge at ratio a, keys and values at b, by one matching; the package does not offer it.

Bold: no other arm has both fewer MACs and a higher PSNR. Eager mode only; a runtime gains less from merging
([frontier.md](frontier.md)).
"""


def write_report(files: Sequence[Path], output: Path) -> str:
    """Write `alternatives.md` and its plots from results alone; return its text."""
    lines = ["# Merging, and what to choose instead", "", *INTRODUCTION.splitlines()]
    for file in files:
        result = read_json(file)
        frame, machine = read_frame(result), result["environment"]
        title = f"{Path(result['model']).name}, {result['size']} px, {len(result['prompts'])} images"
        title += f", strength {result['strength']:g}" if result["strength"] else ""
        lines += ["", f"## {title}", ""]
        lines += [
            f"[{file.name}]({link(file, output)}): {result['steps']} steps, {result['scheduler']}, guidance "
            f"{result['guidance_scale']:g}, {machine['machine']}, paddlepaddle {machine['paddlepaddle']}, commit "
            f"`{result['commit']}`, `{result['command']}`",
            "",
        ]
        costs = {"fewer": ("macs", "times fewer MACs than plain, whole image")}
        if frame["speed_up"].notna().all():
            costs["speed_up"] = "time", "times as fast as plain, whole image, eager"
        for x, (name, label) in costs.items():
            path = output / f"{file.stem}_{name}.png"
            save_figure(plot(frame, title, x, label), path)
            lines += figure(path, f"{title}: distance from plain against {label}. Grey: the frontier.", output)
        sheet = output / f"{file.stem}_sheet.png"
        if sheet.exists():
            lines += figure(sheet, f"{title}: plain, {', '.join(SHEET)}.", output)
        rows = []
        for row in frame.to_dict("records"):
            time = NOT_MEASURED if np.isnan(row["speed_up"]) else f"{row['speed_up']:.2f}×"
            low, high = quartiles(row["images"]["psnr"])[1:]
            cells = [row["name"], row["group"], f"{row['fewer']:.2f}×", time]
            cells += [f"{row['psnr']:.1f} ({low:.1f}–{high:.1f})", f"{row['perceptual']:.4f}"]
            rows.append([f"**{cell}**" if row["on_psnr"] and cell != NOT_MEASURED else cell for cell in cells])
        lines += table(["arm", "kind", "fewer MACs", "time", "PSNR, dB", "ST-LPIPS"], rows)
        for arm in result["arms"]:
            if arm["group"] == CALIBRATION:
                lines += ["", f"{arm['name'].capitalize()}: {arm['psnr']:.1f} dB, ST-LPIPS {arm['perceptual']:.4f}."]
    text = "\n".join(lines) + "\n"
    (output / "alternatives.md").write_text(text, encoding="utf-8")
    return text


def main() -> None:
    """Draw or time what the result lacks, and write it after each arm; or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", nargs="?", choices=("measure", "report"), default="measure")
    parser.add_argument("--model", default="examples/emoji_sd", help="folder of a pipeline (default: %(default)s)")
    parser.add_argument("--size", type=int, help="px, height and width (default: the model's)")
    parser.add_argument("--count", type=int, default=8, help="images of each arm (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="of plain images (default: the model's)")
    parser.add_argument("--guidance-scale", type=float, help="(default: the model's)")
    parser.add_argument("--strength", type=float, help="image-to-image from photographs (default: from noise)")
    parser.add_argument("--only", nargs="*", default=[], metavar="ARM", help="arms to measure (default: all)")
    parser.add_argument("--time", action="store_true", help="time the arms that were drawn, on a quiet machine")
    parser.add_argument("--rounds", type=int, default=5, help="of --time (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of results (default: %(default)s)")
    options = parser.parse_args()
    if options.mode == "report":
        write_report(sorted(options.output.glob("alternatives_*.json")), options.output.parent)
        return
    if unknown := set(options.only) - {arm.name for arm in list_arms()}:
        parser.error(f"--only: {min(unknown)!r} is no arm: choose from {', '.join(arm.name for arm in list_arms())}")
    defaults = model_defaults(options.model)
    guidance = defaults.guidance_scale if options.guidance_scale is None else options.guidance_scale
    steps = round((options.steps or defaults.steps) / (options.strength or 1))
    prompts = with_seeds(prompts_of(options.model), options.count, 0)
    size = options.size or defaults.size
    evaluation = Evaluation(options.model, prompts, size, steps, guidance, "eager", 1, options.strength)
    about = {"model": options.model, "model_files": model_files(options.model), "sources": sources(), "size": size}
    about |= {"steps": steps, "guidance_scale": guidance, "strength": options.strength}
    about |= {"scheduler": type(load_model(options.model).scheduler).__name__}
    about |= {"prompts": [{"prompt": text, "seed": seed} for text, seed in prompts]}
    kind = "" if options.strength is None else "_photographs"
    file = options.output / f"alternatives_{Path(options.model).name}_{size}{kind}.json"
    result = read_json(file) if file.exists() else {}
    if differing := [key for key, value in about.items() if result.get(key, value) != value]:
        sys.exit(f"{file} has results of another {', '.join(differing)}: remove it, or choose another --output.")
    content = {key: result.get(key, default) for key, default in {"plain_macs": 0, "timing": None, "arms": []}.items()}
    command = shlex.join(["python", "benchmarks/alternatives.py", *sys.argv[1:]])
    if options.time:
        content["timing"] = {"command": command, "commit": commit(), "environment": describe_environment()}
    made = {key: result[key] for key in ("command", "commit", "environment") if options.time}  # of the images
    folder = ROOT / "build" / file.stem
    measured = (
        time_arms(evaluation, content, options.only, options.rounds)
        if options.time
        else measure(evaluation, content, options.only, folder)
    )
    for line in measured:
        write_result(file, make_result("experiments", command, **{**about, **content, **made}))
        print(line, flush=True)
    shown = {"plain": "plain", **{name: name for name in SHEET}}
    if all((folder / "images" / name).exists() for name in shown):
        result = read_json(file)
        write_sheet(options.output.parent / f"{file.stem}_sheet.png", result, folder, shown, evenly_spaced(result))


if __name__ == "__main__":
    main()
