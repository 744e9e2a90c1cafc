"""Change ONNX programs for GPUs: fused attention, and float16 on request."""

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from ..errors import ParameterError
from .folder import ExportedFolder
from .onnx_attention import fuse_attention
from .onnx_cache import cached
from .onnx_graph import casts, drop_unused, rewrite
from .onnx_weights import ALIGNMENT, IN_MEMORY, SharedWeights, external_places, set_places

# Operators on what is computed from the timestep, which stays in float32 with them. By it tokens take turns, steps are
# plain, and angles of the time embedding are up to 1000 rad; float16 has no fractions of that.
OF_TIMESTEP = ("Sin", "Cos", "Floor", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
SORTS = "TopK"  # of similarities, in programs of methods that merge the most similar tokens


def gpu_program(path: Path) -> bytes:
    """The program of an `.onnx` file with fused attention; its large weights stay in their file."""
    return _fused(path).SerializeToString()


def half_program(folder: ExportedFolder, path: Path) -> Path:
    """A file with that program in float16, beside the optimized programs. Inputs and outputs stay in float32.

    Its weights are in one file for all programs of the folder.

    Raises:
        OSError: the folder cannot be written.
        ToMeConfigError: the program merges the most similar tokens.
    """

    def write(target: Path, weights: SharedWeights) -> None:
        model = _half(path)
        for tensor, data in _large_weights(model, path):
            weights.place(tensor, data.tobytes())
        onnx.save(model, str(target))

    return cached(folder, path, "float16", write)


def half_in_memory(path: Path) -> tuple[bytes, bytes]:
    """The same program for a folder that cannot be written, and its weights: the content of its file IN_MEMORY."""
    model, content = _half(path), bytearray()
    for tensor, data in _large_weights(model, path):
        content += bytes(-len(content) % ALIGNMENT)
        del tensor.external_data[:]
        set_places(tensor, {"location": IN_MEMORY, "offset": str(len(content)), "length": str(data.nbytes)})
        content += data.tobytes()
    return model.SerializeToString(), bytes(content)


def _large_weights(model: onnx.ModelProto, path: Path) -> Iterator[tuple[TensorProto, np.ndarray]]:
    """The weights of a program that are in a separate file, with their data in the type that the program has now."""
    for tensor in filter(uses_external_data, model.graph.initializer):
        places = external_places(tensor)
        length, offset = int(places["length"]), int(places["offset"])
        data = np.fromfile(path.parent / places["location"], "uint8", length, offset=offset)
        if tensor.data_type == TensorProto.FLOAT16:
            data = data.view("float32").astype("float16")
        yield tensor, data


def _fused(path: Path) -> onnx.ModelProto:
    # Types are inferred first: those behind an operator of ONNX Runtime could not be.
    model = onnx.shape_inference.infer_shapes(onnx.load(str(path), load_external_data=False))
    fuse_attention(model)
    return model


def _half(path: Path) -> onnx.ModelProto:
    """The program of an `.onnx` file in float16, with fused attention."""
    model = _fused(path)
    if any(node.op_type == SORTS for node in model.graph.node):
        raise ParameterError(
            "precision",
            "fp16",
            f"{path.name} merges the most similar tokens, and float16 rounds similarities. Pass precision='fp32', or "
            "export with a method that compares no tokens, such as method='interlace'.",
        )
    return halve(model)


def halve(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a program to float16. The data type of weights in separate files changes, but not their data.

    Inputs and outputs stay in float32, and so does what is computed from the timestep: see OF_TIMESTEP.

    Args:
        model: a program with the types of its values; it is changed.
    """
    from onnxruntime.transformers import float16, onnx_model  # type: ignore[import-untyped]

    graph = model.graph
    for number, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{number}"  # the converter chooses nodes by name
    outside = {
        tensor.name: copy.deepcopy(tensor)
        for tensor in filter(uses_external_data, graph.initializer)
        if tensor.data_type == TensorProto.FLOAT
    }
    for tensor in graph.initializer:
        if tensor.name in outside:  # a single number stands for each tensor
            tensor.CopyFrom(numpy_helper.from_array(np.ones([1] * len(tensor.dims), "float32"), tensor.name))
    precise = sorted(_precise(graph))
    model = float16.convert_float_to_float16(
        model, keep_io_types=True, disable_shape_infer=True, node_block_list=precise
    )
    made: set[str] = set()

    def once(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Drop repeated casts: the converter writes a cast for each node that needs it."""
        is_again = node.op_type == "Cast" and node.output[0] in made
        made.update(node.output)
        return [] if is_again else [node]

    rewrite(model, once)
    _keep_precise(model)
    onnx_model.OnnxModel.graph_topological_sort(model.graph)  # the converter writes its casts at the end
    drop_unused(model)
    for tensor in model.graph.initializer:
        if tensor.name in outside:
            outside[tensor.name].data_type = tensor.data_type
            tensor.CopyFrom(outside[tensor.name])
    return model


def _keep_precise(model: onnx.ModelProto) -> None:
    """Let nodes that stay in float32 pass their values on in float32; the converter casts them to float16 and back."""
    makers = {name: node for node in model.graph.node for name in node.output}

    def precise(name: str) -> str:
        back = makers.get(name)
        rounding = makers.get(back.input[0]) if casts(back, TensorProto.FLOAT) else None
        return rounding.input[0] if casts(rounding, TensorProto.FLOAT16) else name

    for node in model.graph.node:
        node.input[:] = [precise(name) for name in node.input]


def _precise(graph: onnx.GraphProto) -> set[str]:
    """The names of the nodes that stay in float32."""
    makers = {name: node for node in graph.node for name in node.output}
    nodes = [node for node in graph.node if node.op_type in OF_TIMESTEP]
    names: set[str] = set()
    while nodes:
        node = nodes.pop()
        if node.name not in names:
            names.add(node.name)
            nodes += [makers[name] for name in node.input if name in makers]
    return names
