"""What the results say, in a few sentences, each computed from them, gains and losses alike."""

from collections.abc import Callable, Iterator, Sequence

from .details import slower_than_unmerged
from .markdown import change, merged_arms, nearest
from .names import BOTH, BUILT_IN, EAGER, MEMORY_EFFICIENT, OUT_OF_MEMORY, PLAIN, PREDICTOR, PYTORCH, TOME
from .plots import TARGET
from .results import Arm, Case, Spread

Found = tuple[Case, Arm, Spread]


def findings(cases: Sequence[Case]) -> list[str]:
    """At most ten sentences, of which those are left out that the results say nothing on."""
    sentences = (_gain, _by_size, _efficient, _losses, _limit, _memory, _others, _predictor, _parity)
    return [f"- {sentence}" for each in sentences for sentence in each(cases)]


def _where(case: Case, arm: Arm) -> str:
    return f"{case.name}, {arm.name}"


def _ratios(cases: Sequence[Case], names: Sequence[str], ratio: Callable[[Case, Arm], Spread | None]) -> list[Found]:
    return [(case, arm, it) for case, arm in merged_arms(cases) if arm.arm in names and (it := ratio(case, arm))]


def _range(found: Sequence[Found]) -> str:
    low, high = (end(each.median for _, _, each in found) for end in (min, max))
    return f"{low:.2f}×" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f}× to {high:.2f}×"


def _gain(cases: Sequence[Case]) -> Iterator[str]:
    found = _ratios(cases, (TOME,), Case.speed_up)
    if found:
        case, arm, best = max(found, key=lambda each: each[2].median)
        yield (
            f"ToMe against plain: {_range(found)} over {len(found)} merged arms; most in {_where(case, arm)} "
            f"(quartiles {best.low:.2f}–{best.high:.2f})."
        )


def _by_size(cases: Sequence[Case]) -> Iterator[str]:
    for backend in (EAGER, PREDICTOR):
        found = [each for each in _ratios(cases, (TOME,), Case.speed_up) if each[1].backend == backend]
        if found:
            ratio = nearest({arm.ratio for _, arm, _ in found}, 0.5)
            sizes: dict[tuple[str, str], dict[int, list[Found]]] = {}
            for each in found:
                case, arm, _ = each
                if arm.ratio == ratio:
                    sizes.setdefault((case.model, case.scope), {}).setdefault(case.size, []).append(each)
            told = [
                f"{model} ({scope}) " + ", ".join(f"{size} px {_range(of_it)}" for size, of_it in sorted(by.items()))
                for (model, scope), by in sizes.items()
            ]
            yield f"By size at ratio {ratio:g}, {backend}: {'; '.join(told)}."


def _efficient(cases: Sequence[Case]) -> Iterator[str]:
    against_plain = _ratios(cases, (BOTH,), Case.speed_up)
    alone = _ratios(cases, (BOTH,), lambda case, arm: case.times_faster(arm, case.unmerged(arm)))
    against = _ratios(
        cases, (TOME,), lambda case, arm: case.times_faster(arm, case.find(MEMORY_EFFICIENT, arm.backend))
    )
    told = []
    if alone and against_plain:
        told.append(f"ToMe in it {_range(alone)} against it alone and {_range(against_plain)} against plain attention")
    if against:
        beaten = sum(each.median < 1 for _, _, each in against)
        told.append(f"without merging it is faster than ToMe in plain attention in {beaten} of {len(against)} arms")
    if told:
        yield f"Memory-efficient attention: {'; '.join(told)}."


def _losses(cases: Sequence[Case]) -> Iterator[str]:
    merged = [arm for _, arm in merged_arms(cases) if arm.is_measured]
    slower = slower_than_unmerged(cases)
    if slower:
        case, arm, loses_to, ratio = min(slower, key=lambda each: each[3].median)
        losing = {(id(case), arm.identity) for case, arm, _, _ in slower}
        yield (
            f"**Where merging loses:** {len(losing)} of {len(merged)} merged arms are slower than plain or than "
            f"memory-efficient attention alone; worst is {_where(case, arm)}: {1 / ratio.median:.2f} times the time "
            f"of {loses_to}. All are listed below."
        )
    elif merged:
        yield f"No merged arm of {len(merged)} is slower than the same attention without merging."


def _limit(cases: Sequence[Case]) -> Iterator[str]:
    found = _ratios(cases, (TOME, BOTH), Case.distance)
    if found:
        reached = sum(each.median <= TARGET for _, _, each in found)
        case, arm, worst = max(found, key=lambda each: each[2].median)
        yield (
            f"Within {100 * TARGET:g} % of the free-merge limit: {reached} of {len(found)} merged arms; furthest is "
            f"{_where(case, arm)}: {change(1 + worst.median)}."
        )


def _memory(cases: Sequence[Case]) -> Iterator[str]:
    pairs = [(case, arm, case.unmerged(arm)) for case, arm in merged_arms(cases)]
    counted = [
        (arm.peak_memory_bytes / other.peak_memory_bytes, case, arm)
        for case, arm, other in pairs
        if other and arm.peak_memory_bytes and other.peak_memory_bytes
    ]
    fits = {
        case.name for case, arm, _ in pairs if arm.is_measured and _is_out_of_memory(case.find(PLAIN, arm.backend))
    }
    told = []
    if counted:
        least, case, arm = min(counted, key=lambda each: each[0])
        ends = f"{change(max(each[0] for each in counted), 0)} to {change(least, 0)}"
        told.append(f"peak {ends} against the same attention without merging, least in {_where(case, arm)}")
    if fits:
        told.append(f"merged arms fit where plain does not: {'; '.join(sorted(fits))}")
    if told:
        yield f"Memory: {'; '.join(told)}."


def _is_out_of_memory(arm: Arm | None) -> bool:
    return arm is not None and arm.status == OUT_OF_MEMORY


def _others(cases: Sequence[Case]) -> Iterator[str]:
    built_in = _ratios(cases, (TOME,), lambda case, arm: case.times_faster(arm, case.same_merge(arm, BUILT_IN)))
    tomesd = _ratios(cases, (TOME,), lambda case, arm: case.times_faster(arm, case.same_merge(arm, TOME, PYTORCH)))
    told = []
    for other, of_it in (("ppdiffusers' built-in ToMe", built_in), ("tomesd on PyTorch", tomesd)):
        for backend in (EAGER, PREDICTOR):
            found = [each for each in of_it if each[1].backend == backend]
            if found:
                slower = sum(each.median < 1 for _, _, each in found)
                told.append(f"{other}, {backend}, {_range(found)} (slower in {slower} of {len(found)})")
    if told:
        yield f"Times faster than {'; '.join(told)}."


def _predictor(cases: Sequence[Case]) -> Iterator[str]:
    found = _ratios(cases, (TOME,), lambda case, arm: case.times_faster(arm, case.same_merge(arm, TOME, EAGER)))
    found = [each for each in found if each[1].backend == PREDICTOR]
    if found:
        yield f"ToMe in the predictor against eager: {_range(found)} as fast."


def _parity(cases: Sequence[Case]) -> Iterator[str]:
    held = [(arm.parity["difference"], case, arm) for case in cases for arm in case.arms if arm.parity]
    if held:
        worst, case, arm = max(held, key=lambda each: each[0])
        yield f"Parity before timing: {len(held)} arms, largest difference {worst:.1e} ({_where(case, arm)})."
