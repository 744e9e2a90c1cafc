"""Trace and save one program, load it again and compare it with its layer."""

import functools
import importlib
import inspect
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle

from ..errors import ToMeExportError
from .conversion import Converter
from .onnx_runtime import OnnxProgram, OnnxRuntime
from .paddle_runtime import PaddleRuntime, Predictor
from .programs import Traceable
from .runtime import FUSED_TOLERANCE, Program, error_summary, return_memory

STEM = "inference"  # the file name that ppdiffusers expects
BATCHES = (1, 2)
TOLERANCE = 1e-5  # largest relative difference between program and eager, in fp32
# Fused operators round differently than eager mode. If two dst are equally similar within that, a token may merge into
# the other one, so the outputs of an input may differ by more although nothing is wrong: often, with many
# tokens. Wrong kernels differ on all inputs.
TRIES = 8
# Paddle 2.6 inspects the stack at every operator with a dynamic batch, for the line number of a warning. Without the
# source text around each frame, which it does not use, an export is a third faster. It also stores the stack, with the
# paths of this machine, in every operator: four fifths of a file, and a fifth of the time or more. None is stored.
_SHALLOW_STACK = functools.partial(inspect.stack, 0)
# Paddle translates the Python code of a model before it traces it. Which line became which is for messages alone, and
# takes a third of the time of a VAE's export to find.
_TRANSLATOR = importlib.import_module("paddle.jit.dy2static.program_translator")
# Paddle does not restore its global state after `auto_cast` in a static program. ppdiffusers reads it, and then puts a
# check for infinity into the VAE's program, which paddle2onnx cannot convert.
_AMP = importlib.import_module("paddle.amp.auto_cast")  # `paddle.amp.auto_cast` is the function


@dataclass(frozen=True)
class Saved:
    """A program's files, and its relative difference to eager by batch size."""

    program: Path
    params: Path
    parity: dict[str, float]
    onednn_parity: dict[str, float]  # empty if oneDNN cannot run it
    onnx: Path | None  # the same program as ONNX; None if it was not converted
    onnx_parity: dict[str, float]


def save(
    traceable: Traceable,
    folder: Path,
    fixed: Mapping[str, int],
    dims: Mapping[str, int],
    label: str,
    threads: int,
    converter: Converter | None = None,
) -> Saved:
    """Save a layer's program as folder/inference.* and compare both. The layer must not be used afterwards.

    Args:
        traceable: the layer; hooks on it become part of the program.
        folder: created if it does not exist.
        fixed: the named dimensions that are fixed in the program; the others stay dynamic.
        dims: values of all named dimensions except the batch, for the comparison.
        label: the program's name in messages.
        threads: of the predictors.
        converter: converts the program to ONNX too.

    Returns:
        The files and relative differences. oneDNN's may exceed its tolerance: see `is_accurate`.

    Raises:
        ToMeExportError: Paddle cannot trace the layer or paddle2onnx not convert its program, or the program differs
            from eager by more than TOLERANCE, or in ONNX Runtime by more than FUSED_TOLERANCE.
    """
    return_memory()  # that of the program before
    random = np.random.RandomState(0)
    inputs = {batch: _random_inputs(traceable, random, dims, batch) for batch in BATCHES}
    with paddle.no_grad():
        eager = {batch: _arrays(traceable.layer(**inputs[batch])) for batch in BATCHES}
    program, params = _trace(traceable, folder, fixed, label)

    def load(onednn: bool = False, optimize: bool = True) -> Predictor:
        return_memory()  # that of the predictor before
        return Predictor(program, params, PaddleRuntime(threads=threads, onednn=onednn, optimize=optimize))

    tries = {
        batch: [first, *(_random_inputs(traceable, random, dims, batch) for _ in range(TRIES - 1))]
        for batch, first in inputs.items()
    }

    def difference(candidate: Program, batch: int, expected: list[np.ndarray]) -> float:
        """That of the first try; if it is too large, the smallest of all tries, with the native predictor."""
        first = relative_difference(_arrays(candidate(**inputs[batch])), expected)
        if first <= FUSED_TOLERANCE:
            return first
        return _smallest_difference(candidate, load(), tries[batch], FUSED_TOLERANCE, batch)

    # One predictor is in memory at a time: each has its own copy of the weights.
    native, outputs, parity = load(), {}, {}
    for batch in BATCHES:
        outputs[batch] = _arrays(native(**inputs[batch]))
        parity[f"batch {batch}"] = relative_difference(outputs[batch], eager[batch])
        if not parity[f"batch {batch}"] <= TOLERANCE:
            exact = load(optimize=False)
            parity[f"batch {batch}"] = relative_difference(_arrays(exact(**inputs[batch])), eager[batch])
            if parity[f"batch {batch}"] <= TOLERANCE:
                parity[f"batch {batch}"] = _smallest_difference(native, exact, tries[batch], TOLERANCE, batch)
            del exact
        _check(parity[f"batch {batch}"], TOLERANCE, f"exported {label}", batch)
    del native
    onednn = {}
    if program.suffix != ".json":
        candidate = load(onednn=True)
        onednn = {f"batch {batch}": difference(candidate, batch, outputs[batch]) for batch in BATCHES}
        del candidate
    if converter is None:
        return Saved(program, params, parity, onednn, None, {})
    return_memory()  # the conversion needs three times that of the weights
    converted = converter.convert(program, params, label)
    in_onnx_runtime = OnnxProgram(converted, OnnxRuntime(threads=threads), is_temporary=True)
    onnx_parity = {f"batch {batch}": difference(in_onnx_runtime, batch, eager[batch]) for batch in BATCHES}
    for batch in BATCHES:
        _check(onnx_parity[f"batch {batch}"], FUSED_TOLERANCE, f"{label} in ONNX Runtime", batch)
    return Saved(program, params, parity, onednn, converted, onnx_parity)


