"""Try ways to merge that the package does not offer, and measure how far their images are from plain ones.

    python benchmarks/experiments.py                      # a repeated run continues; hours on one core
    python benchmarks/experiments.py --only "laplacian 0.5" --output build/experiments.json

Each variant draws 16 prompts from noise and 8 photographs by image to image, from the same noise as plain images.
Programs in a predictor draw, after `tracing.save` has checked that they equal the UNet in eager mode. Variants that keep
plans from step to step have no program: eager mode draws those. Prototypes replace functions of the package while a
variant is traced or draws.
"""

import argparse
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.nn.functional as F
from ppdiffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline

from ppdiffusers_tome import ToMeConfig, hooks, macs, matching, patch, positions
from ppdiffusers_tome.evaluation.environment import sources
from ppdiffusers_tome.evaluation.quality.drawing import EagerEngine, load_model
from ppdiffusers_tome.evaluation.quality.metrics import psnr
from ppdiffusers_tome.evaluation.quality.networks import st_lpips
from ppdiffusers_tome.evaluation.quality.settings import PLAIN, Evaluation, read_texts, with_seeds
from ppdiffusers_tome.evaluation.results import make_result, read_json, write_result
from ppdiffusers_tome.inference import programs, runtime, tracing
from ppdiffusers_tome.levels import grid_at
from ppdiffusers_tome.merging import merge, unmerge
from ppdiffusers_tome.positions import Grid, choose_dst
from ppdiffusers_tome.serving.engine import Engine

MODEL = str(Path(__file__).parents[1] / "examples" / "emoji_sd")
RESULT = Path(__file__).parent / "results" / "experiments.json"
SIZE, STEPS, GUIDANCE, STRENGTH = 128, 10, 2.0, 0.4  # px; image to image plans STEPS / STRENGTH steps and runs STEPS
LATENT, TEXT = Grid(32, 32), 77  # of the bundled model at 128 px; tokens of a prompt

Match = Callable[..., matching.MergePlan]  # with the arguments of `match_tokens`
Build = Callable[[Callable[[paddle.Tensor], None], hooks.CallHook, paddle.Tensor], None]  # original, its hook, metric
Prototype = Callable[[], AbstractContextManager]  # replaces functions of the package while it is open


# --- Prototypes ------------------------------------------------------------------------------------------------------


def building(make_build: Callable[[], Build]) -> Prototype:
    """A prototype of `CallHook.build_plan`; each pipeline call, or trace, gets a build of its own."""
    original = hooks.CallHook.build_plan

    def prototype() -> AbstractContextManager:
        build = make_build()
        replaced = lambda hook, metric: build(partial(original, hook), hook, metric)  # noqa: E731
        return mock.patch.object(hooks.CallHook, "build_plan", replaced)

    return prototype


def matching_by(match: Match) -> Prototype:
    """A prototype of `match_tokens`."""
    return lambda: mock.patch.object(hooks, "match_tokens", match)


def kept(passes: int) -> Build:
    """Each block computes its plan in every `passes`-th pass and keeps it in between."""
    count: Counter[int] = Counter()
    plans: dict[int, Any] = {}

    def build(original: Callable, hook: hooks.CallHook, metric: paddle.Tensor) -> None:
        if count[hook._index] % passes == 0:
            original(metric)
            plans[hook._index] = hook._current_call().plan
        count[hook._index] += 1
        hook._current_call().plan = plans[hook._index]

    return build


def shared(first: Sequence[int]) -> Build:
    """Blocks use the plan of the last block before them whose index is in `first`."""
    plans: list[Any] = []

    def build(original: Callable, hook: hooks.CallHook, metric: paddle.Tensor) -> None:
        if hook._index in first:
            original(metric)
            plans[:] = [hook._current_call().plan]
        hook._current_call().plan = plans[0]

    return build


