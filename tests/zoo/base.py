"""Shared by the builders: the registry, and a function that runs a pipeline with fixed noise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from ppdiffusers import DiffusionPipeline

ZOO: dict[str, Callable[[], "Tiny"]] = {}


@dataclass(frozen=True)
class Tiny:
    """A tiny pipeline with random weights, and a call that takes a few seconds at most."""

    pipe: DiffusionPipeline
    call: dict[str, Any]  # two steps, output_type="np" or equivalent, sizes of 64 px or less
    merges: tuple[str, ...]  # names of the models that merge by default; () if nothing can
    output: str = "images"  # the field of the pipeline's output with the result


def family(build: Callable[[], Tiny]) -> Callable[[], Tiny]:
    """Register a builder by its name, which is the class of its pipeline."""
    ZOO[build.__name__] = build
    return build


def generate(tiny: Tiny, **changes: Any) -> np.ndarray:
    """The pipeline's output for seed 0, as a float array."""
    tiny.pipe.set_progress_bar_config(disable=True)
    paddle.seed(0)
    np.random.seed(0)  # noqa: NPY002 - some pipelines of ppdiffusers draw from NumPy's global state
    return np.asarray(tiny.pipe(**{**tiny.call, **changes})[tiny.output], dtype="float64")
