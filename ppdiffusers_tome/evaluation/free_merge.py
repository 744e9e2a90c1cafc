"""The free-merge limit: attention over as few tokens as merging leaves, at almost no cost. What it draws is wrong.

Token counts are cut by a slice and filled up by repetition: no matching, no gathers. No way of choosing and moving
tokens can be faster, so the distance from this limit is what our own choosing and moving costs.
"""

import paddle
from paddle import nn

from ..config import ToMeConfig
from ..hooks import ToMeHook
from ..models import block_grid
from ..patch import chosen_blocks, detach, merging_layers
from ..positions import Grid, count_removed


class CutHook(ToMeHook):
    """Pre-hook: the layer sees the first `kept` tokens."""

    def __init__(self, kept: int) -> None:
        self._kept = kept

    def __call__(self, layer: nn.Layer, inputs: tuple) -> tuple:
        return inputs[0][:, : self._kept], *inputs[1:]


class RepeatHook(ToMeHook):
    """Post-hook: repeat the layer's output [B, kept, C] until there are `tokens` again."""

    def __init__(self, kept: int, tokens: int) -> None:
        self._kept = kept
        self._tokens = tokens

    def __call__(self, layer: nn.Layer, inputs: tuple, output: paddle.Tensor) -> paddle.Tensor:
        repeats, rest = divmod(self._tokens, self._kept)
        return paddle.concat([output] * repeats + ([output[:, :rest]] if rest else []), axis=1)


def attach_free_merge(denoiser: nn.Layer, config: ToMeConfig, latent: Grid) -> None:
    """Cut tokens where `attach` would merge them, and as many; replaces what was there. `detach` takes it off.

    Args:
        denoiser: a UNet whose attention is called by position.
        config: says where and how many.
        latent: height and width of the latents that it will be called with, and with no others.
    """
    blocks = chosen_blocks(denoiser, config)
    detach(denoiser)
    for found in blocks:
        grid = block_grid(found, latent)
        kept = grid.tokens - count_removed(grid, config)
        for layers in merging_layers(found, config).values():
            for layer in layers:
                layer.register_forward_pre_hook(CutHook(kept))
                layer.register_forward_post_hook(RepeatHook(kept, grid.tokens))
