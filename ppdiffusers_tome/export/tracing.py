"""Trace and save one program, load it again and compare it with its layer."""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base.proto import framework_pb2

from ..errors import ToMeExportError
from ..run.folder import ExportedFolder
from ..run.manifest import PlannedProgram, ProgramFile
from ..run.onnx_runtime import OnnxProgram, OnnxRuntime
from ..run.paddle_runtime import PaddleRuntime
from ..run.runtime import FUSED_TOLERANCE, Program, error_summary, return_memory
from .conversion import Converter
from .programs import Traceable

STEM = "inference"  # the file name that ppdiffusers expects
BATCHES = (1, 2)
# The timestep of the first inputs, by batch size: in one a denoiser may keep all tokens, in the other it merges.
TIMESTEPS = {1: 951.0, 2: 501.0}
TOLERANCE = 1e-5  # largest relative difference between program and eager, in fp32
# Fused operators round differently than eager mode. If two dst are equally similar within that, a token may merge into
# the other one, so the outputs of an input may differ by more although nothing is wrong: often, with many
# tokens. Wrong kernels differ on all inputs.
TRIES = 8
MIN_THREADS = 2  # for the compared programs, so that data races become visible
CALL_STACK = "op_callstack"  # attribute of an operator in a `.pdmodel` file


class _ByName(nn.Layer):
    """A layer with one argument, a dictionary, because `paddle.jit` cannot export `**kwargs`."""

    def __init__(self, layer: nn.Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: dict[str, paddle.Tensor]) -> Any:
        return self.layer(**inputs)


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Make the CPU Paddle's current device."""
    before = paddle.get_device()
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(before)


@_on_cpu()
def save(
    traceable: Traceable,
    planned: PlannedProgram,
    root: Path,
    folder: str,
    dims: Mapping[str, int],
    threads: int,
    converter: Converter | None = None,
) -> ProgramFile:
    """Save a layer's program as root/folder/inference.* and compare both. The layer must not be used afterwards.

    Both run on the CPU, because a GPU rounds differently, with TF32 to ten bits.

    Args:
        traceable: the layer; hooks on it become part of the program.
        planned: the program's model, size and ratio. If it has a size, height and width are fixed in the program.
        root: the folder that paths in the result start from.
        folder: a folder in `root`; it is created if it does not exist.
        dims: values of all named dimensions except the batch, for the comparison.
        threads: number of threads of the compared programs; at least MIN_THREADS are used.
        converter: converts the program to ONNX too.

    Returns:
        The program with its files and relative differences. oneDNN's may exceed its tolerance: see `is_accurate`.

    Raises:
        ToMeExportError: Paddle cannot trace the layer or paddle2onnx not convert its program, or the program differs
            from eager, or from run to run, by more than TOLERANCE, or FUSED_TOLERANCE in ONNX Runtime.
    """
    return_memory()  # free the previous program's memory
    comparison = _Comparison(traceable, dims)
    fixed = {name: size for name, size in dims.items() if name != "tokens"} if planned.size else {}
    program, params = write_program(traceable, root / folder, fixed, planned.label)
    file = ProgramFile(
        planned.model,
        planned.size,
        planned.ratio,
        program=program.relative_to(root).as_posix(),
        params=params.relative_to(root).as_posix(),
    )
    runtime = PaddleRuntime(threads=max(MIN_THREADS, threads), onednn=False)

    @functools.cache
    def unfused() -> Program:
        """The program without fused operators, which rounds as eager does: eager itself cannot run any more."""
        loaded = replace(runtime, optimize=False).load(ExportedFolder(root), file)
        _check(comparison.first_differences(loaded), TOLERANCE, f"exported {file.label}")
        return loaded

    return_memory()  # each predictor has its own copy of the weights
    file = _compare_in_paddle(file, root, runtime, comparison, unfused)
    if converter is None:
        return file
    unfused.cache_clear()
    return_memory()  # with Paddle 2.6 the conversion needs three times that of the weights
    onnx = converter.convert(program, params, file.label)
    try:
        in_onnx_runtime = OnnxProgram(onnx, OnnxRuntime(threads=runtime.threads))
        parity = comparison.differences(in_onnx_runtime, FUSED_TOLERANCE, unfused)
    except ToMeExportError:
        raise
    except Exception as error:  # of ONNX Runtime, which names the node
        raise ToMeExportError(
            f"the {file.label} was converted to ONNX, but ONNX Runtime cannot run it: {error_summary(error)}"
        ) from error
    _check(parity, FUSED_TOLERANCE, f"{file.label} in ONNX Runtime")
    return replace(file, onnx=onnx.relative_to(root).as_posix(), onnx_parity=parity)


