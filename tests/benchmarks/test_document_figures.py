"""The figures in the documents are those of the committed results: see benchmarks/document_figures.py."""

import ast
import re

import document_figures as figures
import pytest
from lab.arm import Arm
from markdown_text import ROOT, documents, prose, text_of

from ppdiffusers_tome import ToMeConfig

PAGES = documents("README*.md", "docs/**/*.md", "benchmarks/README.md", "examples/emoji_sd/README.md")
DOCUMENTS = [page for page in PAGES if page != "docs/results.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_figures_are_those_of_the_results(document):
    path = ROOT / document
    assert path in figures.DOCUMENTS
    assert path.read_text(encoding="utf-8") == figures.updated(path), "run `make figures`"
    factors = re.findall(r"(?<![`\d])\d+\.\d+×(?!`)", figures.MARKED.sub("", prose(document)))
    rows = " ".join(match[0] for match in figures.ROW.finditer(text_of(document)))
    loose = [factor for factor in factors if factor not in rows]
    assert not loose, f"{document}: {loose} must be in a computed row or between marks"
    assert not (document.startswith("README") and "<!--" in prose(document)), "the text of a README has no marks"


def test_results_page_is_that_of_the_results(tmp_path):
    assert figures.write_results(tmp_path) == figures.RESULTS_PAGE.read_text(encoding="utf-8"), "run `make figures`"


CALL = r"`(pipe\.apply_tome\(ratio=.*?\))`"


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "README_zh.md",
        *(f"docs/{page}" for page in ("usage.md", "zh/usage.md", "methods.md", "zh/methods.md")),
    ],
)
def test_calls_that_documents_recommend_are_those_that_were_measured(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for call in re.findall(CALL, text):
        arguments(call)  # an argument that is not allowed raises
    marked = r"^.*`(pipe\.apply_tome\(.*?\))`.*<!--: (?:choice|alternative \S+) (.+?) -->"
    measured = re.findall(marked, text, re.MULTILINE)
    assert bool(measured) == document.endswith("usage.md")  # the other pages have no table of methods
    for call, name in measured:
        assert Arm(arguments(call)).name == name, f"{document}: {call}"


def arguments(call):
    """The settings of a call in a document, which are checked."""
    keywords = ast.parse(call, mode="eval").body.keywords
    return ToMeConfig(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords})


def test_a_gain_is_near_the_quotient_of_the_times_beside_it():
    """Not equal to it: it is of the ratios within the rounds. 15.7 and 15.9 ms are no gain."""
    rows = [line.split(" | ") for line in figures.table_of_passes().splitlines()[2:]]
    pairs = [(float(row[4]), float(row[5]), row[6]) for row in rows]
    assert len(pairs) >= 5
    for row in (figures.gpu_row(size) for size in ("512", "768", "1024", "1536")):
        for plain, merged in (row[:2], row[2:]):
            milliseconds, _, gain = merged.partition(" (")
            pairs.append((float(plain), float(milliseconds), gain.removesuffix(")")))
    assert figures.gpu_row("512")[:2] == ["15.7", "15.9 (no difference)"]
    for plain, merged, gain in pairs:
        if gain.endswith("×"):
            assert float(gain[:-1]) == pytest.approx(plain / merged, rel=0.06), (plain, merged, gain)
            assert (float(gain[:-1]) > 1) == (plain > merged)


def test_every_function_of_the_table_is_used():
    text = "".join(path.read_text(encoding="utf-8") for path in figures.DOCUMENTS)
    named = set(re.findall(r"<!--[=:] (\w+)", text))
    assert named == set(figures.LOOKUPS)


@pytest.mark.parametrize(
    "text",
    [
        "<!--= value -->1<!--/--> begins",
        "- a\n  <!--= value -->1<!--/--> begins",
        "no <!--= value -->1",
        "its unit <!--= value scenes_unet rounds -->10<!--/-->×",
        "| row | 1 <!--: choice 1 --> | 2 |",
        "| row | 1 <!--| choice 1 --> |",
    ],
)
def test_a_damaged_mark_is_an_error(text):
    with pytest.raises(AssertionError):
        figures.update(text)
