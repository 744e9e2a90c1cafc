"""The goal of a comparison, the settings that are tried for it, and which of them reaches it best."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ppdiffusers import DiffusionPipeline

from ..errors import ParameterError
from ..methods import ToMeConfig
from ..run.sizes import Size
from .arms import Figures, summary_at
from .option_defaults import KNOWN_RATIOS

# The settings that none beats in both time and distance from plain: benchmarks/alternatives.md.
KNOWN = tuple(ToMeConfig(ratio, "interlace") for ratio in KNOWN_RATIOS)


def known_settings(methods: Sequence[str]) -> list[ToMeConfig]:
    """The known settings of some methods, by default of all; a method that has none is tried with its defaults."""
    if not methods:
        return list(KNOWN)
    known = {name: [config for config in KNOWN if config.method == name] for name in methods}
    return [config for name in known for config in known[name] or [ToMeConfig(method=name)]]


def merges_at(pipe: DiffusionPipeline, config: ToMeConfig, size: Size) -> bool:
    """Whether a config merges in images of a size.

    Raises:
        NoMergeableLayerError: it merges nothing at any size.
    """
    return any(block.kept_keys < block.grid.tokens for block in summary_at(pipe, config, size).blocks)


@dataclass(frozen=True)
class Goal:
    """What the chosen settings reach, and that they are faster than plain.

    Args:
        measure: "gain", at least `value` times as fast as plain and nearest to it, or "psnr", at least `value` dB from
            plain in the median image, and fastest.
        value: a finite number, above 1 for a gain and above 0 for a PSNR.
    """

    measure: str
    value: float

    def __str__(self) -> str:
        if self.measure == "gain":
            return f"at least {self.value:g} times as fast as plain"
        return f"a median PSNR of at least {self.value:g} dB"

    def is_reached(self, figures: Figures) -> bool:
        """Whether these figures reach the goal. Those without a gain are of plain, or their rounds show none."""
        return figures.gain is not None and figures.gain > 1 and getattr(figures, self.measure) >= self.value

    def choose(self, rows: Sequence[Figures]) -> Figures | None:
        """The nearest to plain that reaches a gain, or the fastest that reaches a PSNR; None if none does."""
        better = "psnr" if self.measure == "gain" else "gain"
        return max(filter(self.is_reached, rows), key=lambda row: getattr(row, better), default=None)

    def nearest(self, rows: Sequence[Figures]) -> Figures | None:
        """Of the arms that are faster than plain, the arm that comes nearest to the goal; None if none is faster."""
        faster = [row for row in rows if row.gain is not None and row.gain > 1]
        return max(faster, key=lambda row: getattr(row, self.measure), default=None)


def parse_goal(text: str) -> Goal:
    """The goal of "1.4x" or "35dB".

    Raises:
        ParameterError: the text is neither, or its number is not allowed.
    """
    parts = re.fullmatch(r"([0-9.]+) ?(?:(x|×)|db)", text.lower())
    try:
        value = float(parts[1]) if parts else math.nan
    except ValueError:
        value = math.nan
    measure, minimum = ("gain", 1) if parts and parts[2] else ("psnr", 0)
    if not (math.isfinite(value) and value > minimum):
        rule = "it must be a factor above 1, such as 1.4x, or a PSNR above 0, such as 35dB"
        raise ParameterError("goal", text, rule)
    return Goal(measure, value)
