import json

import numpy as np
import pytest

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeError
from ppdiffusers_tome.config import METHODS, TOMESD_SETTINGS, method_name, parse_settings
from ppdiffusers_tome.evaluation.tuning.search import TODO as TODO_SETTINGS

TODO = {**TODO_SETTINGS, "ratio": 0.75}


def test_defaults():
    config = ToMeConfig()
    assert vars(config) == {
        "ratio": 0.5,
        "max_downsample": None,
        "sx": 2,
        "sy": 2,
        "use_rand": True,
        "seed": 0,
        "window": 16,
        "proportional": True,
        "match": "similarity",
        "merge_attn": "asymmetric",
        "merge_crossattn": False,
        "merge_mlp": False,
        "min_tokens": 0,
    }


NOT_ALLOWED = {  # of each setting: other types, and the values next to the limits
    "ratio": (-0.1, 0.76, 1, float("nan"), float("inf"), "0.5", None, True, {1.0: 0.6, 0.5: 0.4}),
    "max_downsample": (0, 3, 2.0, "2", True),
    "sx": (0, -2, 2.0, "2", None),
    "sy": (0, -2, 2.0, "2", None),
    "use_rand": (1, "no", None),
    "seed": (-1, 2**64, 0.5, False),
    "window": (0, -2, 8.0, True),
    "proportional": (1, None),
    "match": ("cells", None),
    "merge_attn": ("keys", "alone", None, 1.5),
    "merge_crossattn": (0, None),
    "merge_mlp": ("yes", None),
    "min_tokens": (-1, 1.5, "64", True, None),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NOT_ALLOWED.items() for value in values]
)
def test_a_value_that_is_not_allowed_is_an_error_that_names_it(name, value):
    with pytest.raises(ToMeConfigError) as caught:
        ToMeConfig(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)


def test_every_setting_is_checked():
    assert NOT_ALLOWED.keys() == vars(ToMeConfig()).keys()


def test_the_error_names_what_is_allowed():
    with pytest.raises(ToMeConfigError, match=r"seed=-1 .* from 0 to 2\*\*64 - 1, or None"):
        ToMeConfig(seed=-1)


def test_config_error_is_a_value_error_and_a_tome_error():
    with pytest.raises(ValueError, match="ratio"):
        ToMeConfig(ratio=2)
    with pytest.raises(ToMeError, match="ratio"):
        ToMeConfig(ratio=2)


@pytest.mark.parametrize(("sx", "sy"), [(2, 2), (4, 4), (2, 3), (3, 2), (1, 2), (3, 3), (1, 1), (7, 11)])
def test_maximum_ratio(sx, sy):
    largest = 1 - 1 / (sx * sy)
    assert ToMeConfig(ratio=largest, sx=sx, sy=sy).ratio == largest
    with pytest.raises(ToMeConfigError, match=rf"sx={sx}, sy={sy}"):
        ToMeConfig(ratio=largest + 1e-6, sx=sx, sy=sy)


def test_no_layer_to_merge_is_rejected():
    with pytest.raises(ToMeConfigError, match="merge_attn, merge_crossattn and merge_mlp are all False"):
        ToMeConfig(merge_attn=False)


@pytest.mark.parametrize(("sx", "sy", "named"), [(2, 2, 0.75), (3, 3, 0.888889), (7, 11, 0.987013)])
def test_cells_decide_the_ratio_and_the_error_names_it(sx, sy, named):
    with pytest.raises(ToMeConfigError, match=rf"ratio=0.5 .* match='grid'.* = {named} for sx={sx}, sy={sy}, or 0"):
        ToMeConfig(sx=sx, sy=sy, match="grid")
    assert ToMeConfig(named, sx=sx, sy=sy, match="grid").ratio == 1 - 1 / (sx * sy)
    assert ToMeConfig(0, sx=sx, sy=sy, match="grid").ratio == 0
    assert ToMeConfig(named, sx=sx, sy=sy).removed(99, 9) <= 90


