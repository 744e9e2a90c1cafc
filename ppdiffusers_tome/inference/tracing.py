"""Trace and save one program, load it again and compare it with its layer."""

import functools
import importlib.util
import inspect
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
from paddle import nn

from ..errors import ToMeExportError
from .conversion import Converter
from .manifest import ProgramFile
from .onnx_runtime import OnnxProgram, OnnxRuntime
from .paddle_runtime import PaddleRuntime
from .programs import Traceable
from .runtime import FUSED_TOLERANCE, Program, error_summary, return_memory

STEM = "inference"  # the file name that ppdiffusers expects
BATCHES = (1, 2)
TOLERANCE = 1e-5  # largest relative difference between program and eager, in fp32
# Fused operators round differently than eager mode. If two dst are equally similar within that, a token may merge into
# the other one, so the outputs of an input may differ by more although nothing is wrong: often, with many
# tokens. Wrong kernels differ on all inputs.
TRIES = 8
LEAST_THREADS = 2  # of programs that are compared, so that what threads lose to each other shows
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
# Paddle notes the parameters of each program under the `id` of the program, and forgets to take them out if tracing
# fails: they stay in memory, and a later program at the same address gets them as its own (2.6), or crashes (3).
_RECORDS: list[tuple[Any, str]] = [
    (_TRANSLATOR.ProgramTranslator.get_instance()._params_recorder, "params_dict"),
    (_TRANSLATOR.ProgramTranslator.get_instance()._inplace_map, "params_dict"),
]
if importlib.util.find_spec("paddle.jit.dy2static.parameter_recorder"):  # Paddle 3
    _RECORDER = importlib.import_module("paddle.jit.dy2static.parameter_recorder")
    _RECORDS += [
        (_RECORDER._global_parameter_recorder, "params_dict"),
        (_RECORDER._global_parameter_recorder, "tensor2value"),
        (_RECORDER._global_inplace_map, "params_dict"),
    ]


class _ByName(nn.Layer):
    """A layer with one argument, a dictionary, because `paddle.jit` cannot export `**kwargs`."""

    def __init__(self, layer: nn.Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: dict[str, paddle.Tensor]) -> Any:
        return self.layer(**inputs)


def save(
    traceable: Traceable,
    planned: ProgramFile,
    root: Path,
    folder: str,
    dims: Mapping[str, int],
    threads: int,
    converter: Converter | None = None,
) -> ProgramFile:
    """Save a layer's program as root/folder/inference.* and compare both. The layer must not be used afterwards.

    Args:
        traceable: the layer; hooks on it become part of the program.
        planned: the program's model, size and ratio. If it has a size, height and width are fixed in the program.
        root: of the paths in the result.
        folder: in `root`; created if it does not exist.
        dims: values of all named dimensions except the batch, for the comparison.
        threads: of the compared programs, but at least LEAST_THREADS.
        converter: converts the program to ONNX too.

    Returns:
        `planned` with its files and relative differences. oneDNN's may exceed its tolerance: see `is_accurate`.

    Raises:
        ToMeExportError: Paddle cannot trace the layer or paddle2onnx not convert its program, or the program differs
            from eager, or from run to run, by more than TOLERANCE, or FUSED_TOLERANCE in ONNX Runtime.
    """
    return_memory()  # that of the program before
    label, random, threads = planned.label, np.random.RandomState(0), max(LEAST_THREADS, threads)
    inputs = {batch: [_random_inputs(traceable, random, dims, batch)] for batch in BATCHES}
    with paddle.no_grad():
        eager = {batch: _arrays(traceable.layer(**inputs[batch][0])) for batch in BATCHES}
    for batch in BATCHES:
        inputs[batch] += [_random_inputs(traceable, random, dims, batch) for _ in range(TRIES - 1)]
    fixed = {name: size for name, size in dims.items() if name != "tokens"} if planned.size else {}
    program, params = (path.relative_to(root) for path in _trace(traceable, root / folder, fixed, label))
    file = replace(planned, program=program.as_posix(), params=params.as_posix())
    runtime = PaddleRuntime(threads=threads, onednn=False)

    @functools.cache
    def unfused() -> Program:
        """The program without fused operators, which rounds as eager does: eager itself cannot run any more."""
        program = replace(runtime, optimize=False).load(root, file)
        outputs = {batch: _arrays(program(**inputs[batch][0])) for batch in BATCHES}
        parity = {f"batch {batch}": relative_difference(outputs[batch], eager[batch]) for batch in BATCHES}
        _check(parity, TOLERANCE, f"exported {label}")
        return program

    def compare(program: Program, tolerance: float) -> dict[str, float]:
        """The smallest difference over the tries (see `TRIES`) or, if it is larger, that between two runs of one.

        The more tokens, the fewer tries are without an image in which another pair merges, so each image of the batch
        needs one try of its own that agrees. What agrees must do so again: threads that lose each other's results, in
        a few places and not always, could not be distinguished from other pairs.
        """
        parity = {}
        for batch in BATCHES:
            smallest = np.full(batch, np.inf)
            for number, one in enumerate(inputs[batch]):
                expected, actual = _arrays(unfused()(**one)) if number else eager[batch], _arrays(program(**one))
                differences = image_differences(actual, expected, batch)
                smallest = np.minimum(smallest, differences)
                if smallest.max() <= tolerance:
                    break
            again = image_differences(_arrays(program(**one)), actual, batch)
            agrees = differences <= tolerance
            parity[f"batch {batch}"] = float(np.where(agrees, np.fmax(smallest, again), smallest).max())
        return parity

    return_memory()  # each predictor has its own copy of the weights
    parity = _check(compare(runtime.load(root, file), TOLERANCE), TOLERANCE, f"exported {label}")
    file = replace(file, parity=parity)
    if program.suffix != ".json":
        return_memory()
        onednn = replace(runtime, onednn=True).load(root, file)
        file = replace(file, onednn_parity=compare(onednn, FUSED_TOLERANCE))
        del onednn
    if converter is None:
        return file
    unfused.cache_clear()
    return_memory()  # the conversion needs three times that of the weights
    onnx = converter.convert(root / program, root / params, label)
    in_onnx_runtime = OnnxProgram(onnx, OnnxRuntime(threads=threads), is_temporary=True)
    parity = _check(compare(in_onnx_runtime, FUSED_TOLERANCE), FUSED_TOLERANCE, f"{label} in ONNX Runtime")
    return replace(file, onnx=onnx.relative_to(root).as_posix(), onnx_parity=parity)


