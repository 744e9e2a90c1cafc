"""interlace keeps other keys in each step: which, in which blocks, and that only the timestep decides."""

import copy
import re
from functools import partial

import numpy as np
import paddle
import pytest
from conftest import inputs, make_controlnet, make_unet, run, traces
from reference import interlaced
from zoo import ZOO, generate
from zoo.noise import noise
from zoo.parts import ONE_LEVEL
from zoo.transformers import dit

from ppdiffusers_tome import Grid, MergePlan, ToMeConfig, ToMeConfigError, merge
from ppdiffusers_tome.attach.placement import placements
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.methods.interlace import Interlace, offset_of, remaining
from ppdiffusers_tome.methods.plan import Turn, turn_at
from ppdiffusers_tome.methods.turns import LAST_TIMESTEP, TURNS, turn_table
from ppdiffusers_tome.tensors import constants

# ppdiffusers' pipelines warn about their deprecated arguments and classes.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TIMESTEPS = (999, 481, 480, 1, 0)


def turn_of(timestep):
    return int(turn_table()[timestep])


# Which tokens remain


@pytest.mark.parametrize("grid", [Grid(8, 8), Grid(9, 14), Grid(4, 4), Grid(7, 5)], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 8, 15])
def test_each_turn_keeps_its_part_of_every_cell_and_all_tokens_outside_of_cells(grid, parts):
    kept = remaining(grid, parts, 2)
    for turn, positions in enumerate(kept):
        assert positions.tolist() == interlaced(*grid, parts, turn + offset_of(2))
    counts = np.bincount(kept.reshape(-1), minlength=grid.tokens).reshape(grid)
    rows, columns = grid.h // 4 * 4, grid.w // 4 * 4
    assert (counts[:rows, :columns] == parts).all(), "in 16 turns each token of a cell has as many turns as the others"
    assert (counts[rows:] == TURNS).all() and (counts[:, columns:] == TURNS).all()


def test_half_is_a_checkerboard_and_a_quarter_is_every_second_row_and_column():
    first, second = remaining(Grid(4, 4), 8, 0)[:2]
    assert first.tolist() == [0, 2, 5, 7, 8, 10, 13, 15]
    assert second.tolist() == [1, 3, 4, 6, 9, 11, 12, 14]
    quarters = remaining(Grid(4, 4), 4, 0)[:4].tolist()
    assert quarters == [[0, 2, 8, 10], [5, 7, 13, 15], [1, 3, 9, 11], [4, 6, 12, 14]]


# How many, in which block


def shares(denoiser, ratio, **settings):
    """Sixteenths of the keys that each block keeps."""
    placed = placements(denoiser, ToMeConfig(ratio, "interlace", **settings))
    return [round(16 * placement.share) for _, placement in placed]


@pytest.mark.parametrize(
    "ratio, of_three, of_five",
    [
        (0.5, [4, 4, 16], [6, 6, 6, 6, 16]),
        (0.75, [2, 2, 8], [3, 3, 3, 3, 8]),
        (0.875, [1, 1, 4], [2, 2, 2, 2, 4]),
        (0.9375, [1, 1, 2], [1, 1, 1, 1, 2]),
        (0.0625, [14, 14, 16], [15, 15, 15, 15, 16]),
    ],
)
def test_the_last_block_of_a_unet_keeps_twice_the_average(ratio, of_three, of_five):
    config = Interlace(ratio)
    for parts in (of_three, of_five):  # as many blocks merge in the bundled models, and in Stable Diffusion 1.5
        assert [16 * share for share in config.kept_shares(len(parts), len(parts) - 1)] == parts
    unet = make_unet(**ONE_LEVEL)
    *_, last_up, mid = [block.path for block in find_blocks(unet)]
    assert last_up.startswith("up_blocks") and mid.startswith("mid_block"), "which runs before the up blocks"
    of_unet = shares(unet, ratio)
    assert of_unet[-2] == of_three[-1] and len({*of_unet[:-2], of_unet[-1]}) == 1
    assert set(shares(make_controlnet(), ratio)) == {round(16 * (1 - ratio))}, "a ControlNet has no last block"
    assert set(shares(dit(), ratio)) == {round(16 * (1 - ratio))}


def test_ratio_is_the_mean_over_the_blocks_of_all_levels_that_merge():
    unet = make_unet()
    levels = [block.level for block in find_blocks(unet)]
    assert min(levels) < max(levels)
    parts = shares(unet, 0.75, max_downsample=2)
    assert len(parts) == len(levels) and sorted(parts) == [3] * (len(levels) - 1) + [8]
    assert abs(np.mean(parts) - 4) < 0.5


