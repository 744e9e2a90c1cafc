"""What `bench` measures: cases (a model at one size) and their arms (ways to compute it).

The same objects are planned, sent to the worker, stored in the result file and read back from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.errors import ToMeConfigError

from ..arm import BUILT_IN, EAGER, PLAIN, Arm
from ..result_files import check_result
from .architectures import Architecture, architecture_of

MEMORY_EFFICIENT, TOME, BOTH = "memory-efficient", "tome", "both"
KINDS = (PLAIN, MEMORY_EFFICIENT, TOME, BOTH, BUILT_IN)  # of arms, as `bench --arms` names them
PREDICTOR, ONNX_RUNTIME = "predictor", "onnxruntime"
OPENVINO, OPENVINO_BF16 = "openvino", "openvino-bf16"
# Backends that run exported programs, and the settings of `load_pipeline` that they stand for.
PROGRAMS: dict[str, dict[str, Any]] = {
    PREDICTOR: {"runtime": "paddle"},
    ONNX_RUNTIME: {"runtime": "onnxruntime"},
    OPENVINO: {"runtime": "openvino"},
    OPENVINO_BF16: {"runtime": "openvino", "precision": "bf16"},
}
BACKENDS = (EAGER, *PROGRAMS)
ROUNDED = (OPENVINO_BF16,)  # backends that compute in bfloat16
PLANNED, MEASURED, ERROR = "planned", "measured", "error"
SCOPES = {"unet": "one UNet pass"}


@dataclass
class Measurement:
    """An arm of a case, and what it cost; the fields are those of the result file."""

    arm: Arm
    status: str = PLANNED  # until MEASURED or ERROR
    reason: str | None = None  # why it was not measured
    seconds: list[float] = field(default_factory=list)  # the time of each round
    parity: dict[str, Any] | None = None  # "against": an arm's name; "difference": relative
    peak_memory_bytes: int | None = None  # peak of one pass, weights included, by Paddle's counter
    macs: int | None = None  # multiply-accumulates of one pass of the UNet or block, for the whole batch

    @property
    def name(self) -> str:
        """In words, such as "tomesd 0.5, sx=4, eager"; no two of a case have the same."""
        return self.arm.pass_name

    def fail(self, reason: str) -> None:
        """Record that the arm cannot be measured; its seconds are dropped."""
        self.status, self.reason, self.seconds = ERROR, reason, []

    def to_json(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return {**asdict(self), "arm": self.arm.to_json()}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> "Measurement":
        """The measurement of `to_json`."""
        return cls(**{**given, "arm": Arm.from_json(given["arm"])})


@dataclass
class Case:
    """One model at one size, with the arms that take turns on it; the fields are those of the result file."""

    model: str  # a name in ARCHITECTURES, or a pipeline's folder
    scope: str = "unet"  # what is timed: one of SCOPES, or in words
    size: int = 512  # px, of a square image
    batch: int = 2  # rows of the UNet or block
    latent: list[int] = field(default_factory=list)  # height and width of the latents
    tokens: int = 0  # at the shallowest level with attention
    arms: list[Measurement] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        own = {name: value for name, value in vars(self).items() if name in self.__dataclass_fields__}
        return {**own, "arms": [measured.to_json() for measured in self.arms]}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> "Case":
        """The case of `to_json`."""
        return cls(**{**given, "arms": [Measurement.from_json(measured) for measured in given["arms"]]})

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture of the model, from the configs in its folder."""
        return architecture_of(self.model)

    @property
    def name(self) -> str:
        """In words, such as "sd15, one UNet pass, 512 px, batch 2"."""
        return f"{self.model}, {SCOPES.get(self.scope, self.scope)}, {self.size} px, batch {self.batch}"

    def with_status(self, *statuses: str) -> list[Measurement]:
        """The arms that have one of these statuses."""
        return [arm for arm in self.arms if arm.status in statuses]


@dataclass(frozen=True)
class Timing:
    """How cases are measured."""

    rounds: int = 5  # timed passes of each arm
    warm_up: int = 1  # passes of each arm before the timed ones
    threads: int = 1  # for every backend

    def __post_init__(self) -> None:
        for name, maximum in (("rounds", 10**6), ("warm_up", 10**6), ("threads", 1024)):
            if not 1 <= getattr(self, name) <= maximum:
                option = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise ToMeConfigError(f"{option} is not allowed: it must be from 1 to {maximum:,}.")


def make_configs(ratios: Sequence[float], mergings: Sequence[Mapping[str, Any]] = ()) -> list[ToMeConfig]:
    """All combinations of ratios and other settings; settings that have a ratio keep it.

    Args:
        ratios: values of `ratio`.
        mergings: settings as `merge_options.read_methods` returns them; none: the default method.

    Raises:
        ToMeConfigError: a value is not allowed.
    """
    settings = ({"ratio": ratio, **settings} for ratio, settings in product(ratios, mergings or [{}]))
    return list(dict.fromkeys(ToMeConfig(**one) for one in settings))  # a value may be repeated


def make_case(model: str, **fields: Any) -> Case:
    """A case without arms, from the fields of `Case` that say what to measure.

    Raises:
        ToMeConfigError: a value is not allowed.
    """
    case = Case(model, **fields)
    architecture = case.architecture
    for name, minimum in (("batch", 1), ("size", architecture.factor)):
        if (value := getattr(case, name)) < minimum:
            raise ToMeConfigError(f"--{name} {value} is not allowed: it must be {minimum} or more.")
    if case.size % architecture.factor:
        raise ToMeConfigError(f"--size {case.size} is not allowed: it must be a multiple of {architecture.factor} px.")
    case.latent, case.tokens = list(architecture.latent(case.size)), architecture.first_grid(case.size).tokens
    return case


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
