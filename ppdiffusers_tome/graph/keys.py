"""Leave out keys and values in an ONNX program: a gather in front of their projections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx

from ..errors import ToMeExportError
from ..run.onnx_graph import Graph
from .indices import Keys
from .nodes import PREFIX, Nodes, TimestepNodes

TIMESTEP = "timestep"  # the name of the input
TOKENS = 1  # axis of tokens [B, N, C]
# What passes tokens on between a projection and the product of attention, beside Reshape and Transpose.
PASSING = ("Add", "Cast", "Div", "Identity", "Mul")


@dataclass(frozen=True)
class BlockKeys:
    """A block whose attention gets fewer keys.

    Args:
        name: of its new nodes, and in messages.
        projections: the names of the products of weights with the tokens that keys and values begin with.
        keys: those that remain.
    """

    name: str
    projections: tuple[str, ...]
    keys: Keys


def timestep_input(model: onnx.ModelProto) -> onnx.ValueInfoProto:
    """The input of a program that is the timestep.

    Raises:
        ToMeExportError: there is none.
    """
    for value in model.graph.input:
        if value.name == TIMESTEP:
            return value
    names = ", ".join(value.name for value in model.graph.input)
    raise ToMeExportError(
        f"the program has no input {TIMESTEP!r}, by which keys take turns, only {names}: it is not the UNet of a "
        "diffusion model, or was exported with a different name of this input. Export it again with this name."
    )


def leave_out_keys(model: onnx.ModelProto, blocks: Sequence[BlockKeys]) -> None:
    """Let the attention of blocks get the keys and values that remain. The program is changed.

    Raises:
        ToMeExportError: the program has no timestep, or keys take a way to their attention that is not known.
    """
    graph, nodes = Graph(model), Nodes(model)
    timestep = TimestepNodes(nodes, timestep_input(model))
    block_of = {projection: block for block in blocks for projection in block.projections}
    indices: dict[str, str] = {}  # by block
    kept: dict[tuple[str, str], str] = {}  # the tokens that remain of a value, by block and value
    reshapes = {
        id(node): (axis, block)
        for projection, block in block_of.items()
        for node, axis in _reshapes(graph, projection, block)
    }
    changed: list[onnx.NodeProto] = []
    for node in model.graph.node:
        block = next((block_of[name] for name in node.output if name in block_of), None)
        if block is not None:
            if block.name not in indices:
                indices[block.name] = block.keys.indices(nodes, timestep, block.name)
            place = (block.name, node.input[0])
            if place not in kept:
                name = f"{block.name}.kept.{node.input[0]}"
                kept[place] = nodes("Gather", [node.input[0], indices[block.name]], name, axis=TOKENS)
            node.input[0] = kept[place]
        elif id(node) in reshapes:
            axis, block = reshapes[id(node)]
            node.input[1] = _with_count(graph, nodes, node, axis, indices[block.name])
        changed += [*nodes.take(), node]
    del model.graph.node[:]
    model.graph.node.extend(changed)
    del model.graph.value_info[:]  # shapes of keys that were left out
    model.metadata_props.add(key=PREFIX + "blocks", value=", ".join(block.name for block in blocks))


def is_merged(model: onnx.ModelProto) -> bool:
    """Whether keys were left out in a program already."""
    return any(entry.key == PREFIX + "blocks" for entry in model.metadata_props)


def _reshapes(graph: Graph, projection: str, block: BlockKeys) -> Iterator[tuple[onnx.NodeProto, int]]:
    """The reshapes of a projection's result on its way to attention, each with the axis of tokens in its output.

    The first reshape splits channels into heads, so that the axes before them stay. Later reshapes join or split the
    axes before the last two, which stay.
    """
    ways: list[tuple[str, int, int | None]] = [(projection, TOKENS, None)]  # value, axis of tokens, rank once split
    while ways:
        value, axis, rank = ways.pop()
        for node in graph.users.get(value, ()):
            if node.op_type in PASSING:
                ways.append((node.output[0], axis, rank))
            elif node.op_type == "Transpose":
                order = list(node.attribute[0].ints)
                ways.append((node.output[0], order.index(axis), rank))
            elif node.op_type == "Reshape" and node.input[0] == value:
                if rank is None:
                    axis_after, rank_after = axis, 4
                else:
                    rank_after = 7 - rank  # 3: heads are part of the batch; 4: they have an axis
                    axis_after = axis - rank + rank_after
                yield node, axis_after
                ways.append((node.output[0], axis_after, rank_after))
            elif node.op_type not in ("Einsum", "MatMul", "Shape"):
                raise ToMeExportError(
                    f"{block.name}: the node {node.name or node.output[0]} ({node.op_type}) between a projection and "
                    "its attention is not known, so the block cannot get fewer keys: export the model without "
                    "optimization, and merge before you optimize or quantize it."
                )


def _with_count(graph: Graph, nodes: Nodes, node: onnx.NodeProto, axis: int, indices: str) -> str:
    """The shape of a Reshape node whose axis of tokens has as many as remain."""
    shape = graph.constant(node.input[1])
    if shape is not None and shape[axis] in (0, -1):  # it follows from the input
        return node.input[1]
    maker = graph.maker(node.input[1])
    if maker is not None and maker.op_type == "Concat" and len(maker.input) > axis:
        parts = [graph.constant(name) for name in maker.input]
        sizes = {1 if part is None else part.size for part in parts}
        part = parts[axis]
        if sizes == {1} and part is not None and part[0] in (0, -1):
            return node.input[1]
    name, constant = f"shape_of.{node.output[0]}", nodes.constant
    place, after = constant(f"at{axis}", [axis]), constant(f"at{axis + 1}", [axis + 1])
    first = nodes("Slice", [node.input[1], constant("zero", [0]), place], f"{name}.first")
    rest = nodes("Slice", [node.input[1], after, constant("end", [2**31 - 1])], f"{name}.rest")
    return nodes("Concat", [first, nodes("Shape", [indices], f"{name}.count"), rest], name, axis=0)
