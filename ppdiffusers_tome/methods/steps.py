"""In which steps tokens merge: methods may keep all tokens in the first and the last steps of an image.

The first steps decide what is in an image, and guidance multiplies their errors. The last steps that have weight are
followed by none that corrects them, and solvers of higher order multiply their differences. Which steps these are
follows from the noise level alone, not from a count of steps: so a pass needs no state, and an exported program no
further input.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

LARGEST_LEVEL = 1.75  # ¼·log σ of σ = 1,100


def is_level(timestep: Any) -> Any:  # an array or tensor of any library → bool
    """Whether a timestep is a noise level, ¼·log σ, in place of a number from 0 to 1000.

    Stable Video Diffusion, the schedulers of EDM and `timestep_type="continuous"` of Euler's pass these. They are told
    apart by the value: a noise level is not whole, and within ±`LARGEST_LEVEL`. Schedules from 1000 to 0 have such
    numbers at most in the last step. Taken for a noise level it keeps all tokens, or takes a different turn.
    """
    return (timestep.round() != timestep) & (timestep < LARGEST_LEVEL) & (timestep > -LARGEST_LEVEL)


class PlainSteps(NamedTuple):
    """The steps that keep all tokens, by what a denoiser gets as timestep; every bound is included.

    Below `last_from` steps have little weight: schedules of Karras et al. have a quarter of theirs there.
    """

    first: float  # those with at least this much noise
    last_from: float  # those with noise between these two
    last_to: float
    levels: "PlainSteps | None" = None  # of timesteps that are noise levels; None: none is

    def include(self, timestep: Any) -> Any:  # as in `is_level`
        """Whether a step keeps all tokens."""
        of_steps = (timestep >= self.first) | ((timestep >= self.last_from) & (timestep <= self.last_to))
        if self.levels is None:
            return of_steps
        of_levels = is_level(timestep)
        return (of_levels & self.levels.include(timestep)) | (~of_levels & of_steps)

    def count(self, timesteps: Iterable[float]) -> int:
        """How many of these steps keep all tokens.

        Example:
            >>> PLAIN_STEPS.count(range(951, 0, -50))  # 20 steps of DDIM
            6
        """
        return int(np.sum(self.include(np.array([*map(float, timesteps)]))))


# Chosen by benchmarks/samplers.py. In timesteps from 0 to 1000 of the noise schedule of Stable Diffusion, they are
# noise levels σ of 5.11 and more, and of 0.138 to 0.378. Noise levels are ¼·log of these.
PLAIN_STEPS = PlainSteps(800, 20, 115, PlainSteps(0.408, -0.495, -0.243))
# The same noise levels in flows, whose timestep is the share σ / (1 + σ) of noise, in thousandths.
PLAIN_STEPS_OF_FLOWS = PlainSteps(836, 121, 274)


def plain_steps_of(is_flow: bool) -> PlainSteps:
    """The steps that keep all tokens, by whether timesteps are those of a flow."""
    return PLAIN_STEPS_OF_FLOWS if is_flow else PLAIN_STEPS
