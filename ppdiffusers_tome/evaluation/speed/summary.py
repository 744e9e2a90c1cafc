"""A result in a few lines for the terminal; `bench report` makes the tables."""

import statistics
from collections.abc import Iterator
from typing import Any

from .names import MEASURED, PLAIN


def format_result(result: dict[str, Any]) -> str:
    """Medians, speed-ups against plain of the same backend, and peak memory, a line per arm."""
    return "\n".join(line for case in result["cases"] for line in _case_lines(case)).rstrip()


def _case_lines(case: dict[str, Any]) -> Iterator[str]:
    yield "{model}, {scope}, {size} px, batch {batch}, {dtype}: {tokens} tokens".format(**case)
    yield f"  {'arm':<34}{'kept':>7}{'seconds':>10}{'speed-up':>10}{'peak MB':>9}"
    plains = {arm["backend"]: arm["seconds"] for arm in case["arms"] if arm["arm"] == PLAIN}
    for arm in case["arms"]:
        level = f" to level {arm['max_downsample']}" if arm["max_downsample"] else ""
        name = f"{arm['backend']} {arm['arm']}" + (f" {arm['ratio']:g}{level}" if arm["ratio"] else "")
        if arm["status"] != MEASURED:
            yield f"  {name:<34}{arm['kept']:>7}  {arm['status']}: {arm['reason']}"
            continue
        plain = plains.get(arm["backend"]) or []
        ratios = [a / b for a, b in zip(plain, arm["seconds"], strict=True)] if plain else []
        faster = f"{statistics.median(ratios):.2f}×" if ratios else ""
        peak = "" if arm["peak_memory_bytes"] is None else f"{arm['peak_memory_bytes'] / 1e6:.1f}"
        yield f"  {name:<34}{arm['kept']:>7}{statistics.median(arm['seconds']):>10.4f}{faster:>10}{peak:>9}"
    yield ""
