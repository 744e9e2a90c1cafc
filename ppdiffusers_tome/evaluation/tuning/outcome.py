"""What `tune` shows and writes: a table and a plot of the candidates, and a settings file of the chosen one."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ...comparison.clock import quartiles
from ...comparison.environment import commit, describe_environment
from ...config import ToMeConfig
from ...families.grids import grid_at
from ...wording import method_in_words
from ..markdown import NOT_MEASURED
from ..plotting import save_figure
from ..quality.quality_plots import is_on_frontier, plot_frontier
from ..quality.quality_report import cells_of
from ..speed.cases import Case
from .measurement import Measurement
from .search import PERCEPTUAL, PSNR, SPEED_UP, Candidate, Goal

TABLE = {  # column of the frame → title and form of the printed table's
    "mark": ("", "{mark}"),
    "method": ("method", "{method}"),
    "ratio": ("ratio", "{ratio:g}"),
    SPEED_UP: ("speed-up", "{speed_up:.2f}×"),
    "rounds": ("rounds", "{rounds}"),
    PSNR: ("PSNR, dB", "{psnr:.1f}"),
    PERCEPTUAL: ("ST-LPIPS", "{perceptual:.4f}"),
    "images": ("images", "{images}"),
}


def frame_of(candidates: Sequence[Candidate], chosen: Candidate | None) -> pd.DataFrame:
    """A row for each candidate that has been timed, the fastest first, with its medians and "mark"."""
    timed = sorted((c for c in candidates if c.speed_up), key=lambda c: -c.median(SPEED_UP))
    frame = pd.DataFrame(
        {
            "method": [method_in_words(c.config) for c in timed],
            "ratio": [c.config.ratio for c in timed],
            "rounds": [len(c.speed_up) for c in timed],
            "images": [len(c.psnr) for c in timed],
            **{measure: [c.median(measure) for c in timed] for measure in (SPEED_UP, PSNR, PERCEPTUAL)},
            "is_chosen": [c is chosen for c in timed],
        }
    )
    frame["frontier"] = is_on_frontier(frame[SPEED_UP], frame[PSNR]) & frame[PSNR].notna()
    marks = zip(frame["is_chosen"], frame["frontier"], strict=True)
    return frame.assign(mark=[f"{'→' if chosen else ' '} {'*' if best else ' '} " for chosen, best in marks])


def table_of(frame: pd.DataFrame) -> str:
    """The frame as text, with what its marks mean."""
    cells = cells_of(frame, TABLE).fillna(NOT_MEASURED)
    cells["method"] = cells["method"].str.ljust(cells["method"].str.len().max())
    legend = "→ chosen; * on the frontier: faster than plain, and no other is both faster and nearer by PSNR"
    return f"{cells.to_string(index=False)}\n{legend}"


def describe(candidate: Candidate) -> str:
    """Its method, ratio and medians in words."""
    faster = f"{candidate.median(SPEED_UP):.2f} times as fast as plain"
    words = f"{method_in_words(candidate.config)}, ratio {candidate.config.ratio:g}, {faster}"
    if candidate.psnr:
        words += f", PSNR {candidate.median(PSNR):.1f} dB, ST-LPIPS {candidate.median(PERCEPTUAL):.4f}"
    return words


def write_plot(frame: pd.DataFrame, goal: Goal, measurement: Measurement, path: Path) -> bool:
    """Write the plot of the candidates that have images; False if there are none."""
    if not frame["images"].any():
        return False
    title = f"{Path(measurement.case.model).name}, {measurement.case.size} px: {goal}"
    points = frame[frame["images"] > 0].rename(columns={SPEED_UP: measurement.evaluation.backend})
    save_figure(plot_frontier(points, title, measurement.evaluation.backend), path)
    return True


def write_settings(
    chosen: Candidate | None, candidates: Sequence[Candidate], goal: Goal, measurement: Measurement, path: Path
) -> tuple[ToMeConfig, int | None]:
    """Write the settings file of the chosen candidate; of ratio 0 if none is chosen.

    Returns:
        The config, and the smallest square image in which it merges, px; None if it never does.
    """
    case, evaluation = measurement.case, measurement.evaluation
    config = ToMeConfig(ratio=0) if chosen is None else gate(chosen.config, case)
    smallest = None if chosen is None else smallest_size(config, case)
    path.parent.mkdir(parents=True, exist_ok=True)
    config.save(
        path,
        command=measurement.command,
        commit=commit(),
        environment=describe_environment(),
        model=evaluation.model,
        size=case.size,
        sizes={"measured": [case.size], "merges_from": smallest},
        backend=evaluation.backend,
        threads=evaluation.threads,
        goal=asdict(goal),
        images={
            "count": len(evaluation.prompts),
            "steps": evaluation.steps,
            "guidance_scale": evaluation.guidance_scale,
        },
        figures=None if chosen is None else _medians(chosen),
        candidates=[{"settings": asdict(candidate.config), **_medians(candidate)} for candidate in candidates],
    )
    return config, smallest


def gate(config: ToMeConfig, case: Case) -> ToMeConfig:
    """The config with a gate: grids with fewer tokens than the smallest measured one stay plain.

    Smaller images then stay plain, unless several levels merge: a shallower one has as many tokens in a smaller image
    as the deepest one at the measured size.
    """
    if config.min_tokens:
        return config
    level = config.max_downsample or case.architecture.first_level
    return replace(config, min_tokens=int(grid_at(case.architecture.latent(case.size), level).tokens))


def smallest_size(config: ToMeConfig, case: Case) -> int:
    """The smallest square image in which any grid merges, px."""
    factor = case.architecture.factor
    sizes = range(factor, case.size + 1, factor)
    return next(size for size in sizes if int(case.architecture.first_grid(size).tokens) >= config.min_tokens)


def _medians(candidate: Candidate) -> dict[str, Any]:
    """Medians, with the quartiles of the speed-up, for the settings file."""
    if candidate.failure:
        return {"failure": candidate.failure}
    medians: dict[str, Any] = {SPEED_UP: quartiles(candidate.speed_up)._asdict(), "rounds": len(candidate.speed_up)}
    for measure in (PSNR, PERCEPTUAL) if candidate.psnr else ():
        value = candidate.median(measure)
        medians[measure] = value if math.isfinite(value) else None
    return {**medians, "images": len(candidate.psnr)}
