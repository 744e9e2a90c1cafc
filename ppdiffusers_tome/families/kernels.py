"""What is known of attention processors: whether the kernel is fused by which they compute."""

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
