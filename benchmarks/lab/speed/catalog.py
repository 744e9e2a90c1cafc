"""What `bench` can measure: a `Catalog` of scopes, backends and arms, with all that is known of each in one row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import paddle

from ppdiffusers_tome.config import ToMeConfig
from ppdiffusers_tome.inference.runtime import FUSED_TOLERANCE

from ..free_merge import attach_free_merge
from .backends import Attach, Backend, EagerBackend, ProgramBackend
from .cases import (
    ARM_NAMES,
    BOTH,
    EAGER,
    IN_FP32,
    MEMORY_EFFICIENT,
    NOT_MEASURED,
    PLAIN,
    PROGRAMS,
    TOME,
    UNMERGED,
    Arm,
    Case,
)
from .others import (
    BUILT_IN,
    LIMIT,
    PYTORCH,
    PYTORCH_BF16,
    PyTorchBackend,
    attach_built_in,
    built_in_configs,
    limit_configs,
    tomesd_configs,
    versions_of_pytorch,
)
from .workloads import PipelineWorkload, UNetWorkload, Workload

ChooseConfigs = Callable[[Case, Sequence[ToMeConfig]], Sequence[ToMeConfig]]


@dataclass(frozen=True)
class ArmKind:
    """What the arms of one name have in common."""

    reference: str | None = None  # the arm whose output it must equal in eager mode; None: it is not compared
    choose_configs: ChooseConfigs | None = None  # of the configs that the user asks for; None: it merges by all
    attach: Attach | None = None  # changes the denoiser; None: it merges with this package


@dataclass(frozen=True)
class BackendKind:
    """What is known of one backend."""

    make: type[Backend]
    arms: tuple[str, ...]  # the names of the arms that it computes
    tolerance: float | None  # of float32 outputs, relative to the reference; None: it computes in bfloat16
    choose_configs: ChooseConfigs | None = None  # for all its arms, in place of their own
    versions: Callable[[], dict[str, str]] | None = None  # of packages outside this process, for the result


@dataclass(frozen=True)
class Catalog:
    """What can be measured, by name. It is sent to the worker process, so its functions must be importable there."""

    scopes: Mapping[str, Callable[[Case], Workload]]
    backends: Mapping[str, BackendKind]
    arms: Mapping[str, ArmKind]

    @property
    def attachers(self) -> dict[str, Attach]:
        """The functions that change the denoiser, by arm; arms without one merge with this package."""
        return {name: kind.attach for name, kind in self.arms.items() if kind.attach is not None}

    def open_workload(self, case: Case) -> Workload:
        """Build or load a case's model."""
        paddle.seed(0)
        return self.scopes[case.scope](case)


_TOLERANCES = {name: None if name in IN_FP32 else FUSED_TOLERANCE for name in PROGRAMS}
_PYTORCH = BackendKind(PyTorchBackend, (PLAIN, TOME), 1e-3, tomesd_configs, versions_of_pytorch)

CATALOG = Catalog(
    scopes={"unet": UNetWorkload, "pipeline": PipelineWorkload},
    backends={
        EAGER: BackendKind(EagerBackend, (*ARM_NAMES, BUILT_IN, LIMIT), tolerance=1e-5),
        # Exported programs have attention kernels of their own.
        **{name: BackendKind(ProgramBackend, (PLAIN, TOME, LIMIT), most) for name, most in _TOLERANCES.items()},
        PYTORCH: _PYTORCH,
        PYTORCH_BF16: replace(_PYTORCH, tolerance=None),
    },
    arms={
        PLAIN: ArmKind(),
        MEMORY_EFFICIENT: ArmKind(reference=PLAIN),
        TOME: ArmKind(),
        BOTH: ArmKind(reference=TOME),
        BUILT_IN: ArmKind(reference=TOME, choose_configs=built_in_configs, attach=attach_built_in),
        LIMIT: ArmKind(choose_configs=limit_configs, attach=attach_free_merge),
    },
)


def make_arms(
    case: Case,
    arms: Sequence[str],
    backends: Sequence[str],
    configs: Sequence[ToMeConfig],
    catalog: Catalog = CATALOG,
) -> list[Arm]:
    """The arms of a case; those that cannot be measured are NOT_MEASURED and have a reason.

    Args:
        arms, backends: names in the catalog. A backend skips the arms that it does not compute.
        configs: by which the arms merge.

    Raises:
        ToMeConfigError: a config would merge nothing in the case.
    """
    efficient = "slicing" if paddle.get_device() == "cpu" else "xformers"
    made: dict[str, Arm] = {}
    for backend in backends:
        kind = catalog.backends[backend]
        for name in [name for name in kind.arms if name in arms]:
            choose = kind.choose_configs or catalog.arms[name].choose_configs
            chosen = choose(case, configs) if choose else configs
            for config in [None] if name in UNMERGED else chosen:
                attention = efficient if name in (MEMORY_EFFICIENT, BOTH) else "plain"
                arm = Arm(name, backend, config, attention, case.count_kept(config))
                if backend != EAGER and case.dtype != "float32":
                    arm.fail(NOT_MEASURED, "only eager mode is measured in another dtype than float32")
                made.setdefault(arm.name, arm)
    return list(made.values())
