"""The tree keeps to docs/architecture.md: imports run one way, and no file grows into two rooms."""

import ast
import re
from pathlib import Path

import pytest

import ppdiffusers_tome

PACKAGE = Path(ppdiffusers_tome.__file__).parent
# Each room may import from those before it; a line's rooms not from each other.
ORDER = [
    ["_version", "errors"],
    ["compatibility", "config"],
    ["positions"],
    ["matching"],
    ["merging", "levels"],
    ["models"],
    ["limits", "hooks"],
    ["patch"],
    ["macs"],
    ["summary"],
    ["mixin"],
    ["inference.layers"],
    ["inference.manifest", "inference.programs", "inference.runtime", "inference.loading"],
    ["inference.request", "inference.tracing"],
    ["inference.layout"],
    ["inference.models"],
    ["inference.export", "inference.pipeline"],
    ["inference"],
    ["serving.errors"],
    ["serving.jobs", "serving.settings", "serving.metrics"],
    ["serving.engine", "serving.pictures", "serving.service"],
    ["serving.queue", "serving.protocol"],
    ["serving.refusals"],
    ["serving.gate", "serving.drawing"],
    ["serving.api_openai", "serving.api_webui", "serving.server"],
    ["serving.app"],
    ["serving.ray_session"],
    ["serving.cluster"],
    ["serving"],
    ["generation.prompts"],
    ["generation.offline"],
    ["generation.actors"],
    ["generation"],
    ["published.layouts", "published.architectures"],
    ["published.families"],
    ["published"],
    ["evaluation.environment", "evaluation.clock", "evaluation.free_merge", "evaluation.plotting"],
    ["evaluation.worker_loop"],
    ["evaluation.worker_process", "evaluation.torch_worker"],
    ["evaluation.results", "evaluation.markdown"],
    ["evaluation.operations", "evaluation.torch_unet", "evaluation.torch_arm"],
    [
        "evaluation.speed.memory",
        "evaluation.speed.overhead",
        "evaluation.speed.names",
        "evaluation.speed.original",
        "evaluation.speed.shares",
    ],
    ["evaluation.speed.cases"],
    ["evaluation.speed.workloads", "evaluation.speed.subjects"],
    ["evaluation.speed.ways"],
    ["evaluation.speed.backends", "evaluation.speed.parity", "evaluation.speed.arms", "evaluation.speed.agreement"],
    ["evaluation.speed.worker", "evaluation.speed.partial", "evaluation.speed.progress", "evaluation.speed.summary"],
    ["evaluation.speed.runner"],
    ["evaluation.speed.frame", "evaluation.speed.results"],
    ["evaluation.speed.plots", "evaluation.speed.markdown"],
    ["evaluation.speed.compare", "evaluation.speed.details", "evaluation.speed.original_layouts"],
    ["evaluation.speed.findings"],
    ["evaluation.speed.report", "evaluation.speed.tables"],
    ["evaluation.speed"],
    ["evaluation.quality.compiled"],
    ["evaluation.quality.torch_files", "evaluation.quality.settings", "evaluation.quality.sheets"],
    ["evaluation.quality.networks", "evaluation.quality.efficientnet", "evaluation.quality.perceptual"],
    ["evaluation.quality.recording", "evaluation.quality.findings"],
    [
        "evaluation.quality.metrics",
        "evaluation.quality.distances",
        "evaluation.quality.merge_maps",
        "evaluation.quality.plots",
    ],
    ["evaluation.quality.engines"],
    ["evaluation.quality.drawing"],
    ["evaluation.quality.prompts", "evaluation.quality.timing", "evaluation.quality.measuring"],
    ["evaluation.quality.report"],
    ["evaluation.quality.evaluation"],
    ["evaluation.quality"],
    ["evaluation"],
    ["commands.drawers"],
    [f"commands.{name}" for name in ("bench", "evaluate", "families", "export", "generate", "serve")],
    ["commands"],
    ["cli"],
    ["__init__", "__main__"],
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported_rooms(path):
    inside = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = inside[: len(inside) - (node.level - 1)]
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            # "from .rooms import room" is an arrow to each room, not to the house
            rooms = [f"{module}.{alias.name}" for alias in node.names if f"{module}.{alias.name}" in RANK]
            yield from rooms or [module]


@pytest.mark.parametrize("path", FILES, ids=room_of)
def test_imports_run_one_way(path):
    room = room_of(path)
    backward = [other for other in imported_rooms(path) if RANK[other] >= RANK[room]]
    assert not backward, f"{room} imports {backward}"


@pytest.mark.parametrize("path", FILES, ids=room_of)
def test_a_file_is_one_room(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_no_paddle_where_none_is_needed():
    for room in ("config", "errors", "compatibility"):
        assert not re.search(r"^(import|from) paddle", (PACKAGE / f"{room}.py").read_text(encoding="utf-8"), re.M)


def test_only_models_and_the_entrances_know_ppdiffusers():
    knowing = {
        room_of(p) for p in FILES if re.search(r"^(import|from) ppdiffusers\b", p.read_text(encoding="utf-8"), re.M)
    }
    exporting = {f"inference.{room}" for room in ("loading", "request", "layout", "models", "export", "pipeline")}
    measuring = {f"evaluation.{room}" for room in ("operations", "quality.engines")}
    measuring |= {f"evaluation.speed.{room}" for room in ("subjects", "ways")}
    measuring |= {f"published.{room}" for room in ("families", "layouts", "architectures")}
    assert knowing == {"models", "mixin", "summary", "__init__", "serving.engine", *exporting, *measuring}
