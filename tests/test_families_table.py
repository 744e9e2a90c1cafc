"""docs/families.md has a line for every pipeline class; test_families.py compares the lines with tiny pipelines."""

import inspect

import ppdiffusers
import pytest
from families_page import PAGE, WITHOUT_BUILDER, pipeline_classes, row, rows_of
from ppdiffusers_source import newer_class
from zoo import REFUSED, ZOO

# Listing all pipelines imports them; one needs ffmpeg and a module that Python 3.13 removes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'audioop' is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Couldn't find ffmpeg:RuntimeWarning"),
]
LISTED, ADDED = (rows_of(part) for part in PAGE.read_text(encoding="utf-8").split("## Added after"))


def test_page_has_all_pipeline_classes():
    assert {*pipeline_classes()} - {*ADDED} == {*LISTED}, "run tests/families_page.py"
    assert len(LISTED) == 126  # of ppdiffusers 0.29.0
    merging = sum("| yes |" in line for line in LISTED.values())
    assert f"{merging} of the {len(LISTED)} pipeline classes of ppdiffusers 0.29.0 merge." in PAGE.read_text()


def test_lines_without_a_tiny_pipeline_are_those_of_the_script():
    assert {name: line for name, line in LISTED.items() if name not in ZOO and name not in REFUSED} == {
        name: row(name) for name in WITHOUT_BUILDER
    }


@pytest.mark.parametrize("name", sorted({*LISTED, *ADDED}))
def test_components_exist_in_the_class(name):
    try:
        cls = getattr(ppdiffusers, name, None) or getattr(ppdiffusers.pipelines, name)
    except RuntimeError:
        pytest.skip("ppdiffusers cannot import it with this Paddle")
    except AttributeError:
        cls = newer_class(name)
    known = inspect.signature(cls).parameters
    _, merges, text, *_ = (cell.strip() for cell in (LISTED | ADDED)[name].strip("|").split(" | "))
    first = text.split("; ")[0]
    assert {*(first.split(", ") if merges == "yes" else [first.partition(":")[0]])} <= {*known}


def test_every_class_that_does_not_merge_has_a_reason():
    assert all(" | no | " not in line or ": " in line for line in (LISTED | ADDED).values())
