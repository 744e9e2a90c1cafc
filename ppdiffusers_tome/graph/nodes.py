"""New nodes of an ONNX program, and what a program computes from the timestep of a pass."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..methods.steps import LARGEST_LEVEL, PlainSteps
from ..methods.turns import LAST_TIMESTEP, place_of_level, turn_table

PREFIX = "tome."  # of the names of new nodes and constants


class Nodes:
    """Makes nodes and constants of a program. Constants are added to its graph, nodes are taken by the caller.

    Args:
        model: the program.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._made: list[onnx.NodeProto] = []
        self._constants: set[str] = set()

    def __call__(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Make a node, and return the name of its output."""
        output = PREFIX + name
        self._made.append(helper.make_node(operator, inputs, [output], output, **attributes))
        return output

    def constant(self, name: str, value: Any, dtype: str = "int64") -> str:
        """Make a constant, or find the constant of this name, and return its name."""
        if name not in self._constants:
            self._constants.add(name)
            self._graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), PREFIX + name))
        return PREFIX + name

    def take(self) -> list[onnx.NodeProto]:
        """The nodes that were made since the last call, in order."""
        taken, self._made = self._made, []
        return taken


class TimestepNodes:
    """What follows from the timestep of a pass, as nodes that are made when they are first asked for.

    For the whole batch it is that of the first row, as in eager mode.

    Args:
        nodes: of the program.
        value: its input: a number or [B], of any type.
    """

    def __init__(self, nodes: Nodes, value: onnx.ValueInfoProto) -> None:
        self._nodes, self._value = nodes, value
        self._plain: dict[PlainSteps, str] = {}

    @cached_property
    def number(self) -> str:  # [1] float32
        """The timestep."""
        nodes, name, tensor = self._nodes, self._value.name, self._value.type.tensor_type
        if [dim.dim_value for dim in tensor.shape.dim] != [1]:
            name = nodes("Reshape", [name, nodes.constant("minus_one", [-1])], "timesteps")
            name = nodes("Slice", [name, nodes.constant("zero", [0]), nodes.constant("one", [1])], "timestep")
        return name if tensor.elem_type == TensorProto.FLOAT else nodes("Cast", [name], "number", to=TensorProto.FLOAT)

    @cached_property
    def is_level(self) -> str:  # [1] bool
        """Whether the timestep is a noise level: `methods.steps.is_level`."""
        nodes, largest = self._nodes, self._nodes.constant("largest_level", LARGEST_LEVEL, "float32")
        is_whole = nodes("Equal", [self.number, nodes("Floor", [self.number], "floor")], "is_whole")
        is_near = nodes("Less", [nodes("Abs", [self.number], "size"), largest], "is_near")
        return nodes("And", [is_near, nodes("Not", [is_whole], "is_fraction")], "is_level")

    @cached_property
    def place(self) -> str:  # [1] float32
        """The place of the timestep in the table of turns."""
        nodes = self._nodes
        least = place_of_level(0.0)
        shifted = nodes(
            "Mul", [self.number, nodes.constant("spread", place_of_level(1.0) - least, "float32")], "spread_level"
        )
        of_level = nodes("Add", [shifted, nodes.constant("place_of_0", least, "float32")], "place_of_level")
        return nodes("Where", [self.is_level, of_level, self.number], "place")

    @cached_property
    def turn(self) -> str:  # [1] int64
        """The number of the turn."""
        nodes = self._nodes
        whole = nodes("Add", [self.place, nodes.constant("half", 0.5, "float32")], "place_and_half")
        whole = nodes("Floor", [whole], "rounded")
        bounds = [nodes.constant("first", 0, "float32"), nodes.constant("last", LAST_TIMESTEP, "float32")]
        whole = nodes("Cast", [nodes("Clip", [whole, *bounds], "clipped")], "whole", to=TensorProto.INT64)
        return nodes("Gather", [nodes.constant("turns", turn_table()), whole], "turn", axis=0)

    def is_plain(self, plain: PlainSteps) -> str:  # [1] bool
        """Whether the step keeps all tokens."""
        if plain not in self._plain:
            nodes, name = self._nodes, f"plain_steps{len(self._plain)}"
            bounds = {"first": plain.first, "last_from": plain.last_from, "last_to": plain.last_to}
            at = {part: nodes.constant(f"{name}.{part}", value, "float32") for part, value in bounds.items()}
            is_first = nodes("GreaterOrEqual", [self.number, at["first"]], f"{name}.is_first")
            is_from = nodes("GreaterOrEqual", [self.number, at["last_from"]], f"{name}.is_from")
            is_to = nodes("LessOrEqual", [self.number, at["last_to"]], f"{name}.is_to")
            is_last = nodes("And", [is_from, is_to], f"{name}.is_last")
            self._plain[plain] = nodes("Or", [is_first, is_last], f"{name}.is_plain")
            if plain.levels is not None:
                of_level = nodes("And", [self.is_level, self.is_plain(plain.levels)], f"{name}.is_plain_level")
                is_step = nodes("Not", [self.is_level], f"{name}.is_no_level")
                of_step = nodes("And", [is_step, self._plain[plain]], f"{name}.is_plain_step")
                self._plain[plain] = nodes("Or", [of_level, of_step], f"{name}.is_plain_either")
        return self._plain[plain]
