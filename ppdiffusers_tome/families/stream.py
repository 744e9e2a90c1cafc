"""Where text is beside an image: the layouts that blocks and attentions have, and what splits and joins them."""

from enum import Enum
from typing import Any, NamedTuple

import paddle


class Text(Enum):
    """Where the text is that attends together with an image."""

    FIRST = "first"  # in one sequence with the image, before it
    LAST = "last"  # in one sequence with the image, after it
    SHARED_PROJECTIONS = "shared projections"  # an argument of the attention, which projects it as the image
    OWN_PROJECTIONS = "own projections"  # an argument of the attention, which has separate projections for it

    @property
    def is_in_sequence(self) -> bool:
        """Whether text and image are one sequence of tokens."""
        return self in (Text.FIRST, Text.LAST)


class Stream(NamedTuple):
    """The tokens of a block or an attention: those of the image, and those of the text, if there are any."""

    image: paddle.Tensor  # [B, N, C]
    text: paddle.Tensor | None  # [B, T, C]

    @property
    def length(self) -> int:
        """T: number of text tokens."""
        return 0 if self.text is None else self.text.shape[1]


def split(layout: Text | None, tokens: paddle.Tensor, count: int, argument: paddle.Tensor | None = None) -> Stream:
    """The image and the text in what a block or an attention gets.

    Args:
        layout: where the text is.
        tokens: [B, N, C] of the image, or [B, N + T, C] of one sequence.
        count: N. In a sequence all tokens that are not of the image count as text, also a token for the timestep.
        argument: [B, T, C], the text where it is an argument of its own; an attention may do without.
    """
    if layout is None or not layout.is_in_sequence:
        return Stream(tokens, None if layout is None else argument)
    if tokens.shape[1] == count:
        return Stream(tokens, None)
    if layout is Text.FIRST:
        return Stream(tokens[:, -count:], tokens[:, :-count])
    return Stream(tokens[:, :count], tokens[:, count:])


def join(layout: Text | None, stream: Stream) -> Any:
    """What an attention with this layout returns: the image, image and text as a pair, or one sequence."""
    if stream.text is None or layout is None:
        return stream.image
    if not layout.is_in_sequence:
        return stream.image, stream.text
    return paddle.concat([stream.text, stream.image] if layout is Text.FIRST else [stream.image, stream.text], axis=1)
