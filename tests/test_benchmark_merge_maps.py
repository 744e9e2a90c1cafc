"""Merge maps: groups checked against the oracle and shown in their place; recording changes and leaves nothing."""

import numpy as np
import paddle
import pytest
import reference
from conftest import draw, make_unet, run, traces
from merge_maps import RecordedPlan, draw_merge_map, record_plans, write_merge_map
from PIL import Image

from ppdiffusers_tome.errors import ToMeConfigError
from ppdiffusers_tome.matching import match_tokens
from ppdiffusers_tome.positions import Grid

GRID = Grid(6, 10)


def record(removed=22, batch=3):
    """Tokens, and what a block that merges them would leave."""
    tokens = np.random.RandomState(0).standard_normal((batch, GRID.tokens, 7)).astype("float32")
    plan = match_tokens(paddle.to_tensor(tokens), GRID, removed)
    return tokens, RecordedPlan("unet", "block", 1, 0, GRID, plan)


def same_partition(a, b):
    """Whether two labellings put the same tokens together."""
    pairs = set(zip(a.reshape(-1).tolist(), b.reshape(-1).tolist(), strict=True))
    return len(pairs) == len({x for x, _ in pairs}) == len({y for _, y in pairs})


@pytest.mark.parametrize("removed", [1, 22, 45])
def test_groups_and_dst_are_those_of_the_oracle(removed):
    tokens, recorded = record(removed)
    _, expected = reference.roundtrip(tokens, *GRID, 2, 2, removed)
    assert recorded.groups().shape == recorded.dst().shape == (3, *GRID)
    for image, (groups, dst) in enumerate(zip(recorded.groups(), recorded.dst(), strict=True)):
        assert same_partition(groups, expected[image])
        assert sorted(set(groups.reshape(-1).tolist())) == list(range(GRID.tokens - removed)), "each label occurs"
        assert np.flatnonzero(dst).tolist() == reference.dst_positions(*GRID, 2, 2)
        shared = np.bincount(groups.reshape(-1))[groups] > 1
        for group in set(groups[shared].tolist()):
            assert dst[groups == group].sum() == 1, "a group of several tokens has one dst"
    assert not same_partition(recorded.groups()[0], expected[1]), "each image has its own groups"


def test_recording_notes_every_block_and_step_and_leaves_nothing():
    unet = make_unet()
    unet.apply_tome(ratio=0.5, max_downsample=2)
    merged, before = run(unet), traces(unet)
    with record_plans(unet) as recorded:
        assert np.array_equal(run(unet), merged), "recording changes nothing"
        run(unet, h=12)
    assert traces(unet) == before
    blocks = {block.path: block for block in unet.tome_summary(height=16, width=16).blocks}
    assert [plan.step for plan in recorded] == [0] * len(blocks) + [1] * len(blocks)
    for step in (0, 1):
        assert sorted(plan.path for plan in recorded if plan.step == step) == sorted(blocks)
    for plan in recorded[: len(blocks)]:
        block = blocks[plan.path]
        assert (plan.level, plan.grid, plan.plan.kept) == (block.level, block.grid, block.kept)
        assert len(np.unique(plan.groups()[1])) == block.kept
    assert {plan.grid for plan in recorded if plan.step == 1} == {Grid(12, 16), Grid(6, 8)}
    run(unet)
    assert len(recorded) == 2 * len(blocks), "nothing is recorded afterwards"


def test_recording_needs_merging_and_ends_with_an_exception_too(tmp_path):
    for unet in (make_unet(), make_unet().apply_tome(ratio=0)):
        with pytest.raises(ToMeConfigError, match="merges nothing: apply_tome"), record_plans(unet):
            pass
    unet = make_unet().apply_tome(ratio=0.5)
    before = traces(unet)
    with pytest.raises(ZeroDivisionError), record_plans(unet):
        run(unet)
        _ = 1 / 0
    with pytest.raises(ToMeConfigError, match="no block merged anything"):
        write_merge_map(unet, lambda: np.zeros((8, 8, 3), np.uint8), tmp_path / "map.png")
    assert traces(unet) == before and not list(tmp_path.iterdir())


def test_a_map_fills_groups_with_their_mean_and_leaves_the_others():
    image = np.zeros((4, 4, 3), np.uint8)
    image[:, :2], image[:, 2:] = (200, 100, 0), (0, 100, 50)
    groups = np.arange(16).reshape(4, 4)
    groups[0, 3] = groups[0, 0]  # one group: tokens 0 and 3, far apart
    dst = np.zeros((4, 4), bool)
    dst[0, 0] = dst[2, 2] = True
    cell = 16
    bare = np.array(Image.fromarray(image).resize((64, 64), Image.Resampling.BICUBIC))
    drawn = draw_merge_map(image, groups, dst, size=64)
    assert drawn.shape == (64, 64, 3) and drawn.dtype == np.uint8
    np.testing.assert_array_equal(drawn[cell:], bare[cell:])  # alone, one of them a dst: untouched
    np.testing.assert_array_equal(drawn[:cell, cell : 3 * cell], bare[:cell, cell : 3 * cell])
    first, last = drawn[:cell, :cell], drawn[:cell, 3 * cell :]
    np.testing.assert_array_equal(first[4, 4], last[4, 4])
    np.testing.assert_allclose(first[4, 4], [100, 100, 25], atol=3)
    np.testing.assert_array_equal(first[0, 0], last[-1, -1])  # one outline colour
    assert np.abs(first[0, 0].astype(int) - first[4, 4]).max() > 40, "the outline is visible"
    assert not np.array_equal(first[8, 8], last[8, 8]), "the dot marks dst alone"


def test_merge_map_of_an_image_generated_with_guidance(pipe, tmp_path):
    def generate_one():
        return np.rint(draw(pipe, size=32, steps=3) * 255).astype(np.uint8)

    with pipe.tome(ratio=0.5):
        path, caption = write_merge_map(pipe, generate_one, tmp_path / "merge_map.png", size=64, prompt="fox")
        with record_plans(pipe) as recorded:
            image = generate_one()
    assert "this is the conditional one" in caption and {len(plan.groups()) for plan in recorded} == {2}
    with Image.open(path) as sheet:
        assert sheet.text["prompt"] == "fox"
        sheet = np.asarray(sheet)
    # Of the last block, because the first sees equal tokens in both passes: the prompt has not changed them yet.
    last = [plan for plan in recorded if plan.path == recorded[-1].path]
    assert not np.array_equal(*last[1].groups())
    maps = [draw_merge_map(image, plan.groups()[1], plan.dst()[1], size=64) for plan in last]
    larger = np.array(Image.fromarray(image).resize((64, 64), Image.Resampling.BICUBIC))
    step, rows = 64 + 4, len({plan.path for plan in recorded})
    assert len(maps) == 3 and len(sheet) > 24 + rows * step, "a row for each block"
    row = sheet[len(sheet) - step :, sheet.shape[1] - 4 * step :]
    for column, expected in enumerate([larger, *maps]):
        np.testing.assert_array_equal(row[:64, column * step : column * step + 64], expected)
