"""PyTorch + diffusers + tomesd as an arm of a benchmark: another interpreter's process, which waits for its turns."""

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from paddle import nn

from ..errors import ToMeError
from . import torch_worker

PACKAGES = ("torch", "diffusers", "tomesd")
LOOK = f"import {', '.join(PACKAGES)}"


def why_not(python: str) -> str | None:
    """Why an interpreter cannot run the worker, in a line; None where it can."""
    try:
        done = subprocess.run([python, "-W", "ignore", "-c", LOOK], capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} cannot be run: {error}"
    if done.returncode == 0:
        return None
    return f"{python}: {(done.stderr.strip().splitlines() or [f'exit status {done.returncode}'])[-1]}"


def versions_of(python: str) -> dict[str, str]:
    """Versions of an interpreter's torch, diffusers and tomesd.

    Raises:
        ToMeError: it cannot tell them; `why_not` says why.
    """
    ask = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {PACKAGES!r}}}))"
    done = subprocess.run([python, "-W", "ignore", "-c", ask], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise ToMeError(f"{python} has not all of {', '.join(PACKAGES)}: {done.stderr.strip()[-200:]}")
    return json.loads(done.stdout)


def torch_weights(model: nn.Layer) -> dict[str, np.ndarray]:
    """A model's parameters as PyTorch has them: a linear layer's weight is [out, in] there, [in, out] in Paddle."""
    linear = {f"{path}.weight" for path, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    return {name: np.ascontiguousarray(x.T) if name in linear else x for name, x in arrays.items()}


class TorchArm:
    """A worker process with one model, in which tomesd merges when asked. A context: leaving it ends the process.

    Args:
        python: the interpreter.
        folder: where weights, inputs and outputs are exchanged.
        unet: a UNet2DConditionModel without merging.
        threads: that PyTorch computes with.

    Raises:
        ToMeError: the process ended, or says what went wrong.
    """

    def __init__(
        self,
        python: str,
        folder: Path,
        unet: nn.Layer,
        threads: int,
    ) -> None:
        self._inputs, self._output = folder / "inputs.npz", folder / "output.npy"
        weights = folder / "weights.npz"
        np.savez(weights, **torch_weights(unet))
        self._process = subprocess.Popen(
            [python, "-W", "ignore", torch_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            text=True,
        )
        try:
            config = {name: value for name, value in dict(unet.config).items() if not name.startswith("_")}
            asked = {"threads": threads, "config": config, "weights": str(weights)}
            self.about = self._ask(do="load", **asked)
        except BaseException:
            self.close()
            raise
        weights.unlink()

    def __enter__(self) -> "TorchArm":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def take(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Run on these from now on: "sample", "timestep", "encoder_hidden_states"; SDXL's others too."""
        np.savez(self._inputs, **inputs)
        self._ask(do="take", inputs=str(self._inputs))

    @property
    def process(self) -> int:
        """The worker's process number."""
        return self._process.pid

    def seconds(self, merging: Mapping[str, Any] | None) -> float:
        """Time one pass, merged by tomesd with these arguments; None merges nothing."""
        return float(self._ask(do="run", merging=merging)["seconds"])

    def output(self, merging: Mapping[str, Any] | None) -> np.ndarray:
        """What one pass predicts; merging as in `seconds`."""
        self._ask(do="run", merging=merging, output=str(self._output))
        return np.load(self._output)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):  # it has ended by itself
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise ToMeError(f"PyTorch's process ended at {request['do']!r}, with status {self._process.wait()}.")
        answer = json.loads(line)
        if "error" in answer:
            raise ToMeError(f"PyTorch's process failed at {request['do']!r}: {answer['error']}")
        return answer
