"""The clock of every measurement: wait for the device, take turns, summarise by median and quartiles."""

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import paddle

Name = TypeVar("Name")
NO_DIFFERENCE = "no difference"


class Quartiles(NamedTuple):
    """A median between its lower and upper quartile."""

    median: float
    low: float
    high: float


def quartiles(values: Iterable[float]) -> Quartiles:
    """Median and quartiles, linear between neighbours as in NumPy; an infinite neighbour gives infinity, never NaN."""
    ordered = sorted(values)

    def at(share: float) -> float:
        below, part = divmod(share * (len(ordered) - 1), 1)
        low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
        return low if part == 0 or low == high or math.isinf(low) else low + (high - low) * part

    return Quartiles(at(0.5), at(0.25), at(0.75))


class Gain(NamedTuple):
    """How many times as fast an arm is as plain; as text its factor, such as "1.60×", or "no difference"."""

    factor: float  # median of the ratios within the rounds: plain's time divided by the arm's
    low: float  # lower and upper quartile of the same ratios
    high: float

    @property
    def is_difference(self) -> bool:
        """Whether the rounds show one: their quartiles are on the same side of 1."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        return f"{self.factor:.2f}×" if self.is_difference else NO_DIFFERENCE


def gain(plain: Sequence[float], merged: Sequence[float]) -> Gain:
    """The gain of one arm over another, from the times of both in the same rounds.

    Factor and quartiles are of the ratios within the rounds, where noise that affects both arms cancels. So the factor
    may differ a little from the quotient of the two median times.

    Example:
        >>> str(gain([2.0, 9.0, 4.0], [1.0, 3.0, 2.5])), str(gain([1.0, 2.0, 6.0, 1.0], [2.0, 1.0, 3.0, 2.0]))
        ('2.00×', 'no difference')
    """
    return Gain(*quartiles(a / b for a, b in zip(plain, merged, strict=True)))


def now() -> float:
    """Seconds, after a GPU has finished its work; a CPU computes at once."""
    if paddle.get_device() != "cpu":
        paddle.device.synchronize()
    return time.perf_counter()


def seconds_of(run: Callable[[], Any]) -> float:
    """How long a call takes, its work on the device included."""
    start = now()
    result = run()  # held until the clock has been read: freeing it is not part of the call
    seconds = now() - start
    del result
    return seconds


def order_of_round(names: Iterable[Name], index: int) -> list[Name]:
    """The order in which a round's arms take turns: another in each round, the same whenever the round is timed.

    What runs after a large operation finds cold caches, and that must not always be the same arm.
    """
    order = list(names)
    random.Random(index).shuffle(order)
    return order


def time_in_turns(arms: Mapping[Name, Callable[[], Any]], rounds: int, warm_up: int) -> dict[Name, list[float]]:
    """Seconds of each arm in each round, after `warm_up` rounds that do not count."""
    seconds: dict[Name, list[float]] = {name: [] for name in arms}
    for index in range(warm_up + rounds):
        for name in order_of_round(arms, index):
            taken = seconds_of(arms[name])
            if index >= warm_up:
                seconds[name].append(taken)
    return seconds
