"""Export a pipeline with token merging, and run the exported folder in Paddle Inference, ONNX Runtime or OpenVINO."""

from .export.export import export_pipeline
from .run.manifest import Files, Manifest, ProgramFile, read_manifest
from .run.onnx_runtime import OnnxRuntime
from .run.openvino_runtime import OpenVinoRuntime
from .run.paddle_runtime import PaddleRuntime
from .run.pipeline import RUNTIMES, choose_runtime, load_pipeline
from .run.runtime import Runtime
from .run.sizes import Size, parse_size

__all__ = [
    "RUNTIMES",
    "Files",
    "Manifest",
    "OnnxRuntime",
    "OpenVinoRuntime",
    "PaddleRuntime",
    "ProgramFile",
    "Runtime",
    "Size",
    "choose_runtime",
    "export_pipeline",
    "load_pipeline",
    "parse_size",
    "read_manifest",
]