def laplacian_match(metric: paddle.Tensor, grid: Grid, r: int, sx: int, sy: int, key: Any, window: Any) -> Any:
    """`match_tokens` with the token of each 2×2 cell as dst that differs least from the mean of its four neighbours.

    Each image has its own dst. Tokens change places within their cells so that dst come first, where `match_tokens`
    takes them, and the plan's rows are translated back. Source: L-GTM of BiGain, arXiv:2603.12240.
    """
    h, w, channels = grid.h, grid.w, metric.shape[2]
    with paddle.no_grad():
        tokens = metric.detach().transpose([0, 2, 1]).reshape([-1, channels, h, w])
        padded = F.pad(tokens, [1, 1, 1, 1], mode="replicate")
        beside = padded[:, :, :-2, 1:-1] + padded[:, :, 2:, 1:-1] + padded[:, :, 1:-1, :-2] + padded[:, :, 1:-1, 2:]
        contrast = ((tokens - beside / 4) ** 2).sum(axis=1).reshape([-1, h * w])
        cells = (choose_dst(grid)[:, None] + np.array([0, 1, w, w + 1])).reshape(-1)  # positions, cell by cell
        slot = np.argsort(cells)  # of each position in that order
        cell = paddle.to_tensor(slot // 4 * 2).cast("float64")
        by_cell = paddle.argsort(
            cell + (contrast / (contrast.max(axis=1, keepdim=True) + 1e-30)).cast("float64"), axis=1
        )
        position = paddle.gather(by_cell, paddle.to_tensor(slot), axis=1)  # [B, N]: the token that moves to each place
        batch = (paddle.cumsum(paddle.ones_like(position[:, :1]), axis=0) - 1) * h * w
        rows, places = ((x + batch).reshape([-1]) for x in (position, paddle.argsort(position, axis=1)))
        moved = paddle.gather(metric.detach().reshape([-1, channels]), rows).reshape([-1, h * w, channels])
        plan = matching.match_tokens(moved, grid, r, window=window)
        return replace(
            plan,
            dst_rows=paddle.gather(rows, plan.dst_rows),
            stay_rows=None if plan.stay_rows is None else paddle.gather(rows, plan.stay_rows),
            merged_rows=paddle.gather(rows, plan.merged_rows),
            source_rows=paddle.gather(plan.source_rows, places),
        )


def projected_match(metric: paddle.Tensor, *arguments: Any) -> matching.MergePlan:
    """`match_tokens` with a random projection of the metric to 32 channels."""
    matrix = np.random.RandomState(0).standard_normal([metric.shape[2], 32]).astype("float32")
    return matching.match_tokens(paddle.matmul(metric.detach(), paddle.to_tensor(matrix)), *arguments)


def shifted(offset: Callable[[int, int], tuple[int, int]]) -> Prototype:
    """Windows that begin offset(block index, window) tokens further up and left; those at the edges are smaller."""

    def constants(grid: Grid, sx: int, sy: int, key: tuple[int, int], window: int) -> positions.Positions:
        y, x = offset(key[1], window)
        rows, columns = (np.arange(grid.h) + y) // window, (np.arange(grid.w) + x) // window
        number = np.unique((rows[:, None] * grid.w + columns).reshape(-1), return_inverse=True)[1]
        with mock.patch.object(positions, "window_of", lambda *_: number):
            return positions.constant_positions.__wrapped__(grid, sx, sy, key, window)  # not kept

    return lambda: mock.patch.object(matching, "constant_positions", constants)


def half_in_second(index: int, window: int) -> tuple[int, int]:
    """Half a window in every second block of the bundled model's first level: 0 and 5 begin at 0, 4 at the half."""
    return (window // 2,) * 2 if index == 4 else (0, 0)


def random_offset(index: int, window: int) -> tuple[int, int]:
    """A multiple of the cell's two tokens along each axis, another in each block."""
    y, x = np.random.RandomState(index).randint(window // 2, size=2) * 2
    return int(y), int(x)


def fall_back(metric: paddle.Tensor, places: Any, batch: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """`_most_similar` in windows, but in the whole grid for the half of the src whose similarity is lower."""
    best, similarity = _most_similar(metric, places, batch)
    best_of_all, similarity_of_all = _most_similar(metric, places._replace(windows=None), batch)
    middle = places.s // 2
    is_low = similarity < paddle.sort(similarity, axis=1)[:, middle : middle + 1]
    return paddle.where(is_low, best_of_all, best), paddle.where(is_low, similarity_of_all, similarity)


_most_similar = matching._most_similar


class QueryHook(hooks.BlockHook):
    """Pre-hook of `to_q`: merge its input by the plan of the queries."""

    def __call__(self, projection: Any, inputs: tuple) -> tuple:
        return merge(inputs[0], self._call_hook._current_call().query_plan), *inputs[1:]


class UnmergeQueriesHook(hooks.BlockHook):
    """Post-hook of a self-attention: unmerge its output by the plan of the queries."""

    def __call__(self, attention: Any, inputs: tuple, output: paddle.Tensor) -> paddle.Tensor:
        return unmerge(output, self._call_hook._current_call().query_plan)


def merging_queries(ratio: float) -> Prototype:
    """With merge_attn="kv": merge queries too, at a ratio of their own, from the same similarities."""

    def build(original: Callable, hook: hooks.CallHook, metric: paddle.Tensor) -> None:
        call, config = hook._current_call(), hook.config
        hook.config = replace(config, ratio=ratio)
        original(metric)
        call.query_plan, hook.config = call.plan, config
        original(metric)

    def install(attention: Any, call_hook: hooks.CallHook) -> None:
        _install_attention(attention, call_hook)
        attention.to_q.register_forward_pre_hook(QueryHook(call_hook))
        attention.register_forward_post_hook(UnmergeQueriesHook(call_hook))

    @contextmanager
    def prototype() -> Iterator[None]:
        with building(lambda: build)(), mock.patch.object(patch, "install_attention", install):
            yield

    return prototype


_install_attention = patch.install_attention


# --- What is tried ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One way to merge."""

    name: str
    experiment: int  # its number in issue 14's list; 1 holds the baselines
    settings: dict[str, Any] = field(hash=False)  # of ToMeConfig
    prototype: Prototype = nullcontext
    is_eager: bool = False  # drawn in eager mode
    steps: range = range(STEPS)  # that merge; the others are plain
    query_ratio: float = 0.0  # of `merging_queries`

    @property
    def config(self) -> ToMeConfig:
        return ToMeConfig(**{"proportional": True, "window": None, **self.settings})

    def macs_saved(self) -> float:
        """Share of the multiply-accumulates of a whole image's UNet passes that merging saves, by the settings alone.

        Shared, kept and projected plans save a little more than this, fall-backs less.
        """
        unet, saved = load_model(MODEL).unet, 0
        for block in patch.chosen_blocks(unet, self.config):
            saved += macs.saved_macs(block, self.config, LATENT, TEXT)
            if self.query_ratio:
                n = grid_at(LATENT, block.level).tokens
                kept_keys = n - int(n * self.config.ratio)
                attention = [macs._layer_macs(block, "attn", q, kept_keys) for q in (n, n - int(n * self.query_ratio))]
                saved += attention[0] - attention[1]
        return saved / macs.count_macs(unet, LATENT, TEXT) * len(self.steps) / STEPS


def list_variants() -> list[Variant]:
    """All variants; baselines are those of experiment 1."""
    half, most, kv = {"ratio": 0.5}, {"ratio": 0.75}, {"merge_attn": "kv"}
    w8, w16 = {"window": 8}, {"window": 16}
    shifts = {"half": shifted(half_in_second), "random": shifted(random_offset)}
    fall = lambda: mock.patch.object(matching, "_most_similar", fall_back)  # noqa: E731

    def baselines(ratio: dict[str, float]) -> list[Variant]:
        r = f"{ratio['ratio']:g}"
        return [
            Variant(f"tomesd {r}", 1, ratio | {"proportional": False}),
            Variant(f"proportional {r}", 1, ratio),
            Variant(f"window 8 {r}", 1, ratio | w8),
            Variant(f"window 16 {r}", 1, ratio | w16),
            Variant(f"kv {r}", 1, ratio | kv),
            Variant(f"kv window 16 {r}", 1, ratio | kv | w16),
            Variant(f"laplacian {r}", 2, ratio, matching_by(laplacian_match)),
        ]

    return [
        *baselines(half),
        Variant("fixed dst 0.5", 2, half | {"use_rand": False}),
        Variant("first block's plan 0.5", 4, half, building(lambda: shared([0]))),
        Variant("first plan on each side 0.5", 4, half, building(lambda: shared([0, 4]))),
        Variant("projection 0.5", 7, half, matching_by(projected_match)),
        Variant("with mlp 0.5", 8, half | {"merge_mlp": True}),
        Variant("with mlp, not proportional 0.5", 8, half | {"merge_mlp": True, "proportional": False}),
        *baselines(most),
        Variant("queries 0.25, kv 0.75", 5, most | kv, merging_queries(0.25), query_ratio=0.25),
        Variant("queries 0.5, kv 0.75", 5, most | kv, merging_queries(0.5), query_ratio=0.5),
        Variant("window 8, half shift 0.75", 6, most | w8, shifts["half"]),
        Variant("window 16, half shift 0.75", 6, most | w16, shifts["half"]),
        Variant("window 8, random shift 0.75", 6, most | w8, shifts["random"]),
        Variant("window 8, fall-back 0.75", 6, most | w8, fall),
        Variant("window 16, fall-back 0.75", 6, most | w16, fall),
        Variant("every step 0.375", 9, {"ratio": 0.375} | w16),
        Variant("first half of the steps 0.75", 9, most | w16, steps=range(STEPS // 2)),
        Variant("second half of the steps 0.75", 9, most | w16, steps=range(STEPS // 2, STEPS)),
        Variant("plan kept for 2 steps 0.5", 3, half, building(lambda: kept(2)), is_eager=True),
        Variant("plan kept for 5 steps 0.5", 3, half, building(lambda: kept(5)), is_eager=True),
    ]


# --- Drawing and measuring -------------------------------------------------------------------------------------------


class ProgramUNet:
    """The UNet of a StableDiffusionPipeline, computed by predictors: one for each step in turn."""

    dtype = paddle.float32

    def __init__(self, config: Any, predictors: Sequence[runtime.Predictor]) -> None:
        self.config, self._predictors, self._calls = config, predictors, 0
        self.inputs: dict[str, paddle.Tensor] = {}  # of the last call

    def __call__(self, sample: Any, timestep: Any, encoder_hidden_states: Any, **_: Any) -> tuple[paddle.Tensor]:
        predictor = self._predictors[self._calls % len(self._predictors)]
        self._calls += 1
        self.inputs = {"sample": sample, "encoder_hidden_states": encoder_hidden_states}
        self.inputs["timestep"] = paddle.to_tensor(timestep).reshape([1]).cast("float32")
        return tuple(predictor(**self.inputs))


def save_program(config: ToMeConfig, folder: Path, prototype: Prototype = nullcontext) -> tracing.Saved:
    """Trace the bundled UNet, merged by a config and a prototype, check it against eager mode, and save it."""
    traceable = programs.denoiser(load_model(MODEL).unet, None, is_size_known=True)
    fixed = {"height": SIZE, "width": SIZE, "latent_height": LATENT.h, "latent_width": LATENT.w}
    with prototype():
        if config.ratio:
            patch.attach(traceable.layer.unet, config, None)
        return tracing.save(traceable, folder, fixed, fixed | {"tokens": TEXT}, config.describe(), threads=1)


def load_predictor(saved: tracing.Saved) -> runtime.Predictor:
    onednn = tracing.is_onednn_safe(saved.onednn_parity)
    return runtime.Predictor(saved.program, saved.params, runtime.Runtime(threads=1, onednn=onednn))


def program_engine(predictors: Sequence[runtime.Predictor]) -> tuple[Engine, ProgramUNet]:
    pipe = load_model(MODEL)
    unet = ProgramUNet(pipe.unet.config, predictors)
    kinds = StableDiffusionPipeline, StableDiffusionImg2ImgPipeline
    pipes = (kind(**{**pipe.components, "unet": unet}, requires_safety_checker=False) for kind in kinds)
    return Engine(*pipes), unet


def list_jobs(prompts: int, photographs: int) -> dict[str, list[Any]]:
    """The jobs of each set of images, the same for all variants."""
    texts = read_texts(Path(MODEL) / "prompts.txt")
    jobs = {}
    for name, count, strength in (("prompts", prompts, None), ("photographs", photographs, STRENGTH)):
        steps = STEPS if strength is None else round(STEPS / strength)
        evaluation = Evaluation(MODEL, with_seeds(texts, count, 0), SIZE, steps, GUIDANCE, "eager", 1, "", strength)
        jobs[name] = [prompt.job for prompt in evaluation.jobs(PLAIN)]
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


def run(names: Sequence[str], output: Path, jobs: dict[str, list[Any]], command: str) -> None:
    """Measure the variants that the file lacks, and write it after each."""
    content: dict[str, Any] = {
        "sources": sources(),
        "prompts": len(jobs["prompts"]),
        "photographs": len(jobs["photographs"]),
    }
    content |= {
        "model": "examples/emoji_sd",
        "size": SIZE,
        "steps": STEPS,
        "guidance_scale": GUIDANCE,
        "strength": STRENGTH,
    }
    before = read_json(output) if output.exists() else {}
    if before and any(before.get(key) != value for key, value in content.items()):
        sys.exit(f"{output} holds results of other sources or images: remove it, or name another file with --output.")
    measured = {entry["name"]: entry for entry in before.get("variants", [])}
    variants = [v for v in list_variants() if v.name not in measured and (not names or v.name in names)]
    with tempfile.TemporaryDirectory() as folder:
        plain_predictor = load_predictor(save_program(ToMeConfig(ratio=0), Path(folder) / "plain"))
        plain = {False: draw(program_engine([plain_predictor])[0], jobs)}
        for variant in variants:
            print(variant.name, flush=True)
            if variant.is_eager:
                if True not in plain:
                    plain[True] = draw(EagerEngine(MODEL, ToMeConfig(ratio=0)), jobs)
                images = draw(EagerEngine(MODEL, variant.config), jobs, variant.prototype)
            else:
                merged = load_predictor(save_program(variant.config, Path(folder) / variant.name, variant.prototype))
                schedule = [merged if step in variant.steps else plain_predictor for step in range(STEPS)]
                images = draw(program_engine(schedule)[0], jobs)
            entry = {"name": variant.name, "experiment": variant.experiment, "settings": variant.settings}
            entry |= {"eager": variant.is_eager, "macs_saved": round(variant.macs_saved(), 4)}
            measured[variant.name] = entry | compare(images, plain[variant.is_eager])
            write_result(output, make_result("experiments", command, **content, variants=list(measured.values())))
            print(format_table([measured[variant.name]]), flush=True)


def format_table(entries: Sequence[dict[str, Any]]) -> str:
    rows = []
    for e in entries:
        values = [f"{e[s]['psnr']:.1f} | {e[s]['perceptual']:.4f}" for s in ("prompts", "photographs")]
        rows.append(f"| {e['experiment']} | {e['name']} | {e['macs_saved']:.1%} | {' | '.join(values)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="variants to measure (default: all)")
    parser.add_argument("--prompts", type=int, default=16, help="images from noise (default: %(default)s)")
    parser.add_argument("--photographs", type=int, default=8, help="images from photographs (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="(default: %(default)s)")
    options = parser.parse_args()
    jobs = list_jobs(options.prompts, options.photographs)
    run(options.only, options.output, jobs, shlex.join(["python", "benchmarks/experiments.py", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