def test_the_summary_lists_the_keys_of_each_block():
    unet = make_unet(**ONE_LEVEL).apply_tome(method="interlace", ratio=0.75)
    summary = unet.tome_summary(height=16, width=16)
    assert [(block.kept_queries, block.kept_keys) for block in summary.blocks] == [
        (256, keys) for keys in (48, 48, 128, 48)
    ]
    assert "keys and values 48" in str(summary) and "timestep" not in str(summary)
    unet.apply_tome(ratio=0.5, method="interlace")
    assert [block.merges for block in unet.tome_summary(height=16, width=16).blocks] == [("kv",), ("kv",), (), ("kv",)]


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.02])
def test_a_ratio_that_rounds_to_nothing_names_the_smallest_and_changes_nothing(unet, ratio):
    before = traces(unet)
    with pytest.raises(ToMeConfigError, match=rf"ratio={ratio} .*Pass 0, or a ratio above 0\.0\d+") as caught:
        unet.apply_tome(ratio, method="interlace")
    assert traces(unet) == before
    smallest = float(re.search(r"above ([0-9.]+)\.$", str(caught.value))[1])
    with pytest.raises(ToMeConfigError):
        unet.apply_tome(smallest - 1e-4)
    merged = shares(unet, smallest + 1e-4)
    assert sum(merged) < 16 * len(merged)


# A pass


def keys_seen(model, record):
    """Record the keys of each self-attention, and what they would be for all tokens, by the number of the block."""

    def see(layer, given, keys, number):
        record(number, (keys.numpy(), paddle.nn.functional.linear(given[0], layer.weight, layer.bias).numpy()))

    for block in find_blocks(model):
        block.layer.attn1.to_k.register_forward_post_hook(partial(see, number=block.index))


def at(model, timestep, **changes):
    """A pass at a timestep."""
    return run(model, timestep=timestep, **changes)


def test_the_same_timestep_chooses_the_same_tokens_whatever_ran_before(unet):
    unet.apply_tome(method="interlace")
    alone = {timestep: at(unet, timestep) for timestep in TIMESTEPS}
    for timestep in (*reversed(TIMESTEPS), 480, 480, 999):
        np.testing.assert_array_equal(at(unet, timestep), alone[timestep])
    copied = copy.deepcopy(unet)
    np.testing.assert_array_equal(at(copied, 481), alone[481])


def test_other_steps_have_other_errors_and_together_smaller_ones(unet):
    """With the timestep of the model held, what differs between turns is which keys remain."""
    plain = at(unet, 500)
    unet.apply_tome(method="interlace")
    layer = find_blocks(unet)[0].timestep_layer
    errors = []
    for turn in range(TURNS):
        timestep = next(t for t in range(LAST_TIMESTEP) if turn_of(t) == turn)
        layer._tome.forward = lambda layer, *_, **__: type(layer).forward(layer, paddle.to_tensor([500, 500]))
        errors.append(at(unet, timestep) - plain)
    single = np.mean([np.square(error).mean() for error in errors])
    assert len({error.tobytes() for error in errors}) == TURNS // 2, "two of 16 parts remain in its first block"
    assert np.square(np.mean(errors, axis=0)).mean() < single / 4


def test_a_batch_with_timesteps_of_its_own_has_the_turn_of_its_first_row(unet):
    unet.apply_tome(method="interlace")
    assert turn_of(10) != turn_of(700)
    arguments = inputs() | {"timestep": paddle.to_tensor([10, 700])}
    with paddle.no_grad():
        both = unet(**arguments).sample.numpy()
    np.testing.assert_allclose(both[:1], at(unet, 10)[:1], atol=1e-5)


def test_the_summary_reports_a_batch_with_timesteps_of_its_own(unet):
    unet.apply_tome()
    arguments = inputs()
    for timesteps, is_reported in (([10], False), ([10, 10], False), ([10, 700], True), ([700], False)):
        unet(**{**arguments, "timestep": paddle.to_tensor(timesteps)})
        assert ("different timesteps" in str(unet.tome_summary(height=16, width=16))) == is_reported


def test_both_halves_of_guidance_have_the_same_turn_with_one_timestep(plans):
    """VQ-Diffusion passes a single number for both, and its blocks get it."""
    tiny = ZOO["VQDiffusionPipeline"]()
    tiny.pipe.apply_tome(method="interlace")
    generate(tiny)
    assert plans and all(plan.choice.positions.shape[0] == 1 for plan in plans)


# The timestep


