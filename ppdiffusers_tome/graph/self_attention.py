"""Find the self-attention of an ONNX program that any tool has exported, by its structure.

It is a softmax between two products: of queries and keys before it, of its result and values after it. Queries, keys
and values begin with products of weights with the same tokens.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import onnx

from ..errors import ToMeExportError
from ..run.onnx_graph import Graph

MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
FUSED = ("Attention", "GroupQueryAttention", "MultiHeadAttention", "PackedAttention", "PackedMultiHeadAttention")
QUANTIZED = (
    *("DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat"),
    *("MatMulNBits", "QAttention", "QGemm", "QLinearConv", "QLinearMatMul"),
)
OLDEST_OPSET = 13  # of the operators in `nodes` and `indices`
PRODUCTS = ("Einsum", "MatMul")
CONSTANT = ("Cast", "Identity", "Transpose")  # of a weight, which it stays
# Operators between a projection and attention, by the input that they pass on; None: the input that is not constant.
PASSING = {"Add": None, "Cast": 0, "Div": 0, "Identity": 0, "Mul": None, "Reshape": 0, "Transpose": 0}
SPLITTING = ("Gather", "Slice", "Split")  # of one product into queries, keys and values
AFTER_SOFTMAX = ("Cast", "Dropout", "Identity", "IsNaN", "Where")
BLOCK = re.compile(r"(?:down_blocks|mid_block|up_blocks)[\w./]*?transformer_blocks[./]\d+")  # in the names of nodes


@dataclass(frozen=True)
class SelfAttention:
    """The self-attention of a block.

    Args:
        name: the path of its block where names of nodes show it, otherwise its number.
        tokens: the value [B, N, C] that queries, keys and values begin with.
        projections: the results of the products of weights that keys and values begin with.
        position: of its softmax among the nodes.
    """

    name: str
    tokens: str
    projections: tuple[str, str]
    position: int


def check_operators(model: onnx.ModelProto) -> None:
    """Raise ToMeExportError if a program was optimized or quantized, or is too old for the new nodes."""
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if opset < OLDEST_OPSET:
        raise ToMeExportError(
            f"the model has opset {opset}, and the new nodes need {OLDEST_OPSET}: export it again with a newer opset, "
            "or convert it by onnx.version_converter."
        )
    for node in model.graph.node:
        if node.domain == MICROSOFT and node.op_type in FUSED:
            raise ToMeExportError(
                f"attention is the operator {node.op_type} of ONNX Runtime ({_name(node)}), in which keys cannot be "
                "left out: merge the model as it was exported, and optimize it afterwards."
            )
        if node.op_type in QUANTIZED:
            raise ToMeExportError(
                f"the model is quantized ({node.op_type}, {_name(node)}): merge the model as it was exported, and "
                "quantize it afterwards."
            )


def find_self_attention(model: onnx.ModelProto, graph: Graph) -> tuple[list[SelfAttention], list[str]]:
    """All self-attention of a program, in the order of its nodes, and the names of attention that cannot be read.

    Args:
        model: the program.
        graph: its graph.

    Raises:
        ToMeExportError: queries, keys and values are one product.
    """
    found: list[SelfAttention] = []
    unread: list[str] = []
    for position, node in enumerate(model.graph.node):
        operands = _operands(graph, node)
        if operands is None:
            continue
        products = [_projection(graph, name) for name in operands]
        if any(product is None for product in products):
            unread.append(_name(node))
            continue
        query, key, value = (product for product in products if product is not None)
        if query is key or key is value:
            raise ToMeExportError(
                f"queries, keys and values are one product ({_name(query)}), whose keys cannot be left out: export "
                "the model again with separate projections (in diffusers unfuse_qkv_projections())."
            )
        inputs = {graph.before_casts(product.input[0]) for product in (query, key, value)}
        if len(inputs) == 1:
            name = _block_name((query, key, value, node)) or f"self-attention {len(found)}"
            found.append(SelfAttention(name, inputs.pop(), (key.output[0], value.output[0]), position))
    return found, unread


def _operands(graph: Graph, node: onnx.NodeProto) -> tuple[str, str, str] | None:
    """Queries, keys and values of the attention that a node computes, or whose softmax it is; None for other nodes."""
    if node.op_type == "Attention" and not node.domain:
        query, key, value = node.input[:3]
        return query, key, value
    if node.op_type != "Softmax":
        return None
    scores = _maker(graph, node.input[0], PRODUCTS)
    product = _user(graph, node.output[0])
    if scores is None or product is None:
        return None
    return scores.input[0], scores.input[1], product.input[1]


def _maker(graph: Graph, name: str, operators: Iterable[str]) -> onnx.NodeProto | None:
    """The node with one of these operators that a value comes from, by the way that tokens take."""
    node = graph.maker(name)
    while node is not None and node.op_type not in operators:
        if node.op_type not in PASSING:
            return None
        name = _passed_on(graph, node)
        node = graph.maker(name)
    return node


def _passed_on(graph: Graph, node: onnx.NodeProto) -> str:
    """The input of a node of `PASSING` that has the tokens."""
    place = PASSING[node.op_type]
    if place is not None or len(node.input) < 2:
        return node.input[place or 0]
    first, second = node.input[:2]
    if _is_constant(graph, first) or _is_zero(graph, first) or _is_scalar(graph, first):
        return second
    return first


def _is_zero(graph: Graph, name: str) -> bool:
    """Whether a value is a product with 0, as torch.baddbmm adds to the scores."""
    node = graph.maker(name)
    return node is not None and graph.number(node, "Mul") == 0


def _is_scalar(graph: Graph, name: str) -> bool:
    """Whether a value is a number that scales tokens: a power or the square root of a number."""
    node = graph.maker(name)
    return node is not None and node.op_type in ("Sqrt", "Pow", "Reciprocal")


def _is_constant(graph: Graph, name: str) -> bool:
    """Whether a value is a weight, as it is stored, transposed or cast."""
    while name not in graph.weights:
        node = graph.makers.get(name)
        if node is None or node.op_type not in (*CONSTANT, "Constant"):
            return False
        if node.op_type == "Constant":
            return True
        name = node.input[0]
    return True


def _projection(graph: Graph, name: str) -> onnx.NodeProto | None:
    """The product of a weight and tokens that queries, keys or values begin with; None if it is not known."""
    node = _maker(graph, name, ("MatMul", "Gemm", *SPLITTING))
    while node is not None and node.op_type in SPLITTING:
        node = _maker(graph, node.input[0], ("MatMul", "Gemm", *SPLITTING))
    return node if node is not None and node.op_type == "MatMul" and _is_constant(graph, node.input[1]) else None


def _user(graph: Graph, name: str) -> onnx.NodeProto | None:
    """The product that uses the result of a softmax as its first factor."""
    names = [name]
    while names:
        name = names.pop()
        for node in graph.users.get(name, ()):
            if node.op_type in PRODUCTS and node.input[0] == name:
                return node
            if node.op_type in AFTER_SOFTMAX:
                names.append(node.output[0])
    return None


def _name(node: onnx.NodeProto) -> str:
    return node.name or node.output[0]


def _block_name(nodes: Iterable[onnx.NodeProto]) -> str | None:
    """The path of a block in the names of nodes, or in the scopes that torch.export notes at them."""
    for node in nodes:
        scopes = [entry.value for entry in node.metadata_props if entry.key.endswith("name_scopes")]
        for text in (node.name, *scopes):
            if match := BLOCK.search(text):
                return match[0].replace("/", ".")
    return None
