"""The search of `tune`: it finds the way to merge that reaches a goal best, by successive halving.

It screens all candidates with few figures, then measures more for the better half, until few are left. The caller's
functions measure time and distance. The search is a function of the figures, so a repeated search decides the same.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...attach.placement import tokens_kept
from ...config import ToMeConfig
from ...errors import ToMeConfigError
from ...grid import Grid
from ...methods import METHODS

SPEED_UP, PSNR, PERCEPTUAL = "speed_up", "psnr", "perceptual"
# How much worse than the goal the first, few figures of a candidate may be, relative to it.
MARGINS = {SPEED_UP: 0.05, PSNR: 0.05, PERCEPTUAL: 0.25}
MIN_FINALISTS = 3
# The methods on the frontiers of benchmarks/alternatives.md, and their first ratios. They are few,
# because a program takes longer to export than to time.
KNOWN: tuple[tuple[dict[str, Any], tuple[float, ...]], ...] = (
    ({}, (0.3, 0.5, 0.75)),
    ({"sx": 4}, (0.8,)),
    ({"window": None}, (0.5,)),
    ({"method": "kv"}, (0.5, 0.75)),
    ({"method": "kv", "window": None}, (0.75,)),
    ({"method": "todo"}, (0.75,)),
)
DEEPER: tuple[dict[str, Any], ...] = ({"ratio": 0.5}, {"method": "todo"})  # at the next level too
MIN_STEP = 0.04  # between ratios


@dataclass
class Candidate:
    """One way to merge and its figures, as far as they are measured."""

    config: ToMeConfig
    speed_up: list[float] = field(default_factory=list)  # plain's time over its own, in each round
    psnr: list[float] = field(default_factory=list)  # each image against the plain one, dB
    perceptual: list[float] = field(default_factory=list)  # the same, ST-LPIPS
    failure: str | None = None  # why it cannot be measured

    def median(self, measure: str) -> float:
        """The median of its SPEED_UP, PSNR or PERCEPTUAL; NaN if there are no figures."""
        values = getattr(self, measure)
        return statistics.median(values) if values else math.nan


@dataclass(frozen=True)
class Goal:
    """What the chosen candidate reaches, as `tune --speed-up`, `--psnr` and `--perceptual` name it.

    Raises:
        ToMeConfigError: the value is not a positive number, or a speed-up is not above 1.
    """

    measure: str  # SPEED_UP, PSNR or PERCEPTUAL
    value: float  # the smallest speed-up or PSNR, or the largest perceptual distance

    def __post_init__(self) -> None:
        minimum = 1 if self.measure == SPEED_UP else 0
        if not (math.isfinite(self.value) and self.value > minimum):
            option = f"--{self.measure.replace('_', '-')}"
            raise ToMeConfigError(f"{option} {self.value:g} is not allowed: it must be a number above {minimum}.")

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
        """By what candidates that reach the goal compare, more is better: their PSNR for a speed-up, else speed-up."""
        return candidate.median(PSNR if self.measure == SPEED_UP else SPEED_UP)

    def rank(self, candidate: Candidate) -> tuple[float, float]:
        """A key that sorts candidates: those that reach the goal by gain, then the others by shortfall."""
        gain = self.gain(candidate)
        return self.shortfall(candidate), math.inf if math.isnan(gain) else -gain

    def is_fast_enough(self, candidate: Candidate) -> bool:
        """Whether a candidate that has been timed is worth its images: faster than plain, and as the goal asks."""
        minimum = self.value if self.measure == SPEED_UP else 1
        return not candidate.failure and candidate.median(SPEED_UP) * (1 + MARGINS[SPEED_UP]) >= minimum


Measure = Callable[[Sequence[Candidate], int], None]  # sets so many figures of each candidate


@dataclass(frozen=True)
class Stage:
    """How many figures each candidate of a stage has at its end."""

    rounds: int
    images: int


def make_stages(rounds: int, images: int) -> list[Stage]:
    """Three stages, the last with so many rounds and images, which only finalists get."""
    few = min(rounds, max(2, rounds // 3))
    stages = [Stage(few, max(2, images // 4)), Stage(few, max(2, images // 2)), Stage(rounds, images)]
    return list(dict.fromkeys(stages))


def known_candidates(grid: Grid, levels: Sequence[int]) -> list[ToMeConfig]:
    """What `tune` compares by default: the known frontier, and some of it at the next level.

    Args:
        grid: of the tokens at the shallowest level with attention; what merges nothing there is left out, and the
            whole grid is if windows cover it.
        levels: at which the model can merge, the shallowest first.
    """
    configs = [ToMeConfig(**{"ratio": ratio, **method}) for method, ratios in KNOWN for ratio in ratios]
    if (side := ToMeConfig().window) is not None and max(grid.h, grid.w) <= side:
        configs = [config for config in configs if config.window is not None]
    configs += [ToMeConfig(**{**method, "max_downsample": level}) for level in levels[1:2] for method in DEEPER]
    return [config for config in configs if tokens_kept(config, grid).keys < grid.tokens]


def search(
    configs: Sequence[ToMeConfig],
    goal: Goal,
    stages: Sequence[Stage],
    time: Measure,
    compare: Measure,
    report: Callable[[str], None],
    refines: bool = False,
) -> tuple[Candidate | None, list[Candidate]]:
    """The candidate that reaches a goal best by the figures of the last stage, None if none reaches it; and all.

    After each stage the better half goes on, and what may still reach the goal and would then be better. If no
    finalist reaches the goal, candidates of earlier stages that reached it are measured too.

    Args:
        configs: of the candidates.
        goal, stages: what is asked for, and how many figures each stage measures.
        time, compare: set the speed-ups of so many rounds, or the failure; and both distances of so many images.
        report: is called with a line of text before each stage.
        refines: after the first stage, add ratios between those of the best candidates.
    """

    def measure(candidates: Sequence[Candidate], stage: Stage) -> list[Candidate]:
        time([c for c in candidates if not c.failure and len(c.speed_up) < stage.rounds], stage.rounds)
        fast = [candidate for candidate in candidates if goal.is_fast_enough(candidate)]
        if missing := [c for c in fast if len(c.psnr) < stage.images]:
            compare(missing, stage.images)
        return fast

    candidates = [Candidate(config) for config in dict.fromkeys(configs)]
    running = list(candidates)
    for number, stage in enumerate(stages, 1):
        if not running:
            break
        of_each = f"{stage.rounds} rounds and {stage.images} images of each"
        report(f"stage {number} of {len(stages)}: {len(running)} candidates, {of_each}")
        running = measure(running, stage)
        if number == 1 and refines and (configs := ratios_between(running, candidates, goal)):
            report(f"stage 1 of {len(stages)}: {len(configs)} candidates with other ratios")
            between = [Candidate(config) for config in configs]
            candidates += between
            running += measure(between, stage)
        if number < len(stages):
            running = _better_half(running, goal)
    seen = {candidate.config for candidate in running}
    while not any(goal.shortfall(candidate) == 0 for candidate in running):
        others = [c for c in candidates if c.config not in seen and goal.shortfall(c) == 0]
        if not others:
            return None, candidates
        others = sorted(others, key=goal.rank)[:2]
        report(f"no finalist reaches the goal: {len(others)} other candidates, measured as the finalists")
        seen.update(candidate.config for candidate in others)
        running += measure(others, stages[-1])
    return min(running, key=goal.rank), candidates


def nearest(candidates: Sequence[Candidate], goal: Goal) -> Candidate | None:
    """The candidate that is nearest to the goal; None if none has the figure that the goal asks for."""
    return min((c for c in candidates if math.isfinite(goal.shortfall(c))), key=goal.rank, default=None)


def ratios_between(running: Sequence[Candidate], candidates: Sequence[Candidate], goal: Goal) -> list[ToMeConfig]:
    """The best of the running candidates, each with a ratio halfway to the next of all: nearer to plain or faster.

    A candidate that reaches the goal goes on to what it gains by that, and any other towards the goal.
    """
    configs = [candidate.config for candidate in candidates]
    between: list[ToMeConfig] = []
    for candidate in sorted(running, key=goal.rank)[:MIN_FINALISTS]:
        config = candidate.config
        ratio, largest = config.ratio, 1 - 1 / (config.sx * config.sy)
        ratios = [other.ratio for other in configs if replace(other, ratio=0) == replace(config, ratio=0)]
        is_reached = goal.shortfall(candidate) == 0
        if is_reached == (goal.measure == SPEED_UP):
            bound = max([0.0, *(other for other in ratios if other < ratio)])
        else:
            bound = min([largest, *(other for other in ratios if other > ratio)])
        between_both = round((ratio + bound) / 2, 2)
        if METHODS[config.method].ratio_error(between_both, largest):
            continue
        halfway = replace(config, ratio=between_both)
        if abs(halfway.ratio - ratio) >= MIN_STEP and halfway not in configs + between:
            between.append(halfway)
    return between


def _better_half(candidates: Sequence[Candidate], goal: Goal) -> list[Candidate]:
    ordered = sorted(candidates, key=goal.rank)
    half = max(MIN_FINALISTS, math.ceil(len(ordered) / 2))
    # What is just short of the goal would be better than all others if it reached it.
    almost = [c for c in ordered[half:] if goal.shortfall(c) <= MARGINS[goal.measure]]
    return ordered[:half] + [c for c in almost if goal.gain(c) > goal.gain(ordered[0])]
