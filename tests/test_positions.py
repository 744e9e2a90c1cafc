"""Dst and src positions of a grid, and that their constants outlive a pass."""

import numpy as np
import paddle
import pytest
from conftest import inputs, make_unet, run
from hypothesis import given
from hypothesis import strategies as st
from reference import dst_positions

from ppdiffusers_tome import Grid, choose_dst, positions
from ppdiffusers_tome.config import TOMESD_SETTINGS


@pytest.mark.parametrize(
    ("h", "w", "sx", "sy"), [(4, 6, 2, 2), (5, 7, 2, 2), (16, 17, 2, 3), (9, 11, 4, 3), (3, 2, 5, 7)]
)
def test_first_token_of_each_complete_cell_is_dst(h, w, sx, sy):
    assert choose_dst(Grid(h, w), sx, sy).tolist() == dst_positions(h, w, sx, sy)


@given(
    h=st.integers(1, 23),
    w=st.integers(1, 23),
    sx=st.integers(1, 5),
    sy=st.integers(1, 5),
    key=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 99)),
)
def test_random_dst_is_one_per_cell_and_always_the_same(h, w, sx, sy, key):
    chosen = choose_dst(Grid(h, w), sx, sy, key)
    cells = [(y // sy, x // sx) for y, x in (divmod(int(n), w) for n in chosen)]
    assert sorted(cells) == [(i, j) for i in range(h // sy) for j in range(w // sx)]
    assert chosen.tolist() == sorted(chosen.tolist())
    assert chosen.tolist() == choose_dst(Grid(h, w), sx, sy, key).tolist()


def test_random_dst_is_uniform_and_depends_on_all_of_the_key():
    grid = Grid(64, 64)
    chosen = choose_dst(grid, random_key=(0, 0))
    within = (chosen // 64 % 2) * 2 + chosen % 2
    counts = np.bincount(within, minlength=4)  # 1024 draws of 4: 256 each, standard deviation 14
    assert counts.min() > 256 - 5 * 14 and counts.max() < 256 + 5 * 14
    others = [choose_dst(grid, random_key=key) for key in ((1, 0), (0, 1))]
    assert all((other != chosen).any() for other in others)


def test_random_dst_never_changes():
    """A seed must give the same image in every release: these numbers are recorded, not derived."""
    assert choose_dst(Grid(4, 6), random_key=(0, 0)).tolist() == RECORDED


RECORDED = [6, 9, 11, 14, 16, 19]


# Host work


CALLS = {
    "paddle": ("to_tensor", "assign", "arange"),
    "numpy": ("argsort", "setdiff1d", "bincount"),
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 8},
        {"window": 4, "proportional": True},
        {"merge_attn": "kv", "proportional": True},
        {"merge_attn": "asymmetric", "window": 4, "proportional": True},
        {"merge_attn": "kv", "ratio": 0.75, "match": "grid"},
        {"use_rand": False},
    ],
    ids=str,
)
def test_a_steady_pass_does_no_host_work_and_copies_nothing_to_the_device(settings, monkeypatch):
    unet, counts = make_unet(), {}

    def count(owner, name):
        function = getattr(owner, name)

        def counting(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    arguments = inputs()
    run(unet)
    for name in CALLS["paddle"]:
        count(paddle, name)
    for name in CALLS["numpy"]:
        count(np, name)
    count(np.random, "RandomState")
    count(positions, "choose_dst")
    for cached in (positions.constant_positions, positions.constant_cells):
        cached.cache_clear()

    def counted():
        counts.clear()
        with paddle.no_grad():
            unet(**arguments)
        return dict(counts)

    plain = counted()
    unet.apply_tome(**{**TOMESD_SETTINGS, **settings})
    first, second = counted(), counted()
    assert first["choose_dst"] > 0 and first["to_tensor"] > plain.get("to_tensor", 0)
    assert second == plain  # what ppdiffusers itself does
    unet.apply_tome(**{**TOMESD_SETTINGS, "merge_mlp": True, **settings})
    assert counted() == plain  # the same positions in another method


def test_kept_positions_are_bounded():
    for side in range(4, 4 + positions.CACHED + 8):
        positions.constant_positions(Grid(4, side), 2, 2, (0, 0))
        positions.constant_cells(Grid(4, side), 2, 2, (0, 0))
    for cached in (positions.constant_positions, positions.constant_cells):
        assert cached.cache_info().currsize == cached.cache_info().maxsize == positions.CACHED
        cached.cache_clear()


def test_kept_positions_are_those_of_their_key():
    for key in ((0, 0), (1, 0), (0, 1), None):
        for h, w, sx in ((8, 6, 2), (6, 8, 2), (8, 6, 3)):
            for _ in range(2):
                kept = positions.constant_positions(Grid(h, w), sx, 2, key)
                assert kept.dst.tolist() == choose_dst(Grid(h, w), sx, 2, key).tolist()


def test_without_a_seed_nothing_is_kept(plans):
    """Each pass draws its own dst, which no other pass uses."""
    before = positions.constant_positions.cache_info().currsize
    unet = make_unet().apply_tome(seed=None)
    run(unet), run(unet)
    half = len(plans) // 2
    assert not np.array_equal(plans[0].dst_rows.numpy(), plans[half].dst_rows.numpy())
    assert positions.constant_positions.cache_info().currsize == before
