"""Dst and src positions of a grid, and that their constants outlive a pass, but not the wraps of their model."""

import copy
import gc
import weakref

import numpy as np
import paddle
import pytest
from conftest import inputs, make_unet, run
from hypothesis import given
from hypothesis import strategies as st
from reference import dst_positions

from ppdiffusers_tome import Grid, ToMeConfig, choose_dst
from ppdiffusers_tome.attach.attach import attached_placements
from ppdiffusers_tome.attach.block import BlockWrap
from ppdiffusers_tome.attach.forward import wrap_of
from ppdiffusers_tome.attach.state import MAX_CACHED
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.methods import METHODS, matching, todo
from ppdiffusers_tome.methods.turns import turn_table


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
    "settings", [*({"method": name} for name in METHODS), {"method": "tomesd", "use_rand": False}]
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
    count(todo, "choose_dst")
    count(matching, "choose_dst")

    def counted():
        counts.clear()
        with paddle.no_grad():
            unet(**arguments)
        return dict(counts)

    plain = counted()
    unet.apply_tome(**settings)
    first, second = counted(), counted()
    assert first["to_tensor"] > plain.get("to_tensor", 0)
    assert ("choose_dst" in first) == ("sx" in METHODS[settings["method"]].defaults())
    assert second == plain  # what ppdiffusers itself does


def block_wraps(unet):
    return [wrap_of(block.layer) for block in find_blocks(unet) if isinstance(wrap_of(block.layer), BlockWrap)]


@pytest.mark.parametrize("method", METHODS)
def test_constants_leave_with_the_wraps_of_their_model(method, monkeypatch):
    """The constants of the model without merging leave; those of another model stay."""
    constants = {"one": [], "other": []}

    def apply_and_run(name, unet):
        to_tensor = paddle.to_tensor

        def recording(*args, **kwargs):
            tensor = to_tensor(*args, **kwargs)
            constants[name].append(weakref.ref(tensor))
            return tensor

        unet.apply_tome(method=method)
        arguments = inputs()
        with monkeypatch.context() as patched, paddle.no_grad():
            patched.setattr(paddle, "to_tensor", recording)
            unet(**arguments)

    def count_live(name):
        gc.collect()
        return sum(reference() is not None for reference in constants[name])

    one, other = make_unet(), make_unet()
    apply_and_run("one", one)
    apply_and_run("other", other)
    kept = count_live("other")
    assert count_live("one") == kept > 0
    one.remove_tome()
    assert (count_live("one"), count_live("other")) == (0, kept)
    other.apply_tome(ratio=0.25)  # only the table of turns stays, which does not depend on settings
    assert count_live("other") == ToMeConfig(method=method).takes_turns


def test_constants_of_a_block_are_bounded_and_those_used_last_stay():
    unet, built = make_unet().apply_tome(), []
    cache = block_wraps(unet)[0]._constants
    for key in [*range(MAX_CACHED), 0, MAX_CACHED, 0, 1]:
        assert cache.get(key, lambda key=key: built.append(key) or key) == key
    assert built == [*range(MAX_CACHED), MAX_CACHED, 1] and len(cache) == MAX_CACHED


def test_each_grid_has_its_own_constants(plans):
    """Also grids of as many tokens; and a copy of a model starts without any."""
    unet = make_unet().apply_tome(method="todo")
    for _ in range(2):
        for h, w in ((16, 12), (12, 16)):
            plans.clear()
            run(unet, h=h, w=w)
            dst = choose_dst(Grid(h, w)).tolist()
            assert [plan.choice.positions.tolist() for plan in plans] == [[dst]] * len(block_wraps(unet))
    assert {len(wrap._constants) for wrap in block_wraps(unet)} == {2}
    assert {len(wrap._constants) for wrap in block_wraps(copy.deepcopy(unet))} == {0}


def test_random_dst_of_tomesd_are_those_of_the_timestep_whatever_ran_before(plans):
    """A block keeps those of all turns of a grid."""
    unet, table = make_unet().apply_tome(method="tomesd", seed=3), turn_table()
    indices = [block.index for block, _ in attached_placements(unet)]
    assert len({int(table[timestep]) for timestep in (999, 501, 10)}) == 3
    for model in (unet, copy.deepcopy(unet)):
        for timestep in (999, 501, 999, 10):
            plans.clear()
            run(model, timestep=timestep)
            for plan, index in zip(plans, indices, strict=True):
                dst = choose_dst(Grid(16, 16), random_key=(3, index, int(table[timestep]))).tolist()
                assert plan.choice.positions[:, : len(dst)].tolist() == [dst, dst]
    assert {len(wrap._constants) for wrap in block_wraps(unet)} == {1}
