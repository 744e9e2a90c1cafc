"""The user interface, with the bundled text-to-image and image-to-image pipelines."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import paddle
import pytest
from conftest import draw as draw_image
from conftest import load_bundled, make_unet, run, tiny_pipeline
from ppdiffusers import StableDiffusionPipeline
from ppdiffusers.models.modeling_utils import ModelMixin
from skimage.metrics import peak_signal_noise_ratio

import ppdiffusers_tome
from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeMixin
from ppdiffusers_tome.attach.attach import attached_configs, config_of
from ppdiffusers_tome.methods import METHODS, Tomesd

draw = partial(draw_image, size=32, steps=1)


def ratios(target):
    return [config and config.ratio for _, config in attached_configs(target)]


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_precision_weights_on_the_cpu_are_a_warning(half, recwarn):
    """Not an error, because they may be moved to a GPU later."""
    pipe = tiny_pipeline()
    pipe.text_encoder.to(dtype=half)
    pipe.apply_tome(ratio=0).remove_tome()
    assert not recwarn
    with pytest.warns(UserWarning, match=rf"text_encoder \(CLIPTextModel\) .*{half}.*paddle_dtype=paddle.float32"):
        pipe.apply_tome(ratio=0.5)
    assert pipe.unet.tome_summary().blocks
    pipe.unet.to(dtype=half)
    with pytest.warns(UserWarning, match=rf"UNet2DConditionModel .*{half}.* GPU") as warned:
        pipe.unet.apply_tome(ratio=0.5)
    assert warned[0].filename == __file__
    with pytest.raises(RuntimeError, match=half):
        pipe("a fox", height=32, width=32, num_inference_steps=1)


def test_functions_and_methods_merge_alike(pipe):
    plain = draw(pipe)
    assert pipe.apply_tome(ratio=0.5) is pipe
    expected = draw(pipe)
    assert np.abs(expected - plain).max() > 1e-3
    for apply in (
        lambda: pipe.apply_tome(0.5),
        lambda: pipe.unet.apply_tome(ratio=0.5),
        lambda: ppdiffusers_tome.apply_tome(pipe, 0.5),
        lambda: ppdiffusers_tome.apply_tome(pipe.unet, ratio=0.5),
    ):
        pipe.remove_tome()
        apply()
        np.testing.assert_array_equal(draw(pipe), expected)
    for remove in (pipe.remove_tome, pipe.unet.remove_tome, lambda: ppdiffusers_tome.remove_tome(pipe)):
        pipe.apply_tome()
        remove()
        np.testing.assert_array_equal(draw(pipe), plain)


def test_settings_after_ratio_are_keyword_only(pipe):
    with pytest.raises(TypeError, match="positional"):
        pipe.apply_tome(0.5, 2)


def test_settings_file_in_place_of_settings(pipe, tmp_path):
    path, config = tmp_path / "tome_config.json", ToMeConfig(0.25, "tomesd", seed=7)
    config.save(path)
    for source in (path, str(path), config):
        assert config_of(pipe.remove_tome().apply_tome(config=source).unet) == config
    path.write_text("{}")
    with pytest.raises(ToMeConfigError, match="not a settings file"):
        pipe.apply_tome(config=path)
    assert config_of(pipe.unet) == config, "an error changes nothing"


def test_a_setting_beside_a_config_wins_whatever_its_value(pipe):
    config = ToMeConfig(0.7, "tomesd", sx=4, seed=3, merge_mlp=True)
    given = {"sx": 2, "seed": 0, "merge_mlp": False}  # the defaults
    for ratio in (0.5, 0.4):
        assert config_of(pipe.apply_tome(ratio, config=config, **given).unet) == ToMeConfig(ratio, "tomesd")
        with pipe.remove_tome().tome(ratio, config=config):
            assert config_of(pipe.unet) == replace(config, ratio=ratio)
    with pipe.tome(config=config, sx=2):
        assert config_of(pipe.unet) == replace(config, sx=2)


def test_a_method_brings_its_defaults_and_a_setting_that_is_passed_wins(pipe):
    for name in METHODS:
        assert config_of(pipe.apply_tome(method=name).unet) == ToMeConfig(method=name)
        with pipe.tome(method=name, min_tokens=4):
            assert config_of(pipe.unet) == ToMeConfig(method=name, min_tokens=4)
    assert config_of(pipe.apply_tome(method="todo", sx=4).unet).effective_ratio == 0.875
    config = ToMeConfig(method="todo", sx=4)
    assert config_of(pipe.apply_tome(config=config, method="tomesd").unet) == Tomesd(sx=4)
    assert config_of(pipe.apply_tome(0, config=ToMeConfig(method="todo")).unet) == ToMeConfig(0, "todo")


def test_the_ratio_of_a_file_stays_beside_a_method(pipe, tmp_path):
    path = tmp_path / "tome_config.json"
    for ratio in (0.5, 0.75):
        ToMeConfig(ratio).save(path)
        for config in (path, ToMeConfig(ratio)):
            for method in ("interlace", "todo", "tomesd"):
                assert config_of(pipe.apply_tome(config=config, method=method).unet) == ToMeConfig(ratio, method)
    path.write_text('{"format": "ppdiffusers_tome.config", "version": 2, "settings": {"min_tokens": 9}}')
    assert config_of(pipe.apply_tome(config=path, method="tomesd").unet).effective_ratio == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_token": 8}, "'min_token' .*mean min_tokens"),
        ({"config": {"ratio": 0.5}}, "config={'ratio': 0.5} .*ToMeConfig, or the path"),
        ({"config": 0.5}, "config=0.5"),
        ({"method": "tomesd", "merge_attn": "kv"}, "merge_attn='kv' .*True or False"),
        ({"method": "todo", "ratio": 0.6}, "ratio=0.6 .*method='todo'"),
        ({"controlnet": 2}, "controlnet=2"),
    ],
)
def test_a_setting_that_is_not_allowed_is_an_error_and_changes_nothing(pipe, settings, message):
    """What is not allowed is in test_config.py."""
    with pytest.raises(ToMeConfigError, match=message):
        pipe.apply_tome(**settings)
    with pytest.raises(ToMeConfigError, match=message), pipe.tome(**settings):
        pass
    assert config_of(pipe.unet) is None


def test_grids_below_min_tokens_stay_plain(pipe):
    """Level 1 has 64 tokens at 32 px and 256 at 64 px, level 2 a quarter of these."""
    plain, merged = draw(pipe), {}
    for smallest in (64, 65):
        with pipe.tome(ratio=0.5, min_tokens=smallest):
            merged[smallest] = draw(pipe)
    np.testing.assert_array_equal(merged[65], plain)
    assert np.abs(merged[64] - plain).max() > 1e-3
    with pipe.tome(ratio=0.5, method="tomesd"):
        of_level_1 = draw(pipe)
    with pipe.tome(ratio=0.5, method="tomesd", max_downsample=2, min_tokens=64):
        np.testing.assert_array_equal(draw(pipe), of_level_1)
        summary = pipe.tome_summary(height=32, width=32)
        assert {(block.level, block.is_below_min_tokens) for block in summary.blocks} == {(1, False), (2, True)}
        assert str(summary).count("plain (min_tokens)") == sum(block.is_below_min_tokens for block in summary.blocks)
        assert not any(block.is_below_min_tokens for block in pipe.tome_summary(height=64, width=64).blocks)


# with pipe.tome(...)


def test_the_size_of_a_summary_is_what_its_numbers_say(pipe):
    pipe.apply_tome(ratio=0.5)
    expected = pipe.tome_summary(64, 64)
    assert pipe.tome_summary(np.int64(64), np.int32(64)) == expected and not expected.notes
    for one in ({"height": 64}, {"width": 64}):
        with pytest.raises(ToMeConfigError, match="both height and width"):
            pipe.tome_summary(**one)
    for wrong in (64.0, "64", True, np.True_, 0, None):
        with pytest.raises(ToMeConfigError):
            pipe.tome_summary(64, wrong)
    with pytest.raises(ToMeConfigError, match="frames=0"):
        pipe.tome_summary(64, 64, frames=np.int64(0))
    note, _ = pipe.unet.tome_summary(512, 512).notes
    assert note == "the size of a model is in latent pixels, here 512x512; that of a pipeline in pixels"
    assert len(pipe.unet.tome_summary().notes) == 1


def test_context_restores_earlier_settings(pipe):
    with pipe.tome(ratio=0.6, max_downsample=2) as inside:
        assert inside is pipe and ratios(pipe) == [0.6]
        with pipe.unet.tome(ratio=0.3):
            assert ratios(pipe) == [0.3]
        assert ratios(pipe) == [0.6]
        assert attached_configs(pipe)[0][1].max_downsample == 2
    assert ratios(pipe) == [None]


def test_context_restores_after_an_exception_or_a_change_inside(pipe):
    pipe.apply_tome(ratio=0.25)
    expected = draw(pipe)
    with pytest.raises(KeyError), pipe.tome(ratio=0.6):
        raise KeyError
    assert ratios(pipe) == [0.25]
    with pipe.tome(ratio=0.6):
        pipe.remove_tome()
        assert ratios(pipe) == [None]
    assert ratios(pipe) == [0.25]
    with pytest.raises(ToMeConfigError, match="ratio"), pipe.tome(ratio=6):
        pytest.fail("not reached")
    assert ratios(pipe) == [0.25]
    np.testing.assert_array_equal(draw(pipe), expected)


def test_context_restores_a_model_that_was_replaced_inside(pipe):
    first, second = pipe.unet, copy.deepcopy(pipe.unet)
    plain = draw(pipe)
    try:
        with pipe.tome(ratio=0.6):
            pipe.unet = second
        np.testing.assert_array_equal(draw(pipe), plain)
    finally:
        pipe.unet = first
    np.testing.assert_array_equal(draw(pipe), plain)


# State


def test_two_pipelines_do_not_share_state(pipe):
    other = load_bundled()
    plain = draw(other)
    pipe.apply_tome(0.5)
    np.testing.assert_array_equal(draw(other), plain)
    other.apply_tome(0.75)
    assert ratios(pipe) == [0.5] and ratios(other) == [0.75]


# The class


def test_methods_are_on_pipelines_and_models_through_the_mixin():
    for name in ("apply_tome", "remove_tome", "tome", "tome_summary"):
        assert getattr(StableDiffusionPipeline, name) is getattr(ToMeMixin, name) is getattr(ModelMixin, name)
    for name in ("apply_tome", "remove_tome"):  # in place of those of ppdiffusers
        assert getattr(paddle.nn.Layer, name) is getattr(ToMeMixin, name)
    assert not hasattr(paddle.nn.Linear, "tome")  # a name that a model's own sublayer may have


def test_mixin_in_a_users_class():
    class Wrapper(ToMeMixin, paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.inner = make_unet()

    wrapper = Wrapper()
    plain = run(wrapper.inner)
    with wrapper.tome(0.5):
        assert np.abs(run(wrapper.inner) - plain).max() > 1e-4
    np.testing.assert_array_equal(run(wrapper.inner), plain)


def pairs_of(plan):
    """Each token of a batch that merges, and the one that it merges into, by image and position."""
    kept, (positions, targets, _) = plan.choice.positions.numpy(), (x.numpy() for x in plan.choice.merging)
    return {
        (image, int(token), int(kept[image, target]))
        for image in range(len(kept))
        for token, target in zip(positions[image], targets[image], strict=True)
    }


def test_near_equal_inputs_merge_differently_in_a_few_pairs(image_pipe, plans):
    """Arrays are not rounded to 8 bits like PIL images: the claim on nearly equal inputs in docs/api.md."""
    y, x = np.mgrid[0:64, 0:64] / 64
    waves = np.stack(
        [0.5 + 0.4 * np.sin(7 * x + 3 * y), 0.5 + 0.4 * np.cos(5 * y - 2 * x), 0.2 + 0.6 * x * y], axis=-1
    )
    arguments = {"strength": 0.5, "num_inference_steps": 4, "guidance_scale": 2.0, "output_type": "np"}

    def generate(image):
        paddle.seed(0)
        return image_pipe("a 3d render of fox", image=image[None].astype("float32"), **arguments).images[0]

    inputs = waves, np.round(255 * waves) / 255
    plain, merged, pairs = [generate(image) for image in inputs], [], []
    with image_pipe.tome(ratio=0.5, method="tomesd"):
        for image in inputs:
            plans.clear()
            merged.append(generate(image))
            pairs.append([pairs_of(plan) for plan in plans])
    different = [len(exact - rounded) / len(exact) for exact, rounded in zip(*pairs, strict=True)]
    assert 0 < max(different) < 0.1
    psnr = [peak_signal_noise_ratio(*images, data_range=1) for images in (plain, merged)]
    assert 35 < psnr[1] < psnr[0]
