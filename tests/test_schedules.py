"""Ratio schedules: the ratio of a pass follows the timestep that the model gets, in eager mode and in exports."""

import json
import shutil
from functools import partial

import numpy as np
import paddle
import pytest
from conftest import draw, in_threads, inputs, make_unet, traces
from ppdiffusers import StableDiffusionControlNetPipeline
from test_transformers import pixart_inputs, sd3_inputs
from zoo.noise import noise
from zoo.parts import controlnet, stable_diffusion, unet
from zoo.transformers import dit, pixart, sd3
from zoo.videos import unet_spatio_temporal

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeExportError, ToMePassError
from ppdiffusers_tome.generation.engine import load_engine
from ppdiffusers_tome.inference import export_pipeline, load_pipeline, read_manifest, unmerged_programs
from ppdiffusers_tome.inference.request import check_request

SCHEDULE = {1.0: 0.7, 0.5: 0.5, 0.1: 0.0}
PAIRS = ((1.0, 0.7), (0.5, 0.5), (0.1, 0.0))
PARTS = [(999, 0.7), (501, 0.7), (500, 0.5), (101, 0.5), (100, 0.0), (0, 0.0)]  # timestep, ratio


@paddle.no_grad()
def run_at(model, *timesteps, **changes):
    """One pass of the tiny UNet at one timestep, or at one for each image."""
    arguments = inputs(**changes)
    return model(
        arguments["sample"], paddle.to_tensor(timesteps), encoder_hidden_states=arguments["encoder_hidden_states"]
    ).sample.numpy()


# Config


@pytest.mark.parametrize("written", [SCHEDULE, PAIRS, [list(pair) for pair in PAIRS], dict(reversed(PAIRS))])
def test_a_schedule_is_a_mapping_or_pairs_in_any_order(written):
    config = ToMeConfig(ratio=written)
    assert config.ratio == PAIRS and config == ToMeConfig(ratio=SCHEDULE) and hash(config)
    assert config.ratios == (0.7, 0.5, 0.0)
    assert config.describe() == "ratio={1.0: 0.7, 0.5: 0.5, 0.1: 0.0}"


@pytest.mark.parametrize(
    ("share", "ratio"), [(1.2, 0.7), (1, 0.7), (0.501, 0.7), (0.5, 0.5), (0.101, 0.5), (0.1, 0), (0, 0)]
)
def test_a_ratio_holds_from_its_share_down_to_the_next(share, ratio):
    assert ToMeConfig(ratio=SCHEDULE, sx=4).at(share) == ToMeConfig(ratio=ratio, sx=4)


def test_parts_cover_the_noise_schedule():
    parts = ToMeConfig(ratio=SCHEDULE).parts
    assert [part.ratio for _, part in parts] == [0.7, 0.5, 0.0]
    np.testing.assert_allclose([length for length, _ in parts], [0.5, 0.4, 0.1])
    assert ToMeConfig(ratio=0.5).parts == [(1.0, ToMeConfig(ratio=0.5))]


@pytest.mark.parametrize("written", [{1.0: 0.5}, {1: 0.5, 0.3: 0.5}])
def test_a_schedule_of_one_ratio_is_that_ratio(written):
    assert ToMeConfig(ratio=written) == ToMeConfig(ratio=0.5)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "starts at share 1"),
        ({0.5: 0.5}, "starts at share 1"),
        ([(1.0, 0.5), (1.0, 0.7)], "each share once"),
        ({1.0: 0.5, 0.0: 0.7}, "0.0 is not a share"),
        ({1.0: 0.5, 1.5: 0.7}, "1.5 is not a share"),
        ({1.0: 0.5, "0.5": 0.7}, "'0.5' is not a share"),
        ({1.0: 0.5, float("nan"): 0.7}, "nan is not a share"),
        ({1.0: 0.5, 0.5: 0.8}, "ratio=0.8 is not allowed"),
        ({1.0: 0.5, 0.5: {1.0: 0.5}}, "is not allowed"),
        ([(1.0, 0.5, 0.7)], "mapping of shares to ratios"),
        ([(1.0, 0.5), 0.7], "mapping of shares to ratios"),
    ],
)
def test_schedules_that_are_not_allowed(written, message):
    with pytest.raises(ToMeConfigError, match=message):
        ToMeConfig(ratio=written)


