"""Compare programs with the layer that they were made from."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle

from ..errors import ToMeExportError
from ..families.kernels import attention_in_slices
from ..run.runtime import Program
from .programs import Traceable

BATCHES = (1, 2)
# The timestep of the first inputs, by batch size: a denoiser may keep all tokens at 951, and merges at 501.
TIMESTEPS = {1: 951.0, 2: 501.0}
TOLERANCE = 1e-5  # largest relative difference between program and eager, in fp32
# Fused operators round differently than eager mode. If two dst are equally similar within that, a token may merge into
# either of them, so the outputs of an input may differ by more although nothing is wrong: often, with many tokens.
# Wrong kernels differ on all inputs.
TRIES = 8


class Comparison:
    """Compares programs of a layer with its outputs in eager mode, on TRIES random inputs for each batch size.

    The layer runs once for each batch size, now, because tracing may modify it.
    """

    def __init__(self, traceable: Traceable, dims: Mapping[str, int]) -> None:
        random = np.random.RandomState(0)
        self._inputs = {batch: [random_inputs(traceable, random, dims, batch)] for batch in BATCHES}
        for batch, (inputs,) in self._inputs.items():
            if "timestep" in inputs:
                inputs["timestep"] = paddle.to_tensor([TIMESTEPS[batch]])
        with paddle.no_grad(), attention_in_slices(traceable.layer):
            self._eager = {batch: arrays(traceable.layer(**self._inputs[batch][0])) for batch in BATCHES}
        for batch in BATCHES:
            self._inputs[batch] += [random_inputs(traceable, random, dims, batch) for _ in range(TRIES - 1)]

    def first_differences(self, program: Program) -> dict[str, float]:
        """The difference from eager on the first input of each batch size."""
        parity = {}
        for batch in BATCHES:
            outputs = arrays(program(**self._inputs[batch][0]))
            parity[f"batch {batch}"] = relative_difference(outputs, self._eager[batch])
        return parity

    def differences(self, program: Program, tolerance: float, unfused: Callable[[], Program]) -> dict[str, float]:
        """For each batch size the smallest difference over the tries or, if it is larger, that between two runs.

        With many tokens some pair differs in almost every try, so each image must agree in one try, and not all images
        in the same. That try runs again: a data race between threads, which changes a few places and not in every
        run, would otherwise look like a different choice of pairs.

        Args:
            unfused: returns the program that the tries after the first are compared with.
        """
        parity = {}
        for batch in BATCHES:
            smallest = np.full(batch, np.inf)
            for number, inputs in enumerate(self._inputs[batch]):
                expected = arrays(unfused()(**inputs)) if number else self._eager[batch]
                actual = arrays(program(**inputs))
                differences = image_differences(actual, expected, batch)
                smallest = np.minimum(smallest, differences)
                if smallest.max() <= tolerance:
                    break
            again = image_differences(arrays(program(**inputs)), actual, batch)
            agrees = differences <= tolerance
            parity[f"batch {batch}"] = float(np.where(agrees, np.fmax(smallest, again), smallest).max())
        return parity


def check(parity: Mapping[str, float], tolerance: float, name: str) -> None:
    """Raise ToMeExportError if a difference exceeds the tolerance."""
    for batch, difference in parity.items():
        if not difference <= tolerance:
            raise ToMeExportError(
                f"the {name} differs from the model, or from run to run, by {difference:.1e} of its largest output at "
                f"{batch}, more than the allowed {tolerance:.0e}: nothing was written. Please report this with the "
                f"versions of Paddle ({paddle.__version__}) and ppdiffusers."
            )


def relative_difference(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """max|actual - expected| / max|expected|, the largest over all outputs; NaN if one contains NaN."""
    return float(image_differences(actual, expected, 1).max())


def image_differences(actual: list[np.ndarray], expected: list[np.ndarray], batch: int) -> np.ndarray:
    """max|actual - expected| of each image of a batch / max|expected|, the largest over all outputs: [batch]."""
    tiny = np.finfo("float32").tiny
    pairs = list(zip(actual, expected, strict=True))
    return np.max([np.abs(a - b).reshape([batch, -1]).max(1) / max(np.abs(b).max(), tiny) for a, b in pairs], axis=0)


def random_inputs(
    traceable: Traceable, random: np.random.RandomState, dims: Mapping[str, int], batch: int
) -> dict[str, paddle.Tensor]:
    """A random value of each input."""
    return {field.name: field.random(random, {**dims, "batch": batch}) for field in traceable.inputs}


def arrays(outputs: Any) -> list[np.ndarray]:
    """The outputs of a layer or program as arrays."""
    tensors = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [tensor.numpy() for tensor in tensors]
