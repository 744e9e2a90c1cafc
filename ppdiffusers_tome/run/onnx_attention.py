"""Fuse the attention of ONNX programs."""

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..errors import ToMeExportError
from .onnx_graph import Graph, drop_unused, rewrite
from .runtime import FUSED_TOLERANCE, load_module

HEADS_FIRST, KEYS_LAST = [0, 2, 1, 3], [0, 2, 3, 1]  # from [B, N, heads, d]: transpositions of queries, and of keys
SWAPPED = [0, 1, 3, 2]  # after HEADS_FIRST: the same as KEYS_LAST
DOMAIN = "com.microsoft"  # of ONNX Runtime's operators


@dataclass(frozen=True)
class SplitTokens:
    """Tokens that are split into heads: their name, [B, N, heads·width], and the numbers that they are split by."""

    name: str
    heads: int
    width: int


@dataclass(frozen=True)
class Attention:
    """Attention that is computed step by step, as one operator computes it too.

    Args:
        queries, keys, values: the tokens that it is computed from; the widths of queries and keys are equal.
        scale: of the scores.
        output: the name of the result, [B, N, heads·width of the values].
    """

    queries: SplitTokens
    keys: SplitTokens
    values: SplitTokens
    scale: float
    output: str

    def fused(self, output: str) -> onnx.NodeProto:
        """ONNX Runtime's operator for it, whose result has this name."""
        return helper.make_node(
            "MultiHeadAttention",
            [self.queries.name, self.keys.name, self.values.name],
            [output],
            domain=DOMAIN,
            num_heads=self.queries.heads,
            scale=self.scale,
        )


def fuse_attention(model: onnx.ModelProto) -> None:
    """Replace attention that is computed step by step by ONNX Runtime's operator for it.

    What is replaced is, for queries, keys and values [B, N, heads·d]: reshape to [B, N, heads, d], transpose, product
    of queries and keys, softmax over the keys, product with the values, transpose, reshape to [B, N, heads·d]; with a
    constant that scales the queries or the product. Attention of a different form, for instance with a mask, stays as
    it is. The operator is compared with the nodes that it replaces, on random tokens in ONNX Runtime on the CPU.

    `onnxruntime.transformers` has `FusionAttentionUnet`, which looks for the nodes of PyTorch's exports and fuses none
    of these.

    Raises:
        ToMeExportError: the operator of this ONNX Runtime computes something different.
    """
    graph = Graph(model)
    softmaxes = [node for node in model.graph.node if node.op_type == "Softmax"]
    found = [attention for node in softmaxes if (attention := _attention(graph, node)) is not None]
    if not found:
        return
    _compare(model, graph, found)
    replaced = {attention.output: attention.fused(attention.output) for attention in found}
    rewrite(model, lambda node: [replaced.get(node.output[0], node)])
    drop_unused(model)
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def _attention(graph: Graph, softmax: onnx.NodeProto) -> Attention | None:
    """The attention around a softmax; None if it has a different form."""
    axis = next((attribute.i for attribute in softmax.attribute if attribute.name == "axis"), -1)
    scores, scale = _unscaled(graph, softmax.input[0])
    output = graph.only_user(softmax)
    if axis not in (-1, 3) or scores is None or output is None or {scores.op_type, output.op_type} != {"MatMul"}:
        return None
    query, query_scale = _unscaled(graph, scores.input[0])
    key, key_scale = _unscaled(graph, scores.input[1])
    queries = _split_tokens(graph, query, HEADS_FIRST)
    keys = _split_tokens(graph, key, KEYS_LAST)
    values = _split_tokens(graph, graph.maker(output.input[1]), HEADS_FIRST)
    if queries is None or keys is None or values is None or output.input[0] != softmax.output[0]:
        return None
    if not queries.heads == keys.heads == values.heads or queries.width != keys.width:
        return None
    transposed = graph.only_user(output)
    joined = graph.only_user(transposed) if _is_transpose(transposed, HEADS_FIRST) else None
    if joined is None or _shape(graph, joined) not in ([0, 0, values.heads * values.width], [0, 0, -1]):
        return None
    return Attention(queries, keys, values, scale * query_scale * key_scale, joined.output[0])


