"""Whose turn it is: methods that choose different tokens in each step take one of `TURNS` choices, by the timestep.

The turn is a function of the timestep alone, not of the number of steps before it: so a pass needs no state, and an
exported program no further input.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from .steps import LARGEST_LEVEL, is_level

TURNS = 16
LAST_TIMESTEP = 1000
# By benchmarks/turns.py search: successive steps of the usual schedules of 4 to 100 steps have different turns.
_TABLE = (
    "5da4cb8885221111d0f91c46666678f7777fece2433f333bfbbc333eaeee66eaeee2ee9b19193777e2c829a0112c00000c00"
    "07000c0fb37fff73f5fdf1737445b95f4c4d648ca5a2a52f22a5a80a9294d885e993d75dd19d99d339991d3111159a559ca5"
    "9edd49c4e48ccccc48cac00c8304cc456030d0888f28ab7b6e5bfb47b13bbbbebbbb73fb7b3b3bbbb4fcb7fb243a04a8e04f"
    "eaee666a6226686aa6a6266a222e256e2666264e0139627aacc19d7939515291d11d53111d5f1951dd5fd5ddb3d115ddf1aa"
    "7d655cd7539c1dd512e41bc431884ccdcccc4cccc4cc4880088800088007088888880028800002a0aaae23a23e32323a73fd"
    "267f7757ff757fbc7fbff7fff7fffff7ffff919d9f91ab9999999969359889b9eea9d523264a4426bcc3b3b3b0f8883a02b3"
    "3339f8688ee828f23ee2e2eeedaee666ee6e61e9651dd26dc66255f556555555da555d55595d555ede80d2f4424044244444"
    "44444c4c4cb4ccc4cc4bc0ccbcb4c777777777777777f7777777b7b3b3f23b2aa22aba2a2a2aa2a9aabaaa11d11b11111111"
    "11111119119111999904000000000000000000002cae2eee2eeeeee6ee666666666666666996f6fffff3333333333333b3bb"
    "bbbbbbbbbb55555555555ddddddddddddd22288888888888888ccccccccc42444444f7fffff7777799999991111eeee62a2a"
    "a"
)


def place_of_level(level: Any) -> Any:  # a number, or an array or tensor of any library
    """The place of a noise level, ¼·log σ, in the table: the levels within ±`LARGEST_LEVEL` are spread over it."""
    return (level + LARGEST_LEVEL) * (LAST_TIMESTEP / (2 * LARGEST_LEVEL))


def turn_table() -> np.ndarray:  # [LAST_TIMESTEP + 1] int64
    """The number of the turn at each whole timestep."""
    return np.array([int(digit, TURNS) for digit in _TABLE])


def turns_of(timesteps: Iterable[float], is_flow: bool = False) -> list[int]:
    """The numbers of the turns at the timesteps of an image; see `plan.turn_at`.

    Example:
        >>> turns_of([951, 901.5, 0.3])
        [3, 3, 14]
    """
    places = np.array([*map(float, timesteps)])
    if not is_flow:
        places = np.where(is_level(places), place_of_level(places), places)
    whole = np.clip(np.floor(places + 0.5), 0, LAST_TIMESTEP).astype(np.int64)
    return [int(number) for number in turn_table()[whole]]
