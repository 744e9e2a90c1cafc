"""`tome.json`: the contents of an exported folder, their versions, and how closely programs match the model."""

import json
from collections.abc import Iterable
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AllowInfNan, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..errors import FolderError, ToMeConfigError, ToMeExportError
from ..replacement import earlier_folder
from .folder import ExportedFolder, FileFacts
from .format_1 import in_current_format
from .ratios import Ratio, find_ratio, ratio_name
from .sizes import Side, Size
from .validation import STRICT, first_error

MANIFEST = "tome.json"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
Format: TypeAlias = Literal["paddle", "onnx"]  # of a program
FORMATS: tuple[Format, ...] = ("paddle", "onnx")
DAMAGED = "is damaged, or was written by another version of this package"

# The classes of pipelines that can be exported
PipelineName: TypeAlias = Literal[
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionControlNetPipeline",
    "StableDiffusionXLPipeline",
    "StableDiffusionXLImg2ImgPipeline",
]
RelativeDifference: TypeAlias = Annotated[float, AllowInfNan(True)]
# A path inside the folder: no component is empty or begins with a dot.
_NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
InnerPath: TypeAlias = Annotated[str, Field(pattern=f"^{_NAME}(/{_NAME}){{0,9}}$")]


@dataclass(frozen=True, config=STRICT)
class PlannedProgram:
    """One program of an export before it is written: what identifies it."""

    model: str  # "unet", "text_encoder", "vae_decoder", ...
    size: Size | None = None  # of its images; None: any
    ratio: Ratio | None = None  # 0 for a plain denoiser; None for models that do not merge

    @property
    def place(self) -> tuple[str, Size | None, float | None]:
        """Model, size and ratio, which identify a program of an export, planned or written."""
        return self.model, self.size, self.ratio

    @property
    def label(self) -> str:
        """The program's name in messages: "unet 256x256, ratio 0.5"."""
        size = [] if self.size is None else [str(self.size)]
        return " ".join([self.model, *size]) + ("" if self.ratio is None else f", ratio {ratio_name(self.ratio)}")

    @property
    def name(self) -> str:
        """The name of its `.onnx` file and, except for the first UNet, of its folder: "unet_48x32_0.5"."""
        size = [] if self.size is None else [str(self.size)]
        return "_".join([self.model, *size, *([] if self.ratio is None else [ratio_name(self.ratio)])])


@dataclass(frozen=True, config=STRICT)
class Files:
    """A program in one format: its files, by their paths in the folder, and how closely it matches the model."""

    program: InnerPath  # "unet/inference.pdmodel", with Paddle 3 "….json", or "onnx/unet_64x64_0.5.onnx"
    weights: InnerPath  # "unet/inference.pdiparams" or "onnx/unet.weights", which several programs may share
    parity: dict[str, float] = field(default_factory=dict)  # max|program - eager| / max|eager| by batch size
    # The same of Paddle's format with oneDNN's kernels; empty where these do not run it.
    onednn_parity: dict[str, RelativeDifference] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, str]:
        """Program and weights."""
        return self.program, self.weights


@dataclass(frozen=True, config=STRICT)
class ProgramFile(PlannedProgram):
    """One program of a folder."""

    files: Annotated[dict[Format, Files], Field(min_length=1)] = field(hash=False, kw_only=True)  # by their format


@dataclass(frozen=True, config=STRICT)
class ProgramMerging:
    """How the programs of a ratio merge, as the release that exported them says it.

    Programs are complete, and run although this release has no such method or setting.
    """

    ratio: Ratio  # of the UNet; 0: nothing merges
    words: str  # the method and its settings, and those of a ControlNet; "" at ratio 0
    settings: dict[str, Any] | None  # of the UNet, for `compare`: arguments of `ToMeConfig`; None at ratio 0


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Manifest:
    """What `export_pipeline` writes and `load_pipeline` reads.

    pydantic rejects wrong values; whether the fields agree with each other, `open_export` checks.
    """

    format: Literal[2]  # of tome.json
    name: str  # of the model's folder
    pipeline: PipelineName  # its class in ppdiffusers
    sizes: Annotated[tuple[Size, ...], Field(min_length=1)]  # in the order of the arguments
    merging: Annotated[tuple[ProgramMerging, ...], Field(min_length=1)]  # of each ratio; the first is the default
    image_to_image: bool  # whether the VAE's encoder was exported
    # Of the ControlNet fused with the UNet, including the mid block's; 0: no ControlNet.
    residuals: Annotated[int, Field(ge=0)]
    vae_factor: Side  # image pixels per latent pixel, along each side
    versions: dict[str, str]
    programs: Annotated[tuple[ProgramFile, ...], Field(min_length=1)]
    files: dict[InnerPath, FileFacts]  # of tome.json; empty where the programs became a folder of a different layout

    @property
    def ratios(self) -> tuple[float, ...]:
        """The exported ratios; the first is the default."""
        return tuple(merging.ratio for merging in self.merging)

    @property
    def methods(self) -> dict[float, str]:
        """How tokens merge, in words, by ratio; "" at ratio 0."""
        return {merging.ratio: merging.words for merging in self.merging}

    def find_ratio(self, ratio: Any) -> float:
        """The exported ratio that is the same as `ratio`; ToMeConfigError if there is none."""
        return find_ratio(ratio, self.ratios)

    @property
    def controlnet(self) -> bool:
        """Whether a ControlNet is fused with the UNet."""
        return self.residuals > 0

    @property
    def formats(self) -> tuple[Format, ...]:
        """Some of `FORMATS`: those that all programs were exported in."""
        return tuple(name for name in FORMATS if name in self.programs[0].files)

    def programs_of(self, model: str) -> list[ProgramFile]:
        """The programs of one model, the default first."""
        return [file for file in self.programs if file.model == model]

    def programs_by_size(self, model: str, ratio: float) -> dict[Size, ProgramFile]:
        """The programs of a model for an exported ratio."""
        return {file.size: file for file in self.programs_of(model) if file.size is not None and file.ratio == ratio}

    def size_error(self, size: Size) -> ToMeConfigError:
        """An error for a size that was not exported; its message lists the exported ones."""
        return ToMeConfigError(
            f"size={size} (width x height) was not exported, only {', '.join(map(str, self.sizes))}. Pass height= "
            "and width= of one of these, or export again with this size in --size."
        )

    def save(self, folder: Path) -> None:
        """Write `tome.json` into a folder."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def other_models(text_encoders: Iterable[str], image_to_image: bool) -> list[str]:
    """The models of an export whose programs come after those of the UNet, in their order.

    Args:
        text_encoders: those of TEXT_ENCODERS that the pipeline has.
    """
    return [*text_encoders, "vae_decoder", *(["vae_encoder"] if image_to_image else [])]


def is_refiner(manifest: Manifest) -> bool:
    """Whether an export is SDXL's refiner: it has the second text encoder alone, and needs an image in every call."""
    return "XL" in manifest.pipeline and not manifest.programs_of("text_encoder")


