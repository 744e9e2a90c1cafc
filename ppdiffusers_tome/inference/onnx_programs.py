"""Change ONNX programs: fix what paddle2onnx writes, and optimize them for ONNX Runtime on a CPU.

ONNX Runtime reorders and packs weights for the processor when it loads a program: for each session in memory of its
own, larger than the weights themselves. `optimized` writes the packed weights of all programs of a folder to one file,
once, and sessions map them from it: a second program of a model adds next to nothing, nor does a second process.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .folder import ExportedFolder
from .onnx_cache import cached
from .onnx_weights import EXTERNAL_SUFFIX, SHARED_BYTES, WEIGHTS_FOLDER, SharedWeights

HEADS_FIRST, KEYS_LAST = [0, 2, 1, 3], [0, 2, 3, 1]  # from [B, N, heads, d]: transpositions of queries, and of keys
SWAPPED = [0, 1, 3, 2]  # after HEADS_FIRST: the same as KEYS_LAST


class Graph:
    """The nodes and constants of a program, by the names of their values.

    Args:
        model: it is read when the graph is made; later changes are not seen.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.makers = {output: node for node in model.graph.node for output in node.output}
        self.weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self.users: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.users.setdefault(name, []).append(node)

    def maker(self, name: str, *passed: str) -> onnx.NodeProto | None:
        """The node that computes a value, skipping Identity nodes, additions of 0, and the operators `passed`."""
        node = self.makers.get(name)
        while node is not None and (node.op_type in ("Identity", *passed) or self.number(node, "Add") == 0):
            node = self.makers.get(node.input[0])
        return node

    def constant(self, name: str) -> np.ndarray | None:
        """The array of a constant; None if the value is not constant, or is stored in another file."""
        node = self.maker(name)
        is_value = node is not None and node.op_type == "Constant" and node.attribute[0].name == "value"
        tensor = node.attribute[0].t if is_value and node is not None else self.weights.get(name)
        return None if tensor is None or tensor.external_data else numpy_helper.to_array(tensor)

    def number(self, node: onnx.NodeProto, operator: str) -> float | None:
        """The number that an Add or Mul node combines with its first input; None for any other operator."""
        value = self.constant(node.input[1]) if node.op_type == operator else None
        return float(value.reshape([-1])[0]) if value is not None and value.size == 1 else None

    def only_user(self, node: onnx.NodeProto | None) -> onnx.NodeProto | None:
        """The node that uses a node's first output, if it is the only one."""
        using = [] if node is None else self.users.get(node.output[0], [])
        return using[0] if len(using) == 1 else None