def _compare_in_paddle(
    file: ProgramFile, root: Path, runtime: PaddleRuntime, comparison: "_Comparison", unfused: Callable[[], Program]
) -> ProgramFile:
    """The program with its differences from eager, with Paddle's own kernels and, if they can run it, oneDNN's."""
    parity = comparison.differences(runtime.load(ExportedFolder(root), file), TOLERANCE, unfused)
    _check(parity, TOLERANCE, f"exported {file.label}")
    file = replace(file, parity=parity)
    if file.paddle_files[0].endswith(".json"):
        return file
    return_memory()
    onednn = replace(runtime, onednn=True).load(ExportedFolder(root), file)
    return replace(file, onednn_parity=comparison.differences(onednn, FUSED_TOLERANCE, unfused))


class _Comparison:
    """Compares programs of a layer with its outputs in eager mode, on TRIES random inputs for each batch size.

    The layer runs once for each batch size, now, because tracing may modify it.
    """

    def __init__(self, traceable: Traceable, dims: Mapping[str, int]) -> None:
        random = np.random.RandomState(0)
        self._inputs = {batch: [_random_inputs(traceable, random, dims, batch)] for batch in BATCHES}
        for batch, (inputs,) in self._inputs.items():
            if "timestep" in inputs:
                inputs["timestep"] = paddle.to_tensor([TIMESTEPS[batch]])
        with paddle.no_grad():
            self._eager = {batch: _arrays(traceable.layer(**self._inputs[batch][0])) for batch in BATCHES}
        for batch in BATCHES:
            self._inputs[batch] += [_random_inputs(traceable, random, dims, batch) for _ in range(TRIES - 1)]

    def first_differences(self, program: Program) -> dict[str, float]:
        """The difference from eager on the first input of each batch size."""
        parity = {}
        for batch in BATCHES:
            outputs = _arrays(program(**self._inputs[batch][0]))
            parity[f"batch {batch}"] = relative_difference(outputs, self._eager[batch])
        return parity

    def differences(self, program: Program, tolerance: float, unfused: Callable[[], Program]) -> dict[str, float]:
        """For each batch size the smallest difference over the tries or, if it is larger, that between two runs.

        With many tokens some pair differs in almost every try, so each image must agree in one try, and not all images
        in the same. That try runs again: a data race between threads, which changes a few places and not in every
        run, would otherwise look like another choice of pairs.

        Args:
            unfused: returns the program that the tries after the first are compared with.
        """
        parity = {}
        for batch in BATCHES:
            smallest = np.full(batch, np.inf)
            for number, inputs in enumerate(self._inputs[batch]):
                expected = _arrays(unfused()(**inputs)) if number else self._eager[batch]
                actual = _arrays(program(**inputs))
                differences = image_differences(actual, expected, batch)
                smallest = np.minimum(smallest, differences)
                if smallest.max() <= tolerance:
                    break
            again = image_differences(_arrays(program(**inputs)), actual, batch)
            agrees = differences <= tolerance
            parity[f"batch {batch}"] = float(np.where(agrees, np.fmax(smallest, again), smallest).max())
        return parity


