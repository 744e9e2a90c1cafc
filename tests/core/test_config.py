"""The settings: their ranges and messages, what a method brings and lacks, settings files."""

import copy
import dataclasses
import inspect
import json
import pickle
from typing import get_type_hints

import numpy as np
import pytest
from typing_extensions import Unpack

import ppdiffusers_tome
from ppdiffusers_tome import Grid, ToMeConfig, ToMeConfigError, ToMeError, inference
from ppdiffusers_tome.attach.placement import Placement
from ppdiffusers_tome.method_names import DESCRIPTIONS, MergeSettings, MethodSettings
from ppdiffusers_tome.methods import METHODS, Interlace, Todo, Tomesd
from ppdiffusers_tome.methods.rules import rules_of
from ppdiffusers_tome.wording import merging_in_words, method_in_words

COMMON = {"ratio": None, "method": "interlace", "max_downsample": None, "min_tokens": 0}
CHANGED = {  # a value of each setting that is not its default
    "max_downsample": 2,
    "min_tokens": 64,
    "sx": 4,
    "sy": 3,
    "use_rand": False,
    "seed": 7,
    "merge_attn": False,
    "merge_crossattn": True,
    "merge_mlp": True,
    "merge_steps": "all",
}


def allowed(method, /, **settings):
    """Those of these settings that a method has."""
    return {name: value for name, value in settings.items() if name in METHODS[method].defaults()}


def kept(config, grid):
    """How many tokens of a grid a block keeps whose share is that of the ratio."""
    return Placement(config, ("attn",), 1 - config.effective_ratio).count_kept(grid)


def test_a_method_is_made_by_name_or_by_its_class():
    assert METHODS.keys() == DESCRIPTIONS.keys()
    for name, method in METHODS.items():
        config = method(ratio=0, min_tokens=9)
        assert config == ToMeConfig(0, name, min_tokens=9) and hash(config) == hash(ToMeConfig(0, name, min_tokens=9))
        assert type(ToMeConfig(method=name)) is method and isinstance(config, ToMeConfig)
        assert method.defaults() == {**COMMON, "method": name, **method.defaults()} == vars(method())
    assert ToMeConfig() == Interlace(0.75).with_settings(ratio=None) and ToMeConfig() != Todo()
    assert (Interlace(ratio=0.75), Todo(sx=2, sy=2), Tomesd(ratio=0.5, seed=3)) == (
        ToMeConfig(0.75),
        ToMeConfig(method="todo"),
        ToMeConfig(0.5, "tomesd", seed=3),
    )


def test_a_class_is_one_method():
    assert Todo(method="todo") == Todo()
    for make in (lambda: Todo(method="tomesd"), lambda: dataclasses.replace(Todo(), method="tomesd")):
        with pytest.raises(ToMeConfigError, match=r"method='tomesd' .*Todo: .*with_settings\(method=…\)"):
            make()
    with pytest.raises(TypeError, match="seed"):
        Todo(seed=3)
    with pytest.raises(TypeError, match="positional"):
        Todo(0.75, "todo", 4)


@pytest.mark.parametrize(("method", "ratio"), [("interlace", 0.75), ("todo", 0.75), ("tomesd", 0.5)])
def test_a_method_brings_its_ratio_and_one_that_is_passed_wins(method, ratio):
    config = ToMeConfig(method=method, min_tokens=64)
    assert config.ratio is None and config.effective_ratio == config.settings()["ratio"] == ratio
    assert config.settings() == {**METHODS[method].defaults(), "ratio": ratio, "min_tokens": 64}
    assert ToMeConfig(0, method).effective_ratio == 0


def test_the_default_ratio_is_one_that_the_cells_allow():
    assert ToMeConfig(method="todo", sx=4).effective_ratio == 1 - 1 / 8
    assert ToMeConfig(method="todo", sx=np.int64(3), sy=1).effective_ratio == 1 - 1 / 3
    assert ToMeConfig(method="tomesd", sx=4).effective_ratio == 0.5
    assert ToMeConfig(method="tomesd", sx=1, sy=1).effective_ratio == 0
    assert ToMeConfig(0.5, "todo") != ToMeConfig(method="todo", sy=1)
    with pytest.raises(ToMeConfigError, match="sx=0"):
        ToMeConfig(method="todo", sx=0)


