"""The settings: their ranges and messages, what a method brings and lacks, settings files, those of 2.x."""

import copy
import dataclasses
import inspect
import json
import pickle

import numpy as np
import pytest

import ppdiffusers_tome
from ppdiffusers_tome import Grid, ToMeConfig, ToMeConfigError, ToMeError
from ppdiffusers_tome.attach.placement import tokens_kept
from ppdiffusers_tome.config import METHOD_OF_MERGE_ATTN, REPLACED, controlnet_config, upgraded
from ppdiffusers_tome.methods import METHODS
from ppdiffusers_tome.methods.method import Kept
from ppdiffusers_tome.wording import merging_in_words, method_in_words

DEFAULTS = {
    "ratio": 0.75,
    "method": "interlace",
    "max_downsample": None,
    "sx": 2,
    "sy": 2,
    "use_rand": False,
    "seed": 0,
    "window": None,
    "proportional": False,
    "merge_attn": True,
    "merge_crossattn": False,
    "merge_mlp": False,
    "min_tokens": 0,
}
OF_PAIRS = {"ratio": 0.5, "use_rand": True, "window": 16, "proportional": True}
OF_METHOD = {  # what differs from these defaults
    "interlace": {},
    "default": OF_PAIRS,
    "symmetric": OF_PAIRS,
    "tomesd": {"ratio": 0.5, "use_rand": True},
    "kv": OF_PAIRS,
    "todo": {"proportional": True},
}


def allowed(method, **settings):
    """Those of these settings that a method has."""
    return {name: value for name, value in settings.items() if name not in METHODS[method].fixed}


def test_defaults():
    assert vars(ToMeConfig()) == DEFAULTS


@pytest.mark.parametrize("method", METHODS)
def test_a_method_brings_its_defaults_and_a_setting_that_is_passed_wins(method):
    expected = {**DEFAULTS, **OF_METHOD[method], "method": method}
    assert vars(ToMeConfig(method=method)) == expected
    passed = allowed(method, seed=3, use_rand=not expected["use_rand"], ratio=0, min_tokens=64)
    assert vars(ToMeConfig(method=method, **passed)) == {**expected, **passed}


