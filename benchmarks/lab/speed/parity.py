"""Parity before timing: an arm whose output differs from that of its reference is not timed."""

from collections.abc import Callable, Sequence

import numpy as np

from ppdiffusers_tome.export.tracing import image_differences, relative_difference

from .cases import BOTH, EAGER, MEMORY_EFFICIENT, PLAIN, Arm
from .catalog import ARMS, BACKENDS

# If the similarities of two dst differ by less than rounding, two correct programs may choose differently. So each
# image of an arm must agree for one of several random inputs.
TRIES = 5
MIN_CHANGE = 1e-4  # by merging, relative to the plain output
OTHER_ATTENTION = 1e-4  # rounds differently, and merging amplifies that from block to block
HALF = 1e-1  # bfloat16, without merging
MERGED_HALF = 1e-1  # the mean over the output, where other pairs merge because of rounding

Output = Callable[[Arm], np.ndarray | None]


def check_parity(
    arms: Sequence[Arm],
    set_inputs: Callable[[int], None],
    output: Output,
) -> None:
    """Set the `parity` of arms that agree with their references, if they have any; fail the arms that differ.

    `set_inputs` sets the inputs from a seed; `output` computes one pass of any arm, or None if that fails.
    """
    unequal, reasons = {arm.name: arm for arm in arms}, dict[str, str]()
    smallest: dict[str, np.ndarray] = {}  # differences of each arm's images over the inputs, [batch]
    seed = 0
    for seed in range(TRIES if arms else 0):
        set_inputs(seed)
        outputs: dict[str, np.ndarray | None] = {}

        def output_once(arm: Arm, outputs: dict[str, np.ndarray | None] = outputs) -> np.ndarray | None:
            if arm.name not in outputs:
                outputs[arm.name] = output(arm)
            return outputs[arm.name]

        for name, arm in list(unequal.items()):
            values = output_once(arm)
            reasons[name] = "" if values is None else _compare(arm, values, output_once, smallest)
            if not reasons[name]:
                del unequal[name]
        if not unequal:
            break
    if seed:
        set_inputs(0)
    for name, arm in unequal.items():
        arm.fail(f"not timed, because {reasons[name]} for each of {TRIES} random inputs")


def reference_of(arm: Arm) -> Arm | None:
    """The arm whose output must be equal: the same arm in eager mode, and there its kind's reference.

    None for plain and ToMe in eager mode: what they compute is checked by the library's tests.
    """
    name = ARMS[arm.arm].reference if arm.backend == EAGER else arm.arm
    return Arm(name, EAGER, arm.config) if name else None


def tolerance(arm: Arm) -> float | None:
    """The largest relative difference from the reference; None where other pairs merge because of rounding."""
    of_backend = BACKENDS[arm.backend].tolerance
    if of_backend is None:
        return None if arm.config else HALF
    return OTHER_ATTENTION if arm.arm in (BOTH, MEMORY_EFFICIENT) else of_backend


def _compare(arm: Arm, values: np.ndarray, output: Output, smallest: dict[str, np.ndarray]) -> str:
    """Set the arm's parity and its `smallest` differences; the reason if it differs, else nothing."""
    arm.parity = None
    if not np.isfinite(values).all():
        return "its output contains NaN or infinity"
    plain = output(Arm(PLAIN)) if arm.config and arm.backend == EAGER else None
    if plain is not None and not relative_difference([values], [plain]) > MIN_CHANGE:
        return "merging does not change the output"
    reference, allowed = reference_of(arm), tolerance(arm)
    expected = output(reference) if reference else None
    if reference is None or expected is None:
        return ""
    if values.shape != expected.shape:
        return f"the output has the shape {list(values.shape)}, and that of {reference.name} {list(expected.shape)}"
    if allowed is None:
        mean = float(np.abs(values - expected).mean() / np.abs(expected).mean())
        is_near = mean <= MERGED_HALF
        return "" if is_near else f"the output differs from that of {reference.name} by {mean:.1e} on average"
    differences = image_differences([values], [expected], len(values))
    smallest[arm.name] = np.minimum(differences, smallest.get(arm.name, np.inf))
    difference = float(smallest[arm.name].max())
    if not difference <= allowed:
        return f"the output differs from that of {reference.name} by {difference:.1e}"
    arm.parity = {"against": reference.name, "difference": difference}
    return ""
