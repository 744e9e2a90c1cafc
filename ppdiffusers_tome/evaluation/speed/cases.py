"""What `bench` measures: cases (a model at one size) and their arms (ways to compute it).

The same objects are planned, sent to the worker, stored in the result file and read back from it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import paddle

from ...config import SIMILARITY, TOMESD_SETTINGS, ToMeConfig
from ...errors import ToMeConfigError
from ...inference import RUNTIMES
from ...positions import count_removed
from ..results import check_result
from .architectures import Architecture, architecture_of

PLAIN, MEMORY_EFFICIENT, TOME, BOTH = "plain", "memory-efficient", "tome", "both"
BUILT_IN, LIMIT = "built-in", "limit"
EAGER, PREDICTOR, ONNX_RUNTIME, OPENVINO, PYTORCH = "eager", "predictor", "onnxruntime", "openvino", "PyTorch"
OPENVINO_BF16, PYTORCH_BF16 = "openvino-bf16", "PyTorch-bf16"
# Backends that run exported programs, and the settings of `load_pipeline` that they stand for.
PROGRAMS: dict[str, dict[str, Any]] = {
    PREDICTOR: {"runtime": "paddle"},
    ONNX_RUNTIME: {"runtime": "onnxruntime"},
    OPENVINO: {"runtime": "openvino"},
    OPENVINO_BF16: {"runtime": "openvino", "precision": "bf16"},
}
PROGRAM_FORMATS = {backend: RUNTIMES[settings["runtime"]].format for backend, settings in PROGRAMS.items()}
IN_BF16 = (OPENVINO_BF16, PYTORCH_BF16)
IN_FP32 = {OPENVINO_BF16: OPENVINO}  # the same programs in fp32
PLANNED, MEASURED, NOT_MEASURED = "planned", "measured", "not measured"
OUT_OF_MEMORY, ERROR = "out of memory", "error"

# In --arms: PLAIN and TOME in these backends.
TORCH, TORCH_BF16 = "torch", "torch-bf16"
TORCH_BACKENDS = {TORCH: PYTORCH, TORCH_BF16: PYTORCH_BF16}
ARMS = (PLAIN, MEMORY_EFFICIENT, TOME, BOTH, BUILT_IN, LIMIT, *TORCH_BACKENDS)
BACKENDS = (EAGER, *PROGRAMS)
DTYPES = ("float32", "float16", "bfloat16")
ARMS_OF = {
    EAGER: ARMS[: -len(TORCH_BACKENDS)],
    # They have their own attention kernels, and the built-in ToMe cannot be exported.
    **dict.fromkeys(PROGRAMS, (PLAIN, TOME, LIMIT)),
    **dict.fromkeys(TORCH_BACKENDS.values(), (PLAIN, TOME)),
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

    arm: str  # one of ARMS, except those of TORCH_BACKENDS
    backend: str = EAGER  # or one of PROGRAMS, or of TORCH_BACKENDS' values
    config: ToMeConfig | None = None  # how tokens merge; None: they do not
    attention: str = "plain"  # or "slicing", "xformers"
    kept: int = 0  # tokens after merging, at the shallowest level with attention
    status: str = PLANNED  # until MEASURED, OUT_OF_MEMORY or ERROR; or NOT_MEASURED
    reason: str | None = None  # why it was not measured
    seconds: list[float] = field(default_factory=list)  # of each round
    parity: dict[str, Any] | None = None  # "against": an arm's name; "difference": relative
    peak_memory_bytes: int | None = None  # of one pass with the weights, by Paddle's counter
    macs: int | None = None  # multiply-accumulates of one pass of the UNet or block, for the whole batch
    shares: dict[str, float] | None = None  # of the blocks' time, by overhead.PARTS

    @property
    def ratio(self) -> float:
        """Share of tokens to merge; 0 if nothing merges."""
        return 0.0 if self.config is None else self.config.constant_ratio

    @property
    def max_downsample(self) -> int | None:
        """Deepest level that merges; None: the shallowest with attention, or nothing merges."""
        return None if self.config is None else self.config.max_downsample

    @property
    def is_torch(self) -> bool:
        """Whether PyTorch computes it, and tomesd merges."""
        return self.backend in TORCH_BACKENDS.values()

    @property
    def method(self) -> str:
        """How tokens merge, in words, without ratio and level; "" if they do not."""
        return "" if self.config is None else method_of(self.config)

    @property
    def name(self) -> str:
        """In words, such as "ToMe 0.5, windows of 16, eager"; no two arms of a case have the same."""
        level = "" if self.max_downsample is None else f", max_downsample {self.max_downsample}"
        dst = f", dst of seed {self.config.seed}" if self.config and self.config.use_rand else ""  # in `tune` alone
        return f"{self.label(f' {self.ratio:.15g}')}{level}{dst}, {self.backend}"

    def label(self, ratio: str = "") -> str:
        """In words, such as "ToMe, windows of 16", without level and backend; `ratio` follows the first words."""
        if self.config is None:
            return ARM_NAMES.get(self.arm, self.arm)
        merging, *others = self.method.split(", ")
        words = "tomesd" if self.is_torch else ARM_NAMES.get(self.arm, self.arm).replace("ToMe", merging)
        if self.arm == LIMIT and merging != "ToMe":
            words += f" of {merging}"
        return ", ".join([f"{words}{ratio}", *others])

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
        arms = [Arm(**{**arm, "config": arm["config"] and ToMeConfig(**arm["config"])}) for arm in fields["arms"]]
        return cls(**{**fields, "arms": arms})

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


def method_of(config: ToMeConfig) -> str:
    """`ToMeConfig.method` without the level, and without the dst, which are the same in all arms."""
    return replace(config, use_rand=True, max_downsample=None).method


def tomesd_config(config: ToMeConfig) -> ToMeConfig:
    """The same tokens removed by the method of tomesd and of ppdiffusers' built-in ToMe."""
    return replace(config, **TOMESD_SETTINGS, merge_attn=bool(config.merge_attn))