def test_the_default_ratio_of_todo_is_that_of_its_cells():
    assert ToMeConfig(method="todo", sx=4).ratio == 1 - 1 / 8
    assert ToMeConfig(method="todo", sx=np.int64(3), sy=1).ratio == 1 - 1 / 3
    assert ToMeConfig(0.5, "todo").sy == 2 and ToMeConfig(0.5, "todo") != ToMeConfig(method="todo", sy=1)
    with pytest.raises(ToMeConfigError, match="sx=0 is not allowed"):
        ToMeConfig(method="todo", sx=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"method": "tomesd", "window": 8},
            "window=8 .* method='tomesd', which has no window: .* default, symmetric, kv$",
        ),
        (
            {"method": "todo", "window": 16},
            "window=16 .* method='todo', which has no window: .* default, symmetric, kv$",
        ),
        (
            {"method": "tomesd", "proportional": True},
            "proportional=True .* method='tomesd', which has no proportional: .* todo, default, symmetric, kv$",
        ),
        (
            {"method": "interlace", "sx": 4},
            "sx=4 .* method='interlace', which has no sx: .* todo, tomesd, default, symmetric, kv$",
        ),
    ],
)
def test_a_setting_that_a_method_lacks_is_an_error_that_lists_the_methods_with_it(settings, message):
    with pytest.raises(ToMeConfigError, match=message.removesuffix("$") + r"\.$"):
        ToMeConfig(**settings)
    (name,) = settings.keys() - {"method"}
    assert ToMeConfig(**settings | {name: METHODS[settings["method"]].fixed[name]}) == ToMeConfig(
        method=settings["method"]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ration": 0.5}, "'ration' is not a setting: did you mean ratio\\?"),
        ({"merge_atn": True}, "'merge_atn' is not a setting: did you mean merge_attn\\?"),
        ({"merge_ratio": 0.5}, "'merge_ratio' is not a setting: did you mean ratio\\?"),
        ({"qqq": 1}, f"'qqq' is not a setting: use {', '.join(DEFAULTS)}\\."),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_one(settings, message):
    with pytest.raises(ToMeConfigError, match=message):
        ToMeConfig(**settings)
    with pytest.raises(ToMeConfigError, match=message):
        ToMeConfig().with_settings(**settings)


@pytest.mark.parametrize("name", REPLACED)
def test_a_setting_of_earlier_releases_is_an_error_that_says_what_replaced_it(name):
    with pytest.raises(ToMeConfigError, match=rf'{name} is not a setting since release 3\.0: .* method="todo"'):
        ToMeConfig(**{name: "grid"})


@pytest.mark.parametrize("value", METHOD_OF_MERGE_ATTN)
def test_a_value_of_merge_attn_that_is_a_method_now_is_an_error_that_names_it(value):
    method = METHOD_OF_MERGE_ATTN[value]
    with pytest.raises(ToMeConfigError, match=rf"merge_attn='{value}' .* True or False.* Pass method='{method}'"):
        ToMeConfig(merge_attn=value)
    assert ToMeConfig(method=method).method == method


def test_editors_see_the_settings():
    signature = inspect.signature(ToMeConfig)
    assert {name: parameter.default for name, parameter in signature.parameters.items()} == DEFAULTS
    assert signature.parameters["ratio"].annotation is float and signature.parameters["method"].annotation is str
    for function in (ppdiffusers_tome.apply_tome, ppdiffusers_tome.tome):
        assert list(inspect.signature(function).parameters) == ["target", *DEFAULTS, "config", "controlnet", "unknown"]


def test_settings_by_position():
    assert ToMeConfig(0.75, "todo") == ToMeConfig(method="todo")
    assert ToMeConfig(*DEFAULTS.values()) == ToMeConfig()


NOT_ALLOWED = {  # of each setting: other types, and the values next to the limits
    "ratio": (-0.1, 0.938, 1, float("nan"), float("inf"), "0.5", None, True, {1.0: 0.6, 0.5: 0.4}),
    "method": ("cells", "ToDo", "", None, True, ["kv"]),
    "max_downsample": (0, 3, 2.0, "2", True),
    "sx": (0, -2, 2.0, "2", None),
    "sy": (0, -2, 2.0, "2", None),
    "use_rand": (1, "no", None),
    "seed": (-1, 2**64, 0.5, False, None),
    "window": (0, -2, 8.0, True),
    "proportional": (1, None),
    "merge_attn": ("keys", "alone", None, 1.5, 1),
    "merge_crossattn": (0, None),
    "merge_mlp": ("yes", None),
    "min_tokens": (-1, 1.5, "64", True, None),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NOT_ALLOWED.items() for value in values]
)
def test_a_value_that_is_not_allowed_is_an_error_that_names_it(name, value):
    for method in METHODS:
        with pytest.raises(ToMeConfigError) as caught:
            ToMeConfig(**{"method": method, name: value})
        assert f"{name}={value!r}" in str(caught.value)


def test_every_setting_is_checked():
    assert NOT_ALLOWED.keys() == vars(ToMeConfig()).keys()


def test_the_error_names_what_is_allowed():
    with pytest.raises(
        ToMeConfigError, match=r"seed=-1 .* from 0 to 2\*\*64 - 1; with each, tomesd chooses other dst in each step"
    ):
        ToMeConfig(seed=-1)
    with pytest.raises(ToMeConfigError, match=f"method='ToDo' .* one of {', '.join(METHODS)}"):
        ToMeConfig(method="ToDo")


def test_the_error_names_what_was_probably_meant():
    with pytest.raises(ToMeConfigError, match=r"method='ToDo' .*\. Did you mean 'todo'\?"):
        ToMeConfig(method="ToDo")
    with pytest.raises(ToMeConfigError, match=r"ratio=50\.0 .*\. Did you mean 0\.5, which is 50 %\?"):
        ToMeConfig(50)
    with pytest.raises(ToMeConfigError, match=r"ratio is passed twice: 0\.5 by position, and 0\.6 by name"):
        ToMeConfig(0.5, ratio=0.6)


