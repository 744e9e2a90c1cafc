"""The clock of every measurement: wait for the device, take turns, compare by the ratios within rounds."""

import math
import random
import time
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

import paddle

Name = TypeVar("Name")
NO_DIFFERENCE = "no difference"
TOO_FEW_ROUNDS = "too few rounds to tell"
CONFIDENCE = 0.95
MARGIN = 1.02  # a factor nearer to 1 is no difference, as on the page of `serve`
FEW_ROUNDS = 3  # from here on rounds show a difference if each of them is beyond LARGE
LARGE = 1.1


class Gain(NamedTuple):
    """How many times as fast an arm is as plain; as text its factor, such as "1.60×", or why none is claimed.

    docs/development/evaluation.md has how often the rule is wrong, and which gains it finds.
    """

    factor: float  # median of the ratios within the rounds: plain's time divided by the arm's
    low: float  # the ratios between which their true median is with CONFIDENCE; of few rounds the extremes
    high: float
    rounds: int

    @property
    def is_difference(self) -> bool:
        """Whether the rounds show a gain: the interval is on one side of 1, and the factor is beyond MARGIN.

        Rounds that are too few for an interval must all be beyond LARGE, on the same side.
        """
        bound = LARGE if _left_out(self.rounds) is None else 1
        is_beyond = self.low > bound or self.high < 1 / bound
        return self.rounds >= FEW_ROUNDS and is_beyond and max(self.factor, 1 / self.factor) > MARGIN

    def __str__(self) -> str:
        if self.is_difference:
            return f"{self.factor:.2f}×"
        return TOO_FEW_ROUNDS if _left_out(self.rounds) is None else NO_DIFFERENCE


def gain(plain: Sequence[float], merged: Sequence[float]) -> Gain:
    """The gain of an arm over a baseline arm, from the times of both in the same rounds.

    It is of the ratios within the rounds, where noise that affects both arms cancels. So the factor may differ a
    little from the quotient of the two median times.

    Example:
        >>> str(gain([2.0] * 9, [1.0] * 8 + [3.0])), str(gain([2.0] * 9, [1.0] * 7 + [3.0] * 2))
        ('2.00×', 'no difference')
        >>> str(gain([2.0] * 3, [1.0] * 3)), str(gain([2.0] * 3, [1.9] * 3)), str(gain([2.0], [1.0]))
        ('2.00×', 'too few rounds to tell', 'too few rounds to tell')
    """
    ratios = sorted(a / b for a, b in zip(plain, merged, strict=True))
    left_out = _left_out(len(ratios)) or 0
    return Gain(median(ratios), ratios[left_out], ratios[-1 - left_out], len(ratios))


def _left_out(rounds: int) -> int | None:
    """How many ratios an interval leaves out at each end, so that it has the true median with CONFIDENCE.

    It is that of the sign test, which holds whatever the noise is. None if there is no such interval: below 6 rounds.
    """
    count, chance = 0, 2 * 0.5**rounds  # of all ratios on the same side of the median
    while chance <= 1 - CONFIDENCE:
        count += 1
        chance += 2 * math.comb(rounds, count) * 0.5**rounds
    return count - 1 if count else None


def now() -> float:
    """Seconds, after a GPU has finished its work; a CPU computes at once."""
    if paddle.get_device() != "cpu":
        paddle.device.synchronize()
    return time.perf_counter()


def order_of_round(names: Iterable[Name], index: int) -> list[Name]:
    """The order in which a round's arms take turns: the same whenever the round is timed.

    What runs after a large operation finds cold caches, and that must not always be the same arm: so the order is
    random. On a machine that becomes slower the later arm looks slow: so each second round has the reverse order.
    """
    order = list(names)
    random.Random(f"rounds {index // 2}").shuffle(order)  # numbers that follow each other have similar orders
    return order[::-1] if index % 2 else order
