"""The indices of the keys that remain in a block, as nodes of a program."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..grid import Grid
from ..methods.interlace import PARTS, SIDE, offset_of, ranks
from ..methods.steps import PlainSteps
from ..methods.turns import TURNS
from .nodes import Nodes, TimestepNodes


class Keys(Protocol):
    """Which keys remain in a block."""

    def indices(self, nodes: Nodes, timestep: TimestepNodes, name: str) -> str:  # [K] int64, ascending
        """Make the nodes that compute their indices; K may be unknown before a pass. Names begin with `name`."""


@dataclass(frozen=True, eq=False)
class KeysByTable:
    """Keys on a grid of one size.

    Args:
        table: those that remain in each turn, [T, K], as `Method.constants` returns it.
        tokens: N, of the grid.
        plain: the steps in which all remain; None: none.
    """

    table: np.ndarray
    tokens: int
    plain: PlainSteps | None

    def indices(self, nodes: Nodes, timestep: TimestepNodes, name: str) -> str:
        turns, kept = self.table.shape
        if self.plain is None and turns == 1:
            return nodes.constant(f"{name}.indices", self.table[0])
        turn = timestep.turn if turns > 1 else nodes.constant("zero", [0])
        if self.plain is None:
            row = nodes("Gather", [nodes.constant(f"{name}.table", self.table), turn], f"{name}.row", axis=0)
            return nodes("Reshape", [row, nodes.constant(f"{name}.kept", [kept])], f"{name}.indices")
        # All choices in a row, after them all tokens: a step takes a part of the row.
        choices = np.concatenate([self.table.reshape(-1), np.arange(self.tokens)])
        starts = np.arange(turns + 1) * kept
        ends = np.append(starts[1:], len(choices))
        everything = nodes.constant(f"all_of_{turns}", [turns])
        part = nodes("Where", [timestep.is_plain(self.plain), everything, turn], f"{name}.part")
        bounds = [
            nodes("Gather", [nodes.constant(f"{name}.{bound}s", values), part], f"{name}.{bound}", axis=0)
            for bound, values in (("start", starts), ("end", ends))
        ]
        return nodes("Slice", [nodes.constant(f"{name}.choices", choices), *bounds], f"{name}.indices")


@dataclass(frozen=True)
class InterlacedKeys:
    """Keys of `interlace` on a feature map whose size is known in a pass only: `methods.interlace.remaining` as nodes.

    Args:
        feature_map: the name of a value [B, C, h, w] with the height and width of the block's grid.
        parts: of the `PARTS` of each whole cell, those that remain.
        block: its number in the denoiser.
        plain: the steps in which all remain; None: none.
        min_tokens: all remain in smaller feature maps.
    """

    feature_map: str
    parts: int
    block: int
    plain: PlainSteps | None
    min_tokens: int = 0

    def indices(self, nodes: Nodes, timestep: TimestepNodes, name: str) -> str:
        def node(operator: str, inputs: list[str], part: str, **attributes: int) -> str:
            return nodes(operator, inputs, f"{name}.{part}", **attributes)

        constant = nodes.constant
        zero, step, side = constant("scalar_zero", 0), constant("scalar_one", 1), constant("side", SIDE)
        shape = node("Shape", [self.feature_map], "shape")
        positions, is_inside = [], []
        for axis, sizes in (("row", 2), ("column", 3)):
            size = node("Gather", [shape, constant(f"axis{sizes}", sizes)], f"{axis}s", axis=0)
            number = node("Range", [zero, size, step], axis)
            rest = node("Mod", [size, side], f"{axis}s_outside")
            is_inside.append(node("Less", [number, node("Sub", [size, rest], f"{axis}s_inside")], f"{axis}_is_inside"))
            positions.append(node("Mod", [number, side], f"{axis}_in_cell"))
        of_rows = constant("minus_one", [-1])
        positions[0] = node("Unsqueeze", [node("Mul", [positions[0], side], "row_start"), of_rows], "row_start_2d")
        is_inside[0] = node("Unsqueeze", [is_inside[0], of_rows], "row_is_inside_2d")
        in_cell = node("Add", positions, "in_cell")  # [h, w]: 0 to PARTS - 1
        rank = node("Gather", [constant("ranks", ranks(Grid(SIDE, SIDE)).reshape(-1)), in_cell], "rank", axis=0)
        shifts = constant(f"{name}.shifts", -self.parts * (np.arange(TURNS) + offset_of(self.block)) % PARTS)
        shift = node("Gather", [shifts, timestep.turn], "shift", axis=0)
        shifted = node("Add", [rank, shift], "shifted")
        turned = node("Mod", [shifted, constant("parts_of_cell", PARTS)], "turned")
        remains = node("Less", [turned, constant(f"{name}.parts", self.parts)], "is_in_turn")
        is_outside = node("Not", [node("And", is_inside, "is_inside")], "is_outside")
        remains = node("Or", [remains, is_outside], "remains")
        if self.plain is not None:
            remains = node("Or", [remains, timestep.is_plain(self.plain)], "remains_in_step")
        if self.min_tokens:
            tokens = node("Size", [rank], "tokens")
            is_small = node("Less", [tokens, constant("min_tokens", self.min_tokens)], "is_small")
            remains = node("Or", [remains, is_small], "remains_in_size")
        flat = node("Reshape", [remains, constant("minus_one", [-1])], "flat")
        return node("Reshape", [node("NonZero", [flat], "nonzero"), constant("minus_one", [-1])], "indices")
