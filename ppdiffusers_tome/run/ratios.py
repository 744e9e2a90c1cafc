"""Ratios of an export, which are the same if they are equal to six digits."""

from collections.abc import Collection
from numbers import Real
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from ..errors import ToMeConfigError

Ratio: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


def ratio_name(ratio: float) -> str:
    """A ratio in six digits, for names of files and messages. Ratios with the same name are the same ratio."""
    return f"{ratio + 0.0:g}"  # plus 0.0, because -0.0 is 0


def is_ratio(ratio: Any) -> bool:
    """Whether a value is a number, as a ratio is."""
    return isinstance(ratio, Real) and not isinstance(ratio, bool)


def find_ratio(ratio: Any, ratios: Collection[float]) -> float:
    """The exported ratio that is the same as `ratio`.

    Raises:
        ToMeConfigError: there is none; the message lists the exported ones.
    """
    for exported in ratios:
        if is_ratio(ratio) and ratio_name(exported) == ratio_name(ratio):
            return exported
    listed = ", ".join(map(ratio_name, ratios))
    raise ToMeConfigError(f"ratio={ratio!r} was not exported, only {listed}. Export again with this ratio in --ratio.")
