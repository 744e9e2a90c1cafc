"""Sizes of images, in pixels."""

import re
from typing import Annotated, NamedTuple, TypeAlias

from pydantic import Field

from ..errors import ParameterError

Side: TypeAlias = Annotated[int, Field(ge=1, le=99_999)]


class Size(NamedTuple):
    """Height and width of an image in pixels, in ppdiffusers' order; as text "WIDTHxHEIGHT", the usual order."""

    height: Side
    width: Side

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def parse_size(text: str) -> Size:
    """The size of "WIDTHxHEIGHT", or of one number for a square.

    Raises:
        ToMeConfigError: the text is neither.
    """
    sides = re.fullmatch("([1-9][0-9]{0,4})(?:x([1-9][0-9]{0,4}))?", str(text).lower())
    if sides is None:
        rule = "it must be WIDTHxHEIGHT, or one number for a square, in pixels, such as 512x768 or 512."
        raise ParameterError("size", text, rule)
    return Size(int(sides[2] or sides[1]), int(sides[1]))
