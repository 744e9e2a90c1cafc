"""Tables and figures in Markdown, as the speed report writes them."""

import re
from collections.abc import Sequence

from .names import ERROR, OUT_OF_MEMORY, PYTORCH
from .results import OURS, Arm, Case, Spread, spread

NOTHING = "–"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table without the columns in which every row has nothing; no lines where there are no rows."""
    if not rows:
        return []
    shown = [nth for nth in range(len(header)) if any(row[nth] != NOTHING for row in rows)]
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line[nth].replace("|", "\\|") for nth in shown) + " |" for line in lines]


def anchor(heading: str) -> str:
    """What GitHub calls a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def short(value: float) -> str:
    """Seconds or GB: three to four digits, no unit: "0.0123", "0.456", "1.23", "45.6", "789"."""
    digits = 4 if value < 0.1 else 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def times(ratio: Spread | None) -> str:
    """ "1.23×", the median."""
    return NOTHING if ratio is None else f"{ratio.median:.2f}×"


def times_spread(ratio: Spread | None) -> str:
    """ "1.23× [1.20–1.25]", median and quartiles."""
    return NOTHING if ratio is None else f"{ratio.median:.2f}× [{ratio.low:.2f}–{ratio.high:.2f}]"


def change(ratio: float, digits: int = 1) -> str:
    """How a quantity changed to `ratio` times what it was, as "−41.9 %" or "+24.8 %": less of it has a minus."""
    percent = round(100 * (ratio - 1), digits) + 0.0  # no "-0.0"
    return f"{percent:+.{digits}f} %".replace("-", "−")


def time_cell(arm: Arm | None) -> str:
    """Median seconds; "OOM", "error" or nothing."""
    if arm is None:
        return NOTHING
    if arm.is_measured:
        return short(spread(arm.seconds).median)
    return {OUT_OF_MEMORY: "OOM", ERROR: "error"}.get(arm.status, NOTHING)


def memory_cell(arm: Arm | None) -> str:
    """Peak memory in GB; "OOM", "error" or nothing."""
    if arm is None or not arm.is_measured:
        return time_cell(arm)
    return NOTHING if arm.peak_memory_bytes is None else short(arm.peak_memory_bytes / 1e9)


def merged_arms(cases: Sequence[Case], backend: str | None = None) -> list[tuple[Case, Arm]]:
    """The arms that merge by this package, in the cases' order; of one backend, or of both of Paddle's."""
    return [
        (case, arm)
        for case in cases
        for arm in case.arms
        if arm.arm in OURS and (arm.backend == backend if backend else arm.backend != PYTORCH)
    ]


def nearest(ratios: set[float], wanted: float) -> float:
    """The measured ratio that is nearest to the wanted one."""
    return min(ratios, key=lambda ratio: (abs(ratio - wanted), ratio))


def level_words(max_downsample: int | None) -> str:
    """ ", max_downsample 2", or nothing where it was not given."""
    return "" if max_downsample is None else f", max_downsample {max_downsample}"


def unit(cases: Sequence[Case]) -> str:
    """What one measurement covers."""
    return "s for the whole batch" if cases[0].scope == "pipeline" else "s a pass"
