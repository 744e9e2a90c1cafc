"""What `inference.measure` timed, as ratios and as a table."""

import statistics
from collections.abc import Iterator
from typing import Any

from .inference_arms import EAGER, FREE, PLAIN, PREDICTOR, TOME, TORCH


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in milliseconds, and ratios of times; each ratio is taken within a round.

    Args:
        seconds: for each arm one number per round.

    Returns:
        `milliseconds`: for each arm "median", "lowest" and "highest". All others: a ratio's "median" and quartiles.
        `speed-up`: for each merged arm, plain over merged in the same backend. `times the limit`: how many times
        longer merging takes than the free merge of its backend. `times faster than`: eager plain and PyTorch's ToMe
        over each other arm.
    """
    kinds = {name: tuple(name.split(" ", 1)) for name in seconds}
    merged = {name: backend for name, (backend, kind) in kinds.items() if kind != PLAIN}
    limits = {f"{backend} {TOME}": f"{backend} {FREE}" for backend in merged.values()}
    references = [name for name in (f"{EAGER} {PLAIN}", f"{TORCH} {TOME}") if name in seconds]
    return {
        "milliseconds": {
            name: {"median": 1e3 * statistics.median(each), "lowest": 1e3 * min(each), "highest": 1e3 * max(each)}
            for name, each in seconds.items()
        },
        "speed-up": {name: _ratio(seconds[f"{backend} {PLAIN}"], seconds[name]) for name, backend in merged.items()},
        "times the limit": {
            name: _ratio(seconds[name], seconds[limit]) for name, limit in limits.items() if limit in seconds
        },
        "times faster than": {
            reference: {name: _ratio(seconds[reference], each) for name, each in seconds.items() if name != reference}
            for reference in references
        },
    }


def _ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(slow, fast, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"median": middle, "quartile 1": low, "quartile 3": high}


def format_inference(result: dict[str, Any]) -> str:
    """The whole result as a text table."""
    return "\n".join(line for case in result["cases"] for line in [*_case_lines(case), ""]) + _not_measured(result)


def _case_lines(case: dict[str, Any]) -> Iterator[str]:
    about, times = case["case"], case["milliseconds"]
    yield (
        f"{about['name']} ({about['model']}): batch {about['batch']}, {about['tokens']} → {about['kept']} tokens; "
        f"milliseconds, medians of {case['rounds']} rounds; speed-ups with quartiles"
    )
    yield f"{'':<22}{'ms':>9}{'speed-up':>22}{'to the limit':>14}{'× eager plain':>15}{'× torch+tomesd':>16}"
    for name in sorted(times, key=_order):
        speed_up, limit = case["speed-up"].get(name), case["times the limit"].get(name)
        spread = (
            f"{speed_up['median']:.2f}× ({speed_up['quartile 1']:.2f}–{speed_up['quartile 3']:.2f})"
            if speed_up
            else ""
        )
        over = f"{limit['median'] - 1:+.1%}" if limit else ""
        than = [
            case["times faster than"].get(other, {}).get(name) for other in (f"{EAGER} {PLAIN}", f"{TORCH} {TOME}")
        ]
        faster = [f"{each['median']:.2f}×" if each else "" for each in than]
        yield f"{name:<22}{times[name]['median']:>9.1f}{spread:>22}{over:>14}{faster[0]:>15}{faster[1]:>16}"
    yield from _aims(case)


def _aims(case: dict[str, Any]) -> Iterator[str]:
    """Issue 5's two aims: reached or not."""
    ours, limit = (case["speed-up"][name]["median"] for name in (f"{PREDICTOR} {TOME}", f"{EAGER} {FREE}"))
    yield (
        f"ToMe's speed-up in the predictor, {ours:.2f}×, is {'at least' if ours >= limit else 'below'} "
        f"eager's limit, {limit:.2f}×."
    )
    against = case["times faster than"].get(f"{TORCH} {TOME}")
    if against:
        times = against[f"{PREDICTOR} {TOME}"]["median"]
        yield f"The merged predictor is {times:.2f}× as fast as PyTorch with tomesd."


def _order(name: str) -> tuple[int, int]:
    backend, kind = name.split(" ", 1)
    return [EAGER, PREDICTOR, TORCH].index(backend), [PLAIN, TOME, FREE].index(kind)


def _not_measured(result: dict[str, Any]) -> str:
    return "".join(f"{what}: not measured, {why}\n" for what, why in result["not_measured"].items())
