"""Keep the weights of a Paddle 3 program out of its conversion to ONNX.

paddle2onnx 2.1 cannot write more than 2 GB, the limit of a protobuf message, and needs three times the memory of the
weights that it converts. So weights become inputs of the program that it converts; in its ONNX program they are
initializers again, whose data stay in Paddle's file.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import onnx
from paddle.base import core
from paddle.base.proto import framework_pb2

from ..errors import ToMeExportError
from ..run.onnx_weights import set_places

PARAMETER, INPUT = "p", "1.data"  # operators of a `.json` program
FLOAT32 = "0.t_f32"
CPU = [0, 0, ""]  # a place


@dataclass(frozen=True)
class Stored:
    """A tensor in a `.pdiparams` file: its shape, and where its record and its data begin and both end, in bytes."""

    shape: list[int]
    start: int
    data: int
    end: int


def weights_to_inputs(program: dict[str, Any], params: Path, rest: Path) -> dict[str, Stored]:
    """Turn the weights of a program into inputs, and write all further parameters, such as biases, to a file.

    A weight is a float32 parameter of two or more dimensions.

    Args:
        program: the content of a `.json` program, which changes.
        params: its `.pdiparams` file.
        rest: the file to write.

    Returns:
        The weights, by name.

    Raises:
        ToMeExportError: the parameters in `params` are not those of the program.
    """
    operators = program["program"]["regions"][0]["blocks"][0]["ops"]
    parameters = sorted((op for op in operators if op["#"] == PARAMETER), key=_name)
    weights = {}
    with params.open("rb") as source, rest.open("wb") as target:
        stored = list(_read_records(source))  # in the order of their names
        shapes = [[tensor.shape for tensor in stored], [_type(parameter)[1] for parameter in parameters]]
        if shapes[0] != shapes[1]:
            raise ToMeExportError(
                f"{params} has {len(stored)} tensors, which are not the {len(parameters)} parameters of its program: "
                "please report this with the version of Paddle."
            )
        for parameter, tensor in zip(parameters, stored, strict=True):
            if _type(parameter)[0]["#"] == FLOAT32 and len(tensor.shape) > 1:
                weights[_name(parameter)] = tensor
                _make_input(parameter)
            else:
                source.seek(tensor.start)
                target.write(source.read(tensor.end - tensor.start))
    return weights


def inputs_to_weights(model: onnx.ModelProto, weights: dict[str, Stored], params: Path) -> None:
    """Turn the inputs that replaced weights back into initializers, whose data is in `params`.

    The program must be stored in the folder of `params`.
    """
    inputs = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    for name, tensor in weights.items():
        initializer = model.graph.initializer.add(name=name, dims=tensor.shape, data_type=onnx.TensorProto.FLOAT)
        initializer.data_location = onnx.TensorProto.EXTERNAL
        length = tensor.end - tensor.data
        places = {"location": params.name, "offset": str(tensor.data), "length": str(length)}
        set_places(initializer, places)


def _read_records(file: BinaryIO) -> Iterator[Stored]:
    """The tensors of a `.pdiparams` file.

    A record is: version (uint32), number of levels of detail (uint64, 0 in parameters), version (uint32), size of the
    description (int32), description (protobuf), data.
    """
    start, size = 0, os.fstat(file.fileno()).st_size
    while start < size:
        file.seek(start)
        _, levels, _, length = struct.unpack("<IQIi", file.read(20))
        description = framework_pb2.VarType.TensorDesc.FromString(file.read(length))
        if levels:
            raise ToMeExportError(f"{file.name} has a tensor with levels of detail, which parameters do not have.")
        data, shape = file.tell(), list(description.dims)
        item = core.size_of_dtype(core.VarDesc.VarType(description.data_type))  # bytes
        end = data + prod(shape) * item
        yield Stored(shape, start, data, end)
        start = end


def _name(parameter: dict[str, Any]) -> str:
    return parameter["A"][3]


def _type(parameter: dict[str, Any]) -> Any:
    """The data type of a parameter, its shape, and more."""
    return parameter["O"]["TT"]["D"]


def _make_input(parameter: dict[str, Any]) -> None:
    """Change a parameter of a `.json` program to an input of the same name, type and shape."""
    attributes = {
        "name": {"#": "0.a_str", "D": _name(parameter)},
        "shape": {"#": "1.a_intarray", "D": _type(parameter)[1]},
        "dtype": {"#": "1.a_dtype", "D": "float32"},
        "place": {"#": "1.a_place", "D": CPU},
    }
    stops_gradient = {"#": "0.a_array", "D": [{"#": "0.a_bool", "D": True}]}
    output = parameter["O"]
    parameter.clear()
    parameter |= {
        "#": INPUT,
        "A": [{"AT": value, "N": name} for name, value in attributes.items()],
        "I": [],
        "O": [output],
        "OA": [{"AT": stops_gradient, "N": "stop_gradient"}],
    }
