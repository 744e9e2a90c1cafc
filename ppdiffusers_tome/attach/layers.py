"""Wraps of layers that run on merged tokens, as in tomesd."""

from typing import Any

import paddle
from paddle import nn

from ..errors import ToMePassError
from .block import InnerWrap


class MergeWrap(InnerWrap):
    """Wrap of a layer that gets tokens: run it on those that remain, and give each token its result back."""

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan()
        if plan is None:
            return self.forward(layer, hidden_states, *args, **kwargs)
        check_mask(self._name == "attn", *args, **kwargs)
        return plan.unmerge(self.forward(layer, plan.merge(hidden_states), *args, **kwargs))


def check_mask(
    is_self: bool,
    /,
    encoder_hidden_states: paddle.Tensor | None = None,
    attention_mask: paddle.Tensor | None = None,
    *_args: Any,
    **_kwargs: Any,
) -> None:
    """Raise ToMePassError for a mask of the tokens that merge, among the arguments of an attention.

    Args:
        is_self: whether its keys are among these tokens.
        encoder_hidden_states: tokens of which the mask is in cross-attention.
        attention_mask: the mask.
    """
    if attention_mask is not None and (is_self or encoder_hidden_states is None):
        raise ToMePassError(
            f"attention_mask has shape {list(attention_mask.shape)}: it is for all tokens, but attention computes "
            "with fewer. Call without attention_mask, or remove_tome() first."
        )
