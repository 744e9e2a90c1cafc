"""The models of a pipeline: which of them denoise, and what the pipeline passes to them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
from paddle import nn
from ppdiffusers import DiffusionPipeline

from ..errors import ParameterError, ToMeConfigError
from .blocks import MergeableBlock, find_blocks, is_controlnet, is_denoiser
from .table import FAMILIES


class DenoiserBlocks(NamedTuple):
    """A denoiser of a pipeline, and its blocks: `find_denoisers` looks for them once, and hands them on."""

    name: str  # in the pipeline
    model: nn.Layer
    blocks: list[MergeableBlock]


def components(target: Any) -> dict[str, Any]:
    """A pipeline's components by name, members of a list as "name[i]"; or a model under the name of its class.

    Raises:
        ToMeConfigError: target is not a ppdiffusers pipeline or model.
    """
    if isinstance(target, nn.Layer):
        return {type(target).__name__: target}
    if not isinstance(target, DiffusionPipeline):
        raise ToMeConfigError(
            f"token merging applies to a ppdiffusers pipeline or model, not to {type(target).__name__!r}: "
            "pass pipe or pipe.unet."
        )
    by_name: dict[str, Any] = {}
    # Not .components, which raises for some pipelines, nor getattr, for which ppdiffusers warns about config values.
    for name in (name for name in target.config if not name.startswith("_")):
        component = vars(target).get(name)
        if isinstance(component, (list, tuple)):
            by_name |= {f"{name}[{i}]": member for i, member in enumerate(component)}
        else:
            by_name[name] = component
    return by_name


def label(name: str, component: Any) -> str:
    """A component in a message: "unet (UNet2DConditionModel)", or only the class if that is its name."""
    class_name = type(component).__name__
    return name if name == class_name else f"{name} ({class_name})"


def layer_components(target: Any) -> dict[str, nn.Layer]:
    """The `components` of a pipeline or model that are layers; raises as `components` does."""
    return {name: component for name, component in components(target).items() if isinstance(component, nn.Layer)}


def denoisers(target: Any) -> dict[str, nn.Layer]:
    """The models of a pipeline, or within a model, that have mergeable blocks, by name: UNets, ControlNets, DiTs.

    Raises:
        ToMeConfigError: as `components`.
    """
    by_name: dict[str, nn.Layer] = {}
    for name, component in layer_components(target).items():
        prefix = None  # paths inside the last denoiser start with it; sublayers come right after their layer
        for path, layer in component.named_sublayers(include_self=True):
            if prefix is not None and path.startswith(prefix):
                continue
            if is_denoiser(layer) and not any(layer is known for known in by_name.values()):
                by_name[f"{name}.{path}" if path else name] = layer
                prefix = f"{path}." if path else ""
    return by_name


def find_denoisers(target: Any) -> list[DenoiserBlocks]:
    """The `denoisers` of a pipeline or model, each with its blocks.

    Raises:
        ToMeConfigError: as `components`.
    """
    return [DenoiserBlocks(name, model, find_blocks(model)) for name, model in denoisers(target).items()]


def check_controlnet(target: Any, controlnet: bool | float) -> None:
    """Check that a pipeline or model has a ControlNet if the argument `controlnet` of `apply_tome` is a ratio for it.

    Raises:
        ToMeConfigError: it has none; or as `components`.
    """
    if controlnet and not isinstance(controlnet, bool) and not any(map(is_controlnet, denoisers(target).values())):
        rule = f"it is a ratio for ControlNets, and {type(target).__name__} has none: leave controlnet out."
        raise ParameterError("controlnet", controlnet, rule)


def why_nothing_merges(target: Any) -> str:
    """Why a pipeline or model has no denoiser that can merge, in one sentence: what was looked for, and a remedy.

    Raises:
        ToMeConfigError: as `components`.
    """
    name = type(target).__name__
    for component in components(target).values():
        if hasattr(component, "exported_merging"):
            return f"{name} runs exported programs: select one of their ratios by pipe.unet.ratio, or export again"
        if getattr(component, "inference_optimize", False):
            return f"INFERENCE_OPTIMIZE=True has replaced the blocks of {name} by fused ones: load it without"
    return (
        f"nothing merges in {name}: it has no transformer blocks over the pixels of a feature map, as these models "
        f"have: {', '.join(family.name for family in FAMILIES)}"
    )


def half_on_cpu(target: Any) -> list[str]:
    """Labels of the components that have half-precision weights on the CPU, where Paddle lacks kernels for them."""
    labels = []
    for name, component in layer_components(target).items():
        for parameter in component.parameters():
            if parameter.dtype in (paddle.float16, paddle.bfloat16) and parameter.place.is_cpu_place():
                labels.append(f"{label(name, component)} in {str(parameter.dtype).rpartition('.')[2]}")
                break
    return labels


def count_frames(found: Sequence[DenoiserBlocks], frames: int | None) -> int | None:
    """Frames of one sequence of tokens: 1 for images; of a video those given, or of the config; None if unknown."""
    if not any(block.family.has_frames for denoiser in found for block in denoiser.blocks):
        return 1
    configs = [getattr(denoiser.model, "config", {}) for denoiser in found]
    known = [(c["sample_frames"] - 1) // c["temporal_compression_ratio"] + 1 for c in configs if "sample_frames" in c]
    return frames or next(iter(known), None)


def vae_factor(pipe: DiffusionPipeline, found: Sequence[DenoiserBlocks] | None = None) -> int:
    """Image pixels per latent pixel, along each side; 8 in Stable Diffusion, 16 in FLUX, which packs 2×2 of them.

    Args:
        pipe: the pipeline.
        found: its denoisers, if they are known.
    """
    found = find_denoisers(pipe) if found is None else found
    if any(block.family.packs_latents for denoiser in found for block in denoiser.blocks):
        return 16
    return getattr(pipe, "vae_scale_factor", getattr(pipe, "vae_scale_factor_spatial", 8))


def text_tokens(target: Any, found: Sequence[DenoiserBlocks] | None = None) -> int:
    """Number of text tokens: those of the first block that knows them, or the tokenizer's maximum, or 77.

    Args:
        target: a pipeline or model.
        found: its denoisers, if they are known.
    """
    for denoiser in find_denoisers(target) if found is None else found:
        for block in denoiser.blocks:
            if block.family.text_tokens is not None:
                return block.family.text_tokens
    tokenizer = getattr(target, "tokenizer", None) or getattr(target, "tokenizer_2", None)  # as in SDXL's refiner
    length = getattr(tokenizer, "model_max_length", 77)
    return length if 0 < length < 10_000 else 77  # tokenizers without a maximum report 1e30
