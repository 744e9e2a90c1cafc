"""A network that measures pictures, run by Paddle Inference: on a CPU several times as fast as eager Paddle."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

from ...inference.programs import Input, Traceable
from ...inference.runtime import Predictor, Runtime
from ...inference.tracing import right_for_onednn, save


def compile_network(
    network: nn.Layer, inputs: tuple[Input, ...], sizes: Mapping[str, int], what: str
) -> Callable[..., list[np.ndarray]]:
    """Turn a network into a function of NumPy arrays, after comparing the two.

    Args:
        network: in evaluation mode; of no more use afterwards.
        inputs: what it takes, by name.
        sizes: of the named dimensions but the batch, for the comparison; they stay dynamic.
        what: the network's name for messages.

    Returns:
        A function from the inputs, by name, to the outputs. Threads are those of OMP_NUM_THREADS, or all cores.

    Raises:
        ToMeExportError: the program differs from the network.
    """
    threads = int(os.environ.get("OMP_NUM_THREADS") or Runtime().cores())
    with tempfile.TemporaryDirectory(prefix="network_") as folder:
        saved = save(Traceable(network, inputs), Path(folder) / "program", {}, sizes, what, threads)
        runtime = Runtime(threads=threads, onednn=right_for_onednn(saved.onednn_parity))
        predictor = Predictor(saved.program, saved.params, runtime)

    def run(**given: np.ndarray) -> list[np.ndarray]:
        return [found.numpy() for found in predictor(**{name: paddle.to_tensor(x) for name, x in given.items()})]

    return run
