"""Read exported programs as lists of operations: `.pdmodel` of Paddle 2 and `.json` of Paddle 3."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle
from paddle.base import core

# Names of the main operand in Paddle 2's operations: the tensor to gather from, scatter into, slice or expand.
MAIN_OPERANDS = ("X", "Input", "x")


@dataclass(frozen=True)
class Variable:
    """A tensor of a program; `shape` holds -1 where only the running program knows, `dtype` is as in NumPy."""

    name: str
    dtype: str = ""  # empty for lists of tensors
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
        program = paddle.static.Program()
        core.deserialize_pir_program(str(path), program, 1)
        return list(_operations_of_pir(program.global_block()))
    if path.suffix == ".pdmodel":
        paddle.enable_static()  # or it cannot be parsed
        try:
            return list(_operations_of_blocks(paddle.static.Program.parse_from_string(path.read_bytes())))
        finally:
            paddle.disable_static()
    raise ValueError(f"{path.name} is not a program: it must end in .pdmodel or .json.")


def _operations_of_blocks(program: Any) -> Iterator[Operation]:
    """The operations of a program of Paddle 2."""
    for block in program.blocks:
        for op in block.ops:
            operands = sorted(op.input_names, key=lambda name: name not in MAIN_OPERANDS)
            inputs = tuple(_variable(block, name) for operand in operands for name in op.input(operand))
            outputs = tuple(_variable(block, name) for name in op.output_arg_names if block._find_var_recursive(name))
            yield Operation(op.type, inputs, outputs, op.all_attrs())


def _variable(block: Any, name: str) -> Variable:
    var = block._find_var_recursive(name)
    if var.type != core.VarDesc.VarType.LOD_TENSOR:
        return Variable(name)
    return Variable(name, str(var.dtype).rpartition(".")[2], tuple(var.shape))


def _operations_of_pir(block: Any) -> Iterator[Operation]:
    """The operations of a block in Paddle 3's intermediate representation."""
    for op in block.ops:
        if op.name() == "builtin.parameter":  # not computed
            continue
        inputs = tuple(map(_value, (operand for operand in op.operands_source() if operand.initialized())))
        yield Operation(op.name().split(".", 1)[1], inputs, tuple(map(_value, op.results())), op.attrs())
        for inner in op.blocks():
            yield from _operations_of_pir(inner)


def _value(value: Any) -> Variable:
    if not value.is_dense_tensor_type():
        return Variable(f"%{value.id}")
    return Variable(f"%{value.id}", str(value.dtype).rpartition(".")[2], tuple(value.shape))
