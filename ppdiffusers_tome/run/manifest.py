"""`tome.json`: the contents of an exported folder, their versions, and how closely programs match the model."""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, field
from functools import cached_property
from numbers import Real
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AllowInfNan, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..errors import ParameterError, ToMeConfigError, ToMeExportError
from ..methods import METHODS, ToMeConfig
from ..replacement import earlier_folder
from ..wording import method_in_words, settings_in_words
from .folder import ONNX_WEIGHTS, ExportedFolder, FileFacts

MANIFEST = "tome.json"
# The folder of each model's config: ppdiffusers reads it from beside a program.
CONFIGS = {"unet": "unet", "text_encoder": "text_encoder", "text_encoder_2": "text_encoder_2", "vae": "vae_decoder"}
TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
CONTROLNET_CONFIG = "controlnet"
COPIED = ("tokenizer", "tokenizer_2", "scheduler", "feature_extractor")  # components that are not models
FORMATS = ("paddle", "onnx")
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
# Pipelines that can be exported: ppdiffusers' class that reads the folder without and with a VAE encoder.
READERS = {
    "StableDiffusionPipeline": ("PaddleInferStableDiffusionPipeline", "PaddleInferStableDiffusionMegaPipeline"),
    "StableDiffusionImg2ImgPipeline": (None, "PaddleInferStableDiffusionImg2ImgPipeline"),
    "StableDiffusionInpaintPipeline": (None, "PaddleInferStableDiffusionInpaintPipeline"),
    "StableDiffusionControlNetPipeline": 2 * ("PaddleInferStableDiffusionControlNetPipeline",),
    "StableDiffusionXLPipeline": ("PaddleInferStableDiffusionXLPipeline", "PaddleInferStableDiffusionXLMegaPipeline"),
    "StableDiffusionXLImg2ImgPipeline": (None, "PaddleInferStableDiffusionXLImg2ImgPipeline"),
}

DAMAGED = "is damaged, or was written by another version of this package"

Side: TypeAlias = Annotated[int, Field(ge=1, le=99_999)]
Ratio: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
RelativeDifference: TypeAlias = Annotated[float, AllowInfNan(True)]
# A path inside the folder: no component is empty or begins with a dot.
_NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
InnerPath: TypeAlias = Annotated[str, Field(pattern=f"^{_NAME}(/{_NAME}){{0,9}}$")]


class Size(NamedTuple):
    """Height and width of an image in pixels, in ppdiffusers' order; as text "WIDTHxHEIGHT", the usual order."""

    height: Side
    width: Side

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def parse_size(text: str) -> Size:
    """The size of "WIDTHxHEIGHT", or of one number for a square.

    Raises:
        ToMeConfigError: the text is neither.
    """
    sides = re.fullmatch("([1-9][0-9]{0,4})(?:x([1-9][0-9]{0,4}))?", str(text).lower())
    if sides is None:
        rule = "it must be WIDTHxHEIGHT, or one number for a square, in pixels, such as 512x768 or 512."
        raise ParameterError("size", text, rule)
    return Size(int(sides[2] or sides[1]), int(sides[1]))


Settings: TypeAlias = dict[str, Any]  # by name, as the file has them: the release that wrote it may have had others


