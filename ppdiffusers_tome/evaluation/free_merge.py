"""The free-merge limit: attention over as few tokens as merging keeps, at almost no cost. Its output is wrong.

Tokens are cut by a slice and restored by repetition, without matching and gathers. Choosing and moving tokens at no
cost takes about as long, so what ours costs is its time over this limit. A measured time below it is noise.
"""

import paddle
from paddle import nn

from ..config import KV, ToMeConfig
from ..hooks import ToMeHook
from ..models import block_grid
from ..patch import chosen_blocks, detach, merging_layers
from ..positions import Grid, count_removed


class CutHook(ToMeHook):
    """Pre-hook: the layer gets the first `kept` tokens."""

    def __init__(self, kept: int) -> None:
        self._kept = kept

    def __call__(self, layer: nn.Layer, inputs: tuple) -> tuple:
        return inputs[0][:, : self._kept], *inputs[1:]


class RepeatHook(ToMeHook):
    """Post-hook: repeats the layer's output [B, kept, C] up to [B, tokens, C]."""

    def __init__(self, kept: int, tokens: int) -> None:
        self._kept = kept
        self._tokens = tokens

    def __call__(self, layer: nn.Layer, inputs: tuple, output: paddle.Tensor) -> paddle.Tensor:
        repeats, rest = divmod(self._tokens, self._kept)
        return paddle.concat([output] * repeats + ([output[:, :rest]] if rest else []), axis=1)


def attach_free_merge(denoiser: nn.Layer, config: ToMeConfig, latent: Grid) -> None:
    """Cut as many tokens as `attach` would merge, at the same layers; replaces merging. `detach` removes it.

    Args:
        denoiser: a UNet whose attention is called by position.
        config: where and how many.
        latent: height and width of the latents; the denoiser must not be called with others.
    """
    blocks = chosen_blocks(denoiser, config)
    detach(denoiser)
    for block in blocks:
        grid = block_grid(block, latent)
        kept = grid.tokens - count_removed(grid, config)
        for name, layers in merging_layers(block, config).items():
            for layer in layers:
                if name == "attn" and config.merge_attn == KV:
                    for projection in (layer.to_k, layer.to_v):
                        projection.register_forward_pre_hook(CutHook(kept))
                    continue
                layer.register_forward_pre_hook(CutHook(kept))
                layer.register_forward_post_hook(RepeatHook(kept, grid.tokens))
