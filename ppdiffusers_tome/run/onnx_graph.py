"""Read and change the graph of an ONNX program."""

from collections.abc import Callable, Sequence
from typing import TypeGuard

import numpy as np
import onnx
from onnx import numpy_helper

from ..errors import ToMeExportError


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

    def before_casts(self, name: str) -> str:
        """The value that a value is, or is cast from."""
        while (node := self.makers.get(name)) is not None and node.op_type in ("Cast", "Identity"):
            name = node.input[0]
        return name

    def constant(self, name: str) -> np.ndarray | None:
        """The array of a constant; None if the value is not constant, or is stored in a separate file."""
        node = self.maker(name)
        is_value = node is not None and node.op_type == "Constant" and node.attribute[0].name == "value"
        tensor = node.attribute[0].t if is_value and node is not None else self.weights.get(name)
        return None if tensor is None or tensor.external_data else numpy_helper.to_array(tensor)

    def number(self, node: onnx.NodeProto, operator: str) -> float | None:
        """The number that an Add or Mul node combines with its first input; None for different operators."""
        value = self.constant(node.input[1]) if node.op_type == operator else None
        return float(value.reshape([-1])[0]) if value is not None and value.size == 1 else None

    def only_user(self, node: onnx.NodeProto | None) -> onnx.NodeProto | None:
        """The node that uses a node's first output, if no further node does."""
        using = [] if node is None else self.users.get(node.output[0], [])
        return using[0] if len(using) == 1 else None


def rewrite(model: onnx.ModelProto, change: Callable[[onnx.NodeProto], Sequence[onnx.NodeProto]]) -> None:
    """Replace each node by the nodes that `change` returns for it.

    Raises:
        ToMeExportError: `change` fails for a node, which the message names.
    """
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        try:
            nodes += change(node)
        except Exception as error:  # a program is not as `change` expects it
            name = node.name or ", ".join(node.output)
            reason = f"{type(error).__name__}: {error}"
            raise ToMeExportError(
                f"the ONNX node {name} ({node.op_type}) cannot be rewritten: {reason:.300}"
            ) from error
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def drop_unused(model: onnx.ModelProto) -> None:
    """Remove the nodes that do not contribute to an output.

    onnxoptimizer (0.3.13) does it too, but loses the places of weights that are in a separate file.
    """
    needed, used = {output.name for output in model.graph.output}, []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            used.append(node)
            needed.update(node.input)
    del model.graph.node[:]
    model.graph.node.extend(used[::-1])


def casts(node: onnx.NodeProto | None, dtype: int) -> TypeGuard[onnx.NodeProto]:
    """Whether a node casts to this data type."""
    return node is not None and node.op_type == "Cast" and node.attribute[0].i == dtype
