"""How far a measurement is, and how long it will take: passes weigh what they took before."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} passes, {elapsed} so far{postfix}"


class Progress:
    """A bar over all cases' passes, with the time left. Use as a context.

    Args:
        passes: of each case.
    """

    def __init__(self, passes: Sequence[int]) -> None:
        self._passes = list(passes)
        self._bar = tqdm(total=sum(passes), bar_format=BAR, disable=None)
        self._since: float | None = None
        self._took: list[float] = []  # seconds of the current case's passes
        self._left = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def enter(self, case: int, label: str) -> None:
        """A case begins; what is left of those before it does not take any more time."""
        self._bar.set_description(label, refresh=False)
        self._bar.update(sum(self._passes[:case]) - self._bar.n)
        self._left = sum(self._passes[case:])
        self._since, self._took = None, []

    def see(self, event: dict[str, Any]) -> None:
        """Take note of a line of the worker: each "begin" ends the pass before."""
        if event["event"] != "begin":
            return
        now = time.monotonic()
        if self._since is not None:
            self._took.append(now - self._since)
            self._left = max(self._left - 1, 0)
            self._bar.set_postfix_str(f"some {left(self._left, self._took)} left", refresh=False)
            self._bar.update(1)
        self._since = now


def left(passes: int, took: Sequence[float]) -> str:
    """The time that so many passes will take, as h:mm:ss, by the median of those before."""
    seconds = round(passes * statistics.median(took))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