@pytest.mark.parametrize(("name", "value"), CHANGED.items())
def test_a_setting_that_a_method_lacks_is_an_error_that_lists_the_methods_with_it(name, value):
    having = [method for method in METHODS if name in METHODS[method].defaults()]
    for method in METHODS.keys() - having:
        for given in (value, METHODS[having[0]].defaults()[name]):
            message = f"{name}={given!r} .*method='{method}'.* {', '.join(having)}"
            with pytest.raises(ToMeConfigError, match=rf"{message}\.$"):
                ToMeConfig(method=method, **{name: given})
    assert having, "some method has it"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ration": 0.5}, "'ration' .*mean ratio\\?"),
        ({"merge_atn": True}, "'merge_atn' .*mean merge_attn\\?"),
        ({"merge_ratio": 0.5}, "'merge_ratio' .*mean ratio\\?"),
        ({"qqq": 1}, f"'qqq' .* {', '.join(Interlace.defaults())}, .*seed"),
        ({"cls": 1, "self": 2}, "'cls' is not a setting"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_one(settings, message):
    with pytest.raises(ToMeConfigError, match=message):
        ToMeConfig().with_settings(**settings)
    with pytest.raises(ToMeConfigError, match=message):
        ToMeConfig(**settings)


def test_editors_and_mypy_know_the_settings():
    """By a TypedDict, which has the names and types of the fields of all methods."""
    fields = {name: hint for method in METHODS.values() for name, hint in get_type_hints(method).items()}
    names = {name for method in METHODS.values() for name in method.defaults()}
    assert get_type_hints(MethodSettings) == {name: fields[name] for name in names - {"ratio", "method"}}
    assert get_type_hints(MergeSettings) == get_type_hints(MethodSettings) | {"method": str}
    assert inspect.signature(ToMeConfig.__new__).parameters["settings"].annotation == Unpack[MethodSettings]
    for function in (ppdiffusers_tome.apply_tome, ppdiffusers_tome.tome, inference.export_pipeline):
        assert inspect.signature(function).parameters["settings"].annotation == Unpack[MergeSettings]


def test_ratio_and_method_by_position():
    assert ToMeConfig(0.75, "todo") == ToMeConfig(ratio=0.75, method="todo") == Todo(0.75)
    with pytest.raises(TypeError, match="positional"):
        ToMeConfig(0.75, "todo", 4)


NOT_ALLOWED = {  # of each setting: other types, and the values next to the limits
    "ratio": (-0.1, 0.938, 1, float("nan"), float("inf"), "0.5", True, 1 + 2j, {1.0: 0.6}),
    "method": ("cells", "ToDo", "", None, True, ["kv"]),
    "max_downsample": (0, 3, 2.0, "2", True),
    "sx": (0, -2, 2.0, "2", None),
    "sy": (0, -2, 2.0, "2", None),
    "use_rand": (1, "no", None),
    "seed": (-1, 2**64, 0.5, False, None),
    "merge_attn": ("keys", "alone", None, 1.5, 1),
    "merge_crossattn": (0, None),
    "merge_mlp": ("yes", None),
    "min_tokens": (-1, 1.5, "64", True, None),
    "merge_steps": ("first", "", None, 20, True, ["all"]),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NOT_ALLOWED.items() for value in values]
)
def test_a_value_that_is_not_allowed_is_an_error_that_names_it(name, value):
    for method in METHODS:
        with pytest.raises(ToMeConfigError) as caught:
            ToMeConfig(**{"method": method, name: value})
        assert f"{name}={value!r}" in str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_has_a_rule(method):
    """What a ratio may be, the method decides."""
    assert rules_of(METHODS[method]).keys() == METHODS[method].defaults().keys() - {"ratio", "method"}


def test_the_error_names_what_is_allowed():
    with pytest.raises(ToMeConfigError, match=r"seed=-1 .*from 0 to 2\*\*64 - 1"):
        Tomesd(seed=-1)
    with pytest.raises(ToMeConfigError, match=f"method='ToDo' .* one of {', '.join(METHODS)}"):
        ToMeConfig(method="ToDo")


def test_the_error_names_what_was_probably_meant():
    with pytest.raises(ToMeConfigError, match=r"method='ToDo' .*mean 'todo'\?"):
        ToMeConfig(method="ToDo")
    with pytest.raises(ToMeConfigError, match=r"ratio=50 .*mean 0\.5,"):
        ToMeConfig(50)
    with pytest.raises(ToMeConfigError, match="ratio=1000"):
        ToMeConfig(10**400)  # which has no float


def test_config_error_is_a_value_error_and_a_tome_error():
    with pytest.raises(ValueError, match="ratio"):
        ToMeConfig(ratio=2)
    with pytest.raises(ToMeError, match="ratio"):
        ToMeConfig(ratio=2)


