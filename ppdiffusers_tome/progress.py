"""Lines about the steps of a command that would be silent for minutes."""

import sys
import time

from tqdm import tqdm

SECONDS = 10.0  # between two lines


class StepLines:
    """Prints to stderr how many steps are finished, at most one line in `SECONDS`; above a bar of tqdm, if any.

    Example:
        >>> lines = StepLines()
        >>> lines.report("  step", 3, 20)  # after ten seconds: "  step 3 of 20"
    """

    def __init__(self) -> None:
        self._last = time.monotonic()

    def report(self, label: str, done: int, total: int) -> None:
        """Print a line if the last line is long enough ago."""
        if time.monotonic() - self._last >= SECONDS:
            self._last = time.monotonic()
            tqdm.write(f"{label} {done} of {total}", file=sys.stderr)
            sys.stderr.flush()
