"""Try ways to merge that the package does not offer, and measure how far their images are from plain ones.

    python benchmarks/experiments.py                      # all: hours on one core; a repeated run continues
    python benchmarks/experiments.py --only "laplacian 0.5" --output build/experiments.json

Each variant draws 16 prompts from noise and 8 photographs by image to image, from the same noise as plain images.
Programs in a predictor draw, after `tracing.save` has checked that they equal the UNet in eager mode. Variants that
keep plans from step to step have no program: eager mode draws those. Further parts measure what share of a pass its
plans take, and what Paddle's bfloat16 for oneDNN does to merged programs.
"""

import argparse
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
from merge_prototypes import (
    Prototype,
    building,
    fall_back,
    half_in_second,
    kept,
    laplacian_match,
    matching_by,
    projected_match,
    random_offset,
    ratios_by_height,
    shared,
    shifted,
    splitting,
)
from paddle.framework import core
from ppdiffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

from ppdiffusers_tome import ToMeConfig, macs, matching, patch
from ppdiffusers_tome.evaluation.clock import ratio_within_rounds, time_in_turns
from ppdiffusers_tome.evaluation.environment import sources
from ppdiffusers_tome.evaluation.quality.image_generation import EagerEngine, load_model
from ppdiffusers_tome.evaluation.quality.image_sets import PLAIN_IMAGES, Evaluation, read_texts, with_seeds
from ppdiffusers_tome.evaluation.quality.metrics import psnr
from ppdiffusers_tome.evaluation.quality.networks import st_lpips
from ppdiffusers_tome.evaluation.results import make_result, read_json, write_result
from ppdiffusers_tome.generation.engine import Engine
from ppdiffusers_tome.inference import ProgramFile, Size, paddle_runtime, programs, runtime, tracing
from ppdiffusers_tome.levels import grid_at
from ppdiffusers_tome.positions import Grid

MODEL = str(Path(__file__).parents[1] / "examples" / "emoji_sd")
RESULT = Path(__file__).parent / "results" / "experiments.json"
SIZE, STEPS, GUIDANCE, STRENGTH = 128, 10, 2.0, 0.4  # px; image to image plans STEPS / STRENGTH steps and runs STEPS
LATENT, TEXT = Grid(32, 32), 77  # of the bundled model at 128 px; tokens of a prompt
NOTHING_MEASURED: dict[str, Any] = {"variants": [], "bfloat16": None, "plans": None}
PRODUCTS = {"conv2d", "fc", "fused_matmul", "matmul", "matmul_v2"}  # the operations that take the time


Program = tuple[Path, ProgramFile]  # with the folder of its files
Choose = Callable[[int, float], paddle_runtime.Predictor]  # by the number of a call and its timestep


@dataclass(frozen=True)
class Variant:
    """One way to merge."""

    name: str
    experiment: int  # its number in issue 14's list; 1 holds the baselines
    settings: dict[str, Any] = field(hash=False)  # of ToMeConfig
    prototype: Prototype = nullcontext
    is_eager: bool = False  # drawn in eager mode
    steps: range = range(STEPS)  # that merge; the others are plain
    level_ratios: dict[int, float] = field(default_factory=dict, hash=False)  # by level; the others have the config's

    @property
    def config(self) -> ToMeConfig:
        return ToMeConfig(**{"proportional": True, "window": None, "merge_attn": True, **self.settings})

    @property
    def ratios_by_level(self) -> Prototype:
        """What gives each level its ratio."""
        if not self.level_ratios:
            return nullcontext
        return ratios_by_height({grid_at(LATENT, level).h: ratio for level, ratio in self.level_ratios.items()})

    def macs_saved(self) -> float:
        """Share of the multiply-accumulates of a whole image's UNet passes that merging saves, by the settings alone.

        Shared, kept and projected plans save a little more than this, fall-backs less.
        """
        unet, saved = load_model(MODEL).unet, 0.0
        for block in patch.chosen_blocks(unet, self.config):
            ratio = self.level_ratios.get(block.level, self.config.ratio)
            with self.prototype():
                saved += macs.saved_macs(block, replace(self.config, ratio=ratio), LATENT, TEXT)
        return saved / macs.count_macs(unet, LATENT, TEXT) * len(self.steps) / STEPS


