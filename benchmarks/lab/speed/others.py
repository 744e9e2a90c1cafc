"""What `bench` compares this package with.

- `built-in`: the apply_tome that ppdiffusers ships. It must equal ours with tomesd's method.
- `limit`, the free-merge limit: as few tokens as merging leaves, at almost no cost (free_merge.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paddle import nn
from ppdiffusers.patches import tomesd_patch_utils as builtin

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.attach.placement import placements, tokens_kept
from ppdiffusers_tome.families.models import find_blocks
from ppdiffusers_tome.grid import Grid
from ppdiffusers_tome.methods import METHODS

from ..arm import BUILT_IN, LIMIT
from ..free_merge import attach_free_merge
from .cases import Case


def built_in_arguments(denoiser: nn.Layer, config: ToMeConfig) -> dict[str, Any]:
    """Arguments of the built-in ToMe, to merge at the levels that the other arms merge at."""
    names = ("ratio", "sx", "sy", "use_rand", "merge_attn", "merge_crossattn", "merge_mlp")
    deepest = max(block.level for block, _ in placements(denoiser, config))
    return {**{name: getattr(config, name) for name in names}, "max_downsample": deepest}


def attach_built_in(denoiser: nn.Layer, config: ToMeConfig, latent: Grid) -> None:
    """What ppdiffusers' apply_tome does, which this package replaces."""
    denoiser._tome_info = {"size": None, "hooks": [], "args": built_in_arguments(denoiser, config)}
    for block in find_blocks(denoiser):
        block.block.__class__ = builtin.make_tome_block(type(block.block))
        block.block._tome_info = denoiser._tome_info
    builtin.hook_tome_model(denoiser)


def built_in_configs(configs: Sequence[ToMeConfig]) -> list[ToMeConfig]:
    """By the built-in ToMe's method, which is tomesd's, at the ratios that it allows."""
    configs = [replace(config, method="tomesd", min_tokens=0, **METHODS["tomesd"].fixed) for config in configs]
    return [config for config in configs if config.ratio < 0.75]


def limit_configs(case: Case, configs: Sequence[ToMeConfig]) -> list[ToMeConfig]:
    """One config for each number of tokens that the configs leave, at each level and from the same layers."""
    limits: dict[Any, ToMeConfig] = {}
    for config in configs:
        kept = tokens_kept(config, case.architecture.first_grid(case.size))
        layers = config.merge_attn, config.merge_crossattn, config.merge_mlp
        place = METHODS[config.method].merges_queries, config.max_downsample, *layers
        limits.setdefault((kept, *place), replace(config, window=None, proportional=False))
    return list(limits.values())


# What changes a denoiser for latents of a grid, by what merges; the others are merged by this package.
ATTACHERS: dict[str, Callable[[nn.Layer, ToMeConfig, Grid], None]] = {
    BUILT_IN: attach_built_in,
    LIMIT: attach_free_merge,
}
