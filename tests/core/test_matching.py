import inspect
import random

import numpy as np
import paddle
import pytest
from conftest import groups
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import match_cells as match_cells_of_reference
from reference import pair_dst, roundtrip

from ppdiffusers_tome import (
    Grid,
    ToMeConfigError,
    choose_dst,
    match_tokens,
    merge,
    unmerge,
)
from ppdiffusers_tome.methods.cells import match_cells
from ppdiffusers_tome.methods.plan import join_frames

HAS_STABLE_SORT = "stable" in inspect.signature(paddle.argsort).parameters


def tokens(batch, grid, channels, seed=0):
    return np.random.RandomState(seed).standard_normal((batch, grid.tokens, channels)).astype("float32")


def test_no_global_random_state_is_touched():
    x = paddle.to_tensor(tokens(2, Grid(8, 8), 5))

    def draws():
        return paddle.randn([3]).numpy().tolist(), np.random.rand(), random.random()  # noqa: NPY002 - the global one

    def seed_all():
        for seed in (paddle.seed, np.random.seed, random.seed):
            seed(3)

    seed_all()
    expected = draws()
    seed_all()
    match_tokens(x, Grid(8, 8), 20, random_key=(0, 0))
    assert draws() == expected


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_plan_equals_that_of_the_oracle(data):
    grid = Grid(data.draw(st.integers(1, 11), "h"), data.draw(st.integers(1, 13), "w"))
    sx, sy = data.draw(st.integers(1, 4), "sx"), data.draw(st.integers(1, 4), "sy")
    batch, channels = data.draw(st.integers(1, 3), "B"), data.draw(st.sampled_from([3, 5, 7]), "C")
    dst = choose_dst(grid, sx, sy)
    removed = data.draw(st.integers(0, grid.tokens - len(dst) if len(dst) else 0), "r")
    x = tokens(batch, grid, channels, data.draw(st.integers(0, 999), "seed"))
    plan = match_tokens(paddle.to_tensor(x), grid, removed, sx, sy)
    expected, expected_groups = roundtrip(x, *grid, sx, sy, removed)
    assert plan.kept == grid.tokens - removed
    np.testing.assert_array_equal(groups(plan, batch), expected_groups)
    out = unmerge(merge(paddle.to_tensor(x), plan), plan).numpy()
    np.testing.assert_allclose(out, expected, atol=2e-6)  # a mean of up to N float32 of size 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_plan_within_windows_is_the_oracles(data):
    """Also where cells or windows leave remainders, and where a window is larger than the grid."""
    grid = Grid(data.draw(st.integers(1, 14), "h"), data.draw(st.integers(1, 14), "w"))
    sx, sy = data.draw(st.sampled_from([(2, 2), (1, 2), (3, 1), (2, 3)]), "sx, sy")
    window = data.draw(st.integers(1, 15), "window")
    dst = choose_dst(grid, sx, sy, (7, 0))
    assume(len(dst))
    removed = data.draw(st.integers(1, grid.tokens - len(dst)), "r")
    x = tokens(2, grid, 5, data.draw(st.integers(0, 999), "seed"))
    zeros = data.draw(st.integers(0, grid.tokens - 1), "token of zeros")
    assume(HAS_STABLE_SORT or zeros not in dst)  # several src may be equally similar to it
    x[0, zeros] = 0
    plan = match_tokens(paddle.to_tensor(x), grid, removed, sx, sy, (7, 0), window)
    expected, expected_groups = roundtrip(x, *grid, sx, sy, removed, dst, window)
    np.testing.assert_array_equal(groups(plan, 2), expected_groups)
    np.testing.assert_allclose(unmerge(merge(paddle.to_tensor(x), plan), plan).numpy(), expected, atol=2e-6)


