"""Wraps of layers that treat tokens alike, such as the feed-forward layer: they run on merged tokens."""

from typing import Any

import paddle
from paddle import nn

from ..families.table import LAST
from ..methods.plan import MergePlan
from .passes import InnerWrap
from .placement import Placement


class MergeWrap(InnerWrap):
    """Wrap of a layer that treats tokens alike.

    Args:
        placement: what merges in the block.
        merge_input: merge the layer's input; otherwise it gets tokens as they are, or merged already.
        merge_output: merge its (first) output; otherwise unmerge it.
    """

    def __init__(self, placement: Placement, *, merge_input: bool = True, merge_output: bool = False) -> None:
        super().__init__(placement)
        self._merge_input, self._merge_output = merge_input, merge_output

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan()
        if plan is None:
            return self.forward(layer, hidden_states, *args, **kwargs)
        tokens = self._move(hidden_states, plan, True) if self._merge_input else hidden_states
        output = self.forward(layer, tokens, *args, **kwargs)
        if isinstance(output, tuple):
            return self._move(output[0], plan, self._merge_output), *output[1:]
        return self._move(output, plan, self._merge_output)

    def _move(self, tokens: paddle.Tensor, plan: MergePlan, merges: bool) -> paddle.Tensor:
        """Merge or unmerge the image tokens; text in the same sequence stays as it is."""
        move = plan.merge if merges else plan.unmerge
        count, sequence = plan.tokens if merges else plan.kept, self.placement.facts.sequence
        if sequence is None or tokens.shape[1] == count:
            return move(tokens)  # raises for another number of tokens
        if sequence == LAST:
            return paddle.concat([move(tokens[:, :count]), tokens[:, count:]], axis=1)
        return paddle.concat([tokens[:, :-count], move(tokens[:, -count:])], axis=1)
