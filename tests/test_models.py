import paddle
import pytest
from conftest import THREE_LEVELS, make_unet
from paddle.static import InputSpec
from ppdiffusers.models.attention import BasicTransformerBlock

from ppdiffusers_tome import Grid, ToMeConfigError, ToMePassError
from ppdiffusers_tome.models import components, denoisers, find_blocks, token_grid


def test_blocks_have_index_level_and_path():
    blocks = find_blocks(make_unet(**THREE_LEVELS))
    assert [(block.index, block.level) for block in blocks] == list(enumerate([2, 4, 4, 4, 2, 2, 4]))
    assert blocks[0].path == "down_blocks.1.attentions.0.transformer_blocks.0"
    assert all(isinstance(block.block, BasicTransformerBlock) for block in blocks)
    assert list(blocks[0].sublayers) == ["attn", "crossattn", "mlp"]


def test_denoisers_of_pipelines_and_models(pipe, controlnet):
    assert denoisers(pipe) == {"unet": pipe.unet}
    assert denoisers(pipe.unet) == {"UNet2DConditionModel": pipe.unet}
    assert denoisers(pipe.vae) == {} and denoisers(pipe.text_encoder) == {}
    wrapper = paddle.nn.LayerList([pipe.unet, controlnet])
    assert denoisers(wrapper) == {"LayerList.0": pipe.unet, "LayerList.1": controlnet}


def test_components_of_other_objects_are_rejected():
    with pytest.raises(ToMeConfigError, match=r"not to 'str': pass pipe or pipe\.unet"):
        components("stable-diffusion")


def test_token_grid_is_read_from_the_feature_map(unet):
    transformer = find_blocks(unet)[0].grid_layer
    assert token_grid(transformer, paddle.zeros([2, 32, 5, 7])) == Grid(5, 7)
    with pytest.raises(ToMePassError, match=r"\[2, 35, 32\]"):
        token_grid(transformer, paddle.zeros([2, 35, 32]))


class ReadGrid(paddle.nn.Layer):
    """Height, width and tokens of the grid in a transformer's pre-hook."""

    def __init__(self, transformer):
        super().__init__()
        self.identity = paddle.nn.Identity()
        self.identity.register_forward_post_hook(lambda layer, inputs, x: self.read(token_grid(transformer, x)))

    def read(self, grid):
        assert grid.is_dynamic
        return paddle.stack([grid.h, grid.w, grid.tokens])

    def forward(self, x):
        return self.identity(x)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("known", [(None, None), (None, 7), (5, None)])
def test_program_reads_a_dynamic_grid_from_its_input(layout, known):
    last = layout == "NHWC"
    shape = [None, *known, 32] if last else [None, 32, *known]
    spec = [InputSpec(shape, "float32")]
    transformer = find_blocks(make_unet(data_format=layout))[0].grid_layer
    program = paddle.jit.to_static(ReadGrid(transformer), input_spec=spec, full_graph=True)
    for h, w in [(5, 7), (known[0] or 4, known[1] or 6)]:
        assert program(paddle.zeros([2, h, w, 32] if last else [2, 32, h, w])).tolist() == [h, w, h * w]


def test_token_grid_of_channels_last():
    transformer = find_blocks(make_unet(data_format="NHWC"))[0].grid_layer
    assert token_grid(transformer, paddle.zeros([2, 5, 7, 32])) == Grid(5, 7)
