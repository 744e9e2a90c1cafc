"""Search the table of turns: a number from 0 to 15 for each timestep, so that successive steps have different turns.

    python benchmarks/turns.py           # scores of the table of the package, of counting and of random numbers
    python benchmarks/turns.py search    # the 1,001 digits of a new table: twenty minutes

A method that takes turns keeps k of 16 parts, so P = 16 / k successive turns keep all of them once. Only the turn
modulo P matters then. Counting the steps is what it competes with, but a pass knows its timestep alone. For schedules
of 4 to 100 steps of the usual samplers, simulated annealing lowers the energy of the error that an image is left with.

The energy is that of the error of an image, from what was measured in the bundled models, where one step at a time
lost keys. The errors of the P turns of a step sum to nearly 0. Those of successive steps are alike, the more so the
nearer their timesteps are, so they cancel if their turns differ. A solver of several steps weighs the predictions of
earlier steps too, so each error enters with the weights that its solver gives it; steps that keep all keys have none.
What is wrong halfway counts too, because the network sees it: so errors must not only cancel at the end.

The table of the package is of the search of release 3.0, whose energy had no solvers and no plain steps. A table that
this energy found in a million tries has scores that are 0.4 dB better on average, but in images of four prompts with
DDIM, DPM-Solver++ and PNDM at guidance 7.5 it was no nearer to plain, so the first one stays.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numba
import numpy as np
from lab.markdown import table

from ppdiffusers_tome.methods.steps import PLAIN_STEPS, PLAIN_STEPS_OF_FLOWS
from ppdiffusers_tome.methods.turns import LAST_TIMESTEP, TURNS, turn_table

Schedule = Callable[[int], np.ndarray]  # number of steps → their timesteps, in the order in which they run


class Sampler(NamedTuple):
    """The schedules of a sampler, with the weight that they have in the search."""

    weight: float
    timesteps: Schedule
    is_flow: bool = False  # timesteps are shares of noise, in thousandths
    solver: str = "first"  # order, as DDIM and Euler; "2M" of DPM-Solver++, or "PLMS"


BETAS = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2  # of Stable Diffusion
SIGMAS = np.sqrt(1 / np.cumprod(1 - BETAS) - 1)
STEPS = range(4, 51)
MORE_STEPS = (60, 75, 100)
WEIGHTS = {
    10: 5,
    20: 8,
    25: 5,
    28: 4,
    30: 6,
    50: 6,
    40: 2,
    8: 2,
    4: 1.5,
    12: 1.5,
    15: 1.5,
}  # of usual numbers of steps
PARTS = (2, 4, 8, 16)  # P
WEIGHTS_OF_PARTS = (1.0, 1.0, 0.6, 0.3)
ALIKE = 330.0  # difference of two timesteps at which the correlation of their errors is 1/e
TRIES = 8_000_000  # of the search
SMALLEST = 0.2  # amplitude of an error in the image, of the largest in its schedule
HALFWAY = 0.3  # energy of what is wrong before the last step, for a factor e of the noise level
REMAINDER = 0.05  # energy that no order of turns cancels, of the sum of the steps' energies


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


USUAL = {
    "leading": Sampler(2.5, lambda n: np.arange(n)[::-1] * (1000 // n) + 1),
    "leading, PNDM": Sampler(2, lambda n: np.arange(n)[::-1] * (1000 // n) + 1, solver="PLMS"),
    "leading from 0": Sampler(1, lambda n: np.arange(n)[::-1] * (1000 // n)),
    "leading, DPM-Solver": Sampler(2.5, lambda n: np.arange(1, n + 1)[::-1] * (1000 // (n + 1)) + 1, solver="2M"),
    "trailing": Sampler(2, lambda n: np.round(np.arange(1000, 0, -1000 / n))[:n] - 1),
    "linspace": Sampler(1.5, lambda n: np.linspace(0, 999, n).round()[::-1]),
    "linspace, DPM-Solver": Sampler(1.5, lambda n: np.linspace(0, 999, n + 1).round()[::-1][:-1], solver="2M"),
    "Karras": Sampler(1.5, karras, solver="2M"),
    "Karras, Euler": Sampler(0.7, karras),
    **{f"SD3, {shift}": Sampler(weight, lambda n, s=shift: sd3(n, s), True) for shift, weight in ((3, 1), (5, 0.5))},
    **{f"flow, {shift}": Sampler(1, flow(shift), True) for shift in (3, 5)},
    **{
        f"FLUX, {shift:g}": Sampler(weight, flux(shift), True)
        for shift, weight in ((1, 1), (3, 1), (5, 0.5), (np.exp(1.15), 1))
    },
    **{f"Wan, {shift}": Sampler(1, wan(shift), True, "2M") for shift in (3, 5)},
}
OTHERS = {  # so that timesteps between those of the usual ones are not left to chance
    **{f"flow, {shift}": Sampler(0.45, flow(shift), True) for shift in (1.5, 2, 2.5, 4, 6, 7, 9, 12)},
    **{f"FLUX, e^{power}": Sampler(0.45, flux(np.exp(power)), True) for power in (0.5, 0.65, 0.8, 0.9, 1, 1.3)},
    **{f"Wan, {shift}": Sampler(0.45, wan(shift), True, "2M") for shift in (7, 8)},
    "exponential": Sampler(0.9, lambda n: of_sigmas(np.geomspace(SIGMAS[-1], SIGMAS[0], n))),
    "Karras, 0.03 to 14.6": Sampler(0.9, lambda n: karras(n, 0.03, 14.6)),
    "LCM": Sampler(0.9, lambda n: lcm(n) if n <= 25 else karras(n)),
    "leading from 2": Sampler(0.45, lambda n: np.arange(n)[::-1] * (1000 // n) + 2),
    "trailing, rounded down": Sampler(0.45, lambda n: np.floor(np.arange(n, 0, -1) * 1000 / n) - 1),
}
HELD_OUT = {  # for the scores alone
    "flow, 3.3": Sampler(1, flow(3.3), True),
    **{f"FLUX, e^{power}": Sampler(1, flux(np.exp(power)), True) for power in (0.72, 1.08)},
    "Wan, 4.2": Sampler(1, wan(4.2), True, "2M"),
    "Karras, rho 5": Sampler(1, lambda n: karras(n, 0.05, 12, 5), solver="2M"),
    "leading from 3": Sampler(1, lambda n: np.arange(n)[::-1] * (1000 // n) + 3),
    "quadratic": Sampler(1, lambda n: np.linspace(0, np.sqrt(990), n)[::-1] ** 2),
}


PLMS = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))


def weights_of_errors(sigmas: np.ndarray, solver: str) -> np.ndarray:  # [N, N], lower triangular
    """How much of the error of each step's prediction of the noise is in a latent after each step.

    Args:
        sigmas: noise levels of the N steps, and the one after the last.
        solver: of `Sampler`.

    Source: PLMS: Liu et al. 2022, arXiv:2202.09778, equation 12; 2M: Lu et al. 2022, arXiv:2211.01095, algorithm 2.
    """
    number = len(sigmas) - 1
    steps = np.log(sigmas[:-1] / sigmas[1:])  # in the logarithm of the noise level
    row, rows = np.zeros(number), np.zeros([number, number])
    for n in range(number):
        if solver == "2M":  # predicts the image, whose error is -σ times that of the noise
            half = 0.0 if n == 0 or (n == number - 1 and number < 15) else steps[n] / steps[n - 1] / 2
            shrinks = sigmas[n + 1] / sigmas[n]
            row = row * shrinks
            row[n] -= (1 - shrinks) * (1 + half) * sigmas[n]
            row[n - 1] += (1 - shrinks) * half * sigmas[n - 1]
        else:
            for back, coefficient in enumerate(PLMS[min(n, 3) if solver == "PLMS" else 0]):
                row[n - back] += (sigmas[n + 1] - sigmas[n]) * coefficient
        rows[n] = row
    return rows


def products(timesteps: np.ndarray, sampler: Sampler) -> np.ndarray:  # [N, N]
    """The energy of an image's error, as the sum of products of two steps' errors, if all turns were the same.

    Predictions lose the less, the more noise there is: what was measured in the bundled models is near
    1 / ((σ + 1/4)·(1 + σ/4)).
    """
    if sampler.is_flow:
        share = np.minimum(timesteps / 1000, 0.98)
        sigmas, end = share / (1 - share), 1e-3
    else:
        sigmas, end = np.exp(np.interp(timesteps, np.arange(1000), np.log(SIGMAS))), 0.9 * SIGMAS[0]
    sigmas = np.append(np.maximum(sigmas, 1.01 * end), end)
    sigmas[:-1] *= np.exp(-1e-4 * np.arange(len(timesteps)))  # some schedules repeat a timestep
    plain = PLAIN_STEPS_OF_FLOWS if sampler.is_flow else PLAIN_STEPS
    is_merged = np.array([not plain.count([timestep]) for timestep in timesteps])
    errors = is_merged / ((sigmas[:-1] + 0.25) * (1 + sigmas[:-1] / 4))
    rows = weights_of_errors(sigmas, sampler.solver) * errors
    lengths = HALFWAY * np.log(sigmas[:-1] / sigmas[1:])
    lengths[-1] = 1.0  # after the last step
    least = SMALLEST * np.abs(rows[-1]).max() * is_merged
    alike = np.exp(-np.abs(timesteps[:, None] - timesteps) / ALIKE)
    return ((rows * lengths[:, None]).T @ rows + np.outer(least, least)) * alike


class Schedules(NamedTuple):
    """Different schedules, each as long as the longest."""

    timesteps: np.ndarray  # [S, L] int64, whole
    steps: np.ndarray  # [S] int64
    products: np.ndarray  # [S, L, L] float32; their diagonals' sums are 1
    weights: np.ndarray  # [S], whose sum is 1


def schedules(samplers: Mapping[str, Sampler], steps: Iterable[int]) -> Schedules:
    """The schedules of these samplers and numbers of steps."""
    found: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
    weights: dict[tuple[str, tuple[int, ...]], float] = {}
    for sampler in samplers.values():
        for number in steps:
            timesteps = sampler.timesteps(number)
            whole = tuple(np.clip(np.floor(timesteps + 0.5), 0, LAST_TIMESTEP).astype(np.int64).tolist())
            energy = products(timesteps, sampler)
            if np.trace(energy) > 0:  # otherwise all steps are plain
                found.setdefault((sampler.solver, whole), energy / np.trace(energy))
                weights[sampler.solver, whole] = weights.get(
                    (sampler.solver, whole), 0.0
                ) + sampler.weight * WEIGHTS.get(number, 1)
    longest = max(len(timesteps) for _, timesteps in found)

    def padded(rows: Iterable[Any], dtype: str) -> np.ndarray:
        return np.array([np.pad(row, (0, longest - len(row))) for row in rows], dtype)

    total = np.array(list(weights.values()))
    lengths = np.array([len(timesteps) for _, timesteps in found])
    whole_timesteps = padded((timesteps for _, timesteps in found), "int64")
    return Schedules(whole_timesteps, lengths, padded(found.values(), "float32"), total / total.sum())


# The search


@numba.njit(cache=True)
def energies(turns, timesteps, steps, products, out):  # type: ignore[no-untyped-def]
    """Of one schedule and each P: the energy of the sum of all errors, of the sum of their energies."""
    total = products[:steps, :steps].sum()
    for depth in range(4):
        parts = 2 << depth
        same = 0.0
        for i in range(steps):
            for j in range(steps):
                if (turns[timesteps[i]] - turns[timesteps[j]]) & (parts - 1) == 0:
                    same += products[i, j]
        out[depth] = parts / (parts - 1) * (same - total / parts)


@numba.njit(cache=True)
def change_of(turns, t, value, timesteps, steps, products, energy, out):  # type: ignore[no-untyped-def]
    """The energies of one schedule if the turn of a timestep became another: `energy` holds those of today."""
    out[:] = energy
    for i in range(steps):
        if timesteps[i] != t:
            continue
        for j in range(steps):
            if timesteps[j] == t:
                continue
            now, then = turns[t] ^ turns[timesteps[j]], value ^ turns[timesteps[j]]
            for depth in range(4):
                parts = 2 << depth
                change = (then & (parts - 1) == 0) * 1.0 - (now & (parts - 1) == 0) * 1.0
                out[depth] += parts / (parts - 1) * 2 * change * products[i, j]


@numba.njit(cache=True)
def cost(energy, part_weights, remainder):  # type: ignore[no-untyped-def]
    """The logarithm of the energies of one schedule, weighted."""
    total = 0.0
    for depth in range(4):
        total += part_weights[depth] * np.log(max(energy[depth], 0.0) + remainder)
    return total


@numba.njit(cache=True)
def anneal(turns, learnt, begin, member, part_weights, remainder, tries, seed):  # type: ignore[no-untyped-def]
    """Change one digit after another, in place, by simulated annealing; the schedules of a digit are in `member`."""
    timesteps, lengths, products, weights = learnt
    hot, cold, out = 1e-2, 3e-5, np.zeros(4)
    x = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)  # xorshift
    now = np.zeros((len(lengths), 4))
    then = np.zeros((len(lengths), 4))
    for s in range(len(lengths)):
        energies(turns, timesteps[s], lengths[s], products[s], now[s])
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
        change = 0.0
        for j in range(begin[t], begin[t + 1]):
            s = member[j]
            change_of(turns, t, value, timesteps[s], lengths[s], products[s], now[s], out)
            then[s] = out
            change += weights[s] * (cost(out, part_weights, remainder) - cost(now[s], part_weights, remainder))
        uniform = ((x >> np.uint64(11)) & np.uint64(0xFFFFF)) / 1048576.0
        if change <= 0 or uniform < np.exp(-change / (hot * (cold / hot) ** (k / tries))):
            turns[t] = value
            for j in range(begin[t], begin[t + 1]):
                now[member[j]] = then[member[j]]


def search(tries: int, seed: int) -> np.ndarray:  # [LAST_TIMESTEP + 1] int64
    """A table of turns."""
    learnt = schedules({**USUAL, **OTHERS}, (*STEPS, *MORE_STEPS))
    member: list[list[int]] = [[] for _ in range(LAST_TIMESTEP + 1)]
    for number, (timesteps, steps) in enumerate(zip(learnt.timesteps, learnt.steps, strict=True)):
        for timestep in set(timesteps[:steps].tolist()):
            member[timestep].append(number)
    begin = np.concatenate([[0], np.cumsum([len(numbers) for numbers in member])])
    turns = np.random.RandomState(seed).randint(0, TURNS, LAST_TIMESTEP + 1)
    flat = np.array([number for numbers in member for number in numbers])
    anneal(turns, tuple(learnt), begin, flat, np.array(WEIGHTS_OF_PARTS), REMAINDER, tries, seed)
    return turns


# Scores


def scores(turns: np.ndarray | None, scored: Schedules) -> np.ndarray:  # [2, 4]
    """Mean and worst energy for each P, in dB of the sum of the steps' energies; with None of counting."""
    found = []
    for timesteps, steps, of_pairs in zip(*scored[:3], strict=True):
        out = np.zeros(len(PARTS))
        if turns is None:
            energies(np.arange(steps) % TURNS, np.arange(steps), steps, of_pairs, out)
        else:
            energies(turns, timesteps, steps, of_pairs, out)
        found.append(10 * np.log10(np.maximum(out, 0) + REMAINDER))
    return np.array([scored.weights @ found, np.max(found, axis=0)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", nargs="?", choices=("score", "search"), default="score")
    parser.add_argument("--tries", type=int, default=TRIES, help="of the search (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=2, help="of the search (default: %(default)s)")
    options = parser.parse_args()
    if options.mode == "search":
        print("".join(f"{turn:x}" for turn in search(options.tries, options.seed)))
        return
    random = np.random.RandomState(5).randint(0, TURNS, LAST_TIMESTEP + 1)
    ways = {"counting": None, "random": random, "package": turn_table()}
    head = ["turns", *(f"P={parts}: mean, worst, dB" for parts in PARTS)]
    for title, samplers, steps in (
        ("usual samplers, 4 to 50 steps", USUAL, STEPS),
        ("usual samplers, usual numbers of steps", USUAL, (10, 20, 25, 28, 30, 50)),
        ("usual samplers, 51 to 99 steps", USUAL, range(51, 100, 6)),
        ("samplers that the search did not see, 4 to 50 steps", HELD_OUT, STEPS),
    ):
        scored = schedules(samplers, steps)
        rows = [
            [name, *(f"{mean:.1f}, {worst:.1f}" for mean, worst in scores(turns, scored).T)]
            for name, turns in ways.items()
        ]
        print(f"{title}: {len(scored.steps)} schedules", *table(head, rows), sep="\n")


if __name__ == "__main__":
    main()
