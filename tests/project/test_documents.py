"""Examples, commands, links and reports in the documents, and the package's metadata."""

import doctest
import json
import re
import shutil
import sys
import warnings
from importlib.metadata import requires, version

import alternatives
import gpu_onnx
import numpy as np
import paddle
import pytest
from conftest import tiny_pipeline
from lab.speed import speed_report
from lab.speed.architectures import ARCHITECTURES
from markdown_text import (
    COMMANDS,
    ROOT,
    anchors,
    bare_commands_in_cells,
    commands,
    documents,
    links,
    snippets,
    tables,
    tables_in,
    text_of,
)
from PIL import Image
from zoo import ZOO

import ppdiffusers_tome
from ppdiffusers_tome import ToMeConfig, cli, grid, inference, wording
from ppdiffusers_tome.comparison import clock
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.methods import METHODS, config, matching, plan

RESULTS = ROOT / "benchmarks" / "results"
NAMES = {"paddle": paddle, **{name: getattr(ppdiffusers_tome, name) for name in ppdiffusers_tome.__all__}}
DOCUMENTS = documents("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md", "tests/**/*.md")
OPTION = r"--[a-z][a-z0-9-]*"
HISTORY = ["CHANGELOG.md"]  # it quotes commands of its time


COMMON = ToMeConfig.defaults()  # the settings that all methods have
OF_METHODS = [sys.modules[method.__module__] for method in METHODS.values()]


@pytest.mark.parametrize(
    "module", [config, *OF_METHODS, wording, grid, plan, matching, clock], ids=lambda module: module.__name__
)
def test_examples_in_docstrings(module):
    tests = [test for test in doctest.DocTestFinder().find(module, extraglobs=NAMES) if test.examples]
    assert tests
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0


def documented_defaults(rows):
    """The names in the first column of a table, each with its default in the second one."""
    documented = {}
    for names, values, _ in rows:
        if names.startswith("`"):
            pairs = zip(names.split(","), values.split(","), strict=True)
            documented |= {name.strip().strip("`"): value.strip().strip('`"') for name, value in pairs}
    return documented


@pytest.mark.parametrize(("document", "default"), [("docs/api.md", "default"), ("docs/zh/api.md", "默认值")])
def test_api_document_has_the_defaults_of_apply_tome(document, default):
    (rows,) = [rows for header, *rows in tables(document) if header[1] == default]
    common = {name: value for name, value in ToMeConfig().settings().items() if name in COMMON}
    expected = {**common, "config": None, "controlnet": True}
    assert documented_defaults(rows) == {name: str(value) for name, value in expected.items()}


@pytest.mark.parametrize(("document", "setting"), [("docs/methods.md", "setting"), ("docs/zh/methods.md", "设置")])
@pytest.mark.parametrize("method", METHODS)
def test_methods_document_has_the_settings_of_each_method(method, document, setting):
    """In a table in its section, beside those that all methods have."""
    (_, section) = text_of(document).split(f"\n## `{method}`\n")
    rows, *_ = [rows for header, *rows in tables_in(section.partition("\n## ")[0]) if header[0] == setting]
    settings = METHODS[method]().settings()
    expected = {name: str(value) for name, value in settings.items() if name == "ratio" or name not in COMMON}
    assert documented_defaults(rows) == expected


@pytest.mark.parametrize(
    ("document", "header"), [("docs/api.md", ["module", "names"]), ("docs/zh/api.md", ["模块", "名称"])]
)
def test_api_document_lists_what_is_public(document, header):
    (rows,) = [rows for first, *rows in tables(document) if first == header]
    documented = {module.strip("`"): sorted(re.findall(r"`(\w+)`", names)) for module, names in rows}
    assert documented == {module.__name__: sorted(module.__all__) for module in (ppdiffusers_tome, inference)}
    assert all(hasattr(module, name) for module in (ppdiffusers_tome, inference) for name in module.__all__)


def test_usage_has_the_work_that_the_summary_counts():
    """Of the published architectures, without weights."""
    (rows,) = [rows for header, *rows in tables("docs/usage.md") if header[-1] == "with `max_downsample=4`"]
    names = {"Stable Diffusion 1.5": "sd15", "SDXL": "sdxl", "SDXL refiner": "sdxl-refiner"}
    with paddle.LazyGuard():
        unets = {model: ARCHITECTURES[name].build() for model, name in names.items()}
    merging = {  # how many blocks merge, and of how many: by default as "By model" says, and at level 4 too
        "Stable Diffusion 1.5": {None: 5, 4: 15, "all": 16},
        "SDXL": {None: 10, 4: 70, "all": 70},
        "SDXL refiner": {None: 20, 4: 40, "all": 44},
    }
    for model, size, *documented in rows:
        side = int(size.removesuffix(" px")) // 8
        shares = []
        for level in (None, 4):
            ppdiffusers_tome.apply_tome(unets[model], max_downsample=level)
            summary = ppdiffusers_tome.tome_summary(unets[model], side, side)
            shares.append(f"{100 * summary.saved_share:.1f} %")
            assert sum(bool(block.merges) for block in summary.blocks) == merging[model][level]
            assert len(find_blocks(unets[model])) == merging[model]["all"]
        assert documented == shares


