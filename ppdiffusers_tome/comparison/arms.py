"""Compare a pipeline's plain and merged images: the same prompts and noise, and steps that are timed in turn."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import mean, median
from typing import Any, TypeAlias

import numpy as np
import paddle
from PIL import Image
from ppdiffusers import DiffusionPipeline

from ..config import ToMeConfig
from ..errors import ToMeConfigError
from ..run.manifest import ExportedMerging, Size
from ..run.models import ExportedUNet
from ..summary import ToMeSummary
from ..wording import merging_in_words
from .clock import NO_DIFFERENCE, gain, now, order_of_round
from .fonts import Font
from .option_defaults import ROUNDS
from .peak_memory import peak_bytes, restart_peak
from .sheets import make_sheet
from .similarity import psnr, ssim

PLAIN = "plain"
Merging: TypeAlias = ToMeConfig | ExportedMerging
MIN_SIDE = 16  # px, of an image: SSIM needs windows of 11 px


@dataclass(frozen=True)
class Scene:
    """What each arm generates.

    Args:
        prompts: `batch` images each.
        size: of the images.
        steps: denoising steps.
        guidance_scale: weight of classifier-free guidance.
        seed: of the noise, the same for every prompt.
        batch: images per call of the pipeline.
        inputs: further arguments of the pipeline: the image of a ControlNet or of image-to-image, and its strength.
    """

    prompts: Sequence[str]
    size: Size
    steps: int
    guidance_scale: float
    seed: int = 0
    batch: int = 1
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def generate(self, pipe: DiffusionPipeline, prompt: str, **changes: Any) -> list[Image.Image]:
        """The images of a prompt; `changes` replace or add arguments of the pipeline."""
        paddle.seed(self.seed)
        settings = {"guidance_scale": self.guidance_scale, "num_inference_steps": self.steps}
        parameters = inspect.signature(type(pipe).__call__).parameters
        if "height" in parameters:  # not those that start from an image, which has the size
            settings |= self.size._asdict()
        inputs = {**self.inputs}
        if "image" in inputs:
            inputs["image"] = [inputs["image"]] * self.batch
        return pipe([prompt] * self.batch, **{**settings, **inputs, **changes}).images


@dataclass(frozen=True)
class Figures:
    """What was measured of one arm. What compares with plain is None for plain itself."""

    arm: str  # its name
    config: Merging | None  # None for plain
    rounds: list[float]  # seconds of each timed step
    step_seconds: float  # their median
    # Plain's step divided by this one's in each round: the median, None also if the rounds show no difference.
    gain: float | None
    gain_quartiles: tuple[float, float] | None
    psnr: float | None  # dB, the mean over the images, infinite for equal images
    ssim: float | None  # the mean over the images
    peak_bytes: int | None  # of memory in a timed step, with the weights; None where it is not known
    # Of the first block; None for an exported model, which has no blocks to count in.
    tokens: int | None  # before merging
    queries: int | None  # after merging
    keys: int | None
    macs_saved: float | None  # a share; None also if they cannot be counted

    def content(self) -> dict[str, Any]:
        """All of it, ready for JSON; a config is its settings."""
        return {**asdict(replace(self, config=None)), "config": self.config and self.config.settings()}

    @property
    def summary(self) -> str:
        """Name and distance from plain in a line."""
        assert self.psnr is not None
        return f"{self.arm}, {_gain(self)} as fast as plain, PSNR {self.psnr:.1f} dB, SSIM {self.ssim:.3f}"


@dataclass
class ComparedArm:
    """Images and times of one way to generate; without a config the plain one."""

    config: Merging | None
    summary: ToMeSummary
    images: list[Image.Image] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """ "plain", or its method, ratio and other settings."""
        return PLAIN if self.config is None else merging_in_words(self.config)

    def switch_on(self, pipe: DiffusionPipeline) -> None:
        """Let the pipeline merge as this arm does."""
        if _is_exported(pipe):
            pipe.unet.ratio = self.config.effective_ratio if self.config else 0.0
        elif self.config is None:
            pipe.remove_tome()
        else:
            pipe.apply_tome(config=self.config)

    def figures(self, plain: "ComparedArm") -> Figures:
        """The figures of this arm, compared with the plain one."""
        is_plain, gained = self is plain, gain(plain.step_seconds, self.step_seconds)
        pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(plain.images, self.images, strict=True)]
        return Figures(
            arm=self.name,
            config=self.config,
            rounds=self.step_seconds,
            step_seconds=median(self.step_seconds),
            gain=gained.factor if gained.is_difference and not is_plain else None,
            gain_quartiles=None if is_plain else (gained.low, gained.high),
            psnr=None if is_plain else mean(psnr(*pair) for pair in pairs),
            ssim=None if is_plain else mean(ssim(*pair) for pair in pairs),
            peak_bytes=max(self.peaks, default=None),
            **self._tokens(),
            macs_saved=None if is_plain else self.summary.saved_share,
        )

    def _tokens(self) -> dict[str, int | None]:
        """The tokens of the first block, before and after merging."""
        if not self.summary.blocks:
            return dict.fromkeys(("tokens", "queries", "keys"))
        block = self.summary.blocks[0]
        return {"tokens": block.grid.tokens, "queries": block.kept_queries, "keys": block.kept_keys}


def compare(
    pipe: DiffusionPipeline,
    scene: Scene,
    configs: Sequence[Merging],
    rounds: int = ROUNDS,
    report: Callable[[str], None] = lambda line: None,
    after_step: Callable[[int, int], None] = lambda done, total: None,
) -> list[ComparedArm]:
    """Generate the images of a scene plain and merged, and time their steps. The pipeline is plain afterwards.

    Args:
        pipe: a pipeline that merges nothing now and that `pipelines.check_pipeline` accepts, or one from
            `load_pipeline` with a ratio of 0.
        configs: one for each further arm; of an exported pipeline those that were exported.
        rounds: how many steps of each arm are timed.
        report: called with a line before each part.
        after_step: called with the number of finished steps of a part, and of all its steps.

    Returns:
        The arms; the first one is plain.

    Raises:
        NoMergeableLayerError: a config merges nothing in this pipeline, and nothing was generated.
        ToMeConfigError: the scheduler has no schedule of two steps, so none can be timed.
    """
    arms = [ComparedArm(config, summary_at(pipe, config, scene.size)) for config in (None, *configs)]
    try:
        report(f"{len(arms) * (rounds + 1)} steps for the times")
        _time_steps(pipe, scene, arms, rounds, after_step)
        for arm in arms:
            count = len(scene.prompts) * scene.batch
            report(f"{count} image{'s' if count > 1 else ''}, {arm.name}")
            arm.switch_on(pipe)
            arm.images = _images(pipe, scene, after_step)
    finally:
        arms[0].switch_on(pipe)
    return arms


def _images(pipe: DiffusionPipeline, scene: Scene, after_step: Callable[[int, int], None]) -> list[Image.Image]:
    """The images of all prompts."""
    finished = 0

    def end_step(pipe: DiffusionPipeline, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal finished
        finished += 1
        after_step(finished, max(finished, len(scene.prompts) * pipe.num_timesteps))
        return tensors

    return [image for prompt in scene.prompts for image in scene.generate(pipe, prompt, callback_on_step_end=end_step)]


def summary_at(pipe: DiffusionPipeline, config: Merging | None, size: Size) -> ToMeSummary:
    """What merges with a config in images of a size; without one, in which blocks something could."""
    if _is_exported(pipe):
        return pipe.tome_summary()
    with pipe.tome(config=config or ToMeConfig(ratio=0.0)):
        return pipe.tome_summary(**size._asdict())


def _is_exported(pipe: DiffusionPipeline) -> bool:
    return isinstance(vars(pipe).get("unet"), ExportedUNet)


def most_steps(scheduler: Any, wanted: int) -> int:
    """The largest number of steps up to `wanted` for which a scheduler has a schedule; 0 if there is none.

    Schedulers of latent consistency models have at most `original_inference_steps` of their config, usually 50.
    """
    trial = type(scheduler).from_config(scheduler.config)

    def has_schedule(steps: int) -> bool:
        try:
            trial.set_timesteps(steps)
        except (ValueError, IndexError, ZeroDivisionError):
            return False
        return True

    return next(filter(has_schedule, range(wanted, 0, -1)), 0)


def _time_steps(
    pipe: DiffusionPipeline,
    scene: Scene,
    arms: Sequence[ComparedArm],
    rounds: int,
    after_step: Callable[[int, int], None],
) -> None:
    """Time `rounds` steps of each arm within one image, in which the arms take turns from step to step.

    So another program that slows this machine down slows all arms down alike. The first round warms up, and the image
    is thrown away. If the scheduler has no schedule of so many steps, further images take the other turns. The first
    step of an image does not count, because it includes the text encoder; so a further image repeats the last turn.

    Raises:
        ToMeConfigError: the scheduler has a single step, or the pipeline reports none.
    """
    turns = [arms[n] for index in range(rounds + 1) for n in order_of_round(range(len(arms)), index)]
    limit = most_steps(pipe.scheduler, len(turns))
    knows_memory = not _is_exported(pipe)  # a runtime's memory is not in Paddle's counters
    first = taken = 0  # the turn of the image's first step, and the number of turns that are taken
    start = now()

    def end_step(pipe: DiffusionPipeline, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal start, taken
        end, turn = now(), first + step
        if step > 0 and len(arms) <= turn < len(turns):
            turns[turn].step_seconds.append(end - start)
            if knows_memory and (peak := peak_bytes()) is not None:
                turns[turn].peaks.append(peak)
        taken = turn + 1
        if taken < len(turns):  # some schedulers take more steps than they are asked for
            turns[taken].switch_on(pipe)
        after_step(min(taken, len(turns)), len(turns))
        restart_peak()
        start = now()
        return tensors

    changes: dict[str, Any] = {"callback_on_step_end": end_step}
    if "strength" in scene.inputs:  # of which only a share of the steps would run
        changes["strength"] = 1.0
    while taken < len(turns):
        before, first = taken, max(taken - 1, 0)
        turns[first].switch_on(pipe)
        if limit > 1:
            steps = min(limit, len(turns) - first)
            scene.generate(pipe, scene.prompts[0], num_inference_steps=steps, **changes)
        if taken == before:
            name = type(pipe.scheduler).__name__
            raise ToMeConfigError(f"the steps of this pipeline cannot be timed: its {name} runs a single one.")


def make_table(rows: Sequence[Figures]) -> str:
    """The figures of the arms as text, a row for each arm. Columns without any figure are left out."""
    columns = {
        "": [row.arm for row in rows],
        "s/step": [f"{row.step_seconds:.4g}" for row in rows],
        "gain": [_gain(row) for row in rows],
        "PSNR, dB": ["" if row.psnr is None else f"{row.psnr:.1f}" for row in rows],
        "SSIM": ["" if row.ssim is None else f"{row.ssim:.3f}" for row in rows],
        "peak MB": ["" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}" for row in rows],
        "MACs saved": ["" if row.macs_saved is None else f"{row.macs_saved:.1%}" for row in rows],
    }
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    widths = [max(map(len, [title, *cells])) for title, cells in filled.items()]
    lines = zip(*([title, *cells] for title, cells in filled.items()), strict=True)
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )


def _gain(row: Figures) -> str:
    if row.gain_quartiles is None:
        return ""
    return NO_DIFFERENCE if row.gain is None else f"{row.gain:.2f}×"


def draw_sheet(arms: Sequence[ComparedArm], scene: Scene, font: Font) -> Image.Image:
    """A row for each arm, and a column with the first image of each prompt; above them the image that they start from.

    That is the input of a ControlNet or of image-to-image.

    Args:
        font: of the prompts, from `fonts.font_for`.
    """
    rows = [(f"{arm.name}\n{median(arm.step_seconds):.4g} s/step", arm.images[:: scene.batch]) for arm in arms]
    if (image := scene.inputs.get("image")) is not None:
        rows.insert(0, ("input", [image] * len(scene.prompts)))
    return make_sheet(rows, scene.prompts, max(scene.size), font)
