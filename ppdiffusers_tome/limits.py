"""What does not merge, and why: a sentence for each kind of ppdiffusers model that has no block to merge in."""

from typing import Any

from paddle import nn

from .models import label, parts

_WHOLE_MAPS = "its attention sits in convolutional blocks and takes whole feature maps; it has no transformer blocks"
_ONE_SEQUENCE = "pixels share one sequence with text and time tokens, which must not merge"

# Model class, also of a parent: why nothing merges in it.
REASONS = {
    "UNet1DModel": "its data has one axis, and merging needs a picture's two",
    "UNet2DModel": _WHOLE_MAPS,
    "T5FilmDecoder": "its tokens are spectrogram frames along one axis, and merging needs a picture's two",
    "PriorTransformer": "its tokens are embeddings of text and image, not pixels",
    "UNetFlatConditionModel": "it works on text, whose tokens are not pixels",
    "Kandinsky3UNet": "its attention blocks, its own kind, take whole feature maps, at level 2 and deeper",
    "WuerstchenPrior": "its attention looks at pixels and text in one, over maps of some 24×24",
    "WuerstchenDiffNeXt": "its attention looks at pixels and text in one, in blocks of its own kind",
    "UViTT2IModel": _ONE_SEQUENCE,
    "UniDiffuserModel": _ONE_SEQUENCE,
    "DiTLLaMA2DModel": "its blocks, its own kind, turn queries and keys by each token's place, which a mean has not",
    "DiTLLaMAT2IModel": "its blocks, its own kind, turn queries and keys by each token's place, which a mean has not",
    "LVDMUNet3DModel": "its blocks, its own kind, rearrange space and time between their layers",
    "STUNetModel": "its transformer blocks are its own kind, with an attention of their own",
    "Vid2VidSTUNet": "its transformer blocks are its own kind, with an attention of their own",
    "ExportedUNet": "it runs exported programs: choose among their ratios by pipe.unet.ratio, or export again",
    "PaddleInferRuntimeModel": "it runs an exported program, and merging has to be in it when it is exported",
}
# Kind of UNet block: why nothing merges in a UNet2DConditionModel that is made of it.
BLOCK_REASONS = {
    "SimpleCrossAttn": "its attention (SimpleCrossAttn… blocks) looks at pixels and text in one",
    "KCrossAttn": "its blocks (KCrossAttn…) attend to pixels at the deepest level alone, in layers of their own",
    "AttnDown": _WHOLE_MAPS,
}


def why_nothing_merges(model: Any) -> str | None:
    """The reason why a model of ppdiffusers has nothing to merge; None where none is known, as for text encoders.

    Args:
        model: a component of a pipeline.
    """
    if getattr(model, "inference_optimize", False):
        return "it was made with INFERENCE_OPTIMIZE=True, which replaces its blocks by fused ones"
    for parent in type(model).__mro__:
        if parent.__name__ in REASONS:
            return REASONS[parent.__name__]
    blocks = getattr(model, "down_blocks", None)
    for block in blocks if isinstance(blocks, nn.LayerList) else ():
        for kind, reason in BLOCK_REASONS.items():
            if type(block).__name__.startswith(kind):
                return reason
    return None


def reasons(target: Any) -> list[str]:
    """One sentence for each model of a pipeline (or for the one model) of which it is known why nothing merges."""
    known = ((label(name, part), why_nothing_merges(part)) for name, part in parts(target).items())
    return [f"{called}: {reason}." for called, reason in known if reason]
