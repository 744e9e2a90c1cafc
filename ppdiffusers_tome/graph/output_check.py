"""Compare the outputs of ONNX programs of a UNet on random inputs, in ONNX Runtime on the CPU."""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ToMeExportError

FREE = {"sample": (2, 4, 16, 24)}  # sizes of free dimensions by input: small, and not a square
DTYPES = {f"tensor({name})": name for name in ("float16", "int64", "int32")} | {"tensor(float)": "float32"}
BATCH, TEXT = 2, 77  # of all inputs that `FREE` lacks: the first free dimension, and those after it
TIMESTEP = 501  # tokens merge in this step
TOLERANCES = {"float32": 1e-4, "float16": 2e-2}  # relative, by the type of the outputs


class Differences(NamedTuple):
    """max|merged - model| / max|model|."""

    with_all_keys: float  # of the program in which all keys remain
    merged: float


def compare_outputs(model: Path, with_all_keys: Path, merged: Path) -> Differences:
    """Run three programs, one after the other, at a timestep at which tokens merge.

    Raises:
        ToMeExportError: a program cannot run, the second differs from the first, or the third does not.
    """
    inputs: dict[str, np.ndarray] = {}
    expected = _run(model, inputs)
    every, fewer = _run(with_all_keys, inputs), _run(merged, inputs)
    scale = float(np.abs(expected).max()) or 1.0
    differences = Differences(*(float(np.abs(outputs - expected).max()) / scale for outputs in (every, fewer)))
    tolerance = TOLERANCES.get(str(expected.dtype), TOLERANCES["float32"])
    if not differences.with_all_keys <= tolerance:
        raise ToMeExportError(
            f"with all keys the merged model differs from {model} by {differences.with_all_keys:.1e} of its largest "
            f"output, more than the allowed {tolerance:.0e}: nothing was written. Please report the tool and the "
            "version that exported it."
        )
    if differences.merged <= tolerance / 100:
        raise ToMeExportError(f"the merged model has the outputs of {model}, so nothing merges: nothing was written.")
    return differences


def _run(path: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The first output of a program. If there are no inputs yet, it decides which."""
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError as error:
        remedy = "pip install onnxruntime, or write without this check: --no-check"
        raise ToMeExportError(f"the outputs cannot be compared without ONNX Runtime: {remedy}.") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        if not inputs:
            inputs |= _random_inputs(session)
        output: np.ndarray = session.run(None, inputs)[0]
    except Exception as error:
        message = str(error).splitlines()[0][:300]
        raise ToMeExportError(
            f"ONNX Runtime {onnxruntime.__version__} cannot run {path} on the CPU: {message}. If it runs on your "
            "device only, write without this check: --no-check."
        ) from error
    return output


def _random_inputs(session: Any) -> dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    inputs = {}
    for value in session.get_inputs():
        free = FREE.get(value.name, (BATCH, TEXT, TEXT, TEXT))
        shape = [size if isinstance(size, int) else free[axis] for axis, size in enumerate(value.shape)]
        array = np.full(shape, TIMESTEP) if value.name == "timestep" else random.standard_normal(shape)
        inputs[value.name] = array.astype(DTYPES[value.type])
    return inputs
