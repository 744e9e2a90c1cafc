"""What became slower from one speed result to another, judged by ratios within each run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import ToMeConfigError
from .markdown import change
from .names import BUILT_IN, EAGER, ERROR, LIMIT, NOT_MEASURED, OUT_OF_MEMORY, PLAIN, PYTORCH
from .results import Arm, Case, Result, Spread, parse, spread

THRESHOLD = 0.05
Verdict = Literal["slower", "faster", "within the noise", "the same", "appeared", "vanished", "no reference"]
HEADINGS: dict[Verdict, str] = {
    "slower": "Became slower",
    "faster": "Became faster",
    "within the noise": "Changed, but within the noise (the quartiles overlap)",
    "no reference": "Not judged: no plain arm in one of the runs",
    "appeared": "Appeared",
    "vanished": "Vanished",
}


@dataclass(frozen=True)
class Change:
    """How one arm of one case fares in the new run against the old."""

    case: Case
    arm: Arm
    verdict: Verdict
    text: str

    @property
    def counts(self) -> bool:
        """Whether it is ours to keep fast: neither PyTorch, nor ppdiffusers' own merging, nor the limit."""
        return self.arm.backend != PYTORCH and self.arm.arm not in (BUILT_IN, LIMIT)


def compare(old: dict[str, Any], new: dict[str, Any], threshold: float = THRESHOLD) -> str:
    """What became slower, faster, appeared and vanished, as text.

    An arm's time is taken as a share of plain's in the same rounds, since seconds of two runs on a shared machine are
    no basis; a predictor's plain arm as a share of eager's. Seconds are shown beside it where machine, threads and
    versions are the same.

    Args:
        old, new: results as `bench` writes them.
        threshold: smallest relative change that is one, above 0; below it, or where the quartiles of the two runs
            overlap, nothing became slower.

    Raises:
        ToMeConfigError: one is not a speed result of a known format, or the threshold is not above 0.
    """
    found = changes(old, new, threshold)
    lines = [f"Old: {old['commit']}, {old['command']}", f"New: {new['commit']}, {new['command']}"]
    if not _same_machine(old, new):
        lines.append("Machine, threads or versions differ: only ratios within each run are compared.")
    for verdict, heading in HEADINGS.items():
        of_it = [change for change in found if change.verdict == verdict]
        if of_it:
            lines += ["", f"{heading}:"]
            lines += [f"  {each.case.name}: {each.arm.name}: {each.text}{_remark(each)}" for each in of_it]
    same = sum(change.verdict == "the same" for change in found)
    return "\n".join([*lines, "", f"Within {threshold:.0%} of before: {same} of {len(found)}."])


def is_slower(old: dict[str, Any], new: dict[str, Any], threshold: float = THRESHOLD) -> bool:
    """Whether an arm of ours became slower, or was measured and no longer computes.

    PyTorch, ppdiffusers' built-in merging and the free-merge limit do not count. Arguments and errors as `compare`.
    """
    return any(change.verdict == "slower" and change.counts for change in changes(old, new, threshold))


def changes(old: dict[str, Any], new: dict[str, Any], threshold: float = THRESHOLD) -> list[Change]:
    """Every arm of both runs with its verdict; arguments and errors as `compare`."""
    if not threshold > 0:
        raise ToMeConfigError(f"threshold={threshold!r} is not allowed: it must be above 0.")
    before, after = parse(old, "the old result"), parse(new, "the new result")
    return list(_changes(before, after, threshold))


def _same_machine(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return parse(old, "the old result").machine == parse(new, "the new result").machine


def _remark(change: Change) -> str:
    return "" if change.counts or change.verdict != "slower" else " (not ours, does not count)"


def _changes(old: Result, new: Result, threshold: float) -> Iterator[Change]:
    is_same_machine = old.machine == new.machine
    before = {(case.identity, arm.identity): (case, arm) for case in old.cases for arm in case.arms}
    after = {(case.identity, arm.identity): (case, arm) for case in new.cases for arm in case.arms}
    for key, (case, arm) in after.items():
        if key not in before:
            yield Change(case, arm, "appeared", arm.status)
            continue
        verdict, text = _judge(*before[key], case, arm, threshold)
        old_arm = before[key][1]
        if is_same_machine and arm.is_measured and old_arm.is_measured:
            text += f"; {spread(old_arm.seconds).median:.4g} s → {spread(arm.seconds).median:.4g} s"
        yield Change(case, arm, verdict, text)
    for key, (case, arm) in before.items():
        if key not in after:
            yield Change(case, arm, "vanished", f"was {arm.status}")


def _judge(old_case: Case, old: Arm, case: Case, arm: Arm, threshold: float) -> tuple[Verdict, str]:
    if old.is_measured and not arm.is_measured:
        failed = arm.status in (OUT_OF_MEMORY, ERROR)
        return "slower" if failed else "vanished", f"was measured, now {arm.status}{_reason(arm)}"
    if not old.is_measured:
        verdict: Verdict = "faster" if arm.is_measured and old.status != NOT_MEASURED else "the same"
        verdict = "appeared" if arm.is_measured and old.status == NOT_MEASURED else verdict
        return verdict, f"was {old.status}, now {arm.status}"
    if (arm.arm, arm.backend) == (PLAIN, EAGER):
        return "the same", "what the others are measured by"
    before, after = _share(old_case, old), _share(case, arm)
    if before is None or after is None:
        return "no reference", "its time against plain is not known"
    ratio = after.median / before.median
    text = f"{_words(before)} → {_words(after)} of {_reference(arm)}'s time ({change(ratio)})"
    if abs(ratio - 1) <= threshold:
        return "the same", text
    if after.low <= before.high and before.low <= after.high:
        return "within the noise", text
    return "slower" if ratio > 1 else "faster", text


def _share(case: Case, arm: Arm) -> Spread | None:
    """The arm's time as a share of its reference's, within rounds."""
    reference = case.find(PLAIN, EAGER if arm.arm == PLAIN else arm.backend)
    return None if reference is None else case.times_faster(reference, arm)


def _reference(arm: Arm) -> str:
    return "eager plain" if arm.arm == PLAIN else "plain"


def _words(share: Spread) -> str:
    return f"{share.median:.3f} [{share.low:.3f}–{share.high:.3f}]"


def _reason(arm: Arm) -> str:
    return f" ({arm.reason})" if arm.reason else ""
