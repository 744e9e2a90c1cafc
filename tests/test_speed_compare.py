"""What became slower is judged within each run, by medians and quartiles."""

import pytest
from speed_results import arm, case, result

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.evaluation.speed.compare import changes, compare, is_slower

PLAIN = arm("plain", [10.0, 20.0, 40.0])  # a shared machine: seconds swing, ratios within rounds do not


def run(*arms, **more):
    return result([case([PLAIN, *arms])], **more)


def tome(share, **more):
    return arm("tome", [share * taken for taken in PLAIN["seconds"]], ratio=0.5, **more)


def verdicts(old, new, **more):
    return {change.arm.name: change.verdict for change in changes(old, new, **more)}


def test_a_slower_share_of_plain_is_slower():
    old, new = run(tome(0.8)), run(tome(0.9))
    assert verdicts(old, new) == {"plain, eager": "the same", "ToMe 0.5, eager": "slower"}
    text = compare(old, new)
    assert "Became slower:\n  sd15, one UNet pass, 512 px, batch 2: ToMe 0.5, eager: " in text
    assert "0.800 [0.800–0.800] → 0.900 [0.900–0.900] of plain's time (+12.5 %); 16 s → 18 s" in text
    assert is_slower(old, new)
    assert not is_slower(new, old)
    assert "Became faster" in compare(new, old)


def test_a_machine_that_is_twice_as_slow_changes_nothing():
    slow = result(
        [
            case(
                [
                    arm(each["arm"], [2 * s for s in each["seconds"]], ratio=each["ratio"])
                    for each in (PLAIN, tome(0.8))
                ]
            )
        ],
        machine="A slow CPU",
    )
    text = compare(run(tome(0.8)), slow)
    assert "Became" not in text
    assert "Machine, threads or versions differ" in text
    assert " s → " not in text


def test_the_threshold_decides():
    old, new = run(tome(0.80)), run(tome(0.83))  # +3.75 %
    assert not is_slower(old, new)
    assert is_slower(old, new, threshold=0.03)


def test_overlapping_quartiles_are_noise():
    # shares of plain: old 0.7, 0.8, 0.9 (quartiles 0.75 to 0.85); new 0.8, 0.88, 1.0 (0.84 to 0.94)
    old = run(arm("tome", [7.0, 16.0, 36.0], ratio=0.5))
    new = run(arm("tome", [8.0, 17.6, 40.0], ratio=0.5))
    assert verdicts(old, new)["ToMe 0.5, eager"] == "within the noise"
    assert not is_slower(old, new)
    clear = run(arm("tome", [9.0, 19.0, 39.0], ratio=0.5))  # 0.9, 0.95, 0.975: from 0.925
    assert is_slower(old, clear)


@pytest.mark.parametrize("status", ["out of memory", "error"])
def test_what_no_longer_computes_is_slower(status):
    old, new = run(tome(0.8)), run(arm("tome", [], ratio=0.5, status=status))
    assert is_slower(old, new)
    assert f"was measured, now {status} (Allocator says no)" in compare(old, new)
    assert verdicts(new, old)["ToMe 0.5, eager"] == "faster"


def test_not_measured_is_not_slower():
    assert not is_slower(run(tome(0.8)), run(arm("tome", [], ratio=0.5, status="not measured")))


def test_what_vanished_and_appeared_is_told():
    old, new = run(tome(0.8)), run(arm("both", [9.0, 18.0, 36.0], ratio=0.5))
    found = verdicts(old, new)
    assert found == {
        "plain, eager": "the same",
        "ToMe + memory-efficient 0.5, eager": "appeared",
        "ToMe 0.5, eager": "vanished",
    }
    assert not is_slower(old, new)


def test_other_cases_are_other_cases():
    old = run(tome(0.8))
    new = result([case([PLAIN, tome(0.95)], size=768)])
    assert [change.verdict for change in changes(old, new)] == ["appeared"] * 2 + ["vanished"] * 2


@pytest.mark.parametrize("name, backend", [("built-in", "eager"), ("limit", "eager"), ("tome", "PyTorch")])
def test_others_becoming_slower_is_shown_and_does_not_count(name, backend):
    def with_other(share):
        seconds = [share * taken for taken in PLAIN["seconds"]]
        return run(arm("plain", PLAIN["seconds"], backend="PyTorch"), arm(name, seconds, ratio=0.5, backend=backend))

    old, new = with_other(0.8), with_other(0.95)
    assert "(not ours, does not count)" in compare(old, new)
    assert not is_slower(old, new)


def test_the_predictors_plain_arm_is_held_to_eagers():
    def predicted(share):
        return run(arm("plain", [share * taken for taken in PLAIN["seconds"]], backend="predictor"))

    assert is_slower(predicted(0.3), predicted(0.4))
    assert "of eager plain's time (+33.3 %)" in compare(predicted(0.3), predicted(0.4))


def test_without_plain_nothing_is_judged():
    old, new = result([case([tome(0.8)])]), result([case([tome(0.95)])])
    assert verdicts(old, new) == {"ToMe 0.5, eager": "no reference"}


@pytest.mark.parametrize("change, named", [({"format": 2}, "format=2"), ({"kind": "quality"}, "kind='quality'")])
def test_other_files_are_refused(change, named):
    with pytest.raises(ToMeConfigError, match=f"the old result: {named}"):
        compare(run(tome(0.8)) | change, run(tome(0.8)))


def test_a_threshold_of_nothing_is_refused():
    with pytest.raises(ToMeConfigError, match="threshold=0"):
        is_slower(run(), run(), threshold=0)
