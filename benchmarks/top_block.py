"""A transformer block of a UNet, on its own: what gpu_onnx.py counts the operators of, and sdxl_blocks.py times."""

import paddle
from lab.speed.architectures import WITH_ATTENTION, Architecture
from paddle import nn
from ppdiffusers import Transformer2DModel


def build_transformer(architecture: Architecture, stage: int | None = None) -> nn.Layer:
    """The transformer of a down block, by default of the first that has one, with one transformer block."""
    config = architecture.config
    if stage is None:
        stage = list(config["down_block_types"]).index(WITH_ATTENTION)
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
        self.time_proj = nn.Identity()
        self.down_blocks = nn.LayerList([stage])

    @property
    def transformer(self) -> nn.Layer:
        """The transformer."""
        return self.down_blocks[0].attentions[0]

    def forward(
        self, sample: paddle.Tensor, encoder_hidden_states: paddle.Tensor, timestep: paddle.Tensor
    ) -> paddle.Tensor:
        """Calls the transformer as its UNet does, with the timestep in the text: a program reads all its inputs."""
        text = encoder_hidden_states + self.time_proj(timestep)
        return self.transformer(sample, encoder_hidden_states=text, return_dict=False)[0]