@pytest.mark.parametrize(("sx", "sy"), [(2, 2), (4, 4), (2, 3), (3, 2), (1, 2), (3, 3), (1, 1), (7, 11)])
def test_maximum_ratio(sx, sy):
    largest = 1 - 1 / (sx * sy)
    for method in [method for method in METHODS if "sx" in METHODS[method].defaults()]:
        assert ToMeConfig(largest, method, sx=sx, sy=sy).effective_ratio == largest
        with pytest.raises(ToMeConfigError, match=rf"sx={sx}, sy={sy}"):
            ToMeConfig(largest + 1e-6, method, sx=sx, sy=sy)


def test_the_maximum_ratio_of_the_default_is_one_part_of_sixteen():
    assert ToMeConfig(15 / 16).effective_ratio == 15 / 16
    with pytest.raises(ToMeConfigError, match=r"0 to 0\.9375\."):
        ToMeConfig(15 / 16 + 1e-6)


def test_no_layer_to_merge_is_rejected():
    with pytest.raises(ToMeConfigError, match="merge_attn, merge_crossattn and merge_mlp"):
        ToMeConfig(method="tomesd", merge_attn=False)


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
    usual = "" if (sx, sy) == (2, 2) else r".*0\.5, 0\.75 or 0 with 2×2 cells"
    allowed = f"{', '.join(map(str, sorted(named)))} or 0 with sx={sx}, sy={sy}{usual}"
    with pytest.raises(ToMeConfigError, match=rf"ratio=0\.4 .*method='todo' .*{allowed}"):
        ToMeConfig(0.4, "todo", sx=sx, sy=sy)
    for per_cell, ratio in enumerate(named, 1):
        config = ToMeConfig(ratio, "todo", sx=sx, sy=sy)
        assert config.ratio == ratio and config.effective_ratio == 1 - per_cell / (sx * sy)
        assert kept(config, Grid(5 * sy, 7 * sx)) == 35 * per_cell
    assert ToMeConfig(0, "todo", sx=sx, sy=sy).effective_ratio == 0
    assert ToMeConfig(named[0], "tomesd", sx=sx, sy=sy).effective_ratio == 1 - 1 / (sx * sy)


def test_cells_take_remainders_with_them():
    """A grid of 7×9 tokens has 3·4 cells of 2×2, and keeps one or two tokens of each."""
    todo = ToMeConfig(method="todo")
    assert kept(todo, Grid(7, 9)) == 12 < kept(ToMeConfig(0.75, "tomesd"), Grid(7, 9))
    assert kept(ToMeConfig(0.5, "todo"), Grid(7, 9)) == 24
    assert kept(todo, Grid(1, 5)) == kept(ToMeConfig(0.5, "todo"), Grid(1, 5)) == 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "interlace"),
        ({"ratio": 0.7}, "interlace"),
        ({"max_downsample": 2, "min_tokens": 64}, "interlace, max_downsample=2, min_tokens=64"),
        ({"ratio": 0.7, "seed": 3, "method": "tomesd"}, "tomesd, seed=3"),
        ({"method": "todo", "sx": 4}, "todo, sx=4"),
        ({"method": "tomesd", "merge_attn": False, "merge_mlp": True}, "tomesd, merge_attn=False, merge_mlp=True"),
    ],
)
def test_method_in_words(settings, words):
    assert method_in_words(ToMeConfig(**settings)) == words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "interlace 0.75"),
        ({"ratio": 0.8, "max_downsample": 1}, "interlace 0.8, max_downsample=1"),
        ({"method": "todo", "sx": 4}, "todo 0.875, sx=4"),
        ({"method": "tomesd", "ratio": 1 / 3, "seed": np.int64(1)}, "tomesd 0.333333333333333, seed=1"),
    ],
)
def test_merging_in_words(settings, words):
    config = ToMeConfig(**settings)
    assert merging_in_words(config) == words
    assert merging_in_words(config, without=list(settings)) == words.partition(",")[0]


def test_no_two_ways_to_merge_have_the_same_words():
    others = {name: value for name, value in CHANGED.items() if name != "merge_attn"}  # which leaves nothing to merge
    configs = [ToMeConfig(method=method) for method in METHODS]
    for method in METHODS:
        configs += [ToMeConfig(method=method, **{name: value}) for name, value in allowed(method, **others).items()]
    for in_words in (method_in_words, merging_in_words):
        assert len(set(map(in_words, configs))) == len(configs)


