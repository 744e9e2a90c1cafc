"""How often `clock.gain` claims a difference where there is none, and how often it finds a gain, by simulation.

    python benchmarks/gain_rule.py

Plain and one way to merge, or six, take turns as in `compare`, and their steps vary by each of NOISES. The page of
`serve` compares the steps of two images that are generated one after the other, so it has a rule of its own, which is
simulated too. Writes results/gain_rule.json: two minutes.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lab.result_files import make_result
from lab.timing import quartiles

from ppdiffusers_tome.comparison.clock import MARGIN, gain, order_of_round
from ppdiffusers_tome.comparison.option_defaults import ROUNDS
from ppdiffusers_tome.comparison.results import write_result

RESULT = Path(__file__).with_name("results") / "gain_rule.json"
RUNS = 10_000
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, ROUNDS, 12, 15, 21)  # of rounds
TIMES = (3, 5, 7, 9, 14, 19)  # of each image on the page
SPREADS = (0.01, 0.03, 0.06)  # of the logarithm of a step's time: about 1, 3 and 6 %
GAINS = (1.0, 1.1, 1.3)
SLOWER, BUSY, STAY = 1.5, 0.2, 5  # another program on the machine: its effect, its share of the time, steps at a time

Noise = Callable[[np.random.Generator, float, int], np.ndarray]  # spread, steps → logarithms of times, [RUNS, steps]


def normal(random: np.random.Generator, spread: float, steps: int) -> np.ndarray:
    """Each step varies by itself."""
    return random.normal(0, spread, (RUNS, steps))


def heavy(random: np.random.Generator, spread: float, steps: int) -> np.ndarray:
    """The same with rare steps that are far off: Student's t with two degrees of freedom."""
    return spread * random.standard_t(2, (RUNS, steps))


def drift(random: np.random.Generator, spread: float, steps: int) -> np.ndarray:
    """A shared machine that becomes up to 40 % slower or faster during the measurement, and wanders beside that."""
    trend = random.uniform(-0.4, 0.4, (RUNS, 1)) * np.linspace(0, 1, steps)
    wandering = np.cumsum(random.normal(0, 0.02, (RUNS, steps)), axis=1)
    return normal(random, spread, steps) + trend + wandering


def bursts(random: np.random.Generator, spread: float, steps: int) -> np.ndarray:
    """A shared machine on which another program runs now and then, for some steps at a time."""
    is_busy = np.empty((RUNS, steps), bool)
    now = random.random(RUNS) < BUSY
    for step in range(steps):
        is_busy[:, step] = now
        begins = BUSY / (1 - BUSY) / STAY
        now = np.where(now, random.random(RUNS) >= 1 / STAY, random.random(RUNS) < begins)
    return normal(random, spread, steps) + np.log(SLOWER) * is_busy


NOISES: dict[str, Noise] = {function.__name__: function for function in (normal, heavy, drift, bursts)}


def claims_in_turns(
    noise: Noise, random: np.random.Generator, spread: float, rounds: int, merged: int = 1
) -> dict[str, float]:
    """The share of measurements in which a difference is claimed, for each of GAINS.

    Args:
        merged: the number of arms beside plain; one claim for any of them counts.
    """
    order = [arm for index in range(rounds) for arm in order_of_round(range(merged + 1), index + 1)]  # 0 warms up
    times = np.exp(noise(random, spread, len(order)))
    plain, *others = (times[:, np.array(order) == arm] for arm in range(merged + 1))

    def share(factor: float) -> float:
        runs = zip(plain, *others, strict=True)
        return np.mean([any(gain(a, b / factor).is_difference for b in of_run) for a, *of_run in runs]).item()

    return {f"{factor}": share(factor) for factor in GAINS}


def claims_on_page(noise: Noise, random: np.random.Generator, spread: float, count: int) -> dict[str, float]:
    """The same of two images by the rule of page/measures.js. The first step of each warms up."""
    times = np.exp(noise(random, spread, 2 * (count + 1)))
    plain, merged = times[:, 1 : count + 1], times[:, count + 2 :]

    def differ(a: np.ndarray, b: np.ndarray) -> bool:
        first, second = quartiles(a), quartiles(b)
        factor = first.median / second.median
        is_near = max(factor, 1 / factor) <= MARGIN
        return not is_near and (first.low > second.high or second.low > first.high)

    def share(factor: float) -> float:
        return np.mean([differ(*pair) for pair in zip(plain, merged / factor, strict=True)]).item()

    return {f"{factor}": share(factor) for factor in GAINS}


def simulate() -> list[dict[str, Any]]:
    """The claims of each rule in each noise, spread and number of rounds or times."""
    rules: dict[str, tuple[Callable[..., dict[str, float]], tuple[int, ...]]] = {
        "compare": (claims_in_turns, COUNTS),
        "compare, six ways to merge": (partial(claims_in_turns, merged=6), (ROUNDS,)),
        "page": (claims_on_page, TIMES),
    }
    return [
        {
            "rule": rule,
            "noise": name,
            "spread": spread,
            "count": count,
            "claims": claims(noise, np.random.default_rng([count, round(1000 * spread)]), spread, count),
        }
        for rule, (claims, counts) in rules.items()
        for name, noise in NOISES.items()
        for spread in SPREADS
        for count in counts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT, help="default: %(default)s")
    output = parser.parse_args().output
    write_result(output, make_result("gain_rule", "python benchmarks/gain_rule.py", runs=RUNS, rows=simulate()))


if __name__ == "__main__":
    main()
