"""Times a UNet when it is told to; its interpreter has PyTorch, diffusers and tomesd, and perhaps no Paddle.

One request a line on stdin, one answer a line on stdout, each a JSON object. Between requests the process waits
in a read and uses no processor. Requests: `load`, `take` and `run`; the end of stdin ends the process. An answer with
"error" tells what went wrong.
"""

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
    """A UNet in which tomesd merges where it is asked, with the inputs of its runs."""

    def load(self, threads: int, config: dict[str, Any], weights: str) -> dict[str, Any]:
        """Build it from a config and a NumPy archive of weights."""
        import numpy as np
        import torch
        from diffusers import UNet2DConditionModel

        torch.set_num_threads(threads)
        known = inspect.signature(UNet2DConditionModel.__init__).parameters
        unet = UNet2DConditionModel(**{name: value for name, value in config.items() if name in known}).eval()
        with np.load(weights) as arrays:
            unet.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files}, strict=True)
        self._torch, self._unet = torch, unet
        self._merging: dict[str, Any] | None = None
        return {
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "diffusers", "tomesd")},
        }

    def take(self, inputs: str) -> dict[str, Any]:
        """Read the inputs of the runs to come from a NumPy archive."""
        import numpy as np

        with np.load(inputs) as arrays:
            self._inputs = {name: self._torch.from_numpy(arrays[name]) for name in arrays.files}
        return {}

    def run(self, merging: dict[str, Any] | None, output: str | None = None) -> dict[str, Any]:
        """One pass, merged as asked; the seconds it took, and its output as a NumPy file if a path is given."""
        self._merge(merging)
        given = dict(self._inputs)
        # By position, for tomesd does not see keywords.
        positional = [given.pop(name) for name in ("sample", "timestep", "encoder_hidden_states")]
        with self._torch.inference_mode():
            start = time.perf_counter()
            out = self._unet(*positional, added_cond_kwargs=given or None).sample
            seconds = time.perf_counter() - start
        if output:
            import numpy as np

            np.save(output, out.numpy())
        return {"seconds": seconds}

    def _merge(self, merging: dict[str, Any] | None) -> None:
        if merging == self._merging:
            return
        import tomesd

        tomesd.remove_patch(self._unet)
        self._merging = None
        if merging is not None:
            tomesd.apply_patch(self._unet, **merging)
            for block in self._unet.modules():  # tomesd's copy of an old forward reads what newer diffusers may lack
                if type(block).__name__ == "ToMeBlock":
                    for name in ("use_ada_layer_norm", "use_ada_layer_norm_zero", "only_cross_attention"):
                        if not hasattr(block, name):
                            setattr(block, name, False)
        self._merging = merging


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
