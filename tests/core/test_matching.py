"""Which tokens merge, and into which: the NumPy loops of `reference` choose the same, also with ties and NaN."""

import inspect
import random

import numpy as np
import paddle
import pytest
from conftest import groups
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import roundtrip

from ppdiffusers_tome import (
    Grid,
    ToMeConfigError,
    choose_dst,
    match_tokens,
    merge,
    unmerge,
)
from ppdiffusers_tome.methods import METHODS
from ppdiffusers_tome.methods.plan import Turn
from ppdiffusers_tome.methods.todo import remaining
from ppdiffusers_tome.tensors import constants

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
    match_tokens(x, Grid(8, 8), 44, random_key=(0, 0))
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
    plan = match_tokens(paddle.to_tensor(x), grid, grid.tokens - removed, sx, sy)
    expected, expected_groups = roundtrip(x, *grid, sx, sy, removed)
    assert plan.kept == grid.tokens - removed
    np.testing.assert_array_equal(groups(plan, batch), expected_groups)
    out = unmerge(merge(paddle.to_tensor(x), plan), plan).numpy()
    np.testing.assert_allclose(out, expected, atol=2e-6)  # a mean of up to N float32 of size 1


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_random_dst_are_the_ones_that_stay(data):
    grid = Grid(data.draw(st.integers(2, 9), "h"), data.draw(st.integers(2, 9), "w"))
    key = data.draw(st.sampled_from([(7, 0), (0,)]), "key")
    dst = choose_dst(grid, random_key=key)
    removed = data.draw(st.integers(1, grid.tokens - len(dst)), "r")
    x = tokens(2, grid, 5, data.draw(st.integers(0, 999), "seed"))
    plan = match_tokens(paddle.to_tensor(x), grid, grid.tokens - removed, random_key=key)
    expected, expected_groups = roundtrip(x, *grid, 2, 2, removed, dst)
    np.testing.assert_array_equal(groups(plan, 2), expected_groups)
    np.testing.assert_array_equal(plan.choice.positions.numpy()[:, : len(dst)], [dst, dst])
    np.testing.assert_allclose(unmerge(merge(paddle.to_tensor(x), plan), plan).numpy(), expected, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_todo_keeps_the_first_token_of_each_cell_and_of_two_the_one_half_a_cell_away(data):
    """Also where cells leave remainders, whose tokens are left out."""
    h, w = data.draw(st.integers(1, 13), "h"), data.draw(st.integers(1, 13), "w")
    sx, sy = data.draw(st.integers(1, 4), "sx"), data.draw(st.integers(1, 4), "sy")
    per_cell = data.draw(st.sampled_from([1] if sx % 2 or sy % 2 else [1, 2]), "per_cell")
    expected = []
    for y in range(h // sy * sy):
        for x in range(w // sx * sx):
            inside = (y % sy, x % sx)
            if inside == (0, 0) or (per_cell == 2 and inside == (sy // 2, sx // 2)):
                expected.append(y * w + x)
    assert remaining(Grid(h, w), sx, sy, per_cell).tolist() == [expected]


def test_two_tokens_of_each_cell_are_on_a_checkerboard():
    rows, columns = np.divmod(np.arange(96), 12)
    board = np.flatnonzero((rows + columns) % 2 == 0)
    np.testing.assert_array_equal(remaining(Grid(8, 12), 2, 2, 2), [board])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("grid", [Grid(8, 8), Grid(9, 14), Grid(3, 1)], ids=str)
def test_a_method_chooses_as_many_tokens_as_it_says(name, grid):
    config = METHODS[name]()
    kept = config.count_kept(grid, 1 - config.effective_ratio)
    assert 0 < kept <= grid.tokens
    if kept < grid.tokens:
        x = paddle.to_tensor(tokens(2, grid, 5))
        choice = config.choose(x, constants(config.constants(grid, kept, 0)), kept, Turn())
        assert choice.positions.shape[1] == kept and (choice.merging is not None) == config.merges_queries
        for positions in choice.positions.numpy():
            assert len(set(positions)) == kept and 0 <= positions.min() <= positions.max() < grid.tokens


has_stable_sort = pytest.mark.skipif(not HAS_STABLE_SORT, reason="this Paddle has no stable sort")


@has_stable_sort
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), removed=st.integers(1, 47))
def test_ties_go_to_the_lowest_index(seed, removed):
    rng = np.random.RandomState(seed)
    x = np.eye(3, dtype="float32")[rng.randint(3, size=(2, 64))]  # cosines of exactly 0 and 1
    plan = match_tokens(paddle.to_tensor(x), Grid(8, 8), 64 - removed)
    np.testing.assert_array_equal(groups(plan, 2), roundtrip(x, 8, 8, 2, 2, removed)[1])


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("removed", [1, 20, pytest.param(47, marks=has_stable_sort), 48])
def test_zero_and_non_finite_tokens_follow_the_stated_rule(bad, removed):
    x = tokens(2, Grid(8, 8), 5)
    x[0, [0, 3, 20, 37]] = bad  # two dst, two src
    x[1, 9, 2] = bad  # one value alone
    plan = match_tokens(paddle.to_tensor(x), Grid(8, 8), 64 - removed)
    np.testing.assert_array_equal(groups(plan, 2), roundtrip(x, 8, 8, 2, 2, removed)[1])


def test_token_whose_norm_overflows_has_similarity_0():
    x = tokens(1, Grid(4, 4), 5)
    x[0, 5] = 3e38
    zero = x.copy()
    zero[0, 5] = 0
    plans = [match_tokens(paddle.to_tensor(metric), Grid(4, 4), 10) for metric in (x, zero)]
    np.testing.assert_array_equal(groups(plans[0], 1), groups(plans[1], 1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes_choose_like_float32(dtype):
    x = paddle.to_tensor(tokens(2, Grid(8, 10), 7)).cast(dtype)
    plan, same = match_tokens(x, Grid(8, 10), 50), match_tokens(x.cast("float32"), Grid(8, 10), 50)
    np.testing.assert_array_equal(groups(plan, 2), groups(same, 2))


def test_matching_is_not_differentiated_and_does_not_modify_its_input():
    x = paddle.to_tensor(tokens(2, Grid(6, 8), 5), stop_gradient=False)
    before = x.numpy().copy()
    plan = match_tokens(x, Grid(6, 8), 28)
    assert plan.choice.positions.stop_gradient and all(part.stop_gradient for part in plan.choice.merging)
    np.testing.assert_array_equal(x.numpy(), before)


@pytest.mark.parametrize(
    ("shape", "dtype", "grid", "kept", "message"),
    [
        ((2, 24, 5), "float32", (5, 5), 20, r"grid=5×5 .*25 .*\[2, 24, 5\]"),
        ((24, 5), "float32", (4, 6), 20, r"\[24, 5\]"),
        ((2, 24, 5), "int64", (4, 6), 20, "int64"),
        ((2, 24, 5), "float32", (4, 6), 25, r"kept=25 .* from 6 to 24"),
        ((2, 24, 5), "float32", (4, 6), 5, r"kept=5 .* from 6 to 24"),
        ((2, 3, 5), "float32", (1, 3), 2, "from 3 to 3"),
    ],
)
def test_invalid_argument_is_rejected(shape, dtype, grid, kept, message):
    with pytest.raises(ToMeConfigError, match=message):
        match_tokens(paddle.ones(shape, dtype=dtype), Grid(*grid), kept)
