"""The figures in the documents are those of the committed results: see benchmarks/document_figures.py."""

import ast
import re
import shutil
from copy import deepcopy

import document_figures as figures
import pytest
import speed_results as stored
from lab.arm import Arm
from markdown_text import ROOT, documents, prose, text_of

from ppdiffusers_tome.comparison.results import write_result
from ppdiffusers_tome.config import ToMeConfig

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


def test_arms_that_a_result_lacks_have_no_row(monkeypatch):
    results = {f"alternatives_{images}": deepcopy(figures.read(f"alternatives_{images}")) for images in figures.SETS}
    for images, result in results.items():
        lacking = {"tomesd 0.5", *(["todo 0.75"] if "photographs" in images else [])}
        result["arms"] = [arm for arm in result["arms"] if arm["name"] not in lacking]
    monkeypatch.setattr(figures, "read", results.__getitem__)
    rows = {line.split(" | ")[0]: line for line in figures.table_of_images().splitlines()}
    assert "| tomesd 0.5" not in rows and "| todo 0.75" in rows
    assert rows["| todo 0.75"].split(" | ")[5:7] == ["–", "–"] and "–" not in rows["| interlace 0.5"]


CALL = r"`(pipe\.apply_tome\(ratio=.*?\))`"


@pytest.mark.parametrize(
    "document", ["README.md", "README_zh.md", "docs/usage.md", "docs/zh/usage.md", "docs/methods.md"]
)
def test_calls_that_documents_recommend_are_those_that_were_measured(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for call in re.findall(CALL, text):
        arguments(call)  # an argument that is not allowed raises
    marked = r"^.*`(pipe\.apply_tome\(.*?\))`.*<!--: (?:choice|alternative \S+) (.+?) -->"
    measured = re.findall(marked, text, re.MULTILINE)
    assert bool(measured) != document.startswith("README")  # the READMEs have no table of methods
    arms = {arm.name: arm for arm in figures.alternatives.list_arms()}
    for call, name in measured:
        assert Arm(arguments(call)).name == name == arms[name].name, f"{document}: {call}"


def arguments(call):
    """The settings of a call in a document, which are checked."""
    keywords = ast.parse(call, mode="eval").body.keywords
    return ToMeConfig(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords})


def test_a_figure_follows_its_result(tmp_path, monkeypatch):
    shutil.copy(figures.RESULTS / "scenes_unet.json", tmp_path / "a.json")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setitem(figures.LOOKUPS, "value", figures.value)
    text = "In <!--= value a rounds -->?<!--/--> rounds, of <!--= value a cases/*/tokens .1f -->9<!--/-->"
    assert figures.update(text) == text.replace("?", "3").replace("9<", "4096.0<")


def test_noise_is_that_of_gains_that_were_measured_again(tmp_path, monkeypatch):
    again = deepcopy(figures.read("scenes_unet"))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    write_result(tmp_path / "one.json", again)
    assert figures.noise() == ""
    slower = next(arm for arm in again["cases"][0]["arms"] if "config" in arm["arm"])
    slower["seconds"] = [1.1 * seconds for seconds in slower["seconds"]]
    write_result(tmp_path / "another.json", again)
    assert figures.noise() == "10 %"


def test_what_was_not_measured_is_a_dash(tmp_path, monkeypatch):
    assert figures.on_gpu("512", "2", "onnxruntime", "interlace", "0.9375") == figures.NOT_MEASURED
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    for name, *arguments in (
        ("memory", "sd15_eager", "512", "plain"),
        ("on_cpu", "onnxruntime", "512", "interlace", "0.5"),
        ("sdxl_block", "2", "1024", "interlace", "0.75"),
        ("by_runtime", "openvino"),
        ("loader_gain", "genai"),
    ):
        assert {*figures.LOOKUPS[name](*arguments)} == {figures.NOT_MEASURED}
    assert figures.table_of_sizes() == ""


def test_sizes_and_batches_are_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    arms = [stored.arm([4.0] * 3, memory=2), stored.arm([2.0] * 3, 0.5, memory=1)]
    cases = [stored.case(arms, size=size, batch=batch) for size in (128, 256) for batch in (2, 4)]
    stored.write(tmp_path / "scenes_sizes.json", stored.result(cases))
    head, _, first, *_, last = figures.table_of_sizes().splitlines()
    assert head == "| px | batch | plain | tomesd 0.5, use_rand=False |"
    assert first == "| 128 | 2 | 4.00 s, 2.00 GB | 2.00 s (2.00×), 1.00 GB |" and last.startswith("| 256 | 4 |")


def test_a_gain_is_near_the_quotient_of_the_times_beside_it():
    """Not equal to it: it is of the ratios within the rounds. 15.7 and 15.9 ms are no gain."""
    rows = [line.split(" | ") for line in figures.table_of_passes().splitlines()[2:]]
    pairs = [(float(row[5]), float(row[6]), row[7]) for row in rows]
    assert len(pairs) >= 5
    for row in (figures.gpu_row(size) for size in ("512", "768", "1024", "1536")):
        for plain, merged in (row[:2], row[2:]):
            milliseconds, _, gain = merged.partition(" (")
            pairs.append((float(plain), float(milliseconds), gain.removesuffix(")")))
    assert figures.gpu_row("512")[:2] == ["15.7", "15.9 (no difference)"]
    for plain, merged, gain in pairs:
        if gain != "no difference":
            assert float(gain[:-1]) == pytest.approx(plain / merged, rel=0.06), (plain, merged, gain)
            assert (float(gain[:-1]) > 1) == (plain > merged)


def test_words_of_a_figure_are_in_the_language_of_the_document():
    text = "a <!--= on_gpu 512 2 onnxruntime todo 0.75 -->?<!--/-->"
    assert ">no difference<" in figures.update(text) and ">无明显差异<" in figures.update(text, is_chinese=True)


def test_a_mark_names_a_function_of_the_table():
    """Nothing else of the module can be called from a document."""
    for name in ("json.loads", "main", "read", "update", "speedup"):
        with pytest.raises(KeyError, match=r"names no function: choose from .*speed_up"):
            figures.update(f"at <!--= {name} emoji_unet -->1<!--/-->")


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