@dataclasses.dataclass(frozen=True)
class ExportedMerging:
    """How exported programs merge, from the settings in `tome.json`.

    They need not be those of a `ToMeConfig`: the programs are complete, and run although this release has no such
    method or setting.
    """

    own: Mapping[str, Any]

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.own["method"])

    @property
    def effective_ratio(self) -> float:
        """The ratio at which they were exported."""
        return float(self.own["ratio"])

    @property
    def has_plain_steps(self) -> bool:
        """Whether the first and last steps of an image keep all tokens."""
        return self._config is not None and self._config.has_plain_steps

    @cached_property
    def _config(self) -> ToMeConfig | None:
        """The config of these settings; None if this release has no such method or setting."""
        if self.method not in METHODS:
            return None
        # Release 3.0 wrote the settings of all methods except `merge_steps`: its programs merge in all steps.
        settings = {"merge_steps": "all", **self.own}
        of_all = {name for method in METHODS.values() for name in method.defaults()}
        foreign = of_all - METHODS[self.method].defaults().keys()
        try:
            return ToMeConfig(**{name: value for name, value in settings.items() if name not in foreign})
        except ToMeConfigError:
            return None

    def settings(self) -> dict[str, Any]:
        """All settings, ready for JSON."""
        return {**self.own}

    def changed_settings(self) -> dict[str, Any]:
        """The ratio and the settings that differ from their defaults; of an unknown method, what is on."""
        if self._config is not None:
            return self._config.changed_settings()
        return {name: value for name, value in self.own.items() if name == "ratio" or value not in (None, False)}

    def describe(self) -> str:
        """`changed_settings` as "name=value, …"."""
        return settings_in_words(self.changed_settings())


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
class ProgramFile(PlannedProgram):
    """One program of a folder, in Paddle's format, as ONNX, or both; several may share one file of weights."""

    program: InnerPath | None = None  # "unet/inference.pdmodel", with Paddle 3 "….json"; None if only ONNX is there
    params: InnerPath | None = None  # "unet/inference.pdiparams", where `program` is there
    # max|program - eager| / max|eager| by batch size, with Paddle's own kernels and with oneDNN's.
    parity: dict[str, float] = field(default_factory=dict, hash=False)
    onednn_parity: dict[str, RelativeDifference] = field(default_factory=dict, hash=False)
    onnx: InnerPath | None = None  # "onnx/unet.onnx", with its weights in "onnx/unet.weights"; None if not exported
    onnx_parity: dict[str, float] = field(default_factory=dict, hash=False)  # of ONNX Runtime

    def __post_init__(self) -> None:
        if (self.program is None) != (self.params is None) or not self.paths:
            raise ValueError(f"the files of {self.label} are incomplete")

    @property
    def paths(self) -> list[str]:
        """The program's files in the exported folder, in all formats, except ONNX weights."""
        return [path for path in (self.program, self.params, self.onnx) if path is not None]

    @property
    def paddle_files(self) -> tuple[str, str]:
        """Its program and weights in Paddle's format; ToMeExportError if it was not exported in that."""
        if self.program is None or self.params is None:
            raise ToMeExportError(f"{self.label} has no Paddle program: export it with --format both.")
        return self.program, self.params

    @property
    def onnx_files(self) -> tuple[str, str]:
        """Its `.onnx` file, and the model's weights beside it; ToMeExportError if it was not exported as ONNX."""
        if self.onnx is None:
            raise ToMeExportError(f"{self.label} has no ONNX program: export it with --format both.")
        return self.onnx, str(PurePosixPath(self.onnx).with_name(f"{self.model}{ONNX_WEIGHTS}"))

    @property
    def formats(self) -> tuple[str, ...]:
        """Some of `FORMATS`: those that the program was exported in."""
        has = {"paddle": self.program is not None, "onnx": self.onnx is not None}
        return tuple(name for name in FORMATS if has[name])


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Manifest:
    """What `export_pipeline` writes and `load_pipeline` reads.

    pydantic rejects wrong values; whether the fields agree with each other, `open_export` checks.
    """

    format: Literal[1]  # of tome.json
    name: str  # of the model's folder
    pipeline: str  # its class in ppdiffusers, e.g. "StableDiffusionPipeline"
    sizes: Annotated[tuple[Size, ...], Field(min_length=1)]  # in the order of the arguments
    ratios: Annotated[tuple[Ratio, ...], Field(min_length=1)]  # the first is the default
    image_to_image: bool  # whether the VAE's encoder was exported
    # Of the ControlNet fused with the UNet, including the mid block's; 0: no ControlNet.
    residuals: Annotated[int, Field(ge=0)]
    vae_factor: Side  # image pixels per latent pixel, along each side
    # The settings of UNet and ControlNet by ratio; None: plain, or no ControlNet.
    merging: dict[str, tuple[Settings | None, Settings | None]]
    versions: dict[str, str]
    programs: tuple[ProgramFile, ...]
    files: dict[InnerPath, FileFacts]  # of tome.json; empty where the programs became a folder of another layout

    def exported(self, ratio: Any) -> float:
        """The exported ratio that is the same as `ratio`; ToMeConfigError if there is none."""
        return find_ratio(ratio, self.ratios)

    @property
    def controlnet(self) -> bool:
        """Whether a ControlNet is fused with the UNet."""
        return self.residuals > 0

    @property
    def formats(self) -> tuple[str, ...]:
        """Some of `FORMATS`: those that all programs were exported in."""
        return self.programs[0].formats if self.programs else ()

    @property
    def methods(self) -> dict[float, str]:
        """How the UNet's tokens merge, in words, by ratio; "" at ratio 0."""
        merging = [self.merging[ratio_name(ratio)][0] for ratio in self.ratios]
        words = ["" if settings is None else method_in_words(ExportedMerging(settings)) for settings in merging]
        return dict(zip(self.ratios, words, strict=True))

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


