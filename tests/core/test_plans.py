"""Merging within equal windows by matrix products: the form of GPUs, on a CPU."""

import numpy as np
import paddle
import pytest
from conftest import groups, make_unet, run, sizes_of

from ppdiffusers_tome import Grid, ToMeConfig, match_tokens, merge, unmerge
from ppdiffusers_tome.attach.passes import gpu_form
from ppdiffusers_tome.attach.placement import tokens_kept
from ppdiffusers_tome.grid import window_of
from ppdiffusers_tome.methods.method import Kept
from ppdiffusers_tome.methods.plan import join_frames
from ppdiffusers_tome.methods.windows import (
    MAX_ROUNDING,
    ROW_MULTIPLE,
    WindowForm,
    equal_windows,
    window_constants,
)

GRID, KEY, WINDOW = Grid(8, 16), (3, 1), 8
T, P, Q = 2, 64, 16


def tokens(batch=3, channels=5, seed=0):
    values = np.random.RandomState(seed).standard_normal((batch, GRID.tokens, channels))
    return paddle.to_tensor(values.astype("float32"))


def plan_of(x, removed, removed_keys=None):
    """Of tokens that merge away of each window."""
    kept = Kept(GRID.tokens, *(T * (P - number) for number in (removed, removed_keys or removed)))
    return WindowForm().plan(x, window_constants(GRID, 2, 2, KEY, WINDOW), kept)


def test_where_all_src_merge_it_is_the_plan_of_rows():
    x = tokens()
    by_products, by_rows = plan_of(x, 48), match_tokens(x, GRID, 96, random_key=KEY, window=WINDOW)
    assert type(by_products) is not type(by_rows) and by_products.kept == by_rows.kept == 32
    np.testing.assert_array_equal(groups(by_products, 3), groups(by_rows, 3))
    back = [unmerge(merge(x, plan), plan).numpy() for plan in (by_products, by_rows)]
    np.testing.assert_allclose(*back, atol=1e-6)
    order = np.argsort(by_products.kept_rows.numpy(), axis=1)  # by window, and by position
    sizes = [np.take_along_axis(by_products.log_sizes.numpy(), order, 1), by_rows.log_sizes.numpy()]
    np.testing.assert_allclose(*sizes, atol=1e-6)


@pytest.mark.parametrize("removed", [4, 20, 39])
def test_the_best_pairs_of_each_window_merge(removed):
    """As many in each window; those that a plan of the window alone would merge."""
    x, window = tokens(), window_of(GRID, 2, 2, WINDOW)
    plan = plan_of(x, removed)
    assert plan.removed == T * removed
    actual = groups(plan, 3)
    all_merged = groups(match_tokens(x, GRID, 96, random_key=KEY, window=WINDOW), 3)
    for image in range(3):
        norm = x.numpy()[image] / np.linalg.norm(x.numpy()[image], axis=1, keepdims=True)
        similarity = (norm * norm[all_merged[image]]).sum(1)
        for number in range(T):
            src = np.flatnonzero((window == number) & (all_merged[image] != np.arange(GRID.tokens)))
            best = src[np.argsort(-similarity[src])][:removed]
            is_merged = np.flatnonzero((window == number) & (actual[image] != np.arange(GRID.tokens)))
            assert set(best) == set(is_merged)
            np.testing.assert_array_equal(actual[image][best], all_merged[image][best])


def test_merged_tokens_are_means_and_unmerged_ones_copies():
    x = tokens(channels=7)
    plan = plan_of(tokens(), 20, 45)
    for part in (plan, plan.keys):
        owner = part.source_rows.numpy().reshape(3, -1) - np.arange(3)[:, None] * part.kept
        copies = np.eye(part.kept)[owner]
        means = copies.transpose(0, 2, 1) / copies.sum(1)[..., None]
        merged = merge(x, part)
        np.testing.assert_allclose(merged.numpy(), means @ x.numpy(), atol=1e-6)
        np.testing.assert_allclose(unmerge(merged, part).numpy(), copies @ merged.numpy(), atol=1e-6)
        np.testing.assert_allclose(np.exp(part.log_sizes.numpy()), sizes_of(part), rtol=1e-6)
    assert plan.keys.kept < plan.kept


def test_the_dtype_is_kept():
    plan, x = plan_of(tokens(), 20), tokens().cast("float64")
    merged = merge(x, plan)
    assert merged.dtype == unmerge(merged, plan).dtype == x.dtype


