"""docs/families.md and `python -m ppdiffusers_tome families`; test_families.py runs the pipelines themselves."""

import inspect
from pathlib import Path

import ppdiffusers
import pytest
from ppdiffusers_source import newer_class

from ppdiffusers_tome import cli
from ppdiffusers_tome.commands import families
from ppdiffusers_tome.published.families import ADDED, PIPELINES, format_text, pipeline_classes, pipeline_support

# Listing all pipelines imports them; one needs ffmpeg and a module that Python 3.13 removes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'audioop' is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Couldn't find ffmpeg:RuntimeWarning"),
]
DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def table():
    return {row.pipeline: row for row in pipeline_support()}


def test_table_has_all_pipeline_classes():
    added = {row.pipeline for row in ADDED}
    assert {*pipeline_classes()} | added == {*PIPELINES}
    assert len({*PIPELINES} - added) == 126  # of ppdiffusers 0.29.0


@pytest.mark.parametrize("row", ADDED, ids=lambda row: row.pipeline)
def test_added_classes(row, table):
    newer_class(row.pipeline)
    assert table[row.pipeline] == row


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_components_exist_in_the_class(name):
    try:
        cls = getattr(ppdiffusers, name, None) or getattr(ppdiffusers.pipelines, name)
    except RuntimeError:
        pytest.skip("ppdiffusers cannot import it with this Paddle")
    except AttributeError:
        cls = newer_class(name)
    assert set(PIPELINES[name]) <= set(inspect.signature(cls).parameters)


def test_every_class_that_does_not_merge_has_a_reason(table):
    for row in table.values():
        assert row.merges == bool(row.blocks)
        assert row.merges or (row.reason and "no reason is known" not in row.reason)


def test_unknown_pipeline_class_is_an_error(monkeypatch, capsys):
    monkeypatch.delitem(PIPELINES, "DiTPipeline")
    assert cli.main(["families"]) == 2
    assert "also has DiTPipeline: call apply_tome() on such a pipeline" in capsys.readouterr().err


def test_committed_page_is_the_output_of_the_command(table, tmp_path, capsys, monkeypatch):
    if ADDED[0].pipeline in table:
        pytest.skip("the page is of ppdiffusers 0.29.0")
    monkeypatch.setattr(families, "pipeline_support", lambda: list(table.values()))  # saves building 20 models again
    assert cli.main(["families", "--markdown", str(tmp_path / "families.md")]) == 0
    assert capsys.readouterr().out.rstrip("\n") == format_text(list(table.values()))
    assert (DOCS / "families.md").read_text(encoding="utf-8") == (tmp_path / "families.md").read_text(encoding="utf-8")
