"""Fix what paddle2onnx writes, where runtimes compute it wrongly."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..run.onnx_graph import Graph, casts, rewrite


def fix_paddle2onnx(model: onnx.ModelProto) -> None:
    """Replace the nodes of a converted model that runtimes compute wrongly."""
    _undo_casts_of_integers(model)
    _scatter_elements(model)


def _undo_casts_of_integers(model: onnx.ModelProto) -> None:
    """Compute `integers * 2 + 3` in int64, where paddle2onnx casts to float32 and back.

    A runtime that computes floats in bf16 rounds those above 256, and then gathers from rows that do not exist.
    """
    graph = Graph(model)
    dtypes = {
        value.name: value.type.tensor_type.elem_type
        for value in onnx.shape_inference.infer_shapes(model).graph.value_info
    }

    def in_integers(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        steps: list[tuple[onnx.NodeProto, np.ndarray]] = []
        maker = graph.makers.get(node.input[0]) if casts(node, TensorProto.INT64) else None
        while maker is not None and (number := _whole_number(graph, maker)) is not None:
            steps.insert(0, (maker, number))
            maker = graph.makers.get(maker.input[0])
        if not steps or not casts(maker, TensorProto.FLOAT) or dtypes.get(maker.input[0]) != TensorProto.INT64:
            return [node]
        value, nodes = maker.input[0], []
        for step, number in steps:
            result = node.output[0] if step is steps[-1][0] else f"{step.output[0]}.int64"
            constant = numpy_helper.from_array(number)
            nodes.append(helper.make_node("Constant", [], [f"{result}.number"], value=constant))
            nodes.append(helper.make_node(step.op_type, [value, f"{result}.number"], [result]))
            value = result
        return nodes

    rewrite(model, in_integers)  # nothing uses the casts to float32 any more, and a runtime drops them


def _whole_number(graph: Graph, node: onnx.NodeProto) -> np.ndarray | None:
    """The whole number that an Add or Mul node combines with its first input, as int64; None for different nodes."""
    value = graph.constant(node.input[1]) if node.op_type in ("Add", "Mul") else None
    if value is None or value.size != 1 or value != value.round():
        return None
    return value.astype("int64")


def _scatter_elements(model: onnx.ModelProto) -> None:
    """Add rows by ScatterElements in place of ScatterND, where each index is the number of a row.

    If several rows are added to the same row, ONNX Runtime's ScatterND loses some of them with several threads. Sums
    into single elements, whose indices have several columns, or of unknown rank stay as they are.
    """
    if not any(node.op_type == "ScatterND" for node in model.graph.node):  # as with the default method
        return
    ranks = _ranks(model)

    def by_elements(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        if node.op_type != "ScatterND" or not any(attribute.s == b"add" for attribute in node.attribute):
            return [node]
        (data, rows, updates), (output,) = node.input, node.output  # [D, ...], [R, 1], [R, ...]
        rank = ranks.get(updates)
        # Each index has as many numbers as [R, ...] has dimensions less than [D, ...], and one more.
        if rank is None or ranks.get(data) != rank or ranks.get(rows) != 2:
            return [node]
        names = {name: f"{output}.{name}" for name in ("shape", "rows", "rows_shape", "index")}
        nodes = [helper.make_node("Shape", [updates], [names["shape"]], names["shape"])]
        if rank != 2:  # [R] or [R, 1, 1, ...]
            shape = numpy_helper.from_array(np.array([-1] + [1] * (rank - 1)))
            nodes += [
                helper.make_node("Constant", [], [names["rows_shape"]], names["rows_shape"], value=shape),
                helper.make_node("Reshape", [rows, names["rows_shape"]], [names["rows"]], names["rows"]),
            ]
            rows = names["rows"]
        inputs = [data, names["index"], updates]
        return [
            *nodes,
            helper.make_node("Expand", [rows, names["shape"]], [names["index"]], names["index"]),
            helper.make_node("ScatterElements", inputs, [output], node.name or output, axis=0, reduction="add"),
        ]

    rewrite(model, by_elements)


def _ranks(model: onnx.ModelProto) -> dict[str, int]:
    """The number of dimensions of each value, as far as it is known."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            ranks[value.name] = len(value.type.tensor_type.shape.dim)
    return ranks
