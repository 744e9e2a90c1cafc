"""--method, --merging and --config: ways to merge, the same in all commands."""

import argparse
import re
from dataclasses import replace

import pytest

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.commands.merge_options import (
    add_merge_options,
    merge_configs,
    parse_settings,
    read_methods,
)
from ppdiffusers_tome.methods import METHODS

TUNED = ToMeConfig(ratio=0.6, method="tomesd", seed=4, min_tokens=1024)


@pytest.fixture
def tuned(tmp_path):
    """A settings file."""
    path = tmp_path / "tome_config.json"
    TUNED.save(path)
    return str(path)


def parse(*options, is_single):
    parser = argparse.ArgumentParser()
    parser.add_argument("--ratio", type=float, nargs="+")
    add_merge_options(parser, "how to merge", is_single)
    return parser.parse_args(options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("min_tokens=64", {"min_tokens": 64}),
        ("method=tomesd,sx=4", {"method": "tomesd", "sx": 4}),
        (
            "method=tomesd,merge_attn=false,merge_mlp,merge_crossattn",
            {"method": "tomesd", "merge_attn": False, "merge_mlp": True, "merge_crossattn": True},
        ),
        ("max_downsample=none, min_tokens=0", {"max_downsample": None, "min_tokens": 0}),
        (
            "use_rand=false,seed=3,max_downsample=2,method=tomesd",
            {"use_rand": False, "seed": 3, "max_downsample": 2, "method": "tomesd"},
        ),
        ("ratio=0.25", {"ratio": 0.25}),
        ("method=todo,ratio=0.75", {"method": "todo", "ratio": 0.75}),
    ],
)
def test_one_way_to_merge_at_its_own_ratio_or_at_several(text, expected):
    assert merge_configs(parse("--merging", text, is_single=True)) == [ToMeConfig(**expected)]
    configs = merge_configs(parse("--merging", text, "--ratio", "0.5", "0", is_single=True))
    assert configs == [ToMeConfig(**{**expected, "ratio": ratio}) for ratio in (0.5, 0)]


def settings_of(options):
    return [config.settings() for config in merge_configs(options)]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_by_name_brings_its_defaults(name):
    """Its ratio too, if the method allows few: other ways to merge run at each --ratio."""
    config = ToMeConfig(method=name)
    assert settings_of(parse("--method", name, is_single=True)) == [config.settings()]
    (settings,) = read_methods(parse("--method", name, "--ratio", "0.25", is_single=False))
    allows_few = config.allowed_ratios is not None
    assert settings == {"method": name, **({"ratio": config.effective_ratio} if allows_few else {})}
    if not allows_few:
        assert merge_configs(parse("--method", name, "--ratio", "0.25", is_single=True))[0].ratio == 0.25
    (settings,) = read_methods(parse("--merging", f"method={name},max_downsample=2", is_single=False))
    assert ToMeConfig(**settings).settings() == ToMeConfig(method=name, max_downsample=2).settings()
    if "sx" in METHODS[name].defaults():
        (settings,) = read_methods(parse("--merging", f"method={name},sx=4", is_single=False))
        assert ToMeConfig(**settings).settings() == ToMeConfig(method=name, sx=4).settings()


def test_a_ratio_that_a_method_does_not_allow_is_an_error():
    with pytest.raises(ToMeConfigError, match=r"--ratio 0\.6 .* method='todo'"):
        merge_configs(parse("--method", "todo", "--ratio", "0.6", is_single=True))
    configs = merge_configs(parse("--method", "todo", "--ratio", "0.75", "0.5", "0", is_single=True))
    assert [config.ratio for config in configs] == [0.75, 0.5, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "''"),
        ("seeds=8", "'seeds' .*mean seed"),
        ("seed=8,seed=8", "'seed' is repeated"),
    ],
)
def test_names_in_a_text_that_are_not_allowed(text, message):
    with pytest.raises(ToMeConfigError, match=rf"'{text}': .*{message}"):
        parse_settings(text)


@pytest.mark.parametrize("text", ["min_tokens=8.5", "ratio", "method", "method=kv", "sx=two", "merge_attn=kv"])
def test_values_in_a_text_that_are_not_allowed(text):
    with pytest.raises(ToMeConfigError, match=f"{text.partition('=')[0]}="):
        read_methods(parse("--merging", text, is_single=False))


def test_settings_are_checked_together_with_the_ratio():
    """method=todo allows few ratios."""
    todo = "method=todo"
    configs = merge_configs(parse("--ratio", "0.75", "0.5", "0", "--merging", todo, is_single=True))
    assert configs == [ToMeConfig(ratio, "todo") for ratio in (0.75, 0.5, 0)]
    with pytest.raises(ToMeConfigError, match=r"--ratio 0\.6 .*method='todo'"):
        merge_configs(parse("--ratio", "0.6", "--merging", todo, is_single=True))


def test_defaults_and_files_are_ways_to_merge_too(tuned):
    assert merge_configs(parse(is_single=True)) == [ToMeConfig()]
    assert merge_configs(parse("--ratio", "0.5", is_single=True)) == [ToMeConfig(0.5)]
    assert merge_configs(parse("--config", tuned, is_single=True)) == [TUNED]
    configs = merge_configs(parse("--ratio", "0.25", "0", "--config", tuned, is_single=True))
    assert configs == [replace(TUNED, ratio=ratio) for ratio in (0.25, 0)]


def test_several_ways_to_merge(tuned):
    assert read_methods(parse(is_single=False)) == []
    named = ["--method", "tomesd", "--merging", "min_tokens=9", "method=todo"]
    options = parse(*named, "--config", tuned, tuned, is_single=False)
    of_file = {"ratio": 0.6, "method": "tomesd", "seed": 4, "min_tokens": 1024}
    of_text = [{"method": "tomesd"}, {"min_tokens": 9}, {"method": "todo", "ratio": 0.75}]
    assert read_methods(options) == [of_file, of_file, *of_text]


@pytest.mark.parametrize("command", ["export", "compare"])
def test_all_commands_have_the_options(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    printed = capsys.readouterr().out
    assert "--merging SETTINGS" in printed and "--config FILE" in printed
    assert f"--method {{{','.join(METHODS)}}}" in printed and next(iter(METHODS)) == "interlace"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--merging", "windw=8"], "'windw'"),
        (["--merging", "seed=8"], "seed=8 .*method='interlace'"),
        (["--config", "/no/such.json"], "/no/such.json "),
    ],
)
def test_settings_that_are_not_allowed_are_named_before_anything_is_written(options, message, tmp_path, capsys):
    assert main(["export", "--model", "x", "--output", str(tmp_path / "out"), *options]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_an_export_merges_in_one_way(tuned, capsys):
    with pytest.raises(SystemExit):
        parse("--config", tuned, "--merging", "min_tokens=4", is_single=True)
    assert "not allowed with argument" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse("--merging", "min_tokens=4", "min_tokens=3", is_single=True)
    with pytest.raises(SystemExit):
        parse("--method", "todo", "--merging", "min_tokens=4", is_single=True)
    with pytest.raises(SystemExit):
        parse("--method", "ToDo", is_single=True)


@pytest.mark.parametrize("command", ["export", "compare"])
def test_the_error_of_a_mistyped_method_names_what_was_probably_meant(command, capsys):
    with pytest.raises(SystemExit) as exited:
        main([command, "--model", "x", "--output", "y", "--method", "interlac"])
    assert exited.value.code == 2 and "mean 'interlace'" in capsys.readouterr().err