def test_numbers_of_numpy_are_as_those_of_python():
    config = ToMeConfig(np.float32(0.25), "tomesd", sx=np.int64(4), seed=np.uint32(7), use_rand=np.False_)
    equal = ToMeConfig(0.25, "tomesd", sx=4, seed=7, use_rand=False)
    assert config == equal and hash(config) == hash(equal) and config.describe() == equal.describe()
    settings = config.settings()
    assert [type(settings[name]) for name in ("ratio", "sx", "seed", "use_rand")] == [float, int, int, bool]


def test_frozen():
    with pytest.raises(AttributeError):
        ToMeConfig().ratio = 0.25


def test_copies_and_pickles_are_equal():
    for config in (ToMeConfig(), ToMeConfig(method="todo", sx=4), ToMeConfig(0.6, "tomesd", seed=7)):
        for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), dataclasses.replace(config)):
            assert other == config and hash(other) == hash(config)


@pytest.mark.parametrize(
    ("ratio", "grid", "removed"),
    [
        (0.5, Grid(64, 64), 2048),
        (0.75, Grid(8, 8), 48),
        (0.5, Grid(5, 7), 17),
        (0.29, Grid(10, 10), 29),  # 28.999999999999996
        (0.2899999, Grid(10, 10), 28),
        (0, Grid(8, 8), 0),
        (0.5, Grid(1, 1), 0),
        (0.5, Grid(1, 3), 0),
    ],
)
def test_what_merges_away_is_rounded_down_and_needs_a_dst(ratio, grid, removed):
    assert kept(ToMeConfig(ratio, "tomesd"), grid) == grid.tokens - removed


