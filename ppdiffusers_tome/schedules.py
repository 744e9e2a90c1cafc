"""Ratios that change in the course of denoising."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeAlias

from .errors import ToMeConfigError

# Pairs (share of denoising left, ratio from there on), from the start of denoising (1) towards its end (0).
Schedule: TypeAlias = tuple[tuple[float, float], ...]


def is_schedule(ratio: Any) -> bool:
    """Whether an argument is a schedule, as a mapping or as pairs, rather than one ratio or several."""
    return isinstance(ratio, Mapping) or (
        isinstance(ratio, (tuple, list)) and any(isinstance(pair, (tuple, list)) for pair in ratio)
    )


def make_schedule(pairs: Any, check: Callable[[Any], float]) -> float | Schedule:
    """A schedule from a mapping or pairs; a number if its ratio never changes.

    Args:
        pairs: {share: ratio} or pairs of them: 0 < share <= 1, one of them 1.
        check: returns a ratio as a float, or raises.

    Raises:
        ToMeConfigError: a share is not allowed or missing, or `check` raises.
    """
    items = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in items):
        raise ToMeConfigError(f"ratio={pairs!r:.200} is not allowed: a schedule is a mapping of shares to ratios.")
    shares = [share for share, _ in items]
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 < float(share) <= 1:
            raise ToMeConfigError(
                f"ratio={pairs!r:.200} is not allowed: {share!r:.50} is not a share: shares go from 1, the start "
                "of denoising, towards 0, its end."
            )
    if 1 not in shares or len({*shares}) < len(shares):
        raise ToMeConfigError(
            f"ratio={pairs!r:.200} is not allowed: a schedule starts at share 1, and has each share once."
        )
    schedule = tuple(sorted(((float(share), check(ratio)) for share, ratio in items), reverse=True))
    return schedule if len({ratio for _, ratio in schedule}) > 1 else schedule[0][1]


def ratio_at(ratio: float | Schedule, share: float) -> float:
    """The ratio where `share` of denoising is left: that of the smallest share in the schedule from it up."""
    if not isinstance(ratio, tuple):
        return ratio
    return next((value for start, value in reversed(ratio) if share <= start), ratio[0][1])
