"""The prototypes that benchmarks/experiments.py measures do what they say; measuring them takes hours."""

import experiments
import merge_prototypes as prototypes
import numpy as np
import paddle
import pytest
from conftest import groups, run, traces

from ppdiffusers_tome import apply_tome, matching, remove_tome
from ppdiffusers_tome.positions import Grid, constant_positions

GRID = Grid(8, 8)
COLUMN = np.arange(GRID.tokens) % GRID.w
ROW = np.arange(GRID.tokens) // GRID.w


def merged(unet, prototype, *seeds, **settings):
    """The UNet's outputs for each seed, within one call of a prototype."""
    apply_tome(unet, **settings)
    with prototype():
        return [run(unet, seed=seed) for seed in seeds]


def test_variants_have_allowed_settings_and_names_of_their_own():
    variants = experiments.list_variants()
    assert len({variant.name for variant in variants}) == len(variants)
    assert all(0 < variant.config.ratio <= 0.75 for variant in variants)


def test_laplacian_keeps_the_token_of_each_cell_that_is_most_like_its_neighbours():
    metric = paddle.randn([2, GRID.tokens, 5])
    plan = prototypes.laplacian_match(metric, GRID, 40, 2, 2, None, None)
    dst = np.sort(plan.dst_rows.numpy().reshape(2, -1) % GRID.tokens)
    tokens = np.pad(metric.numpy().reshape(2, 8, 8, 5), ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    for image in range(2):
        expected = []
        for cell in range(16):
            contrast = {}
            for y in (cell // 4 * 2, cell // 4 * 2 + 1):
                for x in (cell % 4 * 2, cell % 4 * 2 + 1):
                    around = [tokens[image, y + 1 + dy, x + 1 + dx] for dy, dx in ((0, 1), (0, -1), (1, 0), (-1, 0))]
                    contrast[y * 8 + x] = ((tokens[image, y + 1, x + 1] - np.mean(around, 0)) ** 2).sum()
            expected.append(min(contrast, key=contrast.get))
        assert dst[image].tolist() == sorted(expected)
    own = groups(plan, 2)
    assert all(own[image, dst[image]].tolist() == dst[image].tolist() for image in range(2))
    assert [len(set(row)) for row in own.tolist()] == [24, 24]
    best = matching.match_tokens(metric, GRID, 40)  # not the same dst
    assert (groups(best, 2) != own).any()


def test_kept_plan_is_computed_in_every_second_pass(unet):
    def keeping(passes):
        return prototypes.building(lambda: prototypes.kept(passes))

    always = merged(unet, keeping(1), 0, 1, 2)
    assert all((a == run(unet, seed=seed)).all() for seed, a in enumerate(always))
    kept = merged(unet, keeping(2), 0, 1, 2)
    assert [bool((a == b).all()) for a, b in zip(kept, always, strict=True)] == [True, False, True]


def test_shared_plan_is_that_of_the_first_block(unet):
    def sharing(first):
        return prototypes.building(lambda: prototypes.shared(first))

    (own,) = merged(unet, sharing(range(9)), 0)
    (first,) = merged(unet, sharing([0]), 0)
    assert (own == run(unet)).all()
    assert (first != own).any()


@pytest.mark.parametrize("offset", [0, 2])
def test_shifted_windows_hold_every_pair(offset):
    metric, key = paddle.randn([2, GRID.tokens, 5]), (0, 0)
    with prototypes.shifted(lambda index, window: (offset, offset))():
        plan = matching.match_tokens(metric, GRID, 32, random_key=key, window=4)
    window = (ROW + offset) // 4 * 8 + (COLUMN + offset) // 4
    own = groups(plan, 2)
    assert (window[own] == window).all()
    assert (own == groups(matching.match_tokens(metric, GRID, 32, random_key=key, window=4), 2)).all() == (offset == 0)


def test_fall_back_looks_everywhere_for_the_worse_half():
    metric = paddle.randn([2, GRID.tokens, 5])
    windows = constant_positions(GRID, 2, 2, None, 4)
    near, far, both = (
        [x.numpy() for x in most_similar(metric, places)]
        for most_similar, places in (
            (matching._most_similar, windows),
            (matching._most_similar, windows._replace(windows=None)),
            (prototypes.fall_back, windows),
        )
    )
    is_worse = near[1] < np.sort(near[1], axis=1)[:, 24:25]
    assert is_worse.sum(axis=1).tolist() == [24, 24]
    for value in range(2):
        np.testing.assert_array_equal(both[value], np.where(is_worse, far[value], near[value]))


def test_queries_merge_at_a_ratio_of_their_own_and_leave_nothing_behind(unet):
    before, lengths = traces(unet), {}
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    with prototypes.splitting(0.5, 0.75)():
        apply_tome(unet, merge_attn="asymmetric")
        for name in ("to_q", "to_k", "to_v"):
            getattr(attention, name).register_forward_post_hook(
                lambda layer, inputs, output, name=name: lengths.__setitem__(name, output.shape[1])
            )
        assert run(unet).shape == (2, 4, 16, 16)
    assert lengths == {"to_q": 128, "to_k": 64, "to_v": 64}
    for name in lengths:
        getattr(attention, name)._forward_post_hooks.clear()
    remove_tome(unet)
    assert traces(unet) == before


def test_each_level_merges_at_the_ratio_of_its_height(unet, plans):
    with prototypes.ratios_by_height({16: 0.25, 8: 0.5})():
        run(apply_tome(unet, max_downsample=2, merge_attn=True))
    assert {(plan.tokens, plan.removed) for plan in plans} == {(256, 64), (64, 32)}
    remove_tome(unet)


def test_bfloat16_inspection_finds_the_operation_without_kernel(tmp_path):
    """A program that casts float32 to bool between bfloat16 operations, as matching does."""
    if paddle.__version__.startswith("3"):
        pytest.skip("Paddle 3 has other programs and no such passes")
    program, startup = paddle.static.Program(), paddle.static.Program()
    paddle.enable_static()
    try:
        with paddle.static.program_guard(program, startup):
            x = paddle.static.data("x", [2, 4, 4])
            product = paddle.matmul(paddle.matmul(x, x), x)
            product.cast("bool").cast("float32")
    finally:
        paddle.disable_static()
    for op in program.global_block().ops:
        op.desc._set_bool_attr("use_mkldnn", True)
    row = experiments.inspect_bfloat16(program.desc.serialize_to_string(), set())
    assert row["without_kernel"] == {"cast to bool": 1}
    without_cast = experiments.inspect_bfloat16(program.desc.serialize_to_string(), {"matmul_v2"})
    assert without_cast == {"bfloat16": {"matmul_v2": 2}, "without_kernel": {}}