@pytest.mark.parametrize(("sx", "sy"), [(2, 2), (4, 2), (1, 2)])
def test_asymmetric_ratios_cost_as_much_as_equal_ones(sx, sy):
    """Queries times keys, at every ratio; keys merge further until cells stop them, which the largest ratio does."""
    largest, dst = 1 - 1 / (sx * sy), 400 // (sx * sy)
    for ratio in np.linspace(0, largest, 21):
        config = ToMeConfig(ratio, sx=sx, sy=sy, merge_attn="asymmetric")
        queries, keys = config.attention_ratios
        assert (1 - queries) * (1 - keys) == pytest.approx((1 - config.ratio) ** 2)
        assert 0 <= queries <= ratio + 1e-12 and ratio - 1e-12 <= keys <= largest
        assert 1 - keys == pytest.approx((1 - queries) ** 5) or keys == largest
        assert config.removed(400, dst) == int(400 * queries + 1e-9)
        assert config.removed(400, dst, keys=True) == int(400 * keys + 1e-9)
        assert config.symmetric().attention_ratios == (config.ratio, config.ratio)
    assert (queries, keys) == pytest.approx((largest, largest))
    for merge_attn in (True, "kv", False):
        config = ToMeConfig(0.5, merge_attn=merge_attn, merge_mlp=True)
        assert config.attention_ratios == (0.5, 0.5) and config.symmetric() is config


def test_cells_take_remainders_with_them():
    """A grid of 7×9 tokens has 3·4 cells of 2×2, and keeps a token of each."""
    assert ToMeConfig(0.75, match="grid").removed(63, 12) == 51 > ToMeConfig(0.75).removed(63, 12)
    assert ToMeConfig(0.75, match="grid").removed(5, 0) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "default"),
        ({"ratio": 0.7, "seed": 3}, "default"),
        ({"merge_attn": True, "window": 8}, "symmetric, windows of 8"),
        (TOMESD_SETTINGS, "tomesd"),
        ({"merge_attn": "kv", "sx": 4, "window": None}, "keys and values, 4×2 cells, whole grid"),
        ({**TODO, "window": 8}, "ToDo"),
        ({**TODO, "use_rand": True}, "ToDo, random dst"),
        ({**TODO, "merge_attn": "asymmetric"}, "ToDo, asymmetric"),
        ({"merge_attn": False, "merge_mlp": True}, "default, not around self-attention, merge_mlp=True"),
        (
            {"use_rand": False, "max_downsample": 2, "proportional": False, "min_tokens": 64},
            "default, up to level 2, fixed dst, not proportional, from 64 tokens",
        ),
    ],
)
def test_method_in_words(settings, words):
    config = ToMeConfig(**settings)
    assert config.method == words
    assert method_name(config, without=list(settings)) == words.partition(",")[0]


def test_no_two_ways_to_merge_have_the_same_words():
    others = {
        "max_downsample": 2,
        "sx": 3,
        "sy": 3,
        "use_rand": False,
        "window": 8,
        "proportional": False,
    }
    others |= {"merge_crossattn": True, "merge_mlp": True, "min_tokens": 64}
    names = [ToMeConfig(**{name: value}).method for name, value in others.items()]
    names += [config.method for config in METHODS.values()]
    assert len(set(names)) == len(others) + len(METHODS)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("window=16,proportional,ratio=0.7", {"window": 16, "proportional": True, "ratio": 0.7}),
        ("window=none, proportional=false", {"window": None, "proportional": False}),
        (
            "merge_attn=kv,match=grid,ratio=0.75,min_tokens=0",
            {"merge_attn": "kv", "match": "grid", "ratio": 0.75, "min_tokens": 0},
        ),
    ],
)
def test_settings_as_text(text, settings):
    assert parse_settings(text) == settings


@pytest.mark.parametrize("text", ["", "windows=8", "window=8,window=8", "window=8.5", "match=grid", "ratio"])
def test_settings_as_text_that_are_not_allowed(text):
    with pytest.raises(ToMeConfigError):
        ToMeConfig(**parse_settings(text))


def test_numpy_numbers_are_converted():
    config = ToMeConfig(ratio=np.float32(0.25), sx=np.int64(4), seed=np.uint32(7))
    assert (type(config.ratio), type(config.sx), type(config.seed)) == (float, int, int)
    assert config == ToMeConfig(ratio=0.25, sx=4, seed=7)


def test_frozen():
    with pytest.raises(AttributeError):
        ToMeConfig().ratio = 0.25


