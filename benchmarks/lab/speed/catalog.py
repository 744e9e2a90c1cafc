"""What `bench` can measure: the kinds of arms and backends, with all that is known of each in one row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import paddle

from ppdiffusers_tome.config import ToMeConfig
from ppdiffusers_tome.run.runtime import FUSED_TOLERANCE

from .backends import Backend, EagerBackend, ProgramBackend
from .cases import (
    ARM_NAMES,
    BOTH,
    BUILT_IN,
    EAGER,
    LIMIT,
    MEMORY_EFFICIENT,
    PLAIN,
    PROGRAMS,
    ROUNDED,
    TOME,
    UNMERGED,
    Arm,
    Case,
)
from .others import built_in_configs, limit_configs

ChooseConfigs = Callable[[Case, Sequence[ToMeConfig]], Sequence[ToMeConfig]]


@dataclass(frozen=True)
class ArmKind:
    """What the arms of one name have in common."""

    reference: str | None = None  # the arm whose output it must equal in eager mode; None: it is not compared
    choose_configs: ChooseConfigs | None = None  # of the configs that the user asks for; None: it merges by all


@dataclass(frozen=True)
class BackendKind:
    """What is known of one backend."""

    make: type[Backend]
    arms: tuple[str, ...]  # the names of the arms that it computes
    tolerance: float | None  # of outputs, relative to the reference; None: it computes in bfloat16


ARMS = {
    PLAIN: ArmKind(),
    MEMORY_EFFICIENT: ArmKind(reference=PLAIN),
    TOME: ArmKind(),
    BOTH: ArmKind(reference=TOME),
    BUILT_IN: ArmKind(reference=TOME, choose_configs=built_in_configs),
    LIMIT: ArmKind(choose_configs=limit_configs),
}
_TOLERANCES = {name: None if name in ROUNDED else FUSED_TOLERANCE for name in PROGRAMS}
BACKENDS = {
    EAGER: BackendKind(EagerBackend, (*ARM_NAMES, BUILT_IN, LIMIT), tolerance=1e-5),
    # Exported programs have attention kernels of their own.
    **{name: BackendKind(ProgramBackend, (PLAIN, TOME, LIMIT), limit) for name, limit in _TOLERANCES.items()},
}


def make_arms(case: Case, arms: Sequence[str], backends: Sequence[str], configs: Sequence[ToMeConfig]) -> list[Arm]:
    """The arms of a case.

    Args:
        arms, backends: names in ARMS and BACKENDS. A backend skips the arms that it does not compute.
        configs: by which the arms merge.

    Raises:
        ToMeConfigError: a config would merge nothing in the case.
    """
    efficient = "slicing" if paddle.get_device() == "cpu" else "xformers"
    made: dict[str, Arm] = {}
    for backend in backends:
        for name in [name for name in BACKENDS[backend].arms if name in arms]:
            choose = ARMS[name].choose_configs
            chosen = choose(case, configs) if choose else configs
            for config in [None] if name in UNMERGED else chosen:
                attention = efficient if name in (MEMORY_EFFICIENT, BOTH) else "plain"
                arm = Arm(name, backend, config, attention, case.count_kept(config))
                made.setdefault(arm.name, arm)
    return list(made.values())
