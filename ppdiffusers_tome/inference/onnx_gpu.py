"""ONNX programs in the form in which a GPU runs them: attention that its kernels can fuse, and float16 on request."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .onnx_programs import SharedWeights, cached, external_places, fuse_attention, set_places

if TYPE_CHECKING:
    import onnx

HEAD_CHANNELS = 8  # the kernels of fused attention need a multiple of it
# Comparisons decide which tokens merge. They stay in float32, and so does what leads to them from the results of
# ROUNDED. Otherwise one kernel compares a similarity that another has rounded, and more tokens merge than have room.
COMPARING = ("TopK", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
ROUNDED = ("Conv", "LayerNormalization", "MatMul", "Div", "ReduceSum", "ReduceMax", "ArgMax")
SUMS = "ScatterElements"  # of merged tokens, as in eager mode: summed in float32, and rounded once
ANGLES = ("Sin", "Cos")  # of the time embedding: of up to 1000 rad, which float16 has to 0.5


def gpu_program(path: Path) -> bytes:
    """The program of an `.onnx` file with fused attention; its large weights stay in their file."""
    return _fused(path).SerializeToString()


def half_program(path: Path) -> Path:
    """The same in float16, with inputs and outputs in float32, as a file beside the optimized programs.

    Its weights are in one file for all programs of the folder.

    Raises:
        OSError: the folder cannot be written.
    """

    def write(target: Path, weights: SharedWeights) -> None:
        import onnx

        model = halve(_fused(path))
        for tensor in (t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL):
            places = external_places(tensor)
            with (path.parent / places["location"]).open("rb") as file:
                file.seek(int(places["offset"]))
                data = file.read(int(places["length"]))
            if tensor.data_type == onnx.TensorProto.FLOAT16:
                data = np.frombuffer(data, "float32").astype("float16").tobytes()
            del tensor.external_data[:]
            places = {"location": weights.path.name, "offset": str(weights.store(data)), "length": str(len(data))}
            set_places(tensor, places)
        onnx.save(model, str(target))

    return cached(path, "float16", write)


def _fused(path: Path) -> "onnx.ModelProto":
    import onnx

    # Types are inferred first: those behind an operator of ONNX Runtime could not be.
    model = onnx.shape_inference.infer_shapes(onnx.load(str(path), load_external_data=False))
    fuse_attention(model)
    widen_heads(model)
    return model


def widen_heads(model: "onnx.ModelProto") -> None:
    """Add channels of zeros to heads of fused attention, so that queries, keys and values have as many.

    A head has one more channel in queries and keys for the sizes of merged tokens. With that number of channels ONNX
    Runtime computes attention step by step on a GPU: half as fast, and in four times the memory at 1024 px.
    """
    import onnx
    from onnx import helper, numpy_helper

    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    dims = {tensor.name: list(tensor.dims) for tensor in graph.initializer}

    def constant(values: Iterable[int]) -> str:
        name = f"widened.{len(graph.initializer)}"
        graph.initializer.append(numpy_helper.from_array(np.array([*values], "int64"), name))
        return name

    def last(shape: str) -> int:
        """The last number of a constant shape, or 0."""
        node = makers.get(shape)
        while node is not None and node.op_type == "Identity":  # as Paddle 3 exports it
            node = makers.get(node.input[0])
        if node is None or node.op_type != "Constant" or node.attribute[0].name != "value":
            return 0
        return int(numpy_helper.to_array(node.attribute[0].t).reshape([-1])[-1])

    def channels(name: str) -> int:
        """Of a value [B, N, channels]; 0 if they are not known."""
        node = makers.get(name)
        while node is not None and node.op_type in ("Add", "Mul", "Identity"):
            node = makers.get(node.input[0])
        if node is None or node.op_type not in ("MatMul", "Reshape"):
            return 0
        return dims.get(node.input[1], [0])[-1] if node.op_type == "MatMul" else max(last(node.input[1]), 0)

    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        heads = next((a.i for a in node.attribute if a.name == "num_heads"), 0)
        widths = [channels(name) // heads for name in node.input[:3]] if node.op_type == "MultiHeadAttention" else []
        wide = -(-max(widths, default=0) // HEAD_CHANNELS) * HEAD_CHANNELS
        if not wide or not all(widths) or widths == [wide] * 3:
            nodes.append(node)
            continue
        output, values = node.output[0], widths[2]
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
        nodes += [
            node,
            helper.make_node("Reshape", [wide_output, constant([0, 0, heads, wide])], [split]),
            helper.make_node("Slice", [split, constant([0]), constant([values]), constant([3])], [narrow]),
            helper.make_node("Reshape", [narrow, constant([0, 0, heads * values])], [output]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)


def halve(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """A program in float16. The data type of weights in other files changes, but not yet their data.

    Inputs and outputs stay in float32, and so do the sums of merged tokens and what decides which tokens merge.

    Args:
        model: with the types of its values; it is changed.
    """
    import onnx
    from onnxruntime.transformers import float16  # type: ignore[import-untyped]

    graph, tensor_type = model.graph, onnx.TensorProto
    for number, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{number}"  # the converter chooses nodes by name
    outside = {
        t.name: copy.deepcopy(t)
        for t in graph.initializer
        if t.data_location == tensor_type.EXTERNAL and t.data_type == tensor_type.FLOAT
    }
    for tensor in graph.initializer:
        if tensor.name in outside:  # one number stands for each
            rank = len(tensor.dims)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.ClearField("dims")
            tensor.dims.extend([1] * rank)
            tensor.raw_data = np.ones(1, "float32").tobytes()
    precise = _precise(graph)
    operators = [*float16.DEFAULT_OP_BLOCK_LIST, *ANGLES, SUMS]
    model = float16.convert_float_to_float16(
        model, keep_io_types=True, disable_shape_infer=True, op_block_list=operators, node_block_list=sorted(precise)
    )
    seen: set[str] = set()
    nodes = []
    for node in model.graph.node:  # the converter writes a cast once for each node that needs it
        if node.op_type != "Cast" or node.output[0] not in seen:
            nodes.append(node)
        seen.update(node.output)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for tensor in model.graph.initializer:
        if tensor.name in outside:
            dtype = tensor.data_type
            tensor.CopyFrom(outside[tensor.name])
            tensor.data_type = dtype
    return model


def _precise(graph: "onnx.GraphProto") -> set[str]:
    """The names of the nodes that stay in float32."""
    import onnx

    makers = {name: node for node in graph.node for name in node.output}
    floats = {v.name for v in graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
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
                values += node.input
    return names
