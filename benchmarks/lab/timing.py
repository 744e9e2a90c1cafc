"""Time arms in turns, and summarise by median and quartiles."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from ppdiffusers_tome.comparison.clock import now, order_of_round

Name = TypeVar("Name")


class Quartiles(NamedTuple):
    """A median between its lower and upper quartile."""

    median: float
    low: float
    high: float


def quartiles(values: Iterable[float]) -> Quartiles:
    """Median and quartiles, linear between neighbours as `np.quantile`, which gives NaN beside infinite values.

    The PSNR of equal images is infinite.
    """
    ordered = sorted(values)

    def at(share: float) -> float:
        below, part = divmod(share * (len(ordered) - 1), 1)
        low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
        return low if part == 0 or low == high or math.isinf(low) else low + (high - low) * part

    return Quartiles(at(0.5), at(0.25), at(0.75))


def seconds_of(run: Callable[[], Any]) -> float:
    """How long a call takes, its work on the device included."""
    start = now()
    result = run()  # held until the clock has been read: freeing it is not part of the call
    seconds = now() - start
    del result
    return seconds


def time_in_turns(arms: Mapping[Name, Callable[[], Any]], rounds: int, warm_up: int) -> dict[Name, list[float]]:
    """Seconds of each arm in each round, after `warm_up` rounds that do not count."""
    seconds: dict[Name, list[float]] = {name: [] for name in arms}
    for index in range(warm_up + rounds):
        for name in order_of_round(arms, index):
            taken = seconds_of(arms[name])
            if index >= warm_up:
                seconds[name].append(taken)
    return seconds
