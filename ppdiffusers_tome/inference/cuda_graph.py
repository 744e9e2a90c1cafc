"""Run a session of ONNX Runtime as CUDA graphs: all kernels of a pass are launched at once."""

import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np


class CudaGraphs:
    """Passes of one session with the option `enable_cuda_graph`: a graph for each set of input shapes.

    A graph reads and writes the same memory in each pass, so passes wait for one another.

    Args:
        onnxruntime: the module.
        session: of a program all of whose operators run on the GPU; otherwise ONNX Runtime refuses to record it.
        index: of the GPU.
        device: where inputs and outputs are.
    """

    def __init__(self, onnxruntime: ModuleType, session: Any, index: int, device: str = "cuda") -> None:
        self._onnxruntime, self._session, self._place = onnxruntime, session, (device, index)
        self._lock = threading.Lock()
        self._graphs: dict[tuple, tuple[dict[str, Any], list[Any], Any, Any]] = {}  # by shapes

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs of a pass. The first one with these shapes records the graph."""
        with self._lock:
            shapes = tuple(sorted((name, array.shape) for name, array in arrays.items()))
            if shapes not in self._graphs:
                self._graphs[shapes] = self._bound(arrays, len(self._graphs) + 1)
            inputs, outputs, binding, options = self._graphs[shapes]
            for name, array in arrays.items():
                inputs[name].update_inplace(array)
            self._session.run_with_iobinding(binding, options)
            return [output.numpy() for output in outputs]

    def _bound(self, arrays: Mapping[str, np.ndarray], number: int) -> tuple[dict[str, Any], list[Any], Any, Any]:
        """Inputs and outputs on the GPU, their binding, and the options of passes that use this graph."""
        value = self._onnxruntime.OrtValue.ortvalue_from_numpy
        once = self._options(-1)  # records nothing; it shows the shapes of outputs
        examples = self._session.run(None, dict(arrays), once)
        inputs = {name: value(array, *self._place) for name, array in arrays.items()}
        outputs = [value(example, *self._place) for example in examples]
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, array)
        for described, output in zip(self._session.get_outputs(), outputs, strict=True):
            binding.bind_ortvalue_output(described.name, output)
        return inputs, outputs, binding, self._options(number)

    def _options(self, graph: int) -> Any:
        options = self._onnxruntime.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph))
        return options