def read_manifest(folder: str | Path, verify: bool | None = None) -> Manifest:
    """Read an exported folder's `tome.json`, and check its files.

    Args:
        folder: written by `export_pipeline`.
        verify: True compares the SHA-256 of all files, which takes seconds per GB; False of all except the weights,
            because Paddle crashes on a damaged program; None only compares sizes.

    Raises:
        FolderError: the folder was not exported by this package.
        ToMeExportError: it is damaged, or comes from a newer version.
    """
    return open_export(folder, verify)[1]


def open_export(folder: str | Path, verify: bool | None) -> tuple[ExportedFolder, Manifest]:
    """An exported folder with its manifest; arguments and errors are those of `read_manifest`."""
    folder = Path(folder)
    path = folder / MANIFEST
    if (earlier := earlier_folder(folder)) is not None:
        raise ToMeExportError(
            f"{folder} does not exist: a process is replacing it now, or was killed while it did. The earlier export "
            f"is {earlier}: rename it to {folder}, or export again."
        )
    if not path.is_file():
        reason = f"has no {MANIFEST}, so it is not an exported pipeline" if folder.is_dir() else "is not a folder"
        raise FolderError(
            f"{folder} {reason}: create one with python -m ppdiffusers_tome export --model DIR --output DIR."
        )
    try:
        manifest = _read_json(path.read_bytes())
        if not manifest.files:
            raise ToMeExportError(f"{path} is damaged, because it lists no files: export the model again.")
        if (name := _inconsistent_field(manifest)) is not None:
            reason = f"{name} is unknown or inconsistent with the other fields"
            raise ToMeExportError(f"{path} {DAMAGED} ({reason}): export the model again.")
        return ExportedFolder(folder, manifest.files, verify), manifest
    except ValidationError as error:
        raise ToMeExportError(f"{path} {DAMAGED} ({first_error(error)}): export the model again.") from error
    except OSError as error:
        raise ToMeExportError(f"{folder} cannot be read ({error}): export or copy it again.") from error


def _read_json(content: bytes) -> Manifest:
    """The manifest in a `tome.json` of this release or of 3.0.0; pydantic's ValidationError if it is neither."""
    data = TypeAdapter(Any).validate_json(content)
    if isinstance(data, dict) and data.get("format") == 1:
        content = json.dumps(in_current_format(data)).encode()
    return TypeAdapter(Manifest).validate_json(content)


def _inconsistent_field(manifest: Manifest) -> str | None:
    """The first field that does not agree with the rest, or has a value that this release does not know."""
    encoders = [name for name in TEXT_ENCODERS if manifest.programs_of(name)]
    last = "text_encoder_2" if "XL" in manifest.pipeline else "text_encoder"  # the only text encoder of SDXL's refiner
    models = other_models(encoders, manifest.image_to_image)
    expected = [PlannedProgram("unet", size, ratio) for size in manifest.sizes for ratio in manifest.ratios]
    expected += map(PlannedProgram, models)
    places = {path for file in manifest.programs for own in file.files.values() for path in own.paths}
    is_consistent = {
        "merging": all((merging.settings is None) == (merging.ratio == 0) for merging in manifest.merging),
        "residuals": ("ControlNet" in manifest.pipeline) == manifest.controlnet,
        "vae_factor": not any(side % manifest.vae_factor for size in manifest.sizes for side in size),
        "programs": [file.place for file in manifest.programs] == [planned.place for planned in expected]
        and all({*file.files} == {*manifest.formats} for file in manifest.programs)
        and encoders[-1:] == [last],
        "files": {*places, "model_index.json"} <= set(manifest.files),
    }
    return next((name for name, consistent in is_consistent.items() if not consistent), None)
