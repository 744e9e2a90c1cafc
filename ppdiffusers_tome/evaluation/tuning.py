"""The search of `tune`: of many ways to merge the one that reaches a goal best, by successive halving.

Few figures are measured for all candidates, and more for the better half, until few are left. Time and distance are
functions that the caller gives; each figure is on the disk as soon as it is measured.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import GRID, KV, ToMeConfig
from ..errors import ToMeConfigError
from ..positions import Grid, count_removed
from .results import check_result, make_result, read_json, write_result

SPEED_UP, PSNR, PERCEPTUAL = "speed_up", "psnr", "perceptual"
# How much worse than the goal the first, few figures of a candidate may be, relative to it.
MARGINS = {SPEED_UP: 0.05, PSNR: 0.05, PERCEPTUAL: 0.25}
FEWEST = 3  # candidates that are left at the end
TODO: dict[str, Any] = {"merge_attn": KV, "match": GRID, "blend": 0, "proportional": False, "use_rand": False}
# The methods on the frontiers of benchmarks/frontier.md, and their first ratios. They are few, because a program takes
# longer to export than to time.
KNOWN: tuple[tuple[dict[str, Any], tuple[float, ...]], ...] = (
    ({}, (0.3, 0.5, 0.75)),
    ({"sx": 4}, (0.8,)),
    ({"window": None}, (0.5,)),
    ({"merge_attn": KV}, (0.5, 0.75)),
    ({"merge_attn": KV, "window": None}, (0.75,)),
    (TODO, (0.75,)),
)
DEEPER: tuple[dict[str, Any], ...] = ({"ratio": 0.5}, {"ratio": 0.75, **TODO})  # at the next level too
SMALLEST_STEP = 0.04  # between ratios


@dataclass
class Candidate:
    """One way to merge and its figures, as far as they are measured."""

    config: ToMeConfig
    speed_ups: list[float] = field(default_factory=list)  # plain's time over its own, in each round
    psnr: list[float] = field(default_factory=list)  # of each image against the plain one, dB
    perceptual: list[float] = field(default_factory=list)  # the same, ST-LPIPS
    failure: str | None = None  # why it cannot be measured

    def median(self, measure: str) -> float:
        """The median of its speed-ups, PSNRs or perceptual distances; NaN if there are none."""
        values = {SPEED_UP: self.speed_ups, PSNR: self.psnr, PERCEPTUAL: self.perceptual}[measure]
        return statistics.median(values) if values else math.nan

    def as_json(self) -> dict[str, Any]:
        """Its fields for a file; null for the PSNR of equal images, because JSON has no infinity."""
        return {**asdict(self), "psnr": [value if math.isfinite(value) else None for value in self.psnr]}


@dataclass(frozen=True)
class Goal:
    """What the chosen candidate reaches, as `tune --speed-up`, `--psnr` and `--perceptual` name it.

    Raises:
        ToMeConfigError: the value is not a positive number, or a speed-up is not above 1.
    """

    measure: str  # SPEED_UP, PSNR or PERCEPTUAL
    value: float  # the least speed-up or PSNR, or the largest perceptual distance

    def __post_init__(self) -> None:
        least = 1 if self.measure == SPEED_UP else 0
        if not (math.isfinite(self.value) and self.value > least):
            option = f"--{self.measure.replace('_', '-')}"
            raise ToMeConfigError(f"{option} {self.value:g} is not allowed: it must be a number above {least}.")

    def __str__(self) -> str:
        words = {
            SPEED_UP: f"at least {self.value:g} times as fast as plain",
            PSNR: f"PSNR of at least {self.value:g} dB",
            PERCEPTUAL: f"perceptual distance of at most {self.value:g}",
        }
        return words[self.measure]

    def shortfall(self, candidate: Candidate) -> float:
        """How far a candidate is from the goal, relative to it; 0 if it reaches it and is faster than plain."""
        value, speed_up = candidate.median(self.measure), candidate.median(SPEED_UP)
        if candidate.failure or math.isnan(value) or math.isnan(speed_up):
            return math.inf
        excess = value / self.value - 1 if self.measure == PERCEPTUAL else 1 - value / self.value
        return max(0.0, excess) + (0.0 if speed_up > 1 else 1 - speed_up + 1e-9)

    def gain(self, candidate: Candidate) -> float:
        """What is best as large as possible once the goal is reached: the PSNR of a speed-up, else the speed-up."""
        return candidate.median(PSNR if self.measure == SPEED_UP else SPEED_UP)

    def rank(self, candidate: Candidate) -> tuple[float, float]:
        """A key that sorts candidates: those that reach the goal by gain, then the others by shortfall."""
        gain = self.gain(candidate)
        return self.shortfall(candidate), math.inf if math.isnan(gain) else -gain

    def is_fast_enough(self, candidate: Candidate) -> bool:
        """Whether a candidate that has been timed is worth its images: faster than plain, and as the goal asks."""
        least = self.value if self.measure == SPEED_UP else 1
        return not candidate.failure and candidate.median(SPEED_UP) * (1 + MARGINS[SPEED_UP]) >= least

    def is_almost_reached(self, candidate: Candidate) -> bool:
        """Whether more figures may show that a candidate reaches the goal."""
        return self.shortfall(candidate) <= MARGINS[self.measure]


# Both measure some configs and yield each with its figures: speed-ups of so many rounds, or why they cannot be
# measured; PSNR and perceptual distance of so many images.
Timer = Callable[[Sequence[ToMeConfig], int], Iterable[tuple[ToMeConfig, list[float] | str]]]
Comparer = Callable[[Sequence[ToMeConfig], int], Iterable[tuple[ToMeConfig, list[float], list[float]]]]


@dataclass(frozen=True)
class Stage:
    """How many figures each candidate of a stage has at its end."""

    rounds: int
    images: int


def make_stages(rounds: int, images: int) -> list[Stage]:
    """Three stages, the last with so many rounds and images: few figures for all, and more for the better ones."""
    few = min(rounds, max(2, rounds // 3))
    stages = [Stage(few, max(2, images // 4)), Stage(few, max(2, images // 2)), Stage(rounds, images)]
    return list(dict.fromkeys(stages))


def known_candidates(grid: Grid, levels: Sequence[int]) -> list[ToMeConfig]:
    """What `tune` compares unless it is told otherwise: the known frontier, and some of it at the next level.

    Args:
        grid: of the tokens at the shallowest level with attention; what merges nothing there is left out, and the
            whole grid is if windows cover it.
        levels: at which the model can merge, the shallowest first.
    """
    configs = [ToMeConfig(**{"ratio": ratio, **method}) for method, ratios in KNOWN for ratio in ratios]
    if (side := ToMeConfig().window) is not None and max(grid.h, grid.w) <= side:
        configs = [config for config in configs if config.window is not None]
    configs += [ToMeConfig(**method, max_downsample=level) for level in levels[1:2] for method in DEEPER]
    return [config for config in configs if count_removed(grid, config)]


class Figures:
    """Candidates with the figures that are measured, in a file that a repeated run continues.

    Args:
        path: of the file.
        configs: the candidates of this run; the file keeps the figures of others.
        belongs_to: what decides the figures; a file with another is refused.
        command: for the record.
        restart: ignore the file.

    Raises:
        ToMeConfigError: the file is damaged or belongs to something else. The message names the remedy.
    """

    def __init__(
        self, path: Path, configs: Sequence[ToMeConfig], belongs_to: dict[str, Any], command: str, restart: bool
    ) -> None:
        self._path, stored = path, dict[ToMeConfig, Candidate]()
        if path.exists() and not restart:
            stored = _read_figures(path, belongs_to)
        self.candidates = [stored.pop(config, Candidate(config)) for config in dict.fromkeys(configs)]
        self._others = list(stored.values())
        self._result = make_result("tuning", command, belongs_to=belongs_to)

    def add(self, configs: Iterable[ToMeConfig]) -> list[Candidate]:
        """Further candidates, with their figures if the file has them."""
        stored = {candidate.config: candidate for candidate in self._others}
        added = [stored.pop(config, Candidate(config)) for config in dict.fromkeys(configs)]
        self._others = list(stored.values())
        self.candidates += added
        return added

    def save(self) -> None:
        """Write the file."""
        candidates = [candidate.as_json() for candidate in (*self.candidates, *self._others)]
        write_result(self._path, {**self._result, "candidates": candidates})


def _read_figures(path: Path, belongs_to: dict[str, Any]) -> dict[ToMeConfig, Candidate]:
    remedy = "pass --restart to measure again, or choose another --output"
    try:
        result = read_json(path)
        check_result(result, "tuning", path)
        others = [name for name, value in belongs_to.items() if result["belongs_to"].get(name) != value]
        candidates = [_read_candidate(fields) for fields in result["candidates"]]
    except (ToMeConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ToMeConfigError(f"{path} has no figures that can be continued ({error}): {remedy}.") from None
    if others:
        raise ToMeConfigError(f"{path} has the figures of another {', '.join(others)}: {remedy}.")
    return {candidate.config: candidate for candidate in candidates}


def _read_candidate(fields: dict[str, Any]) -> Candidate:
    psnr = [math.inf if value is None else float(value) for value in fields["psnr"]]
    speed_ups, perceptual = ([float(value) for value in fields[name]] for name in ("speed_ups", "perceptual"))
    if not all(value > 0 for value in speed_ups) or len(psnr) != len(perceptual):
        raise ValueError(f"the figures of {fields['config']} are not complete")
    return Candidate(ToMeConfig(**fields["config"]), speed_ups, psnr, perceptual, fields["failure"])


def search(
    figures: Figures,
    goal: Goal,
    stages: Sequence[Stage],
    timer: Timer,
    comparer: Comparer,
    report: Callable[[str], None],
    refines: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Candidate | None:
    """The candidate that reaches a goal best by the figures of the last stage; None if none reaches it.

    After each stage the better half goes on, and what may still reach the goal and would then be better. If no
    finalist reaches the goal, those that seemed to and were left behind are measured too.

    Args:
        figures: the candidates; figures that they have already are not measured again.
        goal, stages: what is asked for, and how many figures each stage measures.
        timer, comparer: measure.
        report: is called with a line of text before each stage.
        refines: after the first stage, add ratios between those of the best candidates.
        clock: seconds, for the time left.
    """
    seconds, counts = {"round": 0.0, "image": 0.0}, {"round": 0, "image": 0}

    def measure(candidates: Sequence[Candidate], stage: Stage) -> list[Candidate]:
        by_config = {candidate.config: candidate for candidate in candidates}
        untimed = [c.config for c in candidates if not c.failure and len(c.speed_ups) < stage.rounds]
        start = clock()
        for config, values in timer(untimed, stage.rounds) if untimed else ():
            if isinstance(values, str):
                by_config[config].failure = values
            else:
                by_config[config].speed_ups = values
            figures.save()
        seconds["round"] += clock() - start
        counts["round"] += len(untimed) * stage.rounds
        fast = [candidate for candidate in candidates if goal.is_fast_enough(candidate)]
        undrawn = [c for c in fast if len(c.psnr) < stage.images]
        new = sum(stage.images - len(c.psnr) for c in undrawn)
        start = clock()
        for config, psnr, perceptual in comparer([c.config for c in undrawn], stage.images) if undrawn else ():
            by_config[config].psnr, by_config[config].perceptual = psnr, perceptual
            figures.save()
        seconds["image"] += clock() - start
        counts["image"] += new
        return fast

    def seconds_left(running: int, number: int) -> float | None:
        if not counts["round"] or not counts["image"]:
            return None
        each = {name: seconds[name] / counts[name] for name in seconds}
        total = 0.0
        for before, stage in zip(stages[number - 1 :], stages[number:], strict=False):
            total += running * (stage.images - before.images) * each["image"]
            total += running * stage.rounds * each["round"] * (stage.rounds > before.rounds)
            running = _count_kept(running)
        return total

    running = list(figures.candidates)
    for number, stage in enumerate(stages):
        if not running:
            break
        text = f"stage {number + 1} of {len(stages)}: {len(running)} candidates, {stage.rounds} rounds and "
        text += f"{stage.images} images of each"
        left = seconds_left(len(running), number) if number else None
        report(text if left is None else f"{text}; about {_minutes(left)} left")
        running = measure(running, stage)
        if number == 0 and refines and (between := figures.add(ratios_between(running, figures.candidates, goal))):
            report(f"stage 1 of {len(stages)}: {len(between)} candidates with other ratios")
            running += measure(between, stage)
        if number < len(stages) - 1:
            running = _better_half(running, goal)
    seen = {candidate.config for candidate in running}
    while not any(goal.shortfall(candidate) == 0 for candidate in running):
        others = [c for c in figures.candidates if c.config not in seen and goal.shortfall(c) == 0]
        if not others:
            return None
        others = sorted(others, key=goal.rank)[:2]
        report(f"no finalist reaches the goal: {len(others)} other candidates, measured as the finalists")
        seen.update(candidate.config for candidate in others)
        running += measure(others, stages[-1])
    return min(running, key=goal.rank)


def nearest(candidates: Sequence[Candidate], goal: Goal) -> Candidate | None:
    """The candidate that is nearest to the goal; None if none has the figure that the goal asks for."""
    return min((c for c in candidates if math.isfinite(goal.shortfall(c))), key=goal.rank, default=None)


def is_faster_than_plain(candidate: Candidate) -> bool:
    """Whether the median of its speed-ups is above 1."""
    return candidate.failure is None and candidate.median(SPEED_UP) > 1


def ratios_between(running: Sequence[Candidate], candidates: Sequence[Candidate], goal: Goal) -> list[ToMeConfig]:
    """The best of the running candidates, each with a ratio halfway to the next of all: nearer to plain or faster.

    A candidate that reaches the goal goes on to what it gains by that, and any other towards the goal.
    """
    configs = [candidate.config for candidate in candidates]
    found: list[ToMeConfig] = []
    for candidate in sorted(running, key=goal.rank)[:FEWEST]:
        config = candidate.config
        if config.match == GRID:  # which has one ratio
            continue
        ratio = config.constant_ratio
        ratios = [other.constant_ratio for other in configs if replace(other, ratio=0) == replace(config, ratio=0)]
        is_reached = goal.shortfall(candidate) == 0
        if is_reached == (goal.measure == SPEED_UP):
            bound = max([0.0, *(other for other in ratios if other < ratio)])
        else:
            bound = min([1 - 1 / (config.sx * config.sy), *(other for other in ratios if other > ratio)])
        between = replace(config, ratio=round((ratio + bound) / 2, 2))
        if abs(between.constant_ratio - ratio) >= SMALLEST_STEP and between not in configs + found:
            found.append(between)
    return found


def _better_half(candidates: Sequence[Candidate], goal: Goal) -> list[Candidate]:
    ordered = sorted(candidates, key=goal.rank)
    kept, others = ordered[: _count_kept(len(ordered))], ordered[_count_kept(len(ordered)) :]
    # What is just short of the goal would be better than all others if it reached it.
    return kept + [c for c in others if goal.is_almost_reached(c) and goal.gain(c) > goal.gain(ordered[0])]


def _count_kept(candidates: int) -> int:
    return min(candidates, max(FEWEST, math.ceil(candidates / 2)))


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
