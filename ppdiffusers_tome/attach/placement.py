"""`Placement`: what merges in a block. Wraps, summary, MACs and benchmarks all read it."""

from collections.abc import Sequence
from dataclasses import dataclass

from paddle import nn

from ..errors import ToMeConfigError
from ..families.blocks import MergeableBlock, find_blocks
from ..families.stream import Text
from ..grid import Grid
from ..methods import DEFAULT_METHOD, ToMeConfig


@dataclass(frozen=True)
class Placement:
    """How a config merges in one block.

    It contains no layers, so that copies of a model, or of a block, can share it.
    """

    config: ToMeConfig
    layers: tuple[str, ...]  # the layers of the config that the block has
    share: float  # of the tokens that this block keeps, by the method; the mean over all blocks is 1 - ratio

    @property
    def takes_turns(self) -> bool:
        """Whether different timesteps choose different tokens."""
        return self.config.takes_turns

    def count_kept(self, grid: Grid) -> int:
        """How many tokens of a grid, or of each frame of a video, remain in a step that merges.

        All of them remain where nothing merges.
        """
        if self.share == 1 or grid.tokens < self.config.min_tokens:
            return grid.tokens
        return self.config.count_kept(grid, self.share)


def placements(
    denoiser: nn.Layer, config: ToMeConfig, blocks: Sequence[MergeableBlock] | None = None
) -> list[tuple[MergeableBlock, Placement]]:
    """The blocks of a denoiser in which a config merges; without max_downsample those at the shallowest level.

    Args:
        denoiser: the model.
        config: the config.
        blocks: all mergeable blocks of the model, if they are known.

    Raises:
        ToMeConfigError: its method merges queries, and the denoiser has no block in which that is possible; or the
            table of families describes a block in a way that no wrap knows.
    """
    blocks = find_blocks(denoiser) if blocks is None else blocks
    if config.merges_queries and blocks and not any(block.merges_queries for block in blocks):
        raise ToMeConfigError(
            f"method={config.method!r} is not allowed in {type(denoiser).__name__}: it merges in the transformer "
            f'blocks of UNets and of their ControlNets, as tomesd does. Pass method="{DEFAULT_METHOD}".'
        )
    merging = []
    for block in blocks:
        layers = tuple(name for name in config.layers if name in block.sublayers)
        if layers and (block.merges_queries or not config.merges_queries):
            merging.append((block, layers))
    deepest: int = config.max_downsample or min((block.level for block, _ in merging), default=1)
    merging = [(block, layers) for block, layers in merging if block.level <= deepest]
    if not config.merges_queries:
        for block, _ in merging:
            _check_spec(block)
    up = [number for number, (block, _) in enumerate(merging) if block.path.startswith("up_blocks.")]
    shares = config.kept_shares(len(merging), up[-1] if up else None)
    return [(block, Placement(config, layers, share)) for (block, layers), share in zip(merging, shares, strict=True)]


def _check_spec(block: MergeableBlock) -> None:
    """Raise ToMeConfigError if no wrap knows how to leave out keys in a block as the table describes it."""
    spec, family = block.spec, block.family
    name = type(block.layer).__name__
    if spec.gets_text is not None and (not spec.gets_text.is_in_sequence or family.has_frames):
        raise ToMeConfigError(
            f"gets_text={spec.gets_text} of {name} is not known: an input with text must be FIRST or LAST, and of "
            f"images. Correct the entry {family.name!r} in families.table."
        )
    if spec.text is not None and family.only_processor is None:
        raise ToMeConfigError(
            f"text={spec.text} of {name} shares a softmax with the image, whose keys then need a constant that only "
            f"attention computed here adds: name its processor in only_processor of the entry {family.name!r} in "
            "families.table."
        )
    if spec.text is Text.SHARED_PROJECTIONS and family.positions is None:
        raise ToMeConfigError(
            f"text={spec.text} of {name} is only known for attention with rotary positions: elsewhere text and image "
            f"must be one sequence, or have projections of their own. Correct the entry {family.name!r} in "
            "families.table."
        )
    projections = family.attention.image
    for layer in block.sublayers["attn"]:
        missing = [name for name in (projections.k, projections.v) if getattr(layer, name, None) is None]
        if missing:
            raise ToMeConfigError(
                f"{type(layer).__name__} in {block.path} has no {' and no '.join(missing)}: keys and values can be "
                "left out where each has a projection of its own, so undo their fusion before apply_tome()."
            )
