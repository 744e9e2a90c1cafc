"""What the value of a setting may be: a `Rule` in the annotation of its field, as in `sx: Annotated[int, TOKENS]`."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np


class Rule(NamedTuple):
    """What a setting may be."""

    allows: Callable[[Any], bool]
    words: str  # after "it must be"


def is_integer(value: Any, least: int, below: float = math.inf) -> bool:
    """Whether a value is an integer, from `least` and below `below`; Python's or NumPy's, and no bool."""
    is_integral = isinstance(value, Integral) and not isinstance(value, bool)
    return is_integral and least <= int(value) < below


def is_flag(value: Any) -> bool:
    """Whether a value is a bool, Python's or NumPy's."""
    return isinstance(value, (bool, np.bool_))


def is_number(value: Any) -> bool:
    """Whether a value is a real number that has a float, and no bool."""
    if not isinstance(value, Real) or is_flag(value):
        return False
    try:
        float(value)
    except OverflowError:  # an integer that has no float
        return False
    return True


FLAG = Rule(is_flag, "True or False")
TOKENS = Rule(lambda value: is_integer(value, 1), "an integer number of tokens, 1 or more")


def rules_of(config_class: type) -> dict[str, Rule]:
    """The rules of the settings of a method, by name."""
    hints = get_type_hints(config_class, include_extras=True)
    return {name: part for name, hint in hints.items() for part in get_args(hint)[1:] if isinstance(part, Rule)}