def test_ratios_of_a_schedule_are_checked_by_the_cells():
    assert ToMeConfig(ratio={1.0: 0.75, 0.5: 0}, match="grid").ratios == (0.75, 0.0)
    with pytest.raises(ToMeConfigError, match="grid"):
        ToMeConfig(ratio={1.0: 0.75, 0.5: 0.5}, match="grid")


def test_where_one_ratio_is_needed_a_schedule_is_an_error():
    with pytest.raises(ToMeConfigError, match="constant ratio is needed"):
        ToMeConfig(ratio=SCHEDULE).removed(256, 64)


def test_a_settings_file_holds_a_schedule(tmp_path):
    config = ToMeConfig(ratio=SCHEDULE, window=8)
    config.save(tmp_path / "config.json")
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["ratio"] == [list(pair) for pair in PAIRS]
    assert ToMeConfig.load(tmp_path / "config.json") == config


# Passes


@pytest.mark.parametrize(("timestep", "ratio"), PARTS)
def test_a_pass_has_the_ratio_of_its_timestep(unet, timestep, ratio):
    plain, before = run_at(unet, timestep), traces(unet)
    expected = run_at(unet.apply_tome(ratio=ratio), timestep)
    unet.apply_tome(ratio=SCHEDULE)
    np.testing.assert_array_equal(run_at(unet, timestep), expected)
    assert np.array_equal(run_at(unet, timestep), plain) == (ratio == 0)
    np.testing.assert_array_equal(run_at(unet.remove_tome(), timestep), plain)
    assert traces(unet) == before


