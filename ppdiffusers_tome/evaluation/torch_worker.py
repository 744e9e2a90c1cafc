"""Times a UNet when it is told to; its interpreter has PyTorch, diffusers and tomesd, and perhaps no Paddle.

One request a line on stdin, one answer a line on stdout, each a JSON object. Between requests the process waits
in a read and uses no processor. Requests: `load`, `take` and `run`; the end of stdin ends the process. An answer with
"error" tells what went wrong.
"""

import copy
import inspect
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any


class Models:
    """A plain UNet and its copy that tomesd merges in, with the inputs of their runs."""

    def load(self, threads: int, config: dict[str, Any], weights: str, merging: dict[str, Any]) -> dict[str, Any]:
        """Build both from a config and a NumPy archive of weights."""
        import numpy as np
        import tomesd
        import torch
        from diffusers import UNet2DConditionModel

        torch.set_num_threads(threads)
        known = inspect.signature(UNet2DConditionModel.__init__).parameters
        unet = UNet2DConditionModel(**{name: value for name, value in config.items() if name in known}).eval()
        with np.load(weights) as arrays:
            unet.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files}, strict=True)
        merged = copy.deepcopy(unet)
        tomesd.apply_patch(merged, **merging)
        blocks = [layer for layer in merged.modules() if type(layer).__name__ == "ToMeBlock"]
        for block in blocks:  # read by tomesd's copy of an old forward; newer diffusers may lack them
            for name in ("use_ada_layer_norm", "use_ada_layer_norm_zero", "only_cross_attention"):
                if not hasattr(block, name):
                    setattr(block, name, False)
        self._torch, self._models = torch, {"plain": unet, "tomesd": merged}
        return {
            "blocks": len(blocks),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "diffusers", "tomesd")},
        }

    def take(self, inputs: str) -> dict[str, Any]:
        """Read the inputs of the runs to come from a NumPy archive; by position, for tomesd does not see keywords."""
        import numpy as np

        with np.load(inputs) as arrays:
            self._inputs = [self._torch.from_numpy(arrays[name]) for name in ("sample", "timestep", "text")]
        return {}

    def run(self, model: str, output: str | None = None) -> dict[str, Any]:
        """One pass; the seconds it took, and its output as a NumPy file if a path is given."""
        with self._torch.inference_mode():
            start = time.perf_counter()
            out = self._models[model](*self._inputs).sample
            seconds = time.perf_counter() - start
        if output:
            import numpy as np

            np.save(output, out.numpy())
        return {"seconds": seconds}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print does not get between the answers
    models = Models()
    actions: dict[str, Callable[..., dict[str, Any]]]
    actions = {"load": models.load, "take": models.take, "run": models.run}
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = actions[request.pop("do")](**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
