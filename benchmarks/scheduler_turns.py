"""How often a step keeps the tokens of the step before, with the timesteps of ppdiffusers' own schedulers.

    python benchmarks/scheduler_turns.py

writes the table of docs/development/schedulers.md: of images at the ratios 0.75 and 0.875, in which a block has 4 and
8 choices. Steps that keep all tokens are left out.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ppdiffusers
from lab.markdown import table

from ppdiffusers_tome.families.schedules import timesteps_of
from ppdiffusers_tome.methods.steps import plain_steps_of
from ppdiffusers_tome.methods.turns import turns_of

PAGE = Path(__file__).parents[1] / "docs" / "development" / "schedulers.md"
TABLE = re.compile(r"(?<=\n\n)\| scheduler .*?\n(?=\n|$)", re.DOTALL)
STEPS = (4, 8, 20, 25, 50, 100)
CHOICES = (4, 8)
STABLE_DIFFUSION = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "set_alpha_to_one": False,
    "clip_sample": False,
    "skip_prk_steps": True,
}
AYS_SDXL = (999, 845, 730, 587, 443, 310, 193, 116, 53, 13)  # Align Your Steps: Sabour et al. 2024, arXiv:2404.14507
# By class and setting in words; each pipeline of images or videos accepts some of them.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (f"{name}Scheduler", {})
        for name in (
            *("DDIM", "DDPM", "PNDM", "LCM", "DEISMultistep", "DPMSolverMultistep", "DPMSolverSinglestep"),
            *("UniPCMultistep", "EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "KDPM2Discrete"),
            *("KDPM2AncestralDiscrete", "LMSDiscrete"),
        )
    },
    "DDIM, trailing": ("DDIMScheduler", {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True}),
    "DDIM, cosine": ("DDIMScheduler", {"beta_schedule": "squaredcos_cap_v2"}),
    "DPMSolverMultistep, Karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "DPMSolverMultistep, Karras, cosine": (
        "DPMSolverMultistepScheduler",
        {"use_karras_sigmas": True, "beta_schedule": "squaredcos_cap_v2"},
    ),
    "EulerDiscrete, Karras": ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    "EulerDiscrete, continuous, Karras: Stable Video Diffusion": (
        "EulerDiscreteScheduler",
        {
            "use_karras_sigmas": True,
            "timestep_type": "continuous",
            "prediction_type": "v_prediction",
            "sigma_min": 0.002,
            "sigma_max": 700.0,
        },
    ),
    "EDMEuler: Playground 2.5": ("EDMEulerScheduler", {"sigma_min": 0.002, "sigma_max": 80.0}),
    "EDMDPMSolverMultistep": ("EDMDPMSolverMultistepScheduler", {"sigma_min": 0.002, "sigma_max": 80.0}),
    "VQDiffusion": ("VQDiffusionScheduler", {"num_vec_classes": 16, "num_train_timesteps": 100}),
    "FlowMatchEulerDiscrete, shift 3: Stable Diffusion 3": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
}
FLOWS = ("FlowMatchEulerDiscrete, shift 3: Stable Diffusion 3",)


def timesteps_by_setting() -> dict[str, dict[int, list[float]]]:
    """The timesteps of each setting by the number of steps, where the scheduler has so many."""
    found: dict[str, dict[int, list[float]]] = {}
    for name, (class_name, settings) in SETTINGS.items():
        cls = getattr(ppdiffusers, class_name)
        config = {} if class_name.startswith(("EDM", "Flow", "VQ")) else STABLE_DIFFUSION
        scheduler = cls.from_config({**config, **settings})
        by_steps = {steps: timesteps_of(scheduler, steps) for steps in STEPS}
        found[name] = {steps: timesteps for steps, timesteps in by_steps.items() if timesteps}
    found["Align Your Steps for SDXL"] = {len(AYS_SDXL): [*map(float, AYS_SDXL)]}
    return found


def repeats(timesteps: Iterable[float], choices: int, is_flow: bool = False) -> tuple[int, int]:
    """How many steps that merge keep the tokens of the step before, which merges too; and how many such pairs are."""
    timesteps = [*timesteps]
    plain = plain_steps_of(is_flow)
    turns = [turn % choices for turn in turns_of(timesteps, is_flow)]
    merging = [not plain.count([timestep]) for timestep in timesteps]
    pairs = [(a, b) for a, b, *both in zip(turns, turns[1:], merging, merging[1:], strict=False) if all(both)]
    return sum(a == b for a, b in pairs), len(pairs)


def make_table() -> str:
    """The table of the page."""
    head = ["scheduler", *(f"{steps} steps" for steps in STEPS), "other numbers"]
    rows = []
    for name, by_steps in timesteps_by_setting().items():
        cells = {steps: _cell(timesteps, name in FLOWS) for steps, timesteps in by_steps.items()}
        others = ", ".join(f"{steps}: {cell}" for steps, cell in cells.items() if steps not in STEPS)
        rows.append([name, *(cells.get(steps, "–") for steps in STEPS), others or "–"])
    return "\n".join(table(head, rows)) + "\n"


def _cell(timesteps: list[float], is_flow: bool) -> str:
    counts = [repeats(timesteps, choices, is_flow) for choices in CHOICES]
    return " / ".join("–" if not pairs else f"{100 * same / pairs:.0f} %" for same, pairs in counts)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    assert TABLE.search(text), f"{PAGE} has no table"
    PAGE.write_text(TABLE.sub(lambda _: make_table(), text), encoding="utf-8")
