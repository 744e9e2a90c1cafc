"""What is found in a model: its denoisers, their blocks with levels, and the grid of a feature map."""

import sys

import paddle
import pytest
from conftest import THREE_LEVELS, make_unet
from ppdiffusers import StableDiffusionControlNetPipeline
from ppdiffusers.models.attention import BasicTransformerBlock

from ppdiffusers_tome import Grid, ToMePassError
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.families.grids import token_grid
from ppdiffusers_tome.families.pipelines import denoisers


def test_blocks_have_index_level_and_path():
    blocks = find_blocks(make_unet(**THREE_LEVELS))
    assert [(block.index, block.level) for block in blocks] == list(enumerate([2, 4, 4, 4, 2, 2, 4]))
    assert blocks[0].path == "down_blocks.1.attentions.0.transformer_blocks.0"
    assert all(isinstance(block.layer, BasicTransformerBlock) for block in blocks)
    assert list(blocks[0].sublayers) == ["attn", "crossattn", "mlp"]


def test_denoisers_of_pipelines_and_models(pipe, controlnet):
    assert denoisers(pipe) == {"unet": pipe.unet}
    assert denoisers(pipe.unet) == {"UNet2DConditionModel": pipe.unet}
    assert denoisers(pipe.vae) == {} and denoisers(pipe.text_encoder) == {}
    wrapper = paddle.nn.LayerList([pipe.unet, controlnet])
    assert denoisers(wrapper) == {"LayerList.0": pipe.unet, "LayerList.1": controlnet}


@pytest.fixture
def searches(monkeypatch):
    """The models in which `find_blocks` looks for blocks, whichever module calls it."""
    searched = []

    def find(denoiser):
        searched.append(denoiser)
        return find_blocks(denoiser)

    modules = [module for name, module in sys.modules.items() if name.startswith("ppdiffusers_tome")]
    for module in modules:
        if vars(module).get("find_blocks") is find_blocks:
            monkeypatch.setattr(module, "find_blocks", find)
    return searched


@pytest.fixture
def walks(monkeypatch):
    """The layers whose sublayers are walked through; `sublayers` and `parameters` of Paddle walk too."""
    walked, named_sublayers = [], paddle.nn.Layer.named_sublayers

    def walk(layer, *args, **kwargs):
        walked.append(layer)
        return named_sublayers(layer, *args, **kwargs)

    monkeypatch.setattr(paddle.nn.Layer, "named_sublayers", walk)
    return walked


def count(layers, layer):
    return sum(counted is layer for counted in layers)


@pytest.mark.parametrize("has_controlnet", [False, True])
def test_blocks_of_a_model_are_looked_for_once(pipe, controlnet, has_controlnet, searches, walks):
    if has_controlnet:
        pipe = StableDiffusionControlNetPipeline(
            **pipe.components, controlnet=controlnet, requires_safety_checker=False
        )
    models = [pipe.unet, controlnet] if has_controlnet else [pipe.unet]
    for action, most_walks in (
        (pipe.apply_tome, 6),  # of weights in half precision, denoisers (2), blocks, programs, built-in merging
        (lambda: pipe.apply_tome(ratio=0.5), 6),
        (pipe.tome_summary, 4),  # denoisers (2), blocks, layers whose MACs count
    ):
        searches.clear()
        walks.clear()
        action()
        assert [count(searches, model) for model in models] == [1] * len(models) and len(searches) == len(models)
        assert all(count(walks, model) <= most_walks for model in models)


def test_token_grid_is_read_from_the_feature_map(unet):
    block = find_blocks(unet)[0]
    assert token_grid(block.family, block.grid_layer, paddle.zeros([2, 32, 5, 7])) == Grid(5, 7)
    with pytest.raises(ToMePassError, match=r"\[2, 35, 32\]"):
        token_grid(block.family, block.grid_layer, paddle.zeros([2, 35, 32]))


def test_token_grid_of_channels_last():
    block = find_blocks(make_unet(data_format="NHWC"))[0]
    assert token_grid(block.family, block.grid_layer, paddle.zeros([2, 5, 7, 32])) == Grid(5, 7)


def test_token_grid_of_patches_that_are_not_square(unet):
    family, patches = find_blocks(unet)[0].family, paddle.nn.Conv2D(4, 8, (2, 4), stride=(2, 4))
    assert token_grid(family, patches, paddle.zeros([2, 4, 12, 20])) == Grid(6, 5)
