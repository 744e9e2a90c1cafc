"""In which steps tokens merge: methods may keep all tokens in the first steps of an image and in the last ones.

The first steps decide what is in an image, and guidance multiplies their errors. The last ones that have weight are
followed by none that corrects them, and solvers of higher order multiply their differences. Which steps these are
follows from the noise level alone, not from a count of steps: so a pass needs no state, and an exported program no
other input.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple


class PlainSteps(NamedTuple):
    """The steps that keep all tokens, by what a denoiser gets as timestep; every bound is included.

    Below `last_from` steps have little weight: schedules of Karras et al. have a quarter of theirs there.
    """

    first: float  # those with at least this much noise
    last_from: float  # those with noise between these two
    last_to: float

    def include(self, timestep: Any) -> Any:  # [1] float → [1] bool, of any library of tensors
        """Whether a step keeps all tokens."""
        return (timestep >= self.first) | ((timestep >= self.last_from) & (timestep <= self.last_to))

    def count(self, timesteps: Iterable[float]) -> int:
        """How many of these steps keep all tokens.

        Example:
            >>> PLAIN_STEPS.count(range(951, 0, -50))  # 20 steps of DDIM
            6
        """
        return sum(t >= self.first or self.last_from <= t <= self.last_to for t in map(float, timesteps))


# Chosen by benchmarks/samplers.py. In timesteps from 0 to 1000 of the noise schedule of Stable Diffusion, they are
# noise levels σ of 5.11 and more, and of 0.138 to 0.378.
PLAIN_STEPS = PlainSteps(800, 20, 115)
# The same noise levels in flows, whose timestep is the share σ / (1 + σ) of noise, in thousandths.
PLAIN_STEPS_OF_FLOWS = PlainSteps(836, 121, 274)


def plain_steps_of(is_flow: bool) -> PlainSteps:
    """The steps that keep all tokens, by whether timesteps are those of a flow."""
    return PLAIN_STEPS_OF_FLOWS if is_flow else PLAIN_STEPS