def test_config_error_is_a_value_error_and_a_tome_error():
    with pytest.raises(ValueError, match="ratio"):
        ToMeConfig(ratio=2)
    with pytest.raises(ToMeError, match="ratio"):
        ToMeConfig(ratio=2)


@pytest.mark.parametrize(("sx", "sy"), [(2, 2), (4, 4), (2, 3), (3, 2), (1, 2), (3, 3), (1, 1), (7, 11)])
def test_maximum_ratio(sx, sy):
    largest = 1 - 1 / (sx * sy)
    assert ToMeConfig(largest, "default", sx=sx, sy=sy).ratio == largest
    with pytest.raises(ToMeConfigError, match=rf"sx={sx}, sy={sy}"):
        ToMeConfig(largest + 1e-6, "default", sx=sx, sy=sy)


def test_the_maximum_ratio_of_the_default_is_one_part_of_sixteen():
    assert ToMeConfig(15 / 16).ratio == 15 / 16
    with pytest.raises(ToMeConfigError, match=r"it must be a number from 0 to 0\.9375\."):
        ToMeConfig(15 / 16 + 1e-6)


def test_no_layer_to_merge_is_rejected():
    with pytest.raises(ToMeConfigError, match="merge_attn, merge_crossattn and merge_mlp are all False"):
        ToMeConfig(method="default", merge_attn=False)
    with pytest.raises(ToMeConfigError, match=r"merge_attn=False .* which has no merge_attn: .* default,"):
        ToMeConfig(merge_attn=False)


@pytest.mark.parametrize(
    ("sx", "sy", "named"),
    [
        (2, 2, [0.75, 0.5]),
        (2, 1, [0.5]),
        (3, 3, [0.888889]),
        (7, 11, [0.987013]),
        (2, 4, [0.875, 0.75]),
        (6, 2, [0.916667, 0.833333]),
    ],
)
def test_cells_decide_the_ratios_and_the_error_names_them(sx, sy, named):
    """One token of each cell remains, or two of a cell of even sides."""
    usual = "other cells allow other ratios" if (sx, sy) == (2, 2) else r"0\.5, 0\.75 or 0 with 2×2 cells"
    allowed = f"method='todo' allows {', '.join(map(str, sorted(named)))} or 0 with sx={sx}, sy={sy}; {usual}"
    with pytest.raises(ToMeConfigError, match=rf"ratio=0\.4 is not allowed: {allowed}\."):
        ToMeConfig(0.4, "todo", sx=sx, sy=sy)
    for per_cell, ratio in enumerate(named, 1):
        assert ToMeConfig(ratio, "todo", sx=sx, sy=sy).ratio == 1 - per_cell / (sx * sy)
        assert tokens_kept(ToMeConfig(ratio, "todo", sx=sx, sy=sy), Grid(5 * sy, 7 * sx)).keys == 35 * per_cell
    assert ToMeConfig(0, "todo", sx=sx, sy=sy).ratio == 0
    assert ToMeConfig(named[0], "default", sx=sx, sy=sy).ratio == 1 - 1 / (sx * sy)


@pytest.mark.parametrize(("sx", "sy"), [(2, 2), (4, 2), (1, 2)])
def test_the_ratios_of_default_cost_as_much_as_equal_ones(sx, sy):
    """Queries times keys, at every ratio; keys merge more until cells stop them, which the largest ratio does."""
    largest, grid = 1 - 1 / (sx * sy), Grid(20, 20)
    for ratio in np.linspace(0, largest, 21):
        config = ToMeConfig(ratio, "default", sx=sx, sy=sy)
        queries, keys = METHODS["default"].ratios(config, config.ratio)
        assert (1 - queries) * (1 - keys) == pytest.approx((1 - config.ratio) ** 2)
        assert 0 <= queries <= ratio + 1e-12 and ratio - 1e-12 <= keys <= largest
        assert 1 - keys == pytest.approx((1 - queries) ** 5) or keys == largest
        assert tokens_kept(config, grid) == (400, 400 - int(400 * queries + 1e-9), 400 - int(400 * keys + 1e-9))
        alike = 400 - int(400 * config.ratio + 1e-9)
        assert tokens_kept(config, grid, merges_block=True) == (400, alike, alike)
    assert (queries, keys) == pytest.approx((largest, largest))


