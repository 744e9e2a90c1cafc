"""A method that is not the package's: its class, an entry and a line are enough, also for a setting of its own."""

import argparse
import json
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

import numpy as np
import pytest
from conftest import run, traces

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, apply_tome, remove_tome
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.commands.merge_options import merge_configs
from ppdiffusers_tome.inference import load_pipeline, read_manifest
from ppdiffusers_tome.method_names import DESCRIPTIONS
from ppdiffusers_tome.methods import METHODS, Todo
from ppdiffusers_tome.methods.rules import Rule


@dataclass(frozen=True)
class Rows(ToMeConfig):
    """Keep the keys and values of some rows of tokens: one of `spacing`."""

    method: Literal["rows"] = "rows"
    _: KW_ONLY
    spacing: Annotated[int, Rule(lambda value: value in (2, 4), "2 or 4")] = 2

    @property
    def largest_ratio(self):
        return 1 - 1 / self.spacing

    default_ratio = largest_ratio

    @property
    def allowed_ratios(self):
        return (self.largest_ratio,)

    def count_kept(self, grid, share):
        return -(-grid.h // self.spacing) * grid.w

    def constants(self, grid, kept, block):
        return np.arange(grid.tokens).reshape(grid)[:: self.spacing].reshape(1, -1)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The entry of `METHODS` and the line of `method_names.py`."""
    monkeypatch.setitem(METHODS, "rows", Rows)
    monkeypatch.setitem(DESCRIPTIONS, "rows", "keys and values are those of some rows of tokens")


@pytest.mark.parametrize("spacing", [2, 4])
def test_it_merges(unet, spacing):
    """As `todo` does in cells that are one token wide; plain again when merging is removed."""
    plain, before = run(unet), traces(unet)
    merged = run(apply_tome(unet, method="rows", spacing=spacing))
    assert np.abs(merged - plain).max() > 1e-4
    np.testing.assert_array_equal(merged, run(apply_tome(unet, config=Todo(sx=1, sy=spacing))))
    np.testing.assert_array_equal(run(remove_tome(unet)), plain)
    assert traces(unet) == before


def test_its_setting_is_checked():
    assert ToMeConfig(method="rows", spacing=4) == Rows(spacing=4) != Rows()
    assert ToMeConfig().with_settings(method="rows", spacing=4).effective_ratio == 0.75
    with pytest.raises(ToMeConfigError, match=r"spacing=3 .*2 or 4\."):
        ToMeConfig(method="rows", spacing=3)
    with pytest.raises(ToMeConfigError, match=r"ratio=0\.6 .*0\.75 or 0\."):
        ToMeConfig(0.6, "rows", spacing=4)
    with pytest.raises(ToMeConfigError, match=r"spacing=2 .*method='interlace', .*that have it: rows\."):
        ToMeConfig(spacing=2)
    with pytest.raises(ToMeConfigError, match=r"seed=3 .*method='rows', which has no seed: .*tomesd\."):
        ToMeConfig(method="rows", seed=3)
    with pytest.raises(ToMeConfigError, match=r"'spacin' .*mean spacing\?"):
        ToMeConfig(method="rows", spacin=4)
    with pytest.raises(ToMeConfigError, match=r"method='row' .*mean 'rows'"):
        ToMeConfig(method="row")


def test_the_summary_has_its_setting(unet):
    text = str(unet.apply_tome(method="rows", spacing=4, min_tokens=9).tome_summary(16, 16))
    assert "ratio=0.75, method='rows', min_tokens=9, spacing=4" in text
    assert "keys and values 64 of 256" in text and "MACs saved" in text


def test_a_settings_file_has_its_setting(unet, tmp_path):
    settings_file = tmp_path / "rows.json"
    Rows(spacing=4).save(settings_file)
    settings = {"ratio": 0.75, "method": "rows", "max_downsample": None, "min_tokens": 0, "spacing": 4}
    assert json.loads(settings_file.read_text())["settings"] == settings
    assert ToMeConfig.load(settings_file) == Rows(0.75, spacing=4)
    assert "spacing=4" in str(unet.apply_tome(config=settings_file).tome_summary(16, 16))
    options = argparse.Namespace(config=[settings_file], method=[], merging=[], ratio=None)  # of the command line
    assert merge_configs(options) == [Rows(0.75, spacing=4)]


def test_an_export_by_the_command_line_has_its_setting(model, tmp_path, capsys):
    """The export compares its programs with eager mode."""
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert "rows: keys and values are those of some rows of tokens" in " ".join(capsys.readouterr().out.split())
    folder = tmp_path / "export"
    options = ["--model", str(model), "--output", str(folder), "--size", "32", "--format", "onnx"]
    assert main(["export", *options, "--merging", "method=rows,spacing=4"]) == 0
    assert "merging: rows, spacing=4\n" in capsys.readouterr().out
    manifest = read_manifest(folder)
    assert manifest.merging == {"0.75": 2 * (Rows(0.75, spacing=4).settings(),)}
    assert manifest.methods == {0.75: "rows, spacing=4"}
    assert "ratio 0.75: rows, spacing=4" in str(load_pipeline(folder, threads=1).tome_summary())


@pytest.mark.parametrize(
    "text", ["method=rows,spacing=3", "method=rows,spacin=4", "spacing=4", "method=todo,spacing=2"]
)
def test_what_is_not_allowed_on_the_command_line_is_named(text, capsys):
    assert main(["export", "--model", "x", "--output", "y", "--merging", text]) == 2
    assert "spacin" in capsys.readouterr().err
