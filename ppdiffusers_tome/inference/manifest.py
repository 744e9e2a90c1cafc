"""`tome.json`: what an exported folder holds, for whom it was made and how far its programs are from the model."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ToMeConfigError, ToMeExportError

MANIFEST = "tome.json"
FORMAT = 1  # of this file; another number is refused


class Size(NamedTuple):
    """Height and width of a picture in pixels, in ppdiffusers' order; written "WIDTHxHEIGHT", as everybody does."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def parse_size(text: str) -> Size:
    """The size that "WIDTHxHEIGHT" stands for.

    Raises:
        ToMeConfigError: the text is no such thing.
    """
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise ToMeConfigError(f"size={text!r} is not allowed: it must be WIDTHxHEIGHT in pixels, such as 512x768.")
    return Size(int(height), int(width))


@dataclass(frozen=True)
class ProgramFile:
    """One program of an exported folder, whose weights it may share with others."""

    model: str  # "unet", "text_encoder", "vae_decoder", ...
    program: str  # path in the folder: "unet/inference.pdmodel", on Paddle 3 ".json"
    params: str  # path in the folder: "unet/inference.pdiparams"
    size: Size | None = None  # the one it runs at; None: any
    ratio: float | None = None  # by which it merges, 0 for a plain denoiser; None where there is nothing to merge
    # Largest |program - eager| over the largest |eager|, by batch size, with the kernels that eager has and oneDNN's.
    parity: dict[str, float] = field(default_factory=dict, hash=False)
    onednn_parity: dict[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Manifest:
    """What `export_pipeline` writes and `load_pipeline` reads."""

    name: str  # of the model: its folder's name
    pipeline: str  # the class in ppdiffusers that it came from and is loaded as, e.g. "StableDiffusionPipeline"
    sizes: tuple[Size, ...]  # in the order they were asked for; () where height and width are dynamic
    ratios: tuple[float, ...]  # the first is the default
    image_to_image: bool  # whether the VAE's encoder is there
    residuals: int  # residuals of the ControlNet that is fused with the UNet, the mid block's included; 0 without one
    vae_factor: int  # image pixels per latent pixel, along each side
    # By ratio: the ToMeConfig of the UNet and that of the ControlNet, None where it is plain or there is none.
    merging: dict[str, list[dict[str, Any] | None]]
    versions: dict[str, str]
    programs: tuple[ProgramFile, ...]
    files: dict[str, dict[str, Any]]  # path: {"bytes": ..., "sha256": ...}

    @property
    def controlnet(self) -> bool:
        """Whether a ControlNet is fused with the UNet."""
        return self.residuals > 0

    @property
    def dynamic(self) -> bool:
        """Whether the denoiser runs at any height and width."""
        return not self.sizes

    def of(self, model: str) -> list[ProgramFile]:
        """The programs of one model, the default first."""
        return [each for each in self.programs if each.model == model]

    def denoiser(self, size: Size, ratio: float) -> ProgramFile:
        """The UNet's program for a size and a ratio.

        Raises:
            ToMeConfigError: there is none; the message lists what there is.
        """
        check_ratio(ratio, self.ratios)
        for each in self.of("unet"):
            if each.size in (size, None) and each.ratio == ratio:
                return each
        listed = ", ".join(map(str, self.sizes))
        raise ToMeConfigError(
            f"size={size} (width x height) was not exported: there is {listed}. Pass height= and width= of one of "
            "these, or export again with this size among --sizes."
        )

    def save(self, folder: Path) -> None:
        """Write `tome.json` into a folder."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2, ensure_ascii=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def check_ratio(ratio: float, ratios: Iterable[float]) -> None:
    """Raise ToMeConfigError, listing the ratios that there are, where `ratio` is not among them."""
    if ratio not in ratios:
        listed = ", ".join(f"{each:g}" for each in ratios)
        raise ToMeConfigError(
            f"ratio={ratio!r} was not exported: there is {listed}. Export again with --ratio {ratio} among them."
        )


def read_manifest(folder: str | Path, verify: bool = False) -> Manifest:
    """Read an exported folder's `tome.json`.

    Args:
        folder: what `export_pipeline` wrote.
        verify: compare also the weights with the SHA-256 written down, which takes seconds for each GB. All other
            files always are, for Paddle crashes on a damaged program; of weights the size is.

    Raises:
        ToMeExportError: the folder was not exported by this package, is damaged, or newer than this package.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise ToMeExportError(
            f"{folder} has no {MANIFEST}, so it is no exported pipeline: make one with "
            "python -m ppdiffusers_tome export --model DIR --output OUT."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = data.pop("format")
        if found != FORMAT:
            raise ToMeExportError(f"{path} has format {found}, this package reads {FORMAT}: export the model again.")
        data["sizes"] = tuple(Size(*each) for each in data["sizes"])
        data["ratios"] = tuple(data["ratios"])
        data["programs"] = tuple(
            ProgramFile(**{**each, "size": each["size"] and Size(*each["size"])}) for each in data["programs"]
        )
        manifest = Manifest(**data)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ToMeExportError(f"{path} is damaged ({error}): export the model again.") from error
    for name, expected in manifest.files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != expected["bytes"]:
            raise ToMeExportError(f"{folder / name} is missing or cut short: export or copy the folder again.")
        if (verify or not name.endswith(".pdiparams")) and sha256(folder / name) != expected["sha256"]:
            raise ToMeExportError(f"{folder / name} is not what was exported: export or copy the folder again.")
    return manifest


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