def test_the_order_of_passes_does_not_matter(unet):
    unet.apply_tome(ratio=SCHEDULE)
    first = [run_at(unet, timestep) for timestep, _ in PARTS]
    again = [run_at(unet, timestep) for timestep, _ in reversed(PARTS)]
    for a, b in zip(first, reversed(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_images_follow_the_schedule_from_text_and_from_an_image(pipe, image_pipe):
    """At strength 0.4 image to image only runs the last part, which a counter of steps would take for the first."""
    plain = draw(pipe, steps=4)
    pipe.apply_tome(ratio={1.0: 0.7, 0.5: 0.0})
    assert not np.array_equal(draw(pipe, steps=4), plain)
    image = np.full((1, 64, 64, 3), 0.5, "float32")

    def from_image():
        paddle.seed(0)
        return image_pipe("a fox", image=image, strength=0.4, num_inference_steps=5, output_type="np").images[0]

    late = from_image()
    np.testing.assert_array_equal(late, from_image())
    pipe.apply_tome(ratio=0.7)
    assert not np.array_equal(from_image(), late)
    pipe.remove_tome()
    np.testing.assert_array_equal(from_image(), late)


def test_a_batch_may_mix_timesteps_of_one_ratio_only(unet):
    unet.apply_tome(ratio=SCHEDULE)
    assert np.isfinite(run_at(unet, 900, 600)).all()
    with pytest.raises(ToMePassError, match=r"timesteps of this batch, \[900, 400\]"):
        run_at(unet, 900, 400)
    unet.apply_tome(ratio={1.0: 0.5, 0.6: 0.25, 0.3: 0.5})
    with pytest.raises(ToMePassError, match=r"\[900, 400, 100\]"):
        run_at(unet, 900, 400, 100, batch=3)


def test_threads_have_their_own_timesteps(unet, device_is_restored):
    unet.apply_tome(ratio=SCHEDULE)
    passes = [partial(run_at, unet, timestep) for timestep in (900, 400, 50)]
    expected = [make_pass() for make_pass in passes]
    for results, output in zip(in_threads(passes), expected, strict=True):
        assert len(results) == 4
        for result in results:
            np.testing.assert_allclose(result, output, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "arguments"), [(pixart, pixart_inputs), (sd3, sd3_inputs)], ids=lambda value: value.__name__
)
@paddle.no_grad()
def test_transformers_follow_it_by_keyword(make, arguments):
    model, latents = make(), noise(2, 4, 16, 16)

    def at(timestep):
        return model(latents, **{**arguments(), "timestep": paddle.to_tensor([timestep] * 2)}).sample.numpy()

    plain = at(100)
    model.apply_tome(ratio=0.5)
    merged = at(800)
    model.apply_tome(ratio={1.0: 0.5, 0.5: 0})
    np.testing.assert_array_equal(at(800), merged)
    np.testing.assert_array_equal(at(100), plain)


@pytest.mark.parametrize("make", [dit, unet_spatio_temporal], ids=lambda make: make.__name__)
def test_models_that_do_not_show_a_timestep_are_refused(make):
    model = make()
    before = traces(model)
    with pytest.raises(ToMeConfigError, match=rf"{type(model).__name__} .*pass a constant ratio"):
        model.apply_tome(ratio=SCHEDULE)
    assert traces(model) == before


def test_a_controlnet_has_the_schedule_or_its_own_ratio(controlnet):
    parts = stable_diffusion(unet=make_unet())
    pipe = StableDiffusionControlNetPipeline(**parts, controlnet=controlnet)
    pipe.apply_tome(ratio=SCHEDULE)
    assert controlnet.tome_summary(16, 16).settings == {"ControlNetModel": ToMeConfig(ratio=SCHEDULE).describe()}
    pipe.apply_tome(ratio=SCHEDULE, controlnet={1.0: 0.5, 0.2: 0})
    assert "ratio={1.0: 0.5, 0.2: 0.0}" in str(controlnet.tome_summary(16, 16))
    pipe.apply_tome(ratio=SCHEDULE, controlnet=0.25)
    assert "ratio=0.25" in str(controlnet.tome_summary(16, 16))


def test_the_summary_has_the_first_tokens_and_mean_macs(unet):
    saved = [unet.apply_tome(ratio=ratio).tome_summary(32, 32).saved for ratio in (0.7, 0.5)]
    summary = unet.apply_tome(ratio=SCHEDULE).tome_summary(32, 32)
    assert summary.saved == round(0.5 * saved[0] + 0.4 * saved[1])
    assert (summary.blocks[0].kept, summary.blocks[0].kept_keys) == (369, 256)  # of 1024
    assert "at ratio 0.7, the first of its schedule" in str(summary)


def test_a_block_that_is_called_without_its_model_has_no_ratio(unet):
    unet.apply_tome(ratio=SCHEDULE)
    with pytest.raises(ToMePassError, match="no timestep"):
        unet.down_blocks[0].attentions[0](paddle.randn([1, 32, 16, 16]), paddle.randn([1, 7, 24]))


# Exports


@pytest.fixture
def exported(exported_folder, tmp_path):
    """The tiny pipeline's export, with a schedule over its ratios."""
    folder = tmp_path / "scheduled"
    shutil.copytree(exported_folder, folder)
    change(folder, [[1.0, 0.5], [0.2, 0.0]])
    return folder


def change(folder, schedule):
    data = json.loads((folder / "tome.json").read_text())
    (folder / "tome.json").write_text(json.dumps({**data, "schedule": schedule}))


def request(pipe, ratios, controlnet=True, **settings):
    configs = [ToMeConfig(ratio=ratio, **settings) for ratio in (ratios if isinstance(ratios, list) else [ratios])]
    options = {"image_to_image": True, "merge_map": False, "overwrite": False}
    options |= {"controlnet": controlnet, "format": "paddle"}
    return check_request(lambda: pipe, "/nowhere", configs, [(32, 32)], **options)


def predict(model, timestep):
    latents, text = noise(2, 4, 16, 16), noise(2, 5, model.config.cross_attention_dim, seed=1)
    with paddle.no_grad():
        return model(latents, paddle.to_tensor(timestep), encoder_hidden_states=text).sample.numpy()


def test_the_applied_schedule_is_exported(tiny, exported_folder, tmp_path):
    """With a program for each of its ratios; each pass of the loaded pipeline runs that of its timestep."""
    tiny.apply_tome(ratio={1.0: 0.5, 0.2: 0.25})
    folder = tmp_path / "applied"
    manifest = export_pipeline(
        tiny, folder, sizes=[(32, 32)], image_to_image=True, linked=unmerged_programs(exported_folder), progress=False
    )
    assert read_manifest(folder) == manifest and manifest.ratios == (0.5, 0.25)
    assert manifest.schedule == manifest.default_ratio == ((1.0, 0.5), (0.2, 0.25))
    model = load_pipeline(folder).unet
    assert model.ratio == manifest.schedule
    for timestep in (999, 201, 200, 0):
        np.testing.assert_allclose(predict(model, timestep), predict(tiny.unet, timestep), atol=1e-4)
    tiny.remove_tome()


def test_a_schedule_of_ratios_is_requested_with_plain_programs(tiny):
    requested = request(tiny, SCHEDULE, window=8)
    first, second = (ToMeConfig(ratio=ratio, window=8) for ratio in (0.7, 0.5))
    assert requested.configs == {0.7: (first, first), 0.5: (second, second), 0.0: (None, None)}
    assert requested.schedule == PAIRS
    assert [*request(tiny, [SCHEDULE, 0.25]).configs] == [0.7, 0.5, 0.0, 0.25]
    assert request(tiny, 0.5).schedule is None


def test_a_loaded_pipeline_takes_a_schedule_over_its_ratios(exported_folder):
    model = load_pipeline(exported_folder).unet
    late, early = predict(model, 100), predict(model, 900)
    model.ratio = {1.0: 0, 0.5: 0.5}
    assert model.ratio == ((1.0, 0), (0.5, 0.5))
    np.testing.assert_array_equal(predict(model, 100), late)
    assert not np.array_equal(predict(model, 900), early)
    model = load_pipeline(exported_folder, ratio={1.0: 0.5, 0.5: 0}).unet
    np.testing.assert_array_equal(predict(model, 900), early)
    assert not np.array_equal(predict(model, 100), late)
    with pytest.raises(ToMeConfigError, match=r"ratio=0.25 was not exported, only 0.5, 0"):
        model.ratio = {1.0: 0.5, 0.5: 0.25}
    assert model.ratio == ((1.0, 0.5), (0.5, 0))


def test_engines_draw_at_one_ratio(exported):
    with pytest.raises(ToMeConfigError, match=r"ratio schedule.*--ratio 0.5 0\."):
        load_engine(exported)


def test_only_the_first_of_several_ratios_may_be_a_schedule(tiny):
    with pytest.raises(ToMeConfigError, match="only the first"):
        request(tiny, [0.5, SCHEDULE])


def test_a_controlnet_in_an_export_has_the_schedule_or_one_ratio():
    pipe = StableDiffusionControlNetPipeline(**stable_diffusion(unet=unet()), controlnet=controlnet())
    schedule = {1.0: 0.5, 0.2: 0.25}
    configs = {ratio: ToMeConfig(ratio=ratio) for ratio in (0.5, 0.25)}
    assert request(pipe, schedule).configs == {ratio: (config, config) for ratio, config in configs.items()}
    assert request(pipe, schedule, controlnet=0.5).configs[0.25] == (configs[0.25], configs[0.5])
    with pytest.raises(ToMeExportError, match="can only have the UNet's schedule or a constant ratio"):
        request(pipe, schedule, controlnet={1.0: 0.5, 0.3: 0.25})


@pytest.mark.parametrize("schedule", [[[0.5, 0.7]], [[1.0, 0.5], [0.5, 0.3]], [[1.0, 0.5]], [[0.1, 0], [1.0, 0.5]], 3])
def test_a_damaged_schedule_is_refused(exported, schedule):
    change(exported, schedule)
    with pytest.raises(ToMeExportError, match="damaged"):
        read_manifest(exported)
