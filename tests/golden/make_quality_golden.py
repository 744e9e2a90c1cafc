"""Record what the PyTorch package of ST-LPIPS computes: write quality.npz. Needs no Paddle.

    pip install --no-deps stlpips-pytorch
    python tests/golden/make_quality_golden.py            (writes quality.npz beside this file)

quality_inputs.py has the images. README.md beside this file describes the result.
"""

import json
import platform
import sys
import types
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from quality_inputs import PAIRS, pair


def channels_first(images, middle, scale):
    return torch.from_numpy((images.astype(np.float32) - middle) / scale).permute(0, 3, 1, 2)


@torch.no_grad()
def st_lpips():
    """{case: [] float}, by stlpips_pytorch; modules that it imports and does not use here are empty."""
    for name, member in (("IPython", "embed"), ("torchsummary", "summary"), ("torchvision", "models")):
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            setattr(sys.modules[name], member, None)
    from stlpips_pytorch import stlpips

    measure = stlpips.LPIPS(net="alex", variant="shift_tolerant", verbose=False)
    scaled = {name: [channels_first(x[None], 127.5, 127.5) for x in pair(name, h, w)] for name, h, w in PAIRS}
    return {name: measure(a, b).numpy().reshape(()) for name, (a, b) in scaled.items()}


def main():
    torch.set_num_threads(1)
    arrays = {f"stlpips/{key}": value for key, value in st_lpips().items()}
    packages = ("torch", "stlpips-pytorch", "numpy")
    made_with = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    np.savez_compressed(Path(__file__).with_name("quality.npz"), made_with=json.dumps(made_with), **arrays)


if __name__ == "__main__":
    main()
