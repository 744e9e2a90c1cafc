"""Merge maps: the groups are the oracle's, drawn where they are; recording changes nothing and leaves nothing."""

from dataclasses import replace

import numpy as np
import paddle
import pytest
import reference
from conftest import draw, make_unet, run, traces
from PIL import Image
from test_transformers import draw as draw_latents
from zoo.transformers import sd3

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.evaluation.quality import merge_maps
from ppdiffusers_tome.evaluation.quality.merge_maps import draw_merge_map
from ppdiffusers_tome.evaluation.quality.recording import conditional_index, dst_tokens, groups, record_plans
from ppdiffusers_tome.matching import match_tokens
from ppdiffusers_tome.positions import Grid

GRID = Grid(6, 10)


def plan_of(removed=22, batch=3, seed=0):
    tokens = np.random.RandomState(seed).standard_normal((batch, GRID.tokens, 7)).astype("float32")
    return tokens, match_tokens(paddle.to_tensor(tokens), GRID, removed)


def same_partition(a, b):
    """Whether two labellings put the same tokens together."""
    pairs = set(zip(a.reshape(-1).tolist(), b.reshape(-1).tolist(), strict=True))
    return len(pairs) == len({x for x, _ in pairs}) == len({y for _, y in pairs})


@pytest.mark.parametrize("removed", [1, 22, 45])
def test_groups_are_the_oracles(removed):
    tokens, plan = plan_of(removed)
    _, expected = reference.roundtrip(tokens, *GRID, 2, 2, removed)
    for image in range(3):
        labels = groups(plan, GRID, image)
        assert labels.shape == GRID
        assert same_partition(labels, expected[image])
        assert sorted(set(labels.reshape(-1).tolist())) == list(range(GRID.tokens - removed)), (
            "every group, and no other"
        )
        assert np.bincount(labels.reshape(-1)).sum() == GRID.tokens
    assert not same_partition(groups(plan, GRID, 0), expected[1]), "the images' groups are their own"


def test_dst_are_the_oracles():
    _, plan = plan_of()
    found = dst_tokens(plan, GRID, 2)
    assert np.flatnonzero(found).tolist() == reference.dst_positions(*GRID, 2, 2)
    labels = groups(plan, GRID, 2)
    shared = np.bincount(labels.reshape(-1))[labels] > 1
    for label in set(labels[shared].tolist()):
        assert found[labels == label].sum() == 1, "a group of several tokens has one dst"


def test_wrong_grid_or_image_is_refused():
    _, plan = plan_of()
    for function in (groups, dst_tokens):
        with pytest.raises(ToMeConfigError, match=r"60 tokens .* no image 0 on a grid of 5×10"):
            function(plan, Grid(5, 10), 0)
        with pytest.raises(ToMeConfigError, match=r"batch of 3 has no image 3"):
            function(plan, GRID, 3)


def test_conditional_half_of_a_guided_batch_is_the_second():
    _, plan = plan_of(batch=4)
    assert [conditional_index(plan, 2, picture) for picture in (0, 1)] == [2, 3]
    assert [conditional_index(plan, 4, picture) for picture in (0, 3)] == [0, 3]
    for pictures, picture in ((3, 0), (2, 2), (2, -1)):
        with pytest.raises(ToMeConfigError, match=f"picture={picture} of pictures={pictures}"):
            conditional_index(plan, pictures, picture)


def test_recording_notes_every_block_and_step_and_leaves_nothing():
    unet = make_unet()
    unet.apply_tome(ratio=0.5, max_downsample=2)
    merged, before = run(unet), traces(unet)
    with record_plans(unet) as recorded:
        assert np.array_equal(run(unet), merged), "recording changes nothing"
        run(unet, h=12)
    assert traces(unet) == before
    summary = unet.tome_summary(height=16, width=16)
    paths = sorted(block.path for block in summary.blocks)
    for step in (0, 1):
        assert sorted(each.path for each in recorded if each.step == step) == paths
    assert [each.step for each in recorded] == [0] * len(summary.blocks) + [1] * len(summary.blocks)
    blocks = {block.path: block for block in summary.blocks}
    for each in recorded[: len(blocks)]:
        block = blocks[each.path]
        assert (each.level, each.grid, each.plan.kept) == (block.level, block.grid, block.kept)
        assert len(np.unique(groups(each.plan, each.grid, 1))) == block.kept
    assert {each.grid for each in recorded if each.step == 1} == {Grid(12, 16), Grid(6, 8)}
    run(unet)
    assert len(recorded) == 2 * len(summary.blocks), "nothing is noted afterwards"


def test_recording_knows_blocks_that_are_called_by_keyword():
    model = sd3()
    model.apply_tome(ratio=0.5)
    merged, before = draw_latents(sd3, model), traces(model)
    with record_plans(model) as recorded:
        assert np.array_equal(draw_latents(sd3, model), merged)
    assert traces(model) == before
    assert {each.path for each in recorded} == {block.path for block in model.tome_summary().blocks}
    assert {len(np.unique(groups(each.plan, each.grid))) for each in recorded} == {32}  # of 8×8


def test_a_strip_has_a_row_for_each_block_of_each_denoiser():
    model = make_unet()
    model.apply_tome(ratio=0.5)
    with record_plans(model) as recorded:
        run(model)
    picture = np.full((16, 16, 3), 200, np.uint8)
    one = merge_maps.merge_map_strip(picture, recorded, pictures=2, size=96)
    other = [replace(each, denoiser="controlnet") for each in recorded]
    two = merge_maps.merge_map_strip(picture, [*other, *recorded], pictures=2, size=96)
    saved = len(recorded) * (96 + 4) - (two.height - one.height)
    assert saved in (0, 16, 32, 48), "but for lines of the legend, which are longer on the wider sheet"