@pytest.mark.parametrize("method", ["symmetric", "tomesd", "kv", "interlace"])
def test_the_other_methods_merge_at_the_ratio(method):
    assert METHODS[method].ratios(ToMeConfig(0.6, method), 0.7) == (0.7, 0.7), "of the block"


@pytest.mark.parametrize("method", [name for name in METHODS if allowed(name, merge_attn=False)])
def test_layers_other_than_self_attention_merge_at_the_ratio(method):
    config = ToMeConfig(method=method, merge_attn=False, merge_mlp=True)
    kept = 400 - 400 * config.ratio
    assert tokens_kept(config, Grid(20, 20)) == (400, kept, kept)


def test_cells_take_remainders_with_them():
    """A grid of 7×9 tokens has 3·4 cells of 2×2, and keeps one or two tokens of each."""
    todo = ToMeConfig(method="todo")
    assert tokens_kept(todo, Grid(7, 9)).keys == 12 < tokens_kept(ToMeConfig(0.75, "kv"), Grid(7, 9)).keys
    assert tokens_kept(ToMeConfig(0.5, "todo"), Grid(7, 9)) == (63, 24, 24)
    assert tokens_kept(todo, Grid(1, 5)) == tokens_kept(ToMeConfig(0.5, "todo"), Grid(1, 5)) == (5, 5, 5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "interlace"),
        ({"ratio": 0.7}, "interlace"),
        ({"max_downsample": 2, "min_tokens": 64}, "interlace, up to level 2, from 64 tokens"),
        ({"ratio": 0.7, "seed": 3, "method": "default"}, "default"),
        ({"method": "symmetric", "window": 8}, "symmetric, windows of 8"),
        ({"method": "tomesd"}, "tomesd"),
        ({"method": "kv", "sx": 4, "window": None}, "kv, 4x2 cells, whole grid"),
        ({"method": "todo"}, "todo"),
        ({"method": "todo", "use_rand": True}, "todo, random dst"),
        (
            {"method": "default", "merge_attn": False, "merge_mlp": True},
            "default, not around self-attention, merge_mlp=True",
        ),
        (
            {"method": "default", "use_rand": False, "max_downsample": 2, "proportional": False, "min_tokens": 64},
            "default, up to level 2, fixed dst, not proportional, from 64 tokens",
        ),
    ],
)
def test_method_in_words(settings, words):
    config = ToMeConfig(**settings)
    assert method_in_words(config) == words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "interlace 0.75"),
        ({"ratio": 0.8, "max_downsample": 1}, "interlace 0.8, max_downsample=1"),
        ({"method": "default", "ratio": 0.8, "sx": 4}, "default 0.8, sx=4"),
        ({"method": "todo", "use_rand": True}, "todo 0.75, use_rand=True"),
        ({"method": "kv", "window": None, "seed": 1}, "kv 0.5, seed=1, window=None"),
    ],
)
def test_merging_in_words(settings, words):
    config = ToMeConfig(**settings)
    assert merging_in_words(config) == words
    assert merging_in_words(config, without=list(settings)) == words.partition(",")[0]


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
    configs = [ToMeConfig(method="default", **{name: value}) for name, value in others.items()]
    configs += [ToMeConfig(**{name: value}) for name, value in allowed("interlace", **others).items()]
    configs += [ToMeConfig(method=method) for method in METHODS]
    for in_words in (method_in_words, merging_in_words):
        assert len(set(map(in_words, configs))) == len(configs)


def test_numpy_numbers_are_converted():
    config = ToMeConfig(np.float32(0.25), "default", sx=np.int64(4), seed=np.uint32(7), use_rand=np.True_)
    assert (type(config.ratio), type(config.sx), type(config.seed), type(config.use_rand)) == (float, int, int, bool)
    assert config == ToMeConfig(0.25, "default", sx=4, seed=7)


