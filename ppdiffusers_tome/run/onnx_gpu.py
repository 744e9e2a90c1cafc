"""Change ONNX programs for GPUs: fused attention, and float16 on request.

The kernels of fused attention need heads of one width, a multiple of 8. In programs that builds before 3.0 exported
with other methods, the heads of queries and keys may have one more channel, for the sizes of merged tokens. ONNX
Runtime then computes attention step by step: the results are the same, at half the speed.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from .folder import ExportedFolder
from .onnx_attention import fuse_attention
from .onnx_cache import cached
from .onnx_graph import casts, drop_unused, rewrite
from .onnx_weights import ALIGNMENT, IN_MEMORY, SharedWeights, external_places, set_places

# Comparisons decide which tokens merge. They stay in float32, and so do the nodes between ROUNDED nodes and them.
# Otherwise one kernel compares a similarity that another has rounded, and more tokens merge than have room.
COMPARING = ("TopK", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
ROUNDED = ("Conv", "LayerNormalization", "MatMul", "Div", "ReduceMax", "ArgMax")
SQUARES = "ReduceSum"  # of squared tokens: in float16 infinite from a root mean square of 14 on, with 320 channels
SUMS = "ScatterElements"  # of merged tokens, as in eager mode: summed in float32, and rounded once
ANGLES = ("Sin", "Cos")  # of the time embedding: of up to 1000 rad, which float16 has to 0.5
WHOLE = ("Floor",)  # of a timestep, by which tokens take turns: the same of numbers up to 1000


def gpu_program(path: Path) -> bytes:
    """The program of an `.onnx` file with fused attention; its large weights stay in their file."""
    return _fused(path).SerializeToString()


def half_program(folder: ExportedFolder, path: Path) -> Path:
    """A file with that program in float16, beside the optimized programs. Inputs and outputs stay in float32.

    Its weights are in one file for all programs of the folder.

    Raises:
        OSError: the folder cannot be written.
    """

    def write(target: Path, weights: SharedWeights) -> None:
        model = halve(_fused(path))
        for tensor, data in _large_weights(model, path):
            weights.place(tensor, data.tobytes())
        onnx.save(model, str(target))

    return cached(folder, path, "float16", write)


def half_in_memory(path: Path) -> tuple[bytes, bytes]:
    """The same program for a folder that cannot be written, and its weights: the content of its file IN_MEMORY."""
    model, content = halve(_fused(path)), bytearray()
    for tensor, data in _large_weights(model, path):
        content += bytes(-len(content) % ALIGNMENT)
        del tensor.external_data[:]
        set_places(tensor, {"location": IN_MEMORY, "offset": str(len(content)), "length": str(data.nbytes)})
        content += data.tobytes()
    return model.SerializeToString(), bytes(content)


def _large_weights(model: onnx.ModelProto, path: Path) -> Iterator[tuple[TensorProto, np.ndarray]]:
    """The weights of a program that are in another file, with their data in the type that the program has now."""
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


def halve(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a program to float16. The data type of weights in other files changes, but not their data.

    Inputs and outputs stay in float32, and so do the sums of merged tokens and what decides which tokens merge.

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
        if tensor.name in outside:  # one number stands for each
            tensor.CopyFrom(numpy_helper.from_array(np.ones([1] * len(tensor.dims), "float32"), tensor.name))
    precise = _precise(graph)
    operators = [*float16.DEFAULT_OP_BLOCK_LIST, *ANGLES, *WHOLE, SUMS]
    model = float16.convert_float_to_float16(
        model, keep_io_types=True, disable_shape_infer=True, op_block_list=operators, node_block_list=sorted(precise)
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
    floats = {v.name for v in graph.value_info if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    comparing = [node for node in graph.node if node.op_type in COMPARING]
    names = {node.name for node in comparing}
    for starts, ends in ((comparing, ROUNDED), ([n for n in graph.node if n.op_type in (*ANGLES, *WHOLE)], ())):
        values = [name for node in starts for name in node.input]
        while values:
            value = values.pop()
            node = makers.get(value)
            if node is None or node.op_type in ("Constant", *ends) or node.name in names:
                continue
            if value in floats or not ends:
                names.add(node.name)
                if node.op_type == SQUARES:
                    names.add(makers[node.input[0]].name)  # the multiplication; tokens stay in float16
                else:
                    values += node.input
    return names
