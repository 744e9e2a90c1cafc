"""Change ONNX programs for GPUs: attention in a form that their kernels can fuse, and float16 on request."""

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from ..errors import ToMeExportError
from .folder import ExportedFolder
from .onnx_cache import cached
from .onnx_programs import Graph, casts, drop_unused, fuse_attention, rewrite
from .onnx_weights import ALIGNMENT, IN_MEMORY, SharedWeights, external_places, set_places

HEAD_CHANNELS = 8  # the kernels of fused attention need a multiple of it
# Comparisons decide which tokens merge. They stay in float32, and so do the nodes between ROUNDED nodes and them.
# Otherwise one kernel compares a similarity that another has rounded, and more tokens merge than have room.
COMPARING = ("TopK", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
ROUNDED = ("Conv", "LayerNormalization", "MatMul", "Div", "ReduceMax", "ArgMax")
SQUARES = "ReduceSum"  # of squared tokens: in float16 infinite from a root mean square of 14 on, with 320 channels
SUMS = "ScatterElements"  # of merged tokens, as in eager mode: summed in float32, and rounded once
ANGLES = ("Sin", "Cos")  # of the time embedding: of up to 1000 rad, which float16 has to 0.5


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
    widen_heads(model)
    return model


def widen_heads(model: onnx.ModelProto) -> None:
    """Pad the heads of fused attention with zeros, so that queries, keys and values have the same number of channels.

    A head has one more channel in queries and keys for the sizes of merged tokens. With that number of channels ONNX
    Runtime computes attention step by step on a GPU: half as fast, and in four times the memory at 1024 px.

    Args:
        model: a program with the shapes of its values; it is changed.

    Raises:
        ToMeExportError: the number of channels of a head is unknown.
    """
    graph, weights = Graph(model), model.graph.initializer
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*model.graph.value_info, *model.graph.input)}

    def constant(values: Iterable[int]) -> str:
        weights.append(numpy_helper.from_array(np.array([*values], "int64"), f"widened.{len(weights)}"))
        return weights[-1].name

    def last_size(name: str) -> int:
        """Size of a value's last axis; 0 if unknown."""
        if name in graph.weights:
            return graph.weights[name].dims[-1]
        if (shape := shapes.get(name)) and shape[-1].dim_value:
            return int(shape[-1].dim_value)
        node = graph.maker(name, "Add", "Mul")
        if node is not None and node.op_type == "MatMul":
            return last_size(node.input[1])
        is_reshape = node is not None and node.op_type == "Reshape"
        values = graph.constant(node.input[1] if node is not None and is_reshape else name)
        if values is None:
            return 0
        return max(int(values.reshape([-1])[-1]), 0) if is_reshape else values.shape[-1]

    def channels(name: str) -> int:
        """Number of channels of a [B, N, C] value."""
        if size := last_size(name):
            return size
        raise ToMeExportError(
            f"the number of channels of {name} is unknown, so its attention cannot be fused on a GPU: export the "
            "model again with this release."
        )

    def widened(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        if node.op_type != "MultiHeadAttention":
            return [node]
        heads = next(a.i for a in node.attribute if a.name == "num_heads")
        widths = [channels(name) // heads for name in node.input[:3]]
        wide = -(-max(widths) // HEAD_CHANNELS) * HEAD_CHANNELS
        if widths == [wide] * 3:
            return [node]
        nodes, output, values = [], node.output[0], widths[2]
        for number, (name, width) in enumerate(zip(node.input[:3], widths, strict=True)):
            if width < wide:
                split, padded, joined = (f"{output}.{number}.{step}" for step in ("split", "padded", "joined"))
                nodes += [
                    helper.make_node("Reshape", [name, constant([0, 0, heads, width])], [split]),
                    helper.make_node("Pad", [split, constant([0] * 7 + [wide - width])], [padded]),
                    helper.make_node("Reshape", [padded, constant([0, 0, heads * wide])], [joined]),
                ]
                node.input[number] = joined
        wide_output, split, narrow = (f"{output}.{step}" for step in ("wide", "split", "narrow"))
        node.output[0] = wide_output
        return [
            *nodes,
            node,
            helper.make_node("Reshape", [wide_output, constant([0, 0, heads, wide])], [split]),
            helper.make_node("Slice", [split, constant([0]), constant([values]), constant([3])], [narrow]),
            helper.make_node("Reshape", [narrow, constant([0, 0, heads * values])], [output]),
        ]

    rewrite(model, widened)


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
    operators = [*float16.DEFAULT_OP_BLOCK_LIST, *ANGLES, SUMS]
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
    for starts, ends in ((comparing, ROUNDED), ([n for n in graph.node if n.op_type in ANGLES], ())):
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
