"""What the package imports is declared in setup.py, and constraints.txt has the versions of the lock files."""

import ast
import re
import runpy
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions

import pytest
import setuptools
from markdown_text import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ppdiffusers_tome
from ppdiffusers_tome.cli import _parser

PACKAGE = ROOT / "ppdiffusers_tome"
PADDLE = "paddlepaddle"  # of the extras cpu and gpu, one of which every environment has
PART_OF = {"starlette": "fastapi", "h11": "uvicorn", "pydantic-core": "pydantic"}  # installed with what is declared
# pip asks for these by names that the lock files replace or leave out.
FOR_PIP_ALONE = {"ligo-segments", "opencv-python", "openvino-telemetry"}

# Imports of this package alone are checked, because ppdiffusers brings many packages that it uses itself.
HELP = """
import builtins, sys

allowed, commands = [names.split(",") for names in sys.argv[1:]]
allowed, original = {*allowed, *sys.stdlib_module_names}, builtins.__import__

def checked_import(name, globals=None, locals=None, fromlist=(), level=0):
    importer = str((globals or {}).get("__name__"))
    if level == 0 and importer.partition(".")[0] == "ppdiffusers_tome" and name.partition(".")[0] not in allowed:
        raise ModuleNotFoundError(f"{importer} imports {name}, which install_requires does not bring")
    return original(name, globals, locals, fromlist, level)

builtins.__import__ = checked_import
from ppdiffusers_tome.cli import main

for command in [[], *([name] for name in commands)]:
    try:
        main([*command, "--help"])
    except SystemExit as end:
        assert end.code == 0
"""


@cache
def metadata():
    """The arguments of setup()."""
    arguments = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", arguments.update)
        runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def test_long_description_has_no_relative_links(monkeypatch):
    for address in (None, "https://example.org/tome/"):
        monkeypatch.setenv("REPOSITORY", address) if address else monkeypatch.delenv("REPOSITORY", raising=False)
        metadata.cache_clear()
        text = metadata()["long_description"]
        targets = re.findall(r"\]\(([^)]+)\)", text)
        assert targets and all(target.startswith(("https:", "#")) for target in targets)
        assert ("https://example.org/tome/blob/main/docs/usage.md#when-to-merge" in targets) == bool(address)
        assert ("![Two prompts" in text) == bool(address)
    metadata.cache_clear()


def names(requirements):
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def modules_of(distributions):
    """The modules that these distributions bring, as this environment has them; of absent ones that of their name."""
    brought = {
        module
        for module, names_of in packages_distributions().items()
        if distributions & {canonicalize_name(name) for name in names_of}
    }
    return brought | {name.replace("-", "_") for name in distributions}


def imported_modules():
    """Each module of other packages that a module of this package imports, at its top or in a function."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported = [node.module]
            else:
                continue
            for name in imported:
                if (root := name.partition(".")[0]) not in sys.stdlib_module_names:
                    yield path.relative_to(PACKAGE).as_posix(), root


def test_the_help_of_each_command_needs_only_what_every_installation_brings():
    assert ppdiffusers_tome.__file__.startswith(str(ROOT))
    (subparsers,) = (action for action in _parser()._actions if action.dest == "command")
    declared = names(metadata()["install_requires"])
    parts = {part for part, whole in PART_OF.items() if whole in declared}
    allowed = {"ppdiffusers_tome", *modules_of({PADDLE, *declared, *parts})}
    assert {"PIL", "tqdm", "paddle", "ppdiffusers", "pydantic"} <= allowed
    command = [sys.executable, "-W", "ignore", "-c", HELP, ",".join(sorted(allowed)), ",".join(subparsers.choices)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("usage: ") == 1 + len(subparsers.choices)


def test_every_import_is_declared():
    extras = metadata()["extras_require"].values()
    declared = {PADDLE, *names(metadata()["install_requires"]), *(name for extra in extras for name in names(extra))}
    allowed = modules_of(declared | {part for part, whole in PART_OF.items() if whole in declared})
    assert [pair for pair in imported_modules() if pair[1] not in allowed] == []


def pins(path):
    """The versions in a requirements file and those that it includes, by name and marker."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            found |= pins(path.parent / line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            name, version, marker = re.fullmatch(r"([\w.-]+)==([\w.+]+)(?: ; (.+))?", line).groups()
            assert found.setdefault((canonicalize_name(name), marker), version) == version
    return found


