"""Read exported programs as lists of operations: `.pdmodel` of Paddle 2 and `.json` of Paddle 3."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Paddle 3's names of dtypes, and Paddle 2's.
DTYPES = {"bool": "bool", "i8": "int8", "ui8": "uint8", "i16": "int16", "i32": "int32", "i64": "int64"}
DTYPES |= {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
DTYPES |= {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
# Names of the main operand in Paddle 2's operations: the tensor to gather from, scatter into, slice or expand.
MAIN_OPERANDS = ("X", "Input", "x")


@dataclass(frozen=True)
class Variable:
    """A tensor of a program; `shape` holds -1 where only the running program knows, `dtype` is as in NumPy."""

    name: str
    dtype: str = ""  # empty for lists of tensors and for parameters
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation, by its name in this version of Paddle. The first of its inputs is the main operand."""

    name: str
    inputs: tuple[Variable, ...]
    outputs: tuple[Variable, ...]
    attributes: dict[str, Any]

    def __str__(self) -> str:
        inputs, outputs = ("; ".join(map(str, variables)) for variables in (self.inputs, self.outputs))
        return f"{outputs} = {self.name}({inputs})"


def read_program(path: Path) -> list[Operation]:
    """All operations of a saved program in the order they run, including those of branches and loops.

    Raises:
        ValueError: the file ends neither in .pdmodel nor in .json.
    """
    if path.suffix == ".json":
        return list(_operations_of_region(json.loads(path.read_text(encoding="utf-8"))["program"], {}))
    if path.suffix == ".pdmodel":
        return list(_operations_of_blocks(path.read_bytes()))
    raise ValueError(f"{path.name} is not a program: it must end in .pdmodel or .json.")


# Paddle 2: a protocol buffer


def _operations_of_blocks(data: bytes) -> Iterator[Operation]:
    from paddle.base.proto import framework_pb2  # only Paddle 2 has it

    kinds = framework_pb2.VarType.Type
    known: dict[str, Variable] = {}  # blocks use variables of enclosing blocks, which come first
    for block in framework_pb2.ProgramDesc.FromString(data).blocks:
        for var in block.vars:
            is_tensor = var.type.type == framework_pb2.VarType.LOD_TENSOR
            tensor = var.type.lod_tensor.tensor
            dtype = _dtype(kinds.Name(tensor.data_type)) if is_tensor else ""
            known[var.name] = Variable(var.name, dtype, tuple(tensor.dims) if is_tensor else ())
        for op in block.ops:
            operands = sorted(op.inputs, key=lambda operand: operand.parameter not in MAIN_OPERANDS)
            inputs = tuple(known[name] for operand in operands for name in operand.arguments)
            outputs = tuple(known[name] for output in op.outputs for name in output.arguments if name in known)
            yield Operation(op.type, inputs, outputs, {attribute.name: _value_of(attribute) for attribute in op.attrs})


def _value_of(attribute: Any) -> Any:
    """The value of the field that is set, besides name and type; an empty list if none is."""
    values = [value for field, value in attribute.ListFields() if field.name not in ("name", "type")]
    if not values:
        return []
    return values[0] if isinstance(values[0], (bool, int, float, str)) else list(values[0])


# Paddle 3: the intermediate representation (PIR) as JSON. "#" is a kind, "I" the inputs, "O" the outputs, "%" the
# number of a value, 0 for an omitted operand, "TT" a type, "A" the attributes with their names "N" and values "AT",
# "D" data. Arguments of branches and loops have a negative number under "#".


def _operations_of_region(node: dict[str, Any], known: dict[int, Variable]) -> Iterator[Operation]:
    for region in node.get("regions", []):
        for block in region["blocks"]:
            for value in block.get("args", []):
                _remember(value, known)
            for op in block["ops"]:
                yield from _operations_of(op, known)


def _operations_of(op: dict[str, Any], known: dict[int, Variable]) -> Iterator[Operation]:
    values = [op["O"]] if isinstance(op.get("O"), dict) else op.get("O", [])
    outputs = tuple(_remember(value, known) for value in values)
    if op["#"] == "p":  # a parameter, not computed
        return
    inputs = tuple(known[value["%"]] for value in op["I"] if value["%"] != 0)
    attributes = {attribute["N"]: _plain(attribute["AT"]) for attribute in op["A"]}
    yield Operation(op["#"].split(".", 1)[1], inputs, outputs, attributes)
    yield from _operations_of_region(op, known)


def _remember(value: dict[str, Any], known: dict[int, Variable]) -> Variable:
    number, kind = value["%"] if "%" in value else value["#"], value["TT"]
    if kind.get("#", "").endswith(".t_dtensor"):
        dtype, shape = kind["D"][:2]
        known[number] = Variable(f"%{number}", _dtype(dtype["#"].split(".t_")[1]), tuple(shape))
    else:
        known[number] = Variable(f"%{number}")
    return known[number]


def _plain(attribute: dict[str, Any]) -> Any:
    data = attribute.get("D")
    return [_plain(item) if isinstance(item, dict) else item for item in data] if isinstance(data, list) else data


def _dtype(name: str) -> str:
    lowered = name.lower()
    if lowered in DTYPES.values():
        return lowered
    if lowered not in DTYPES:
        raise ValueError(f"{name} is a dtype that this reader does not know: add it to DTYPES.")
    return DTYPES[lowered]
