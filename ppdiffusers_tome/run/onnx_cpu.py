"""Optimize programs for ONNX Runtime on a CPU.

ONNX Runtime reorders and packs weights for the processor when it loads a program: for each session in memory of its
own, larger than the weights themselves. `optimized` writes the packed weights of all programs of a folder to one file,
once, and sessions map them from it: a second program of a model adds next to nothing, nor does a second process.
"""

import importlib
from pathlib import Path

import onnx
from onnx import helper

from .folder import ExportedFolder
from .onnx_attention import fuse_attention
from .onnx_cache import cached
from .onnx_graph import Graph, drop_unused, rewrite
from .onnx_weights import EXTERNAL_SUFFIX, SHARED_BYTES, WEIGHTS_FOLDER, SharedWeights


def _scatter_rows(model: onnx.ModelProto) -> None:
    """Add rows by ScatterND again: the reverse of `onnx_fixes._scatter_elements` for rows of two dimensions.

    Another ScatterElements, of the user's model, may have an expanded index too, and stays.
    """
    graph = Graph(model)

    def by_rows(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        is_ours = node.op_type == "ScatterElements" and node.input[1] == f"{node.output[0]}.index"
        index = graph.makers.get(node.input[1]) if is_ours else None
        if index is None or index.op_type != "Expand" or index.input[0] == f"{node.output[0]}.rows":
            return [node]
        inputs = [node.input[0], index.input[0], node.input[2]]
        return [helper.make_node("ScatterND", inputs, [node.output[0]], node.name, reduction="add")]

    rewrite(model, by_rows)
    drop_unused(model)


def fused(path: Path, threads: int) -> bytes:
    """The program of an `.onnx` file with operators of ONNX Runtime; its large weights stay in their file.

    Attention is fused. With one thread, rows are added by ScatterND, which is twenty times as fast as ScatterElements
    and correct then.
    """
    model = onnx.load(str(path), load_external_data=False)
    fuse_attention(model)
    if threads == 1:
        _scatter_rows(model)
    return model.SerializeToString()


def optimized(folder: ExportedFolder, path: Path, threads: int) -> Path:
    """A file with the program of an `.onnx` file as this ONNX Runtime has optimized it for this processor.

    Raises:
        OSError: the folder cannot be written.
        Exception: ONNX Runtime cannot load the program, or cannot write the optimized program.
    """

    def write(target: Path, weights: SharedWeights) -> None:
        unshared = target.with_name("unshared.onnx")
        _write_optimized(path, threads, unshared)
        weights.copy_optimized(unshared, target)

    return cached(folder, path, "one" if threads == 1 else "several", write)


def _write_optimized(path: Path, threads: int, target: Path) -> None:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors, not that the file is for this processor
    options.optimized_model_filepath = str(target)
    entries = {
        WEIGHTS_FOLDER: str(path.parent),
        "session.optimized_model_external_initializers_file_name": f"{target.name}{EXTERNAL_SUFFIX}",
        "session.optimized_model_external_initializers_min_size_in_bytes": str(SHARED_BYTES),
        "session.save_external_prepacked_constant_initializers": "1",
    }
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    onnxruntime.InferenceSession(fused(path, threads), options, providers=["CPUExecutionProvider"])
