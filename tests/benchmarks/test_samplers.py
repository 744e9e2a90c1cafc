"""benchmarks/samplers.py: which steps of which settings were measured. Measuring them takes hours."""

import numpy as np
import paddle
import pytest
import samplers
from lab.arm import read_config
from lab.result_files import read_json

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.methods.steps import PLAIN_STEPS, PlainSteps


@pytest.fixture(scope="module")
def result():
    return read_json(samplers.RESULT)


def test_committed_result_has_the_settings_and_arms_of_the_script(result):
    assert [entry["key"] for entry in result["settings"]] == [*samplers.SETTINGS]
    for entry in result["settings"]:
        setting = samplers.SETTINGS[entry["key"]]
        assert samplers.Setting(*(entry[name] for name in samplers.Setting._fields)) == setting
        arms = samplers.arms_of(setting)
        assert [arm["name"] for arm in entry["arms"]] == [arm.name for arm in arms]
        for measured, arm in zip(entry["arms"], arms, strict=True):
            timesteps = samplers.timesteps_of(setting, round(arm.steps * setting.steps))
            own = PLAIN_STEPS if arm == samplers.DEFAULT else arm.plain
            plain = len(timesteps) if arm.config is None else 0 if own is None else own.count(timesteps)
            assert (measured["passes"], measured["plain"]) == (len(timesteps), plain)
            merging = measured["merging"] and read_config(measured["merging"]).settings()
            assert merging == (arm.config and arm.config.settings())
            assert len(measured["psnr"]) == len(measured["largest_change"]) == samplers.COUNT


def test_the_profile_is_nearer_than_what_is_as_fast(result):
    """In every setting of the four, by the mean and by the worst image: this is what decided it."""
    for entry in result["settings"]:
        arms = {arm["name"]: np.array(arm["psnr"]) for arm in entry["arms"]}
        if entry["key"] in samplers.FOUR:
            for other in (samplers.HALF, samplers.FEWER):
                assert arms[samplers.DEFAULT.name].mean() > arms[other.name].mean() + 3
                assert arms[samplers.DEFAULT.name].min() > arms[other.name].min()


def test_the_report_has_a_table_for_each_setting(result):
    text = samplers.report(result)
    assert all(setting.title in text for setting in samplers.SETTINGS.values())
    assert text.count(f"| {samplers.DEFAULT.name} |") == len(samplers.SETTINGS)


def test_the_gain_of_an_image_follows_from_its_passes():
    passes = {"plain": [4.0, 8.0], "interlace 0.75, merge_steps='all'": [2.0, 4.0]}
    timing = {"passes": {"onnxruntime": passes}}
    merging = ToMeConfig(merge_steps="all").settings()
    half = {"merging": merging, "passes": 20, "plain": 10}
    assert samplers.image_gain(timing, {"passes": 20}, half) == pytest.approx(4 / 3)
    assert samplers.image_gain(timing, {"passes": 20}, half | {"plain": 0}) == 2
    assert samplers.image_gain(timing, {"passes": 20}, {"merging": None, "passes": 10}) == 2
    own = {"merging": ToMeConfig().settings(), "passes": 20, "plain": 10}
    passes["interlace 0.75"] = passes["plain"]
    assert samplers.image_gain(timing, {"passes": 20}, own) == 1


def test_an_arm_with_steps_of_its_own_switches_programs():
    class UNet:
        config, dtype, ratio = {}, paddle.float32, None

        def __call__(self, sample, timestep):
            return self.ratio

    switched = samplers.Switched(UNet(), 0.75, PlainSteps(800, 20, 115))
    ratios = [switched(None, paddle.to_tensor(timestep)) for timestep in (951, 800, 799.5, 501, 115, 51, 1)]
    assert ratios == [0, 0, 0.75, 0.75, 0, 0, 0.75]


def test_a_thing_that_changes_is_seen_and_noise_is_not():
    plain = np.full([64, 64, 3], 0.5, "float32")
    noisy = plain + np.random.RandomState(0).standard_normal(plain.shape).astype("float32") * 0.05
    assert samplers.largest_change(noisy, plain) < samplers.CHANGED / 3
    other = plain.copy()
    other[40:60, 8:28] += 0.4  # 20 px square
    assert samplers.largest_change(other, plain) > samplers.CHANGED
    assert samplers.psnr(plain, plain) == 120 and 10 < samplers.psnr(other, plain) < 20


def test_images_of_one_setting_share_prompts_and_noise_and_have_files_of_their_own():
    setting = samplers.FOUR["dpm-7.5"]
    arms = (samplers.PLAIN, *samplers.arms_of(setting))
    files = {samplers.image_file(setting, arm, number) for arm in arms for number in range(samplers.COUNT)}
    assert len(files) == len(arms) * samplers.COUNT
