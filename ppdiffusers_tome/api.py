"""The user interface: `apply_tome`, `remove_tome`, `tome` and `tome_summary`, as functions and as methods."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from paddle import nn
from ppdiffusers import DiffusionPipeline, ModelMixin

from .config import ToMeConfig
from .errors import ToMeConfigError
from .models import half_on_cpu
from .patch import attach, attached_configs, detach, restore
from .summary import tome_summary

PipelineOrModel = TypeVar("PipelineOrModel")
SETTINGS = tuple(field.name for field in fields(ToMeConfig))


class _Default:
    """The default of a setting in a signature, which shows its value: so that a call's own values are known."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return repr(self._value)


_default: Callable[[Any], Any] = _Default  # of any type, as the setting is
RATIO = _default(0.5)


def apply_tome(
    target: PipelineOrModel,
    ratio: float = RATIO,
    *,
    config: ToMeConfig | str | Path | None = None,
    max_downsample: int | None = _default(None),
    sx: int = _default(2),
    sy: int = _default(2),
    use_rand: bool = _default(True),
    seed: int | None = _default(0),
    window: int | None = _default(16),
    proportional: bool = _default(True),
    match: str = _default("similarity"),
    blend: float = _default(1.0),
    merge_attn: bool | str = _default("asymmetric"),
    merge_crossattn: bool = _default(False),
    merge_mlp: bool = _default(False),
    min_tokens: int = _default(0),
    controlnet: bool | float = True,
) -> PipelineOrModel:
    """Merge similar tokens in a pipeline's denoisers, or in one model. A second call replaces the settings.

    Args:
        target: a ppdiffusers pipeline, or a model such as `pipe.unet`. Merging works in UNets (including those of
            video models, frame by frame, with one dst pattern for all frames), ControlNets, and DiT, PixArt, SD3 and
            FLUX transformers, and CogVideoX, Wan and HunyuanVideo.
        ratio: share of the tokens to merge away. The main setting: a higher ratio is faster, and the image differs
            more from the plain one. 0.5, the default, is a good start.
        config: all settings but `controlnet` at once: a ToMeConfig, or a file that `ToMeConfig.save` wrote. Settings
            that are passed beside it replace its own.
        max_downsample, sx, sy, use_rand, seed, window, proportional, match, blend, merge_attn, merge_crossattn,
            merge_mlp, min_tokens: how tokens merge, and where; `ToMeConfig` describes them, and the range of ratio.
        controlnet: True to merge in ControlNets with the same settings, False to leave them plain, or a ratio for
            them.

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
    arguments = locals()
    given = {name: arguments[name] for name in SETTINGS if not isinstance(arguments[name], _Default)}
    base = config if isinstance(config, ToMeConfig) else ToMeConfig() if config is None else ToMeConfig.load(config)
    common = replace(base, **given)
    if common.ratio and (half := half_on_cpu(target)):
        warnings.warn(
            f"weights on the CPU: {', '.join(half)}. Paddle has no half-precision kernels for CPUs, plain or merged: "
            "load with from_pretrained(..., paddle_dtype=paddle.float32), or move to a GPU before the first call.",
            stacklevel=2,
        )
    attach(target, common, controlnet_config(common, controlnet))
    return target


def controlnet_config(common: ToMeConfig, controlnet: Any) -> ToMeConfig | None:
    """The config for ControlNets, given the common one; None leaves them plain. Raises as `apply_tome` does."""
    if isinstance(controlnet, bool):
        return common if controlnet else None
    try:
        return replace(common, ratio=controlnet)
    except ToMeConfigError as error:
        allowed = "it must be True, False or a ratio"
        raise ToMeConfigError(f"controlnet={controlnet!r} is not allowed: {allowed}. {error}") from None


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
def tome(target: PipelineOrModel, ratio: float = RATIO, **settings: Any) -> Iterator[PipelineOrModel]:
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
