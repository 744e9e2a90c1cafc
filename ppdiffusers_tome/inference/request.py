"""What is to be exported: the arguments of `export_pipeline`, checked before anything is done."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from ppdiffusers import ControlNetModel, DiffusionPipeline

from ..config import ToMeConfig
from ..errors import ToMeConfigError, ToMeExportError
from ..mixin import for_controlnets
from ..models import latent_grid, vae_factor
from ..patch import config_of
from .manifest import MANIFEST, READERS, Size


@dataclass(frozen=True)
class Request:
    """An export whose arguments make sense."""

    pipe: DiffusionPipeline
    folder: Path
    # By ratio, in the order asked for: how the UNet merges, and how a ControlNet does; None: plain.
    configs: dict[float, tuple[ToMeConfig | None, ToMeConfig | None]]
    sizes: tuple[Size, ...]  # () for dynamic height and width
    image_to_image: bool

    @property
    def controlnet(self) -> nn.Layer | None:
        """The pipeline's ControlNet, None where it has none."""
        return vars(self.pipe).get("controlnet")

    @property
    def is_xl(self) -> bool:
        """Whether the pipeline is of SDXL's kind, with two text encoders."""
        return "text_encoder_2" in self.pipe.config

    @property
    def reader(self) -> str:
        """The class of ppdiffusers that loads the folder."""
        name = READERS[type(self.pipe).__name__][self.image_to_image]
        assert name is not None  # `check` has made image_to_image True where there is no reader without
        return name


def check(
    pipe: DiffusionPipeline,
    folder: str | Path,
    ratios: Iterable[float] | float | None,
    sizes: Iterable[tuple[int, int]] | None,
    dynamic: bool,
    image_to_image: bool,
    overwrite: bool,
    controlnet: bool | float,
    settings: dict[str, Any],
) -> Request:
    """The request that `export_pipeline`'s arguments make; they are documented there.

    Raises:
        ToMeConfigError, ToMeExportError: as `export_pipeline`. Nothing has been written or changed.
    """
    kind = type(pipe).__name__
    if kind not in READERS:
        raise ToMeExportError(f"{kind} cannot be exported: only {', '.join(READERS)} can.")
    _check_parts(pipe)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ToMeExportError(f"{folder} is a file: name a folder to write to.")
    if folder.is_dir() and any(folder.iterdir()) and not (overwrite and (folder / MANIFEST).is_file()):
        remedy = "pass overwrite=True (--overwrite)" if (folder / MANIFEST).is_file() else "name another"
        raise ToMeExportError(f"{folder} exists and is not empty: {remedy}.")
    configs = _configs(pipe, ratios, controlnet, settings)
    merging = [config for config, _ in configs.values() if config is not None]
    if any(config.use_rand and config.seed is None for config in merging):
        raise ToMeConfigError(
            "seed=None draws dst anew in every pass, and a program holds one choice: pass a number, or use_rand=False "
            "(--no-rand)."
        )
    if dynamic:
        if sizes is not None:
            raise ToMeConfigError("dynamic=True and sizes are given: a program is for one size or for all.")
        if not paddle.__version__.startswith("2."):
            raise ToMeExportError(
                f"Paddle {paddle.__version__} cannot export UNets with dynamic height and width, also without token "
                "merging: pass sizes (--sizes), or use Paddle 2.6."
            )
        if any(config.use_rand for config in merging):
            raise ToMeConfigError(
                "dynamic=True needs use_rand=False (--no-rand): random dst are drawn for one grid, which is not known."
            )
    return Request(
        pipe=pipe,
        folder=folder,
        configs=configs,
        sizes=() if dynamic else _sizes(pipe, sizes),
        image_to_image=image_to_image or READERS[kind][0] is None,
    )


def _check_parts(pipe: DiffusionPipeline) -> None:
    if vars(pipe).get("safety_checker") is not None:
        raise ToMeExportError(
            "the pipeline's safety checker cannot be exported: to go on without it, load the pipeline with "
            "safety_checker=None, requires_safety_checker=False (--no-safety-checker)."
        )
    unet = pipe.unet
    if unet.config.time_cond_proj_dim is not None:
        raise ToMeExportError(
            "the UNet takes the guidance scale as an input (time_cond_proj_dim, as latent consistency models do), "
            "which ppdiffusers' programs have not: it cannot be exported."
        )
    if unet.config.addition_embed_type not in (None, "text_time") or unet.config.class_embed_type is not None:
        raise ToMeExportError(
            f"the UNet takes further inputs (addition_embed_type={unet.config.addition_embed_type!r}, "
            f"class_embed_type={unet.config.class_embed_type!r}) than Stable Diffusion's and SDXL's: it cannot be "
            "exported."
        )
    if getattr(unet, "encoder_hid_proj", None) is not None:
        raise ToMeExportError("an IP-Adapter is loaded, and cannot be exported: load the pipeline without it.")
    controlnet = vars(pipe).get("controlnet")
    if controlnet is not None and not isinstance(controlnet, ControlNetModel):
        raise ToMeExportError(f"{type(controlnet).__name__} cannot be exported: pass a single ControlNetModel.")


def _configs(
    pipe: DiffusionPipeline,
    ratios: Iterable[float] | float | None,
    controlnet: bool | float,
    settings: dict[str, Any],
) -> dict[float, tuple[ToMeConfig | None, ToMeConfig | None]]:
    if ratios is None:  # as the pipeline is
        if settings:
            raise ToMeConfigError(f"{', '.join(settings)} given without ratios: pass ratios too.")
        config = config_of(pipe.unet)
        for_controlnet = config_of(pipe.controlnet) if "controlnet" in pipe.config else None
        return {0.0 if config is None else config.ratio: (config, for_controlnet)}
    several = [ratios] if isinstance(ratios, (int, float)) else list(ratios)
    if not several:
        raise ToMeConfigError("ratios is empty: name at least one, 0 for a plain program.")
    found: dict[float, tuple[ToMeConfig | None, ToMeConfig | None]] = {}
    for ratio in several:
        config = ToMeConfig(ratio=ratio, **settings)
        plain = config.ratio == 0
        found[config.ratio] = (None, None) if plain else (config, for_controlnets(config, controlnet))
    return found


def _sizes(pipe: DiffusionPipeline, sizes: Iterable[tuple[int, int]] | None) -> tuple[Size, ...]:
    factor = vae_factor(pipe)
    if sizes is None:
        latent = latent_grid(pipe.unet)
        if latent is None:
            raise ToMeConfigError("sizes are not given, and the UNet's config has no sample_size: pass sizes.")
        return (Size(latent.h * factor, latent.w * factor),)
    found = tuple(dict.fromkeys(Size(*size) for size in sizes))
    if not found:
        raise ToMeConfigError("sizes is empty: name at least one, as (height, width) in pixels.")
    for size in found:
        if any(isinstance(side, bool) or not isinstance(side, int) or side < factor or side % factor for side in size):
            raise ToMeConfigError(f"size={size} is not allowed: width and height must be multiples of {factor} px.")
    return found
