"""What is known of attention processors: whether their kernel is fused, and how to save memory in them."""

from collections.abc import Iterator
from contextlib import contextmanager

from paddle import nn
from ppdiffusers.models.attention_processor import (
    AttnProcessor,
    JointAttnProcessor2_5,
    SlicedAttnAddedKVProcessor,
    SlicedAttnProcessor,
    XFormersAttnProcessor,
)
from ppdiffusers.pipelines.text_to_video_synthesis.pipeline_text_to_video_zero import CrossFrameAttnProcessor

from .table import Family

BY_PADDLE = "fused on a GPU in half precision"  # F.scaled_dot_product_attention
FUSION = {  # by the class of the processor that defines `__call__`
    AttnProcessor: "not fused",
    SlicedAttnProcessor: "not fused",
    CrossFrameAttnProcessor: "not fused",
    XFormersAttnProcessor: "fused",
    JointAttnProcessor2_5: "fused",
}


def attention_label(layer: nn.Layer, family: Family) -> str:
    """The processor of an attention, and whether its kernel is fused, as in "AttnProcessor (not fused)"."""
    processor = type(family.attention.computed_by(layer))
    if family.attention.processor is None or processor.__name__ == family.only_processor:
        return f"{processor.__name__} ({BY_PADDLE})"
    # A subclass with a `__call__` of its own may compute in a different way.
    computing = next((cls for cls in processor.__mro__ if "__call__" in vars(cls)), None)
    return f"{processor.__name__} ({FUSION.get(computing, 'not known whether fused')})"


def use_ordinary_attention(model: nn.Layer) -> None:
    """Let a model compute attention as a new one does on a CPU: not in slices, which `enable_attention_slicing` sets.

    ppdiffusers' default on a machine with a GPU has a kernel that a CPU lacks.
    """
    for layer in model.sublayers():
        if type(getattr(layer, "processor", None)) in (SlicedAttnProcessor, SlicedAttnAddedKVProcessor):
            layer.set_attention_slice(None)  # the default of this machine
        if type(getattr(layer, "processor", None)) is XFormersAttnProcessor:
            layer.set_processor(AttnProcessor())


@contextmanager
def attention_in_slices(*models: nn.Layer) -> Iterator[None]:
    """A context in which models compute ordinary attention for one head of one image at a time.

    Their outputs differ by rounding alone. The scores of all heads together need most of the memory of large images:
    17 GB at the first level of Stable Diffusion 1.5 at 1024 px, in a batch of two.
    """
    layers = [layer for model in models for layer in model.sublayers()]
    ordinary = [layer for layer in layers if type(getattr(layer, "processor", None)) is AttnProcessor]
    # In slices ppdiffusers leaves out the spatial norm, which the decoder of a VQ model has.
    sliced = {layer: layer.processor for layer in ordinary if layer.spatial_norm is None}
    try:
        for layer in sliced:
            layer.set_processor(SlicedAttnProcessor(1))
        yield
    finally:
        for layer, processor in sliced.items():
            layer.set_processor(processor)
