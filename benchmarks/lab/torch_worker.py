"""The process of torch_unet.py: a UNet in an interpreter with torch, diffusers and tomesd.

Requests come in on stdin and answers go to the file descriptor of the first argument, one JSON object on each line.
"""

import inspect
import json
import os
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import tomesd
import torch
from diffusers import UNet2DConditionModel


class Worker:
    """A UNet in which tomesd merges on request, with the inputs of its passes."""

    def load(self, threads: int, config: dict[str, Any], weights: str) -> dict[str, str]:
        """Build the UNet from a config and a NumPy archive of weights; the versions of the packages."""
        torch.set_num_threads(threads)
        known = inspect.signature(UNet2DConditionModel.__init__).parameters
        self.unet = UNet2DConditionModel(**{name: value for name, value in config.items() if name in known}).eval()
        with np.load(weights) as arrays:
            self.unet.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files}, strict=True)
        self.merging = None
        return {name: version(name) for name in ("torch", "diffusers", "tomesd")}

    def set_inputs(self, inputs: str) -> None:
        """Read the inputs of the next passes from a NumPy archive."""
        with np.load(inputs) as arrays:
            self.inputs = {name: torch.from_numpy(arrays[name]) for name in arrays.files}

    def run(self, merging: dict[str, Any] | None, output: str) -> None:
        """Write the output of one pass as a NumPy file."""
        if merging != self.merging:
            merge(self.unet, merging)
            self.merging = merging
        others = dict(self.inputs)
        # By position, because tomesd does not see keyword arguments.
        positional = [others.pop(name) for name in ("sample", "timestep", "encoder_hidden_states")]
        with torch.inference_mode():
            np.save(output, self.unet(*positional, added_cond_kwargs=others or None).sample.numpy())


def merge(unet: Any, merging: dict[str, Any] | None) -> None:
    """Merge in a UNet by tomesd with these arguments, in place of those before; None merges nothing."""
    tomesd.remove_patch(unet)
    if merging is None:
        return
    tomesd.apply_patch(unet, **merging)
    for block in unet.modules():  # tomesd's old forward reads attributes that newer diffusers may lack
        if type(block).__name__ == "ToMeBlock":
            for name in ("use_ada_layer_norm", "use_ada_layer_norm_zero", "only_cross_attention"):
                if not hasattr(block, name):
                    setattr(block, name, False)


if __name__ == "__main__":
    worker = Worker()
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as answers:
        for line in sys.stdin:
            request = json.loads(line)
            answer = getattr(worker, request.pop("action"))(**request)
            print(json.dumps(answer), file=answers, flush=True)
