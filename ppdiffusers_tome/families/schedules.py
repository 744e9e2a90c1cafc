"""The timesteps of an image, from the scheduler of a pipeline."""

import copy
import inspect
from typing import Any

import numpy as np


def default_steps(pipe: Any) -> int | None:
    """The number of steps of an image if a call of the pipeline names none; None if it has no such argument."""
    parameter = inspect.signature(type(pipe).__call__).parameters.get("num_inference_steps")
    default = None if parameter is None else parameter.default
    return default if isinstance(default, int) else None


def timesteps_of(scheduler: Any, steps: int) -> list[float] | None:
    """The timestep of each pass of an image of so many steps, from noise; None if the scheduler cannot tell.

    Schedulers of latent consistency models have at most `original_inference_steps` of their config, usually 50, and
    some of flows need the size of the image. The scheduler is not changed.
    """
    trial = copy.deepcopy(scheduler)
    try:
        trial.set_timesteps(steps)
        return as_numbers(trial.timesteps)
    except (ValueError, IndexError, ZeroDivisionError, TypeError, AttributeError):
        return None


def as_numbers(timesteps: Any) -> list[float]:
    """The numbers of one timestep or of several, as a scheduler or a pipeline has them: a tensor of any shape."""
    return [float(number) for number in np.asarray(timesteps).reshape(-1)]


def most_steps(scheduler: Any, wanted: int) -> int:
    """The largest number of steps up to `wanted` for which a scheduler has a schedule; 0 if there is none."""
    return next((steps for steps in range(wanted, 0, -1) if timesteps_of(scheduler, steps) is not None), 0)