def _check(difference: float, tolerance: float, label: str, batch: int) -> None:
    if not difference <= tolerance:
        raise ToMeExportError(
            f"the {label} differs from the model by {difference:.1e} of its largest output at batch {batch}, more "
            f"than the allowed {tolerance:.0e}: nothing was written. Please report this with the versions of Paddle "
            f"({paddle.__version__}) and ppdiffusers."
        )


def relative_difference(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """max|actual - expected| / max|expected|, the largest over all outputs; NaN if one contains NaN."""
    return float(image_differences(actual, expected, 1).max())


def image_differences(actual: list[np.ndarray], expected: list[np.ndarray], batch: int) -> np.ndarray:
    """max|actual - expected| of each image of a batch / max|expected|, the largest over all outputs: [batch]."""
    tiny = np.finfo("float32").tiny
    pairs = list(zip(actual, expected, strict=True))
    return np.max([np.abs(a - b).reshape([batch, -1]).max(1) / max(np.abs(b).max(), tiny) for a, b in pairs], axis=0)


def _smallest_difference(
    candidate: Program, native: Program, tries: list[dict[str, paddle.Tensor]], enough: float, batch: int
) -> float:
    """The smallest difference of each image over the tries, and of these the largest; NaN if an output contains NaN.

    Rounding can make another pair of an image merge. The more tokens, the fewer tries have no such image, so each
    image of the batch needs one try of its own that agrees.
    """
    smallest = np.full(batch, np.inf)
    for inputs in tries:
        differences = image_differences(_arrays(candidate(**inputs)), _arrays(native(**inputs)), batch)
        smallest = np.minimum(smallest, differences)
        if smallest.max() <= enough:
            break
    return float(smallest.max())


def _random_inputs(
    traceable: Traceable, random: np.random.RandomState, dims: Mapping[str, int], batch: int
) -> dict[str, paddle.Tensor]:
    return {field.name: field.random(random, {**dims, "batch": batch}) for field in traceable.inputs}


def _arrays(outputs: Any) -> list[np.ndarray]:
    tensors = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [tensor.numpy() for tensor in tensors]


@contextmanager
def without_origins() -> Iterator[None]:
    """A context in which Paddle traces without recording where each operator comes from, in a fraction of the time."""
    with (
        mock.patch.object(inspect, "stack", _SHALLOW_STACK),
        mock.patch.object(traceback, "extract_stack", return_value=[]),
        mock.patch.object(_TRANSLATOR, "create_and_update_origin_info_map"),
    ):
        yield


def _trace(traceable: Traceable, folder: Path, fixed: Mapping[str, int], label: str) -> tuple[Path, Path]:
    spec = [field.spec(fixed) for field in traceable.inputs]
    try:
        with warnings.catch_warnings(), without_origins(), mock.patch.object(_AMP, "_g_amp_state_", None):
            warnings.simplefilter("ignore")  # Paddle's tracer warns about code of Paddle and ppdiffusers
            static = paddle.jit.to_static(traceable.layer, input_spec=spec, full_graph=True)
            paddle.jit.save(static, str(folder / STEM))
    except Exception as error:
        raise ToMeExportError(
            f"Paddle {paddle.__version__} cannot export the {label}: {error_summary(error)}"
        ) from error
    (folder / f"{STEM}.pdiparams.info").unlink(
        missing_ok=True
    )  # only needed to continue training; contains pickled objects
    program = next(path for path in (folder / f"{STEM}.json", folder / f"{STEM}.pdmodel") if path.is_file())
    return program, folder / f"{STEM}.pdiparams"
