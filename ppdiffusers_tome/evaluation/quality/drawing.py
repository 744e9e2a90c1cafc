"""Draw every prompt by every setting, from the same noise, into a folder that a killed run finds again."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...errors import ToMeConfigError, ToMeError, ToMeExportError
from ...generation.offline import Drawer, draw_here, draw_identified
from ...generation.prompts import Prompt
from ...inference import export_pipeline, read_manifest
from ...inference.loading import load_for_export
from ...serving.engine import load_engine
from ...serving.jobs import LARGEST_SEED, Job
from ..environment import commit, sources, versions
from .engines import TorchEngine, load_eager, without_ratio
from .settings import PLAIN, Setting

PLAN = "plan.json"
BACKENDS = ("predictor", "eager")


@dataclass(frozen=True)
class Plan:
    """What is drawn, and by whom: with an equal plan, versions and sources a folder's images are gone on with.

    Args:
        model: folder of a ppdiffusers pipeline.
        prompts: (text, seed) of each picture of a setting.
        size: px, height and width.
        steps, guidance: as in the pipeline.
        backend: "predictor" for exported programs, "eager" for the pipeline itself.
        threads: of each process that draws.
        torch_python: interpreter for the settings of PyTorch; None where there are none.
    """

    model: str
    prompts: tuple[tuple[str, int], ...]
    size: int
    steps: int = 20
    guidance: float = 7.5
    backend: str = "predictor"
    threads: int = 1
    torch_python: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ToMeConfigError(f"backend={self.backend!r} is not allowed: it must be one of {', '.join(BACKENDS)}.")
        for name, most in (("size", 2**15), ("steps", 10**4), ("threads", 1024)):
            if not 1 <= getattr(self, name) <= most:
                raise ToMeConfigError(f"{name}={getattr(self, name)!r} is not allowed: it must be from 1 to {most:,}.")
        if not math.isfinite(self.guidance):
            raise ToMeConfigError(f"guidance={self.guidance!r} is not allowed: it must be a finite number.")
        if not self.prompts:
            raise ToMeConfigError("there are no prompts: give one at least.")

    def identity(self) -> str:
        """Hash of what decides how images look beside the job itself. Threads and rounding do not count."""
        return hashlib.sha256(json.dumps([sources(), self.model, self.backend]).encode()).hexdigest()

    def jobs(self, setting: Setting) -> list[Prompt]:
        """The pictures of a setting."""
        return [
            Prompt(
                index,
                Job(
                    prompt=text,
                    height=self.size,
                    width=self.size,
                    ratio=setting.config.ratio,
                    seed=(seed + setting.seed_offset) % (LARGEST_SEED + 1),
                    steps=self.steps,
                    guidance_scale=self.guidance,
                ),
            )
            for index, (text, seed) in enumerate(self.prompts)
        ]


def claim_folder(plan: Plan, out: Path) -> str:
    """Claim a folder for a plan, drawn by the versions and sources of this process.

    Returns:
        The commit whose code draws the images: where the folder is claimed already, that of the first run.

    Raises:
        ToMeConfigError: it holds images of another plan, or that other versions or sources drew.
    """
    about = {key: value for key, value in asdict(plan).items() if key not in ("threads", "torch_python")}
    about = json.loads(json.dumps({**about, "versions": versions(), "sources": sources()}))
    path = out / PLAN
    if path.exists():
        there = json.loads(path.read_text(encoding="utf-8"))
        differ = sorted(key for key in about if there.get(key) != about[key])
        if differ:
            raise ToMeConfigError(
                f"{out} has images that were drawn otherwise ({', '.join(differ)} differ): choose another folder with "
                "--out, or remove this one."
            )
        return str(there["commit"])
    about["commit"] = commit()
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return str(about["commit"])


def export_settings(plan: Plan, settings: Sequence[Setting], out: Path) -> dict[Setting, Path]:
    """The exported folder that draws each setting of Paddle; settings that differ in the ratio alone share one."""
    groups: dict[Any, list[Setting]] = {}
    for setting in settings:
        if setting.framework == "Paddle":
            groups.setdefault(without_ratio(setting.config), []).append(setting)
    found: dict[Setting, Path] = {}
    for config, members in groups.items():
        folder = out.resolve() / "programs" / (config.describe().partition(", ")[2].replace(", ", "_") or "defaults")
        ratios = tuple(dict.fromkeys(setting.config.ratio for setting in members))
        if not _is_exported(folder, plan, ratios):
            others = {key: value for key, value in asdict(config).items() if key != "ratio"}
            pipe = load_for_export(plan.model, safety_checker=False)
            export_pipeline(pipe, folder, ratios, [(plan.size, plan.size)], overwrite=True, **others)
        found |= dict.fromkeys(members, folder)
    return found


def _is_exported(folder: Path, plan: Plan, ratios: Sequence[float]) -> bool:
    try:
        manifest = read_manifest(folder, verify=False)  # the weights are verified where they are loaded
    except ToMeExportError:
        return False
    return (plan.size, plan.size) in manifest.sizes and set(ratios) <= set(manifest.ratios)


@contextmanager
def open_torch(plan: Plan, setting: Setting, exported: dict[Setting, Path]) -> Iterator[tuple[Drawer, dict[str, Any]]]:
    """A drawer for a setting of PyTorch, whose process runs as long as the context, and that process's versions.

    Raises:
        ToMeConfigError: the plan names no interpreter.
        ToMeError: PyTorch's process fails.
    """
    if plan.torch_python is None:
        raise ToMeConfigError(f"{setting.name} is drawn in PyTorch: name an interpreter that has it (--torch-python).")
    engine = TorchEngine(plan.torch_python, plan.model, setting.config, plan.threads, exported.get(PLAIN))
    try:
        yield draw_here(lambda: engine), engine.about
    finally:
        engine.close()


def loader(plan: Plan, setting: Setting, exported: dict[Setting, Path]) -> "partial[Any]":
    """What loads the engine that draws a setting of Paddle, also in a process that works in another folder."""
    if plan.backend == "predictor":
        return partial(load_engine, exported[setting], "cpu", plan.threads)
    model = Path(plan.model)
    return partial(load_eager, str(model.resolve() if model.is_dir() else model), without_ratio(setting.config))


def draw(plan: Plan, setting: Setting, out: Path, drawer: Drawer, batch: int) -> None:
    """Draw what the folder of a setting lacks.

    Raises:
        ToMeError: pictures failed; what was drawn is kept.
    """
    identity = f"{plan.identity()} {setting.framework} {setting.config.describe()}"
    summary = draw_identified(plan.jobs(setting), identity, folder_of(setting, out), batch, drawer)
    if summary.failures:
        prompt, failure = summary.failures[0]
        raise ToMeError(
            f"{len(summary.failures)} pictures of {setting.name} failed, the first of {prompt.job.prompt!r}: "
            f"{failure.reason}"
        )


def folder_of(setting: Setting, out: Path) -> Path:
    """Where the pictures of a setting are; their names sort in the order of the prompts."""
    return out / "pictures" / setting.name


def picture_paths(folder: Path) -> list[Path]:
    """The PNG files of a folder in the order of their names, without those that are being written.

    Raises:
        ToMeConfigError: there are none.
    """
    paths = sorted(path for path in folder.glob("*.png") if not path.name.startswith("."))
    if not paths:
        raise ToMeConfigError(f"{folder} has no PNG files: it must hold the pictures to measure.")
    return paths


def read_pictures(paths: Sequence[Path], size: int) -> np.ndarray:
    """Pictures as uint8 [N, size, size, 3]; those of another size are resized."""
    pictures = [Image.open(path).convert("RGB") for path in paths]
    resized = [
        each if each.size == (size, size) else each.resize((size, size), Image.Resampling.LANCZOS) for each in pictures
    ]
    return np.stack([np.asarray(each) for each in resized])
