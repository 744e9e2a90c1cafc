"""`Placement`: what merges in a block. Wraps, summary, MACs and benchmarks all read it."""

from dataclasses import dataclass

from paddle import nn

from ..config import LAYERS, ToMeConfig
from ..families.models import MergeableBlock, find_blocks
from ..families.table import Block, Family
from ..grid import Grid
from ..methods import METHODS
from ..methods.method import Form, Kept, Method


@dataclass(frozen=True)
class Placement:
    """How a config merges in one block.

    It contains no layers, so that copies of a model, or of one of its blocks, can share it.
    """

    config: ToMeConfig
    family: Family  # of the transformer around the block
    facts: Block  # of the class of the block
    index: int  # of the block in its denoiser
    layers: tuple[str, ...]  # of LAYERS: those around which tokens merge
    ratio: float  # of this block, by the method; the config's is the mean over the blocks that merge

    @property
    def method(self) -> Method:
        """The method of the config."""
        return METHODS[self.config.method]

    @property
    def merges_block(self) -> bool:
        """Whether tokens merge once, before the attention and the MLP of a single-stream block."""
        return self.facts.single_stream is not None and self.config.merge_attn and self.method.merges_queries

    @property
    def merges_queries(self) -> bool:
        """Whether the queries of self-attention merge; otherwise each token has its own query and output."""
        return self.method.merges_queries

    @property
    def takes_turns(self) -> bool:
        """Whether other timesteps choose other tokens."""
        return self.method.takes_turns(self.config)

    def form(self, grid: Grid, use_gpu_form: bool) -> Form:
        """The method, in the form that merges on this grid."""
        return self.method.for_gpu(grid, self.config) if use_gpu_form else self.method

    def kept(self, grid: Grid, use_gpu_form: bool) -> Kept:
        """How many tokens of a grid, or of each frame of a video, remain; all of them where nothing merges."""
        return tokens_kept(self.config, grid, use_gpu_form, self.merges_block, self.ratio)


def tokens_kept(
    config: ToMeConfig,
    grid: Grid,
    use_gpu_form: bool = False,
    merges_block: bool = False,
    ratio: float | None = None,
) -> Kept:
    """How many tokens of a grid remain in a block with self-attention.

    Args:
        config: the settings.
        grid: tokens along each axis.
        use_gpu_form: whether tokens merge in the form that suits a GPU.
        merges_block: as in `Placement`.
        ratio: of the block; None: the config's.
    """
    ratio = config.ratio if ratio is None else ratio
    if not ratio or grid.tokens < config.min_tokens:
        return Kept(grid.tokens, grid.tokens, grid.tokens)
    method = METHODS[config.method]
    is_uniform = merges_block or not config.merge_attn  # no keys and values merge more than queries
    kept = method.kept(grid, config, (ratio, ratio) if is_uniform else method.ratios(config, ratio))
    form = method.for_gpu(grid, config) if use_gpu_form else method
    return form.rounded(kept, grid, config)


def placements(denoiser: nn.Layer, config: ToMeConfig) -> list[tuple[MergeableBlock, Placement]]:
    """The blocks of a denoiser in which a config merges; without max_downsample those at the shallowest level."""
    merging = []
    for block in find_blocks(denoiser):
        layers = tuple(name for name in LAYERS if getattr(config, f"merge_{name}") and name in block.sublayers)
        if layers:
            merging.append((block, layers))
    deepest: int = config.max_downsample or min((block.level for block, _ in merging), default=1)
    merging = [(block, layers) for block, layers in merging if block.level <= deepest]
    up = [number for number, (block, _) in enumerate(merging) if block.path.startswith("up_blocks.")]
    ratios = METHODS[config.method].ratio_of_blocks(config, len(merging), up[-1] if up else None)
    return [
        (block, Placement(config, block.family, block.facts, block.index, layers, ratio))
        for (block, layers), ratio in zip(merging, ratios, strict=True)
    ]
