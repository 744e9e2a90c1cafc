"""Compare a pipeline's plain and merged images: the same prompts and noise, and steps that are timed in turn."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import ppdiffusers
from PIL import Image
from ppdiffusers import DiffusionPipeline

from ..config import ToMeConfig
from ..errors import ToMeConfigError
from ..inference.manifest import Size
from ..summary import ToMeSummary
from .clock import now, order_of_round, ratio_within_rounds
from .sheets import make_sheet

PLAIN = "plain"
ROUNDS = 5  # steps of each arm that are timed
# What a pipeline must take: a text, the arguments of `Scene`, and a function that it calls after each step.
PARAMETERS = ("prompt", "height", "width", "num_inference_steps", "guidance_scale", "callback_on_step_end")
# Parameters of pipelines for which a text is not enough, or that generate no images, unless `Scene.inputs` has them.
OTHER_PARAMETERS = {"image": "needs an image", "num_frames": "generates videos"}


@dataclass(frozen=True)
class Scene:
    """What each arm generates.

    Args:
        prompts: one image each.
        size: of the images.
        steps: denoising steps.
        guidance_scale: weight of classifier-free guidance.
        seed: of the noise, the same for every image.
        inputs: further arguments of the pipeline, such as the image of a ControlNet.
    """

    prompts: Sequence[str]
    size: Size
    steps: int
    guidance_scale: float
    seed: int = 0
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def generate(self, pipe: DiffusionPipeline, prompt: str, **changes: Any) -> Image.Image:
        """One image; `changes` replace or add arguments of the pipeline."""
        paddle.seed(self.seed)
        settings = {**self.size._asdict(), "guidance_scale": self.guidance_scale}
        settings |= {"num_inference_steps": self.steps, **self.inputs, **changes}
        return pipe(prompt, **settings).images[0]


@dataclass
class Arm:
    """Images and times of one way to generate; without a config the plain one."""

    config: ToMeConfig | None
    summary: ToMeSummary
    images: list[Image.Image] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """ "plain", or its ratio."""
        return PLAIN if self.config is None else f"{self.config.ratio:g}"

    def switch_on(self, pipe: DiffusionPipeline) -> None:
        """Let the pipeline merge as this arm does."""
        if self.config is None:
            pipe.remove_tome()
        else:
            pipe.apply_tome(config=self.config)

    def figures(self, plain: "Arm") -> dict[str, Any]:
        """A row of the table; what compares with plain is None for plain itself.

        Returns:
            "arm"; "tokens" before merging, "queries" and "keys" after it, of the first block; "macs_saved", a share,
            or None if they cannot be counted; "step_seconds", the median; "speed_up" of a step, within rounds; and
            "psnr", in dB, the mean over the prompts, infinite for equal images.
        """
        first = self.summary.blocks[0]
        is_plain = self is plain
        pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(plain.images, self.images, strict=True)]
        return {
            "arm": self.name,
            "tokens": first.grid.tokens,
            "queries": first.grid.tokens if is_plain else first.kept,
            "keys": first.grid.tokens if is_plain else first.kept_keys,
            "macs_saved": None if is_plain else self.summary.saved_share,
            "step_seconds": median(self.step_seconds),
            "speed_up": ratio_within_rounds(plain.step_seconds, self.step_seconds).median,
            "psnr": None if is_plain else mean(psnr(*pair) for pair in pairs),
        }


def psnr(a: np.ndarray, b: np.ndarray) -> float:  # [H, W, 3] uint8 both
    """Peak signal-to-noise ratio in dB, higher is closer; infinite for equal images."""
    error = float(np.mean((a.astype(np.float64) - b) ** 2))
    return 10 * math.log10(255**2 / error) if error else math.inf


def check_pipeline(pipeline: type[DiffusionPipeline], inputs: Collection[str] = ()) -> None:
    """Raise unless pipelines of this class can be compared.

    Args:
        pipeline: the class.
        inputs: the names of `Scene.inputs`.

    Raises:
        ToMeConfigError: they lack one of PARAMETERS or have one of OTHER_PARAMETERS, or run on GPUs only.
    """
    parameters = inspect.signature(pipeline.__call__).parameters
    reasons = [why for name, why in OTHER_PARAMETERS.items() if name in parameters and name not in inputs]
    reasons += [f"has no {name}" for name in PARAMETERS if name not in parameters]
    if reasons:
        raise ToMeConfigError(
            f"{pipeline.__name__} {reasons[0]}, so it cannot be compared: compare generates images from text with "
            "pipelines that report their steps, such as those of Stable Diffusion, SDXL and Stable Diffusion 3, and "
            "with a ControlNet of Stable Diffusion."
        )
    if pipeline.__name__.startswith("StableDiffusion3") and not hasattr(F, "scaled_dot_product_attention_"):
        raise ToMeConfigError(
            f"{pipeline.__name__} cannot be compared on this machine: ppdiffusers {ppdiffusers.__version__} defines "
            "the attention that it calls on GPUs only. On a CPU, compare generates images with Stable Diffusion and "
            "SDXL."
        )


def compare(
    pipe: DiffusionPipeline,
    scene: Scene,
    configs: Sequence[ToMeConfig],
    rounds: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Arm]:
    """Generate the images of a scene plain and merged, and time their steps. The pipeline is plain afterwards.

    Args:
        pipe: a pipeline that merges nothing now.
        configs: one for each further arm.
        rounds: how many steps of each arm are timed; by default ROUNDS.
        report: called with a line before each part.

    Returns:
        The arms; the first one is plain.

    Raises:
        ToMeConfigError: as `check_pipeline`.
        NoMergeableLayerError: a config merges nothing in this pipeline. In both cases nothing was generated.
    """
    check_pipeline(type(pipe), scene.inputs)
    rounds = ROUNDS if rounds is None else rounds
    arms = []
    for config in (None, *configs):
        with pipe.tome(config=config or ToMeConfig(ratio=0.0)):
            arms.append(Arm(config, pipe.tome_summary(**scene.size._asdict())))
    try:
        report(f"{len(arms) * (rounds + 1)} steps for the times")
        _time_steps(pipe, scene, arms, rounds)
        for arm in arms:
            count = len(scene.prompts)
            report(f"{count} image{'s' if count > 1 else ''}, {arm.name}")
            arm.switch_on(pipe)
            arm.images = [scene.generate(pipe, prompt) for prompt in scene.prompts]
    finally:
        pipe.remove_tome()
    return arms


def _time_steps(pipe: DiffusionPipeline, scene: Scene, arms: Sequence[Arm], rounds: int) -> None:
    """Time `rounds` steps of each arm within one image, in which the arms take turns from step to step.

    So another program that slows this machine down slows all arms down alike. The first round warms up, and the image
    is thrown away.
    """
    order = [arms[n] for index in range(rounds + 1) for n in order_of_round(range(len(arms)), index)]
    start = now()

    def after_step(pipe: DiffusionPipeline, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal start
        end = now()
        if len(arms) <= step < len(order):
            order[step].step_seconds.append(end - start)
        if step + 1 < len(order):  # some schedulers take more steps than they are asked for
            order[step + 1].switch_on(pipe)
        start = now()
        return tensors

    order[0].switch_on(pipe)
    scene.generate(pipe, scene.prompts[0], num_inference_steps=len(order), callback_on_step_end=after_step)


def make_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of what `Arm.figures` returned, one row for each arm, as text."""
    lines = [f"{'':<6} {'queries':>8} {'keys':>6} {'MACs saved':>11} {'s/step':>8} {'speed-up':>9} {'PSNR, dB':>9}"]
    for row in rows:
        saved = "" if row["macs_saved"] is None else f"{row['macs_saved']:.1%}"
        distance = "" if row["psnr"] is None else f"{row['psnr']:.1f}"
        counts = f"{row['arm']:<6} {row['queries']:>8} {row['keys']:>6} {saved:>11}"
        lines.append(f"{counts} {row['step_seconds']:>8.3f} {row['speed_up']:>8.2f}× {distance:>9}")
    return "\n".join(lines)


def draw_sheet(arms: Sequence[Arm], scene: Scene) -> Image.Image:
    """A row of images for each arm, and a column for each prompt; above them the input of a ControlNet."""
    rows = [(f"{arm.name}\n{median(arm.step_seconds):.2f} s/step", arm.images) for arm in arms]
    if (condition := scene.inputs.get("image")) is not None:
        rows.insert(0, ("input", [condition] * len(scene.prompts)))
    return make_sheet(rows, scene.prompts, max(scene.size))