def constraints():
    return pins(ROOT / "constraints.txt")


def test_constraints_are_the_versions_of_the_lock_files():
    locked = pins(ROOT / "requirements.txt")
    for path in (PACKAGE / "requirements").glob("*.txt"):
        locked |= pins(path)
    assert {pin: version for pin, version in constraints().items() if pin[0] not in FOR_PIP_ALONE} == locked
    headless = constraints()["opencv-python-headless", None]
    assert constraints()["opencv-python", None] == headless
    assert {name for name, _ in constraints()} >= FOR_PIP_ALONE


def test_constraints_install_nothing():
    """pip takes what a file of constraints includes with -r as requirements."""
    assert not re.search(r"^\s*-", (ROOT / "constraints.txt").read_text(), re.M)
    commands = re.findall(r"pip install -c (\S+)", (ROOT / "setup.py").read_text())
    assert commands == ["constraints.txt"]


def test_constraints_name_a_version_of_all_that_is_declared():
    extras = {name: texts for name, texts in metadata()["extras_require"].items() if name != "gpu"}
    for text in [*metadata()["install_requires"], *(text for texts in extras.values() for text in texts)]:
        required = Requirement(text)
        versions = [v for (name, _), v in constraints().items() if name == canonicalize_name(required.name)]
        assert versions and all(required.specifier.contains(version) for version in versions), text


MADE_BY_HAND = {  # by packages and stamps in .venv/: whether make may install Paddle 3.3.1 for CPUs into it
    "nothing": ([], [], True),
    "README.md's installation for CPUs": (["paddlepaddle-3.3.1", "numpy-1.26.4"], [], True),
    "README.md's installation for GPUs": (["paddlepaddle_gpu-2.6.2", "numpy-1.26.4"], [], False),
    "a GPU's Paddle beside the CPU's": (["paddlepaddle-3.3.1", "paddlepaddle_gpu-3.3.1"], [], False),
    "another release of Paddle": (["paddlepaddle-2.6.2"], [], False),
    "other packages": (["numpy-1.26.4"], [], False),
    "make's own": (["paddlepaddle-2.6.2"], [".installed"], True),
    "make's own, interrupted": (["numpy-1.26.4"], [".made-by-make"], True),
}


@pytest.mark.parametrize(("packages", "stamps", "is_allowed"), MADE_BY_HAND.values(), ids=MADE_BY_HAND)
def test_make_installs_only_into_environments_that_it_made(packages, stamps, is_allowed, tmp_path):
    """The check runs before anything is installed; a folder whose pip does not run would be cleared after it."""
    venv = tmp_path / "venv"
    for package in packages:
        (venv / "lib" / "python3.11" / "site-packages" / f"{package}.dist-info").mkdir(parents=True)
    for stamp in stamps:
        (venv / stamp).touch()
    check = [ROOT / ".ci" / "check_environment.sh", venv, "requirements.txt", "paddle3"]
    assert subprocess.run(check, cwd=ROOT, capture_output=True).returncode == (0 if is_allowed else 1)
    if not is_allowed:
        demo = ["make", "demo", "STACK=paddle3", f"VENV={venv}"]
        done = subprocess.run(demo, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and "would install paddlepaddle 3.3.1 into it" in done.stderr
        assert f"{venv}/bin/python -m ppdiffusers_tome compare" in done.stderr and "VENV=.venv-make" in done.stderr
        assert sorted(venv.iterdir()) == [venv / "lib"]


def test_make_checks_an_environment_before_it_changes_it():
    """Of an environment that does not exist; `make -n` prints the commands and runs none."""
    command = ["make", "-n", "venv", "STACK=paddle3", "VENV=build/no-such-venv"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    check, create, mark, install = (
        printed.index(text)
        for text in (
            ".ci/check_environment.sh build/no-such-venv requirements.txt paddle3",
            "-m venv --clear build/no-such-venv",
            "touch build/no-such-venv/.made-by-make",
            "-r requirements.txt",
        )
    )
    assert check < create < mark < install