@pytest.mark.parametrize("side", [10, 64, 256, 1000])
def test_what_merges_away_is_the_exact_share_whatever_floating_point_makes_of_it(side):
    grid, n = Grid(side, side), side**2
    for hundredths in range(100):
        config = ToMeConfig(hundredths / 100, "tomesd", sx=10, sy=10)
        assert kept(config, grid) == n - min(n * hundredths // 100, n - (side // 10) ** 2)


def test_describe_has_ratio_and_changed_settings():
    assert ToMeConfig().describe() == "ratio=0.75"
    assert ToMeConfig(0.25, "tomesd", seed=3, sx=4).describe() == "ratio=0.25, method='tomesd', sx=4, seed=3"
    assert ToMeConfig(method="todo", sx=4).changed_settings() == {"ratio": 0.875, "method": "todo", "sx": 4}
    assert str(ToMeConfig(0.5, "todo", min_tokens=9)) == str(Todo(ratio=0.5, min_tokens=9))


@pytest.mark.parametrize("method", METHODS)
def test_changed_settings_give_back_the_settings(method):
    for settings in ({}, {"sx": 4}, {"sx": 3, "sy": 1, "use_rand": False, "seed": 7, "ratio": 0, "min_tokens": 9}):
        config = ToMeConfig(method=method, **allowed(method, **settings))
        assert ToMeConfig(**config.changed_settings()).settings() == config.settings()


@pytest.mark.parametrize(
    ("own", "passed", "expected"),
    [
        ({}, {}, {}),
        ({}, {"method": "tomesd"}, {"method": "tomesd"}),  # the ratio becomes that of the method
        ({"method": "tomesd"}, {"method": "interlace"}, {}),
        (
            {"ratio": 0.6, "min_tokens": 9},
            {"method": "tomesd", "sx": 4},
            {"ratio": 0.6, "method": "tomesd", "sx": 4, "min_tokens": 9},
        ),
        ({"method": "tomesd", "sx": 4}, {"method": "todo"}, {"method": "todo", "sx": 4}),
        ({"method": "todo"}, {"sx": 4}, {"method": "todo", "sx": 4}),
        ({"ratio": 0.5}, {"method": "todo"}, {"ratio": 0.5, "method": "todo"}),
        ({"ratio": 0.75}, {"method": "tomesd"}, {"ratio": 0.75, "method": "tomesd"}),  # also its method's own
        ({"ratio": 0.6}, {"method": "todo", "ratio": 0}, {"method": "todo", "ratio": 0}),
        ({"ratio": 0.6}, {"method": "todo", "ratio": None}, {"method": "todo"}),
    ],
)
def test_with_settings(own, passed, expected):
    assert ToMeConfig(**own).with_settings(**passed) == ToMeConfig(**expected)


@pytest.mark.parametrize(
    ("own", "passed", "message"),
    [
        ({"method": "tomesd", "seed": 8}, {"method": "todo"}, "seed=8 .* no seed"),
        ({"method": "todo", "sx": 4}, {"method": "interlace"}, "sx=4 .* no sx"),
        ({"ratio": 0.6}, {"method": "todo"}, "ratio=0.6 .* method='todo'"),
        (
            {"method": "todo", "ratio": 0.5},
            {"sx": 4},
            r"ratio=0.5 .*method='todo' .*0\.75, 0\.875 or 0 with sx=4",
        ),
        ({}, {"ratio": 2}, "ratio=2"),
    ],
)
def test_settings_of_its_own_that_do_not_go_with_those_passed_are_an_error(own, passed, message):
    with pytest.raises(ToMeConfigError, match=message):
        ToMeConfig(**own).with_settings(**passed)


def test_the_config_of_a_controlnet():
    config = ToMeConfig(0.6, "tomesd", seed=3)
    assert config.for_controlnet(True) is config and config.for_controlnet(False) is None
    assert config.for_controlnet(0.3) == ToMeConfig(0.3, "tomesd", seed=3)
    assert ToMeConfig(method="todo").for_controlnet(0.5) == ToMeConfig(0.5, "todo")
    with pytest.raises(ToMeConfigError, match=r"controlnet=0.6 .*method='todo' .*0\.5, 0\.75 or 0"):
        ToMeConfig(method="todo").for_controlnet(0.6)
    for wrong in ("half", None):
        with pytest.raises(ToMeConfigError, match=f"controlnet={wrong!r} .*True, False"):
            config.for_controlnet(wrong)


# Settings files


def write_settings(path, settings):
    path.write_text(json.dumps({"format": "ppdiffusers_tome.config", "version": 2, "settings": settings}))


@pytest.mark.parametrize("method", METHODS)
def test_a_settings_file_gives_back_the_settings(tmp_path, method):
    path = tmp_path / "tome_config.json"
    config = ToMeConfig(method=method, min_tokens=1024, **allowed(method, seed=np.int64(7), sx=4))
    config.save(path, figures={"speed_up": 1.5})
    assert ToMeConfig.load(path).settings() == ToMeConfig.load(str(path)).settings() == config.settings()
    content = json.loads(path.read_text())
    assert content["figures"] == {"speed_up": 1.5} and content["settings"] == allowed(method, **config.settings())
    other = dataclasses.replace(config, ratio=0)
    other.save(path)
    assert ToMeConfig.load(path) == other


def test_settings_that_a_file_lacks_have_their_defaults(tmp_path):
    path = tmp_path / "tome_config.json"
    for settings in ({}, {"method": "todo"}, {"ratio": 0.5}):
        write_settings(path, settings)
        assert ToMeConfig.load(path) == ToMeConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": None}, "'window' is not a setting"),
        ({"ration": 1}, "'ration' .*mean ratio"),
        ({"method": "kv"}, "method='kv' .*one of interlace"),
        ({"seed": None, "method": "tomesd"}, "seed=None"),
        ({"ratio": "0.5"}, "ratio='0.5'"),
        ({"sx": 4}, "sx=4 .*method='interlace'"),
    ],
)
def test_settings_of_a_file_that_are_not_allowed_are_an_error_that_names_it(tmp_path, settings, message):
    path = tmp_path / "tome_config.json"
    write_settings(path, settings)
    with pytest.raises(ToMeConfigError, match=rf"tome_config\.json.*{message}"):
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
        (b'{"format": "ppdiffusers_tome.config", "version": 1, "settings": {}}', "version 1 .*only 2"),
        (b'{"format": "ppdiffusers_tome.config", "version": 3, "settings": {}}', "version 3 .*only 2"),
        (b'{"format": "ppdiffusers_tome.config", "settings": {}}', "version None"),
        (b'{"format": "ppdiffusers_tome.config", "version": [2]}', "version \\[2\\]"),
        (b'{"format": "ppdiffusers_tome.config", "version": 2}', "no object"),
    ],
)
def test_damaged_settings_files_are_an_error_that_names_them(tmp_path, content, message):
    path = tmp_path / "tome_config.json"
    path.write_bytes(content)
    with pytest.raises(ToMeConfigError, match=rf"tome_config\.json.*{message}"):
        ToMeConfig.load(path)
    with pytest.raises(ToMeConfigError, match=r"missing\.json"):
        ToMeConfig.load(tmp_path / "missing.json")


# The gate


@pytest.mark.parametrize("method", METHODS)
def test_grids_with_fewer_tokens_stay_plain(method):
    gated, always = ToMeConfig(method=method, min_tokens=256), ToMeConfig(method=method)
    assert kept(gated, Grid(15, 17)) == 255 > kept(always, Grid(15, 17))
    for grid in (Grid(16, 16), Grid(32, 32)):
        assert kept(gated, grid) == kept(always, grid) == grid.tokens * (1 - always.effective_ratio)
