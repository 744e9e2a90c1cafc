"""What runs in a thread: a block with its plan, and an attention with its keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import paddle
from paddle import nn

from ..errors import ToMePassError
from ..families.stream import Stream, Text, join, split
from ..methods.plan import MergePlan
from .placement import Placement
from .state import PerThread


class Keys:
    """The keys of an attention in one pass.

    Args:
        plan: of the block.
        text: where the text is in what the projections get.
        given: the tokens that the attention gets.
        projections: of its keys and values.
        allows_tomesd: whether queries of the block can merge.
    """

    def __init__(
        self,
        plan: MergePlan,
        text: Text | None,
        given: paddle.Tensor,
        projections: tuple[nn.Layer, ...],
        allows_tomesd: bool,
    ) -> None:
        self._plan, self._text, self._given, self._projections = plan, text, given, projections
        self._allows_tomesd = allows_tomesd
        self._kept: tuple[paddle.Tensor, paddle.Tensor] | None = None  # an input, and what remains of it
        self.calls = 0  # of the projections

    def is_projection(self, layer: nn.Layer) -> bool:
        """Whether a layer is one of the projections."""
        return any(layer is projection for projection in self._projections)

    def keep(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """The tokens that remain of what a projection gets, usually the same for keys and values.

        Raises:
            ToMePassError: they are not as many as the tokens that the attention was given.
        """
        self.calls += 1
        if self._kept is None or self._kept[0] is not tokens:
            shape, expected = tokens.shape[:2], self._given.shape[:2]
            if any(a != b for a, b in zip(shape, expected, strict=True) if -1 not in (a, b)):  # -1: in a program
                remedy = 'use method="tomesd"' if self._allows_tomesd else "remove_tome() first"
                raise ToMePassError(
                    f"the attention processor computes keys or values from {shape[1]} tokens of {shape[0]} images, "
                    f"but was given {expected[1]} of {expected[0]}: set another attention processor, or {remedy}."
                )
            stream = split(self._text, tokens, self._plan.tokens)
            self._kept = tokens, join(self._text, Stream(self._plan.merge(stream.image), stream.text))
        return self._kept[1]


class Running(NamedTuple):
    """What runs in a thread."""

    block: nn.Layer | None = None  # the innermost block
    placement: Placement | None = None  # what merges in the block
    plan: MergePlan | None = None  # of the block; None if nothing merges
    keys: Keys | None = None  # of an attention in the block, while it runs; None if it gets all of them


class _Thread(PerThread):
    running = Running()


_thread = _Thread()


def now_running() -> Running:
    """What runs in this thread."""
    return _thread.running


@contextmanager
def running(what: Running) -> Iterator[None]:
    """Run this in this thread, and afterwards what was there: a block may run inside a block."""
    before, _thread.running = _thread.running, what
    try:
        yield
    finally:
        _thread.running = before
