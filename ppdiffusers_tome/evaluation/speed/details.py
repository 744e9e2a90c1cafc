"""Tables that the original documents do not have: overheads, other implementations, backends, and every figure."""

from collections.abc import Sequence

from .markdown import NOTHING, change, level_words, memory_cell, merged_arms, table, time_cell, times, times_spread
from .names import BOTH, BUILT_IN, EAGER, MEASURED, MEMORY_EFFICIENT, PLAIN, PREDICTOR, PYTORCH, TOME
from .plots import TARGET
from .results import ARM_NAMES, OURS, Arm, Case, Spread, spread


def distances(cases: Sequence[Case]) -> list[str]:
    """How far each merged arm is from the free-merge limit, and whether that is within the target."""
    found: dict[tuple[str, str], dict[float, str]] = {}
    for case, arm in merged_arms(cases):
        distance = case.distance(arm)
        if distance:
            verdict = "reached" if distance.median <= TARGET else "**not reached**"
            key = (case.shape, f"{ARM_NAMES[arm.arm]}{level_words(arm.max_downsample)}, {arm.backend}")
            found.setdefault(key, {})[arm.ratio] = f"{change(1 + distance.median)}, {verdict}"
    ratios = sorted({ratio for cells in found.values() for ratio in cells})
    rows = [[*key, *(cells.get(ratio, NOTHING) for ratio in ratios)] for key, cells in found.items()]
    return table(["case", "arm", *(f"ratio {ratio:g}" for ratio in ratios)], rows)


def shares(cases: Sequence[Case]) -> list[str]:
    """Which share of the merging blocks' time is spent on matching, merge and unmerge."""
    rows = []
    for case, arm in merged_arms(cases):
        if arm.shares:
            parts = [arm.shares[name] for name in ("matching", "merge", "unmerge")]
            rows.append([case.shape, arm.name, *(f"{100 * part:.1f} %" for part in [*parts, sum(parts)])])
    return table(["case", "arm", "matching", "merge", "unmerge", "together"], rows)


def built_in(cases: Sequence[Case]) -> list[str]:
    """Our merging against the one that ppdiffusers ships: the same backend, ratio and level."""
    rows = []
    for case, arm in merged_arms(cases):
        other = case.same_merge(arm, BUILT_IN)
        if arm.arm == TOME and other:
            against = case.speed_up(other)
            faster = times_spread(case.times_faster(arm, other))
            rows.append([case.shape, arm.name, time_cell(arm), time_cell(other), times(against), faster])
    header = ["case", "arm", "ToMe, s", "built-in, s", "built-in against plain", "ours is times faster"]
    return table(header, rows)


def torch(cases: Sequence[Case]) -> list[str]:
    """Each backend against PyTorch with diffusers: plain against plain, ToMe against tomesd."""
    rows = []
    for case in cases:
        for arm in case.arms:
            if arm.backend != PYTORCH or not arm.is_measured:
                continue
            ours = [case.same_merge(arm, arm.arm, backend) for backend in (EAGER, PREDICTOR)]
            faster = [times_spread(case.times_faster(mine, arm)) if mine else NOTHING for mine in ours]
            name = arm.name.removesuffix(f", {PYTORCH}")
            rows.append(
                [case.shape, name, time_cell(arm), time_cell(ours[0]), faster[0], time_cell(ours[1]), faster[1]]
            )
    header = ["case", "PyTorch's arm", "PyTorch, s", "eager, s", "eager is times faster"]
    return table([*header, "predictor, s", "predictor is times faster"], rows)


def predictor(cases: Sequence[Case]) -> list[str]:
    """Arms that were measured in both of Paddle's backends."""
    rows = []
    for case in cases:
        for arm in case.arms:
            if arm.backend != PREDICTOR or arm.arm not in (PLAIN, MEMORY_EFFICIENT, *OURS):
                continue
            eager = case.same_merge(arm, arm.arm, EAGER)
            faster = times_spread(case.times_faster(arm, eager))
            name = arm.name.removesuffix(f", {PREDICTOR}")
            rows.append([case.shape, name, time_cell(eager), time_cell(arm), faster, times(case.speed_up(arm))])
    header = ["case", "arm", "eager, s", "predictor, s", "predictor is times faster", "predictor's gain by merging"]
    return table(header, [row for row in rows if row[2] != NOTHING])


def every_figure(cases: Sequence[Case]) -> list[str]:
    """Every arm with its spread (median and quartiles), memory, multiply-accumulates and parity."""
    rows = []
    for case in cases:
        for arm in case.arms:
            timed = [_seconds(arm), times_spread(case.speed_up(arm)) if arm.arm != PLAIN else NOTHING]
            macs = NOTHING if arm.macs is None else f"{arm.macs / 1e9:.2f}"
            tokens = f"{arm.kept} of {case.tokens}"
            rows.append([case.shape, arm.name, tokens, *timed, memory_cell(arm), macs, _parity(arm)])
    header = ["case", "arm", "tokens", "s, median and quartiles", "times faster than plain"]
    return table([*header, "peak memory, GB", "GMACs a pass", "parity"], rows)


def not_measured(cases: Sequence[Case]) -> list[str]:
    """Each reason for which arms were not measured, with the arms."""
    reasons: dict[str, dict[str, None]] = {}  # an ordered set of names
    for case in cases:
        for arm in case.arms:
            if not arm.is_measured:
                reasons.setdefault(f"{arm.status}: {arm.reason or 'no reason given'}", {})[arm.name] = None
    return [f"- {reason}: {'; '.join(names)}" for reason, names in reasons.items()]


def slower_than_unmerged(cases: Sequence[Case]) -> list[tuple[Case, Arm, str, Spread]]:
    """The merged arms that take longer than plain, or than memory-efficient attention alone: with what they lose to,
    and the ratio of times, which is below 1."""
    found = []
    for case, arm in merged_arms(cases):
        for name in (PLAIN, MEMORY_EFFICIENT) if arm.arm == BOTH else (PLAIN,):
            ratio = case.times_faster(arm, case.find(name, arm.backend))
            if ratio and ratio.median < 1:
                found.append((case, arm, ARM_NAMES[name], ratio))
    return found


def slower_lines(cases: Sequence[Case]) -> list[str]:
    """That list as Markdown, or that there is none; no lines where no merged arm was measured."""
    found = slower_than_unmerged(cases)
    if not any(arm.is_measured for _, arm in merged_arms(cases)):
        return []
    if not found:
        return ["None: no merged arm took longer than the same attention without merging."]
    return [
        f"- {case.shape}: {arm.name} takes {1 / ratio.median:.2f} times as long as {loses_to}"
        + (" (within the spread: the quartiles lie on both sides)" if ratio.high >= 1 else "")
        for case, arm, loses_to, ratio in found
    ]


def _seconds(arm: Arm) -> str:
    if arm.status != MEASURED:
        return arm.status + (f": {arm.reason}" if arm.reason else "")
    taken = spread(arm.seconds)
    return f"{taken.median:.4g} [{taken.low:.4g}–{taken.high:.4g}]"


def _parity(arm: Arm) -> str:
    return f"{arm.parity['difference']:.1e}, {arm.parity['against']}" if arm.parity else NOTHING
