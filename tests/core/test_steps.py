"""The first and last steps of an image keep all tokens: which steps, in which models, and what says so."""

from itertools import pairwise

import numpy as np
import paddle
import ppdiffusers
import pytest
from conftest import inputs, make_unet, run, tiny_pipeline
from test_transformers import FAMILIES, draw
from zoo.transformers import dit, pixart, sd3

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.attach import block, outer
from ppdiffusers_tome.families.schedules import timesteps_of
from ppdiffusers_tome.methods.plan import Choice, turn_at
from ppdiffusers_tome.methods.steps import PLAIN_STEPS, PLAIN_STEPS_OF_FLOWS, is_level
from ppdiffusers_tome.methods.turns import turn_table, turns_of
from ppdiffusers_tome.tensors import constants

PLAIN = (1000, 951, 800, 115, 51, 20)
MERGING = (799, 501, 116, 19, 0)
SCHEDULERS = [
    (ppdiffusers.DDIMScheduler, {"clip_sample": False}),
    (ppdiffusers.DDIMScheduler, {"clip_sample": False, "timestep_spacing": "trailing"}),
    (ppdiffusers.PNDMScheduler, {"skip_prk_steps": True}),
    (ppdiffusers.EulerDiscreteScheduler, {}),
    (ppdiffusers.EulerAncestralDiscreteScheduler, {"timestep_spacing": "linspace"}),
    (ppdiffusers.DPMSolverMultistepScheduler, {}),
    (ppdiffusers.DPMSolverMultistepScheduler, {"timestep_spacing": "linspace"}),
    (ppdiffusers.DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
    (ppdiffusers.UniPCMultistepScheduler, {}),
]
STABLE_DIFFUSION = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "timestep_spacing": "leading",
}
GAIN = 1.76  # of a merged pass of `scenes_sd`


@paddle.no_grad()
def at(unet, timestep):
    return unet(**inputs() | {"timestep": timestep}).sample.numpy()


# Which steps


def test_bounds_of_flows_are_the_same_noise_levels():
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    sigmas = np.sqrt(1 / np.cumprod(1 - betas) - 1)
    for timestep, share in zip(PLAIN_STEPS[:3], PLAIN_STEPS_OF_FLOWS[:3], strict=True):
        sigma = sigmas[int(timestep)]
        assert round(1000 * sigma / (1 + sigma)) == share


