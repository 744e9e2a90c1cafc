"""The architectures that `bench` builds are the published ones."""

import math

import paddle
import pytest
from lab.speed.architectures import ARCHITECTURES

from ppdiffusers_tome.families.blocks import find_blocks

# Parameters of the published UNets: model cards and `sum(p.numel())` in diffusers.
PARAMETERS = {"sd15": 859_520_964, "sdxl": 2_567_463_684}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_published(name):
    with paddle.LazyGuard():  # shapes without memory
        unet = ARCHITECTURES[name].build()
    assert sum(math.prod(parameter.shape) for parameter in unet.parameters()) == PARAMETERS[name]
    assert min(block.level for block in find_blocks(unet)) == ARCHITECTURES[name].first_level
