"""What to export: one request, checked when it is made, before a model is loaded or anything is written."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from ..errors import FolderError, ParameterError, ToMeConfigError
from ..methods import ToMeConfig
from ..methods.config import check_names
from ..replacement import check_replaceable
from ..run.manifest import MANIFEST, ProgramMerging
from ..run.ratios import ratio_name
from ..run.sizes import Size
from ..wording import controlnet_in_words, method_in_words
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

    @property
    def configs(self) -> tuple[ToMeConfig | None, ToMeConfig | None]:
        """Those of UNet and ControlNet; both are None at ratio 0."""
        return (self.unet, self.controlnet) if self.ratio else (None, None)

    @property
    def only_leaves_out_keys(self) -> bool:
        """Whether something merges, and all queries remain."""
        return bool(self.ratio) and not any(config.merges_queries for config in filter(None, self.configs))

    def in_manifest(self, has_controlnet: bool) -> ProgramMerging:
        """What `tome.json` says of it."""
        unet, controlnet = self.configs
        if unet is None:
            return ProgramMerging(0.0, "", None)
        words = method_in_words(unet)
        if has_controlnet and controlnet is not None and controlnet.effective_ratio:
            words += controlnet_in_words(controlnet.effective_ratio, method_in_words(controlnet))
        return ProgramMerging(self.ratio, words, unet.settings())


PLAIN = DenoiserMerging(None, None)


@dataclass(frozen=True)
class ExportRequest:
    """What `export_pipeline` writes, except the pipeline.

    Args:
        folder: must be new or empty, unless overwrite.
        merging: a way to merge for each ratio; the first is the default. None: what is applied to the pipeline.
        sizes: each once. None: the UNet's default size.
        layout: the layout of the folder, and the formats of its programs.
        image_to_image: also write the VAE's encoder.
        overwrite: replace an earlier export in `folder`, once the new export is complete.
        progress: print a line to stderr before each program is written.
        image_check: compare images with those of the pipeline, in ppdiffusers' layout.

    Raises:
        ToMeConfigError: there are no ratios or sizes, or several for a layout with one.
        FolderError: the folder cannot be written, or has content that is not an export.
        ToMeExportError: a package that the formats need is not installed.
    """

    folder: Path
    merging: tuple[DenoiserMerging, ...] | None
    sizes: tuple[Size, ...] | None
    layout: Layout
    image_to_image: bool = False
    overwrite: bool = False
    progress: bool = True
    image_check: bool = True

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
        try:
            check_replaceable(folder, self.overwrite)
        except OSError as error:
            raise FolderError(f"{folder} cannot be written ({error.strerror or error}): pass another.") from error
        if folder.exists() and not folder.is_dir():
            raise FolderError(f"{folder} is a file: pass a folder to write to.")
        is_export = (folder / MANIFEST).is_file() or has_diffusers_layout(folder)
        if folder.is_dir() and any(folder.iterdir()) and not (self.overwrite and is_export):
            remedy = "pass overwrite=True (--overwrite)" if is_export else "pass another folder"
            raise FolderError(f"{folder} exists and is not empty: {remedy}.")

    def _check_ratios(self, merging: tuple[DenoiserMerging, ...]) -> None:
        if not merging:
            raise ToMeConfigError("ratios is empty: pass at least one, 0 for a plain program.")
        ratios: dict[str, float] = {}
        for ratio in (way.ratio for way in merging):
            if (same := ratios.setdefault(ratio_name(ratio), ratio)) != ratio:
                raise ToMeConfigError(
                    f"ratios {same!r} and {ratio!r} are the same to six digits, by which programs are named: pass one."
                )

    def _check_single(self) -> None:
        """Raise ToMeConfigError if there are several ratios or sizes."""
        ratios = tuple(ratio_name(way.ratio) for way in self.merging or ())
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


def list_merging(configs: Sequence[ToMeConfig] | None, controlnet: bool | float) -> tuple[DenoiserMerging, ...] | None:
    """How the programs of a request merge, each ratio once; both models are plain at ratio 0.

    Args:
        configs: of the UNet, a config for each ratio. None: what is applied to the pipeline, and the result is None.
        controlnet: whether, or at what ratio, a ControlNet merges; as in `apply_tome`.

    Raises:
        ToMeConfigError: `controlnet` is not allowed, or is a ratio, and the UNet does not merge at any ratio; or it is
            set, and there are no configs.
    """
    if configs is None:
        if controlnet is not True:
            raise ParameterError("controlnet", controlnet, "it cannot be set without ratios: pass ratios as well.")
        return None
    merging = []
    for config in configs:
        of_controlnet = config.for_controlnet(controlnet)
        merging.append(DenoiserMerging(config, of_controlnet) if config.effective_ratio else PLAIN)
    if configs and not any(way.ratio for way in merging) and not isinstance(controlnet, bool) and controlnet:
        rule = "the UNet does not merge at any of the ratios, and ratio 0 is plain in the ControlNet too."
        raise ParameterError("controlnet", controlnet, rule)
    return tuple({way.ratio: way for way in merging}.values())


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
