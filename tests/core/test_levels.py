"""Levels derived from the layers of a model equal those of a forward pass; which level merges by default."""

import numpy as np
import paddle
import pytest
from conftest import THREE_LEVELS, make_unet, run

from ppdiffusers_tome import Grid, NoMergeableLayerError, tome_summary
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.families.grids import grid_at, level_of


def record_grids(model, layers, h, w):
    """The spatial size of each layer's input in a forward pass."""
    seen, hooks = {}, []
    for path, layer in layers:

        def record(layer, arguments, path=path):
            seen[path] = Grid(*arguments[0].shape[2:])

        hooks.append(layer.register_forward_pre_hook(record))
    run(model, h=h, w=w)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("changes", [{}, THREE_LEVELS], ids=["levels 1 and 2", "levels 2 and 4, as in SDXL"])
@pytest.mark.parametrize(("h", "w"), [(16, 24), (17, 19)])
def test_level_of_every_convolution(changes, h, w):
    unet = make_unet(**changes)
    convolutions = [(path, layer) for path, layer in unet.named_sublayers() if isinstance(layer, paddle.nn.Conv2D)]
    seen = record_grids(unet, convolutions, h, w)
    assert len(seen) > 20
    assert seen == {path: grid_at(Grid(h, w), level_of(unet, path)) for path in seen}


def test_attention_to_text_only_is_not_self_attention():
    """The shallow blocks of Stable Diffusion's upscaler attend to the text twice and never to the image."""
    unet = make_unet(only_cross_attention=(True, False))
    blocks = find_blocks(unet)
    assert [len(block.sublayers.get("attn", ())) for block in blocks] == [0, 1, 1, 1, 0, 0, 1]
    plain = run(unet)
    assert {block.level for block in tome_summary(unet.apply_tome()).blocks} == {2}
    assert np.abs(run(unet) - plain).max() > 1e-4
    summary = tome_summary(unet.apply_tome(method="tomesd", merge_crossattn=True))
    assert {block.level for block in summary.blocks} == {1}
    with pytest.raises(NoMergeableLayerError, match=r"at level 2 \(4\)"):
        unet.apply_tome(max_downsample=1)


def test_shallowest_level_with_attention_merges_by_default():
    unet = make_unet(**THREE_LEVELS)
    summary = tome_summary(unet.apply_tome())
    assert [block.level for block in summary.blocks] == [2, 2, 2]
    assert "its largest feature maps with attention are at level 2" in str(summary)
    assert np.array_equal(run(unet), run(unet.apply_tome(max_downsample=2)))
    assert "level" not in str(tome_summary(unet.apply_tome(max_downsample=2)).notes)
    assert "level" not in str(tome_summary(make_unet().apply_tome()).notes)