def list_variants() -> list[Variant]:
    """All variants; those of experiment 1 are the baselines."""
    half, most, kv = {"ratio": 0.5}, {"ratio": 0.75}, {"merge_attn": "kv"}
    asymmetric = {"merge_attn": "asymmetric"}
    w8, w16 = {"window": 8}, {"window": 16}
    half_shift, random_shift = shifted(half_in_second), shifted(random_offset)
    fall = lambda: mock.patch.object(matching, "_most_similar", fall_back)  # noqa: E731
    return [
        Variant("tomesd 0.5", 1, half | {"proportional": False}),
        Variant("proportional 0.5", 1, half),
        Variant("window 8 0.5", 1, half | w8),
        Variant("window 16 0.5", 1, half | w16),
        Variant("laplacian 0.5", 2, half, matching_by(laplacian_match)),
        Variant("fixed dst 0.5", 2, half | {"use_rand": False}),
        Variant("first block's plan 0.5", 4, half, building(lambda: shared([0]))),
        Variant("first plan on each side 0.5", 4, half, building(lambda: shared([0, 4]))),
        Variant("projection 0.5", 7, half, matching_by(projected_match)),
        Variant("with mlp 0.5", 8, half | {"merge_mlp": True}),
        Variant("with mlp, not proportional 0.5", 8, half | {"merge_mlp": True, "proportional": False}),
        Variant("proportional 0.75", 1, most),
        Variant("window 8 0.75", 1, most | w8),
        Variant("window 16 0.75", 1, most | w16),
        Variant("window 8, half shift 0.75", 6, most | w8, half_shift),
        Variant("window 16, half shift 0.75", 6, most | w16, half_shift),
        Variant("window 8, random shift 0.75", 6, most | w8, random_shift),
        Variant("window 8, fall-back 0.75", 6, most | w8, fall),
        Variant("window 16, fall-back 0.75", 6, most | w16, fall),
        Variant("kv 0.75", 1, most | kv),
        Variant("queries 0.25, kv 0.75", 5, asymmetric, splitting(0.25, 0.75)),
        Variant("queries 0.5, kv 0.75", 5, asymmetric, splitting(0.5, 0.75)),
        Variant("every step 0.375", 9, {"ratio": 0.375} | w16),
        Variant("first half of the steps 0.75", 9, most | w16, steps=range(STEPS // 2)),
        Variant("second half of the steps 0.75", 9, most | w16, steps=range(STEPS // 2, STEPS)),
        Variant("plan kept for 2 steps 0.5", 3, half, building(lambda: kept(2)), is_eager=True),
        Variant("plan kept for 5 steps 0.5", 3, half, building(lambda: kept(5)), is_eager=True),
        Variant("laplacian 0.75", 2, most, matching_by(laplacian_match)),
        Variant("kv 0.5", 1, half | kv),
        Variant("kv window 16 0.75", 1, most | kv | w16),
        Variant("tomesd 0.75", 1, most | {"proportional": False}),
        Variant("kv window 16 0.5", 1, half | kv | w16),
        *level_ratios(),
    ]


def level_ratios() -> Iterator[Variant]:
    """The default method at level 1 alone, and with level 2 at the same or another ratio."""
    for ratio in (0.5, 0.525, 0.55):
        yield Variant(f"level 1 {ratio:g}", 11, {"window": 16, "ratio": ratio})
    for first, second in ((0.5, 0.125), (0.5, 0.25), (0.5, 0.5), (0.45, 0.45)):
        settings = {"window": 16, "max_downsample": 2, "ratio": first}
        yield Variant(f"level 1 {first:g}, level 2 {second:g}", 11, settings, level_ratios={1: first, 2: second})


class ProgramUNet:
    """The UNet of a StableDiffusionPipeline, computed by predictors: each by the number and timestep of its call."""

    dtype = paddle.float32

    def __init__(self, config: Any, choose: Choose) -> None:
        self.config, self._choose, self._calls = config, choose, 0
        self.inputs: dict[str, paddle.Tensor] = {}  # of the last call

    def __call__(self, sample: Any, timestep: Any, encoder_hidden_states: Any, **_: Any) -> tuple[paddle.Tensor]:
        predictor = self._choose(self._calls, float(timestep))
        self._calls += 1
        self.inputs = {"sample": sample, "encoder_hidden_states": encoder_hidden_states}
        self.inputs["timestep"] = paddle.to_tensor(timestep).reshape([1]).cast("float32")
        return tuple(predictor(**self.inputs))


def save_program(config: ToMeConfig, folder: Path, prototype: Prototype = nullcontext) -> Program:
    """Trace the bundled UNet, merged by a config and a prototype, check it against eager mode, and save it."""
    traceable = programs.denoiser(load_model(MODEL).unet, None)
    dims = {"height": SIZE, "width": SIZE, "latent_height": LATENT.h, "latent_width": LATENT.w, "tokens": TEXT}
    planned = ProgramFile("unet", size=Size(SIZE, SIZE), ratio=config.ratio)
    with prototype():
        if config.ratio:
            patch.attach(traceable.layer.unet, config, None)
        return folder, tracing.save(traceable, planned, folder, "unet", dims, threads=1)


def load_predictor(saved: Program) -> paddle_runtime.Predictor:
    return paddle_runtime.PaddleRuntime(threads=1).load(*saved)


def program_engine(choose: Choose) -> tuple[Engine, ProgramUNet]:
    pipe = load_model(MODEL)
    unet = ProgramUNet(pipe.unet.config, choose)
    kinds = StableDiffusionPipeline, StableDiffusionImg2ImgPipeline
    pipes = (kind(**{**pipe.components, "unet": unet}, requires_safety_checker=False) for kind in kinds)
    return Engine(*pipes), unet


def list_jobs(prompts: int, photographs: int) -> dict[str, list[Any]]:
    """The jobs of each set of images, the same for all variants."""
    texts = read_texts(Path(MODEL) / "prompts.txt")
    jobs = {}
    for name, count, strength in (("prompts", prompts, None), ("photographs", photographs, STRENGTH)):
        steps = STEPS if strength is None else round(STEPS / strength)
        evaluation = Evaluation(MODEL, with_seeds(texts, count, 0), SIZE, steps, GUIDANCE, "eager", 1, strength)
        jobs[name] = [prompt.job for prompt in evaluation.jobs(PLAIN_IMAGES)]
    return jobs


def draw(engine: Engine, jobs: dict[str, list[Any]], prototype: Prototype = nullcontext) -> dict[str, np.ndarray]:
    """uint8 [N, SIZE, SIZE, 3] for each set of jobs; one image in a call, which is as fast on a CPU as several."""
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in jobs}
    for name, members in jobs.items():
        for job in members:
            with prototype():
                drawn[name].append(np.asarray(engine.generate([job])[0]))
    return {name: np.stack(images) for name, images in drawn.items()}


def compare(images: dict[str, np.ndarray], plain: dict[str, np.ndarray]) -> dict[str, Any]:
    """Medians and all values of PSNR (dB) and ST-LPIPS ("perceptual") for each set."""
    measured = {}
    for name in images:
        values = {
            "psnr": [round(psnr(a, b), 3) for a, b in zip(images[name], plain[name], strict=True)],
            "perceptual": np.round(st_lpips(images[name], plain[name]).astype(float), 6).tolist(),
        }
        measured[name] = {measure: float(np.median(v)) for measure, v in values.items()} | {"images": values}
    return measured


def measure_variants(
    names: Sequence[str], jobs: dict[str, list[Any]], measured: list[dict[str, Any]]
) -> Iterator[Any]:
    """Measure the named variants, or all, that `measured` lacks; yields after each, which is then in it."""
    done = {entry["name"] for entry in measured}
    with tempfile.TemporaryDirectory() as folder:
        plain_predictor = load_predictor(save_program(ToMeConfig(ratio=0), Path(folder) / "plain"))
        plain = {False: draw(program_engine(lambda call, timestep: plain_predictor)[0], jobs)}
        for variant in list_variants():
            if variant.name in done or (names and variant.name not in names):
                continue
            if variant.is_eager:
                if True not in plain:
                    plain[True] = draw(EagerEngine(MODEL, ToMeConfig(ratio=0)), jobs)
                images = draw(EagerEngine(MODEL, variant.config), jobs, variant.prototype)
            else:
                with variant.ratios_by_level():
                    saved = save_program(variant.config, Path(folder) / variant.name, variant.prototype)
                merged = load_predictor(saved)

                def choose(call: int, timestep: float, variant: Variant = variant, merged: Any = merged) -> Any:
                    return merged if call % STEPS in variant.steps else plain_predictor

                images = draw(program_engine(choose)[0], jobs)
            entry = {"name": variant.name, "experiment": variant.experiment, "settings": variant.settings}
            entry |= {"eager": variant.is_eager, "macs_saved": round(variant.macs_saved(), 4)}
            measured.append(entry | compare(images, plain[variant.is_eager]))
            yield format_row(measured[-1])


def format_row(entry: dict[str, Any]) -> str:
    """A row of a table: PSNR and ST-LPIPS of the images from prompts, then of those from photographs."""
    values = [f"{entry[name]['psnr']:.1f} | {entry[name]['perceptual']:.4f}" for name in ("prompts", "photographs")]
    return f"| {entry['experiment']} | {entry['name']} | {entry['macs_saved']:.1%} | {' | '.join(values)} |"


def time_plans(rounds: int) -> list[dict[str, Any]]:
    """Of a merged eager pass of the UNet at ratio 0.5, the share that its plans take: what keeping them could save.

    Medians and quartiles of 1 - time with kept plans / time, in turns, and the plans' share of the pass's MACs.
    """
    rows = []
    for side, window in ((side, window) for side in (32, 64) for window in (None, 16, 8)):
        unet, latent = deepcopy(load_model(MODEL).unet), Grid(side, side)
        inputs = paddle.randn([2, 4, side, side]), 500, paddle.randn([2, TEXT, unet.config.cross_attention_dim])
        config = ToMeConfig(window=window, proportional=True)
        blocks = patch.chosen_blocks(unet, config)
        saved = sum(macs.saved_macs(block, config, latent, TEXT) for block in blocks)
        pass_macs = macs.count_macs(unet, latent, TEXT) - saved
        plan_macs = sum(macs.matching_macs(block, config, latent) for block in blocks)
        patch.attach(unet, config, None)
        keep = kept(10**9)

        def with_kept_plans(unet: Any = unet, inputs: Any = inputs, keep: Any = keep) -> Any:
            with building(lambda: keep)():
                return unet(*inputs)

        arms = {"all": lambda unet=unet, inputs=inputs: unet(*inputs), "kept": with_kept_plans}
        with paddle.no_grad():
            seconds = time_in_turns(arms, rounds, warm_up=1)
        median, low, high = (round(1 - x, 4) for x in ratio_within_rounds(seconds["kept"], seconds["all"]))
        row = {"tokens": f"{side}×{side}", "window": window, "share_of_macs": round(plan_macs / pass_macs, 4)}
        rows.append(row | {"share_of_time": median, "quartiles": [high, low]})
    return rows


def try_bfloat16(rounds: int) -> dict[str, Any]:
    """What `enable_mkldnn_bfloat16` makes of programs; on a CPU that has bfloat16 also their error and speed.

    Paddle ignores the setting on other CPUs. The passes that it adds can run on any: they show which operations become
    bfloat16, and from which outputs that are not float32 a `dequantize` reads, for which there is no kernel.
    """
    has_bfloat16 = bool({"avx512_bf16", "amx_bf16"} & set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split()))
    configs = {
        "plain": ToMeConfig(ratio=0),
        "window 16": ToMeConfig(window=16, proportional=True),
        "kv grid": ToMeConfig(ratio=0.75, merge_attn="kv", match="grid", proportional=True),
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config in configs.items():
            saved = save_program(config, Path(folder) / name)
            fp32 = onednn_predictor(saved, set_optim_cache_dir=folder, enable_save_optim_model=True)
            program = (Path(folder) / "_optimized.pdmodel").read_bytes()
            by_default = set(inspect_bfloat16(program, set())["bfloat16"])
            for operations in (set(), PRODUCTS, by_default - {"cast"}):
                row = {"program": name, "set_bfloat16_op": sorted(operations), **inspect_bfloat16(program, operations)}
                if has_bfloat16:
                    row |= run_bfloat16(saved, fp32, operations, rounds)
                rows.append(row)
    return {"cpu_has_bfloat16": has_bfloat16, "programs": rows}


def inspect_bfloat16(program: bytes, operations: set[str]) -> dict[str, Any]:
    """The operations of an optimized program that become bfloat16, and those whose `dequantize` has no kernel."""
    graph = core.Graph(core.ProgramDesc(program))
    for name in ("cpu_bfloat16_placement_pass", "cpu_bfloat16_pass", "cpu_quantize_squash_pass"):
        graph_pass = core.get_pass(name)
        if "placement" in name:
            graph_pass.set("bfloat16_enabled_op_types", operations)  # empty: all that Paddle supports
        graph_pass.apply(graph)
    marked, without_kernel = Counter[str](), Counter[str]()
    for node in (node for node in graph.nodes() if node.is_op()):
        op = node.op()
        if op.has_attr("mkldnn_data_type") and op.attr("mkldnn_data_type") == "bfloat16":
            marked[op.type()] += 1
        if op.type() == "dequantize" and (dtype := node.outputs[0].var().dtype()) != paddle.float32:
            without_kernel[f"{node.inputs[0].inputs[0].op().type()} to {str(dtype).rpartition('.')[2]}"] += 1
    return {"bfloat16": dict(sorted(marked.items())), "without_kernel": dict(without_kernel)}


def run_bfloat16(saved: Program, fp32: Any, operations: set[str], rounds: int) -> dict[str, Any]:
    """Relative difference to float32 on inputs of an image's last step, and how many times as fast; or the error."""
    engine, unet = program_engine(lambda call, timestep: fp32)
    engine.generate(list_jobs(2, 2)["prompts"][:1])
    try:
        options = {"set_bfloat16_op": operations} if operations else {}
        bfloat16 = onednn_predictor(saved, enable_mkldnn_bfloat16=None, **options)
        outputs = [[predictor(**unet.inputs)[0].numpy()] for predictor in (bfloat16, fp32)]
    except Exception as error:  # Paddle's, of any type
        return {"error": runtime.error_summary(error)}
    arms = {"fp32": lambda: fp32(**unet.inputs), "bfloat16": lambda: bfloat16(**unet.inputs)}
    seconds = time_in_turns(arms, rounds, warm_up=2)
    times_faster = ratio_within_rounds(seconds["fp32"], seconds["bfloat16"]).median
    return {"relative_difference": tracing.relative_difference(*outputs), "times_faster": round(times_faster, 3)}


def onednn_predictor(saved: Program, **options: Any) -> paddle_runtime.Predictor:
    """A predictor with methods of Paddle's `Config` called that the package does not call; None: without argument."""
    original = paddle_runtime._for_cpu

    def configure(config: Any, *arguments: Any) -> None:
        original(config, *arguments)
        for name, value in options.items():
            getattr(config, name)(*([] if value is None else [value]))

    with mock.patch.object(paddle_runtime, "_for_cpu", configure):
        return paddle_runtime.PaddleRuntime(threads=1, onednn=True).load(*saved)


def earlier_result(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The result that a run continues, {} if there is none; ends the script if it is about other images or sources."""
    result = read_json(file) if file.exists() else {}
    if differing := [key for key, value in about.items() if result.get(key, value) != value]:
        sys.exit(f"{file} has results of another {', '.join(differing)}: remove it, or choose another --output.")
    return result


def main() -> None:
    """Measure what the file lacks, and write it after each variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    only = "variants to measure, bfloat16, plans (default: all)"
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help=only)
    parser.add_argument("--prompts", type=int, default=16, help="images from noise (default: %(default)s)")
    parser.add_argument("--photographs", type=int, default=8, help="images from photographs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of what is timed (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="(default: %(default)s)")
    options = parser.parse_args()
    about = {"sources": sources(), "prompts": options.prompts, "photographs": options.photographs}
    about |= {"model": "examples/emoji_sd", "size": SIZE, "steps": STEPS, "guidance_scale": GUIDANCE}
    about |= {"strength": STRENGTH, "scheduler": type(load_model(MODEL).scheduler).__name__}
    result = earlier_result(options.output, about)
    command = shlex.join(["python", "benchmarks/experiments.py", *sys.argv[1:]])
    content: dict[str, Any] = {key: result.get(key, default) for key, default in NOTHING_MEASURED.items()}

    def write() -> None:
        write_result(options.output, make_result("experiments", command, **about, **content))

    jobs = list_jobs(options.prompts, options.photographs)
    for row in measure_variants(options.only, jobs, content["variants"]):
        write()
        print(row, flush=True)
    for part, measure in {"bfloat16": try_bfloat16, "plans": time_plans}.items():
        if not content[part] and (not options.only or part in options.only):
            content[part] = measure(options.rounds)
    write()


if __name__ == "__main__":
    main()
