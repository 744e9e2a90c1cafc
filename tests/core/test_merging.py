"""A plan merges by means and unmerges by copies: explicit matrices give the values and the gradients."""

import numpy as np
import paddle
import pytest

from ppdiffusers_tome import Grid, MergePlan, ToMePassError, match_tokens, merge, unmerge
from ppdiffusers_tome.methods.plan import Choice

GRID = Grid(6, 8)


def make(batch=2, channels=5, removed=20, seed=0, dtype="float32"):
    x = paddle.to_tensor(np.random.RandomState(seed).standard_normal((batch, GRID.tokens, channels)).astype("float32"))
    return x.cast(dtype), match_tokens(x, GRID, GRID.tokens - removed)


def matrices(plan, batch):
    """Merging and unmerging as explicit matrices: [B, N-r, N] of means, [B, N, N-r] of copies."""
    copies = np.eye(plan.kept, dtype="float32")[plan.choice.merging.sources.numpy()]
    assert len(copies) == batch
    means = copies.transpose(0, 2, 1) / copies.sum(axis=1)[..., None]
    return means, copies


@pytest.mark.parametrize("removed", [1, 20, 35, 36])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_merge_averages_and_unmerge_copies(batch, removed):
    x, plan = make(batch, removed=removed)
    means, copies = matrices(plan, batch)
    merged = merge(x, plan)
    assert merged.shape == [batch, 48 - removed, 5]
    np.testing.assert_allclose(merged.numpy(), means @ x.numpy(), atol=1e-6)
    np.testing.assert_array_equal(unmerge(merged, plan).numpy(), copies @ merged.numpy())


def test_a_plan_that_keeps_all_tokens_changes_nothing():
    x, plan = make(removed=0)
    assert plan.kept == plan.tokens and not plan.merges
    np.testing.assert_array_equal(merge(x, plan).numpy(), x.numpy())
    assert unmerge(x, plan) is x


@pytest.mark.parametrize("rows", [[[0, 5, 9]], [[0, 5, 9], [1, 4, 8], [2, 3, 7]]], ids=["one choice", "one a frame"])
def test_tokens_that_are_left_out_are_gathered_in_images_and_frames(rows):
    """Frames are rows of the batch, [B·F, N, C], or one sequence, [B, F·N, C]: the same tokens remain."""
    frames, n = 3, 12
    x = np.random.RandomState(0).standard_normal((2 * frames, n, 5)).astype("float32")
    positions = np.resize(rows, (frames, 3))
    expected = np.stack([image[positions[i % frames]] for i, image in enumerate(x)])
    choice = Choice(paddle.to_tensor(rows))
    as_rows, joined = MergePlan(choice, n), MergePlan(choice, n, frames)
    assert (as_rows.tokens, as_rows.kept, joined.tokens, joined.kept) == (12, 3, 36, 9)
    np.testing.assert_array_equal(merge(paddle.to_tensor(x), as_rows).numpy(), expected)
    sequence = paddle.to_tensor(x.reshape(2, -1, 5))
    np.testing.assert_array_equal(merge(sequence, joined).numpy(), expected.reshape(2, -1, 5))
    np.testing.assert_array_equal(joined.rows(sequence[0]).numpy(), expected.reshape(2, -1, 5)[0])
    with pytest.raises(ToMePassError, match="leaves them out"):
        unmerge(paddle.to_tensor(expected), as_rows)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtype_is_kept_and_the_mean_is_rounded_once(dtype):
    x, plan = make(dtype=dtype)
    merged = merge(x, plan)
    assert merged.dtype == x.dtype
    exact = merge(x.cast("float32"), plan)
    if dtype != "float64":
        exact = exact.cast(dtype)
    np.testing.assert_allclose(
        merged.cast("float32").numpy(), exact.cast("float32").numpy(), rtol=0, atol=1e-6 if dtype == "float64" else 0
    )
    assert unmerge(merged, plan).dtype == x.dtype


def test_many_float16_tokens_do_not_overflow_on_one_dst():
    x = paddle.full([1, 16, 3], 60000.0, dtype="float16")
    plan = match_tokens(x, Grid(4, 4), 4)
    assert (merge(x, plan).cast("float32") == x[:, :4].cast("float32")).all()


def test_channels_may_differ_from_those_of_the_metric():
    _, plan = make()
    means, copies = matrices(plan, 2)
    other = paddle.randn([2, 48, 11])
    np.testing.assert_allclose(unmerge(merge(other, plan), plan).numpy(), copies @ (means @ other.numpy()), atol=1e-6)


@pytest.mark.parametrize("removed", [20, 36])
def test_gradients_equal_those_of_the_matrices(removed):
    x, plan = make(removed=removed)
    means, copies = matrices(plan, 2)
    x.stop_gradient = False
    weight = paddle.randn([2, 48, 5])
    (unmerge(merge(x, plan), plan) * weight).sum().backward()
    expected = (copies @ means).transpose(0, 2, 1) @ weight.numpy()
    np.testing.assert_allclose(x.grad.numpy(), expected, atol=2e-6)


def test_inputs_are_not_modified():
    x, plan = make()
    before = x.numpy().copy()
    merged = merge(x, plan)
    merged_before = merged.numpy().copy()
    unmerge(merged, plan)
    np.testing.assert_array_equal(x.numpy(), before)
    np.testing.assert_array_equal(merged.numpy(), merged_before)


def test_wrong_token_count_is_rejected():
    x, plan = make()
    with pytest.raises(ToMePassError, match=r"\[B, 48, C\] .*\[2, 47, 5\]"):
        merge(x[:, 1:], plan)
    with pytest.raises(ToMePassError, match=r"\[B, 28, C\] .*\[2, 48, 5\]"):
        unmerge(x, plan)
    with pytest.raises(ToMePassError, match=r"\[2, 48\]"):
        merge(x[:, :, 0], plan)
