"""What the documents and the package's metadata say is so."""

import doctest
import json
import re
from importlib.metadata import requires, version
from pathlib import Path

import paddle
import pytest

import ppdiffusers_tome
from ppdiffusers_tome import config, matching, merging

ROOT = Path(__file__).parents[1]
NAMES = {"paddle": paddle, **{name: getattr(ppdiffusers_tome, name) for name in ppdiffusers_tome.__all__}}


@pytest.mark.parametrize("module", [config, matching, merging])
def test_examples_of_the_docstrings(module):
    tests = [test for test in doctest.DocTestFinder().find(module, extraglobs=NAMES) if test.examples]
    assert tests
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0


def test_examples_of_the_api_document():
    found = doctest.testfile(str(ROOT / "docs" / "api.md"), module_relative=False)
    assert found.attempted > 3 and found.failed == 0


def test_version_is_said_once():
    assert version("ppdiffusers_tome") == ppdiffusers_tome.__version__
    assert f"## [{ppdiffusers_tome.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_paddle_is_an_extra_and_never_both():
    always = [each for each in requires("ppdiffusers_tome") if "extra ==" not in each]
    assert always and not [each for each in always if each.startswith("paddlepaddle")]


@pytest.mark.parametrize("readme", ["README.md", "README_zh.md"])
def test_figures_are_those_of_the_committed_results(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    for row in json.loads((ROOT / "benchmarks" / "ops.json").read_text())["milliseconds"].values():
        assert f"| {row['ours']:.2f} | {row['built-in']:.2f} | {row['times faster']:.1f}× |" in text
    for size in (128, 256):
        for row in json.loads((ROOT / "benchmarks" / f"text_to_image_{size}.json").read_text())["rows"]:
            assert f"| {row['seconds']:.1f} |" in text
            if row["row"] != "plain":
                assert f"| {row['MACs saved']:.1%} | {row['seconds']:.1f} | {row['speed-up']:.2f}× |" in text


@pytest.mark.parametrize("readme", ["README.md", "README_zh.md"])
def test_edge_distances_are_those_of_the_committed_result(readme):
    text = " ".join((ROOT / readme).read_text(encoding="utf-8").split())
    result = json.loads((ROOT / "benchmarks" / "controlnet_canny_128.json").read_text(encoding="utf-8"))
    told = {row: f"{ways['given to drawn']:.1f} px" for row, ways in result["edge distances, px"].items()}
    speed = {row["row"]: f"{row['speed-up']:.2f}×" for row in result["rows"]}["0.5"]
    if readme == "README.md":
        sentence = f"{told['without']} without, {told['plain']} plain, {told['0.5']} at ratio 0.5"
        assert sentence in text and f"{speed} at 0.5" in text
    else:
        assert f"无 ControlNet {told['without']}，不合并 {told['plain']}，比例 0.5 时 {told['0.5']}" in text
        assert f"0.5 时 {speed}" in text


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "README_zh.md",
        "CONTRIBUTING.md",
        "examples/README.md",
        "docs/api.md",
        "docs/inference.md",
        "docs/ppdiffusers.md",
        "docs/serving.md",
    ],
)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert link.startswith("http") or (path.parent / link).exists(), link


def test_predictor_figures_are_those_of_the_committed_result():
    text = (ROOT / "docs" / "inference.md").read_text(encoding="utf-8")
    for case in json.loads((ROOT / "benchmarks" / "results" / "inference.json").read_text())["cases"]:
        row = next(line for line in text.splitlines() if line.startswith(f"| {case['case']['name']} "))
        times = {name: f"{each['median']:.0f}" for name, each in case["milliseconds"].items()}
        kinds = ("plain", "ToMe", "free merge")
        for backend, its_kinds in (("eager", kinds), ("predictor", kinds), ("PyTorch", kinds[:2])):
            assert " / ".join(times[f"{backend} {kind}"] for kind in its_kinds) in row
        ratios = [case["speed-up"][name] for name in ("eager free merge", "predictor ToMe", "predictor free merge")]
        ratios += [case["times faster than"][name]["predictor ToMe"] for name in ("eager plain", "PyTorch ToMe")]
        assert " | ".join(f"{each['median']:.2f}×" for each in ratios) in row


def test_load_figures_are_those_of_the_committed_result():
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks" / "results" / "load.json").read_text())
    assert result["violations"] == []
    assert f"{result['requests']:,} requests, {result['abandoned']['by clients']} of them abandoned" in text
    for kind, seconds in result["seconds to pictures"].items():
        assert f"| {kind} | {seconds['p50']:.1f} | {seconds['p95']:.1f} |" in text
    memory = result["memory, MiB"]
    assert f"{memory['second quarter']} MiB in the second quarter, {memory['last quarter']} in the last" in text
