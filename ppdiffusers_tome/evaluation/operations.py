"""Time the operations of token merging against those that ppdiffusers ships, in one process, taking turns."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle
from ppdiffusers.patches.tomesd_patch_utils import bipartite_soft_matching_random2d

from ..config import ToMeConfig
from ..errors import ToMeConfigError, ToMeError
from ..matching import match_tokens
from ..merging import merge, unmerge
from ..positions import Grid, count_removed
from .environment import describe_environment

WARM_UP = 3
LARGEST = 2**31  # numbers in one tensor: 8 GB
TOLERANCE = 1e-5  # float32 means of a handful of tokens of size 1


@dataclass(frozen=True)
class OpsCase:
    """One size to time: B images of h×w tokens with C channels, `ratio` of them merged away."""

    batch: int = 2
    height: int = 64
    width: int = 64
    channels: int = 320
    ratio: float = 0.5

    def __post_init__(self) -> None:
        ToMeConfig(ratio=self.ratio)
        for name in ("batch", "height", "width", "channels"):
            if getattr(self, name) < 1:
                raise ToMeConfigError(f"{name}={getattr(self, name)!r} is not allowed: it must be 1 or more.")
        if self.batch * self.height * self.width * self.channels > LARGEST:
            size = f"batch={self.batch}, height={self.height}, width={self.width}, channels={self.channels}"
            raise ToMeConfigError(f"{size} is not allowed: their product must be at most {LARGEST:,}.")
        if self.removed == 0:
            raise ToMeConfigError(f"ratio={self.ratio!r} merges none of {self.height}×{self.width} tokens: raise it.")

    @property
    def removed(self) -> int:
        """r: tokens per image that merge away."""
        return count_removed(Grid(self.height, self.width), ToMeConfig(ratio=self.ratio))


def time_ops(case: OpsCase, repeats: int = 20) -> dict[str, Any]:
    """Time plan, merge and unmerge, ours and the built-in's, after asserting that both compute the same.

    Args:
        case: the size.
        repeats: timed rounds, each of which runs every operation once; medians are over them. At least 1.

    Returns:
        `case`, `environment`, and `milliseconds`: for each operation the medians "ours" and "built-in" and how many
        "times faster" ours is; "merge + unmerge" sums the two within each round.

    Raises:
        ToMeConfigError: repeats is less than 1.
        ToMeError: the two disagree.
    """
    if repeats < 1:
        raise ToMeConfigError(f"repeats={repeats!r} is not allowed: it must be 1 or more.")
    grid, r = Grid(case.height, case.width), case.removed
    x = paddle.randn([case.batch, grid.tokens, case.channels])
    plan = match_tokens(x, grid, r)
    their_merge, their_unmerge = bipartite_soft_matching_random2d(x, grid.w, grid.h, 2, 2, r, no_rand=True)
    merged, their_merged = merge(x, plan), their_merge(x)
    difference = float((unmerge(merged, plan) - their_unmerge(their_merged)).abs().max())
    if difference > TOLERANCE:
        raise ToMeError(f"ours and the built-in functions differ by {difference:g} on {case}: not timing them.")

    seconds = _take_turns(
        {
            ("plan", "ours"): lambda: match_tokens(x, grid, r),
            ("plan", "built-in"): lambda: bipartite_soft_matching_random2d(x, grid.w, grid.h, 2, 2, r, no_rand=True),
            ("merge", "ours"): lambda: merge(x, plan),
            ("merge", "built-in"): lambda: their_merge(x),
            ("unmerge", "ours"): lambda: unmerge(merged, plan),
            ("unmerge", "built-in"): lambda: their_unmerge(their_merged),
        },
        repeats,
    )
    for who in ("ours", "built-in"):
        pairs = zip(seconds["merge", who], seconds["unmerge", who], strict=True)
        seconds["merge + unmerge", who] = [a + b for a, b in pairs]
    table: dict[str, dict[str, float]] = {}
    for operation in ("plan", "merge", "unmerge", "merge + unmerge"):
        ours, theirs = (1e3 * statistics.median(seconds[operation, who]) for who in ("ours", "built-in"))
        table[operation] = {"ours": ours, "built-in": theirs, "times faster": theirs / ours}
    return {
        "case": {**vars(case), "removed": r},
        "repeats": repeats,
        "difference": difference,
        "milliseconds": table,
        "environment": describe_environment(),
    }


def _take_turns(operations: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, list[float]]:
    """Seconds of each operation in each round.

    The order changes from round to round: what runs after a large operation finds the caches cold, and that must not
    always be the same one.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in operations}
    order, shuffler = list(operations), random.Random(0)
    for turn in range(WARM_UP + repeats):
        shuffler.shuffle(order)
        for name in order:
            _wait()
            start = time.perf_counter()
            result = operations[name]()
            _wait()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
            del result
    return seconds


def _wait() -> None:
    """Let a GPU finish what it was given; the CPU computes at once."""
    if paddle.get_device() != "cpu":
        paddle.device.synchronize()


def format_ops(result: dict[str, Any]) -> str:
    """The result of `time_ops` as a text table."""
    case = result["case"]
    lines = [
        "B={batch}, {height}×{width} tokens, C={channels}, ratio {ratio} (r={removed})".format(**case)
        + f"; medians of {result['repeats']} rounds, milliseconds; largest difference {result['difference']:.1e}",
        f"{'operation':<16} {'ours':>9} {'built-in':>9} {'times faster':>13}",
    ]
    for operation, row in result["milliseconds"].items():
        lines.append(f"{operation:<16} {row['ours']:>9.2f} {row['built-in']:>9.2f} {row['times faster']:>12.1f}×")
    return "\n".join(lines)
