"""Compare a pipeline's plain and merged images: the same prompts and noise, and steps that are timed in turn."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import paddle
from PIL import Image
from ppdiffusers import DiffusionPipeline

from ..errors import ToMeConfigError
from ..families.schedules import as_numbers, most_steps, timesteps_of
from ..methods import ToMeConfig
from ..methods.steps import PLAIN_STEPS, PlainSteps
from ..run.models import ExportedUNet
from ..run.sizes import Size
from ..summary import ToMeSummary
from ..wording import merging_in_words
from .clock import gain, now, order_of_round
from .fonts import Font
from .option_defaults import ROUNDS
from .peak_memory import peak_bytes, restart_peak
from .sheets import make_sheet
from .similarity import psnr, ssim

PLAIN = "plain"
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
    """What was measured of an arm. What compares with plain is None for plain itself."""

    arm: str  # its name
    config: ToMeConfig | None  # None for plain
    rounds: list[float]  # seconds of each timed step; of steps that merge, except for plain
    plain_share: float  # of the steps of an image: those that keep all tokens; 0 for plain
    step_seconds: float  # of a step of an image: the median over the rounds, with the share of plain steps
    gain: float | None  # plain's step divided by this arm's; None also if no difference is claimed
    gain_interval: tuple[float, float] | None  # of `clock.Gain`
    gain_in_words: str | None  # the factor, or why no difference is claimed
    psnr: float | None  # dB, the median over the images, infinite for equal images
    ssim: float | None  # the median over the images
    worst_psnr: float | None  # of the image that is furthest from plain by it; None too if there is a single image
    worst_ssim: float | None
    peak_bytes: int | None  # of memory in a timed step, with the weights; None where it is not known
    # Of the first block; None for an exported model, which has no blocks to count in.
    tokens: int | None  # before merging
    queries: int | None  # after merging
    keys: int | None
    macs_saved: float | None  # a share of those of an image; None also if they cannot be counted

    def content(self) -> dict[str, Any]:
        """All of it, ready for JSON; a config is its settings."""
        return {**asdict(replace(self, config=None)), "config": self.config and self.config.settings()}

    @property
    def summary(self) -> str:
        """Name and distance from plain in a line."""
        assert self.psnr is not None
        gained = f"{self.arm}, {self.gain_in_words} as fast as plain"
        worst = "" if self.worst_psnr is None else f" (worst {self.worst_psnr:.1f})"
        return f"{gained}, PSNR {self.psnr:.1f} dB{worst}, SSIM {self.ssim:.3f}"


@dataclass
class ComparedArm:
    """Images and times of one way to generate; without a config the plain images."""

    config: ToMeConfig | None
    summary: ToMeSummary
    plain: PlainSteps | None = None  # the steps in which it keeps all tokens; None: it is plain, or always merges
    images: list[Image.Image] = field(default_factory=list)
    timesteps: list[float] = field(default_factory=list)  # of all passes of the images
    step_seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """ "plain", or its method, ratio and further settings."""
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
        """The figures of this arm, compared with the plain arm."""
        is_plain, share = self is plain, self.plain_share
        peaks = self.peaks + (plain.peaks if share else [])
        seconds = self.seconds_in_image(plain)
        gained, saved = gain(plain.step_seconds, seconds), self.summary.saved_share
        pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(plain.images, self.images, strict=True)]
        decibels, similarities = [psnr(*pair) for pair in pairs], [ssim(*pair) for pair in pairs]
        has_worst = not is_plain and len(pairs) > 1
        return Figures(
            arm=self.name,
            config=self.config,
            rounds=self.step_seconds,
            plain_share=share,
            step_seconds=median(seconds),
            gain=gained.factor if gained.is_difference and not is_plain else None,
            gain_interval=None if is_plain else (gained.low, gained.high),
            gain_in_words=None if is_plain else str(gained),
            psnr=None if is_plain else median(decibels),
            ssim=None if is_plain else median(similarities),
            worst_psnr=min(decibels) if has_worst else None,
            worst_ssim=min(similarities) if has_worst else None,
            peak_bytes=max(peaks, default=None),
            **self._tokens(),
            macs_saved=None if is_plain or saved is None else (1 - share) * saved,
        )

    def seconds_in_image(self, plain: "ComparedArm") -> list[float]:
        """Seconds of a step in each round: the mean over the steps of an image, some of which are plain."""
        share, pairs = self.plain_share, zip(plain.step_seconds, self.step_seconds, strict=True)
        return [share * of_plain + (1 - share) * merged for of_plain, merged in pairs]

    @property
    def plain_share(self) -> float:
        """The share of the steps of its images in which it keeps all tokens."""
        return self.plain.count(self.timesteps) / len(self.timesteps) if self.plain and self.timesteps else 0.0

    def _tokens(self) -> dict[str, int | None]:
        """The tokens of the first block, before and after merging."""
        if not self.summary.blocks:
            return dict.fromkeys(("tokens", "queries", "keys"))
        block = self.summary.blocks[0]
        return {"tokens": block.grid.tokens, "queries": block.kept_queries, "keys": block.kept_keys}


def compare(
    pipe: DiffusionPipeline,
    scene: Scene,
    configs: Sequence[ToMeConfig],
    rounds: int = ROUNDS,
    report: Callable[[str], None] = lambda line: None,
    after_step: Callable[[int, int], None] = lambda done, total: None,
) -> list[ComparedArm]:
    """Generate the images of a scene plain and merged, and time their steps. The pipeline is plain afterwards.

    Args:
        pipe: a pipeline that merges nothing now and that `pipelines.check_pipeline` accepts, or a pipeline from
            `load_pipeline` with a ratio of 0.
        configs: of the further arms; of an exported pipeline those that were exported.
        rounds: how many steps of each arm are timed.
        report: called with a line before each part.
        after_step: called with the number of finished steps of a part, and of all its steps.

    Returns:
        The arms; the first is plain.

    Raises:
        NoMergeableLayerError: a config merges nothing in this pipeline, and nothing was generated.
        ToMeConfigError: the scheduler has no schedule of two steps, so none can be timed.
    """
    arms = [_arm(pipe, config, scene.size) for config in (None, *configs)]
    try:
        report(f"{len(arms) * (rounds + 1)} steps for the times, and those in which an arm keeps all tokens")
        _time_steps(pipe, scene, arms, rounds, after_step)
        for arm in arms:
            count = len(scene.prompts) * scene.batch
            report(f"{count} image{'s' if count > 1 else ''}, {arm.name}")
            arm.switch_on(pipe)
            arm.images, arm.timesteps = _images(pipe, scene, after_step)
    finally:
        arms[0].switch_on(pipe)
    return arms


def _arm(pipe: DiffusionPipeline, config: ToMeConfig | None, size: Size) -> ComparedArm:
    """The arm of a config; without one the plain arm."""
    summary = summary_at(pipe, config, size)
    if _is_exported(pipe):
        return ComparedArm(config, summary, PLAIN_STEPS if config and config.has_plain_steps else None)
    return ComparedArm(config, summary, summary.plain if config else None)


def _images(
    pipe: DiffusionPipeline, scene: Scene, after_step: Callable[[int, int], None]
) -> tuple[list[Image.Image], list[float]]:
    """The images of all prompts, and the timesteps of their passes."""
    timesteps: list[float] = []

    def end_step(pipe: DiffusionPipeline, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        timesteps.extend(as_numbers(timestep))
        after_step(len(timesteps), max(len(timesteps), len(scene.prompts) * pipe.num_timesteps))
        return tensors

    of_prompts = [scene.generate(pipe, prompt, callback_on_step_end=end_step) for prompt in scene.prompts]
    return [image for images in of_prompts for image in images], timesteps


def summary_at(pipe: DiffusionPipeline, config: ToMeConfig | None, size: Size) -> ToMeSummary:
    """What merges with a config in images of a size; without one, in which blocks something could."""
    if _is_exported(pipe):
        return pipe.tome_summary()
    with pipe.tome(config=config or ToMeConfig(ratio=0.0)):
        return pipe.tome_summary(**size._asdict())


def _is_exported(pipe: DiffusionPipeline) -> bool:
    return isinstance(vars(pipe).get("unet"), ExportedUNet)


def _time_steps(
    pipe: DiffusionPipeline,
    scene: Scene,
    arms: Sequence[ComparedArm],
    rounds: int,
    after_step: Callable[[int, int], None],
) -> None:
    """Time `rounds` steps of each arm within one image, in which the arms take turns from step to step.

    So another program that slows this machine down slows all arms down alike. The first round warms up, and the image
    is thrown away. If the scheduler has no schedule of so many steps, further images take the remaining turns. Two
    kinds of steps are no turn: those in which an arm keeps all tokens, because what merging takes is timed, and, after
    the first round, the first step of an image, which includes the text encoder.

    Raises:
        ToMeConfigError: the scheduler has a single step, or the pipeline reports none.
    """
    turns = [arms[n] for index in range(rounds + 1) for n in order_of_round(range(len(arms)), index)]
    limit = most_steps(pipe.scheduler, 2 * len(turns))
    knows_memory = not _is_exported(pipe)  # a runtime's memory is not in Paddle's counters
    taken = 0  # number of turns
    start = now()

    def is_plain(timestep: Any) -> bool:
        return any(arm.plain is not None and arm.plain.count(as_numbers(timestep)) for arm in arms)

    def count_steps() -> int:
        """The steps of the next image: so many that the turns that remain fit in, as far as its schedule allows."""
        needed = len(turns) - taken + (taken > 0)
        for steps in range(needed, limit):
            timesteps = timesteps_of(pipe.scheduler, steps) or ()
            if sum(not is_plain(timestep) for timestep in timesteps) >= needed:
                return steps
        return limit

    def end_step(pipe: DiffusionPipeline, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal start, taken
        end, is_warm_up = now(), taken < len(arms)
        if taken < len(turns) and not is_plain(timestep) and (step > 0 or is_warm_up):
            if not is_warm_up:
                turns[taken].step_seconds.append(end - start)
                if knows_memory and (peak := peak_bytes()) is not None:
                    turns[taken].peaks.append(peak)
            taken += 1
            if taken < len(turns):
                turns[taken].switch_on(pipe)
        after_step(taken, len(turns))
        restart_peak()
        start = now()
        return tensors

    changes: dict[str, Any] = {"callback_on_step_end": end_step}
    if "strength" in scene.inputs:  # of which only a share of the steps would run
        changes["strength"] = 1.0
    while taken < len(turns):
        before = taken
        turns[taken].switch_on(pipe)
        if limit > 1:
            scene.generate(pipe, scene.prompts[0], num_inference_steps=count_steps(), **changes)
        if taken == before:
            name = type(pipe.scheduler).__name__
            reason = "runs a single one" if limit < 2 else f"has none of {limit} in which all arms merge"
            raise ToMeConfigError(f"the steps of this pipeline cannot be timed: its {name} {reason}.")


def make_table(rows: Sequence[Figures]) -> str:
    """The figures of the arms as text, a row for each arm. Columns without any figure are left out."""
    columns = {
        "": [row.arm for row in rows],
        "plain steps": ["" if not row.plain_share else f"{row.plain_share:.0%}" for row in rows],
        "s/step": [f"{row.step_seconds:.4g}" for row in rows],
        "gain": [row.gain_in_words or "" for row in rows],
        "PSNR, dB": ["" if row.psnr is None else f"{row.psnr:.1f}" for row in rows],
        "worst PSNR": ["" if row.worst_psnr is None else f"{row.worst_psnr:.1f}" for row in rows],
        "SSIM": ["" if row.ssim is None else f"{row.ssim:.3f}" for row in rows],
        "worst SSIM": ["" if row.worst_ssim is None else f"{row.worst_ssim:.3f}" for row in rows],
        "peak MB": ["" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}" for row in rows],
        "MACs saved": ["" if row.macs_saved is None else f"{row.macs_saved:.1%}" for row in rows],
    }
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    widths = [max(map(len, [title, *cells])) for title, cells in filled.items()]
    lines = zip(*([title, *cells] for title, cells in filled.items()), strict=True)
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
    )


def draw_sheet(arms: Sequence[ComparedArm], scene: Scene, font: Font) -> Image.Image:
    """A row for each arm, and a column with the first image of each prompt; above them the image that they start from.

    That is the input of a ControlNet or of image-to-image.

    Args:
        font: of the prompts, from `fonts.font_for`.
    """
    rows = [
        (f"{arm.name}\n{median(arm.seconds_in_image(arms[0])):.4g} s/step", arm.images[:: scene.batch]) for arm in arms
    ]
    if (image := scene.inputs.get("image")) is not None:
        rows.insert(0, ("input", [image] * len(scene.prompts)))
    return make_sheet(rows, scene.prompts, max(scene.size), font)