def _check(parity: dict[str, float], tolerance: float, name: str) -> dict[str, float]:
    for batch, difference in parity.items():
        if not difference <= tolerance:
            raise ToMeExportError(
                f"the {name} differs from the model, or from run to run, by {difference:.1e} of its largest output at "
                f"{batch}, more than the allowed {tolerance:.0e}: nothing was written. Please report this with the "
                f"versions of Paddle ({paddle.__version__}) and ppdiffusers."
            )
    return parity


def relative_difference(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """max|actual - expected| / max|expected|, the largest over all outputs; NaN if one contains NaN."""
    return float(image_differences(actual, expected, 1).max())


def image_differences(actual: list[np.ndarray], expected: list[np.ndarray], batch: int) -> np.ndarray:
    """max|actual - expected| of each image of a batch / max|expected|, the largest over all outputs: [batch]."""
    tiny = np.finfo("float32").tiny
    pairs = list(zip(actual, expected, strict=True))
    return np.max([np.abs(a - b).reshape([batch, -1]).max(1) / max(np.abs(b).max(), tiny) for a, b in pairs], axis=0)


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


@contextmanager
def _own_records() -> Iterator[None]:
    """A context in which Paddle's records (see `_RECORDS`) are empty; what it leaves there is forgotten."""
    with ExitStack() as stack:
        for owner, name in _RECORDS:
            stack.enter_context(mock.patch.object(owner, name, {}))
        yield


def _trace(traceable: Traceable, folder: Path, fixed: Mapping[str, int], label: str) -> tuple[Path, Path]:
    spec = [{field.name: field.spec(fixed) for field in traceable.inputs}]
    try:
        with (
            warnings.catch_warnings(),
            without_origins(),
            _own_records(),
            mock.patch.object(_AMP, "_g_amp_state_", None),
        ):
            warnings.simplefilter("ignore")  # Paddle's tracer warns about code of Paddle and ppdiffusers
            layer = _ByName(traceable.layer)
            layer.eval()
            static = paddle.jit.to_static(layer, input_spec=spec, full_graph=True)
            paddle.jit.save(static, str(folder / STEM))
    except Exception as error:
        raise ToMeExportError(
            f"Paddle {paddle.__version__} cannot export the {label}: {error_summary(error)}"
        ) from error
    # Only needed to continue training; contains pickled objects.
    (folder / f"{STEM}.pdiparams.info").unlink(missing_ok=True)
    program = next(path for path in (folder / f"{STEM}.json", folder / f"{STEM}.pdmodel") if path.is_file())
    return program, folder / f"{STEM}.pdiparams"
