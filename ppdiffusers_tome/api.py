"""The user interface: `apply_tome`, `remove_tome`, `tome` and `tome_summary`, as functions and as methods."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from paddle import nn
from ppdiffusers import DiffusionPipeline, ModelMixin
from typing_extensions import TypedDict, Unpack

from .config import ToMeConfig, controlnet_config
from .models import half_on_cpu
from .patch import attach, attached_configs, detach, restore
from .summary import tome_summary

PipelineOrModel = TypeVar("PipelineOrModel")


class MergeSettings(TypedDict, total=False):
    """The settings of `ToMeConfig`, except the ratio, as named arguments; it describes them and has their defaults."""

    max_downsample: int | None
    sx: int
    sy: int
    use_rand: bool
    seed: int | None
    window: int | None
    proportional: bool
    match: str
    merge_attn: bool | str
    merge_crossattn: bool
    merge_mlp: bool
    min_tokens: int


def apply_tome(
    target: PipelineOrModel,
    ratio: float | None = None,
    *,
    config: ToMeConfig | str | Path | None = None,
    controlnet: bool | float = True,
    **settings: Unpack[MergeSettings],
) -> PipelineOrModel:
    """Merge similar tokens in a pipeline's denoisers, or in one model. A second call replaces the settings.

    Args:
        target: a ppdiffusers pipeline, or a model such as `pipe.unet`. Merging works in UNets (including those of
            video models, frame by frame, with one dst pattern for all frames), ControlNets, and DiT, PixArt, SD3 and
            FLUX transformers, and CogVideoX, Wan and HunyuanVideo.
        ratio: share of the tokens to merge away. The main setting: a higher ratio is faster, and the image differs
            more from the plain one. 0.5 is a good start. None: that of `config`, or 0.5.
        config: all settings but `controlnet` at once: a ToMeConfig, or a file that `ToMeConfig.save` wrote. Settings
            that are passed beside it replace its own.
        controlnet: True to merge in ControlNets with the same settings, False to leave them plain, or a ratio for
            them.
        settings: how tokens merge, and where; `ToMeConfig` describes them, and the range of ratio. The defaults:
            max_downsample=None, sx=2, sy=2, use_rand=True, seed=0, window=16, proportional=True, match='similarity',
            merge_attn='asymmetric', merge_crossattn=False, merge_mlp=False, min_tokens=0.

    Returns:
        target itself.

    Raises:
        ToMeConfigError: an argument is not allowed (the message names it), or target is not a pipeline or model.
        NoMergeableLayerError: the target has no layer that these settings merge. After any error the target is
            unchanged.

    Warns:
        UserWarning: weights are on the CPU in float16 or bfloat16, in which it cannot compute.

    Source: Bolya & Hoffman 2023, arXiv:2303.17604; names as in tomesd.

    Example:
        >>> image = pipe.apply_tome(ratio=0.5)("a 3d render of fox").images[0]
    """
    if config is None:
        config = ToMeConfig()
    elif not isinstance(config, ToMeConfig):
        config = ToMeConfig.load(config)
    given: dict[str, Any] = dict(settings)
    if ratio is not None:
        given["ratio"] = ratio
    common = replace(config, **given)
    if common.ratio and (half := half_on_cpu(target)):
        warnings.warn(
            f"weights on the CPU: {', '.join(half)}. Paddle has no half-precision kernels for CPUs, plain or merged: "
            "load with from_pretrained(..., paddle_dtype=paddle.float32), or move to a GPU before the first call.",
            stacklevel=2,
        )
    attach(target, common, controlnet_config(common, controlnet))
    return target


def remove_tome(target: PipelineOrModel) -> PipelineOrModel:
    """Turn merging off: outputs are again bit for bit those of the plain pipeline or model. No-op if it is off.

    Returns:
        target itself.

    Raises:
        ToMeConfigError: target is not a pipeline or model.
    """
    detach(target)
    return target


@contextmanager
def tome(target: PipelineOrModel, ratio: float | None = None, **settings: Any) -> Iterator[PipelineOrModel]:
    """Merge within a `with` block. Leaving it, even by an exception, restores the settings from before.

    Args:
        target, ratio, settings: as for `apply_tome`. They affect all threads that use the model. Merging applied by
            ppdiffusers' built-in `apply_tome` is not restored.

    Yields:
        target itself.

    Raises:
        ToMeConfigError, NoMergeableLayerError: as `apply_tome`.

    Example:
        >>> with pipe.tome(ratio=0.6):
        ...     image = pipe("a 3d render of fox").images[0]
    """
    before = attached_configs(target)
    apply_tome(target, ratio, **settings)
    try:
        yield target
    finally:
        restore(target, before)


class ToMeMixin:
    """The four functions as methods, for your own pipeline or model class.

    Importing the package adds them to every ppdiffusers pipeline and model; subclasses of those do not need this
    mixin.
    """

    apply_tome = apply_tome
    remove_tome = remove_tome
    tome = tome
    tome_summary = tome_summary


def install_methods() -> None:
    """Add the methods of `ToMeMixin` to ppdiffusers' pipelines and models, replacing the built-in `apply_tome`.

    ppdiffusers adds its own methods to every `nn.Layer`, so they are replaced there; the two new names are added to
    ppdiffusers' classes only.
    """
    for cls in (DiffusionPipeline, ModelMixin):
        for name in ("apply_tome", "remove_tome", "tome", "tome_summary"):
            setattr(cls, name, getattr(ToMeMixin, name))
    nn.Layer.apply_tome, nn.Layer.remove_tome = ToMeMixin.apply_tome, ToMeMixin.remove_tome
