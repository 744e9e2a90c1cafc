"""Time the operations of token merging, of every method and of the functions that ppdiffusers ships, taking turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import paddle
from ppdiffusers.patches.tomesd_patch_utils import bipartite_soft_matching_random2d

from ..config import GRID, SIMILARITY, ToMeConfig
from ..errors import ToMeConfigError, ToMeError
from ..matching import MergePlan, match_cells, match_tokens
from ..merging import merge, unmerge
from ..positions import Grid, count_pairs, count_removed
from .clock import quartiles, ratio_within_rounds, time_in_turns
from .markdown import table

GLOBAL, BUILT_IN = "global", "built-in"  # tomesd's method, ours and theirs
METHODS: dict[str, dict[str, Any]] = {
    GLOBAL: {},
    "windows of 8": {"window": 8},
    "windows of 16": {"window": 16},
    "2×2 cells": {"match": GRID, "ratio": 0.75},
    "2×2 cells, blend 0": {"match": GRID, "ratio": 0.75, "blend": 0.0},
}
OPERATIONS = ("plan", "merge", "unmerge", "merge + unmerge")
SIDES = (64, 96, 128, 256, 512)  # tokens along each side of a grid: images of 512 to 4096 px in Stable Diffusion
WARM_UP = 3
GROWTH_ROUNDS = 5  # at most: the global plan of a large grid takes many seconds
LARGEST = 2**31  # numbers in one tensor: 8 GB
LARGEST_SCORES = 8.0  # GB
TOLERANCE = 1e-5  # float32 means of a few tokens of size 1


@dataclass(frozen=True)
class OpsCase:
    """The size to time: B images of h×w tokens with C channels, of which the share `ratio` is merged."""

    batch: int = 2
    height: int = 64
    width: int = 64
    channels: int = 320
    ratio: float = 0.5

    def __post_init__(self) -> None:
        for name in ("batch", "height", "width", "channels"):
            if getattr(self, name) < 1:
                raise ToMeConfigError(f"{name}={getattr(self, name)!r} is not allowed: it must be 1 or more.")
        if self.batch * self.height * self.width * self.channels > LARGEST:
            raise ToMeConfigError(f"{self} has too large sizes: their product must be at most {LARGEST:,}.")
        if count_removed(self.grid, self.configs()[GLOBAL]) == 0:
            raise ToMeConfigError(f"ratio={self.ratio!r} merges none of {self.height}×{self.width} tokens: raise it.")

    @property
    def grid(self) -> Grid:
        """h×w."""
        return Grid(self.height, self.width)

    def configs(self) -> dict[str, ToMeConfig]:
        """The config of each method. Without matching, cells decide the ratio."""
        base = {"ratio": self.ratio, "window": None, "match": SIMILARITY}
        return {name: ToMeConfig(**{**base, **settings}) for name, settings in METHODS.items()}

    def tokens(self) -> paddle.Tensor:
        """Random tokens [B, N, C]."""
        return paddle.randn([self.batch, self.grid.tokens, self.channels])


def time_operations(case: OpsCase, rounds: int = 20) -> dict[str, Any]:
    """Time plan, merge and unmerge of every method, after checking that the global one equals the built-in.

    Returns:
        `case`, `rounds`, `difference` (the largest, absolute), and `methods`, the built-in last: each with its
        `method`, `ratio`, `milliseconds` (the median of each operation) and `times_faster` than the built-in (the
        median within rounds); "merge + unmerge" adds the two within each round.

    Raises:
        ToMeConfigError: rounds is less than 1.
        ToMeError: the two differ.
    """
    if rounds < 1:
        raise ToMeConfigError(f"rounds={rounds!r} is not allowed: it must be 1 or more.")
    x, grid, configs = case.tokens(), case.grid, case.configs()
    removed = count_removed(grid, configs[GLOBAL])

    def plan_built_in() -> tuple[Callable[..., Any], ...]:
        return bipartite_soft_matching_random2d(x, grid.w, grid.h, 2, 2, removed, no_rand=True)

    built_in_merge, built_in_unmerge = plan_built_in()
    merged = built_in_merge(x)
    arms: dict[tuple[str, str], Callable[[], Any]] = {
        (BUILT_IN, "plan"): plan_built_in,
        (BUILT_IN, "merge"): partial(built_in_merge, x),
        (BUILT_IN, "unmerge"): partial(built_in_unmerge, merged),
    }
    for name, config in configs.items():
        plan = _plan(x, grid, config)
        arms[name, "plan"] = partial(_plan, x, grid, config)
        arms[name, "merge"] = partial(merge, x, plan, config.blend)
        arms[name, "unmerge"] = partial(unmerge, arms[name, "merge"](), plan)
    difference = float((arms[GLOBAL, "unmerge"]() - arms[BUILT_IN, "unmerge"]()).abs().max())
    if difference > TOLERANCE:
        raise ToMeError(f"ours and the built-in functions differ by {difference:g} on {case}: they are not timed.")
    seconds = time_in_turns(arms, rounds, WARM_UP)
    methods = []
    for name in (*configs, BUILT_IN):
        row: dict[str, Any] = {"method": name, "ratio": configs[name].ratio if name in configs else case.ratio}
        row |= {"milliseconds": {}, "times_faster": {}}
        for operation in OPERATIONS:
            ours, built_in = (
                [sum(parts) for parts in zip(*(seconds[source, part] for part in operation.split(" + ")), strict=True)]
                for source in (name, BUILT_IN)
            )
            row["milliseconds"][operation] = 1e3 * quartiles(ours).median
            row["times_faster"][operation] = ratio_within_rounds(built_in, ours).median
        methods.append(row)
    return {"case": vars(case), "rounds": rounds, "difference": difference, "methods": methods}


def time_growth(case: OpsCase, sides: Sequence[int], rounds: int, limit: float = LARGEST_SCORES) -> dict[str, Any]:
    """Time the plan of each method for one image on square grids.

    Args:
        case: the channels and the ratio.
        sides: height and width of the grids, in tokens.
        rounds: at most GROWTH_ROUNDS are timed.
        limit: GB for the scores of a plan; a plan that needs more is not timed.

    Returns:
        `channels`, `rounds`, `limit_gb` and `plans`, each with `method`, `side`, `scores_gb` (in float32) and
        `milliseconds` (the median; None if it was not timed).

    Raises:
        ToMeConfigError: a side is too small or too large, or the limit is not above 0.
    """
    if not limit > 0:
        raise ToMeConfigError(f"--memory-limit {limit:g} is not allowed: it must be above 0.")
    rounds, plans = min(rounds, GROWTH_ROUNDS), []
    for grown in [replace(case, batch=1, height=side, width=side) for side in sides]:
        x, grid = grown.tokens(), grown.grid
        configs = {name: config for name, config in grown.configs().items() if config.blend == 1}
        scores = {name: _scores_gb(grid, config) for name, config in configs.items()}
        timed = {name: partial(_plan, x, grid, config) for name, config in configs.items() if scores[name] <= limit}
        medians = {name: 1e3 * quartiles(s).median for name, s in time_in_turns(timed, rounds, warm_up=1).items()}
        for name, gigabytes in scores.items():
            about = {"method": name, "side": grown.height, "scores_gb": gigabytes}
            plans.append({**about, "milliseconds": medians.get(name)})
    return {"channels": case.channels, "rounds": rounds, "limit_gb": limit, "plans": plans}


def describe_operations(result: dict[str, Any]) -> list[str]:
    """The results of `time_operations` and, as "growth", of `time_growth`, as lines of Markdown."""
    case, growth = result["case"], result["growth"]
    lines = [
        "B={batch}, {height}×{width} tokens, C={channels}, ratio {ratio}".format(**case)
        + f" (cells: 0.75); medians of {result['rounds']} rounds in milliseconds, and how many times as fast as the "
        f"built-in; the global plan agrees with it to {result['difference']:.1e}.",
        "",
        *table(["method", *OPERATIONS], [[row["method"], *_cells(row)] for row in result["methods"]]),
    ]
    plans = {(plan["method"], plan["side"]): plan for plan in growth["plans"]}
    methods, sides = (list(dict.fromkeys(key[nth] for key in plans)) for nth in (0, 1))
    if plans:
        lines += [
            "",
            f"The plan of one image alone, C={growth['channels']}, medians of {growth['rounds']} rounds in "
            f"milliseconds, and microseconds for each token. The scores of a plan may take {growth['limit_gb']:g} GB.",
            "",
            *table(
                ["tokens", *methods],
                [[f"{side}×{side}", *(_growth_cell(plans[method, side]) for method in methods)] for side in sides],
            ),
        ]
    return lines


def _cells(row: dict[str, Any]) -> list[str]:
    if row["method"] == BUILT_IN:
        return [f"{row['milliseconds'][name]:.2f}" for name in OPERATIONS]
    return [f"{row['milliseconds'][name]:.2f} ({row['times_faster'][name]:.1f}×)" for name in OPERATIONS]


def _growth_cell(plan: dict[str, Any]) -> str:
    milliseconds = plan["milliseconds"]
    if milliseconds is None:
        return f"does not fit: {plan['scores_gb']:.3g} GB"
    return f"{milliseconds:.2f} ({1e3 * milliseconds / plan['side'] ** 2:.3f})"


def _plan(x: paddle.Tensor, grid: Grid, config: ToMeConfig) -> MergePlan:
    if config.match == GRID:
        return match_cells(x, grid)
    return match_tokens(x, grid, count_removed(grid, config), window=config.window)


def _scores_gb(grid: Grid, config: ToMeConfig) -> float:
    return 0.0 if config.match == GRID else 4e-9 * count_pairs(grid, config)
