"""The apply_tome that ppdiffusers ships: what it computes must equal ours with tomesd's method."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paddle import nn
from ppdiffusers.patches import tomesd_patch_utils as builtin

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.attach.placement import placements
from ppdiffusers_tome.families.blocks import find_blocks


def built_in_arguments(denoiser: nn.Layer, config: ToMeConfig) -> dict[str, Any]:
    """Arguments of the built-in ToMe, to merge at the levels that the other arms merge at."""
    names = ("sx", "sy", "use_rand", "merge_attn", "merge_crossattn", "merge_mlp")
    deepest = max(block.level for block, _ in placements(denoiser, config))
    own = {name: getattr(config, name) for name in names}
    return {**own, "ratio": config.effective_ratio, "max_downsample": deepest}


def attach_built_in(denoiser: nn.Layer, config: ToMeConfig) -> None:
    """What ppdiffusers' apply_tome does, which this package replaces."""
    denoiser._tome_info = {"size": None, "hooks": [], "args": built_in_arguments(denoiser, config)}
    for block in find_blocks(denoiser):
        block.layer.__class__ = builtin.make_tome_block(type(block.layer))
        block.layer._tome_info = denoiser._tome_info
    builtin.hook_tome_model(denoiser)


def built_in_configs(configs: Sequence[ToMeConfig]) -> list[ToMeConfig]:
    """Those by tomesd's method, at the ratios that the built-in ToMe allows.

    With fixed dst, because its random ones are others than ours.
    """
    of_tomesd = [config for config in configs if config.method == "tomesd" and config.effective_ratio < 0.75]
    return [replace(config, use_rand=False, min_tokens=0) for config in of_tomesd]
