"""Parity before timing: each arm is compared with its definition, and one that differs is not timed."""

from collections.abc import Callable, Iterable

import numpy as np

from ...inference.tracing import ONEDNN_TOLERANCE, distance
from .cases import ArmPlan, Case
from .names import BOTH, BUILT_IN, EAGER, MEMORY_EFFICIENT, PLAIN, PREDICTOR, PYTORCH, TOME

# Two dst may be equally similar to within rounding, and two programs then choose differently with nothing wrong in
# either. So an arm must agree on one of several draws of the inputs.
TRIES = 5
LEAST_CHANGE = 1e-4  # of the plain output, by merging
# The largest difference over the largest output, in float32.
TOLERANCES = {EAGER: 1e-5, PREDICTOR: ONEDNN_TOLERANCE, PYTORCH: 1e-3}
UNROUNDED_MERGING = 1e-4  # slices of attention round otherwise, and merging hands that on from block to block
PIPELINE = 1e-2  # pictures in 0 … 1 after two steps and a VAE
HALF = 5e-2  # float16 and bfloat16, without merging

Output = Callable[[ArmPlan], np.ndarray | None]
Parity = dict[str, str | float]


def agree(
    case: Case, plans: Iterable[ArmPlan], take: Callable[[int], None], output: Output
) -> tuple[dict[ArmPlan, Parity | None], dict[ArmPlan, str]]:
    """Compare arms with their definitions, on one draw of the inputs after the other until they agree.

    Args:
        case: what they compute.
        plans: the arms.
        take: draws the inputs by a seed.
        output: one pass of any arm, also one that is not among `plans`; None where it fails.

    Returns:
        For each arm that was compared its distance from its definition, None where that cannot be computed; and for
        each that differs on every draw the reason not to time it. Arms that fail by themselves are in neither.
    """
    parity: dict[ArmPlan, Parity | None] = {}
    wrong = dict.fromkeys(plans, "")
    seed = 0
    for seed in range(TRIES):
        take(seed)
        seen: dict[ArmPlan, np.ndarray | None] = {}

        def once(plan: ArmPlan, seen: dict[ArmPlan, np.ndarray | None] = seen) -> np.ndarray | None:
            if plan not in seen:
                seen[plan] = output(plan)
            return seen[plan]

        for plan in list(wrong):
            if once(plan) is None:
                del wrong[plan]
                continue
            parity[plan], reason = _compare(case, plan, once)
            if reason is None:
                del wrong[plan]
            else:
                wrong[plan] = f"{reason} on each of {TRIES} draws of the inputs"
        if not wrong:
            break
    if seed:
        take(0)
    return {plan: found for plan, found in parity.items() if plan not in wrong}, wrong


def definition_of(plan: ArmPlan) -> ArmPlan | None:
    """The arm that another must compute the same as; None for plain, and for the limit, whose pictures are wrong."""
    if plan.backend != EAGER:
        return ArmPlan(plan.arm, EAGER, plan.ratio, plan.max_downsample)
    arm = {MEMORY_EFFICIENT: PLAIN, BOTH: TOME, TOME: BUILT_IN, BUILT_IN: TOME}.get(plan.arm)
    return ArmPlan(arm, EAGER, plan.ratio, plan.max_downsample) if arm else None


def tolerance(case: Case, plan: ArmPlan) -> float | None:
    """How far an arm may be from its definition; None where rounding alone leads to other merges."""
    if case.dtype != "float32":
        return None if plan.ratio else HALF
    if case.scope == "pipeline":
        return PIPELINE
    return UNROUNDED_MERGING if plan.arm in (BOTH, MEMORY_EFFICIENT) else TOLERANCES[plan.backend]


def _compare(case: Case, plan: ArmPlan, output: Output) -> tuple[Parity | None, str | None]:
    out = output(plan)
    assert out is not None
    if not np.isfinite(out).all():
        return None, "its output holds NaN or infinity"
    plain = output(ArmPlan(PLAIN)) if plan.ratio and plan.backend == EAGER else None
    if plain is not None and not distance([out], [plain]) > LEAST_CHANGE:
        return None, "merging does not change the output"
    definition, allowed = definition_of(plan), tolerance(case, plan)
    wanted = output(definition) if definition and allowed is not None else None
    if definition is None or wanted is None:
        return None, None
    found = distance([out], [wanted])
    parity: Parity = {"against": definition.label, "difference": found}
    return parity, None if found <= (allowed or 0) else f"it differs from {definition.label} by {found:.1e}"
