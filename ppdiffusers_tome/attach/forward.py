"""Replace the `forward` of a layer, and put it back.

A layer that takes part has one `Wrap`, which is an attribute of the layer, so a deep copy of a model has its own. It
gets keyword arguments and ends with its layer, also by an exception, which hooks of Paddle 2.6 do not. This module
knows nothing of tokens.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import paddle
from paddle import nn

ATTRIBUTE = "_tome"  # of a layer: its wrap


class Wrap:
    """Base class: calls the original `forward`. It replaces a removed wrap that another library still calls."""

    # The `forward` that this wrap replaced, if another library had set it.
    wrapped_forward: Callable[..., Any] | None = None

    def __call__(self, layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
        return self.forward(layer, *args, **kwargs)

    def is_equivalent(self, new: Any) -> bool:
        """Whether this wrap can stay in place of `new`, a wrap of the same class, because both do the same."""
        return True

    def forward(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the layer without this wrap."""
        if self.wrapped_forward is not None:
            return self.wrapped_forward(*args, **kwargs)
        return type(layer).forward(layer, *args, **kwargs)


@paddle.jit.not_to_static  # a program records what the wrap computes; Paddle would translate its Python code
def _tome_forward(layer: nn.Layer, *args: Any, **kwargs: Any) -> Any:
    wrap = wrap_of(layer) or Wrap()  # None if another library has put this back after the wrap was removed
    return wrap(layer, *args, **kwargs)


def install_forward() -> None:
    """Make `_tome_forward` a method of every layer, by whose name a pickle of a layer finds it again."""
    nn.Layer._tome_forward = _tome_forward


def wrap_of(layer: nn.Layer) -> Wrap | None:
    """The wrap of a layer; None if it has none."""
    wrap: Wrap | None = layer.__dict__.get(ATTRIBUTE)
    return wrap


def is_outermost(layer: nn.Layer) -> bool:
    """Whether no library has replaced the `forward` of a layer since its wrap was installed."""
    return getattr(layer.__dict__.get("forward"), "__func__", None) is _tome_forward


AnyWrap = TypeVar("AnyWrap", bound=Wrap)


def ensure(layer: nn.Layer, new: AnyWrap) -> AnyWrap:
    """The wrap of a layer if it is in place and equivalent to `new`; otherwise `new`, which is installed."""
    wrap = wrap_of(layer)
    if type(wrap) is type(new) and wrap.is_equivalent(new) and not _is_lost(layer, wrap):
        return wrap
    if wrap is not None and _is_lost(layer, wrap):
        remove(layer)
    install(layer, new)
    return new


def install(layer: nn.Layer, wrap: Wrap) -> None:
    """Put a wrap in place of the layer's `forward`. It calls the earlier `forward`, also that of another library."""
    removed = wrap_of(layer)
    wrap.wrapped_forward = layer.__dict__.get("forward") if removed is None else removed.wrapped_forward
    setattr(layer, ATTRIBUTE, wrap)  # before `forward`: a pickle imports this package for it
    if removed is None:  # otherwise another library's `forward` still calls it
        layer.forward = MethodType(_tome_forward, layer)


def _is_lost(layer: nn.Layer, wrap: Wrap) -> bool:
    """Whether another library restored a `forward` from before this wrap was installed."""
    forward = layer.__dict__.get("forward")
    return forward in (None, wrap.wrapped_forward) or getattr(forward, "__func__", None) is type(layer).forward


def remove(layer: nn.Layer) -> None:
    """Remove the layer's wrap, if it has one; below another library's `forward`, an idle wrap remains."""
    wrap = wrap_of(layer)
    if wrap is None:
        return
    if _is_lost(layer, wrap):
        delattr(layer, ATTRIBUTE)
    elif is_outermost(layer):
        delattr(layer, ATTRIBUTE)
        delattr(layer, "forward")
        if wrap.wrapped_forward is not None:
            layer.forward = wrap.wrapped_forward
    else:
        idle = Wrap()
        idle.wrapped_forward = wrap.wrapped_forward
        setattr(layer, ATTRIBUTE, idle)
