"""Parity before timing: an arm whose output differs from that of its reference is not timed."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ppdiffusers_tome.export.comparison import image_differences, relative_difference
from ppdiffusers_tome.run.runtime import FUSED_TOLERANCE

from ..arm import BUILT_IN, EAGER, OURS, PLAIN, Arm
from .cases import ROUNDED, Measurement

# If the similarities of two dst differ by less than rounding, two correct programs may choose differently. So each
# image of an arm must agree for one of several random inputs.
TRIES = 5
MIN_CHANGE = 1e-4  # by merging, relative to the plain output
SAME_ATTENTION = 1e-5
OTHER_ATTENTION = 1e-4  # rounds differently, and merging amplifies that from block to block
HALF = 1e-1  # bfloat16, without merging
MERGED_HALF = 1e-1  # the mean over the output, where other pairs merge because of rounding

Output = Callable[[Arm], np.ndarray | None]


def check_parity(arms: Sequence[Measurement], set_inputs: Callable[[int], None], output: Output) -> None:
    """Set the `parity` of arms that agree with their references, if they have any; fail the arms that differ.

    `set_inputs` sets the inputs from a seed; `output` computes one pass of any arm, or None if that fails.
    """
    unequal, reasons = {measured.arm: measured for measured in arms}, dict[Arm, str]()
    smallest: dict[Arm, np.ndarray] = {}  # differences of each arm's images over the inputs, [batch]
    seed = 0
    for seed in range(TRIES if arms else 0):
        set_inputs(seed)
        outputs: dict[Arm, np.ndarray | None] = {}

        def output_once(arm: Arm, outputs: dict[Arm, np.ndarray | None] = outputs) -> np.ndarray | None:
            if arm not in outputs:
                outputs[arm] = output(arm)
            return outputs[arm]

        for arm, measured in list(unequal.items()):
            values = output_once(arm)
            reasons[arm] = "" if values is None else _compare(measured, values, output_once, smallest)
            if not reasons[arm]:
                del unequal[arm]
        if not unequal:
            break
    if seed:
        set_inputs(0)
    for arm, measured in unequal.items():
        measured.fail(f"not timed, because {reasons[arm]} for each of {TRIES} random inputs")


def reference_of(arm: Arm) -> Arm | None:
    """The arm whose output must be equal: the same in eager mode, and there the same by this package, with attention
    as it is.

    None for plain and merged arms in eager mode: what they compute is checked by the library's tests.
    """
    if arm.backend != EAGER:
        return replace(arm, backend=EAGER)
    if arm.by == BUILT_IN:
        return replace(arm, by=OURS)
    return None if arm.attention == PLAIN else replace(arm, attention=PLAIN)


def tolerance(arm: Arm) -> float | None:
    """The largest relative difference from the reference; None where other pairs merge because of rounding."""
    if arm.backend in ROUNDED:
        return None if arm.config else HALF
    if arm.backend != EAGER:
        return FUSED_TOLERANCE  # exported programs have attention kernels of their own
    return SAME_ATTENTION if arm.attention == PLAIN else OTHER_ATTENTION


def _compare(measured: Measurement, values: np.ndarray, output: Output, smallest: dict[Arm, np.ndarray]) -> str:
    """Set the arm's parity and its `smallest` differences; the reason if it differs, else nothing."""
    arm, measured.parity = measured.arm, None
    if not np.isfinite(values).all():
        return "its output contains NaN or infinity"
    plain = output(Arm()) if arm.config and arm.backend == EAGER else None
    if plain is not None and not relative_difference([values], [plain]) > MIN_CHANGE:
        return "merging does not change the output"
    reference, allowed = reference_of(arm), tolerance(arm)
    expected = output(reference) if reference else None
    if reference is None or expected is None:
        return ""
    if values.shape != expected.shape:
        shapes = list(values.shape), list(expected.shape)
        return f"the output has the shape {shapes[0]}, and that of {reference.pass_name} {shapes[1]}"
    if allowed is None:
        mean = float(np.abs(values - expected).mean() / np.abs(expected).mean())
        is_near = mean <= MERGED_HALF
        return "" if is_near else f"the output differs from that of {reference.pass_name} by {mean:.1e} on average"
    differences = image_differences([values], [expected], len(values))
    smallest[arm] = np.minimum(differences, smallest.get(arm, np.inf))
    difference = float(smallest[arm].max())
    if not difference <= allowed:
        return f"the output differs from that of {reference.pass_name} by {difference:.1e}"
    measured.parity = {"against": reference.pass_name, "difference": difference}
    return ""