@pytest.mark.parametrize("dtype", ["int64", "int32", "float32", "float64", "float16"])
@pytest.mark.parametrize("shape", [[], [1], [3]], ids=str)
def test_timesteps_of_any_type_are_rounded(dtype, shape):
    table = constants(turn_table())
    for timestep in (0, 7, 999, 1000):
        number = turn_at(paddle.full(shape, timestep).cast(dtype), table)
        assert number.tolist() == [turn_of(timestep)]
    if dtype.startswith("float"):
        assert turn_at(paddle.full(shape, 481.25).cast(dtype), table).tolist() == [turn_of(481)]
        assert turn_at(paddle.full(shape, 481.75).cast(dtype), table).tolist() == [turn_of(482)]
    assert turn_at(paddle.full(shape, -3).cast(dtype), table).tolist() == [turn_of(0)]
    assert turn_at(paddle.full(shape, 2000).cast(dtype), table).tolist() == [turn_of(LAST_TIMESTEP)]


def spacings():
    for steps in (10, 20, 25, 50):
        yield (np.arange(steps) * (1000 // steps)).round()[::-1] + 1.0  # leading
        yield np.round(np.arange(1000, 0, -1000 / steps)) - 1.0  # trailing
        yield np.linspace(0, 999, steps).round()[::-1]


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_usual_steps_have_all_turns(parts):
    """In twice as many successive steps as there are turns, almost every part has its turn, and none many in a row."""
    turns = TURNS // parts
    for steps in spacings():
        numbers = [turn_of(int(timestep)) % turns for timestep in steps]
        length = min(2 * turns, len(numbers))
        seen = [len(set(numbers[begin : begin + length])) for begin in range(len(numbers) - length + 1)]
        assert np.mean(seen) > 0.8 * min(turns, length)
        assert all(len(set(numbers[begin : begin + 5])) > 1 for begin in range(len(numbers) - 4))


def test_a_model_whose_timestep_is_not_seen_takes_the_first_turn_and_says_so():
    unet = make_unet(class_embed_type="timestep")  # its layer embeds labels too
    unet.apply_tome(method="interlace")
    assert "timestep cannot be read" in str(unet.tome_summary(height=16, width=16))
    seen = {}
    keys_seen(unet, seen.setdefault)
    with paddle.no_grad():
        unet(**inputs(), class_labels=paddle.to_tensor([1, 2]))
    (block, _), *_ = placements(unet, ToMeConfig())
    keys, of_all = seen[block.index]
    positions = interlaced(16, 16, shares(unet, 0.75)[0], offset_of(block.index))
    np.testing.assert_allclose(keys, of_all[:, positions], atol=1e-5)
    unet.apply_tome(method="todo")
    assert "timestep" not in str(unet.tome_summary(height=16, width=16))


# Videos


@pytest.mark.parametrize("number", [None, 5])
def test_frames_of_one_sequence_have_a_turn_each(number):
    grid, frames, config = Grid(6, 8), 3, Interlace(0.75)
    turn = Turn(None if number is None else paddle.to_tensor([number]), frames)
    kept = config.count_kept(grid, 0.25)
    x = noise(2, frames * grid.tokens, 4)
    table = constants(config.constants(grid, kept, 1))
    choice = config.choose(x.reshape([-1, grid.tokens, 4]), table, kept, turn)
    plan = MergePlan(choice, grid.tokens, frames)
    positions = [
        frame * grid.tokens + position
        for frame in range(frames)
        for position in interlaced(*grid, 4, (number or 0) + offset_of(1) + frame)
    ]
    np.testing.assert_array_equal(merge(x, plan).numpy(), x.numpy()[:, positions])
    assert plan.kept == len(positions) == frames * kept


# tomesd's random dst


def dst_of(unet, timestep, plans, **settings):
    unet.apply_tome(method="tomesd", **settings)
    plans.clear()
    at(unet, timestep)
    return [tuple(plan.choice.positions.numpy()[0, : plan.tokens // 4]) for plan in plans]


def test_random_dst_of_tomesd_are_others_in_each_step_and_equal_for_equal_seeds(unet, plans):
    timesteps = [next(t for t in range(LAST_TIMESTEP) if turn_of(t) == turn) for turn in range(4)]
    chosen = [dst_of(unet, timestep, plans) for timestep in timesteps]
    assert len({tuple(of_blocks) for of_blocks in chosen}) == len(timesteps)
    assert dst_of(unet, timesteps[3], plans) == chosen[3]
    assert dst_of(unet, timesteps[3], plans, seed=1) != chosen[3]
    fixed = [dst_of(unet, timestep, plans, use_rand=False) for timestep in timesteps[:3]]
    assert fixed[0] == fixed[1] == fixed[2]
