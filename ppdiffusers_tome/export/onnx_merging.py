"""How a denoiser merges, as a change of its plain ONNX program: the weights of keys and values of its blocks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from ..attach.attach import attached_placements, last_grids
from ..errors import ToMeExportError
from ..graph.indices import KeysByTable
from ..graph.keys import BlockKeys, leave_out_keys
from ..methods.steps import plain_steps_of
from ..run.onnx_graph import Graph
from ..run.onnx_weights import SharedWeights
from .comparison import Comparison
from .programs import Denoiser, Traceable, merge_by
from .request import DenoiserMerging
from .tracing import on_cpu


@dataclass(frozen=True)
class MergingBlock:
    """A block in which keys and values are left out.

    Args:
        name: its model and path: "unet.down_blocks.0.attentions.0.transformer_blocks.0".
        weights: the names of the parameters of each projection of keys or values, with those that a LoRA adds.
        keys: those that remain.
    """

    name: str
    weights: tuple[tuple[str, ...], ...]
    keys: KeysByTable


@dataclass(frozen=True)
class Edit:
    """What makes a program that merges of the plain ONNX program of a denoiser.

    Args:
        comparison: with the denoiser in eager mode, where it merges this way.
        blocks: those in which keys are left out.
    """

    comparison: Comparison
    blocks: list[MergingBlock]

    def write(self, plain: Path, target: Path, weights: SharedWeights) -> None:
        """Write a program that merges, from the plain program beside it.

        Args:
            plain: the `.onnx` file of the plain program.
            target: the `.onnx` file to write.
            weights: the file of weights of both.

        Raises:
            ToMeExportError: no product of the plain program has one of the weights of a projection.
        """
        model = onnx.load(str(plain), load_external_data=False)
        leave_out_keys(model, find_projections(model, self.blocks))
        weights.write(model, target)


@on_cpu()
def prepare_edits(
    traceable: Traceable, dims: Mapping[str, int], merging: Iterable[DenoiserMerging]
) -> dict[DenoiserMerging, Edit]:
    """The edits of a denoiser's plain program by the way to merge; it runs so in eager mode, and then is plain.

    Args:
        traceable: the denoiser.
        dims: values of all named dimensions except the batch.
    """
    denoiser, edits = traceable.layer, {}
    assert isinstance(denoiser, Denoiser)
    for way in merging:
        merge_by(denoiser, *way.configs)
        comparison = Comparison(traceable, dims)
        edits[way] = Edit(comparison, merging_blocks(denoiser))
    merge_by(denoiser, None, None)
    return edits


def merging_blocks(denoiser: Denoiser) -> list[MergingBlock]:
    """The blocks of a layer that merge, in the order of their placements, after a pass in eager mode."""
    found = []
    for name, model in (("controlnet", denoiser.controlnet), ("unet", denoiser.unet)):
        if model is None:
            continue
        grids = last_grids(model)
        for block, placement in attached_placements(model):
            grid = grids[block.index]
            kept = placement.count_kept(grid)
            if kept == grid.tokens:
                continue
            projections = block.family.attention.image
            layers = [
                getattr(layer, part) for layer in block.sublayers["attn"] for part in (projections.k, projections.v)
            ]
            table = placement.config.constants(grid, kept, block.index)
            plain = plain_steps_of(block.family.is_flow) if placement.config.has_plain_steps else None
            weights = tuple(tuple(weight.name for weight in layer.parameters()) for layer in layers)
            found.append(MergingBlock(f"{name}.{block.path}", weights, KeysByTable(table, grid.tokens, plain)))
    return found


def find_projections(model: onnx.ModelProto, blocks: Iterable[MergingBlock]) -> list[BlockKeys]:
    """The blocks with the products of a program that their keys and values begin with.

    Raises:
        ToMeExportError: no product has one of the weights of a projection.
    """
    graph = Graph(model)
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    found = []
    for block in blocks:
        projections: list[str] = []
        for weights in block.weights:
            own = [node for node in products if node.input[1] in weights]
            if not own:
                raise ToMeExportError(
                    f"{block.name}: no product of the ONNX program has a weight of its projections ({weights[0]}), so "
                    "its keys cannot be left out: export it with --format paddle."
                )
            # Products with different inputs are of what the first products compute, as in a LoRA
            tokens = graph.before_casts(own[0].input[0])
            projections += [node.output[0] for node in own if graph.before_casts(node.input[0]) == tokens]
        found.append(BlockKeys(block.name, tuple(projections), block.keys))
    return found
