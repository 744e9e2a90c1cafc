"""What the builders share: the registry, and one picture from a pipeline, always from the same noise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from ppdiffusers import DiffusionPipeline

ZOO: dict[str, Callable[[], "Tiny"]] = {}


@dataclass(frozen=True)
class Tiny:
    """A tiny pipeline with random weights, and a call that makes it draw in a few seconds at most."""

    pipe: DiffusionPipeline
    call: dict[str, Any]  # two steps, output_type="np" or what gives arrays, sizes of 64 px or less
    merges: tuple[str, ...]  # names of the models that merge at apply_tome's defaults; () where nothing can
    output: str = "images"  # the field of the pipeline's output that holds the result


def family(build: Callable[[], Tiny]) -> Callable[[], Tiny]:
    """Register a builder under the class of its pipeline, which is the builder's name."""
    ZOO[build.__name__] = build
    return build


def picture(tiny: Tiny, **changes: Any) -> np.ndarray:
    """What the pipeline draws from seed 0, as one float array."""
    tiny.pipe.set_progress_bar_config(disable=True)
    paddle.seed(0)
    np.random.seed(0)  # noqa: NPY002 - some pipelines of ppdiffusers draw from NumPy's global state
    return np.asarray(tiny.pipe(**{**tiny.call, **changes})[tiny.output], dtype="float64")
