"""Export a pipeline with token merging, and run the exported folder in Paddle Inference, ONNX Runtime or OpenVINO."""

from .export import export_pipeline
from .manifest import Manifest, ProgramFile, Size, parse_size, read_manifest
from .onnx_runtime import OnnxRuntime
from .openvino_runtime import OpenVinoRuntime
from .paddle_runtime import PaddleRuntime
from .pipeline import RUNTIMES, choose_runtime, load_pipeline
from .runtime import Runtime

__all__ = [
    "RUNTIMES",
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
