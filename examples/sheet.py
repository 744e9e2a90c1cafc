"""What the examples' pictures are shown on, and what a PNG says of itself: the package's own, as `evaluate` has it."""

from ppdiffusers_tome.evaluation.quality.sheets import make_sheet, metadata

__all__ = ["make_sheet", "metadata"]