def list_programs(
    sizes: Collection[Size],
    ratios: Collection[float],
    encoders: Iterable[str],
    image_to_image: bool,
) -> dict[str, PlannedProgram]:
    """The programs of an export, in order; the keys are the folders to write them to.

    The folder of the first UNet is "unet", because ppdiffusers reads that one; only this package reads the others,
    whose folders have the names of the programs.

    Args:
        encoders: those of TEXT_ENCODERS that the pipeline has.
    """
    models = [*encoders, "vae_decoder", *(["vae_encoder"] if image_to_image else [])]
    unets = [PlannedProgram("unet", size, ratio) for size in sizes for ratio in ratios]
    first, *others = [*unets, *map(PlannedProgram, models)]
    return {first.model: first} | {file.name: file for file in others}


def ratio_name(ratio: float) -> str:
    """A ratio in six digits, for names of files and messages. Ratios with the same name are the same ratio."""
    return f"{ratio + 0.0:g}"  # plus 0.0, because -0.0 is 0


def is_refiner(manifest: Manifest) -> bool:
    """Whether an export is SDXL's refiner: it has the second text encoder alone, and needs an image in every call."""
    return "XL" in manifest.pipeline and not manifest.programs_of("text_encoder")


def is_ratio(ratio: Any) -> bool:
    """Whether a value is a number, as a ratio is."""
    return isinstance(ratio, Real) and not isinstance(ratio, bool)


def find_ratio(ratio: Any, ratios: Collection[float]) -> float:
    """The exported ratio that is the same as `ratio`.

    Raises:
        ToMeConfigError: there is none; the message lists the exported ones.
    """
    for exported in ratios:
        if is_ratio(ratio) and ratio_name(exported) == ratio_name(ratio):
            return exported
    listed = ", ".join(map(ratio_name, ratios))
    raise ToMeConfigError(f"ratio={ratio!r} was not exported, only {listed}. Export again with this ratio in --ratio.")


def read_manifest(folder: str | Path, verify: bool | None = None) -> Manifest:
    """Read an exported folder's `tome.json`, and check its files.

    Args:
        folder: written by `export_pipeline`.
        verify: True compares the SHA-256 of all files, which takes seconds per GB; False of all except the weights,
            because Paddle crashes on a damaged program; None only compares sizes.

    Raises:
        ToMeExportError: the folder was not exported by this package, is damaged, or comes from a newer version.
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
        raise ToMeExportError(
            f"{folder} {reason}: create one with python -m ppdiffusers_tome export --model DIR --output DIR."
        )
    try:
        manifest = TypeAdapter(Manifest).validate_json(path.read_bytes())
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


def _inconsistent_field(manifest: Manifest) -> str | None:
    """The first field that does not agree with the others, or has a value that this release does not know."""
    encoders = [name for name in TEXT_ENCODERS if manifest.programs_of(name)]
    last = "text_encoder_2" if "XL" in manifest.pipeline else "text_encoder"  # SDXL's refiner has no other
    expected = list_programs(manifest.sizes, manifest.ratios, encoders, manifest.image_to_image).values()
    paths = {path for file in manifest.programs for path in file.paths}
    merging = [settings for pair in manifest.merging.values() for settings in pair if settings is not None]
    is_consistent = {
        "pipeline": manifest.pipeline in READERS,
        "residuals": ("ControlNet" in manifest.pipeline) == manifest.controlnet,
        "vae_factor": not any(side % manifest.vae_factor for size in manifest.sizes for side in size),
        "merging": list(manifest.merging) == [ratio_name(ratio) for ratio in manifest.ratios]
        and all(is_ratio(settings.get("ratio")) and isinstance(settings.get("method"), str) for settings in merging),
        "programs": [file.place for file in manifest.programs] == [planned.place for planned in expected]
        and encoders[-1:] == [last],
        "formats": all(file.formats == manifest.formats for file in manifest.programs),
        "files": not manifest.files or {*paths, "model_index.json"} <= set(manifest.files),
    }
    return next((name for name, consistent in is_consistent.items() if not consistent), None)


def first_error(error: ValidationError, fields: Iterable[str] = ()) -> str:
    """The first of pydantic's errors in one line: field, reason and value; for an unknown field the known fields."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) + ": " if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return f"{where}there is no such field" + (f"; the fields are {', '.join(fields)}" if fields else "")
    value = "" if first["type"] in ("json_invalid", "missing", "value_error") else f", not {first['input']!r:.60}"
    return f"{where}{first['msg'].removeprefix('Value error, ')}{value}"
