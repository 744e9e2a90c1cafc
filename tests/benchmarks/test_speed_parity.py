"""Arms are compared with their references before they are timed; those that differ are not timed."""

import re

import numpy as np
import pytest
from lab.arm import Arm
from lab.speed.cases import Measurement
from lab.speed.parity import TRIES, check_parity, tolerance
from speed_results import config

MERGED = np.array([1.0, -1.0])
OUTPUTS = {"plain, eager": np.array([1.0, -2.0]), "tomesd 0.5, max_downsample=2, eager": np.array([0.5, 2.0])}


KINDS = {  # whether tokens merge, and attention
    "plain": (False, "plain"),
    "memory_efficient": (False, "slicing"),
    "tome": (True, "plain"),
    "both": (True, "slicing"),
}


def arm(kind, backend="eager", level=None):
    merges, attention = KINDS[kind]
    merging = config(0.5, max_downsample=level) if merges else None
    return Measurement(Arm(merging, attention=attention, backend=backend))


def outputs(computed=None, **changes):
    """Computes arms: what is added to the output, by the kind of the arm and its backend."""

    def output(arm):
        if computed is not None:
            computed.append(arm.pass_name)
        (kind,) = [kind for kind, known in KINDS.items() if known == (arm.config is not None, arm.attention)]
        added = changes.get(f"{kind}_{arm.backend}", 0.0)
        return None if added is None else OUTPUTS.get(arm.pass_name, MERGED) + added

    return output


def check(arms, output):
    seeds = []
    check_parity(arms, seeds.append, output)
    return {each.name: each.reason for each in arms if each.status == "error"}, seeds


def test_arms_that_agree_do_so_on_the_first_inputs_and_run_once():
    computed = []
    arms = [arm("plain"), arm("tome"), arm("both"), arm("tome", "predictor"), arm("memory_efficient")]
    reasons, seeds = check(arms, outputs(computed, memory_efficient_eager=np.array([0.0, -1.0])))
    assert seeds == [0] and not reasons
    assert sorted(computed) == sorted({*computed})
    against = [each.parity and each.parity["against"] for each in arms]
    assert against == [None, None, "tomesd 0.5, eager", "tomesd 0.5, eager", "plain, eager"]
    assert all(each.parity["difference"] == 0 for each in arms if each.parity)


@pytest.mark.parametrize(("added", "reason"), [(1e-3, r"by 1\.0e-03"), (np.nan, "contains NaN")])
def test_arm_that_differs_is_tried_on_several_inputs(added, reason):
    arms = [arm("plain"), arm("tome"), arm("tome", "predictor")]
    reasons, seeds = check(arms, outputs(tome_predictor=added))
    assert seeds == [*range(TRIES), 0]
    assert list(reasons) == [arms[2].name] and re.search(reason, reasons[arms[2].name])
    assert arms[2].parity is None


def test_arm_may_differ_for_some_inputs():
    seeds, predictor = [], arm("tome", "predictor")
    check_parity([predictor], seeds.append, lambda a: outputs(tome_predictor=1e-2 if seeds[-1] < 2 else 0)(a))
    assert seeds == [0, 1, 2, 0] and predictor.status == "planned" and predictor.parity["difference"] == 0


def test_each_image_may_agree_for_other_inputs():
    """With many tokens, rounding changes a pair of one image of a batch with nearly all inputs."""
    seeds, predictor = [], arm("tome", "predictor")
    added = np.array([[1e-2, 1e-5], [1e-2, 1e-2], [2e-5, 1e-2]])
    check_parity([predictor], seeds.append, lambda arm: outputs(tome_predictor=added[seeds[-1]])(arm))
    assert seeds == [0, 1, 2, 0] and predictor.status == "planned"
    assert predictor.parity["difference"] == pytest.approx(2e-5)


def test_arm_that_merges_nothing_is_not_timed():
    reasons, _ = check([arm("both"), arm("tome")], lambda arm: MERGED)
    assert len(reasons) == 2 and all("merging does not change the output" in reason for reason in reasons.values())


def test_bf16_is_compared_where_nothing_merges():
    bf16, sliced, eager = arm("plain", backend="openvino-bf16"), arm("memory_efficient"), arm("tome")
    assert tolerance(bf16.arm) > tolerance(sliced.arm) > tolerance(eager.arm)
    assert tolerance(arm("tome", backend="openvino-bf16").arm) is None


@pytest.mark.parametrize(
    ("merged", "reason"),
    [
        (MERGED + 0.05, None),
        (MERGED + 0.3, r"by 3\.0e-01 on average"),
        (MERGED[:0], r"shape \[0\], and that of tomesd 0\.5, eager \[2\]"),
    ],
)
def test_bf16_may_merge_other_pairs_but_not_return_something_else(merged, reason):
    """OpenVINO returned no image at all where bf16 had rounded indices."""
    tome = arm("tome", "openvino-bf16")
    reasons, _ = check([tome], lambda arm: merged if arm.backend == "openvino-bf16" else MERGED)
    assert re.search(reason, reasons[tome.name]) if reason else not reasons and tome.parity is None
