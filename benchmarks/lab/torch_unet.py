"""A UNet in PyTorch with diffusers and tomesd, in the process of another interpreter, for comparison."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from paddle import nn

from ppdiffusers_tome import ToMeError

WORKER = Path(__file__).with_name("torch_worker.py")


class TorchProcess:
    """A UNet with the weights of one of Paddle, merged by tomesd on request. A context: leaving it ends the process.

    Args:
        python, threads: an interpreter that has torch, diffusers and tomesd, and how many threads it computes with.
        folder: where weights, inputs and outputs are exchanged; it exists.
        unet: a UNet2DConditionModel without merging.

    Raises:
        ToMeError: the process ended, now or later; what it printed is on stderr.
    """

    def __init__(self, python: str, folder: Path, unet: nn.Layer, threads: int) -> None:
        self._arrays, self._output = folder / "arrays.npz", folder / "output.npy"
        reader, writer = os.pipe()
        self._process = subprocess.Popen(
            [python, "-W", "ignore", WORKER, str(writer)],
            stdin=subprocess.PIPE,
            pass_fds=[writer],
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        os.close(writer)
        self._answers = os.fdopen(reader, encoding="utf-8")
        config = {name: value for name, value in dict(unet.config).items() if not name.startswith("_")}
        np.savez(self._arrays, **torch_weights(unet))
        about = {"threads": threads, "config": config, "weights": str(self._arrays)}
        self.versions: dict[str, str] = self._ask("load", **about)

    def set_inputs(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Set the inputs of the next passes: "sample", "timestep", "encoder_hidden_states", and SDXL's others."""
        np.savez(self._arrays, **inputs)
        self._ask("set_inputs", inputs=str(self._arrays))

    def output(self, merging: Mapping[str, Any] | None) -> np.ndarray:
        """The prediction of one pass, merged by tomesd with these arguments; None merges nothing."""
        self._ask("run", merging=merging, output=str(self._output))
        return np.load(self._output)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._answers.close()

    def _ask(self, action: str, **arguments: Any) -> Any:
        assert self._process.stdin
        try:
            print(json.dumps({"action": action, **arguments}), file=self._process.stdin, flush=True)
            return json.loads(self._answers.readline())
        except (OSError, ValueError) as error:
            status = self._process.wait()
            self.close()
            raise ToMeError(f"PyTorch's process ended with status {status} at {action!r}") from error

    def __enter__(self) -> "TorchProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def torch_weights(model: nn.Layer) -> dict[str, np.ndarray]:
    """A model's parameters as PyTorch has them: a linear layer's weight is [out, in] there, [in, out] in Paddle."""
    linear = {f"{path}.weight" for path, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    return {name: np.ascontiguousarray(x.T) if name in linear else x for name, x in arrays.items()}
