"""Run a program in ONNX Runtime as CUDA graphs: all kernels of a pass are launched at once."""

import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np


class Bound(NamedTuple):
    """A session whose inputs and outputs stay at their places in memory."""

    session: Any
    binding: Any
    inputs: dict[str, Any]  # OrtValues, by name
    outputs: list[Any]  # OrtValues


class CudaGraphs:
    """Passes of one program, each set of input shapes with a session of its own, which has weights of its own.

    ONNX Runtime records the first pass of a session, and later launches what it has recorded. It needs sizes that are
    known beforehand: otherwise it computes shapes on the processor, and refuses to record. A graph reads and writes
    the same memory in each pass, so passes wait for one another.

    Args:
        onnxruntime: the module.
        open_session: opens a session with the option `enable_cuda_graph`, given the sizes of dimensions by name.
        shapes: of the program's inputs, with the names of dimensions that it leaves open.
        index: of the GPU.
        device: where inputs and outputs are.
    """

    def __init__(
        self,
        onnxruntime: ModuleType,
        open_session: Callable[[dict[str, int]], Any],
        shapes: Mapping[str, Sequence[int | str]],
        index: int,
        device: str = "cuda",
    ) -> None:
        self._onnxruntime, self._open, self._shapes = onnxruntime, open_session, shapes
        self._place = device, index
        self._lock = threading.Lock()
        self._bound: dict[tuple, Bound] = {}  # by the sizes of open dimensions

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs of a pass. The first one with these shapes takes longer."""
        sizes = {
            dimension: size
            for name, shape in self._shapes.items()
            for dimension, size in zip(shape, arrays[name].shape, strict=True)
            if isinstance(dimension, str)
        }
        with self._lock:
            key = tuple(sizes.values())
            if key not in self._bound:
                self._bound[key] = self._bind(self._open(sizes), arrays)
            bound = self._bound[key]
            for name, array in arrays.items():
                bound.inputs[name].update_inplace(array)
            bound.session.run_with_iobinding(bound.binding)
            return [output.numpy() for output in bound.outputs]

    def _bind(self, session: Any, arrays: Mapping[str, np.ndarray]) -> Bound:
        """Bind a session's inputs and outputs, whose shapes are known."""
        values, binding = self._onnxruntime.OrtValue, session.io_binding()
        inputs = {name: values.ortvalue_from_numpy(array, *self._place) for name, array in arrays.items()}
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        outputs = []
        for output in session.get_outputs():
            outputs.append(values.ortvalue_from_shape_and_type(output.shape, np.float32, *self._place))
            binding.bind_ortvalue_output(output.name, outputs[-1])
        return Bound(session, binding, inputs, outputs)