SNIPPETS = [(document, number) for document in DOCUMENTS for number in range(len(snippets(document)))]
CHINESE = [
    "README_zh.md",
    *documents("docs/zh/*.md", "examples/README_zh.md"),
]  # their snippets equal those of the English documents
IN_ORDER = ("README.md", "docs/usage.md", "docs/export.md", "docs/serve.md")  # test_pages.py runs them
WITHOUT_PACKAGE = ("examples/emoji_sd/README.md",)


def described(document):
    """The variables that the text around the snippets of a document describes."""
    if document == "tests/golden/README.md":
        case = json.loads(str(np.load(ROOT / "tests" / "golden" / "unet.npz")["cases"]))[0]
        return {"np": np, **{name: case[name] for name in ("B", "h", "w", "seed")}}
    tiny = ZOO["TextToVideoSDPipeline"]() if document == "docs/development/families.md" else None
    return {"pipe": tiny.pipe, "call": tiny.call} if tiny else {"pipe": tiny_pipeline(), "prompt": "a fox"}


def run_here(code, variables):
    """Run a snippet in this process, where all is imported already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if code.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(code, variables, "snippet", None, 0)
            assert doctest.DocTestRunner().run(test).failed == 0
        else:
            exec(code, variables)


@pytest.mark.parametrize("document", sorted({document for document, _ in SNIPPETS} - {*CHINESE, *IN_ORDER}))
def test_snippets_run(document, monkeypatch, tmp_path):
    """One after the other, as they stand but for fewer steps, on the CPU, with the bundled models."""
    (tmp_path / "build").mkdir()
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    codes = [re.sub(r"(num_inference_steps=)\d+", r"\g<1>2", code) for code in snippets(document)]
    if paddle.__version__.startswith("2."):
        codes = [code for code in codes if "paddle.incubate.jit" not in code]  # of Paddle 3
    assert ("ppdiffusers_tome" not in "".join(codes)) or document not in WITHOUT_PACKAGE
    monkeypatch.chdir(tmp_path)
    ppdiffusers_tome.ToMeConfig().save("tome_config.json")
    variables = described(document)
    for code in codes:
        run_here(code, variables)
    for name in re.findall(r"\.save\(\"(.+?\.png)\"\)", "".join(codes)):
        assert Image.open(tmp_path / name).getextrema() != ((255, 255),) * 3


@pytest.mark.parametrize("document", CHINESE)
def test_chinese_pages_have_figures_snippets_commands_and_tables_of_the_english_ones(document):
    """Their snippets do not run in a test, because they equal those of the English pages."""
    english = document.replace("/zh/", "/").replace("_zh.md", ".md")
    assert figures(document) == figures(english)
    assert without_comments(document) == without_comments(english)
    assert list(commands(document)) == list(commands(english))
    assert outline(document) == outline(english)


def figures(document):
    """The marks of figures, and how many images there are."""
    text = text_of(document)
    return sorted(re.findall(r"<!--[=:] (.+?) -->", text)), text.count("![")


def outline(document):
    """The levels of the headings, and the number of cells in each row of each table."""
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text_of(document), re.MULTILINE)]
    return levels, [[len(row) for row in rows] for rows in tables(document)]


def without_comments(document):
    return [re.sub(" *#.*", "", snippet) for snippet in snippets(document)]


@pytest.mark.parametrize(
    ("document", "number"), [*SNIPPETS, *((script, None) for script in documents("examples/*.py"))]
)
def test_paddle_is_not_imported_first(document, number):
    """Paddle 2.6 breaks zlib, and so Pillow, if it is imported before both."""
    code = text_of(document) if number is None else snippets(document)[number]
    imported = re.findall(r"^(?:>>> )?(?:import|from) (\w+)", code, re.MULTILINE)
    safe = ("ppdiffusers_tome", "PIL", "zlib")
    first = next((name for name in imported if name in ("paddle", "ppdiffusers", *safe)), None)
    assert first in (None, *safe)


def test_installed_version_is_in_the_changelog():
    assert version("ppdiffusers_tome") == ppdiffusers_tome.__version__
    assert f"## [{ppdiffusers_tome.__version__}]" in text_of("CHANGELOG.md")
    assert f"\nversion: {ppdiffusers_tome.__version__}\n" in text_of("CITATION.cff")


def test_paddle_is_an_extra_only():
    always = [requirement for requirement in requires("ppdiffusers_tome") if "extra ==" not in requirement]
    assert always and not [requirement for requirement in always if requirement.startswith("paddlepaddle")]


def test_reports_are_those_of_the_committed_results(tmp_path, empty_plots, monkeypatch):
    """Line by line, so that no report changes unseen."""
    monkeypatch.setattr(alternatives, "label_points", lambda *_: None)
    results = shutil.copytree(RESULTS, tmp_path / "results")
    for sheet in RESULTS.parent.glob("alternatives_*_sheet.jpg"):
        shutil.copy(sheet, tmp_path)
    speed_report.write_report(sorted(results.glob("*.json")), tmp_path)
    alternatives.write_report(sorted(results.glob("alternatives_*.json")), tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_onnx.py", "report", "--result", str(results / "gpu_onnx.json")])
    gpu_onnx.main()
    pages = list(tmp_path.glob("*.md"))
    assert len(pages) == 3
    for page in pages:
        assert text_of(f"benchmarks/{page.name}") == page.read_text(encoding="utf-8"), page.name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    folder = (ROOT / document).parent
    for link in links(document):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = folder / path if path else ROOT / document
            assert target.exists(), f"{document}: there is no {link}"
            assert not anchor or anchor in anchors(target), f"{document}: {link} leads to no heading"


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in HISTORY])
def test_commands_exist_with_their_options(document, capsys):
    for words in commands(document):
        options = {option for word in words if re.fullmatch(OPTION, option := word.strip("[]"))}
        missing = options - options_of(words, capsys)
        assert not missing, f"{document}: {' '.join(words)}: unknown {sorted(missing)}"


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in HISTORY])
def test_whole_commands_are_accepted(document):
    """In blocks of shell code, in cells of tables and in sentences; nothing is run, and no file needs to be there."""
    for words in commands(document):
        if words[:3] == ["python", "-m", "ppdiffusers_tome"] and "--model" in words and "…" not in words:
            cli._parser().parse_args(words[3:])


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in HISTORY])
def test_commands_in_tables_can_be_pasted(document):
    assert bare_commands_in_cells(document) == []


@pytest.mark.parametrize("document", ["docs/usage.md", "docs/zh/usage.md"])
def test_rows_of_a_size_export_this_size(document):
    """An export has the model's own size where its command names none."""
    rows = [row for header, *rows in tables(document) if len(header) == 6 for row in rows]
    exports = [row for row in rows if " export --model " in row[2]]
    assert len(exports) == 2
    for _, size, command, *_ in exports:
        assert f"--size {size.removesuffix(' px')} --no-safety-checker" in command


