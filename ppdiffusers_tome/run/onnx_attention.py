"""Fuse the attention of ONNX programs."""

from typing import TypeGuard

import onnx
from onnx import helper

from .onnx_graph import Graph, drop_unused, rewrite

HEADS_FIRST, KEYS_LAST = [0, 2, 1, 3], [0, 2, 3, 1]  # from [B, N, heads, d]: transpositions of queries, and of keys
SWAPPED = [0, 1, 3, 2]  # after HEADS_FIRST: the same as KEYS_LAST


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
