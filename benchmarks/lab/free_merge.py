"""The free-merge limit: attention over as few tokens as merging keeps, at almost no cost. Its output is wrong.

Tokens are cut by a slice and restored by repetition, without matching and gathers. Choosing and moving tokens at no
cost takes about as long, so what ours costs is its time over this limit. A measured time below it is noise.
"""

from typing import Any

import paddle
from paddle import nn

from ppdiffusers_tome.attach.attach import detach
from ppdiffusers_tome.attach.forward import Wrap, install
from ppdiffusers_tome.attach.placement import placements
from ppdiffusers_tome.config import ToMeConfig
from ppdiffusers_tome.grid import Grid


class CutWrap(Wrap):
    """A wrap whose layer gets the first `kept` tokens. The output is repeated up to `tokens` unless that is None."""

    def __init__(self, kept: int, tokens: int | None) -> None:
        self._kept, self._tokens = kept, tokens

    def __call__(self, layer: nn.Layer, hidden_states: paddle.Tensor, *args: Any, **kwargs: Any) -> paddle.Tensor:
        output = self.forward(layer, hidden_states[:, : self._kept], *args, **kwargs)
        if self._tokens is None:
            return output
        repeats, rest = divmod(self._tokens, self._kept)
        return paddle.concat([output] * repeats + ([output[:, :rest]] if rest else []), axis=1)


def attach_free_merge(denoiser: nn.Layer, config: ToMeConfig, latent: Grid) -> None:
    """Cut as many tokens as `attach` would merge, at the same layers; replaces merging. `detach` removes it.

    Args:
        denoiser: a UNet whose attention is called by position.
        config: where and how many.
        latent: height and width of the latents; the denoiser must not be called with others.
    """
    placed = placements(denoiser, config)
    detach(denoiser)
    for block, placement in placed:
        tokens, queries, keys = placement.kept(block.grid(latent), False)
        for name in placement.layers:
            for layer in block.sublayers[name]:
                keys_only = name == "attn" and not placement.merges_queries
                if name == "attn" and (keys_only or keys < queries):
                    for projection in (layer.to_k, layer.to_v):
                        install(projection, CutWrap(keys, None))
                if not keys_only:
                    install(layer, CutWrap(queries, tokens))
