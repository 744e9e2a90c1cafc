"""Shared by the builders: the registry, and a function that runs a pipeline with fixed noise."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import paddle
import ppdiffusers
from ppdiffusers import DiffusionPipeline

ZOO: dict[str, Callable[[], "Tiny"]] = {}


@dataclass(frozen=True)
class Tiny:
    """A tiny pipeline with random weights, and a call that takes a few seconds at most."""

    pipe: DiffusionPipeline
    call: dict[str, Any]  # two steps, output_type="np" or equivalent, sizes of 64 px or less
    merges: tuple[str, ...]  # names of the models that merge by default
    output: str = "images"  # the field of the pipeline's output with the result


def family(build: Callable[[], Tiny]) -> Callable[[], Tiny]:
    """Register a builder by its name, which is the class of its pipeline."""
    ZOO[build.__name__] = build
    return build


def register(families: dict[str, tuple], merges: tuple[str, ...], output: str = "images") -> None:
    """Register pipelines by name: the class, and after "_" the variant.

    Args:
        families: the components (a function that makes them, by keyword) and the call (a dict, or a function) of each.
        merges, output: as in `Tiny`.
    """
    for name, (components, call) in families.items():
        ZOO[name] = partial(_build, name.partition("_")[0], components, call, merges, output)


def _build(cls: str, components: Callable, call: Any, merges: tuple[str, ...], output: str) -> Tiny:
    pipe = getattr(ppdiffusers, cls)(**components())
    return Tiny(pipe, call() if callable(call) else call, merges, output)


def generate(tiny: Tiny, **changes: Any) -> np.ndarray:
    """The pipeline's output for seed 0, as a float array."""
    tiny.pipe.set_progress_bar_config(disable=True)
    paddle.seed(0)
    np.random.seed(0)  # noqa: NPY002 - some pipelines of ppdiffusers draw from NumPy's global state
    return np.asarray(tiny.pipe(**{**tiny.call, **changes})[tiny.output], dtype="float64")