@pytest.mark.parametrize(("kind", "settings"), SCHEDULERS, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("steps", [8, 10, 15, 20, 25, 30, 40, 50, 100])
def test_usual_schedules_keep_all_tokens_at_both_ends_and_most_of_the_gain(kind, settings, steps):
    timesteps = timesteps_of(kind(**STABLE_DIFFUSION | settings), steps)
    first = sum(timestep >= PLAIN_STEPS.first for timestep in timesteps)
    share = PLAIN_STEPS.count(timesteps) / len(timesteps)
    assert first and PLAIN_STEPS.count(timesteps) - first >= (steps > 8), "at both ends"
    crowds_at_high_noise = "use_karras_sigmas" in settings or (kind is ppdiffusers.PNDMScheduler and steps == 10)
    assert 1 / (share + (1 - share) / GAIN) > (1.34 if crowds_at_high_noise else 1.39), share


def test_a_program_and_a_count_read_bounds_alike():
    for bounds in (PLAIN_STEPS, PLAIN_STEPS_OF_FLOWS):
        for timestep in (*np.arange(0, 1000.25, 0.25), *np.arange(-2, 2, 1 / 64)):
            assert bool(bounds.include(paddle.to_tensor([timestep]))) == bounds.count([timestep])


def test_noise_levels_are_told_apart_by_their_value():
    """¼·log σ of EDM and of Stable Video Diffusion, and no timestep of a schedule but perhaps the last."""
    levels = 0.25 * np.log([0.002, 0.03, 0.5, 2.0, 80.0, 700.0])
    assert is_level(levels).all() and is_level(paddle.to_tensor(levels)).numpy().all()
    assert not is_level(np.array([0, 1, -1, 1.8, 2.5, 17.4, 999.0])).any()
    for level in np.linspace(-1.7, 1.7, 103):
        sigma = np.exp(4 * level)
        assert PLAIN_STEPS.count([level]) == (sigma >= 5.11 or 0.138 <= sigma <= 0.378), sigma
    assert not PLAIN_STEPS_OF_FLOWS.count([0.5]), "there a share of half a thousandth"


def test_noise_levels_take_turns():
    """Successive levels of a schedule, which as timesteps would all be rounded to the same three numbers."""
    levels = 0.25 * np.log(np.geomspace(80, 0.002, 25))
    turns = turns_of(levels)
    assert len(set(turns)) > 8 and sum(a % 4 == b % 4 for a, b in pairwise(turns)) <= 8
    table = constants(turn_table())
    assert [turn_at(paddle.to_tensor([level]), table).tolist()[0] for level in levels.astype("float32")] == turns
    assert turn_at(paddle.to_tensor([0.5]), table, is_flow=True).tolist() == turns_of([0.5], is_flow=True)


# A pass


def test_plain_steps_are_those_of_the_plain_model_bit_by_bit():
    model = make_unet()
    plain = {timestep: run(model, timestep=timestep) for timestep in PLAIN + MERGING}
    model.apply_tome()
    for timestep in PLAIN:
        np.testing.assert_array_equal(run(model, timestep=timestep), plain[timestep])
    merged = {timestep: run(model, timestep=timestep) for timestep in MERGING}
    assert all(np.abs(merged[timestep] - plain[timestep]).max() > 1e-4 for timestep in MERGING)
    model.apply_tome(merge_steps="all")
    for timestep in MERGING:
        np.testing.assert_array_equal(run(model, timestep=timestep), merged[timestep])
    assert all(np.abs(run(model, timestep=timestep) - plain[timestep]).max() > 1e-4 for timestep in PLAIN)


@pytest.mark.parametrize("kind", [float, np.float32, "float16", "int64"])
@pytest.mark.parametrize("shape", [[], [1], [2]], ids=str)
def test_timesteps_of_any_type_and_shape(unet, kind, shape):
    def timestep(value):
        if isinstance(kind, str):
            return paddle.full(shape, value).cast(kind)
        return paddle.to_tensor(np.full(shape, value, "float32"))

    plain = {value: at(unet, timestep(value)) for value in (900, 500)}
    unet.apply_tome()
    np.testing.assert_array_equal(at(unet, timestep(900)), plain[900])
    assert np.abs(at(unet, timestep(500)) - plain[500]).max() > 1e-4


def test_a_batch_with_timesteps_of_its_own_follows_its_first_row(unet):
    mixed = paddle.to_tensor([900, 500]), paddle.to_tensor([500, 900])
    plain = [at(unet, timesteps) for timesteps in mixed]
    unet.apply_tome()
    np.testing.assert_array_equal(at(unet, mixed[0]), plain[0])
    assert np.abs(at(unet, mixed[1]) - plain[1]).max() > 1e-4


@pytest.mark.parametrize(
    ("make", "first", "middle", "last"),
    [(dit, 900, 500, 50), (pixart, 900, 500, 50), (sd3, 836, 800, 150)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_transformers_read_their_own_kind_of_timestep(make, first, middle, last, monkeypatch):
    """DiT passes it to each block; that of Stable Diffusion 3 is a flow's, whose plain steps are others."""
    model = make()

    def at(timestep):
        arguments = FAMILIES[make]() | {"timestep": paddle.to_tensor([timestep] * 2)}
        monkeypatch.setitem(FAMILIES, make, lambda: arguments)
        return draw(make, model)

    plain = {timestep: at(timestep) for timestep in (first, middle, last)}
    model.apply_tome()
    for timestep in (first, last):
        np.testing.assert_array_equal(at(timestep), plain[timestep])
    assert np.abs(at(middle) - plain[middle]).max() > 1e-4


def test_a_pass_reads_its_timestep_once(monkeypatch):
    """On a GPU reading it waits for the device."""
    read, read_timestep = [], outer.read_timestep
    for module in (outer, block):
        monkeypatch.setattr(module, "read_timestep", lambda *given: read.append(given) or read_timestep(*given))
    for make in (make_unet, dit):
        model = make().apply_tome()
        run(model, timestep=500) if make is make_unet else draw(make, model)
        assert len(read) == 1, make.__name__
        read.clear()


def test_steps_are_plain_in_every_thread_and_copy_and_after_other_passes(unet):
    plain = run(unet, timestep=900)
    unet.apply_tome()
    run(unet, timestep=500)
    np.testing.assert_array_equal(run(unet, timestep=900), plain)
    unet.apply_tome(merge_steps="all")
    assert np.abs(run(unet, timestep=900) - plain).max() > 1e-4
    unet.apply_tome()
    np.testing.assert_array_equal(run(unet, timestep=900), plain)


def test_a_choice_or_all_tokens_by_a_condition():
    choice = Choice(paddle.to_tensor([[0, 2, 5], [1, 3, 4]]))
    assert choice.or_all(paddle.to_tensor([False]), 6).positions.tolist() == choice.positions.tolist()
    assert choice.or_all(paddle.to_tensor([True]), 6).positions.tolist() == 2 * [list(range(6))]


# The setting


def test_the_setting_is_that_of_interlace_alone():
    assert ToMeConfig().has_plain_steps and not ToMeConfig(merge_steps="all").has_plain_steps
    for method in ("todo", "tomesd"):
        assert not ToMeConfig(method=method).has_plain_steps
        with pytest.raises(ToMeConfigError, match=r"merge_steps='all'.*interlace"):
            ToMeConfig(method=method, merge_steps="all")
    for value in ("first", None, 3, True):
        with pytest.raises(ToMeConfigError, match=r"merge_steps=.*middle.*all"):
            ToMeConfig(merge_steps=value)


def test_the_setting_is_kept_in_files_and_words(tmp_path):
    config = ToMeConfig(0.5, merge_steps="all")
    config.save(tmp_path / "all.json")
    assert ToMeConfig.load(tmp_path / "all.json") == config
    assert config.describe() == "ratio=0.5, merge_steps='all'" and "merge_steps" not in ToMeConfig().describe()


# The summary


def test_the_summary_counts_plain_steps_and_what_an_image_saves():
    pipe = tiny_pipeline(scheduler=ppdiffusers.DDIMScheduler(**STABLE_DIFFUSION, clip_sample=False))
    summary = pipe.apply_tome().tome_summary(steps=20)
    assert (summary.steps, summary.plain_steps, summary.plain) == (20, 6, PLAIN_STEPS)
    assert summary.saved_share_of_image == pytest.approx(0.7 * summary.saved_share)
    assert f"6 of 20 steps keep all tokens, so {summary.saved_share_of_image:.1%} of an image" in str(summary)
    assert pipe.tome_summary().steps == 50, "by default"
    everywhere = pipe.apply_tome(merge_steps="all").tome_summary(steps=20)
    assert (everywhere.plain, everywhere.plain_steps) == (None, 0) and "keep all tokens" not in str(everywhere)
    assert everywhere.saved_share_of_image == everywhere.saved_share == summary.saved_share
    for wrong in (0, 2.5, True):
        with pytest.raises(ToMeConfigError, match="steps="):
            pipe.tome_summary(steps=wrong)


def test_the_summary_of_a_model_has_no_schedule_and_says_what_is_plain(unet):
    (note,) = unet.apply_tome().tome_summary(16, 16).notes
    assert "first and last steps of an image keep all tokens" in note
    assert not unet.apply_tome(merge_steps="all").tome_summary(16, 16).notes
    assert not unet.apply_tome(method="todo").tome_summary(16, 16).notes
