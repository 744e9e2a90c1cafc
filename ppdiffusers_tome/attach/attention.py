"""Attention with fewer keys: the projections of keys and values get the tokens that remain.

Whatever computes the attention, it calls these projections, and every other part of it stays as it is. Where keys
rotate by their positions, or text and image share a softmax, `computed` computes the attention instead.
"""

from typing import Any

import paddle
from paddle import nn

from ..errors import ToMePassError
from ..families.blocks import MergeableBlock
from ..families.stream import Stream, Text, join, split
from ..families.table import Family
from ..methods.plan import MergePlan
from .forward import Wrap
from .layers import MergeWrap, check_mask
from .state import PerThread


class Keys:
    """The keys of an attention in one pass.

    Args:
        plan: of the block.
        text: where the text is in what the projections get.
        given: the tokens that the attention gets.
        projections: of its keys and values.
    """

    def __init__(
        self, plan: MergePlan, text: Text | None, given: paddle.Tensor, projections: tuple[nn.Layer, ...]
    ) -> None:
        self._plan, self._text, self._given, self._projections = plan, text, given, projections
        self._remaining: tuple[paddle.Tensor, paddle.Tensor] | None = None  # an input, and what remains of it
        self.calls = 0  # of the projections

    def come_from(self, layer: nn.Layer) -> bool:
        """Whether a layer is one of the projections."""
        return any(layer is projection for projection in self._projections)

    def remaining(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """The tokens that remain of what a projection gets, usually the same for keys and values.

        Raises:
            ToMePassError: they are not as many as the tokens that the attention was given.
        """
        self.calls += 1
        if self._remaining is None or self._remaining[0] is not tokens:
            shape, expected = tokens.shape[:2], self._given.shape[:2]
            if any(a != b for a, b in zip(shape, expected, strict=True) if -1 not in (a, b)):  # -1: in a program
                raise ToMePassError(
                    f"the attention processor computes keys or values from {shape[1]} tokens of {shape[0]} images, "
                    f"but was given {expected[1]} of {expected[0]}: set another attention processor, or use "
                    'method="tomesd".'
                )
            stream = split(self._text, tokens, self._plan.tokens)
            self._remaining = tokens, join(self._text, Stream(self._plan.merge(stream.image), stream.text))
        return self._remaining[1]


class _Attention(PerThread):
    keys: Keys | None = None  # of the attention that runs in this thread


_running = _Attention()


class ProjectionWrap(Wrap):
    """Wrap of a projection of keys or values: it gets the tokens that remain."""

    def __call__(self, layer: nn.Layer, tokens: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _running.keys is not None and _running.keys.come_from(layer):
            tokens = _running.keys.remaining(tokens)
        return self.forward(layer, tokens, *args, **kwargs)


class AttentionWrap(MergeWrap):
    """Wrap of a self-attention: leave out keys and values, or run it on merged tokens.

    Args:
        block: the block.
        name: of `LAYERS`.
    """

    def __init__(self, block: MergeableBlock, name: str) -> None:
        super().__init__(block.block, name)
        self._family: Family = block.family
        self._text = block.facts.text

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan()
        if plan is None or plan.merges:
            return super().__call__(layer, hidden_states, *args, **kwargs)
        check_mask(True, *args, **kwargs)
        names, before = self._family.attention, _running.keys
        projections = getattr(layer, names.image.k), getattr(layer, names.image.v)
        keys = _running.keys = Keys(plan, self._text, hidden_states, projections)
        try:
            output = self.forward(layer, hidden_states, *args, **kwargs)
        finally:
            _running.keys = before
        if keys.calls != 2:
            raise ToMePassError(
                f"{type(names.computed_by(layer)).__name__} has not called {names.image.k} and {names.image.v} of its "
                "layer as they were when merging was applied: set another attention processor, do not fuse "
                "projections, and call apply_tome() again after changing them."
            )
        return output
