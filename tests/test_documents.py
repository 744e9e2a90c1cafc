"""What the documents and the package's metadata say is so."""

import doctest
import json
import re
import shutil
import statistics
from importlib.metadata import requires, version
from pathlib import Path
from types import SimpleNamespace

import paddle
import pytest
from conftest import tiny_pipeline
from ppdiffusers import StableDiffusionPipeline

import ppdiffusers_tome
from ppdiffusers_tome import config, matching, merging
from ppdiffusers_tome.evaluation.quality import report
from ppdiffusers_tome.evaluation.speed import tables
from ppdiffusers_tome.evaluation.speed.results import read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
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


def test_first_lines_of_the_readme_choose_a_dtype_that_the_device_has(monkeypatch):
    pipe = tiny_pipeline()
    asked = []
    monkeypatch.setattr(StableDiffusionPipeline, "from_pretrained", lambda *a, **given: asked.append(given) or pipe)
    monkeypatch.setattr(StableDiffusionPipeline, "__call__", lambda *a: SimpleNamespace(images=["an image"]))
    lines = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL).group(1)
    for device, dtype in (("cpu", paddle.float32), ("gpu:0", paddle.float16)):
        monkeypatch.setattr(paddle, "get_device", lambda device=device: device)
        exec(lines, {})
        assert asked.pop() == {"paddle_dtype": dtype} and pipe.tome_summary().blocks


def test_version_is_said_once():
    assert version("ppdiffusers_tome") == ppdiffusers_tome.__version__
    assert f"## [{ppdiffusers_tome.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_paddle_is_an_extra_and_never_both():
    always = [each for each in requires("ppdiffusers_tome") if "extra ==" not in each]
    assert always and not [each for each in always if each.startswith("paddlepaddle")]


def unet_rows():
    """Stable Diffusion 1.5's UNet: figures of plain, then of each ratio, as cells; attention plain, then sliced."""
    (case,) = speed("sd15_unet")
    for plain, merged in (("plain", "tome"), ("memory-efficient", "both")):
        arms = [case.find(plain, "eager"), *(case.find(merged, "eager", ratio) for ratio in (0.25, 0.5, 0.75))]
        for arm in arms:
            faster = case.times_faster(arm, arms[0]).median
            seconds, memory = statistics.median(arm.seconds), arm.peak_memory_bytes / 1e9
            yield f"| {seconds:.1f} | {faster:.2f}× | {memory:.1f} |"


def picture_rows():
    """Whole pictures of the bundled model: size and batch, then plain's and ToMe's seconds and their ratio."""
    for case in speed("emoji_pipeline_128") + speed("emoji_pipeline_256"):
        cells = []
        for backend in ("eager", "predictor"):
            plain, merged = case.find("plain", backend), case.find("tome", backend, 0.5)
            seconds = [statistics.median(arm.seconds) for arm in (plain, merged)]
            cells += [f"{seconds[0]:.1f}", f"{seconds[1]:.1f}", f"{case.times_faster(merged, plain).median:.2f}×"]
        yield f"| {case.size} px | {case.batch} | {' | '.join(cells)} |"


def quality_rows():
    """Each ratio of the quality result, then what another seed has."""
    result = json.loads((RESULTS / "quality.json").read_text())
    ratios = [each for each in result["settings"] if each["group"] == "ratio"]
    for each in ratios:
        yield quality_row(f"{each['config']['ratio']:g}", each["pairs"], each["set"]["to plain, other seeds"])
    other = result["calibration"]["plain, other seeds"]
    yield quality_row("", other["pairs"], other["set"])


def quality_row(name, pairs, apart):
    psnr, ssim, perceptual = (statistics.median(pairs[measure]) for measure in ("psnr", "ssim", "perceptual"))
    kid = apart["kid"]
    return (
        f"{name} | {psnr:.1f} | {ssim:.3f} | {perceptual:.4f} | {1000 * kid['mean']:.1f} ± {1000 * kid['std']:.1f} |"
    )


