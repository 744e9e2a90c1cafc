"""Dst and src positions of a grid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import dst_positions

from ppdiffusers_tome import Grid, choose_dst


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