def make_configs(
    ratios: Sequence[float], levels: Sequence[int | None], mergings: Sequence[Mapping[str, Any]] = ()
) -> list[ToMeConfig]:
    """All combinations of ratios, values of `max_downsample`, and other settings; settings that have their own win.

    dst is the first token of every cell, because tomesd and the built-in ToMe draw other random ones. It takes the
    same time.

    Args:
        ratios, levels: values of `ratio` and `max_downsample`.
        mergings: settings as `config.parse_settings` returns them; none: the defaults of `ToMeConfig`.

    Raises:
        ToMeConfigError: a value is not allowed.
    """
    if any(settings.get("use_rand") for settings in mergings):
        raise ToMeConfigError("--merging use_rand is not allowed: every arm has fixed dst, as fast as random ones.")
    combinations = product(ratios, levels, mergings or [{}])
    configs = [
        ToMeConfig(**{"ratio": r, "max_downsample": level, "use_rand": False, **s}) for r, level, s in combinations
    ]
    return list(dict.fromkeys(configs))  # a value may be repeated


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
    configs: Sequence[ToMeConfig],
    torch_problem: str | None,
) -> list[Arm]:
    """The arms of a case; those that cannot be measured are NOT_MEASURED and have a reason.

    Args:
        case, arms, backends: what they compute, some of ARMS, some of BACKENDS; those of TORCH_BACKENDS add their own.
        configs: how the merging arms merge. There is one limit for each number of tokens that they remove, and the
            built-in ToMe and tomesd remove as many by their own method.
        torch_problem: why PyTorch cannot be used; None if it can.

    Raises:
        ToMeConfigError: a config would merge nothing in the case.
    """
    efficient = "slicing" if paddle.get_device() == "cpu" else "xformers"
    made: dict[str, Arm] = {}
    torch = [backend for name, backend in TORCH_BACKENDS.items() if name in arms]
    for backend in [*backends, *torch]:
        for name in ARMS_OF[backend]:
            if name not in arms and backend not in torch:
                continue
            attention = efficient if name in (MEMORY_EFFICIENT, BOTH) else "plain"
            for config in _configs_of(case, name, backend, configs):
                kept = case.tokens if config is None else _count_kept(case, config)
                arm = Arm(name, backend, config, attention, kept)
                arm.reason = _why_not_measured(case, arm, torch_problem)
                arm.status = NOT_MEASURED if arm.reason else PLANNED
                made.setdefault(arm.name, arm)
    return list(made.values())


def _configs_of(case: Case, name: str, backend: str, configs: Sequence[ToMeConfig]) -> list[ToMeConfig | None]:
    if name in (PLAIN, MEMORY_EFFICIENT):
        return [None]
    if name == BUILT_IN or backend in TORCH_BACKENDS.values():
        return [tomesd_config(config) for config in configs]
    if name != LIMIT:
        return list(configs)
    limits: dict[Any, ToMeConfig | None] = {}  # by what makes a difference
    for config in configs:
        config = replace(config, window=None, proportional=False, blend=1.0)
        kept, similar = _count_kept(case, config), replace(config, match=SIMILARITY)
        layers = config.merge_attn, config.merge_crossattn, config.merge_mlp
        same = similar if _count_kept(case, similar) == kept else config  # a grid of incomplete cells keeps less
        limits.setdefault((kept, config.max_downsample, *layers), same)
    return list(limits.values())


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


def _count_kept(case: Case, config: ToMeConfig) -> int:
    """Tokens after merging, at the shallowest level with attention."""
    first, level = case.architecture.first_level, config.max_downsample
    if level is not None and case.scope == "block":
        raise ToMeConfigError("--max-downsample is not allowed with --scope block, which has one level: leave it out.")
    if level is not None and level < first:
        raise ToMeConfigError(
            f"--max-downsample {level} is not allowed: the shallowest attention of {case.model} is at level {first}."
        )
    removed = int(count_removed(case.architecture.first_grid(case.size), config))
    if not removed:
        raise ToMeConfigError(
            f"--ratio {config.ratio:g} merges no token at {case.size} px: raise the ratio or the size."
        )
    return case.tokens - removed


def _why_not_measured(case: Case, arm: Arm, torch_problem: str | None) -> str | None:
    if arm.is_torch and torch_problem:
        return torch_problem
    if arm.is_torch and case.scope != "unet":
        return "PyTorch is compared with --scope unet only"
    if arm.backend != EAGER and case.dtype != "float32":
        return "predictors and PyTorch are compared in float32 only"
    if arm.backend in PROGRAMS and case.scope == "pipeline" and arm.arm == LIMIT:
        return "export_pipeline cannot export the free-merge limit"
    if arm.arm == BUILT_IN and arm.ratio >= 0.75:
        return "the apply_tome of ppdiffusers does not allow a ratio of 0.75 or more"
    return None
