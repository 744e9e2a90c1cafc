"""Search the table of turns: a number from 0 to 15 for each timestep, so that successive steps have different turns.

    python benchmarks/turns.py           # scores of the table of the package, of counting and of random numbers
    python benchmarks/turns.py search    # the 1,001 digits of a new table: some minutes

A method that takes turns keeps k of 16 parts, so P = 16 / k successive turns keep all of them once. Only the turn
modulo P matters then, for P = 2, 4, 8 and 16. Counting the steps is best, but a pass knows its timestep alone. For the
schedules of 4 to 50 steps of the usual samplers, simulated annealing lowers how unevenly P and 2·P successive steps
have P turns, and how many in a row have the same.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping

import numba
import numpy as np
from lab.markdown import table

from ppdiffusers_tome.methods.turns import LAST_TIMESTEP, TURNS, turn_table

Schedule = Callable[[int], np.ndarray]  # number of steps → their timesteps, in the order in which they run
BETAS = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2  # of Stable Diffusion
SIGMAS = np.sqrt(1 / np.cumprod(1 - BETAS) - 1)
STEPS = range(4, 51)
WEIGHTS = {
    10: 3,
    20: 5,
    25: 3,
    28: 3,
    30: 4,
    40: 2,
    50: 4,
    8: 2,
    4: 1.5,
    15: 1.5,
    12: 1.5,
}  # of usual numbers of steps
PARTS = (2, 4, 8)  # P of the scores


def of_sigmas(sigmas: np.ndarray) -> np.ndarray:
    """The timesteps of noise levels."""
    return np.interp(np.log(sigmas), np.log(SIGMAS), np.arange(1000))


def karras(steps: int, lowest: float = SIGMAS[0], highest: float = SIGMAS[-1], rho: float = 7) -> np.ndarray:
    """Karras et al. 2022, arXiv:2206.00364, equation 5."""
    return of_sigmas(np.linspace(highest ** (1 / rho), lowest ** (1 / rho), steps) ** rho)


def shifted(share: np.ndarray, shift: float) -> np.ndarray:
    """Timesteps of a flow, shifted as in Stable Diffusion 3 (arXiv:2403.03206)."""
    return 1000 * shift * share / (1 + (shift - 1) * share)


def sd3(steps: int, shift: float) -> np.ndarray:
    """Stable Diffusion 3, whose scheduler shifts its last noise level twice."""
    return shifted(np.linspace(1, shifted(np.array(1e-3), shift) / 1000, steps), shift)


def flow(shift: float) -> Schedule:
    return lambda n: shifted(np.linspace(1, 1e-3, n), shift)


def flux(shift: float) -> Schedule:
    return lambda n: shifted(np.linspace(1, 1 / n, n), shift)


def wan(shift: float) -> Schedule:
    """UniPC, which rounds down."""
    return lambda n: np.floor(shifted(np.linspace(1, 1e-3, n + 1)[:-1], shift))


def lcm(steps: int) -> np.ndarray:
    """A latent consistency model, of at most 50 steps."""
    return (np.arange(1, 51) * 20 - 1)[::-1][np.floor(np.linspace(0, 50, steps, endpoint=False)).astype(int)]


USUAL: dict[str, tuple[float, Schedule]] = {  # the weight of each
    "leading": (2, lambda n: np.arange(n)[::-1] * (1000 // n) + 1),
    "leading from 0": (1, lambda n: np.arange(n)[::-1] * (1000 // n)),
    "leading, DPM-Solver": (1, lambda n: np.arange(1, n + 1)[::-1] * (1000 // (n + 1)) + 1),
    "trailing": (2, lambda n: np.round(np.arange(1000, 0, -1000 / n))[:n] - 1),
    "linspace": (1, lambda n: np.linspace(0, 999, n).round()[::-1]),
    "linspace, DPM-Solver": (1, lambda n: np.linspace(0, 999, n + 1).round()[::-1][:-1]),
    "Karras": (1, karras),
    **{f"SD3, {shift}": (weight, lambda n, s=shift: sd3(n, s)) for shift, weight in ((3, 1), (5, 0.5))},
    **{f"flow, {shift}": (1, flow(shift)) for shift in (3, 5)},
    **{f"FLUX, {shift:g}": (weight, flux(shift)) for shift, weight in ((1, 1), (3, 1), (5, 0.5), (np.exp(1.15), 1))},
    **{f"Wan, {shift}": (1, wan(shift)) for shift in (3, 5)},
}
OTHERS: dict[
    str, tuple[float, Schedule]
] = {  # so that timesteps between those of the usual ones are not left to chance
    **{f"flow, {shift}": (0.15, flow(shift)) for shift in (1.5, 2, 2.5, 4, 6, 7, 9, 12)},
    **{f"FLUX, e^{power}": (0.15, flux(np.exp(power))) for power in (0.5, 0.65, 0.8, 0.9, 1, 1.3)},
    **{f"Wan, {shift}": (0.15, wan(shift)) for shift in (7, 8)},
    "exponential": (0.3, lambda n: of_sigmas(np.geomspace(SIGMAS[-1], SIGMAS[0], n))),
    "Karras, 0.03 to 14.6": (0.3, lambda n: karras(n, 0.03, 14.6)),
    "LCM": (0.3, lambda n: lcm(n) if n <= 25 else karras(n)),
    "leading from 2": (0.15, lambda n: np.arange(n)[::-1] * (1000 // n) + 2),
    "trailing, rounded down": (0.15, lambda n: np.floor(np.arange(n, 0, -1) * 1000 / n) - 1),
}
HELD_OUT: dict[str, tuple[float, Schedule]] = {  # for the scores alone
    "flow, 3.3": (1, flow(3.3)),
    **{f"FLUX, e^{power}": (1, flux(np.exp(power))) for power in (0.72, 1.08)},
    "Wan, 4.2": (1, wan(4.2)),
    "Karras, rho 5": (1, lambda n: karras(n, 0.05, 12, 5)),
    "leading from 3": (1, lambda n: np.arange(n)[::-1] * (1000 // n) + 3),
    "quadratic": (1, lambda n: np.linspace(0, np.sqrt(990), n)[::-1] ** 2),
}


def schedules(families: Mapping[str, tuple[float, Schedule]]) -> tuple[list[np.ndarray], np.ndarray]:
    """The whole timesteps of each schedule, each once, and their weights, whose sum is 1."""
    found: dict[tuple[int, ...], float] = {}
    for weight, timesteps in families.values():
        for steps in STEPS:
            whole = np.clip(np.floor(timesteps(steps) + 0.5), 0, LAST_TIMESTEP).astype(np.int64)
            key = tuple(whole.tolist())
            found[key] = found.get(key, 0.0) + weight * WEIGHTS.get(steps, 1)
    weights = np.array(list(found.values()))
    return [np.array(timesteps) for timesteps in found], weights / weights.sum()


# The search


@numba.njit(cache=True)
def cost(turns, timesteps, steps, part_weights, run_weight, square):  # type: ignore[no-untyped-def]
    """How unevenly one schedule has its turns: 0 for counting."""
    total, counts = 0.0, np.zeros(16, np.int64)
    for depth in range(4):
        parts = 2 << depth
        added, windows = 0.0, 0
        for multiple in range(1, 3):
            width = parts * multiple
            if width > steps:
                continue
            counts[:parts] = 0
            squares = 0
            for i in range(steps):
                turn = turns[timesteps[i]] & (parts - 1)
                squares += 2 * counts[turn] + 1
                counts[turn] += 1
                if i >= width:
                    first = turns[timesteps[i - width]] & (parts - 1)
                    squares -= 2 * counts[first] - 1
                    counts[first] -= 1
                if i >= width - 1:
                    added += squares / width - multiple
                    windows += 1
        if windows:
            uneven = added / windows
            total += part_weights[depth] * (uneven + square * uneven * uneven)
        run = longest = 1
        for i in range(1, steps):
            same = (turns[timesteps[i]] & (parts - 1)) == (turns[timesteps[i - 1]] & (parts - 1))
            run = run + 1 if same else 1
            longest = max(longest, run)
        total += run_weight * part_weights[depth] * (longest - 1)
    return total


@numba.njit(cache=True)
def anneal(turns, timesteps, lengths, weights, begin, member, tries, seed):  # type: ignore[no-untyped-def]
    """Change one digit after another, in place, by simulated annealing; the schedules of a digit are in `member`."""
    part_weights, run_weight, square, hot, cold = np.array([1.0, 1.0, 1.0, 0.4]), 0.08, 0.5, 1e-2, 3e-5
    x = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)  # xorshift
    costs, new = np.zeros(len(lengths)), np.zeros(len(lengths))
    for s in range(len(lengths)):
        costs[s] = weights[s] * cost(turns, timesteps[s], lengths[s], part_weights, run_weight, square)
    used, count = np.zeros(len(turns), np.int64), 0
    for t in range(len(turns)):
        if begin[t + 1] > begin[t]:
            used[count] = t
            count += 1
    for k in range(tries):
        x ^= x << np.uint64(13)
        x ^= x >> np.uint64(7)
        x ^= x << np.uint64(17)
        t, r = used[(x >> np.uint64(33)) % np.uint64(count)], x & np.uint64(15)
        before = turns[t]
        flips = (x >> np.uint64(4)) & np.uint64(1)
        value = before ^ np.int64(np.uint64(1) << (r & np.uint64(3))) if flips else np.int64(r)
        if value == before:
            continue
        turns[t] = value
        change = 0.0
        for j in range(begin[t], begin[t + 1]):
            s = member[j]
            new[s] = weights[s] * cost(turns, timesteps[s], lengths[s], part_weights, run_weight, square)
            change += new[s] - costs[s]
        uniform = ((x >> np.uint64(11)) & np.uint64(0xFFFFF)) / 1048576.0
        if change <= 0 or uniform < np.exp(-change / (hot * (cold / hot) ** (k / tries))):
            for j in range(begin[t], begin[t + 1]):
                costs[member[j]] = new[member[j]]
        else:
            turns[t] = before


def search(tries: int, seed: int) -> np.ndarray:  # [LAST_TIMESTEP + 1] int64
    """A table of turns."""
    learnt, weights = schedules({**USUAL, **OTHERS})
    timesteps = np.zeros((len(learnt), max(map(len, learnt))), np.int64)
    member: list[list[int]] = [[] for _ in range(LAST_TIMESTEP + 1)]
    for number, schedule in enumerate(learnt):
        timesteps[number, : len(schedule)] = schedule
        for timestep in set(schedule.tolist()):
            member[timestep].append(number)
    begin = np.concatenate([[0], np.cumsum([len(numbers) for numbers in member])])
    turns = np.random.RandomState(seed).randint(0, TURNS, LAST_TIMESTEP + 1)
    lengths = np.array([len(schedule) for schedule in learnt])
    flat = np.array([number for numbers in member for number in numbers])
    anneal(turns, timesteps, lengths, weights, begin, flat, tries, seed)
    return turns


# Scores


def scores(turns: np.ndarray, parts: int) -> tuple[int, float]:
    """Of the turns of one schedule: the longest run of one part, and how unevenly P and 2·P steps have P parts."""
    own = turns % parts
    changes = np.flatnonzero(np.diff(own)) + 1
    longest = int(np.diff([0, *changes, len(own)]).max())
    uneven = [
        ((np.bincount(own[begin : begin + width], minlength=parts) - width / parts) ** 2).sum() / width
        for width in (parts, 2 * parts)
        for begin in range(len(own) - width + 1)
    ]
    return longest, float(np.mean(uneven)) if uneven else 0.0


def row(name: str, of_schedule: Callable[[np.ndarray], np.ndarray], families: Iterable[np.ndarray]) -> list[str]:
    """The scores of a way to choose turns: for each P worst and mean run, mean and worst unevenness."""
    cells = [name]
    for parts in PARTS:
        runs, uneven = zip(*(scores(of_schedule(schedule), parts) for schedule in families), strict=True)
        cells.append(f"{max(runs)}, {np.mean(runs):.2f}; {np.mean(uneven):.3f}, {max(uneven):.2f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", nargs="?", choices=("score", "search"), default="score")
    parser.add_argument("--tries", type=int, default=4_000_000, help="of the search (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the search (default: %(default)s)")
    options = parser.parse_args()
    if options.mode == "search":
        print("".join(f"{turn:x}" for turn in search(options.tries, options.seed)))
        return
    package = turn_table().numpy()
    random = np.random.RandomState(5).randint(0, TURNS, LAST_TIMESTEP + 1)
    head = ["turns", *(f"P={parts}: runs worst, mean; uneven mean, worst" for parts in PARTS)]
    for title, families in (("usual schedules", USUAL), ("schedules that the search did not see", HELD_OUT)):
        listed, _ = schedules(families)
        ways = {
            "counting": lambda s: np.arange(len(s)),
            "random": lambda s: random[s],
            "package": lambda s: package[s],
        }
        print(
            f"{title} of 4 to 50 steps: {len(listed)}",
            *table(head, [row(*way, listed) for way in ways.items()]),
            sep="\n",
        )


if __name__ == "__main__":
    main()
