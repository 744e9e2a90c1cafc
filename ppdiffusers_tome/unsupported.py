"""Why nothing merges: a reason for each kind of ppdiffusers model without a mergeable block, and for a config."""

from typing import Any

from paddle import nn

from .config import LAYERS, LEVELS, ToMeConfig
from .models import (
    MERGEABLE_BLOCKS,
    components,
    denoisers,
    find_blocks,
    is_controlnet,
    label,
    layer_components,
)

REMEDY = "Run it without merging: docs/families.md lists the pipelines that merge."
_NO_TRANSFORMERS = "its attention works on feature maps inside convolutional blocks; it has no transformer blocks"
_ONE_SEQUENCE = "image tokens share one sequence with text and time tokens, which must not merge"
_OWN_ATTENTION = "its own kind of transformer block has its own kind of attention"
_ROTARY = "its own kind of block rotates queries and keys by token position, in another way than FLUX's"
_PIXELS_AND_TEXT = "its own kind of block attends to pixels and text together"

# Name of a model class, also as a parent class: why nothing merges in it.
REASONS = {
    "UNet1DModel": "its data has one axis, and merging needs the two of an image",
    "UNet2DModel": _NO_TRANSFORMERS,
    "T5FilmDecoder": "its tokens are spectrogram frames along one axis, and merging needs the two of an image",
    "PriorTransformer": "its tokens are text and image embeddings, not pixels",
    "UNetFlatConditionModel": "its tokens are text, not pixels",
    "Kandinsky3UNet": "its own kind of attention block works on feature maps, at level 2 and deeper",
    "WuerstchenPrior": "its attention takes pixels and text together, on feature maps of about 24×24",
    "WuerstchenDiffNeXt": _PIXELS_AND_TEXT,
    "StageB": _PIXELS_AND_TEXT,  # of Stable Cascade
    "StageC": _PIXELS_AND_TEXT,
    "UViTT2IModel": _ONE_SEQUENCE,
    "UniDiffuserModel": _ONE_SEQUENCE,
    "DiTLLaMA2DModel": _ROTARY,
    "DiTLLaMAT2IModel": _ROTARY,
    "MochiTransformer3DModel": "each head of its attention rotates queries and keys by angles of its own",
    "ReduxImageEncoder": "it maps image embeddings to text tokens and does not denoise",
    "LVDMUNet3DModel": "its own kind of block rearranges space and time between its layers",
    "STUNetModel": _OWN_ATTENTION,
    "Vid2VidSTUNet": _OWN_ATTENTION,
    "ExportedUNet": "it runs exported programs: select one of the exported ratios by pipe.unet.ratio, or export again",
    "PaddleInferRuntimeModel": "it runs an exported program, which merges only if it was exported with merging",
}
# Start of the name of a module, whose classes have the names of others that merge: why nothing merges in its models.
MODULE_REASONS = {
    "ppdiffusers.models.animate_anyone.": "its own kind of block also attends to the tokens of a reference image",
}
# Prefix of the class name of a UNet block: why nothing merges in a UNet2DConditionModel made of such blocks.
BLOCK_REASONS = {
    "SimpleCrossAttn": "its attention (SimpleCrossAttn… blocks) takes pixels and text together",
    "KCrossAttn": "its KCrossAttn… blocks have self-attention at the deepest level only, in their own kind of layer",
    "AttnDown": _NO_TRANSFORMERS,
}


def no_merge_reason(model: Any) -> str | None:
    """Why a model of ppdiffusers has nothing to merge; None if no reason is known, as for text encoders.

    Args:
        model: a component of a pipeline.
    """
    if getattr(model, "inference_optimize", False):
        return "it was created with INFERENCE_OPTIMIZE=True, which replaces its blocks by fused ones"
    for parent in type(model).__mro__:
        if parent.__name__ in REASONS:
            return REASONS[parent.__name__]
    for module, reason in MODULE_REASONS.items():
        if type(model).__module__.startswith(module):
            return reason
    blocks = getattr(model, "down_blocks", None)
    for block in blocks if isinstance(blocks, nn.LayerList) else ():
        for kind, reason in BLOCK_REASONS.items():
            if type(block).__name__.startswith(kind):
                return reason
    return None


def nothing_merges(target: Any) -> str:
    """Why nothing merges in a pipeline or model without a mergeable block, and what does merge: one sentence."""
    reasons = (
        f"{label(name, component)}: {reason}"
        for name, component in components(target).items()
        if (reason := no_merge_reason(component))
    )
    reason = "; ".join(reasons) or f"it has no {MERGEABLE_BLOCKS}"
    return f"nothing merges in {type(target).__name__} ({reason}): docs/families.md lists the pipelines that merge"


def nothing_to_merge(target: Any, config: ToMeConfig, controlnet: ToMeConfig | None) -> str:
    """Why `attach` finds no block in a pipeline or model, and the remedy where there is one: an error message."""
    start = f"{type(target).__name__} has nothing to merge with {config.describe()}"
    models = denoisers(target)
    if not models:
        names = ", ".join(label(name, layer) for name, layer in layer_components(target).items())
        reasons = "".join(
            f" {label(name, component)}: {reason}."
            for name, component in components(target).items()
            if (reason := no_merge_reason(component))
        )
        where = names or "a pipeline without models"
        return f"{start}: it looks for {MERGEABLE_BLOCKS}, and there are none in {where}.{reasons} {REMEDY}"
    included = [denoiser for denoiser in models.values() if controlnet is not None or not is_controlnet(denoiser)]
    if not included:
        return f"{start}, controlnet=False: it only has ControlNets. Pass controlnet=True."
    layers = [name for name in LAYERS if getattr(config, f"merge_{name}")]
    levels: dict[int, int] = {}
    for denoiser in included:
        for block in find_blocks(denoiser):
            if not block.sublayers.keys().isdisjoint(layers):
                levels[block.level] = levels.get(block.level, 0) + 1
    if not levels:
        names = ", ".join(f"merge_{name}" for name in layers)
        return f"{start}: none of its blocks has a layer for {names}."
    listed = ", ".join(f"level {level} ({count})" for level, count in sorted(levels.items()))
    remedy = "leave max_downsample out" + (f" or pass {min(levels)}" if min(levels) in LEVELS else "")
    reason = f"no block is at level {config.max_downsample} or less, its blocks are at {listed}"
    return f"{start}: {reason}. To merge there, {remedy}."
