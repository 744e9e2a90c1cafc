"""docs/families.md and `python -m ppdiffusers_tome families`; test_families.py holds the verdicts to what happens."""

import inspect
from pathlib import Path

import ppdiffusers
import pytest

from ppdiffusers_tome import cli
from ppdiffusers_tome.commands import families
from ppdiffusers_tome.published.families import PIPELINES, format_text, pipeline_classes, verdicts

# Listing all pipelines imports all, and one wants a program, and a module that Python 3.13 drops.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'audioop' is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Couldn't find ffmpeg:RuntimeWarning"),
]
DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def table():
    return {verdict.pipeline: verdict for verdict in verdicts()}


def test_every_pipeline_class_is_listed_and_no_other():
    assert pipeline_classes() == sorted(PIPELINES)
    assert len(PIPELINES) == 126  # of ppdiffusers 0.29.0


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_components_are_those_of_the_class(name):
    try:
        cls = getattr(ppdiffusers, name, None) or getattr(ppdiffusers.pipelines, name)
    except RuntimeError:
        pytest.skip("ppdiffusers cannot import it with this Paddle")
    assert set(PIPELINES[name]) <= set(inspect.signature(cls).parameters)


def test_every_refusal_has_a_reason(table):
    for verdict in table.values():
        assert verdict.merges == bool(verdict.blocks)
        assert verdict.merges or (verdict.reason and "no reason is known" not in verdict.reason)


def test_a_class_that_the_table_does_not_know(monkeypatch, capsys):
    monkeypatch.delitem(PIPELINES, "DiTPipeline")
    assert cli.main(["families"]) == 2
    assert "also has DiTPipeline: apply_tome() on such a pipeline says" in capsys.readouterr().err


def test_the_page_is_what_the_command_writes(table, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(families, "verdicts", lambda: list(table.values()))  # once is enough: it builds 20 models
    assert cli.main(["families", "--markdown", str(tmp_path / "families.md")]) == 0
    assert capsys.readouterr().out.rstrip("\n") == format_text(list(table.values()))
    assert (DOCS / "families.md").read_text(encoding="utf-8") == (tmp_path / "families.md").read_text(encoding="utf-8")