def test_frames_merge_separately():
    x = tokens(batch=4)
    plan, video = plan_of(x, 20, 48), join_frames(plan_of(x, 20, 48), 2)
    sequence = x.reshape([2, -1, 5])
    for part, joined in ((plan, video), (plan.keys, video.keys)):
        assert (joined.tokens, joined.kept) == (2 * part.tokens, 2 * part.kept)
        merged = merge(sequence, joined)
        np.testing.assert_array_equal(merged.reshape([4, -1, 5]), merge(x, part))
        np.testing.assert_array_equal(unmerge(merged, joined).reshape([4, -1, 5]), unmerge(merge(x, part), part))


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf, 3e38])
def test_tokens_without_a_similarity_merge_last(bad):
    x = tokens().numpy()
    x[0, 17] = bad  # a src
    plan = plan_of(paddle.to_tensor(x), 20)
    assert (groups(plan, 3)[0] == 17).sum() == 1
    assert np.isfinite(unmerge(merge(tokens(), plan), plan).numpy()).all()


@pytest.mark.parametrize(
    ("grid", "window", "is_equal"),
    [
        (Grid(64, 64), 16, True),
        (Grid(32, 64), 16, True),
        (Grid(52, 76), 16, False),  # 19 cells of a row in windows of 8
        (Grid(16, 16), None, True),
        (Grid(64, 64), None, False),  # too large
        (Grid(1, 16), 16, False),  # no cell
        (Grid(17, 17), 16, True),  # one window
        (Grid(34, 17), 16, False),
        (Grid(15, 10), 5, False),  # windows of 6
        (Grid(18, 12), 5, True),
    ],
)
def test_which_grids_have_equal_windows(grid, window, is_equal):
    windows, of_token = equal_windows(grid, 2, 2, window), window_of(grid, 2, 2, window)
    assert (windows is not None) == is_equal
    if is_equal:
        assert set(np.bincount(of_token)) == {windows.p} and len(np.bincount(of_token)) == windows.number
        assert window_constants(grid, 2, 2, KEY, window).windows == windows


@pytest.mark.parametrize("window", [2, 4, 8, 16, None])
@pytest.mark.parametrize("method", ["default", "symmetric", "kv"])
def test_rounding_changes_the_share_of_tokens_by_a_stated_bound(window, method):
    """And to multiples of 8 in large windows, in which a GPU multiplies faster; small ones merge by rows."""
    grid = Grid(16, 16)
    for ratio in np.linspace(0, 0.75, 76):
        config = ToMeConfig(float(ratio), method, window=window)
        exact, rounded = tokens_kept(config, grid), tokens_kept(config, grid, use_gpu_form=True)
        one_of_each = grid.tokens // (window or 16) ** 2
        bound = max(MAX_ROUNDING * grid.tokens, one_of_each)
        assert all(abs(a - b) <= bound for a, b in zip(exact, rounded, strict=True))
        assert [a == grid.tokens for a in exact] == [b == grid.tokens for b in rounded]
        if window in (2, 4):
            assert rounded == exact
        elif window in (16, None):
            assert all(number % ROW_MULTIPLE == 0 or number > grid.tokens - ROW_MULTIPLE for number in rounded)


@pytest.mark.parametrize(
    ("window", "ratio", "kept"),
    [(4, 0.25, 192), (4, 0.3, 180), (4, 0.28, 185), (8, 0.3, 180), (16, 0.3, 176), (2, 0.25, 192), (2, 0.3, 180)],
)
def test_a_model_keeps_what_was_asked_for(window, ratio, kept, plans):
    """The summary says so too. In windows where a token is a large share, they merge by rows."""
    model = make_unet().apply_tome(ratio, method="symmetric", window=window)
    with gpu_form(True):
        run(model)
        blocks = model.tome_summary(16, 16).blocks
    assert {plan.kept for plan in plans} == {block.kept for block in blocks} == {kept}


def test_a_model_merges_alike_by_rows_and_by_products():
    model = make_unet().apply_tome(0.75, method="kv", window=8)
    expected = run(model)
    with gpu_form(True):
        actual = run(model)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert not np.array_equal(actual, expected)


@pytest.mark.parametrize("method", ["default", "symmetric", "kv"])
def test_a_model_merges_by_products_only_for_gpus(method, plans):
    model = make_unet().apply_tome(0.5, method=method, window=8)
    with gpu_form(True):
        run(model)
    by_products = {type(plan.keys).__name__ for plan in plans}
    plans.clear()
    run(model)
    assert by_products == {"WindowPlan"} and {type(plan.keys).__name__ for plan in plans} == {"PairPlan"}
