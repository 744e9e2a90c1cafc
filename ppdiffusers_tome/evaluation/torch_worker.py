"""The worker of `torch_unet.py`: a UNet in an interpreter that has torch, diffusers and tomesd, perhaps no Paddle.

`worker_loop.py` runs this file and answers requests with ACTIONS.
"""

import inspect
import platform
import time
from importlib.metadata import version
from typing import Any

import numpy as np


class Worker:
    """A UNet in which tomesd merges on request, with the inputs of its passes."""

    def load(self, report: Any, threads: int, config: dict[str, Any], weights: str, is_bf16: bool) -> dict[str, Any]:
        """Build the UNet from a config and a NumPy archive of weights; the versions of the packages."""
        import torch
        from diffusers import UNet2DConditionModel

        torch.set_num_threads(threads)
        known = inspect.signature(UNet2DConditionModel.__init__).parameters
        unet = UNet2DConditionModel(**{name: value for name, value in config.items() if name in known}).eval()
        with np.load(weights) as arrays:
            unet.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files}, strict=True)
        self._torch, self._unet, self._is_bf16 = torch, unet, is_bf16
        self._merging: dict[str, Any] | None = None
        return {
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "diffusers", "tomesd")},
        }

    def set_inputs(self, report: Any, inputs: str) -> None:
        """Read the inputs of the next passes from a NumPy archive."""
        with np.load(inputs) as arrays:
            self._inputs = {name: self._torch.from_numpy(arrays[name]) for name in arrays.files}

    def run(self, report: Any, merging: dict[str, Any] | None, output: str | None = None) -> dict[str, Any]:
        """One pass: the seconds that it took; with a path its output is written there as a NumPy file."""
        self._merge(merging)
        others = dict(self._inputs)
        # By position, because tomesd does not see keyword arguments.
        positional = [others.pop(name) for name in ("sample", "timestep", "encoder_hidden_states")]
        autocast = self._torch.autocast("cpu", self._torch.bfloat16, self._is_bf16)
        with self._torch.inference_mode(), autocast:
            start = time.perf_counter()
            out = self._unet(*positional, added_cond_kwargs=others or None).sample
            seconds = time.perf_counter() - start
        if output:
            np.save(output, out.float().numpy())
        return {"seconds": seconds}

    def _merge(self, merging: dict[str, Any] | None) -> None:
        if merging == self._merging:
            return
        import tomesd

        tomesd.remove_patch(self._unet)
        self._merging = None
        if merging is not None:
            tomesd.apply_patch(self._unet, **merging)
            for block in self._unet.modules():  # tomesd's old forward reads attributes that newer diffusers may lack
                if type(block).__name__ == "ToMeBlock":
                    for name in ("use_ada_layer_norm", "use_ada_layer_norm_zero", "only_cross_attention"):
                        if not hasattr(block, name):
                            setattr(block, name, False)
        self._merging = merging


_worker = Worker()
ACTIONS = {"load": _worker.load, "set_inputs": _worker.set_inputs, "run": _worker.run}
