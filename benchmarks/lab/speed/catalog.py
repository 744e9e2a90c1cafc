"""The arms of a case: those of each kind, in each backend."""

from collections.abc import Sequence

import paddle

from ppdiffusers_tome import ToMeConfig

from ..arm import BUILT_IN, EAGER, PLAIN, Arm
from .cases import BOTH, MEMORY_EFFICIENT, TOME, Measurement
from .others import built_in_configs


def make_arms(kinds: Sequence[str], backends: Sequence[str], configs: Sequence[ToMeConfig]) -> list[Measurement]:
    """The arms of a case, planned.

    Args:
        kinds: of `cases.KINDS`.
        backends: of `cases.BACKENDS`. Exported programs have attention of their own, and only ours merges in them.
        configs: by which the arms merge.
    """
    efficient = "slicing" if paddle.get_device() == "cpu" else "xformers"
    arms_of = {
        PLAIN: lambda backend: [Arm(backend=backend)],
        MEMORY_EFFICIENT: lambda backend: [Arm(attention=efficient, backend=backend)],
        TOME: lambda backend: [Arm(config, backend=backend) for config in configs],
        BOTH: lambda backend: [Arm(config, attention=efficient, backend=backend) for config in configs],
        BUILT_IN: lambda backend: [Arm(config, BUILT_IN, backend=backend) for config in built_in_configs(configs)],
    }
    made: dict[str, Measurement] = {}
    for backend in backends:
        of_backend = arms_of if backend == EAGER else (PLAIN, TOME)
        for arm in [arm for kind in of_backend if kind in kinds for arm in arms_of[kind](backend)]:
            made.setdefault(arm.pass_name, Measurement(arm))
    return list(made.values())
