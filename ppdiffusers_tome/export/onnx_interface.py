"""The inputs and outputs of exported ONNX programs as the loaders of the layout "diffusers" expect them."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from ..run.onnx_attention import fuse_attention
from ..run.onnx_graph import casts
from ..run.onnx_weights import external_places, set_places


@dataclass(frozen=True)
class Interface:
    """What the loaders expect of a model's inputs and outputs.

    Args:
        outputs: the names of the program's outputs, in their order.
        joined: the name of an output [B, C, h, w] that joins all of these along its channels; None:
            they stay as they are.
        feature_maps: height and width of inputs and outputs [B, C, h, w], by their names.
    """

    outputs: tuple[str, ...]
    joined: str | None = None
    feature_maps: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def write_model(source: Path, target: Path, interface: Interface, runtime: str) -> None:
    """Write a model as the loaders read it, and move its weights beside it.

    Args:
        source: the `.onnx` file of an export.
        target: the file to write.
        runtime: one of `layouts.RUNTIMES`, whose form of attention the model gets.
    """
    program = onnx.load(str(source), load_external_data=False)
    graph = program.graph
    if runtime == "onnxruntime":
        fuse_attention(program)
    _rename_outputs(graph, interface.outputs)
    if interface.joined is not None:
        _join_outputs(graph, interface.joined)
    _skip_casts_of_inputs(program)
    for value in graph.input:
        if value.name == "timestep":
            _declare_timestep(graph, value, runtime)
    for value in (*graph.input, *graph.output):
        _name_dimensions(value, interface.feature_maps.get(value.name, ()))
    weights = target.with_name("model.onnx_data")
    moved = set()
    for tensor in graph.initializer:
        places = external_places(tensor)
        if places:
            moved.add(places["location"])
            del tensor.external_data[:]
            set_places(tensor, places | {"location": weights.name})
    for name in moved:
        shutil.move(source.with_name(name), weights)  # a single file has all weights of a model
    onnx.save(program, str(target))
    if runtime == "openvino":
        onnx.checker.check_model(str(target))  # it does not know the operators of ONNX Runtime


def _rename_outputs(graph: onnx.GraphProto, names: tuple[str, ...]) -> None:
    renamed = {value.name: name for value, name in zip(graph.output, names, strict=True)}
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for value in graph.output:
        value.name = renamed[value.name]


def _join_outputs(graph: onnx.GraphProto, name: str) -> None:
    """Concatenate the graph's outputs [B, C, h, w] along their channels, to one output."""
    graph.node.append(helper.make_node("Concat", [value.name for value in graph.output], [name], axis=1))
    joined = graph.output[0]
    joined.name = name
    joined.type.tensor_type.shape.dim[1].dim_value *= len(graph.output)
    del graph.output[1:]


def _skip_casts_of_inputs(program: onnx.ModelProto) -> None:
    """Remove casts of inputs to their own data type.

    OpenVINO removes them too, and then the input has both names, of which loaders read either.
    """
    dtypes = {value.name: value.type.tensor_type.elem_type for value in program.graph.input}
    outputs = {value.name for value in program.graph.output}
    kept: list[onnx.NodeProto] = []
    skipped: dict[str, str] = {}
    for node in program.graph.node:
        node.input[:] = [skipped.get(name, name) for name in node.input]
        dtype = dtypes.get(node.input[0]) if node.op_type == "Cast" else None
        if dtype is not None and casts(node, dtype) and node.output[0] not in outputs:
            skipped[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    del program.graph.node[:]
    program.graph.node.extend(kept)


def _declare_timestep(graph: onnx.GraphProto, value: onnx.ValueInfoProto, runtime: str) -> None:
    """Let the timestep, float32 [1], be what the loaders pass: they cast a scheduler's to its type.

    OpenVINO GenAI passes int64 [1]. Optimum passes a scalar, and warns if it has to reshape it; as float32 it has
    every timestep as the scheduler has it.
    """
    name = value.name
    for node in graph.node:
        node.input[:] = [f"{name}.float" if taken == name else taken for taken in node.input]
    if runtime == "openvino":
        value.type.tensor_type.elem_type = TensorProto.INT64
        nodes = [helper.make_node("Cast", [name], [f"{name}.float"], to=TensorProto.FLOAT)]
    else:
        del value.type.tensor_type.shape.dim[:]
        shape = helper.make_tensor(f"{name}.shape", TensorProto.INT64, [1], [1])
        nodes = [
            helper.make_node("Constant", [], [shape.name], value=shape),
            helper.make_node("Reshape", [name, shape.name], [f"{name}.float"]),
        ]
    for node in reversed(nodes):
        graph.node.insert(0, node)


def _name_dimensions(value: onnx.ValueInfoProto, sides: Sequence[int]) -> None:
    """Name the dimensions that are dynamic, [batch_size, sequence_length, …]; those of a feature map get its sides.

    Optimum derives the shapes of outputs from the names.
    """
    for axis, dim in enumerate(value.type.tensor_type.shape.dim):
        if dim.dim_value <= 0:
            if axis < 2:
                dim.dim_param = ("batch_size", "sequence_length")[axis]
            else:
                dim.dim_value = sides[axis - 2]
