"""Time the operations of token merging against those that ppdiffusers ships, in one process, taking turns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from ppdiffusers.patches.tomesd_patch_utils import bipartite_soft_matching_random2d

from ..config import ToMeConfig
from ..errors import ToMeConfigError, ToMeError
from ..matching import match_tokens
from ..merging import merge, unmerge
from ..positions import Grid, count_removed
from .clock import time_in_turns

WARM_UP = 3
LARGEST = 2**31  # numbers in one tensor: 8 GB
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
        ToMeConfig(ratio=self.ratio)
        for name in ("batch", "height", "width", "channels"):
            if getattr(self, name) < 1:
                raise ToMeConfigError(f"{name}={getattr(self, name)!r} is not allowed: it must be 1 or more.")
        if self.batch * self.height * self.width * self.channels > LARGEST:
            raise ToMeConfigError(f"{self} has too large sizes: their product must be at most {LARGEST:,}.")
        if self.removed == 0:
            raise ToMeConfigError(f"ratio={self.ratio!r} merges none of {self.height}×{self.width} tokens: raise it.")

    @property
    def removed(self) -> int:
        """r: tokens per image that merge away."""
        return count_removed(Grid(self.height, self.width), ToMeConfig(ratio=self.ratio))


def time_operations(case: OpsCase, rounds: int = 20) -> dict[str, Any]:
    """Time plan, merge and unmerge, ours and the built-in's, after checking that both compute the same.

    Returns:
        `case`, `rounds`, `difference` (the largest, absolute), and `milliseconds`: for each operation the medians of
        "ours" and "built-in" and their quotient "times faster"; "merge + unmerge" adds the two within each round.

    Raises:
        ToMeConfigError: rounds is less than 1.
        ToMeError: the two differ.
    """
    if rounds < 1:
        raise ToMeConfigError(f"rounds={rounds!r} is not allowed: it must be 1 or more.")
    grid, r = Grid(case.height, case.width), case.removed
    x = paddle.randn([case.batch, grid.tokens, case.channels])

    def plan_built_in() -> tuple[Callable[..., Any], ...]:
        return bipartite_soft_matching_random2d(x, grid.w, grid.h, 2, 2, r, no_rand=True)

    plan, (built_in_merge, built_in_unmerge) = match_tokens(x, grid, r), plan_built_in()
    merged, built_in_merged = merge(x, plan), built_in_merge(x)
    difference = float((unmerge(merged, plan) - built_in_unmerge(built_in_merged)).abs().max())
    if difference > TOLERANCE:
        raise ToMeError(f"ours and the built-in functions differ by {difference:g} on {case}: they are not timed.")
    arms = {
        ("plan", "ours"): lambda: match_tokens(x, grid, r),
        ("plan", "built-in"): plan_built_in,
        ("merge", "ours"): lambda: merge(x, plan),
        ("merge", "built-in"): lambda: built_in_merge(x),
        ("unmerge", "ours"): lambda: unmerge(merged, plan),
        ("unmerge", "built-in"): lambda: built_in_unmerge(built_in_merged),
    }
    seconds = {name: np.array(values) for name, values in time_in_turns(arms, rounds, WARM_UP).items()}
    table: dict[str, dict[str, float]] = {}
    for operation in ("plan", "merge", "unmerge", "merge + unmerge"):
        ours, built_in = (
            1e3 * float(np.median(sum(seconds[part, source] for part in operation.split(" + "))))
            for source in ("ours", "built-in")
        )
        table[operation] = {"ours": ours, "built-in": built_in, "times faster": built_in / ours}
    measured = {"rounds": rounds, "difference": difference, "milliseconds": table}
    return {"case": {**vars(case), "removed": r}, **measured}


def format_operations(result: dict[str, Any]) -> str:
    """The result of `time_operations` as a text table."""
    case = result["case"]
    lines = [
        "B={batch}, {height}×{width} tokens, C={channels}, ratio {ratio} (r={removed})".format(**case)
        + f"; medians of {result['rounds']} rounds, milliseconds; largest difference {result['difference']:.1e}",
        f"{'operation':<16} {'ours':>9} {'built-in':>9} {'times faster':>13}",
    ]
    for operation, row in result["milliseconds"].items():
        lines.append(f"{operation:<16} {row['ours']:>9.2f} {row['built-in']:>9.2f} {row['times faster']:>12.1f}×")
    return "\n".join(lines)
