"""The formats and layouts of an export by name. Nothing here imports Paddle."""

from ..run.manifest import FORMATS

EXPORT_FORMATS = {"paddle": FORMATS[:1], "onnx": FORMATS[1:], "both": FORMATS}  # argument → formats of the programs
LAYOUTS = ("ppdiffusers", "diffusers")
LAYOUT_FORMATS = ("onnx", "openvino")  # of the models in the layout of diffusers
LAYOUT_RUNTIMES = ("openvino", "onnxruntime")  # whose form of attention they have; the first is the default
