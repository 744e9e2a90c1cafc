"""Arms are compared with their definitions before they are timed, and those that differ are not."""

import re

import numpy as np
import pytest

from ppdiffusers_tome.evaluation.speed.agreement import TRIES, agree, definition_of, tolerance
from ppdiffusers_tome.evaluation.speed.cases import ArmPlan, Case

CASE = Case("tiny", size=128)
PLAIN, TOME, LIMIT = ArmPlan("plain"), ArmPlan("tome", ratio=0.5), ArmPlan("limit", ratio=0.5)
BUILT_IN, BOTH = ArmPlan("built-in", ratio=0.5), ArmPlan("both", ratio=0.5)
PREDICTOR, PYTORCH = ArmPlan("tome", "predictor", 0.5), ArmPlan("tome", "PyTorch", 0.5)
MERGED = np.array([1.0, -1.0])
OUTPUTS = {PLAIN: np.array([1.0, -2.0]), LIMIT: np.array([0.5, 2.0])}


def outputs(seen=None, **changes):
    """What arms compute: by the arm's label, what is added to it."""

    def output(plan):
        if seen is not None:
            seen.append(plan.label)
        added = changes.get(plan.label, 0.0)
        return None if added is None else OUTPUTS.get(plan, MERGED) + added

    return output


def compare(plans, output, case=CASE):
    draws = []
    parity, wrong = agree(case, plans, draws.append, output)
    return parity, wrong, draws


def test_arms_that_agree_do_so_on_the_first_draw_and_run_once():
    seen = []
    parity, wrong, draws = compare([PLAIN, TOME, BOTH, LIMIT, PREDICTOR, PYTORCH], outputs(seen))
    assert draws == [0] and not wrong
    assert sorted(seen) == sorted({*seen}) and "eager built-in 0.5" in seen  # the definition, though not an arm
    assert parity[PLAIN] is None and parity[LIMIT] is None
    assert parity[TOME] == {"against": "eager built-in 0.5", "difference": 0.0}
    assert parity[PREDICTOR] == parity[PYTORCH] == {"against": "eager tome 0.5", "difference": 0.0}


@pytest.mark.parametrize(("added", "told"), [(1e-3, r"by 1\.0e-03"), (np.nan, "holds NaN")])
def test_arm_that_differs_is_tried_on_several_draws_and_the_others_are_timed(added, told):
    parity, wrong, draws = compare([PLAIN, TOME, PREDICTOR], outputs(**{PREDICTOR.label: added}))
    assert draws == [*range(TRIES), 0] and list(parity) == [PLAIN, TOME]
    assert list(wrong) == [PREDICTOR] and re.search(told, wrong[PREDICTOR])


def test_one_draw_without_a_tie_will_do():
    draws = []

    def output(plan):
        return outputs()(plan) + (1e-2 if plan == PREDICTOR and draws[-1] < 2 else 0)

    parity, wrong = agree(CASE, [PREDICTOR], draws.append, output)
    assert draws == [0, 1, 2, 0] and not wrong and parity[PREDICTOR]["difference"] == 0


def test_arm_that_merges_nothing_is_not_timed():
    _, wrong, _ = compare([LIMIT, TOME], lambda plan: MERGED)
    assert set(wrong) == {LIMIT, TOME} and "merging does not change the output" in wrong[TOME]


def test_arms_that_fail_are_neither_right_nor_wrong():
    parity, wrong, _ = compare([TOME, BOTH], outputs(**{BUILT_IN.label: None, BOTH.label: None}))
    assert parity == {TOME: None} and not wrong


def test_definitions():
    assert definition_of(PLAIN) is None and definition_of(LIMIT) is None
    assert definition_of(ArmPlan("memory-efficient")) == PLAIN
    assert definition_of(TOME) == BUILT_IN and definition_of(BUILT_IN) == definition_of(BOTH) == TOME
    assert definition_of(ArmPlan("limit", "predictor", 0.5, 2)) == ArmPlan("limit", "eager", 0.5, 2)


def test_half_precision_is_compared_where_nothing_merges():
    half = Case("tiny", dtype="bfloat16")
    assert tolerance(half, ArmPlan("memory-efficient")) > tolerance(CASE, ArmPlan("memory-efficient"))
    assert tolerance(half, TOME) is None and tolerance(CASE, TOME) == 1e-5
