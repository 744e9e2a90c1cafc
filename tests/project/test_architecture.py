"""The package keeps to docs/development/architecture.md: a module imports only modules before it in its table."""

import ast
import re
from pathlib import Path

import pytest

import ppdiffusers_tome
from ppdiffusers_tome.families.table import FAMILIES
from ppdiffusers_tome.methods import METHODS

PACKAGE = Path(ppdiffusers_tome.__file__).parent
DOCUMENT = Path(__file__).parents[2] / "docs" / "development" / "architecture.md"
FILES = sorted(PACKAGE.rglob("*.py"))


def documented_modules():
    """The modules of the table in its order, each package after its modules: "export.export", "export", …"""
    for package, modules in re.findall(r"^\| (.+?) \| (`.+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.M):
        prefix = package.strip("`").replace("/", ".") if package.startswith("`") else ""
        names = [f"{prefix}{module}".replace("/", ".") for module in re.findall(r"`([\w/]+)\.py`", modules)]
        if prefix == "methods.":  # each method is a module that imports those before it
            names += sorted({method.__module__.partition(".")[2] for method in METHODS.values()})
        yield from [*names, prefix.rstrip(".")] if prefix else names


RANK = {module: rank for rank, module in enumerate(documented_modules())}


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported_modules(path):
    folder = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder[: len(folder) - (node.level - 1)]
            package = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            # "from .package import module" imports the module
            modules = [name for alias in node.names if (name := f"{package}.{alias.name}".strip(".")) in RANK]
            yield from modules or [package]


def test_the_table_lists_every_module_once():
    modules = list(documented_modules())
    assert sorted(modules) == sorted(module_of(path) for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_run_one_way(path):
    module = module_of(path)
    backward = [other for other in imported_modules(path) if RANK[other] >= RANK[module]]
    assert not backward, f"{module} imports {backward}"


def test_serving_knows_exported_folders_only():
    """Beside its own modules, serving imports `run` and modules at the top that import no folder of the package."""
    imported = {name for path in (PACKAGE / "serving").glob("*.py") for name in imported_modules(path)}
    outside = {name for name in imported if name.partition(".")[0] not in ("serving", "run")}
    assert outside <= {"_version", "cores", "errors", "files", "progress"}, outside


def test_no_module_imports_what_stands_beside_the_package():
    """Evidence is in benchmarks/, which imports the package."""
    beside = {path.stem for path in (DOCUMENT.parents[2] / "benchmarks").iterdir()} | {
        "benchmarks",
        "tests",
        "examples",
    }
    assert "lab" in beside
    imported = {
        (module_of(path), name.partition(".")[0])
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in absolute_imports(node)
    }
    assert [pair for pair in imported if pair[1] in beside] == []


def absolute_imports(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []


def test_what_is_imported_before_paddle_does_not_import_it():
    """The package reports a missing Paddle, and a broken zlib, before it imports Paddle."""
    for module in ("_version", "errors", "compatibility"):
        assert not re.search(r"^(import|from) paddle", (PACKAGE / f"{module}.py").read_text(encoding="utf-8"), re.M)


def test_only_these_modules_know_the_modules_of_ppdiffusers():
    """All others import what ppdiffusers exports at its top level."""
    inside = re.compile(r"^ *(import|from) ppdiffusers\.", re.M)
    knowing = {module_of(path) for path in FILES if inside.search(path.read_text(encoding="utf-8"))}
    families = {"families.table", "families.grids", "families.models", "families.kernels"}
    assert knowing == {*families, "hub", "run.models", "run.stand_in", "serving.engine"}


def test_the_document_of_families_lists_the_entries_of_the_table():
    text = (DOCUMENT.parent / "families.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (`.+`) \| (`.+`) \|$", text.partition("### Add a family")[0], re.M)
    named = [(name, *(re.findall(r"`(\w+)`", cell) for cell in cells)) for name, *cells in rows]
    classes = [(family.transformers, family.blocks) for family in FAMILIES]
    names = [[[cls if isinstance(cls, str) else cls.__name__ for cls in part] for part in parts] for parts in classes]
    assert named == [(family.name, *parts) for family, parts in zip(FAMILIES, names, strict=True)]