def test_frozen():
    with pytest.raises(AttributeError):
        ToMeConfig().ratio = 0.25


def test_copies_and_pickles_are_equal():
    for config in (ToMeConfig(), ToMeConfig(method="todo", use_rand=True, seed=7), ToMeConfig(0.6, "kv", sx=4)):
        for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), dataclasses.replace(config)):
            assert other == config and hash(other) == hash(config)


@pytest.mark.parametrize(
    ("ratio", "grid", "removed", "queries", "keys"),
    [
        (0.5, Grid(64, 64), 2048, 845, 2805),
        (0.75, Grid(8, 8), 48, 48, 48),
        (0.5, Grid(5, 7), 17, 7, 23),
        (0.29, Grid(10, 10), 29, 10, 43),  # 28.999999999999996
        (0.2899999, Grid(10, 10), 28, 10, 43),
        (0, Grid(8, 8), 0, 0, 0),
        (0.5, Grid(1, 1), 0, 0, 0),
        (0.5, Grid(1, 3), 0, 0, 0),
    ],
)
def test_what_merges_away_is_rounded_down_and_needs_a_dst(ratio, grid, removed, queries, keys):
    n = grid.tokens
    assert tokens_kept(ToMeConfig(ratio, "symmetric"), grid) == Kept(n, n - removed, n - removed)
    assert tokens_kept(ToMeConfig(ratio, "default"), grid) == Kept(n, n - queries, n - keys)


