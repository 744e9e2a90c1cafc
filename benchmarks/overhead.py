"""The cost of merging itself: the shares of a block's time that matching, merging, unmerging and sizes take."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ppdiffusers_tome import ToMeConfigError, attention, wraps
from ppdiffusers_tome.evaluation.clock import now

PARTS = ("matching", "merge", "unmerge", "sizes")
SIZES = ("_with_channels", "_narrow", "prepare_attention_mask")
TIMED: list[tuple[str, Any, str]] = [
    ("block", wraps.BlockWrap, "__call__"),
    ("matching", wraps.BlockWrap, "build_plan"),
    ("merge", attention, "merge"),
    ("unmerge", attention, "unmerge"),
    *[("sizes", attention.AttentionView, name) for name in SIZES],
]


def measure_overhead(run: Callable[[], Any]) -> dict[str, float]:
    """The shares, from 0 to 1, of the time of the blocks that merge in one pass, by PARTS.

    "merge" includes that of keys and values alone. "sizes" is what proportional attention adds: a mask, or the
    channels that replace it, but not the wider product of queries and keys. A block's time is that of its forward. On
    a GPU the host waits for the device around every timed part, so the pass takes longer than usual.

    Args:
        run: makes one pass through a model that merges, eagerly. Warm up before: a first pass is slower. Nothing else
            in this process may merge meanwhile, because the functions that all wraps share are timed.

    Raises:
        ToMeConfigError: nothing merged in the pass.
    """
    calls: list[tuple[str, float]] = []  # seconds of each part; a block ends after its parts

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            start = now()
            result = function(*args, **named)
            calls.append((part, now() - start))
            return result

        return call

    with ExitStack() as restore:
        for part, owner, name in TIMED:
            restore.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, timed(part, getattr(owner, name)))
        run()

    total: dict[str, float] = defaultdict(float)
    block: dict[str, float] = defaultdict(float)
    for part, seconds in calls:
        block[part] += seconds
        if part == "block":
            if "merge" in block:
                for name, sum_of_block in block.items():
                    total[name] += sum_of_block
            block = defaultdict(float)
    if not total:
        raise ToMeConfigError("no block merged tokens in the pass: call apply_tome(), run eagerly at a larger size.")
    return {part: total[part] / total["block"] for part in PARTS}
