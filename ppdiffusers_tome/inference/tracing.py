"""One program: traced, saved, loaded again and compared with the layer that it came from."""

import functools
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle

from ..errors import ToMeExportError
from .programs import Traceable
from .runtime import Predictor, Runtime, gist

STEM = "inference"  # the file name that ppdiffusers looks for
BATCHES = (1, 2)
TOLERANCE = 1e-5  # largest |program - eager| over the largest |eager|, in fp32
# oneDNN rounds otherwise than eager, by some 5e-6. Where two dst are equally similar to within that, it may take the
# other, and what depends on that token differs, with nothing wrong. Wrong kernels are off for every input.
ONEDNN_TOLERANCE = 1e-4
ONEDNN_TRIES = 3
# Paddle 2.6 asks for the stack at every operator with a dynamic batch, to name the line in a warning. Without the
# source text around each frame, which it does not use, an export takes a third less time.
_SHALLOW_STACK = functools.partial(inspect.stack, 0)


@dataclass(frozen=True)
class Saved:
    """A program's files, and how far it is from eager by batch size."""

    program: Path
    params: Path
    parity: dict[str, float]
    onednn_parity: dict[str, float]  # empty where oneDNN cannot run it


def save(
    traceable: Traceable, folder: Path, fixed: Mapping[str, int], dims: Mapping[str, int], what: str, threads: int
) -> Saved:
    """Save a layer's program as folder/inference.* and hold it to the layer, which is of no more use afterwards.

    Args:
        traceable: the layer; hooks on it become part of the program.
        folder: is made.
        fixed: the named dimensions that the program is bound to; the others stay dynamic.
        dims: values of all named dimensions but the batch, to compare at.
        what: the program's name for messages.
        threads: for the predictors.

    Returns:
        The files and the distances. oneDNN's may lie above its tolerance: then it is not to be used.

    Raises:
        ToMeExportError: Paddle cannot trace the layer, or the program is further than TOLERANCE from eager.
    """
    random = np.random.RandomState(0)
    given = {batch: _draw(traceable, random, dims, batch) for batch in BATCHES}
    with paddle.no_grad():
        eager = {batch: _arrays(traceable.layer(**given[batch])) for batch in BATCHES}
    program, params = _trace(traceable, folder, fixed, what)
    exact = Predictor(program, params, Runtime(threads=threads, onednn=False))
    parity = {}
    for batch in BATCHES:
        parity[f"batch {batch}"] = found = distance(_arrays(exact(**given[batch])), eager[batch])
        if not found <= TOLERANCE:
            raise ToMeExportError(
                f"the exported {what} differs from the model by {found:.1e} of its largest output at batch {batch}, "
                f"where at most {TOLERANCE:.0e} is allowed: nothing was written. Please report this with the versions "
                f"of Paddle ({paddle.__version__}) and ppdiffusers."
            )
    onednn = {}
    if program.suffix != ".json":
        fast = Predictor(program, params, Runtime(threads=threads, onednn=True))
        for batch in BATCHES:
            tries = [given[batch], *(_draw(traceable, random, dims, batch) for _ in range(ONEDNN_TRIES - 1))]
            onednn[f"batch {batch}"] = _closest(fast, exact, tries)
    return Saved(program, params, parity, onednn)


def right_for_onednn(onednn_parity: Mapping[str, float]) -> bool:
    """Whether oneDNN can run a program, and was found to do so rightly, by the distances that `save` measured."""
    return bool(onednn_parity) and max(onednn_parity.values()) <= ONEDNN_TOLERANCE


def distance(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest |found - wanted| over the largest |wanted|, over all outputs; NaN where one holds NaN."""
    pairs = zip(found, wanted, strict=True)
    tiny = np.finfo("float32").tiny
    return float(np.max([np.abs(one - other).max() / max(np.abs(other).max(), tiny) for one, other in pairs]))


def _closest(fast: Predictor, exact: Predictor, tries: list[dict[str, paddle.Tensor]]) -> float:
    found = float("inf")
    for given in tries:
        found = min(found, distance(_arrays(fast(**given)), _arrays(exact(**given))))
        if found <= ONEDNN_TOLERANCE:
            break
    return found


def _draw(
    traceable: Traceable, random: np.random.RandomState, dims: Mapping[str, int], batch: int
) -> dict[str, paddle.Tensor]:
    return {each.name: each.random(random, {**dims, "batch": batch}) for each in traceable.inputs}


def _arrays(outputs: Any) -> list[np.ndarray]:
    several = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [each.numpy() for each in several]


def _trace(traceable: Traceable, folder: Path, fixed: Mapping[str, int], what: str) -> tuple[Path, Path]:
    spec = [each.spec(fixed) for each in traceable.inputs]
    try:
        with warnings.catch_warnings(), mock.patch.object(inspect, "stack", _SHALLOW_STACK):
            warnings.simplefilter("ignore")  # Paddle's tracer warns of what Paddle and ppdiffusers themselves do
            static = paddle.jit.to_static(traceable.layer, input_spec=spec, full_graph=True)
            paddle.jit.save(static, str(folder / STEM))
    except Exception as error:
        raise ToMeExportError(f"Paddle {paddle.__version__} cannot export the {what}: {gist(error)}") from error
    (folder / f"{STEM}.pdiparams.info").unlink(missing_ok=True)  # for training on; holds pickled objects
    program = next(path for path in (folder / f"{STEM}.json", folder / f"{STEM}.pdmodel") if path.is_file())
    return program, folder / f"{STEM}.pdiparams"