@pytest.mark.parametrize(("document", "command"), [("docs/export.md", "export"), ("docs/serve-ops.md", "serve")])
def test_tables_of_options_name_options_that_exist(document, command, capsys):
    (rows,) = [rows for header, *rows in tables(document) if header[0] == "option"]
    documented = {option for row in rows for option in re.findall(OPTION, row[0])}
    missing = documented - set(re.findall(OPTION, help_of([command], capsys)))
    assert documented and not missing, f"{document}: {command} has no {sorted(missing)}"


def test_table_of_options_of_serve_has_their_defaults(capsys):
    (rows,) = [rows for header, *rows in tables("docs/serve-ops.md") if header[:2] == ["option", "default"]]
    text = help_of(["serve"], capsys)
    documented = {}
    for names, values, _ in rows:
        pairs = zip(re.findall(OPTION, names), values.split(", "), strict=False)
        documented |= {name: value for name, value in pairs if re.fullmatch(r"[\d.]+", value)}
    defaults = {name: re.search(rf"  {name} [A-Z_]+\s.*?\(default:\s+(.*?)\)", text, re.DOTALL) for name in documented}
    assert {"--port", "--queue", "--max-prompt"} <= set(documented)
    for name, value in documented.items():
        default = defaults[name].group(1).removesuffix(".0")
        assert default == value, f"docs/serve-ops.md: the default of {name} is {default}, not {value}"


def options_of(words, capsys):
    """The options of a command by its help, of a script by its source."""
    if words[0] == "make":
        targets = [word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)]
        assert all(re.search(rf"^{target}:", text_of("Makefile"), re.MULTILINE) for target in targets), words
        return set()
    if words[1] != "-m":
        script = text_of(words[1])
        shared = re.findall(r"from ppdiffusers_tome\.commands\.(\w+)", script)
        sources = [script, *(text_of(f"ppdiffusers_tome/commands/{module}.py") for module in shared)]
        return set(re.findall(rf'"({OPTION})"', "".join(sources)))
    names = [word for word in words[3:5] if word in (*COMMANDS, "report")]
    return set(re.findall(OPTION, help_of(names, capsys)))


def help_of(names, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*names, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out
