"""Whose turn it is: methods that choose other tokens in each step take one of `TURNS` choices, by the timestep.

The turn is a function of the timestep alone, not of the number of steps before it: so a pass needs no state, and an
exported program no other input.
"""

from typing import NamedTuple

import numpy as np
import paddle

from ..grid import constant
from ..tensors import cast

TURNS = 16
LAST_TIMESTEP = 1000
_TABLE = "8b0e7153bf7c3706d85c524e440066559a6656c90bd5482a90a29b9fa5ff5180bc0dbc0e15637ebb8e3b91d26ab4a829a95249f512c17b8ed411fa644d35db41d94e5efaf89fc43c5fa52f8b2b19b8f89a50f8a8e9bb8bdb5eba456bf92d5d98065e5751f75143a5f61debc267b0bc8d3b1939a9b4ddbe45cf642b0c3a4acdd7f9fcc589f8d0a9f94f03e7914c0f87f17f8499ff30499a90ebb4108e360ddfcfc69e290d9f945ffa4d1278220ad2cf1337349e455d52613c2813c40d2affbb1494978278947bec540a2123e7cefa30c14d732f64cb79abcc4b9db165c23115661ffb0df9daee36452bcf48385971f1bba10ef43a9e7516072cb95eb92e57561d80e1ed511b327f2f171fc118de91165c672a325260ebfdc409e7349f28ca442f72d781f7169b32dac0940e401d83c4a29548fa91200314bd807d4b6ab0553854edd3aae7ed5e15ff034d16017fbce66869b7bb71fcb447fc135c396aff26c035c0a09cfce14db0699202bd90872129b6f237adc0cc56aca3b736998252d572dd7df79d82a5d04395d6a3a21f42a6ec7f306532a4b3ea53b3266ab5e27cec03b40fca2f903fb6ac49f239da2d17d782483fd5c72eb4204b008ec2166e0f28f015cd160dddc05a496d2b6cd684fb9035e22c1d460fae4e72b005d284ba6492933cb9bfe74800c47f1006d779171cb09ee33b8cc952e"


class Turn(NamedTuple):
    """Which of the choices of a method a pass has."""

    number: paddle.Tensor | None = None  # [1] int64 from 0 to TURNS - 1; None: always 0
    frames: int = 1  # rows of the batch that are the frames of one video; each is one turn after the frame before


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
