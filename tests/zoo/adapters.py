"""Adapters of the projections of self-attention, as libraries for fine-tuning add them."""

import paddle
from paddle import nn
from ppdiffusers.models.lora import LoRALinearLayer

from ppdiffusers_tome.families.blocks import find_blocks


class Adapted(nn.Layer):
    """A projection with an adapter around it, as PEFT makes them: another layer in its place, without a weight."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.weight.shape[0], 2), nn.Linear(2, base.weight.shape[1])

    def forward(self, x, *args):
        return self.base_layer(x, *args) + self.up(self.down(x))


def with_lora(projection):
    """Add LoRA as ppdiffusers does: as a part of the same layer."""
    lora = LoRALinearLayer(*projection.weight.shape, rank=2)
    lora.up.weight.set_value(0.1 * paddle.randn(lora.up.weight.shape))
    projection.set_lora_layer(lora)
    return projection


def adapt(unet, adapter):
    """Give an adapter to each projection of self-attention."""
    paddle.seed(3)
    for mergeable in find_blocks(unet):
        for name in ("to_q", "to_k", "to_v"):
            attention = mergeable.layer.attn1
            setattr(attention, name, adapter(getattr(attention, name)))