def _check(parity: dict[str, float], tolerance: float, name: str) -> None:
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


def _random_inputs(
    traceable: Traceable, random: np.random.RandomState, dims: Mapping[str, int], batch: int
) -> dict[str, paddle.Tensor]:
    return {field.name: field.random(random, {**dims, "batch": batch}) for field in traceable.inputs}


def _arrays(outputs: Any) -> list[np.ndarray]:
    tensors = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [tensor.numpy() for tensor in tensors]


def write_program(traceable: Traceable, folder: Path, fixed: Mapping[str, int], label: str) -> tuple[Path, Path]:
    """Write the program of a layer as folder/inference.*, without comparing it with the layer: see `save`.

    Args:
        traceable: the layer, which must not be used afterwards.
        folder: it is created if it does not exist.
        fixed: dimensions that have one size in the program; all other named ones are dynamic.
        label: what the layer is, for errors.

    Returns:
        The program, and its weights.

    Raises:
        ToMeExportError: Paddle cannot trace the layer.
    """
    spec = [{field.name: field.spec(fixed) for field in traceable.inputs}]
    try:
        with warnings.catch_warnings(), _without_auto_cast():
            warnings.simplefilter("ignore")  # Paddle's tracer warns about code of Paddle and ppdiffusers
            layer = _ByName(traceable.layer)
            layer.eval()
            static = paddle.jit.to_static(layer, input_spec=spec, full_graph=True)
            paddle.jit.save(static, str(folder / STEM))
    except Exception as error:
        raise ToMeExportError(
            f"Paddle {paddle.__version__} cannot export the {label}: {error_summary(error)}"
        ) from error
    finally:
        _forget_traces()
    # Only needed to continue training; contains pickled objects.
    (folder / f"{STEM}.pdiparams.info").unlink(missing_ok=True)
    params = folder / f"{STEM}.pdiparams"
    program = folder / f"{STEM}.json"
    if program.is_file():  # Paddle 3
        return program, params
    program = folder / f"{STEM}.pdmodel"
    _remove_call_stacks(program)
    return program, params


def _remove_call_stacks(path: Path) -> None:
    """Empty the call stacks that Paddle 2.6 stores in operators: four fifths of a file, with paths of this machine."""
    program = framework_pb2.ProgramDesc.FromString(path.read_bytes())
    for block in program.blocks:
        for operator in block.ops:
            for attribute in operator.attrs:
                if attribute.name == CALL_STACK:
                    attribute.ClearField("strings")
    path.write_bytes(program.SerializeToString())


@contextmanager
def _without_auto_cast() -> Iterator[None]:
    """Trace in float32, as outside of `paddle.amp.auto_cast`.

    A static program that used `auto_cast` leaves its record set for the whole process. With that record, ppdiffusers'
    VAE checks for infinity, which does not convert to ONNX.
    """
    module: Any = importlib.import_module("paddle.amp.auto_cast")
    record = module._g_amp_state_
    module._g_amp_state_ = None
    try:
        yield
    finally:
        module._g_amp_state_ = record


def _forget_traces() -> None:
    """Empty Paddle's records of the parameters of programs that are being traced.

    They are under the `id` of the program, and stay if tracing fails: so do the parameters, and a later program at the
    same address gets them as its own (Paddle 2.6), or crashes (Paddle 3).
    """
    translator = importlib.import_module("paddle.jit.dy2static.program_translator").ProgramTranslator.get_instance()
    records = [translator._params_recorder.params_dict, translator._inplace_map.params_dict]
    if importlib.util.find_spec("paddle.jit.dy2static.parameter_recorder"):  # Paddle 3
        recorder = importlib.import_module("paddle.jit.dy2static.parameter_recorder")
        parameters = recorder._global_parameter_recorder
        records += [parameters.params_dict, parameters.tensor2value, recorder._global_inplace_map.params_dict]
    for record in records:
        record.clear()