@pytest.mark.parametrize("side", [10, 64, 256, 1000])
def test_what_merges_away_is_the_exact_share_whatever_floating_point_makes_of_it(side):
    grid, n = Grid(side, side), side**2
    for hundredths in range(100):
        config = ToMeConfig(hundredths / 100, "symmetric", sx=10, sy=10)
        assert tokens_kept(config, grid).queries == n - min(n * hundredths // 100, n - (side // 10) ** 2)


def test_describe_has_ratio_and_changed_settings():
    assert ToMeConfig().describe() == "ratio=0.75"
    assert ToMeConfig(0.25, "default", seed=3, sx=4).describe() == "ratio=0.25, method='default', sx=4, seed=3"
    assert ToMeConfig(method="todo").describe() == "ratio=0.75, method='todo'"
    assert ToMeConfig(method="todo", use_rand=True).changed_settings() == {
        "ratio": 0.75,
        "method": "todo",
        "use_rand": True,
    }
    assert str(ToMeConfig(0.75, "kv", window=None)) == "ToMeConfig(ratio=0.75, method='kv', window=None)"


@pytest.mark.parametrize("method", METHODS)
def test_changed_settings_give_back_the_config(method):
    for settings in ({}, {"sx": 4}, {"sx": 3, "sy": 1, "use_rand": False, "seed": 7, "ratio": 0, "min_tokens": 9}):
        config = ToMeConfig(method=method, **allowed(method, **settings))
        assert ToMeConfig(**config.changed_settings()) == config


@pytest.mark.parametrize(
    ("own", "passed", "expected"),
    [
        ({}, {}, {}),
        ({}, {"method": "default"}, {"method": "default"}),  # the default ratio becomes that of the method
        ({"method": "default"}, {"method": "interlace"}, {}),
        (
            {"ratio": 0.6, "min_tokens": 9},
            {"method": "kv", "sx": 4},
            {"ratio": 0.6, "method": "kv", "sx": 4, "min_tokens": 9},
        ),
        ({"method": "kv", "ratio": 0.6, "seed": 7}, {"sx": 4}, {"method": "kv", "ratio": 0.6, "seed": 7, "sx": 4}),
        ({"method": "default", "sx": 4}, {"method": "todo"}, {"method": "todo", "sx": 4}),
        ({"method": "todo"}, {"method": "kv"}, {"method": "kv"}),
        ({"method": "todo"}, {"sx": 4}, {"method": "todo", "sx": 4}),
        ({"method": "todo", "use_rand": True}, {"seed": 1}, {"method": "todo", "use_rand": True, "seed": 1}),
        ({"ratio": 0.6}, {"method": "kv"}, {"ratio": 0.6, "method": "kv"}),
        ({"ratio": 0.6}, {"method": "todo", "ratio": 0}, {"method": "todo", "ratio": 0}),
        ({"method": "todo"}, {"ratio": 0.5}, {"method": "todo", "ratio": 0.5}),
        ({"method": "todo", "ratio": 0.5}, {"method": "kv"}, {"method": "kv"}),
        ({"method": "kv", "window": 8}, {"method": "tomesd", "window": None}, {"method": "tomesd"}),
    ],
)
def test_with_settings(own, passed, expected):
    assert ToMeConfig(**own).with_settings(**passed) == ToMeConfig(**expected)


@pytest.mark.parametrize(
    ("own", "passed", "message"),
    [
        ({"method": "default", "window": 8}, {"method": "todo"}, "window=8 .* no window"),
        ({"method": "default", "sx": 4}, {"method": "interlace"}, "sx=4 .* no sx"),
        ({"ratio": 0.6}, {"method": "todo"}, "ratio=0.6 .* method='todo'"),
        (
            {"method": "todo", "ratio": 0.5},
            {"sx": 4},
            r"ratio=0.5 .* method='todo' allows 0\.75, 0\.875 or 0 with sx=4",
        ),
        ({}, {"ratio": 2}, "ratio=2"),
    ],
)
def test_settings_of_its_own_that_do_not_go_with_those_passed_are_an_error(own, passed, message):
    with pytest.raises(ToMeConfigError, match=message):
        ToMeConfig(**own).with_settings(**passed)


def test_the_config_of_a_controlnet():
    config = ToMeConfig(0.6, "kv", seed=3)
    assert controlnet_config(config, True) is config and controlnet_config(config, False) is None
    assert controlnet_config(config, 0.3) == ToMeConfig(0.3, "kv", seed=3)
    assert controlnet_config(ToMeConfig(method="todo"), 0.5) == ToMeConfig(0.5, "todo")
    with pytest.raises(ToMeConfigError, match=r"controlnet=0.6 is not allowed: method='todo' allows 0\.5, 0\.75 or 0"):
        controlnet_config(ToMeConfig(method="todo"), 0.6)
    with pytest.raises(ToMeConfigError, match="controlnet='half' is not allowed: it must be True, False or a ratio"):
        controlnet_config(config, "half")


# Settings files


def test_a_settings_file_gives_back_the_config(tmp_path):
    path = tmp_path / "tome_config.json"
    config = ToMeConfig(method="todo", use_rand=True, sx=2, seed=7, min_tokens=1024)
    config.save(path, figures={"speed_up": 1.5})
    assert ToMeConfig.load(path) == ToMeConfig.load(str(path)) == config
    content = json.loads(path.read_text())
    assert content["figures"] == {"speed_up": 1.5} and content["settings"] == vars(config)
    for settings, expected in (({"method": "todo"}, ToMeConfig(method="todo")), ({"ratio": 0.5}, ToMeConfig(0.5))):
        path.write_text(json.dumps({"format": "ppdiffusers_tome.config", "version": 2, "settings": settings}))
        assert ToMeConfig.load(path) == expected


OF_2X = {  # all settings of a file or export of 2.x
    **{name: value for name, value in {**DEFAULTS, **OF_PAIRS}.items() if name != "method"},
    "match": "similarity",
    "merge_attn": "asymmetric",
}
UPGRADED = [  # what of those differs from the defaults of 2.x, and the settings that it is now
    ({}, {"method": "default"}),
    ({"ratio": 0.25, "seed": 7, "window": 8}, {"method": "default", "ratio": 0.25, "seed": 7, "window": 8}),
    ({"seed": None, "use_rand": False}, {"method": "default", "use_rand": False}),  # it chose nothing
    ({"blend": 1.0}, {"method": "default"}),
    ({"merge_attn": True}, {"method": "symmetric"}),
    ({"merge_attn": True, "window": None}, {"method": "symmetric", "window": None}),
    ({"merge_attn": True, "window": None, "proportional": False}, {"method": "tomesd"}),
    ({"window": None, "proportional": False}, {"method": "default", "window": None, "proportional": False}),
    ({"merge_attn": "kv", "ratio": 0.7}, {"method": "kv", "ratio": 0.7}),
    ({"merge_attn": False, "merge_mlp": True}, {"method": "default", "merge_attn": False, "merge_mlp": True}),
    ({"merge_attn": "kv", "match": "grid", "ratio": 0.75}, {"method": "todo", "use_rand": True}),
    ({"merge_attn": "kv", "match": "grid", "ratio": 0.75, "use_rand": False, "window": 8}, {"method": "todo"}),
    (
        {"merge_attn": "kv", "match": "grid", "ratio": 0.875, "sx": 4, "blend": 0},
        {"method": "todo", "use_rand": True, "sx": 4},
    ),
]


@pytest.mark.parametrize(("settings", "expected"), UPGRADED)
@pytest.mark.parametrize("given", [OF_2X, {}], ids=["complete", "partial"])
def test_settings_of_2x_are_those_that_they_are_now(tmp_path, given, settings, expected):
    path, config = tmp_path / "tome_config.json", ToMeConfig(**expected)
    path.write_text(json.dumps({"format": "ppdiffusers_tome.config", "version": 1, "settings": {**given, **settings}}))
    assert ToMeConfig.load(path) == config
    assert ToMeConfig(**upgraded(vars(config))) == config, "settings of this release stay as they are"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"match": "grid", "ratio": 0.75, "merge_attn": True}, 'Use method="todo", or method="symmetric"'),
        ({"match": "grid", "ratio": 0.75}, "merge_attn='asymmetric' cannot be read: .* Use method=\"todo\""),
        ({"blend": 0.5}, "blend=0.5 cannot be read"),
        ({"seed": None}, "seed=None is not allowed: it must be an int"),
        ({"match": "pairs"}, "match='pairs'.* cannot be read"),
        ({"merge_attn": "q"}, "merge_attn='q' cannot be read"),
    ],
)
def test_settings_of_2x_that_would_merge_otherwise_are_refused(tmp_path, settings, message):
    path = tmp_path / "tome_config.json"
    path.write_text(json.dumps({"format": "ppdiffusers_tome.config", "version": 1, "settings": settings}))
    with pytest.raises(ToMeConfigError, match=rf"tome_config\.json: .*{message}"):
        ToMeConfig.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b'{"format": ', "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "not a settings file"),
        (b'{"ratio": 0.5}', "not a settings file"),
        (b'{"format": "ppdiffusers_tome.config", "version": 3, "settings": {}}', "version 3 of the format"),
        (b'{"format": "ppdiffusers_tome.config", "settings": {}}', "version None"),
        (b'{"format": "ppdiffusers_tome.config", "version": 2}', "no object"),
        (b'{"format": "ppdiffusers_tome.config", "version": 2, "settings": {"match": "grid"}}', 'method="todo"'),
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


@pytest.mark.parametrize(
    ("grid", "removed"), [(Grid(15, 17), (0, 0, 0)), (Grid(16, 16), (52, 175, 128)), (Grid(32, 32), (211, 701, 512))]
)
def test_grids_with_fewer_tokens_stay_plain(grid, removed):
    config, n = ToMeConfig(0.5, "default", min_tokens=256), grid.tokens
    queries, keys, alike = removed
    assert tokens_kept(config, grid) == (n, n - queries, n - keys)
    assert tokens_kept(config, grid, merges_block=True) == (n, n - alike, n - alike)
    for method in ("todo", "interlace"):
        assert tokens_kept(ToMeConfig(method=method, min_tokens=256), grid).keys == n - 1.5 * alike


@pytest.mark.parametrize(
    ("positional", "named"),
    [((0.5, "default", None, 2, 2, True, 0, 16, True, True, False, False, 0, 9), {}), ((0.5,), {"ratio": 0.3})],
)
def test_arguments_that_python_would_refuse_are_an_error(positional, named):
    with pytest.raises(ToMeConfigError):
        ToMeConfig(*positional, **named)
