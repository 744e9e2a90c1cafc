"""Attention of ONNX programs becomes one operator where it has the form of one, and stays as it is elsewhere."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ppdiffusers_tome import ToMeExportError
from ppdiffusers_tome.run.onnx_attention import Attention, fuse_attention
from ppdiffusers_tome.run.runtime import load_module

HEADS, WIDTH = 2, 8


def program(
    axis=-1,
    key_heads=HEADS,
    joined=(0, 0, HEADS * WIDTH),
    swaps_keys=False,
    scales_scores=True,
):
    """Attention, step by step, with queries [B, N, 16] and keys and values [B, M, 8·key_heads].

    Args:
        axis: of the softmax; None: the default.
        joined: the shape of the result.
        swaps_keys: whether keys are transposed twice.
        scales_scores: whether the scores are scaled, or the queries.
    """
    shapes = {"split": (0, 0, HEADS, WIDTH), "split_keys": (0, 0, key_heads, WIDTH), "joined": joined}
    weights = [helper.make_tensor(name, TensorProto.INT64, [len(shape)], shape) for name, shape in shapes.items()]
    weights.append(helper.make_tensor("scale", TensorProto.FLOAT, [], [WIDTH**-0.5]))
    nodes = []

    def node(operator, *inputs, **settings):
        nodes.append(helper.make_node(operator, [*inputs], [f"{operator}_{len(nodes)}"], **settings))
        return nodes[-1].output[0]

    heads_first = {"perm": [0, 2, 1, 3]}
    query = node("Transpose", node("Reshape", "queries", "split"), **heads_first)
    key = node("Reshape", "keys", "split_keys")
    if swaps_keys:
        key = node("Transpose", node("Transpose", key, **heads_first), perm=[0, 1, 3, 2])
    else:
        key = node("Transpose", key, perm=[0, 2, 3, 1])
    value = node("Transpose", node("Reshape", "values", "split_keys"), **heads_first)
    scores = node("MatMul", query if scales_scores else node("Mul", query, "scale"), key)
    scores = node("Mul", scores, "scale") if scales_scores else scores
    shares = node("Softmax", scores, **({} if axis is None else {"axis": axis}))
    node("Reshape", node("Transpose", node("MatMul", shares, value), **heads_first), "joined")
    nodes[-1].output[0] = "output"
    widths = {"queries": HEADS * WIDTH, "keys": key_heads * WIDTH, "values": key_heads * WIDTH}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", None, n]) for name, n in widths.items()]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "attention", inputs, [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(model, tokens):
    session = load_module("onnxruntime").InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    random = np.random.RandomState(1)
    shapes = {
        value.name: (2, tokens[value.name], value.type.tensor_type.shape.dim[2].dim_value)
        for value in model.graph.input
    }
    inputs = {name: random.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    return session.run(None, inputs)[0]


def is_fused(model):
    """Whether the operator replaced attention; what the program computes has not changed."""
    tokens = {"queries": 6, "keys": 6, "values": 6}
    expected = run(model, tokens)
    fused = onnx.ModelProto.FromString(model.SerializeToString())
    fuse_attention(fused)
    np.testing.assert_allclose(run(fused, tokens), expected, atol=1e-5)
    operators = {node.op_type for node in fused.graph.node}
    assert ("Softmax" in operators) != ("MultiHeadAttention" in operators)
    return "MultiHeadAttention" in operators


@pytest.mark.parametrize(
    "form", [{}, {"axis": 3}, {"axis": None}, {"swaps_keys": True}, {"scales_scores": False}, {"joined": (0, 0, -1)}]
)
def test_attention_is_fused(form):
    assert is_fused(program(**form))


@pytest.mark.parametrize(
    "form",
    [
        {"axis": 2},  # over the queries
        {"key_heads": 1, "joined": (0, 0, -1)},  # one head of keys and values for all queries
        {"joined": (0, 0, HEADS, WIDTH)},
        {"joined": (0, 0, 2 * HEADS * WIDTH // 2, 1)},
        {"joined": (0, -1, 2 * HEADS * WIDTH)},  # two tokens in one row
    ],
)
def test_attention_of_another_form_stays(form):
    assert not is_fused(program(**form))


def test_an_operator_that_computes_something_else_is_an_error(monkeypatch):
    """As a kernel with a fault would."""
    fused = Attention.fused

    def with_another_scale(attention, output):
        return fused(replace(attention, scale=2 * attention.scale), output)

    monkeypatch.setattr(Attention, "fused", with_another_scale)
    model = program()
    before = model.SerializeToString()
    with pytest.raises(ToMeExportError, match=r"MultiHeadAttention of ONNX Runtime .* \(output\), more than"):
        fuse_attention(model)
    assert model.SerializeToString() == before
