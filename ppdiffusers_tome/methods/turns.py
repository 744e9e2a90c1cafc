"""Whose turn it is: methods that choose other tokens in each step take one of `TURNS` choices, by the timestep.

The turn is a function of the timestep alone, not of the number of steps before it: so a pass needs no state, and an
exported program no other input.
"""

from typing import NamedTuple

import numpy as np
import paddle

from ..grid import constant
from ..tensors import cast, count_rows

TURNS = 16
LAST_TIMESTEP = 1000
# By benchmarks/turns.py: successive steps of the usual schedules of 4 to 50 steps have different turns.
_TABLE = (
    "8794253b4ceaaad6bbf75dbf9c311994111001b890e686ace0b6eeecc03ee27608e0b7ead3f1515a3f3ddb9f7d555fdd12ab"
    "2866f39188222a660c3f011a1392ff947f799b997384af20d4f748ce40c4242a0068cce84ae64430cec7d480077f510d6555"
    "5dd2555b15515595555113b3803a9b934396660a8ae8446aaaaaeeae2ea66ca26626626ff733885bb775fb317b177fd73f3f"
    "4bbb34d8d2375f4157ec9555d117594d99884135294d0c70089c0a0c0889f808880f088a626caa228226e8ae262266659b66"
    "668f1365b33bf75bb3f73f531b7df59f1ddd399dd99df9d99d8964dd996aaaaace8aaa80cccaccc8ccccccccccc84cccc9cc"
    "7033f9bdb793b7b3bdb73b3db9d37733bb3dbb91dd25a2d6dedeaeeeeeeeeeeeeeeeeeeeee6e0ee080e0e00ec00000000001"
    "0ff0ff7fffffffffff3ff3f3fd31313bddd11113111d111113b11111d11db1e1df4444444444444444444444444442242222"
    "22222a222222222aa222aaa3736677777777777777777d7715155c51555555555555555555e88d5088888888888888888800"
    "34c2bccbbbbbbbbbbbbbbbb2beb666e666666666666666e9c9c9999999999999999f9fffff8ffcff00000c0000ccc2aaaaaa"
    "aaaaaa2aa33333335335dddddddddddcc4ccccceeeeeeeff7777777750084884081111111222222bbbb9408f1384b5455563"
    "6"
)


class Turn(NamedTuple):
    """Which of the choices of a method a pass has."""

    number: paddle.Tensor | None = None  # [1] int64 from 0 to TURNS - 1; None: always 0
    frames: int = 1  # rows of the batch that are the frames of one video; each is one turn after the frame before

    def choose(self, table: paddle.Tensor, frames: int = 1) -> paddle.Tensor:  # [TURNS, L] → [frames, L]
        """The rows of a table whose turn it is in successive frames."""
        number = paddle.zeros([1], dtype="int64") if self.number is None else self.number
        if frames > 1:
            number = (number + count_rows(paddle.ones([frames]))) % TURNS
        return paddle.gather(table, number)


FIRST_TURN = Turn()


@paddle.jit.not_to_static  # a constant, which Paddle would compute in the program
def turn_table() -> paddle.Tensor:  # [LAST_TIMESTEP + 1] int64
    """The number of the turn at each whole timestep."""
    return constant(np.array([int(digit, TURNS) for digit in _TABLE]))


def turn_at(
    timestep: paddle.Tensor,  # [B] or a single number, of any dtype
    table: paddle.Tensor,  # of `turn_table`
) -> paddle.Tensor:  # [1] int64
    """The number of the turn at a timestep: for the whole batch that of its first row, rounded to a whole number."""
    first = cast(timestep.reshape([-1])[:1], paddle.float32)
    whole = paddle.clip(paddle.floor(first + 0.5), 0, LAST_TIMESTEP)
    return paddle.gather(table, cast(whole, paddle.int64))