def said_in_words():
    """Figures of the paragraphs on where merging does not help, and on tomesd."""
    small = speed("emoji_unet")[0]
    for backend in ("eager", "predictor"):
        yield f"{small.speed_up(small.find('tome', backend, 0.5)).median:.2f}×"
    for case, digits in ((speed("sd15_unet")[0], 2), (speed("sd15_block")[-1], 1)):
        merged = case.find("tome", "eager", 0.5)
        yield f"{case.speed_up(merged).median:.{digits}f}×"
        yield f"{case.find('plain', 'eager').macs / merged.macs:.{digits}f}×"
    torch = small.times_faster(small.find("tome", "PyTorch", 0.5), small.find("tome", "eager", 0.5))
    yield f"{torch.median:.1f}"
    result = json.loads((RESULTS / "quality.json").read_text())
    for name in ("0.5-tomesd", "0.5"):
        setting = next(each for each in result["settings"] if each["name"] == name)
        yield f"{statistics.median(setting['pairs']['perceptual']):.4f}"
    cases = speed("emoji_unet") + speed("sd15_block")
    distances = [case.distance(arm) for case in cases for arm in case.arms if arm.arm == "tome"]
    reached = [each.median <= 0.03 for each in distances if each is not None]
    yield f"{sum(reached)} of {len(reached)}"


def speed(name):
    return read([RESULTS / f"{name}.json"])[0][0].cases


@pytest.mark.parametrize("readme", ["README.md", "README_zh.md"])
def test_figures_are_those_of_the_committed_results(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    for row in json.loads((ROOT / "benchmarks" / "ops.json").read_text())["milliseconds"].values():
        assert f"| {row['ours']:.2f} | {row['built-in']:.2f} | {row['times faster']:.1f}× |" in text
    for row in (*unet_rows(), *picture_rows(), *quality_rows(), *said_in_words()):
        assert row in text, row


def test_reports_are_those_of_the_committed_results(tmp_path, monkeypatch):
    """Line by line, so that no report changes unseen; the sheets' images alone are not made again."""
    shutil.copytree(RESULTS, tmp_path / "results")
    monkeypatch.setattr(tables.plots, "save", lambda figure, path: None)
    speed = tables.write_report(sorted((tmp_path / "results").glob("*.json")), tmp_path)
    assert speed == (ROOT / "benchmarks" / "speed.md").read_text(encoding="utf-8")
    file = tmp_path / "results" / "quality.json"
    quality = report.write_report(json.loads(file.read_text()), tmp_path, None, file)
    assert (ROOT / "benchmarks" / "quality.md").read_text(encoding="utf-8").startswith(quality)


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
        "benchmarks/README.md",
        "benchmarks/quality.md",
        "benchmarks/speed.md",
        "docs/api.md",
        "docs/evaluation.md",
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
    for row in predictor_rows():
        assert row in text


def predictor_rows():
    """One pass of the bundled UNet by each backend: plain's, ToMe's and the limit's milliseconds, and ratios."""
    for case in speed("emoji_unet"):
        for backend, kinds in (("eager", 3), ("predictor", 3), ("PyTorch", 2)):
            arms = [case.find("plain", backend), case.find("tome", backend, 0.5), case.find("limit", backend, 0.5)]
            cells = [f"{1e3 * statistics.median(arm.seconds):.0f}" for arm in arms[:kinds]] + ["–"] * (3 - kinds)
            cells.append(f"{case.speed_up(arms[1]).median:.2f}×")
            cells.append(f"{case.speed_up(arms[2]).median:.2f}×" if arms[2] else "–")
            cells.append(f"{case.times_faster(case.find('tome', 'predictor', 0.5), arms[0]).median:.2f}×")
            yield f"| {case.size} px | {backend} | {' | '.join(cells)} |"


def test_load_figures_are_those_of_the_committed_result():
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks" / "results" / "load.json").read_text())
    assert result["violations"] == []
    assert f"{result['requests']:,} requests, {result['abandoned']['by clients']} of them abandoned" in text
    for kind, seconds in result["seconds to pictures"].items():
        assert f"| {kind} | {seconds['p50']:.1f} | {seconds['p95']:.1f} |" in text
    memory = result["memory, MiB"]
    assert f"{memory['second quarter']} MiB in the second quarter, {memory['last quarter']} in the last" in text
    for case, alone in result["alone, 20 steps"].items():
        size, ratio = re.fullmatch(r"(\d+)x\d+, ratio (\S+)", case).groups()
        assert f"| {size} px | {ratio} | {alone['seconds an image']:.2f} | {alone['images an hour']:,} |" in text
