"""Attention masks: rejected over tokens that merge, unchanged everywhere else."""

from functools import partial

import numpy as np
import paddle
import pytest
from conftest import TEXT, inputs, make_unet, run
from ppdiffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_5,
    SlicedAttnProcessor,
    XFormersAttnProcessor,
)

from ppdiffusers_tome import ToMePassError
from ppdiffusers_tome.families.blocks import find_blocks

PROCESSORS = [AttnProcessor, AttnProcessor2_5, XFormersAttnProcessor, partial(SlicedAttnProcessor, 1)]


@pytest.fixture(params=PROCESSORS)
def unet(request):
    unet = make_unet()
    unet.set_attn_processor(request.param())
    return unet


@pytest.mark.parametrize(
    ("unet", "settings"),
    [*((one, {}) for one in PROCESSORS), (AttnProcessor, {"method": "todo"}), (AttnProcessor, {"method": "tomesd"})],
    indirect=["unet"],
)
def test_mask_over_merged_tokens_is_rejected(unet, settings):
    """Without merging masks reach ppdiffusers unchanged."""
    transformer, x, text = find_blocks(unet)[0].transformer, paddle.randn([2, 32, 16, 16]), paddle.randn([2, TEXT, 24])
    mask = paddle.to_tensor(np.arange(512).reshape(2, 256) % 3 > 0)

    @paddle.no_grad()
    def attend(**arguments):
        return transformer(x, encoder_hidden_states=text, **arguments).sample.numpy()

    plain, masked = attend(), attend(attention_mask=mask)
    assert np.abs(plain - masked).max() > 1e-4
    run(unet.apply_tome(**settings))  # a transformer that is called alone belongs to the last pass
    assert np.abs(attend() - plain).max() > 1e-4
    with pytest.raises(ToMePassError, match=r"attention_mask .*\[2, 1, 256\].*fewer"):
        attend(attention_mask=mask)
    run(unet.apply_tome(ratio=0))
    assert np.array_equal(attend(attention_mask=mask), masked)
    unet.remove_tome()
    assert np.array_equal(attend(attention_mask=mask), masked)


def test_mask_over_text_is_unchanged(unet):
    """Around cross-attention only the image tokens merge, not the text and its mask."""
    arguments = inputs()
    mask = paddle.to_tensor([[1] * TEXT, [1, 1, 1] + [0] * (TEXT - 3)])

    @paddle.no_grad()
    def attend():
        text = arguments["encoder_hidden_states"]
        return unet(arguments["sample"], 10, text, encoder_attention_mask=mask).sample.numpy()

    plain = attend()
    unet.apply_tome(method="tomesd", merge_crossattn=True)
    merged = attend()
    arguments["encoder_hidden_states"][1, 3:] = 5.0  # behind the mask
    assert np.abs(merged - plain).max() > 1e-4
    assert np.array_equal(attend(), merged)
