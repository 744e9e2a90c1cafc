"""The scope `block` of benchmarks/speed.py: the first top-level transformer block of a UNet, on its own."""

import copy

import paddle
from paddle import nn
from ppdiffusers import Transformer2DModel

from ppdiffusers_tome.evaluation.speed.architectures import ARCHITECTURES, WITH_ATTENTION, Architecture
from ppdiffusers_tome.evaluation.speed.cases import Case
from ppdiffusers_tome.evaluation.speed.workloads import Workload, load_unet
from ppdiffusers_tome.inference.programs import Input, Traceable
from ppdiffusers_tome.models import find_blocks


def build_transformer(architecture: Architecture) -> nn.Layer:
    """The UNet's first transformer, with its first block only."""
    config, stage = architecture.config, list(architecture.config["down_block_types"]).index(WITH_ATTENTION)
    channels, heads = config["block_out_channels"][stage], config["attention_head_dim"]
    heads = heads if isinstance(heads, int) else heads[stage]
    names = ("cross_attention_dim", "norm_num_groups", "use_linear_projection", "upcast_attention")
    settings = {name: config[name] for name in names if name in config}
    return Transformer2DModel(heads, channels // heads, in_channels=channels, **settings)


class OneBlock(nn.Layer):
    """A transformer with one block, in the form of a UNet whose only level it is: [B, C, h, w] to the same."""

    def __init__(self, transformer: nn.Layer) -> None:
        super().__init__()
        stage = nn.Layer()
        transformer.transformer_blocks = nn.LayerList([transformer.transformer_blocks[0]])
        stage.attentions, stage.downsamplers = nn.LayerList([transformer]), None
        self.down_blocks = nn.LayerList([stage])

    @property
    def transformer(self) -> nn.Layer:
        """The transformer."""
        return self.down_blocks[0].attentions[0]

    def forward(self, sample: paddle.Tensor, encoder_hidden_states: paddle.Tensor) -> paddle.Tensor:
        """Calls the transformer as its UNet does."""
        return self.transformer(sample, encoder_hidden_states=encoder_hidden_states, return_dict=False)[0]


class BlockWorkload(Workload):
    """One pass of the first top-level transformer block, with the norm and projections around it."""

    def __init__(self, case: Case, model: OneBlock) -> None:
        width = model.transformer.transformer_blocks[0].attn2.to_k.weight.shape[0]
        sample = Input("sample", ("batch", model.transformer.in_channels, "latent_height", "latent_width"))
        text = Input("encoder_hidden_states", ("batch", "tokens", width))
        super().__init__(case, model, case.architecture.first_grid(case.size), (sample, text))

    @paddle.no_grad()
    def run(self, is_short: bool = False) -> paddle.Tensor:
        return self.denoiser(self.inputs["sample"], self.inputs["encoder_hidden_states"])

    def traceable(self) -> Traceable:
        return Traceable(copy.deepcopy(self.denoiser), self.specs)


def open_block(case: Case) -> Workload:
    """The first block of the case's UNet; of a published one, only the block is built."""
    if case.model in ARCHITECTURES:
        return BlockWorkload(case, OneBlock(build_transformer(case.architecture)))
    first = min(find_blocks(load_unet(case)), key=lambda block: block.level)
    return BlockWorkload(case, OneBlock(first.transformer))
