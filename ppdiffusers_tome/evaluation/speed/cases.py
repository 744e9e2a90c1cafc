"""What `bench` measures: cases (a model at one size) and their arms (ways to compute it).

The same objects are planned, sent to the worker, stored in the result file and read back from it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import paddle

from ...config import ToMeConfig
from ...errors import ToMeConfigError
from ...positions import count_removed
from ...published.architectures import Architecture, architecture_of
from ..results import check_result

PLAIN, MEMORY_EFFICIENT, TOME, BOTH = "plain", "memory-efficient", "tome", "both"
BUILT_IN, LIMIT = "built-in", "limit"
EAGER, PREDICTOR, PYTORCH = "eager", "predictor", "PyTorch"
PLANNED, MEASURED, NOT_MEASURED = "planned", "measured", "not measured"
OUT_OF_MEMORY, ERROR = "out of memory", "error"

TORCH = "torch"  # in --arms: PLAIN and TOME in the backend PYTORCH
ARMS = (PLAIN, MEMORY_EFFICIENT, TOME, BOTH, BUILT_IN, LIMIT, TORCH)
BACKENDS = (EAGER, PREDICTOR)
DTYPES = ("float32", "float16", "bfloat16")
ARMS_OF = {
    EAGER: ARMS[:-1],
    PREDICTOR: (PLAIN, TOME, LIMIT),  # it has its own attention kernels, and the built-in ToMe cannot be exported
    PYTORCH: (PLAIN, TOME),
}
SCOPES = {"unet": "one UNet pass", "block": "one top-level block", "pipeline": "whole images"}
ARM_NAMES = {
    PLAIN: "plain",
    MEMORY_EFFICIENT: "memory-efficient",
    TOME: "ToMe",
    BOTH: "ToMe + memory-efficient",
    BUILT_IN: "ppdiffusers' built-in ToMe",
    LIMIT: "free-merge limit",
}


@dataclass
class Arm:
    """One way to compute a case, and what it cost; the fields are those of the result file."""

    arm: str  # one of ARMS, except TORCH
    backend: str = EAGER  # or PREDICTOR, PYTORCH
    ratio: float = 0.0  # share of tokens to merge; 0 if nothing merges
    max_downsample: int | None = None  # deepest level that merges; None: the shallowest with attention
    attention: str = "plain"  # or "slicing", "xformers"
    kept: int = 0  # tokens after merging, at the shallowest level with attention
    status: str = PLANNED  # until MEASURED, OUT_OF_MEMORY or ERROR; or NOT_MEASURED
    reason: str | None = None  # why it was not measured
    seconds: list[float] = field(default_factory=list)  # of each round
    parity: dict[str, Any] | None = None  # "against": an arm's name; "difference": relative
    peak_memory_bytes: int | None = None  # of one pass with the weights, by Paddle's counter
    macs: int | None = None  # multiply-accumulates of one pass of the UNet or block, for the whole batch
    shares: dict[str, float] | None = None  # of the blocks' time: "matching", "merge", "unmerge"

    @property
    def name(self) -> str:
        """In words, such as "ToMe 0.5, eager"; no two arms of a case have the same."""
        merging = "tomesd" if self.backend == PYTORCH and self.arm == TOME else ARM_NAMES.get(self.arm, self.arm)
        ratio = "" if self.arm in (PLAIN, MEMORY_EFFICIENT) else f" {self.ratio:g}"
        level = "" if self.max_downsample is None else f", max_downsample {self.max_downsample}"
        return f"{merging}{ratio}{level}, {self.backend}"

    @property
    def config(self) -> ToMeConfig:
        """How tokens merge; dst is the first token of every cell, because tomesd draws other random ones."""
        return ToMeConfig(ratio=self.ratio, max_downsample=self.max_downsample, use_rand=False)

    def fail(self, status: str, reason: str) -> None:
        """Record that the arm cannot be measured; its seconds are dropped."""
        self.status, self.reason, self.seconds = status, reason, []


@dataclass
class Case:
    """One model at one size, with the arms that take turns on it; the fields are those of the result file."""

    model: str  # a name in ARCHITECTURES, or a pipeline's folder
    scope: str = "unet"  # one of SCOPES
    size: int = 512  # px, of a square image
    batch: int = 2  # rows of the UNet or block; images of a pipeline
    dtype: str = "float32"  # one of DTYPES
    steps: int | None = None  # of a pipeline
    guidance_scale: float | None = None  # of a pipeline
    latent: list[int] = field(default_factory=list)  # height and width of the latents
    tokens: int = 0  # at the shallowest level with attention
    memory_limit_gb: float | None = None  # 10⁹ bytes for weights and one pass on the CPU; None: the machine's
    arms: list[Arm] = field(default_factory=list)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Case":
        """A case from `dataclasses.asdict`, after JSON."""
        return cls(**{**fields, "arms": [Arm(**arm) for arm in fields["arms"]]})

    @cached_property
    def architecture(self) -> Architecture:
        """Of the model; reads the configs in the folder."""
        return architecture_of(self.model)

    @property
    def name(self) -> str:
        """In words, such as "sd15, one UNet pass, 512 px, batch 2"."""
        limit = "" if self.memory_limit_gb is None else f", limit {self.memory_limit_gb:g} GB"
        return f"{self.model}, {SCOPES.get(self.scope, self.scope)}, {self.size} px, batch {self.batch}{limit}"

    def with_status(self, *statuses: str) -> list[Arm]:
        """The arms that have one of these statuses."""
        return [arm for arm in self.arms if arm.status in statuses]


def make_case(model: str, **fields: Any) -> Case:
    """A case without arms, from the fields of `Case` that say what to measure.

    Raises:
        ToMeConfigError: a value is not allowed, or cannot be measured on this machine.
    """
    case = Case(model, **fields)
    architecture, limit, guidance = case.architecture, case.memory_limit_gb, case.guidance_scale
    for name, least in (("batch", 1), ("size", architecture.factor), ("steps", 1)):
        value = getattr(case, name)
        if value is not None and value < least:
            raise ToMeConfigError(f"--{name} {value} is not allowed: it must be {least} or more.")
    if case.size % architecture.factor:
        raise ToMeConfigError(f"--size {case.size} is not allowed: it must be a multiple of {architecture.factor} px.")
    if guidance is not None and not math.isfinite(guidance):
        raise ToMeConfigError(f"--guidance-scale {guidance} is not allowed: it must be a finite number.")
    if limit is not None and not 0 < limit <= 10**6:
        raise ToMeConfigError(f"--memory-limit {limit:g} is not allowed: it must be above 0 and at most 1,000,000 GB.")
    if case.dtype == "float16" and paddle.get_device() == "cpu":
        raise ToMeConfigError("--dtype float16 is not allowed on the CPU, where Paddle lacks kernels: pass float32.")
    if case.scope == "pipeline" and architecture.of != model:
        raise ToMeConfigError("--scope pipeline needs --model FOLDER: an --architecture is a UNet only.")
    case.latent, case.tokens = list(architecture.latent(case.size)), architecture.first_grid(case.size).tokens
    return case


def make_arms(
    case: Case,
    arms: Sequence[str],
    backends: Sequence[str],
    ratios: Sequence[float],
    levels: Sequence[int | None],
    torch_problem: str | None,
) -> list[Arm]:
    """The arms of a case; those that cannot be measured are NOT_MEASURED and have a reason.

    Args:
        case, arms, backends: what they compute, some of ARMS, some of BACKENDS; TORCH adds its own backend.
        ratios, levels: values of `ratio` and `max_downsample`; the merging arms take all combinations.
        torch_problem: why PyTorch cannot be used; None if it can.

    Raises:
        ToMeConfigError: a ratio or level is not allowed, or merges nothing in this case.
    """
    merges = {(ratio, level): _count_kept(case, ratio, level) for ratio in ratios for level in levels}
    efficient = "slicing" if paddle.get_device() == "cpu" else "xformers"
    made: list[Arm] = []
    for backend in [*backends, *([PYTORCH] if TORCH in arms else [])]:
        for name in ARMS_OF[backend]:
            if name not in arms and backend != PYTORCH:
                continue
            attention = efficient if name in (MEMORY_EFFICIENT, BOTH) else "plain"
            is_merging = name not in (PLAIN, MEMORY_EFFICIENT)
            for (ratio, level), kept in merges.items() if is_merging else [((0.0, None), case.tokens)]:
                arm = Arm(name, backend, ratio, level, attention, kept)
                arm.reason = _why_not_measured(case, arm, torch_problem)
                arm.status = NOT_MEASURED if arm.reason else PLANNED
                made.append(arm)
    return made


def read_cases(result: dict[str, Any], source: Path | str) -> list[Case]:
    """The cases of a speed result; messages name its source.

    Raises:
        ToMeConfigError: it is of another kind or format, a field is missing, or an arm missed a round.
    """
    check_result(result, "speed", source)
    try:
        cases = [Case.from_json(fields) for fields in result["cases"]]
        _ = [result[name] for name in ("command", "commit", "environment", "rounds", "threads")]
    except (KeyError, TypeError) as error:
        raise ToMeConfigError(f"{source} is not a complete speed result ({error!r}): measure it again.") from error
    for case in cases:
        rounds = max((len(arm.seconds) for arm in case.arms), default=0)
        for arm in case.arms:
            expected = max(rounds, 1) if arm.status == MEASURED else 0
            if len(arm.seconds) != expected or any(seconds <= 0 for seconds in arm.seconds):
                raise ToMeConfigError(
                    f"{source}: {case.name}: {arm.name} is {arm.status!r} with seconds={arm.seconds!r}, where "
                    f"{expected} positive values are expected: measure it again."
                )
    return cases


def _count_kept(case: Case, ratio: float, level: int | None) -> int:
    first = case.architecture.first_level
    if level is not None and case.scope == "block":
        raise ToMeConfigError("--max-downsample is not allowed with --scope block, which has one level: leave it out.")
    if level is not None and level < first:
        raise ToMeConfigError(
            f"--max-downsample {level} is not allowed: the shallowest attention of {case.model} is at level {first}."
        )
    removed = int(count_removed(case.architecture.first_grid(case.size), Arm(TOME, EAGER, ratio, level).config))
    if not removed:
        raise ToMeConfigError(f"--ratio {ratio:g} merges no token at {case.size} px: raise the ratio or the size.")
    return case.tokens - removed


def _why_not_measured(case: Case, arm: Arm, torch_problem: str | None) -> str | None:
    if arm.backend == PYTORCH and torch_problem:
        return torch_problem
    if arm.backend == PYTORCH and case.scope != "unet":
        return "PyTorch is compared with --scope unet only"
    if arm.backend != EAGER and case.dtype != "float32":
        return "predictors and PyTorch are compared in float32 only"
    if arm.backend == PREDICTOR and case.scope == "pipeline" and arm.arm == LIMIT:
        return "export_pipeline cannot export the free-merge limit"
    if arm.arm == BUILT_IN and arm.ratio >= 0.75:
        return "the apply_tome of ppdiffusers does not allow a ratio of 0.75 or more"
    return None
