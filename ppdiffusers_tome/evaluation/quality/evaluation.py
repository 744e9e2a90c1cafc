"""A whole evaluation: draw, measure, time, and one result that says all of it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from ...errors import ToMeConfigError
from ...generation.offline import Drawer
from ...inference.loading import load_for_export
from ...models import find_blocks
from ...serving.engine import Engine
from ...serving.jobs import Job
from ..environment import describe_environment
from .distances import find_inception, inception_fid
from .drawing import Plan, claim_folder, draw, export_settings, folder_of, loader, open_torch, picture_paths
from .findings import default_setting, ratio_of
from .measuring import Measurer, measure
from .merge_maps import write_merge_maps
from .settings import OTHER_SEEDS, PLAIN, TOMESD, Setting
from .timing import time_settings

FORMAT = 1


class ModelFacts(NamedTuple):
    """What an evaluation wants to know of a pipeline."""

    levels: list[int]  # at which its UNet has blocks that can merge, the shallowest first
    scheduler: str  # its class


def read_model(model: str) -> ModelFacts:
    """Load a pipeline from a folder or the hub, and tell of it.

    Raises:
        ToMeExportError: it cannot be loaded.
        ToMeConfigError: it has no UNet.
    """
    pipe = load_for_export(model, safety_checker=False)
    if "unet" not in pipe.components:
        raise ToMeConfigError(
            f"{model} is a {type(pipe).__name__}, which has no UNet: its pictures are not evaluated."
        )
    levels = sorted({found.level for found in find_blocks(pipe.unet)})
    return ModelFacts(levels, type(pipe.scheduler).__name__)


def evaluate(
    plan: Plan,
    settings: Sequence[Setting],
    scheduler: str,
    out: Path,
    make_drawer: Callable[[Callable[[], Engine]], Drawer],
    batch: int = 4,
    rounds: int = 5,
    real: Path | None = None,
    with_inception: bool = False,
) -> dict[str, Any]:
    """Draw plain pictures and all settings' into a folder, where a killed run goes on, and measure them.

    Args:
        plan: what is drawn.
        settings: what is compared with plain; see `settings.study`.
        scheduler: the model's, for the record.
        out: folder for pictures, programs and what was measured of them.
        make_drawer: `offline.draw_here`, or one that draws elsewhere.
        batch: most pictures in one pipeline call.
        rounds: of timing; 0 for none.
        real: folder of real pictures to measure distances to.
        with_inception: FID to the real pictures too.

    Returns:
        The result, ready for JSON: what was drawn, "calibration" and "settings", as docs/evaluation.md describes.

    Raises:
        ToMeConfigError: an argument is not allowed, or the folder has images of another plan or of other sources.
        ToMeError: a package or an interpreter is missing, or pictures could not be drawn.
    """
    if real is not None:
        picture_paths(real)
    elif with_inception:
        raise ToMeConfigError("FID is a distance to real pictures: name their folder with --real.")
    if with_inception:  # before anything is drawn: packages may be missing
        find_inception()
    measurer = Measurer(out, plan.size)
    drawn_by = claim_folder(plan, out)
    everything = [PLAIN, OTHER_SEEDS, *settings]
    exported = export_settings(plan, everything, out) if plan.backend == "predictor" else {}
    about_torch = None
    for setting in tqdm(everything, desc="settings", unit="setting", disable=None):
        if setting.group == TOMESD:
            with open_torch(plan, setting, exported) as (drawer, about_torch):
                draw(plan, setting, out, drawer, batch)
        else:
            draw(plan, setting, out, make_drawer(loader(plan, setting, exported)), batch)
    measured = measure(settings, measurer, real)
    seconds = _time(plan, settings, exported, rounds)
    return {
        "kind": "quality",
        "format": FORMAT,
        "commit": drawn_by,
        "environment": describe_environment(),
        **{key: value for key, value in asdict(plan).items() if key not in ("prompts", "torch_python")},
        "scheduler": scheduler,
        "torch": about_torch,
        "prompts": [{"prompt": text, "seed": seed} for text, seed in plan.prompts],
        "features": measurer.versions,
        "real": None if real is None else {"folder": str(real), "pictures": len(picture_paths(real))},
        "calibration": measured["calibration"],
        "settings": [
            {
                "name": setting.name,
                "group": setting.group,
                "config": asdict(setting.config),
                "framework": setting.framework,
                "count": len(plan.prompts),
                **measured["settings"][setting.name],
                **({"fid": inception_fid(folder_of(setting, out), real)} if real and with_inception else {}),
                "seconds": seconds.get(setting.name),
            }
            for setting in settings
        ],
    }


def draw_merge_maps(result: dict[str, Any], output: Path) -> list[Path]:
    """Draw a result's first prompt once more in eager mode, and write which tokens were merged into which.

    Args:
        result: what `evaluate` returned; its `findings.default_setting` is drawn.
        output: folder for the PNG files.

    Returns:
        The files; none where no ratio was evaluated.

    Raises:
        ToMeExportError: the model cannot be loaded.
    """
    default = default_setting(result)
    if default is None:
        return []
    ratio = ratio_of(default)
    pipe = load_for_export(result["model"], safety_checker=False)
    given = result["prompts"][0]
    job = Job(given["prompt"], result["size"], result["size"], ratio, given["seed"], "", result["steps"])
    job = replace(job, guidance_scale=result["guidance"])
    facts = {"prompt": job.prompt, "seed": job.seed, "ratio": ratio, "steps": job.steps, "model": result["model"]}
    with pipe.tome(ratio=ratio):
        return write_merge_maps(pipe, lambda: np.asarray(Engine(pipe).generate([job])[0]), output, **facts)


def _time(
    plan: Plan, settings: Sequence[Setting], exported: dict[Setting, Path], rounds: int
) -> dict[str, dict[str, float]]:
    """Seconds of all settings of Paddle. Those with one engine in common share it."""
    if not rounds:
        return {}
    timed = [PLAIN, *(setting for setting in settings if setting.group != TOMESD)]
    engines: dict[Any, Engine] = {}
    of: dict[Setting, Engine] = {}
    for setting in timed:
        load = loader(plan, setting, exported)
        key = (load.func, load.args)
        if key not in engines:
            engines[key] = load()
        of[setting] = engines[key]
    return time_settings(plan, of, rounds)
