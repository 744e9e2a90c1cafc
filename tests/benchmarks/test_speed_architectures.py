"""The architectures that `bench` builds are the published ones."""

import json
import math

import paddle
import pytest
from conftest import EMOJI_SD
from lab.speed.architectures import ARCHITECTURES, architecture_of, read_architecture

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.grid import Grid

# Parameters of the published UNets: model cards and `sum(p.numel())` in diffusers.
PARAMETERS = {"sd15": 859_520_964, "sdxl": 2_567_463_684}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_published(name):
    with paddle.LazyGuard():  # shapes without memory
        unet = ARCHITECTURES[name].build()
    assert sum(math.prod(parameter.shape) for parameter in unet.parameters()) == PARAMETERS[name]
    assert min(block.level for block in find_blocks(unet)) == ARCHITECTURES[name].first_level


def test_grids():
    assert ARCHITECTURES["sd15"].first_grid(512) == Grid(64, 64)
    assert ARCHITECTURES["sdxl"].latent(1024) == Grid(128, 128)
    assert ARCHITECTURES["sdxl"].first_grid(1024) == Grid(64, 64)


def test_folder_is_read():
    bundled = architecture_of(str(EMOJI_SD))
    assert bundled.factor == 4 and bundled.first_grid(128) == Grid(32, 32)
    assert bundled.config["cross_attention_dim"] == 192 and bundled.text == 24


def test_folder_without_a_usable_unet_is_refused(tmp_path):
    with pytest.raises(ToMeConfigError, match=r"unet/config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text(json.dumps({"_class_name": "UNet3DConditionModel"}))
    with pytest.raises(ToMeConfigError, match="UNet3DConditionModel"):
        read_architecture(tmp_path)


def test_unet_without_attention_is_refused():
    plain = ARCHITECTURES["tiny"]
    plain = type(plain)("a UNet", {**plain.config, "down_block_types": ("DownBlock2D",)})
    with pytest.raises(ToMeConfigError, match="no CrossAttnDownBlock2D, only DownBlock2D"):
        _ = plain.first_level