def test_recording_ends_with_an_exception_too():
    unet = make_unet()
    unet.apply_tome(ratio=0.5)
    before = traces(unet)
    with pytest.raises(ZeroDivisionError), record_plans(unet):
        run(unet)
        _ = 1 / 0
    assert traces(unet) == before


def test_recording_needs_merging():
    for unet in (make_unet(), make_unet().apply_tome(ratio=0)):
        with pytest.raises(ToMeConfigError, match="merges nothing: apply_tome"), record_plans(unet):
            pass


def test_a_map_fills_groups_with_their_mean_and_leaves_the_others():
    picture = np.zeros((4, 4, 3), np.uint8)
    picture[:, :2], picture[:, 2:] = (200, 100, 0), (0, 100, 50)
    labels = np.arange(16).reshape(4, 4)
    labels[0, 3] = labels[0, 0]  # one group: tokens 0 and 3, far apart
    dst = np.zeros((4, 4), bool)
    dst[0, 0] = dst[2, 2] = True
    cell = 16
    bare = np.array(Image.fromarray(picture).resize((64, 64), Image.Resampling.BICUBIC))
    drawn = draw_merge_map(picture, labels, dst, size=64)
    assert drawn.shape == (64, 64, 3) and drawn.dtype == np.uint8
    np.testing.assert_array_equal(drawn[cell:], bare[cell:])  # alone, one of them a dst: untouched
    np.testing.assert_array_equal(drawn[:cell, cell : 3 * cell], bare[:cell, cell : 3 * cell])
    left, right = drawn[:cell, :cell], drawn[:cell, 3 * cell :]
    np.testing.assert_array_equal(left[4, 4], right[4, 4])
    np.testing.assert_allclose(left[4, 4], [100, 100, 25], atol=3)
    np.testing.assert_array_equal(left[0, 0], right[-1, -1])  # one outline colour
    assert np.abs(left[0, 0].astype(int) - left[4, 4]).max() > 40, "the outline stands out"
    assert not np.array_equal(left[8, 8], right[8, 8]), "the dot marks dst alone"
    unmarked = draw_merge_map(picture, labels, size=64)
    np.testing.assert_array_equal(unmarked[:cell, :cell], right)


def test_groups_side_by_side_have_a_line_between_and_none_inside():
    picture = np.full((2, 4, 3), 128, np.uint8)
    labels = np.array([[0, 0, 1, 1], [0, 0, 1, 1]])
    drawn = draw_merge_map(picture, labels, size=64)  # 16 px a token, lines of 2 px
    assert drawn.shape == (32, 64, 3)
    line = (drawn != 128).any(axis=-1)
    inside = np.zeros_like(line)
    inside[2:-2, 2:30] = inside[2:-2, 34:-2] = True
    np.testing.assert_array_equal(line, ~inside)
    assert not np.array_equal(drawn[0, 0], drawn[0, -1])


def test_a_map_refuses_other_shapes():
    picture = np.zeros((4, 4, 3), np.uint8)
    with pytest.raises(ToMeConfigError, match=r"\[h, w\]"):
        draw_merge_map(picture, np.zeros(16, int))
    with pytest.raises(ToMeConfigError, match=r"dst of \[2, 4\]"):
        draw_merge_map(picture, np.zeros((4, 4), int), np.zeros((2, 4), bool))


def shows(sheet, picture, left):
    """Whether the picture stands on the sheet, its left edge there, at whatever height."""
    side = len(picture)
    columns = sheet[:, left:][:, :side]
    return any(np.array_equal(columns[y : y + side], picture) for y in range(len(sheet) - side + 1))


def test_a_guided_drawing_gives_a_map_and_a_strip(pipe, tmp_path):
    pictures = []

    def one():
        picture = draw(pipe, size=32, steps=3)
        pictures.append(np.rint(picture * 255).astype(np.uint8))
        return pictures[-1]

    with pipe.tome(ratio=0.5):
        paths = merge_maps.write_merge_maps(pipe, one, tmp_path, size=64, prompt="fox")
        with record_plans(pipe) as recorded:
            one()
        with pytest.raises(ToMeConfigError, match=r"steps=\[3\] were not recorded"):
            merge_maps.merge_map_strip(pictures[0], recorded, steps=[0, 3])
    assert [path.name for path in paths] == ["merge_map.png", "merge_map_steps.png"]
    first = recorded[0]
    with Image.open(paths[0]) as image, Image.open(paths[1]) as strip:
        assert image.text["prompt"] == strip.text["prompt"] == "fox"
        pair, rows = np.asarray(image), np.asarray(strip)
    middle = next(each for each in recorded if each.path == first.path and each.step == 1)
    expected = merge_maps.merge_map(pictures[0], middle, 1, size=64)
    assert shows(pair, expected, -68)
    small = merge_maps.merge_map(pictures[0], first, 1, size=32)
    side, blocks = len(small), len({each.path for each in recorded})
    left = rows.shape[1] - 3 * (side + 4)
    assert shows(rows, small, left)
    assert rows.shape[0] > 24 + blocks * (side + 4)
    with pytest.raises(ToMeConfigError, match="were not recorded"):
        merge_maps.merge_map_strip(pictures[0], [])
