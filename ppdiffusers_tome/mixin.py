"""What users call: `apply_tome`, `remove_tome`, `tome` and `tome_summary`, as functions and as methods."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from paddle import nn
from ppdiffusers import DiffusionPipeline, ModelMixin

from .config import ToMeConfig
from .errors import ToMeConfigError
from .models import half_on_cpu
from .patch import attach, attached, detach, restore
from .summary import ToMeSummary, summarize

PipelineOrModel = TypeVar("PipelineOrModel")


def apply_tome(
    target: PipelineOrModel,
    ratio: float = 0.5,
    *,
    max_downsample: int | None = None,
    sx: int = 2,
    sy: int = 2,
    use_rand: bool = True,
    seed: int | None = 0,
    window: int | None = None,
    proportional: bool = False,
    merge_attn: bool = True,
    merge_crossattn: bool = False,
    merge_mlp: bool = False,
    controlnet: bool | float = True,
) -> PipelineOrModel:
    """Merge similar tokens in a pipeline's denoisers, or in one model; again, to replace the settings.

    Args:
        target: a ppdiffusers pipeline, or a model such as `pipe.unet`. UNets (also those of video models, frame by
            frame, with one dst pattern for all frames), ControlNets, and DiT, PixArt and SD3 transformers merge.
        ratio: share of the tokens to merge away, 0 <= ratio <= 1 - 1/(sx·sy), the main knob. More is faster and less
            like the plain picture.
        max_downsample: deepest level that merges: 1, 2, 4 or 8; level d has latent pixels / d tokens per side. None
            for the shallowest level that each model has attention at: 1 in Stable Diffusion, 2 in SDXL. The tokens
            of a DiT, PixArt or SD3 transformer all lie on one grid, so there it changes nothing.
        sx, sy: width and height, in tokens, of the cells that keep one dst token each.
        use_rand: draw each cell's dst token at random, or take the cell's first.
        seed: what the random choice comes from: an int for the same in every pass, None for a fresh one in each. It
            neither reads nor advances any global random state.
        window: side, in tokens, of the windows within which tokens look for their dst, a multiple of sx and sy; None
            for the whole grid. 8 makes matching ten times as fast at 512 px.
        proportional: let a merged token count in self-attention as often as the tokens that it replaces. In most cases
            nearer to the plain image.
        merge_attn: merge around self-attention; in SD3 the image tokens of the joint attention, never the text.
        merge_crossattn: merge around cross-attention.
        merge_mlp: merge around the feed-forward layers; not together with `enable_forward_chunking()`.
        controlnet: True to merge in ControlNets as in the rest, False to leave them plain, or a ratio of their own.

    Returns:
        target itself.

    Raises:
        ToMeConfigError: an argument is not allowed (the message names it), or target is no pipeline or model.
        NoMergeableLayerError: the target has no layer that these settings merge. After any error it is as it was.

    Warns:
        UserWarning: weights lie on the CPU in float16 or bfloat16, in which it cannot compute.

    Source: Bolya & Hoffman 2023, arXiv:2303.17604; names as in tomesd.

    Example:
        >>> image = pipe.apply_tome(ratio=0.5)("a 3d render of fox").images[0]
    """
    common = ToMeConfig(
        ratio=ratio,
        max_downsample=max_downsample,
        sx=sx,
        sy=sy,
        use_rand=use_rand,
        seed=seed,
        window=window,
        proportional=proportional,
        merge_attn=merge_attn,
        merge_crossattn=merge_crossattn,
        merge_mlp=merge_mlp,
    )
    if common.ratio and (half := half_on_cpu(target)):
        warnings.warn(
            f"the CPU has {', '.join(half)}, and Paddle has no such kernels for it, merged or plain: load with "
            "from_pretrained(..., paddle_dtype=paddle.float32), or move to a GPU before the first call.",
            stacklevel=2,
        )
    attach(target, common, for_controlnets(common, controlnet))
    return target


def for_controlnets(common: ToMeConfig, controlnet: bool | float) -> ToMeConfig | None:
    """The config of ControlNets beside the others' one, None to leave them plain; raises as `apply_tome` does."""
    if isinstance(controlnet, bool):
        return common if controlnet else None
    try:
        return replace(common, ratio=controlnet)
    except ToMeConfigError as error:
        allowed = "it must be True, False or a ratio"
        raise ToMeConfigError(f"controlnet={controlnet!r} is not allowed: {allowed}. {error}") from None


def remove_tome(target: PipelineOrModel) -> PipelineOrModel:
    """Turn merging off: the pipeline or model computes bit for bit what it did before. Does nothing where it is off.

    Returns:
        target itself.

    Raises:
        ToMeConfigError: target is no pipeline or model.
    """
    detach(target)
    return target


@contextmanager
def tome(target: PipelineOrModel, ratio: float = 0.5, **settings: Any) -> Iterator[PipelineOrModel]:
    """Merge within a `with` block; leaving it, also by an exception, brings back the settings that were there before.

    Args:
        target, ratio, settings: as for `apply_tome`. The setting counts for every thread that uses the model. Merging
            that ppdiffusers' built-in `apply_tome` had applied is not brought back.

    Yields:
        target itself.

    Raises:
        ToMeConfigError, NoMergeableLayerError: as `apply_tome`.

    Example:
        >>> with pipe.tome(ratio=0.6):
        ...     image = pipe("a 3d render of fox").images[0]
    """
    before = attached(target)
    apply_tome(target, ratio, **settings)
    try:
        yield target
    finally:
        restore(target, before)


def tome_summary(target: Any, height: int | None = None, width: int | None = None) -> ToMeSummary:
    """Say which blocks merge, at which level and grid, how many tokens stay, and what share of the MACs that saves.

    Args:
        target: a pipeline or model; where merging is off, no block is listed and nothing is saved.
        height, width: the picture's size; of a pipeline in image pixels, as in its call, of a model in latent pixels.
            Default: the size in the config of its denoiser, for the other one's value where just one is given too.

    Returns:
        A ToMeSummary, whose str() is a table. Every denoiser of a pipeline counts; all see one latent size.

    Raises:
        ToMeConfigError: target is no pipeline or model, or a size is not positive or unknown.

    Example:
        >>> print(pipe.apply_tome(ratio=0.5).tome_summary(height=256, width=256))
    """
    return summarize(target, height, width)


class ToMeMixin:
    """The four functions as methods, for a pipeline or model class of one's own.

    Importing the package gives them to every ppdiffusers pipeline and model; a class that inherits from those needs
    no mixin.
    """

    apply_tome = apply_tome
    remove_tome = remove_tome
    tome = tome
    tome_summary = tome_summary


def equip() -> None:
    """Give ppdiffusers' pipelines and models the methods of `ToMeMixin`, in place of the built-in `apply_tome`.

    ppdiffusers puts its own on every `nn.Layer`, so that is where they are replaced; the two new names go on
    ppdiffusers' classes alone.
    """
    for cls in (DiffusionPipeline, ModelMixin):
        for name in ("apply_tome", "remove_tome", "tome", "tome_summary"):
            setattr(cls, name, getattr(ToMeMixin, name))
    nn.Layer.apply_tome, nn.Layer.remove_tome = ToMeMixin.apply_tome, ToMeMixin.remove_tome