@pytest.mark.parametrize(
    ("ratio", "tokens", "dst", "removed", "queries", "keys"),
    [
        (0.5, 4096, 1024, 2048, 845, 2805),
        (0.75, 64, 16, 48, 48, 48),
        (0.5, 35, 6, 17, 7, 23),
        (0.29, 100, 25, 29, 10, 43),  # 28.999999999999996
        (0.2899999, 100, 25, 28, 10, 43),
        (0, 64, 16, 0, 0, 0),
        (0.5, 1, 0, 0, 0, 0),
        (0.5, 3, 0, 0, 0, 0),
    ],
)
def test_removed_rounds_down_and_needs_a_dst(ratio, tokens, dst, removed, queries, keys):
    assert ToMeConfig(ratio, merge_attn=True).removed(tokens, dst) == removed
    assert ToMeConfig(ratio, merge_attn=True).removed(tokens, dst, keys=True) == removed
    assert ToMeConfig(ratio).removed(tokens, dst) == queries
    assert ToMeConfig(ratio).removed(tokens, dst, keys=True) == keys


@pytest.mark.parametrize("tokens", [100, 64**2, 256**2, 1000**2])
def test_removed_is_the_exact_share_whatever_floating_point_makes_of_it(tokens):
    for hundredths in range(100):
        config = ToMeConfig(hundredths / 100, sx=10, sy=10, merge_attn=True)
        assert config.removed(tokens, 1) == min(tokens * hundredths // 100, tokens - 1)


def test_describe_has_ratio_and_changed_settings():
    assert ToMeConfig().describe() == "ratio=0.5"
    assert ToMeConfig(ratio=0.25, seed=None, sx=4).describe() == "ratio=0.25, sx=4, seed=None"


# Settings files


def test_a_settings_file_gives_back_the_config(tmp_path):
    path = tmp_path / "tome_config.json"
    config = ToMeConfig(0.75, merge_attn="kv", match="grid", sx=2, seed=None, min_tokens=1024)
    config.save(path, figures={"speed_up": 1.5})
    assert ToMeConfig.load(path) == ToMeConfig.load(str(path)) == config
    assert json.loads(path.read_text())["figures"] == {"speed_up": 1.5}
    path.write_text('{"format": "ppdiffusers_tome.config", "version": 1, "settings": {"ratio": 0.25}}')
    assert ToMeConfig.load(path) == ToMeConfig(0.25)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b'{"format": ', "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "not a settings file"),
        (b'{"ratio": 0.5}', "not a settings file"),
        (b'{"format": "ppdiffusers_tome.config", "version": 2, "settings": {}}', "version 2 of the format"),
        (b'{"format": "ppdiffusers_tome.config", "settings": {}}', "version None"),
        (b'{"format": "ppdiffusers_tome.config", "version": 1}', "no object"),
        (
            b'{"format": "ppdiffusers_tome.config", "version": 1, "settings": {"ration": 1}}',
            "'ration' is not a setting",
        ),
        (b'{"format": "ppdiffusers_tome.config", "version": 1, "settings": {"ratio": 0.9}}', r"ratio=0\.9"),
        (b'{"format": "ppdiffusers_tome.config", "version": 1, "settings": {"ratio": "0.5"}}', "ratio='0.5'"),
    ],
)
def test_damaged_settings_files_are_an_error_that_names_them(tmp_path, content, message):
    path = tmp_path / "tome_config.json"
    path.write_bytes(content)
    with pytest.raises(ToMeConfigError, match=rf"tome_config\.json.*{message}"):
        ToMeConfig.load(path)
    with pytest.raises(ToMeConfigError, match=r"missing\.json cannot be read"):
        ToMeConfig.load(tmp_path / "missing.json")


# The gate


@pytest.mark.parametrize(("tokens", "removed"), [(255, (0, 0, 0)), (256, (52, 175, 128)), (1024, (211, 701, 512))])
def test_grids_with_fewer_tokens_stay_plain(tokens, removed):
    config, dst = ToMeConfig(0.5, min_tokens=256), tokens // 4
    counts = (config.removed(tokens, dst), config.removed(tokens, dst, keys=True))
    assert (*counts, config.symmetric().removed(tokens, dst)) == removed
    assert ToMeConfig(0.75, match="grid", min_tokens=256).removed(tokens, dst) == 1.5 * removed[-1]
