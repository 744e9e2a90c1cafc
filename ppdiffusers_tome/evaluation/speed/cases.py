"""What is measured: cases (a model at a size) and their arms (ways to compute it), checked before anything runs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import paddle

from ...config import ToMeConfig
from ...errors import ToMeConfigError
from ...positions import count_removed
from ...published.architectures import Architecture, architecture_of
from .names import BOTH, BUILT_IN, EAGER, LIMIT, MEMORY_EFFICIENT, PLAIN, PREDICTOR, PYTORCH, TOME

SCOPES = ("unet", "block", "pipeline")
DTYPES = ("float32", "float16", "bfloat16")
TORCH = "torch"  # asks for the backend PYTORCH
ARMS = (PLAIN, MEMORY_EFFICIENT, TOME, BOTH, BUILT_IN, LIMIT, TORCH)
BACKENDS = (EAGER, PREDICTOR)


@dataclass(frozen=True)
class Case:
    """One model at one size.

    Args:
        model: a name of ARCHITECTURES, or a pipeline's folder.
        scope: "unet", "block" or "pipeline".
        size: px, of a square picture.
        batch: rows of the UNet or block; pictures of a pipeline.
        dtype: "float32", "float16" or "bfloat16".
        steps, guidance: of a pipeline.
    """

    model: str
    scope: str = "unet"
    size: int = 512
    batch: int = 2
    dtype: str = "float32"
    steps: int | None = None
    guidance: float | None = None

    @cached_property
    def architecture(self) -> Architecture:
        """Of the model; reads the folder's configs."""
        return architecture_of(self.model)

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.model} {self.scope} {self.size} px, batch {self.batch}, {self.dtype}"

    def describe(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)

    def kept(self, config: ToMeConfig | None) -> int:
        """Tokens that merging leaves at the first level that merges."""
        grid = self.architecture.first_grid(self.size)
        return grid.tokens - int(count_removed(grid, config) if config else 0)

    def check(self) -> None:
        """Raise ToMeConfigError where this cannot be measured on this machine; the message names the remedy."""
        architecture = self.architecture
        for name, least in (("batch", 1), ("size", architecture.factor), ("steps", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ToMeConfigError(f"--{name} {value} is not allowed: it must be {least} or more.")
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise ToMeConfigError(f"--guidance {self.guidance} is not allowed: it must be a finite number.")
        if self.size % architecture.factor:
            raise ToMeConfigError(
                f"--size {self.size} is not allowed: it must be a multiple of {architecture.factor} px."
            )
        if self.dtype == "float16" and paddle.get_device() == "cpu":
            raise ToMeConfigError(
                "--dtype float16 is not allowed on the CPU, where Paddle has no kernels for it: pass float32."
            )
        if self.scope == "pipeline" and self.architecture.of != self.model:
            raise ToMeConfigError("--scope pipeline needs --model FOLDER: an --architecture is a UNet alone.")


@dataclass(frozen=True)
class ArmPlan:
    """One way to compute a case: where, and merged how. `reason` says why it is not measured, where it is not."""

    arm: str  # one of ARMS but "torch", whose arms are "plain" and "tome" by the backend PyTorch
    backend: str = EAGER
    ratio: float = 0.0  # 0 where nothing merges
    max_downsample: int | None = None
    reason: str | None = None

    @property
    def config(self) -> ToMeConfig | None:
        """How tokens merge; None where they do not."""
        return tome_config(self.ratio, self.max_downsample) if self.ratio else None

    @property
    def is_memory_efficient(self) -> bool:
        """Whether attention is computed so as to save memory."""
        return self.arm in (MEMORY_EFFICIENT, BOTH)

    @property
    def attention(self) -> str:
        """ "plain", or what the device has to save memory."""
        if not self.is_memory_efficient:
            return "plain"
        return "slicing" if paddle.get_device() == "cpu" else "xformers"

    @property
    def label(self) -> str:
        """For messages."""
        deepest = f" to level {self.max_downsample}" if self.max_downsample else ""
        return f"{self.backend} {self.arm}" + (f" {self.ratio:g}{deepest}" if self.ratio else "")

    def describe(self) -> dict[str, Any]:
        """The fields that tell it from other arms, ready for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "reason"}


def tome_config(ratio: float, max_downsample: int | None = None) -> ToMeConfig:
    """Everywhere the first token of each cell is dst: tomesd's random choice is another than ours."""
    return ToMeConfig(ratio=ratio, max_downsample=max_downsample, use_rand=False)


def plan_arms(
    case: Case,
    arms: Sequence[str],
    backends: Sequence[str],
    ratios: Sequence[float],
    levels: Sequence[int | None],
    without_torch: str | None,
) -> list[ArmPlan]:
    """The arms of a case, those that are not to be measured with their reason.

    Args:
        case: what they compute.
        arms: some of ARMS.
        backends: some of BACKENDS; the arm "torch" brings its own.
        ratios, levels: values of `ratio` and `max_downsample`, each with each, for the arms that merge.
        without_torch: why PyTorch cannot be measured here; None where it can.

    Raises:
        ToMeConfigError: a ratio or level is not allowed, or merges nothing in this case.
    """
    for ratio in ratios:
        for level in levels:
            _check_merging(case, ratio, level)
    planned: list[ArmPlan] = []
    for backend in [*backends, *([PYTORCH] if TORCH in arms else [])]:
        for arm in (PLAIN, TOME) if backend == PYTORCH else [arm for arm in ARMS if arm in arms and arm != TORCH]:
            if backend == PREDICTOR and arm not in (PLAIN, TOME, LIMIT):
                continue  # a program's attention is the predictor's own, and the built-in merging cannot be exported
            merged = arm not in (PLAIN, MEMORY_EFFICIENT)
            for ratio, level in [(r, d) for r in ratios for d in levels] if merged else [(0.0, None)]:
                plan = ArmPlan(arm, backend, ratio, level)
                reason = _why_not(case, plan, without_torch)
                planned.append(ArmPlan(arm, backend, ratio, level, reason))
    return planned


def _check_merging(case: Case, ratio: float, level: int | None) -> None:
    config = tome_config(ratio, level)
    first = case.architecture.first_level
    if level is not None and case.scope == "block":
        raise ToMeConfigError("--max-downsample is not allowed with --scope block, which has one level: leave it out.")
    if level is not None and level < first:
        raise ToMeConfigError(
            f"--max-downsample {level} is not allowed: {case.model} has its shallowest attention at level {first}."
        )
    if not count_removed(case.architecture.first_grid(case.size), config):
        raise ToMeConfigError(f"--ratio {ratio:g} merges no token at {case.size} px: raise the ratio or the size.")


def _why_not(case: Case, plan: ArmPlan, without_torch: str | None) -> str | None:
    if plan.backend == PYTORCH and without_torch:
        return without_torch
    if plan.backend == PYTORCH and case.scope != "unet":
        return "PyTorch is compared on whole UNets"
    if plan.backend != EAGER and case.dtype != "float32":
        return "predictors and PyTorch are compared in float32"
    if plan.backend == PREDICTOR and case.scope == "pipeline" and plan.arm == LIMIT:
        return "export_pipeline exports merging, not its limit"
    if plan.arm == BUILT_IN and plan.ratio >= 0.75:
        return "ppdiffusers' apply_tome refuses a ratio of 0.75 and more"
    return None


def arms_from(described: Sequence[dict[str, Any]]) -> Iterator[ArmPlan]:
    """Back from `ArmPlan.describe`."""
    return (ArmPlan(**each) for each in described)
