"""Read a UNet in an ONNX program: its inputs, the blocks with self-attention, and which of them merge."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import onnx

from ..errors import ParameterError, ToMeExportError
from ..grid import Grid
from ..methods import ToMeConfig
from ..methods.interlace import PARTS, Interlace
from ..methods.steps import PLAIN_STEPS
from ..run.onnx_graph import Graph
from .indices import InterlacedKeys, Keys, KeysByTable
from .keys import BlockKeys, is_merged, timestep_input
from .self_attention import SelfAttention, check_operators, find_self_attention

SAMPLE = "sample"  # the name of the input with the latents [B, C, h, w]
SHAPES = ("Size", "Shape", "ConstantOfShape", "Range")  # what these compute of a feature map is none


class FeatureMap(NamedTuple):
    """A feature map [B, C, h, w], or its tokens [B, h·w, C]."""

    name: str  # of the value with four axes
    level: float  # how many latent pixels a token stands for, along each axis
    grid: Grid | None  # None if height and width are free


@dataclass(frozen=True)
class UNetBlock:
    """A block with self-attention.

    Args:
        attention: its self-attention.
        feature_map: where its tokens come from.
        number: in the order of ppdiffusers' modules: blocks on the way down, on the way up, in the middle.
        is_up: whether it is on the way up.
    """

    attention: SelfAttention
    feature_map: FeatureMap
    number: int
    is_up: bool

    @property
    def level(self) -> int:
        """Its downsample factor, as in `max_downsample`."""
        return round(self.feature_map.level)


@dataclass(frozen=True)
class UNetMerging:
    """How a UNet merges.

    Args:
        blocks: all with self-attention, in the order in which they run.
        merging: the keys that remain in those that merge.
        kept: how many these are, in words, by the name of the block.
        unread: names of attention that cannot be read.
    """

    blocks: Sequence[UNetBlock]
    merging: Sequence[BlockKeys]
    kept: dict[str, str]
    unread: Sequence[str]


def plan_merging(model: onnx.ModelProto, config: ToMeConfig) -> UNetMerging:
    """How a config merges in the UNet of a program, as it does in eager mode.

    Raises:
        ToMeExportError: the program is not a plain UNet, or was optimized or quantized.
        ParameterError: the config does not fit it.
    """
    if is_merged(model):
        raise ToMeExportError("keys are left out in this model already: merge the plain model, at a different ratio.")
    timestep_input(model)
    check_operators(model)
    graph = Graph(model)
    found, unread = find_self_attention(model, graph)
    if not found:
        reason = f"; the attention of {', '.join(unread[:3])} cannot be read" if unread else ""
        raise ToMeExportError(
            f"the model has no self-attention of the form that merges{reason}: queries, keys and values must each be "
            "the product of a weight with the same tokens. Merge the UNet of a Stable Diffusion model as it was "
            "exported, before it is optimized."
        )
    blocks = _read_blocks(model, graph, found)
    deepest = config.max_downsample or min(block.level for block in blocks)
    chosen = [block for block in blocks if block.level <= deepest]
    if not chosen:
        levels = ", ".join(map(str, sorted({block.level for block in blocks})))
        rule = f"no block is at this level or less, only at {levels}"
        raise ParameterError("max_downsample", config.max_downsample, rule)
    chosen.sort(key=lambda block: block.number)
    up = [place for place, block in enumerate(chosen) if block.is_up]
    shares = config.kept_shares(len(chosen), up[-1] if up else None)
    merging, kept = [], {}
    for block, share in zip(chosen, shares, strict=True):
        keys = _keys(block, config, share)
        if keys is not None:
            attention = block.attention
            merging.append(BlockKeys(attention.name, attention.projections, keys))
            kept[attention.name] = _in_words(keys)
    if not merging:
        raise ParameterError("min_tokens", config.min_tokens, "all feature maps have fewer tokens, so nothing merges")
    return UNetMerging(blocks, merging, kept, unread)


def _keys(block: UNetBlock, config: ToMeConfig, share: float) -> Keys | None:
    """The keys that remain in a block; None if all do."""
    if share == 1:
        return None
    grid = block.feature_map.grid
    plain = PLAIN_STEPS if config.has_plain_steps else None
    if grid is None:
        if not isinstance(config, Interlace):
            rule = "the height and width of this model are free, for which there is only interlace"
            raise ParameterError("method", config.method, rule)
        parts = round(share * PARTS)
        return InterlacedKeys(block.feature_map.name, parts, block.number, plain, config.min_tokens)
    kept = grid.tokens if grid.tokens < config.min_tokens else config.count_kept(grid, share)
    if kept == grid.tokens:
        return None
    return KeysByTable(config.constants(grid, kept, block.number), grid.tokens, plain)


def _in_words(keys: Keys) -> str:
    """How many keys remain in a step that merges: "512 of 4096", or a share where the size is free."""
    if isinstance(keys, KeysByTable):
        return f"{keys.table.shape[1]} of {keys.tokens}"
    assert isinstance(keys, InterlacedKeys)
    return f"{keys.parts} of {PARTS} in each cell"


def _read_blocks(model: onnx.ModelProto, graph: Graph, found: Sequence[SelfAttention]) -> list[UNetBlock]:
    maps = _feature_maps(model, graph)
    middle, up = _middle(model, graph, maps)
    for attention in found:
        if attention.tokens not in maps:
            raise ToMeExportError(
                f"the tokens of {attention.name} do not come from the input {SAMPLE!r}: the model is not a UNet of "
                "Stable Diffusion."
            )
    positions = [attention.position for attention in found]
    places = ["up" if position >= up else "middle" if position >= middle else "down" for position in positions]
    order = sorted(range(len(found)), key=lambda index: ["down", "up", "middle"].index(places[index]))
    numbers = {index: number for number, index in enumerate(order)}
    return [
        UNetBlock(attention, maps[attention.tokens], numbers[index], places[index] == "up")
        for index, attention in enumerate(found)
    ]


def _middle(model: onnx.ModelProto, graph: Graph, maps: dict[str, FeatureMap]) -> tuple[int, int]:
    """The positions of the nodes with which the middle of a UNet and its way up begin.

    The way up begins where a feature map of the way down is joined to the channels of the current feature map; the
    middle lies behind the last feature map of the way down. Without such a join, all is the way down.
    """
    positions = {name: place for place, node in enumerate(model.graph.node) for name in node.output}
    for place, node in enumerate(model.graph.node):
        is_join = node.op_type == "Concat" and node.attribute[0].i == 1 and len(node.input) == 2
        if is_join and all(name in maps for name in node.input):
            return min(positions.get(graph.before_casts(name), 0) for name in node.input) + 1, place
    return len(model.graph.node), len(model.graph.node)


def _feature_maps(model: onnx.ModelProto, graph: Graph) -> dict[str, FeatureMap]:
    """The feature map that each value comes from."""
    maps = dict[str, FeatureMap]()
    for value in model.graph.input:
        if value.name == SAMPLE:
            h, w = (dim.dim_value for dim in value.type.tensor_type.shape.dim[2:])
            maps[SAMPLE] = FeatureMap(SAMPLE, 1, Grid(h, w) if h > 0 and w > 0 else None)
    if not maps:
        names = ", ".join(value.name for value in model.graph.input)
        raise ToMeExportError(
            f"the model has no input {SAMPLE!r}, only {names}: it is not a UNet of Stable Diffusion."
        )
    for node in model.graph.node:
        before = next((maps[name] for name in node.input if name in maps), None)
        if before is None or node.op_type in SHAPES:
            continue
        after = before
        if node.op_type in ("Conv", "AveragePool", "MaxPool"):
            after = _convolved(graph, node, before)
        elif node.op_type == "Resize":
            after = _resized(graph, node, before)
        maps.update(dict.fromkeys(node.output, after))
    return maps


def _convolved(graph: Graph, node: onnx.NodeProto, before: FeatureMap) -> FeatureMap:
    attributes: dict[str, Any] = {part.name: onnx.helper.get_attribute_value(part) for part in node.attribute}
    strides = attributes.get("strides", [1, 1])
    grid = before.grid
    if grid is not None:
        kernel = attributes.get("kernel_shape") or graph.weights[node.input[1]].dims[2:]
        pads, dilations = attributes.get("pads", [0] * 4), attributes.get("dilations", [1, 1])
        sides = [
            (grid[axis] + pads[axis] + pads[axis + 2] - dilations[axis] * (kernel[axis] - 1) - 1) // strides[axis] + 1
            for axis in (0, 1)
        ]
        grid = Grid(*sides)
    return FeatureMap(node.output[0], before.level * strides[0], grid)


def _resized(graph: Graph, node: onnx.NodeProto, before: FeatureMap) -> FeatureMap:
    """A feature map after an upsampler: twice as large, or as large as a feature map on the way down."""
    sizes = _last_numbers(graph, node.input[3]) if len(node.input) > 3 and node.input[3] else None
    grid = before.grid
    if grid is not None:
        grid = Grid(*sizes) if sizes is not None else Grid(2 * grid.h, 2 * grid.w)
    return FeatureMap(node.output[0], before.level / 2, grid)


def _last_numbers(graph: Graph, name: str) -> list[int] | None:
    """The last two numbers of a shape, if they are constant."""
    value = graph.constant(name)
    node = graph.maker(name)
    if value is None and node is not None and node.op_type == "Concat":
        parts = [graph.constant(part) for part in node.input]
        numbers: list[int | None] = []
        for part in parts:
            numbers += [None] if part is None else [int(number) for number in part.reshape([-1])]
        last = numbers[-2:]
        return None if None in last or len(last) < 2 else [number for number in last if number is not None]
    return None if value is None or value.size < 2 else [int(number) for number in value.reshape([-1])[-2:]]