def rewrite(model: onnx.ModelProto, change: Callable[[onnx.NodeProto], Sequence[onnx.NodeProto]]) -> None:
    """Replace each node by the nodes that `change` returns for it."""
    nodes = [changed for node in model.graph.node for changed in change(node)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def drop_unused(model: onnx.ModelProto) -> None:
    """Remove the nodes that do not contribute to an output."""
    needed, used = {output.name for output in model.graph.output}, []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            used.append(node)
            needed.update(node.input)
    del model.graph.node[:]
    model.graph.node.extend(used[::-1])


def fix_paddle2onnx(model: onnx.ModelProto) -> None:
    """Replace the nodes of a model by paddle2onnx that runtimes compute wrongly."""
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


def casts(node: onnx.NodeProto | None, dtype: int) -> TypeGuard[onnx.NodeProto]:
    """Whether a node casts to this data type."""
    return node is not None and node.op_type == "Cast" and node.attribute[0].i == dtype


def _whole_number(graph: Graph, node: onnx.NodeProto) -> np.ndarray | None:
    """The whole number that an Add or Mul node combines with its first input, as int64; None for any other node."""
    value = graph.constant(node.input[1]) if node.op_type in ("Add", "Mul") else None
    if value is None or value.size != 1 or value != value.round():
        return None
    return value.astype("int64")


def _scatter_elements(model: onnx.ModelProto) -> None:
    """Add rows by ScatterElements in place of ScatterND.

    If several rows are added to the same one, ONNX Runtime's ScatterND loses some of them with several threads.
    """

    def by_elements(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        if node.op_type != "ScatterND" or not any(attribute.s == b"add" for attribute in node.attribute):
            return [node]
        (data, rows, updates), (output,) = node.input, node.output  # [D, C], [R, 1], [R, C]
        shape, index = f"{output}.shape", f"{output}.index"
        return [
            helper.make_node("Shape", [updates], [shape]),
            helper.make_node("Expand", [rows, shape], [index]),
            helper.make_node("ScatterElements", [data, index, updates], [output], axis=0, reduction="add"),
        ]

    rewrite(model, by_elements)


def _scatter_rows(model: onnx.ModelProto) -> None:
    """Add rows by ScatterND again: the reverse of `_scatter_elements`."""
    graph = Graph(model)

    def by_rows(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        index = graph.makers.get(node.input[1]) if node.op_type == "ScatterElements" else None
        if index is None or index.op_type != "Expand":
            return [node]
        inputs = [node.input[0], index.input[0], node.input[2]]
        return [helper.make_node("ScatterND", inputs, [node.output[0]], reduction="add")]

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


def fuse_attention(model: onnx.ModelProto) -> None:
    """Replace attention that is computed step by step by ONNX Runtime's operator for it.

    What is replaced is, for queries, keys and values [B, N, heads·d]: reshape to [B, N, heads, d], transpose, product
    of queries and keys, softmax, product with the values, transpose, reshape to [B, N, heads·d]; with a constant that
    scales the queries or the product. Attention of another form, for instance with a mask, stays as it is.

    `onnxruntime.transformers` has `FusionAttentionUnet`, which looks for the nodes of PyTorch's exports and fuses none
    of these.
    """
    graph = Graph(model)
    replaced = {}
    for node in model.graph.node:
        fused = _fused_attention(graph, node) if node.op_type == "Softmax" else None
        if fused is not None:
            replaced[fused.output[0]] = fused
    rewrite(model, lambda node: [replaced.get(node.output[0], node)])
    drop_unused(model)
    if replaced:
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _fused_attention(graph: Graph, softmax: onnx.NodeProto) -> onnx.NodeProto | None:
    """The operator that replaces the attention around a softmax; None if that has another form."""
    scores, scale = _unscaled(graph, softmax.input[0])
    output = graph.only_user(softmax)
    if scores is None or output is None or {scores.op_type, output.op_type} != {"MatMul"}:
        return None
    query, query_scale = _unscaled(graph, scores.input[0])
    key, key_scale = _unscaled(graph, scores.input[1])
    queries = _split_tokens(graph, query, HEADS_FIRST)
    keys = _split_tokens(graph, key, KEYS_LAST)
    values = _split_tokens(graph, graph.maker(output.input[1]), HEADS_FIRST)
    if queries is None or keys is None or values is None or output.input[0] != softmax.output[0]:
        return None
    transposed = graph.only_user(output)
    joined = graph.only_user(transposed) if _is_transpose(transposed, HEADS_FIRST) else None
    if joined is None or joined.op_type != "Reshape":
        return None
    name, heads = queries
    return helper.make_node(
        "MultiHeadAttention",
        [name, keys[0], values[0]],
        [joined.output[0]],
        domain="com.microsoft",
        num_heads=heads,
        scale=scale * query_scale * key_scale,
    )


def _unscaled(graph: Graph, name: str) -> tuple[onnx.NodeProto | None, float]:
    """The node that computes a value, before it is multiplied by a number, and the number; 1 if it is not."""
    node = graph.maker(name)
    factor = None if node is None else graph.number(node, "Mul")
    if node is None or factor is None:
        return node, 1.0
    return graph.maker(node.input[0]), factor


def _split_tokens(graph: Graph, node: onnx.NodeProto | None, order: list[int]) -> tuple[str, int] | None:
    """The name of the tokens [B, N, heads·d] that a node has split and transposed to an order, and their heads."""
    if order == KEYS_LAST and _is_transpose(node, SWAPPED):
        node, order = graph.maker(node.input[0]), HEADS_FIRST
    reshape = graph.maker(node.input[0]) if _is_transpose(node, order) else None
    if reshape is None or reshape.op_type != "Reshape":
        return None
    shape = graph.constant(reshape.input[1])
    if shape is None or shape.size != 4 or shape[0] != 0 or shape[1] != 0:
        return None
    return reshape.input[0], int(shape[2])


def _is_transpose(node: onnx.NodeProto | None, order: list[int]) -> TypeGuard[onnx.NodeProto]:
    return node is not None and node.op_type == "Transpose" and list(node.attribute[0].ints) == order


def optimized(folder: ExportedFolder, path: Path, threads: int) -> Path:
    """A file with the program of an `.onnx` file as this ONNX Runtime has optimized it for this processor.

    Raises:
        OSError: the folder cannot be written.
        Exception: ONNX Runtime cannot load the program, or cannot write the optimized one.
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
