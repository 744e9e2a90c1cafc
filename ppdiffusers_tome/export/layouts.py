"""What an export writes: the layout of its folder, and the formats of its programs. Read without Paddle."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..errors import ParameterError
from ..run.manifest import FORMATS, Format

LAYOUTS = ("ppdiffusers", "diffusers")
# Argument → formats of the programs
EXPORT_FORMATS: dict[str, tuple[Format, ...]] = {"paddle": FORMATS[:1], "onnx": FORMATS[1:], "both": FORMATS}
MODEL_FORMATS = ("onnx", "openvino")  # of the models in the layout "diffusers"; the first is the default
RUNTIMES = ("openvino", "onnxruntime")  # whose form of attention these models have; the first is the default
MARK = "_ppdiffusers_tome"  # the entry of model_index.json by which this package knows its folders for other loaders


@dataclass(frozen=True)
class PpdiffusersLayout:
    """The folder that `load_pipeline` and, with Paddle programs, ppdiffusers' own classes read.

    Args:
        format: one of EXPORT_FORMATS.

    Raises:
        ToMeConfigError: it is a different value.
    """

    format: str

    def __post_init__(self) -> None:
        if self.format == "openvino":
            rule = "it is for the layout 'diffusers'. In ppdiffusers' layout OpenVINO runs the format 'onnx'."
            raise ParameterError("format", self.format, rule)
        if self.format not in EXPORT_FORMATS:
            raise ParameterError("format", self.format, f"it must be one of {[*EXPORT_FORMATS]}.")

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of its programs, some of `FORMATS`."""
        return EXPORT_FORMATS[self.format]


@dataclass(frozen=True)
class DiffusersLayout:
    """The folder that Optimum and OpenVINO GenAI load, for one size and one ratio.

    Args:
        format: "onnx", or "openvino" for OpenVINO's own files, which OpenVINO GenAI needs.
        runtime: which runtime the ONNX models are for. "openvino": attention is computed step by step, as OpenVINO
            fuses it itself; ONNX Runtime runs these models too. "onnxruntime": attention is one operator of ONNX
            Runtime, which OpenVINO does not have.

    Raises:
        ToMeConfigError: a value is not allowed.
        ToMeExportError: OpenVINO is not installed, for format="openvino".
    """

    format: str = MODEL_FORMATS[0]
    runtime: str = RUNTIMES[0]

    def __post_init__(self) -> None:
        if self.format not in MODEL_FORMATS:
            raise ParameterError("format", self.format, f"the layout 'diffusers' has one of {[*MODEL_FORMATS]}.")
        if self.runtime not in RUNTIMES:
            raise ParameterError("runtime", self.runtime, f"it must be one of {[*RUNTIMES]}.")
        if self.format == "openvino":
            if self.runtime != "openvino":
                rule = "ONNX Runtime does not read files of the format 'openvino'. Leave out one of the two."
                raise ParameterError("runtime", self.runtime, rule)
            from ..run.runtime import load_module  # it imports Paddle, as `default_format` does

            load_module("openvino")

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of the programs that it is made from."""
        return EXPORT_FORMATS["onnx"]


Layout: TypeAlias = PpdiffusersLayout | DiffusersLayout


def choose_layout(layout: str, format: str | None, runtime: str | None) -> Layout:
    """The layout that the arguments of `export_pipeline` name; None is the layout's own format, or its own runtime.

    Raises:
        ToMeConfigError, ToMeExportError: as the classes of layouts, or a value belongs to a different layout.
    """
    if layout not in LAYOUTS:
        raise ParameterError("layout", layout, f"it must be one of {[*LAYOUTS]}.")
    if layout == "diffusers":
        return DiffusersLayout(format or MODEL_FORMATS[0], runtime or RUNTIMES[0])
    if runtime is not None:
        raise ParameterError(
            "runtime",
            runtime,
            "it is for the layout 'diffusers'. Exports in ppdiffusers' layout get the form that a runtime needs when "
            "they are loaded. Leave it out.",
        )
    return PpdiffusersLayout(format or default_format())


def has_diffusers_layout(folder: Path) -> bool:
    """Whether this package wrote a folder in the layout "diffusers"."""
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(index, dict) and MARK in index


def default_format() -> str:
    """The default format of an export in ppdiffusers' layout.

    It is that of the default runtime: ONNX, or Paddle's where Paddle is a build for GPUs (paddlepaddle-gpu).
    """
    import paddle

    return "paddle" if paddle.is_compiled_with_cuda() else "onnx"
