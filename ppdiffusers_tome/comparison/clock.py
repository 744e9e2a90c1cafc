"""The clock of every measurement: wait for the device, take turns, compare by the ratios within rounds."""

import random
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import paddle

Name = TypeVar("Name")
NO_DIFFERENCE = "no difference"


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
    ratios = [a / b for a, b in zip(plain, merged, strict=True)]
    return Gain(*np.quantile(ratios, [0.5, 0.25, 0.75]).tolist())


def now() -> float:
    """Seconds, after a GPU has finished its work; a CPU computes at once."""
    if paddle.get_device() != "cpu":
        paddle.device.synchronize()
    return time.perf_counter()


def order_of_round(names: Iterable[Name], index: int) -> list[Name]:
    """The order in which a round's arms take turns: another in each round, the same whenever the round is timed.

    What runs after a large operation finds cold caches, and that must not always be the same arm.
    """
    order = list(names)
    random.Random(index).shuffle(order)
    return order