def _unscaled(graph: Graph, name: str) -> tuple[onnx.NodeProto | None, float]:
    """The node that computes a value, before it is multiplied by a number, and the number; 1 if it is not."""
    node = graph.maker(name)
    factor = None if node is None else graph.number(node, "Mul")
    if node is None or factor is None:
        return node, 1.0
    return graph.maker(node.input[0]), factor


def _split_tokens(graph: Graph, node: onnx.NodeProto | None, order: list[int]) -> SplitTokens | None:
    """The tokens [B, N, heads·d] that a node has split into heads and transposed to an order."""
    if order == KEYS_LAST and _is_transpose(node, SWAPPED):
        node, order = graph.maker(node.input[0]), HEADS_FIRST
    reshape = graph.maker(node.input[0]) if _is_transpose(node, order) else None
    shape = None if reshape is None else _shape(graph, reshape)
    if reshape is None or shape is None or len(shape) != 4 or shape[:2] != [0, 0] or min(shape[2:]) < 1:
        return None
    return SplitTokens(reshape.input[0], *shape[2:])


def _shape(graph: Graph, node: onnx.NodeProto) -> list[int] | None:
    """The shape that a node reshapes to, 0 for a dimension that stays; None if it is computed, or there is none."""
    shape = graph.constant(node.input[1]) if node.op_type == "Reshape" else None
    return None if shape is None else [int(size) for size in shape]


def _is_transpose(node: onnx.NodeProto | None, order: list[int]) -> TypeGuard[onnx.NodeProto]:
    return node is not None and node.op_type == "Transpose" and list(node.attribute[0].ints) == order


def _compare(model: onnx.ModelProto, graph: Graph, found: list[Attention]) -> None:
    """Raise ToMeExportError if an operator computes something else than the nodes that it replaces."""
    compared = set()
    for attention in found:
        steps = _steps(graph, attention)
        tokens = (attention.queries, attention.keys, attention.values)
        sizes = [(part.heads, part.width) for part in tokens]
        form = (*sizes, attention.scale, *(node.op_type for node in steps))
        if form in compared:
            continue
        compared.add(form)
        difference = _difference(model, graph, attention, steps)
        if not difference <= FUSED_TOLERANCE:
            version = load_module("onnxruntime").__version__
            raise ToMeExportError(
                f"MultiHeadAttention of ONNX Runtime {version} differs by {difference:.1e} of its largest output from "
                f"the attention that it would replace ({attention.output}), more than the allowed "
                f"{FUSED_TOLERANCE:.0e}. "
                "Please report this, and use a different version of ONNX Runtime, or OpenVINO."
            )


def _steps(graph: Graph, attention: Attention) -> list[onnx.NodeProto]:
    """The nodes that compute attention from its tokens, in their order."""
    names, steps = [attention.output], []
    while names:
        name = names.pop()
        node = graph.makers.get(name)
        if node is not None and name not in (attention.queries.name, attention.keys.name, attention.values.name):
            steps.append(node)
            names += node.input
    return list({node.output[0]: node for node in reversed(steps)}.values())


def _difference(model: onnx.ModelProto, graph: Graph, attention: Attention, steps: list[onnx.NodeProto]) -> float:
    """max|fused - attention| / max|attention| on random tokens: fewer queries than keys."""
    onnxruntime, random, fused = load_module("onnxruntime"), np.random.RandomState(0), f"{attention.output}.fused"
    lengths = {attention.queries: 5, attention.keys: 7, attention.values: 7}
    shapes = {tokens.name: (2, length, tokens.heads * tokens.width) for tokens, length in lengths.items()}
    used = {name for node in steps for name in node.input}
    part = helper.make_graph(
        [*steps, attention.fused(fused)],
        "attention",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (attention.output, fused)],
        [tensor for name, tensor in graph.weights.items() if name in used],
    )
    opsets = [*model.opset_import, helper.make_opsetid(DOMAIN, 1)]
    program = helper.make_model(part, opset_imports=opsets, ir_version=model.ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(program.SerializeToString(), options, providers=["CPUExecutionProvider"])
    inputs = {name: random.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    expected, actual = session.run([attention.output, fused], inputs)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())
