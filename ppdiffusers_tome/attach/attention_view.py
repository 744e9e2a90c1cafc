"""What an attention processor sees of its layer, if it is not known how the processor computes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import paddle
from paddle import nn

from ..errors import ToMePassError
from ..methods.plan import MergePlan
from ..tensors import cast
from .placement import Placement


class ProjectionView:
    """A projection of an attention layer whose call goes through a function; all else is the layer's."""

    def __init__(self, layer: nn.Layer, call: Callable[..., paddle.Tensor]) -> None:
        self._layer = layer
        self._call = call

    def __call__(self, *args: Any) -> paddle.Tensor:
        return self._call(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class AttentionView:
    """A self-attention as its processor sees it for one pass.

    The projections of keys and values merge the tokens that they get, and the mask that the processor asks for
    contains the sizes of keys.

    Args:
        layer: the attention layer, which has all other attributes.
        placement: what merges in the block.
        plan: of the pass.
        given: the tokens that the attention is given.
        unmerged: the tokens from which its keys and values merge; None if `given` has merged already.
    """

    def __init__(
        self,
        layer: nn.Layer,
        placement: Placement,
        plan: MergePlan,
        given: paddle.Tensor,
        unmerged: paddle.Tensor | None,
    ) -> None:
        self._layer, self._placement, self._plan = layer, placement, plan.keys
        processor = placement.family.attention.processor
        self._processor = type(layer if processor is None else getattr(layer, processor)).__name__
        self._given, self._unmerged = given, unmerged
        self._names = placement.family.attention.image
        has_text = placement.facts.text is not None  # whose tokens do not merge
        self._needs_sizes = placement.config.proportional and (has_text or not self._plan.has_equal_sizes)
        self._has_sizes = False
        self._inputs: dict[str, paddle.Tensor] = {}  # of the projections
        self._merged: tuple[paddle.Tensor, paddle.Tensor] | None = None  # an input of keys or values, and merged
        self._merged_projections = 0

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._layer, name)
        if part is not None and name in (self._names.q, self._names.k, self._names.v):
            return ProjectionView(part, partial(self._project, name, part))
        return part

    def prepare_attention_mask(
        self,
        attention_mask: paddle.Tensor | None,
        target_length: int,
        batch_size: int,
        out_dim: int = 4,
        **kwargs: Any,
    ) -> Any:
        """Same as the method of the layer, for merged keys; it adds their sizes."""
        mask = self._layer.prepare_attention_mask(attention_mask, self._plan.kept, batch_size, out_dim, **kwargs)
        if not self._needs_sizes:
            return mask
        self._has_sizes = True
        sizes = cast(self._plan.log_sizes, self._layer.dtype)  # [B, keys]
        if out_dim == 3:  # attention slicing: [B·heads, 1, keys]
            sizes = sizes.repeat_interleave(self._layer.heads, axis=0).unsqueeze(1)
        else:  # [B, 1, 1, keys]
            sizes = sizes.unsqueeze([1, 2])
        return sizes if mask is None else mask + sizes

    def check(self) -> None:
        """Raise ToMePassError if the processor has computed without the merged keys, or without their sizes."""
        name, remedy = self._processor, "set another attention processor, or use"
        if self._unmerged is not None and self._merged_projections != 2:
            raise ToMePassError(
                f"{self._method}: {name} has not called {self._names.k} and {self._names.v} of the layer that it was "
                f'given: do not fuse projections, {remedy} method="symmetric".'
            )
        if self._needs_sizes and not self._has_sizes:
            raise ToMePassError(
                f"proportional=True: {name} has not called prepare_attention_mask() of the layer that it was given, "
                "so merged tokens cannot be weighted by their size: do not fuse projections, "
                f"{remedy} proportional=False."
            )
        keys = self._inputs.get(self._names.k)
        is_own = keys is None or keys is self._given or keys is self._inputs.get(self._names.q)
        if self._needs_sizes and not is_own:
            raise ToMePassError(
                f"proportional=True: {name} attends to other tokens than its own, whose sizes are not known: "
                f"{remedy} proportional=False."
            )

    @property
    def _method(self) -> str:
        return f"method={self._placement.config.method!r}"

    def _project(self, name: str, layer: nn.Layer, tokens: paddle.Tensor, *args: Any) -> paddle.Tensor:
        """Output of a projection; those of keys and values get merged tokens."""
        self._inputs[name] = tokens
        if name != self._names.q:
            self._check_shape(tokens)
            tokens = self._merge(tokens)
        return layer(tokens, *args)

    def _check_shape(self, tokens: paddle.Tensor) -> None:
        """Raise ToMePassError if keys or values are computed from a part of the batch, whose plan is not known."""
        shape, expected = tokens.shape[:2], self._given.shape[:2]
        differs = any(a != b for a, b in zip(shape, expected, strict=True) if -1 not in (a, b))  # -1: in a program
        if differs and (self._unmerged is not None or self._needs_sizes):
            raise ToMePassError(
                f"{self._method}, proportional={self._placement.config.proportional}: "
                f"{self._processor} computes keys or values from {shape[1]} tokens of {shape[0]} "
                f"images, but was given {expected[1]} of {expected[0]}: set another attention processor, or use "
                'method="tomesd".'
            )

    def _merge(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """The merged input of a projection of keys or values, usually the same for both."""
        if self._unmerged is None:
            return tokens
        self._merged_projections += 1
        if self._merged is None or self._merged[0] is not tokens:
            if tokens is not self._given and self._given is not self._unmerged:
                name = self._processor
                raise ToMePassError(
                    f"{self._method}: {name} computes keys or values from other tokens than those it was given: set "
                    'another attention processor, or use method="symmetric".'
                )
            self._merged = tokens, self._plan.merge(self._unmerged if tokens is self._given else tokens)
        return self._merged[1]
