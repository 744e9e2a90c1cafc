"""What to export: one request, checked when it is made, before a model is loaded or anything is written."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from ..errors import ParameterError, ToMeConfigError, ToMeExportError
from ..methods import ToMeConfig
from ..methods.config import check_names
from ..replacement import check_replaceable, restore
from ..run.manifest import MANIFEST, Size, ratio_name
from .conversion import check_converter
from .layouts import DiffusersLayout, Layout, has_diffusers_layout

STEP = 8  # px: ppdiffusers' pipelines reject a height or width that is not a multiple of it, whatever the VAE


@dataclass(frozen=True)
class DenoiserMerging:
    """How a program of the UNet merges, which has the ControlNet inside.

    Args:
        unet: None: plain.
        controlnet: None: plain, or there is no ControlNet.

    Raises:
        ToMeConfigError: only the ControlNet merges.
    """

    unet: ToMeConfig | None
    controlnet: ToMeConfig | None

    def __post_init__(self) -> None:
        if not self.ratio and self.controlnet is not None and self.controlnet.effective_ratio:
            raise ToMeConfigError(
                f"only the ControlNet merges, at ratio {ratio_name(self.controlnet.effective_ratio)}, but a program "
                "is known by the UNet's ratio, and 0 is plain: merge in the UNet too, or call remove_tome() of the "
                "ControlNet."
            )

    @property
    def ratio(self) -> float:
        """The UNet's ratio, by which the program is known; 0 is plain."""
        return 0.0 if self.unet is None else self.unet.effective_ratio + 0.0  # because -0.0 is 0

    def settings(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The settings of both, ready for JSON."""
        unet, controlnet = (None if config is None else config.settings() for config in (self.unet, self.controlnet))
        return unet, controlnet


@dataclass(frozen=True)
class ExportRequest:
    """What `export_pipeline` writes, except the pipeline.

    Args:
        folder: must be new or empty, unless overwrite.
        merging: one for each ratio; the first is the default. None: what is applied to the pipeline.
        sizes: each once. None: the UNet's default size.
        layout: the layout of the folder, and the formats of its programs.
        image_to_image: also write the VAE's encoder.
        overwrite: replace an earlier export in `folder`, once the new one is complete.
        progress: print a line to stderr before each program is written.

    Raises:
        ToMeConfigError: there are no ratios or sizes, or several for a layout with one.
        ToMeExportError: the folder cannot be written, or has other content; or a package that the formats need is
            not installed.
    """

    folder: Path
    merging: tuple[DenoiserMerging, ...] | None
    sizes: tuple[Size, ...] | None
    layout: Layout
    image_to_image: bool = False
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if "onnx" in self.layout.formats:
            check_converter()
        self._check_folder()
        if self.merging is not None:
            self._check_ratios(self.merging)
        if self.sizes is not None and not self.sizes:
            raise ToMeConfigError("sizes is empty: pass at least one, as (height, width) in pixels.")
        if isinstance(self.layout, DiffusersLayout):
            self._check_single()

    def _check_folder(self) -> None:
        folder = self.folder
        restore(folder)
        try:
            check_replaceable(folder, self.overwrite)
        except OSError as error:
            raise ToMeExportError(f"{folder} cannot be written ({error.strerror or error}): pass another.") from error
        if folder.exists() and not folder.is_dir():
            raise ToMeExportError(f"{folder} is a file: pass a folder to write to.")
        is_export = (folder / MANIFEST).is_file() or has_diffusers_layout(folder)
        if folder.is_dir() and any(folder.iterdir()) and not (self.overwrite and is_export):
            remedy = "pass overwrite=True (--overwrite)" if is_export else "pass another folder"
            raise ToMeExportError(f"{folder} exists and is not empty: {remedy}.")

    def _check_ratios(self, merging: tuple[DenoiserMerging, ...]) -> None:
        if not merging:
            raise ToMeConfigError("ratios is empty: pass at least one, 0 for a plain program.")
        ratios: dict[str, float] = {}
        for ratio in (one.ratio for one in merging):
            if (other := ratios.setdefault(ratio_name(ratio), ratio)) != ratio:
                raise ToMeConfigError(
                    f"ratios {other!r} and {ratio!r} are the same to six digits, by which programs are named: pass "
                    "one."
                )

    def _check_single(self) -> None:
        """Raise ToMeConfigError if there are several ratios or sizes."""
        ratios = tuple(ratio_name(one.ratio) for one in self.merging or ())
        for name, values in (("ratios", ratios), ("sizes", tuple(map(str, self.sizes or ())))):
            if len(values) > 1:
                raise ParameterError(
                    name, values, "the layout 'diffusers' has one UNet. Export each of them to a folder of its own."
                )


def make_configs(ratios: Iterable[float] | float | None, settings: Mapping[str, Any]) -> list[ToMeConfig] | None:
    """A config for each ratio, with these settings. Without ratios that of a method that is named, or None.

    Raises:
        ToMeConfigError: a name is not a setting, a value is not allowed, or there are settings but neither ratios nor
            a method.
    """
    if ratios is None:
        if "method" in settings:
            return [ToMeConfig(**settings)]
        if settings:
            check_names(settings)
            raise ToMeConfigError(f"{', '.join(settings)} cannot be set without ratios: pass ratios as well.")
        return None
    values: Any = ratios
    if isinstance(values, str) or not isinstance(values, Iterable):
        values = [values]
    return [ToMeConfig(ratio=ratio, **settings) for ratio in values]


def list_merging(configs: Sequence[ToMeConfig], controlnet: bool | float) -> tuple[DenoiserMerging, ...]:
    """How the programs of a request merge, each ratio once; both models are plain at ratio 0.

    Args:
        configs: of the UNet, one for each ratio.
        controlnet: whether, or at what ratio, a ControlNet merges; as in `apply_tome`.

    Raises:
        ToMeConfigError: `controlnet` is not allowed, or is a ratio, and the UNet does not merge at any ratio.
    """
    by_ratio: dict[float, DenoiserMerging] = {}
    for config in configs:
        of_controlnet = config.for_controlnet(controlnet)
        merging = DenoiserMerging(config, of_controlnet) if config.effective_ratio else DenoiserMerging(None, None)
        by_ratio[merging.ratio] = merging
    if configs and not any(by_ratio) and not isinstance(controlnet, bool) and controlnet:
        rule = "the UNet does not merge at any of the ratios, and ratio 0 is plain in the ControlNet too."
        raise ParameterError("controlnet", controlnet, rule)
    return tuple(by_ratio.values())


def list_sizes(sizes: Iterable[tuple[int, int]] | int | None) -> tuple[Size, ...] | None:
    """The sizes of a request, each once, from (height, width); a number is a square, None the UNet's default.

    Raises:
        ToMeConfigError: they are something else, or a side is not a multiple of STEP.
    """
    if sizes is None:
        return None
    if isinstance(sizes, Integral):
        sizes = [(int(sizes), int(sizes))]
    pairs: list[Any] = [*sizes] if isinstance(sizes, Iterable) else [sizes]
    if not all(isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2 for pair in pairs):
        rule = "it must be a list of (height, width), such as [(512, 768)], or one number for a square."
        raise ParameterError("sizes", sizes, rule)
    return tuple(dict.fromkeys(_size(height, width) for height, width in pairs))


def _size(height: Any, width: Any) -> Size:
    """A size of numbers, such as NumPy's."""
    if any(isinstance(side, bool) or not isinstance(side, Integral) or side < 1 for side in (height, width)):
        raise ParameterError("size", f"{width}x{height}", f"width and height must be multiples of {STEP} px.")
    size = Size(int(height), int(width))
    check_multiple(size, STEP)
    return size


def check_multiple(size: Size, step: int) -> None:
    """Raise ToMeConfigError unless both sides are multiples of `step` pixels; the message has the nearest sizes."""
    if any(side % step for side in size):
        smaller, larger = (
            Size(*(max(round_(side / step), 1) * step for side in size)) for round_ in (math.floor, math.ceil)
        )
        rule = f"width and height must be multiples of {step} px. The nearest sizes are {smaller} and {larger}."
        raise ParameterError("size", str(size), rule)
