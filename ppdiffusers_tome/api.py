"""The user interface: `apply_tome`, `remove_tome`, `tome` and `tome_summary`, as functions and as methods."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from paddle import nn
from ppdiffusers import DiffusionPipeline, ModelMixin
from typing_extensions import Unpack

from .attach.attach import attach, attached_configs, detach, restore
from .attach.forward import install_forward
from .errors import ToMeConfigError
from .families.pipelines import check_controlnet, half_on_cpu
from .method_names import MergeSettings
from .methods import ToMeConfig
from .summary import tome_summary

PipelineOrModel = TypeVar("PipelineOrModel")


def apply_tome(
    target: PipelineOrModel,
    ratio: float | None = None,
    *,
    config: ToMeConfig | str | Path | None = None,
    controlnet: bool | float = True,
    **settings: Unpack[MergeSettings],
) -> PipelineOrModel:
    """Turn on token merging: attention computes with fewer tokens in a pipeline's denoisers, or in a model.

    A later call replaces the settings of an earlier call.

    Args:
        target: a ppdiffusers pipeline, or a model such as `pipe.unet`. Merging works in UNets (including those of
            video models, frame by frame) and in the transformers and ControlNets
            of `ppdiffusers_tome.families.table`; for any other target the error lists them.
        ratio: share of the tokens to leave out. The main setting: a higher ratio is faster, and the image differs
            more from the plain image. None: the ratio of `config`, or the method's default. With the default method it
            is the share of keys and values that attention leaves out, from 0 to 15/16, and 0.75 by default.
        config: all settings but `controlnet` at once: a ToMeConfig, or a file that `ToMeConfig.save` wrote. Settings
            that are passed beside it replace its own.
        controlnet: True to merge in ControlNets with the same settings, False to leave them plain, or a ratio for
            them.
        settings: `method`, which says how tokens merge, and the settings of that method. `ToMeConfig` and the classes
            of `ppdiffusers_tome.methods` describe them with their ranges and defaults. By default the method is
            "interlace".

    Returns:
        target itself.

    Raises:
        ToMeConfigError: an argument is not allowed (the message names it), target is not a pipeline or model, or a
            model runs a program that `paddle.incubate.jit.inference` or `paddle.jit.to_static` has made.
        NoMergeableLayerError: the target has no layer that these settings merge. After any error the target is
            unchanged.

    Warns:
        UserWarning: weights are on the CPU in float16 or bfloat16, in which it cannot compute.

    Source: Bolya & Hoffman 2023, arXiv:2303.17604; names as in tomesd.

    Example:
        >>> image = pipe.apply_tome(ratio=0.5)("a 3d render of fox").images[0]
    """
    given: Mapping[str, Any] = settings if ratio is None else {"ratio": ratio, **settings}
    common = ToMeConfig(**given) if config is None else _config_of(config).with_settings(**given)
    if common.effective_ratio and (half := half_on_cpu(target)):
        warnings.warn(
            f"weights on the CPU: {', '.join(half)}. Paddle has no half-precision kernels for CPUs, plain or merged: "
            "load with from_pretrained(..., paddle_dtype=paddle.float32), or move to a GPU before the first call.",
            stacklevel=2,
        )
    of_controlnet = common.for_controlnet(controlnet)
    check_controlnet(target, controlnet)
    attach(target, common, of_controlnet)
    return target


def _config_of(config: Any) -> ToMeConfig:
    """The config that `apply_tome(config=…)` names."""
    if isinstance(config, ToMeConfig):
        return config
    if isinstance(config, (str, Path)):
        return ToMeConfig.load(config)
    raise ToMeConfigError(
        f"config={config!r:.200} is not allowed: it must be a ToMeConfig, or the path of a settings file. Pass "
        "settings by name, as in apply_tome(ratio=0.5, min_tokens=4096)."
    )


def remove_tome(target: PipelineOrModel) -> PipelineOrModel:
    """Turn merging off: outputs are bit-identical to those of the plain pipeline or model again. No-op if it is off.

    No other thread may use the model meanwhile. With gradient checkpointing, gradients that are computed afterwards
    are those of the settings of their pass.

    Returns:
        target itself.

    Raises:
        ToMeConfigError: target is not a pipeline or model, or a model that merges runs a program that
            `paddle.incubate.jit.inference` or `paddle.jit.to_static` has made.
    """
    detach(target)
    return target


@contextmanager
def tome(
    target: PipelineOrModel,
    ratio: float | None = None,
    *,
    config: ToMeConfig | str | Path | None = None,
    controlnet: bool | float = True,
    **settings: Unpack[MergeSettings],
) -> Iterator[PipelineOrModel]:
    """Merge within a `with` block. Leaving it, even by an exception, restores the settings from before.

    Args:
        target, ratio, config, controlnet, settings: as for `apply_tome`. They affect all threads that use the model.
            Merging applied by ppdiffusers' built-in `apply_tome` is not restored.

    Yields:
        target itself.

    Raises:
        ToMeConfigError, NoMergeableLayerError: as `apply_tome`.

    Example:
        >>> with pipe.tome(ratio=0.6):
        ...     image = pipe("a 3d render of fox").images[0]
    """
    before = attached_configs(target)
    apply_tome(target, ratio, config=config, controlnet=controlnet, **settings)
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
    install_forward()
    for cls in (DiffusionPipeline, ModelMixin):
        for name in ("apply_tome", "remove_tome", "tome", "tome_summary"):
            setattr(cls, name, getattr(ToMeMixin, name))
    nn.Layer.apply_tome, nn.Layer.remove_tome = ToMeMixin.apply_tome, ToMeMixin.remove_tome
