"""Attention with fewer keys: the projections of keys and values get the tokens that remain.

Whatever computes the attention, it calls these projections, and every other part of it stays as it is. Where keys
rotate by their positions, or text and image share a softmax, `computed` computes the attention instead.
"""

from typing import Any

import paddle
from paddle import nn

from ..errors import ToMePassError
from ..families.blocks import MergeableBlock
from ..families.table import Family
from .forward import Wrap
from .layers import MergeWrap, check_mask
from .running import Keys, now_running, running


class ProjectionWrap(Wrap):
    """Wrap of a projection of keys or values: it gets the tokens that remain."""

    def __call__(self, layer: nn.Layer, tokens: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = now_running().keys
        if keys is not None and keys.is_projection(layer):
            tokens = keys.keep(tokens)
        return self.forward(layer, tokens, *args, **kwargs)


class AttentionWrap(MergeWrap):
    """Wrap of a self-attention: leave out keys and values, or run it on merged tokens.

    Args:
        block: the block.
        name: of `LAYERS`.
    """

    def __init__(self, block: MergeableBlock, name: str) -> None:
        super().__init__(block.layer, name)
        self._family: Family = block.family
        self._text, self._allows_tomesd = block.spec.text, block.merges_queries

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan()
        if plan is None or plan.merges:
            return super().__call__(layer, hidden_states, *args, **kwargs)
        check_mask(True, *args, **kwargs)
        names = self._family.attention
        projections = getattr(layer, names.image.k), getattr(layer, names.image.v)
        keys = Keys(plan, self._text, hidden_states, projections, self._allows_tomesd)
        with running(now_running()._replace(keys=keys)):
            output = self.forward(layer, hidden_states, *args, **kwargs)
        if keys.calls != 2:
            raise ToMePassError(
                f"{type(names.computed_by(layer)).__name__} has not called {names.image.k} and {names.image.v} of its "
                "layer as they were when merging was applied: set another attention processor, do not fuse "
                "projections, and call apply_tome() again after changing them."
            )
        return output
