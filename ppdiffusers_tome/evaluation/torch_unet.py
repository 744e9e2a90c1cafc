"""A UNet in PyTorch with diffusers and tomesd, in the process of another interpreter, for comparison."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from paddle import nn

from ..errors import ToMeConfigError
from . import torch_worker, worker_loop
from .worker_process import WorkerProcess

PACKAGES = ("torch", "diffusers", "tomesd")
VERSIONS = f"""
import {", ".join(PACKAGES)}
import importlib.metadata as metadata, json
print(json.dumps({{name: metadata.version(name) for name in {PACKAGES!r}}}))
"""


def torch_versions(python: str) -> dict[str, str]:
    """The versions of torch, diffusers and tomesd in an interpreter.

    Raises:
        ToMeConfigError: the interpreter cannot be run, or lacks one of them.
    """
    try:
        done = subprocess.run([python, "-W", "ignore", "-c", VERSIONS], capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToMeConfigError(f"--torch-python {python} cannot be used: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ToMeConfigError(f"--torch-python {python} cannot be used: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def torch_weights(model: nn.Layer) -> dict[str, np.ndarray]:
    """A model's parameters as PyTorch has them: a linear layer's weight is [out, in] there, [in, out] in Paddle."""
    linear = {f"{path}.weight" for path, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    return {name: np.ascontiguousarray(x.T) if name in linear else x for name, x in arrays.items()}


class TorchProcess(WorkerProcess):
    """A process with one UNet, in which tomesd merges on request. A context: leaving it ends the process.

    Args:
        python, threads: an interpreter that has PACKAGES, and how many threads it computes with.
        folder: where weights, inputs and outputs are exchanged; it exists.
        unet: a UNet2DConditionModel without merging.
        is_bf16: compute under autocast to bfloat16, which only some CPUs have in hardware.

    Raises:
        WorkerError: the model cannot be built there.
        WorkerEndedError: the process ended.
    """

    def __init__(self, python: str, folder: Path, unet: nn.Layer, threads: int, is_bf16: bool = False) -> None:
        self._inputs, self._output, weights = folder / "inputs.npz", folder / "output.npy", folder / "weights.npz"
        np.savez(weights, **torch_weights(unet))
        config = {name: value for name, value in dict(unet.config).items() if not name.startswith("_")}
        super().__init__(
            [python, "-W", "ignore", worker_loop.__file__, torch_worker.__file__], "PyTorch's process", threads
        )
        try:
            self.versions = self.ask("load", threads=threads, config=config, weights=str(weights), is_bf16=is_bf16)
        except BaseException:
            self.close(timeout=0)
            raise
        finally:
            weights.unlink()

    def set_inputs(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Set the inputs of the next passes: "sample", "timestep", "encoder_hidden_states", and SDXL's others."""
        np.savez(self._inputs, **inputs)
        self.ask("set_inputs", inputs=str(self._inputs))

    def seconds(self, merging: Mapping[str, Any] | None) -> float:
        """Time one pass, merged by tomesd with these arguments; None merges nothing."""
        return float(self.ask("run", merging=merging)["seconds"])

    def output(self, merging: Mapping[str, Any] | None) -> np.ndarray:
        """What one pass predicts; merging as in `seconds`."""
        self.ask("run", merging=merging, output=str(self._output))
        return np.load(self._output)