def positions_of(plan, batch):
    """[B, N-r]: the original position of each row of a merged sequence; [B, N] those of the groups."""
    rows = plan.kept_rows.numpy()
    assert rows.shape == (batch, plan.kept)
    offsets = plan.tokens * np.arange(batch)[:, None]
    return rows - offsets, rows.reshape(-1)[plan.source_rows.numpy()].reshape(batch, -1) - offsets


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_part_of_a_plan_is_the_oracles(data):
    """Plans of queries and of keys, for images and for frames of a video; one or both may merge nothing."""
    grid = Grid(data.draw(st.integers(1, 8), "h"), data.draw(st.integers(1, 8), "w"))
    dst = choose_dst(grid)
    keys = data.draw(st.integers(0, grid.tokens - len(dst) if len(dst) else 0), "keys")
    queries = data.draw(st.sampled_from([0, keys // 2, keys]), "queries")
    batch, frames = data.draw(st.integers(1, 2), "B"), data.draw(st.sampled_from([1, 3]), "F")
    x = tokens(batch * frames, grid, 3, data.draw(st.integers(0, 999), "seed"))
    video = join_frames(match_tokens(paddle.to_tensor(x), grid, queries, removed_keys=keys), frames)
    sequence = paddle.to_tensor(x.reshape(batch, -1, 3))
    for plan, removed in ((video, queries), (video.keys, keys)):
        expected, expected_groups = roundtrip(x, *grid, 2, 2, removed)
        expected_groups = expected_groups.reshape(batch, frames, -1) + grid.tokens * np.arange(frames)[:, None]
        positions, actual_groups = positions_of(plan, batch)
        np.testing.assert_array_equal(actual_groups, expected_groups.reshape(batch, -1))
        sizes = [np.bincount(image)[rows] for image, rows in zip(actual_groups, positions, strict=True)]
        np.testing.assert_allclose(np.exp(plan.log_sizes.numpy()), sizes, rtol=1e-6)
        out = unmerge(merge(sequence, plan), plan).numpy()
        np.testing.assert_allclose(out, expected.reshape(batch, -1, 3), atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_plans_of_queries_and_keys_are_those_of_one_cut_each(data):
    """Both cut the same order of pairs. With equal numbers they are one plan, also without pairs, and in frames."""
    grid, frames = Grid(data.draw(st.integers(2, 9), "h"), data.draw(st.integers(2, 9), "w")), 2
    maximum = grid.tokens - len(choose_dst(grid))
    keys = data.draw(st.integers(0, maximum), "keys")
    queries = data.draw(st.integers(0, keys), "queries")
    x = paddle.to_tensor(tokens(2, grid, 5, data.draw(st.integers(0, 999), "seed")))
    plan = match_tokens(x, grid, queries, random_key=(3,), window=4, removed_keys=keys)
    assert (plan.removed, plan.keys.removed, plan.keys_plan is None) == (queries, keys, queries == keys)
    for one, removed in ((plan, queries), (plan.keys, keys)):
        alone = match_tokens(x, grid, removed, random_key=(3,), window=4)
        back = unmerge(merge(x, one), one).numpy()
        np.testing.assert_allclose(back, unmerge(merge(x, alone), alone).numpy(), atol=1e-6)  # sums in another order
    video = join_frames(plan, frames)
    assert (video.kept, video.keys.kept) == (frames * (grid.tokens - queries), frames * (grid.tokens - keys))


def test_keys_must_not_merge_less_than_queries():
    x = paddle.to_tensor(tokens(1, Grid(4, 4), 5))
    with pytest.raises(ToMeConfigError, match="removed_keys=3 is not allowed: it must be at least removed=4"):
        match_tokens(x, Grid(4, 4), 4, removed_keys=3)
    with pytest.raises(ToMeConfigError, match=r"removed=13 is not allowed .* from 0 to 12"):
        match_tokens(x, Grid(4, 4), 4, removed_keys=13)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cells_are_the_oracles(data):
    """Also where cells leave remainders, and where a grid has none."""
    h, w = data.draw(st.integers(1, 13), "h"), data.draw(st.integers(1, 13), "w")
    sx, sy = data.draw(st.integers(1, 4), "sx"), data.draw(st.integers(1, 4), "sy")
    key = data.draw(st.sampled_from([None, (7, 0)]), "key")
    per_cell = data.draw(st.sampled_from([1] if sx % 2 or sy % 2 else [1, 2]), "per_cell")
    dst, x = choose_dst(Grid(h, w), sx, sy, key).tolist(), tokens(2, Grid(h, w), 5)
    dst = pair_dst(w, sx, sy, dst) if per_cell == 2 else dst
    merged_into = match_cells_of_reference(h, w, sx, sy, dst, per_cell) if dst else {}
    plan = match_cells(paddle.to_tensor(x), Grid(h, w), sx, sy, key, per_cell)
    assert plan.kept == (len(dst) or h * w)
    expected_groups = [merged_into.get(n, n) for n in range(h * w)]
    np.testing.assert_array_equal(groups(plan, 2), [expected_groups] * 2)
    out = unmerge(merge(paddle.to_tensor(x), plan), plan).numpy()
    np.testing.assert_array_equal(out, [image[expected_groups] for image in x])


def test_two_tokens_of_each_cell_are_on_a_checkerboard():
    """Or in every second row, shifted in every other one of these, where cells are twice as high."""
    grid, x = Grid(8, 12), paddle.randn([1, 96, 3])
    rows, columns = np.divmod(np.arange(96), 12)
    board = np.flatnonzero((rows + columns) % 2 == 0)
    np.testing.assert_array_equal(match_cells(x, grid, per_cell=2).kept_rows, [board])
    shifted = np.flatnonzero((rows % 2 == 0) & ((columns + rows // 2) % 2 == 0))
    np.testing.assert_array_equal(match_cells(x, grid, sy=4, per_cell=2).kept_rows, [shifted])
    random = match_cells(x, grid, random_key=(3, 1), per_cell=2).kept_rows[0].numpy()
    first = np.isin(choose_dst(grid, random_key=(3, 1)), random)
    assert first.all() and (np.bincount(random // 12 * 6 + random % 12 // 2) == 1).all(), "one of each pair in a row"


@pytest.mark.parametrize(("sx", "sy", "per_cell"), [(2, 1, 2), (3, 3, 2), (2, 2, 3), (2, 2, 0)])
def test_a_number_of_dst_that_a_cell_cannot_have_is_rejected(sx, sy, per_cell):
    with pytest.raises(
        ToMeConfigError, match=f"per_cell={per_cell} .* with sx={sx}, sy={sy}: it must be 1, or 2 with"
    ):
        match_cells(paddle.randn([1, 24, 3]), Grid(4, 6), sx, sy, per_cell=per_cell)


def test_cells_of_another_grid_are_rejected():
    with pytest.raises(ToMeConfigError, match="grid=4×4 has 16 tokens"):
        match_cells(paddle.randn([1, 24, 3]), Grid(4, 4))


def test_window_of_the_whole_grid_is_the_plan_without_windows():
    x = paddle.to_tensor(tokens(2, Grid(8, 12), 320))
    plans = [match_tokens(x, Grid(8, 12), 48, random_key=(3, 1), window=window) for window in (None, 12)]
    for name in ("kept_rows", "source_rows", "log_sizes"):
        assert np.array_equal(getattr(plans[0], name).numpy(), getattr(plans[1], name).numpy()), name


has_stable_sort = pytest.mark.skipif(not HAS_STABLE_SORT, reason="this Paddle has no stable sort")


@has_stable_sort
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), removed=st.integers(1, 47))
def test_ties_go_to_the_lowest_index(seed, removed):
    rng = np.random.RandomState(seed)
    x = np.eye(3, dtype="float32")[rng.randint(3, size=(2, 64))]  # cosines of exactly 0 and 1
    plan = match_tokens(paddle.to_tensor(x), Grid(8, 8), removed)
    np.testing.assert_array_equal(groups(plan, 2), roundtrip(x, 8, 8, 2, 2, removed)[1])


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("removed", [1, 20, pytest.param(47, marks=has_stable_sort), 48])
def test_zero_and_non_finite_tokens_follow_the_stated_rule(bad, removed):
    x = tokens(2, Grid(8, 8), 5)
    x[0, [0, 3, 20, 37]] = bad  # two dst, two src
    x[1, 9, 2] = bad  # one value alone
    plan = match_tokens(paddle.to_tensor(x), Grid(8, 8), removed)
    np.testing.assert_array_equal(groups(plan, 2), roundtrip(x, 8, 8, 2, 2, removed)[1])


def test_token_whose_norm_overflows_has_similarity_0():
    x = tokens(1, Grid(4, 4), 5)
    x[0, 5] = 3e38
    zero = x.copy()
    zero[0, 5] = 0
    plans = [match_tokens(paddle.to_tensor(metric), Grid(4, 4), 6) for metric in (x, zero)]
    np.testing.assert_array_equal(groups(plans[0], 1), groups(plans[1], 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes_choose_like_float32(dtype):
    x = paddle.to_tensor(tokens(2, Grid(8, 10), 7)).cast(dtype)
    plan, same = match_tokens(x, Grid(8, 10), 30), match_tokens(x.cast("float32"), Grid(8, 10), 30)
    np.testing.assert_array_equal(groups(plan, 2), groups(same, 2))


def test_matching_is_not_differentiated_and_does_not_modify_its_input():
    x = paddle.to_tensor(tokens(2, Grid(6, 8), 5), stop_gradient=False)
    before = x.numpy().copy()
    plan = match_tokens(x, Grid(6, 8), 20)
    assert plan.weights.stop_gradient and plan.source_rows.stop_gradient
    np.testing.assert_array_equal(x.numpy(), before)


@pytest.mark.parametrize(
    ("shape", "dtype", "grid", "removed", "message"),
    [
        ((2, 24, 5), "float32", (5, 5), 4, r"grid=5×5 has 25 tokens but metric has shape \[2, 24, 5\]"),
        ((24, 5), "float32", (4, 6), 4, r"shape \[24, 5\]"),
        ((2, 24, 5), "int64", (4, 6), 4, "int64"),
        ((2, 24, 5), "float32", (4, 6), -1, "removed=-1"),
        ((2, 24, 5), "float32", (4, 6), 19, r"removed=19 .* from 0 to 18"),
        ((2, 3, 5), "float32", (1, 3), 1, "from 0 to 0"),
    ],
)
def test_invalid_argument_is_rejected(shape, dtype, grid, removed, message):
    with pytest.raises(ToMeConfigError, match=message):
        match_tokens(paddle.ones(shape, dtype=dtype), Grid(*grid), removed)
